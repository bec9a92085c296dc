"""The benchmark runs, and writes down every figure that it promises."""

from __future__ import annotations

import gc
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from bench import compare, instructions, opcodes, paths
from bench.__main__ import NAMES

ROOT = Path(__file__).parents[2]

SHARES = 4
"""In so many processes everything is measured, so that none of the tests takes long."""

SEARCHES = (
    "equality, few; equality, many; range, few; range, many; prefix, few; prefix, many; ordered; range, ordered; "
    "few, ordered by another; many, ordered by another; status; status and attribute; rare status and range; "
    "status, ordered; rare workflow; rare workflow, attribute; time of end; ordered by time of end; all"
).split("; ")
MAY_BE_ZERO = ("MB", "CPU ms/step by tenths", "found", "2nd", "found of a tenant", "2nd of a tenant")
FIGURES = {
    "search": (
        {f"{store} {search}" for store in ("SQLite", "PostgreSQL") for search in SEARCHES},
        {"found", "ms", "2nd", "count", "found of a tenant", "ms of a tenant", "2nd of a tenant", "count of a tenant"},
    ),
    "fleet": (
        {
            f"{store}, {fleet}"
            for store in ("SQLite", "PostgreSQL")
            for fleet in ("starter is the node", "starter and 1 node", "starter and 2 nodes")
        },
        {
            *("runs/s", "CPU µs/run", "results fetched/s", "signals/s", "CPU µs/signal"),
            *("signal to result, median ms", "p99 ms"),
        },
    ),
    "commit": ({"batch 1", "batch 10", "batch 100", "batch 1000"}, {"turns/s", "floor turns/s", "ratio"}),
    "open": ({"10 open", "100 open", "1,000 open", "10,000 open"}, {"µs/turn", "growth", "µs/commit"}),
    "growth": ({"100 runs", "300 runs", "1,000 runs"}, {"µs/turn", "growth", "floor µs/turn", "floor growth"}),
    "deliver": ({"batch 1", "batch 10", "batch 100"}, {"signals/s"}),
    "claim": ({"batch 1", "batch 100"}, {"p50 ms", "p99 ms"}),
    "history": ({"10 events", "100 events", "1,000 events"}, {"load ms", "read ms", "events/s"}),
    "engine": ({"300 runs of 3 steps", "one run of 10 steps at a time"}, set()),
    "signals": ({"300 runs at once", "one at a time"}, {"CPU µs/signal"}),
    "postgres": ({"0 finished runs", "500 finished runs"}, {"runs/s", "median ms/step"}),
    "analysts": ({"no long transaction", "3 open for 2 s"}, {"runs/s", "p50 ms", "p99 ms"}),
    "streams": ({"50 of waiting runs", "50, 10 of them of lists"}, {"runs/s", "without", "ratio"}),
    "parked": (
        {f"{count} runs, at most {cached} cached" for count in (300, 600) for cached in ("5,000", "1")},
        {"resident KB", "KB/run", "idle CPU %"},
    ),
    "recovery": ({"20 runs in flight"}, {"lease s", "all finished after s", "completed"}),
    "flows": ({"3 steps as code", "3 steps as flow"}, {"runs/s", "of code", "CPU ms/run", "CPU of code"}),
    "paths": ({"all paths on", *paths.OFF}, {"runs/s", "of all", "CPU of all"}),
    "long": ({"1,000 steps"}, {"steps/s", "live turn ms", "turn with replay ms"}),
    "artifacts": (
        {"before", "an artifact of 10 MB", *(f"{count} results of 1 MB" for count in (8, 16, 24, 32, 40))},
        {"resident MB"},
    ),
    "plans": (
        {f"{shape}, 400 steps" for shape in ("chain", "fan-out", "layered")},
        {"ms/step", "first tenth, CPU", "last tenth, CPU", "CPU ms/step by tenths", "MB"},
    ),
    "retention": ({"SQLite", "PostgreSQL"}, {"runs deleted/s", "p99 ms alone", "p99 ms beside", "ratio"}),
    "core": ({"decide, apply commands and fold, one step at a time", "fold of 2,001 events"}, {"events/s"}),
}


def bench(*options: str) -> subprocess.CompletedProcess[str]:
    """Run the benchmark."""
    command = [sys.executable, "-m", "bench", *options]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=600, check=False)


def numbers(values: Any) -> list[float]:
    """Return every number in a structure of dicts and lists; those that may be 0 are left out."""
    if isinstance(values, str):
        return []
    if isinstance(values, int | float):
        return [values]
    return [number for value in _parts(values) for number in numbers(value)]


def _parts(values: Any) -> list[Any]:
    return [values[key] for key in values if key not in MAY_BE_ZERO] if isinstance(values, dict) else list(values)


def test_every_measurement_is_known_here() -> None:
    assert set(NAMES) == FIGURES.keys()


@pytest.mark.slow
@pytest.mark.parametrize("share", range(SHARES))
def test_every_figure_is_measured_and_positive(tmp_path: Path, share: int) -> None:
    chosen = sorted(FIGURES)[share::SHARES]
    only = [option for name in chosen for option in ("--only", name)]
    done = bench("--quick", *only, "--json", str(tmp_path / "bench.json"), "--dir", str(tmp_path), "--allow-memory")

    assert done.returncode == 0, done.stderr
    results = json.loads((tmp_path / "bench.json").read_text(encoding="utf-8"))["results"]
    assert results.keys() == set(chosen)
    for name in chosen:
        labels, columns = FIGURES[name]
        assert results[name].keys() == labels
        assert all(columns <= row.keys() for row in results[name].values())
        assert f"{name}: " in done.stdout
    assert all(number > 0 for number in numbers(results))
    assert [file.name for file in tmp_path.iterdir()] == ["bench.json"], "nothing is left behind"


def test_json_goes_to_stdout_alone_and_one_measurement_can_be_chosen() -> None:
    done = bench("--quick", "--only", "core", "--json", "-")

    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["results"].keys() == {"core"}


@pytest.mark.skipif(not Path("/dev/shm").is_dir(), reason="this system has no file system in memory to refuse")
def test_a_file_system_in_memory_is_refused() -> None:
    done = bench("--quick", "--only", "core", "--dir", "/dev/shm")

    assert done.returncode == 2
    assert "in memory" in done.stderr


@pytest.mark.parametrize("kind", ["steps", "signals"])
async def test_what_instructions_are_counted_of_runs_to_its_end(kind: str) -> None:
    await instructions.load(kind, "memory://", 1)


@pytest.mark.parametrize("kind", compare.LOADS)
async def test_what_two_checkouts_are_compared_by_runs_to_its_end(kind: str, tmp_path: Path) -> None:
    thresholds = gc.get_threshold()
    try:
        row = await compare.load(kind, f"sqlite:///{tmp_path}/runs.db", 20, compare.TUNED)
    finally:
        gc.set_threshold(*thresholds)
    assert row["runs/s"] > 0
    assert row["CPU µs/run"] > 0


@pytest.mark.process
def test_a_run_takes_no_more_of_the_interpreter_than_before() -> None:
    """A feature that a run does not use adds next to nothing."""
    counts = opcodes.measured(opcodes.OWN, 50)
    assert counts.total() < 21_300, counts.most_common(20)
