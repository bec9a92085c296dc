"""How long each measurement may take: the full figures, or a few seconds to see that everything runs."""

from msgspec import Struct


class Effort(Struct, frozen=True, kw_only=True):
    """The sizes of every measurement. Where something depends on the size of a batch, it is a dict by that size."""

    rounds: int
    commit_runs: int
    turns_per_round: dict[int, int]
    stored_runs: tuple[int, ...]
    growth_turns_per_round: int
    deliveries_per_round: dict[int, int]
    parked_runs: int
    more_parked_runs: int
    claims: dict[int, int]
    history_lengths: tuple[int, ...]
    core_events: int
    engine_runs: tuple[int, ...]
    engine_rounds: int
    fleet_runs: int
    engine_sequential: int
    engine_long_steps: int
    recovered_runs: int
    lease_ms: int
    idle_s: float
    signalled_runs: int
    postgres_finished: int
    analysts_s: float
    streams: int
    stream_rounds: int
    stream_runs: int
    plan_steps: int
    retention_runs: int
    retention_s: float
    search_runs: int


FULL = Effort(
    rounds=15,
    commit_runs=5_000,
    turns_per_round={1: 200, 10: 1_000, 100: 4_000, 1_000: 6_000},
    stored_runs=(1_000, 10_000, 100_000),
    growth_turns_per_round=2_000,
    deliveries_per_round={1: 300, 10: 2_000, 100: 5_000},
    parked_runs=10_000,
    more_parked_runs=100_000,
    claims={1: 2_000, 100: 200},
    history_lengths=(10, 1_000, 50_000),
    core_events=50_000,
    engine_runs=(2_000, 20_000),
    engine_rounds=5,
    fleet_runs=4_000,
    engine_sequential=100,
    engine_long_steps=50_000,
    recovered_runs=500,
    lease_ms=10_000,
    idle_s=10.0,
    signalled_runs=2_000,
    postgres_finished=1_000_000,
    analysts_s=60.0,
    streams=1_000,
    stream_rounds=5,
    stream_runs=2_000,
    plan_steps=10_000,
    retention_runs=100_000,
    retention_s=20.0,
    search_runs=1_000_000,
)

QUICK = Effort(
    rounds=2,
    commit_runs=1_000,
    turns_per_round={1: 20, 10: 50, 100: 200, 1_000: 1_000},
    stored_runs=(100, 300, 1_000),
    growth_turns_per_round=100,
    deliveries_per_round={1: 20, 10: 50, 100: 200},
    parked_runs=300,
    more_parked_runs=600,
    claims={1: 50, 100: 2},
    history_lengths=(10, 100, 1_000),
    core_events=2_000,
    engine_runs=(300,),
    engine_rounds=1,
    fleet_runs=200,
    engine_sequential=10,
    engine_long_steps=1_000,
    recovered_runs=20,
    lease_ms=1_000,
    idle_s=1.0,
    signalled_runs=300,
    postgres_finished=500,
    analysts_s=2.0,
    streams=50,
    stream_rounds=1,
    stream_runs=300,
    plan_steps=400,
    retention_runs=2_000,
    retention_s=0.6,
    search_runs=3_000,
)
