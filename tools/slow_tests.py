"""Which tests take too long for `make quick`, as measured: `python -m tools.slow_tests` writes `tests/slow_tests.txt`.

Run it on an idle machine. It plays every test that needs no server, browser or process, and lists those that need
more than CPU_S of processor time, or take more than WALL_S in all. `tests/kinds.py` marks them `slow`.
As a plug-in of pytest (`-p tools.slow_tests`) it writes the times of each process into the folder TEST_TIMES.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import Generator, Iterable
from pathlib import Path

import pytest

CPU_S = 0.2
WALL_S = 1.0
LIST = Path(__file__).parent.parent / "tests" / "slow_tests.txt"
CANDIDATES = "(quick or slow) and not (postgres or browser or process or chaos or sim)"
HEADING = (
    f"# Tests that take over {CPU_S} s of a processor, or over {WALL_S} s in all. Written by tools/slow_tests.py.\n"
)


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, object, object]:
    """Write how long a test has taken, with its fixtures."""
    cpu_s, wall_s = time.process_time(), time.monotonic()
    try:
        return (yield)
    finally:
        cpu_s, wall_s = time.process_time() - cpu_s, time.monotonic() - wall_s
        times = Path(os.environ["TEST_TIMES"]) / f"{os.getpid()}.tsv"
        with times.open("a", encoding="utf-8") as file:
            file.write(f"{cpu_s:.3f}\t{wall_s:.3f}\t{item.nodeid}\n")


def function_of(test_id: str) -> str:
    """Return the id of a test without its parameters."""
    return test_id.partition("[")[0]


def read_list() -> frozenset[str]:
    """Return what is listed: ids of tests, and of functions of which all tests count."""
    lines = LIST.read_text(encoding="utf-8").splitlines() if LIST.exists() else []
    return frozenset(line for line in lines if line and not line.startswith("#"))


def slow_tests(lines: Iterable[str]) -> list[str]:
    """Return what takes too long, from the lines that the plug-in has written; a function if most of its tests do."""
    slow, tests = defaultdict[str, list[str]](list), Counter[str]()
    for line in lines:
        cpu_s, wall_s, test_id = line.split("\t", 2)
        tests[function_of(test_id)] += 1
        if float(cpu_s) > CPU_S or float(wall_s) > WALL_S:
            slow[function_of(test_id)].append(test_id)
    return sorted(
        name for function, ids in slow.items() for name in (ids if 2 * len(ids) < tests[function] else [function])
    )


def main() -> int:
    """Measure, and write the list anew."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "pytest", "-q", "-p", "tools.slow_tests", "-m", CANDIDATES]
        command += ["-n", str(os.cpu_count() or 1), "--dist", "worksteal", *sys.argv[1:]]
        status = subprocess.call(command, env=os.environ | {"TEST_TIMES": folder})
        if status != pytest.ExitCode.OK:
            return status
        lines = [line for times in Path(folder).iterdir() for line in times.read_text(encoding="utf-8").splitlines()]
    LIST.write_text(HEADING + "".join(f"{name}\n" for name in slow_tests(lines)), encoding="utf-8")
    print(f"{LIST}: {len(read_list())} entries")
    return 0


if __name__ == "__main__":
    sys.exit(main())
