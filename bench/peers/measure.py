"""One slot of the comparison: one contender in one shape, on an empty store, with everything that is measured of it."""

import time
from collections import Counter
from pathlib import Path
from typing import Any

from msgspec import Struct, field

from bench.peers import processes
from bench.peers.contenders import ONE, Contender, Fleet, place
from bench.peers.load import LEASE_S
from bench.peers.processes import Failed

STEPS, LONG = 10, 100
"""Steps of the runs that are taken one at a time."""


class Effort(Struct, frozen=True, kw_only=True):
    """How long each part takes, and how much of it there is."""

    warm_s: float = 1.0
    runs_s: float = 2.5
    steps_s: float = 1.5
    long_steps: int = LONG
    probes: int = 60
    probes_s: float = 2.0
    parked_s: float = 2.5
    """Runs are parked for the signals: so many as finish in this time, within the bounds."""

    parked_bounds: tuple[int, int] = (100, 4_000)
    idle_s: float = 2.0
    held: int = 100
    patience_s: float = 90.0


FULL = Effort()
SHORT = Effort(
    warm_s=0.1,
    runs_s=0.4,
    steps_s=0.1,
    long_steps=20,
    probes=5,
    probes_s=0.3,
    parked_bounds=(20, 20),
    idle_s=0.2,
    held=5,
)


class Figures(Struct):
    """What was measured of a contender in one shape, over all rounds."""

    runs_s: list[float] = field(default_factory=list)
    step_ms: list[float] = field(default_factory=list)
    long_step_ms: list[float] = field(default_factory=list)
    signal_ms: list[float] = field(default_factory=list)
    signals_s: list[float] = field(default_factory=list)
    kb_per_parked: list[float] = field(default_factory=list)
    idle_cpu: list[float] = field(default_factory=list)
    recovered_s: list[float] = field(default_factory=list)
    interrupted_again: list[int] = field(default_factory=list)
    """Steps that were under way at the kill and were carried out once more, as they must be, of all that were."""

    doubled: list[int] = field(default_factory=list)
    """Steps that had finished before the kill and were carried out once more."""

    lost: list[int] = field(default_factory=list)
    parked: list[int] = field(default_factory=list)
    stolen: list[float] = field(default_factory=list)
    """The share of the machine's time that others took, in per cent."""

    failures: list[str] = field(default_factory=list)


def slot(
    contender: Contender,
    shape: str,
    figures: Figures,
    effort: Effort,
    folder: Path,
    postgres: tuple[str, int],
    number: int,
) -> None:
    """Measure it once, and add the figures; the recovery only the first time."""
    stolen, all_time = processes.stolen_s()
    folder.mkdir()
    try:
        with place(contender, folder, *postgres, number) as at:
            fleet = Fleet(contender, at)
            try:
                fleet.open(shape)
                _speed(fleet, figures, effort, at.servers, at.database)
                recovers = (
                    shape == ONE or contender.module != "dbos"
                )  # whose executors do not take over from each other
                if recovers and not figures.recovered_s:
                    fleet.kill()
                    _recovery(fleet, shape, figures, effort, folder)
            finally:
                fleet.kill()
    except Failed as failure:
        figures.failures.append(str(failure))
    stolen_now, all_time_now = processes.stolen_s()
    figures.stolen.append(100 * (stolen_now - stolen) / max(all_time_now - all_time, 0.01))


def _speed(fleet: Fleet, figures: Figures, effort: Effort, servers: list[int], database: list[int]) -> None:
    def ask(do: str, **arguments: Any) -> dict[str, Any]:
        assert fleet.starter is not None
        return fleet.starter.ask(do, effort.patience_s, **arguments)

    figures.runs_s.append(ask("runs", warm_s=effort.warm_s, seconds=effort.runs_s, steps=3)["runs_s"])
    figures.step_ms.append(ask("step_ms", seconds=effort.steps_s, steps=STEPS)["ms"])
    figures.long_step_ms.append(ask("step_ms", seconds=0.0, steps=effort.long_steps)["ms"])
    ask("park", count=effort.probes)
    figures.signal_ms += ask("signal_ms", count=effort.probes, seconds=effort.probes_s)["ms"]
    ask("signals")  # those that were left
    before = processes.memory_kb([*fleet.pids, *servers])
    least, most = effort.parked_bounds
    count = max(least, min(most, int(figures.runs_s[-1] * effort.parked_s)))
    ask("park", count=count)
    figures.parked.append(count)
    figures.kb_per_parked.append((processes.memory_kb([*fleet.pids, *servers]) - before) / count)
    used, began = processes.cpu_s([*fleet.pids, *servers, *database]), time.monotonic()
    time.sleep(effort.idle_s)
    used = processes.cpu_s([*fleet.pids, *servers, *database]) - used
    figures.idle_cpu.append(100 * used / (time.monotonic() - began))
    figures.signals_s.append(ask("signals")["signals_s"])


def _recovery(fleet: Fleet, shape: str, figures: Figures, effort: Effort, folder: Path) -> None:
    """Kill with SIGKILL while every run is in its second step; alone, start again; apart, the other worker goes on."""
    ledger = folder / "ledger"
    ledger.unlink(missing_ok=True)
    fleet.open(shape, hold=True, workers=1)
    assert fleet.starter is not None
    run_ids = fleet.starter.ask("hold", effort.patience_s, count=effort.held)["run_ids"]
    if shape == ONE:
        fleet.kill()
        killed_at = time.monotonic()
        fleet.open(shape)
    else:
        victim = fleet.workers.pop()
        fleet.open(shape, workers=1)
        victim.kill()
        killed_at = time.monotonic()
    assert fleet.starter is not None
    finished = fleet.starter.ask("finish", effort.patience_s + LEASE_S, run_ids=run_ids)["finished"]
    figures.recovered_s.append(time.monotonic() - killed_at)
    figures.lost.append(len(run_ids) - finished)
    times = Counter(ledger.read_text(encoding="utf-8").splitlines())
    of_second = [count for line, count in times.items() if line.startswith("2 ")]
    figures.interrupted_again.append(sum(count - 1 for count in of_second))
    figures.doubled.append(sum(count - 1 for line, count in times.items() if not line.startswith("2 ")))
