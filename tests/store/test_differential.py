"""Every store answers as the reference model does, whatever it is asked, and shows the same contents.

`TEST_SEED` fixes the first seed, and `TEST_SEQUENCES` how many sequences are tried: a few hundred make a good
night's run. Without a seed, each run of the tests tries other ones.
"""

from __future__ import annotations

import os
import random
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from itertools import count, cycle, islice
from pathlib import Path
from typing import Any, cast

import pytest
from obstore.store import MemoryStore as ObjectsInMemory

from holdfast.limits import Limits
from holdfast.store.memory import MemoryStore
from holdfast.store.port import Store
from holdfast.store.s3 import S3Store
from holdfast.store.s3.bucket import Bucket
from holdfast.store.sqlite import SqliteStore
from holdfast.testing import VirtualClock
from tests.s3_server import Endpoint
from tests.store.differential import LIMITS, Subject, World
from tests.store.s3_tampering import lose_record as lose_s3_record
from tests.store.sqlite_tampering import lose_record

STEPS = 150
SEQUENCES = int(os.environ.get("TEST_SEQUENCES", "15"))
"""How many sequences are tried at least; more, if fewer do not reach everything."""

SOON = (280, 23, 296, 33, 168, 245, 286, 16, 111, 404, 96, 102, 180)
"""Seeds that reach everything together. If the sequences change, others are looked for."""

MOST_SEQUENCES = 1_000
"""When what was not reached counts as unreachable."""

MakeSubject = Callable[[Path, VirtualClock, Limits], Awaitable[Subject]]


async def make_memory(folder: Path, clock: VirtualClock, limits: Limits) -> Subject:
    store = MemoryStore(clock, limits)

    def lose(run_id: str, name: str, signal_id: str) -> None:
        if run_id in store._runs:
            store._runs[run_id].acceptances.pop((name, signal_id), None)

    return Subject("memory", store, lose)


async def make_sqlite(folder: Path, clock: VirtualClock, limits: Limits) -> Subject:
    path = folder / "one.db"
    store = await SqliteStore.open(path, clock=clock, limits=limits)
    return Subject("sqlite", store, lambda *scope: lose_record(path, *scope))


async def make_shared_sqlite(folder: Path, clock: VirtualClock, limits: Limits) -> Subject:
    path = folder / "shared.db"
    ways = [await SqliteStore.open(path, clock=clock, limits=limits) for _ in range(2)]
    return Subject("shared sqlite", cast("Store", TakingTurns(ways)), lambda *scope: lose_record(path, *scope))


async def make_s3(folder: Path, clock: VirtualClock, limits: Limits, objects: Any = None) -> Subject:
    """Two processes on one bucket, each asked in turn."""
    objects = objects or ObjectsInMemory()
    ways = [S3Store(Bucket(objects), clock, limits) for _ in range(2)]
    return Subject("s3", cast("Store", BucketsTakingTurns(ways)), partial(lose_s3_record, ways[0]))


class TakingTurns:
    """Several ways to one store, as several processes have them: each call takes the next one."""

    def __init__(self, ways: Sequence[Store]) -> None:
        self._ways = ways
        self._next = cycle(ways)

    def __getattr__(self, verb: str) -> Any:
        return getattr(next(self._next), verb)

    async def migrate(self) -> int:
        return max([await way.migrate() for way in self._ways])

    async def close(self) -> None:
        for way in self._ways:
            await way.close()


class BucketsTakingTurns(TakingTurns):
    """Several processes on one bucket. One that has not looked knows another's lease as shorter than it is."""

    async def next_due(self, *arguments: Any) -> Any:
        way = next(self._next)
        assert isinstance(way, S3Store)
        await way._mirror.fetch_nodes(list(way._mirror.nodes), await way.now())
        return await way.next_due(*arguments)


SUBJECTS: tuple[MakeSubject, ...] = (make_memory, make_sqlite, make_shared_sqlite)
"""The reference first, then everybody who must answer as it does."""

MUST_BE_REACHED = {
    "create": """created; created and claimed; created with admission; created with admission and claimed;
        NewRun Overloaded; NewRun Existing; NewRun InvalidInput; NewRun Conflict;
        NewRun Conflict of run ids; id Created; id Existing reused; id is another by now; id refused: Conflict;
        raised LeaseExpired; raised InvalidInput""",
    "deliver": """SignalRequest Accepted; SignalRequest Accepted again; SignalRequest Duplicate;
        SignalRequest Duplicate after the end; SignalRequest InvalidInput; SignalRequest PayloadTooLarge;
        SignalRequest NotFound; SignalRequest Conflict; SignalRequest SignalAcceptanceIndeterminate;
        SignalRequest RunTerminal; SignalRequest NotWaiting; SignalRequest RateLimited;
        Message Accepted; Message Duplicate; Message InvalidInput; Message NotFound; Message RunTerminal;
        Message Conflict;
        raised InvalidInput""",
    "commit": """committed; committed again; queued for admission; conflict no such run; conflict version;
        conflict epoch;
        conflict finished; conflict event exists; conflict task is open;
        conflict cannot be stored; conflict unseen; raised InvalidInput""",
    "admit": "STARTED; STARTED and claimed; raised LeaseExpired; raised InvalidInput",
    "claim": "free; own; orphan; raised LeaseExpired; raised InvalidInput",
    "renew": "something; raised InvalidInput; raised NodeSuperseded",
    "release": "something; nothing",
    "next_due": "something; nothing",
    "find_orphaned": "something; nothing; raised InvalidInput",
    "find_nodes": "something; nothing",
    "hand_over": "something; nothing; raised InvalidInput",
    "acquire_lock": "something; nothing; raised InvalidInput",
    "release_lock": "something; nothing; raised InvalidInput",
    "find_locks": "something; nothing",
    "put_bulletins": "something; nothing; raised InvalidInput",
    "find_bulletins": "something; nothing",
    "commit_schedule": "something; raised InvalidInput; raised Conflict",
    "delete_schedule": "something; nothing",
    "find ScheduleQuery": "something; nothing",
    "acquire_jobs": "first; due; again; raised InvalidInput",
    "acquire_limited_jobs": "first; again; later; raised InvalidInput",
    "append_streams": "appended; appended to a full stream; Conflict; RunTerminal; NotFound; InvalidInput",
    "read_streams": "something; nothing; begun anew; raised InvalidInput",
    "find PlaceQuery": "something; nothing; raised InvalidInput",
    "find StreamQuery": "something; nothing; raised InvalidInput",
    "heartbeat": "job kept; job lost; own kept; own lost; raised InvalidInput",
    "load": "something; raised InvalidInput",
    "find RunQuery": "something; nothing; raised InvalidInput",
    "find WaitQuery": "something; nothing; raised InvalidInput",
    "find EventQuery": "something; nothing; raised InvalidInput",
    "find MailboxQuery": "something; nothing; raised InvalidInput",
    "find TaskQuery": "something; nothing; raised InvalidInput",
    "find FinishedRunQuery": "something; nothing; raised InvalidInput",
    "find DeadLetterQuery": "something; nothing; raised InvalidInput",
    "settle_dead_letters": "requeue; drop; NotFound; Conflict; RunTerminal; InvalidInput; raised InvalidInput",
    "read_events": "something; nothing; raised InvalidInput",
    "purge": """runs; events; signals; tasks; runtime_states; acceptance_records; dead_letters; stale_runs;
        has_more; dry run; raised InvalidInput""",
    "put_sink": "something; raised Conflict; raised InvalidInput",
    "remove_sink": "something; nothing; raised InvalidInput",
    "replay_outbox": "something; raised NotFound",
    "raise_alerts": "something; nothing",
    "stats": "something; raised StoreUnavailable",
    "now": "something; raised StoreUnavailable",
    "migrate": "something",
}
"""Every verb with its success and its documented refusals, as `World.reached` counts them."""


@pytest.mark.slow
@pytest.mark.contract("STO-1", "PRJ-4", "EVT-1", "OWN-1", "SIG-5", "FMT-2", "INV")
async def test_all_stores_answer_alike_whatever_they_are_asked(tmp_path: Path) -> None:
    first = int(os.environ.get("TEST_SEED", "0")) or random.SystemRandom().randrange(1, 10**9)
    reached: Counter[str] = Counter()
    for seed in await seeds_that_reach_all(first, tmp_path):
        folder = tmp_path / str(seed)
        folder.mkdir()
        reached += await run_sequence(seed, folder, SUBJECTS)
    assert not missing(reached), f"from seed {first} on, these were never reached: {missing(reached)}"


@pytest.mark.slow
@pytest.mark.contract("STO-1", "EVT-1", "OWN-1", "SIG-5", "INV")
async def test_a_bucket_answers_as_the_reference_does(tmp_path: Path) -> None:
    first = int(os.environ.get("TEST_SEED", "0")) or 501
    for seed in range(first, first + max(1, SEQUENCES // 5)):
        folder = tmp_path / str(seed)
        folder.mkdir()
        await run_sequence(seed, folder, (make_memory, make_s3))


@pytest.mark.slow
@pytest.mark.contract("STO-1", "EVT-1", "OWN-1", "SIG-5", "INV")
async def test_a_bucket_of_a_real_server_answers_as_the_reference_does(tmp_path: Path, seaweed: Endpoint) -> None:
    bucket = seaweed.make_bucket()
    for seed in range(1, 1 + int(os.environ.get("TEST_S3_SEQUENCES", "1"))):
        folder = tmp_path / str(seed)
        folder.mkdir()
        objects = seaweed.store(bucket, prefix=f"sequence/{seed}", retry_config={"max_retries": 0})
        await run_sequence(seed, folder, (make_memory, partial(make_s3, objects=objects)))


async def seeds_that_reach_all(first: int, folder: Path) -> list[int]:
    """Return seeds whose sequences reach everything together, as the reference alone shows in a tenth of the time."""
    reached: Counter[str] = Counter()
    chosen: list[int] = []
    for seed in (*SOON, *range(first, first + MOST_SEQUENCES)):
        if not missing(reached):
            break
        alone = await run_sequence(seed, folder, SUBJECTS[:1])
        if len(missing(reached + alone)) < len(missing(reached)):
            chosen.append(seed)
            reached += alone
    others = (seed for seed in count(first) if seed not in chosen)
    return [*chosen, *islice(others, max(0, SEQUENCES - len(chosen)))]


def missing(reached: Counter[str]) -> list[str]:
    """What must be reached and was not."""
    wanted = [f"{verb}: {end.strip()}" for verb, ends in MUST_BE_REACHED.items() for end in ends.split(";")]
    return [outcome for outcome in wanted if not reached[outcome]]


async def run_sequence(seed: int, folder: Path, makers: Sequence[MakeSubject]) -> Counter[str]:
    clock = VirtualClock()
    subjects = [await make(folder, clock, LIMITS) for make in makers]
    try:
        for subject in subjects:
            await subject.store.migrate()
        world = World(seed, clock, subjects)
        await world.run(STEPS)
    except Exception as problem:
        problem.add_note(f"to see it again: TEST_SEED={seed} pytest tests/store/test_differential.py")
        raise
    finally:
        for subject in subjects:
            await subject.store.close()
    return world.reached
