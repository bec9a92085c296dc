"""`python -m bench.peers`: measure all contenders in turns, and write docs/benchmarks.md with its charts."""

import argparse
import os
import platform
import sqlite3
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import msgspec

from bench import disk
from bench.peers import write_up
from bench.peers.contenders import ALL, APART, ONE, ROOT, installed, versions
from bench.peers.measure import FULL, SHORT, Figures, slot
from bench.peers.write_up import Results
from bench.report import progress
from tests.postgres_server import Installation, find_binaries, version_of


def main() -> int:
    """Measure, and write down what was found."""
    given = _options()
    if given.rewrite:
        results = msgspec.json.decode(given.rewrite.read_bytes(), type=Results)
        write_up.write(results, given.page)
        return 0
    if disk.filesystem(given.folder) in disk.IN_MEMORY and not given.allow_memory:
        print(f"{given.folder} is in memory; name a folder on a disk with --dir", file=sys.stderr)
        return 2
    results = _measured(given)
    text = msgspec.json.format(msgspec.json.encode(results))
    if given.json:
        given.json.write_bytes(text)
    print(write_up.tables(results))
    if given.page:
        write_up.write(results, given.page)
    failures = [f"{name}: {failure}" for name, found in results.figures.items() for failure in found.failures]
    print("\n".join(failures), file=sys.stderr)
    return 1 if failures else 0


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m bench.peers", description=__doc__)
    parser.add_argument("--minutes", type=float, default=10.5, help="rounds go on while another one fits (%(default)s)")
    parser.add_argument("--rounds", type=int, default=3, help="at most so many (%(default)s)")
    parser.add_argument("--short", action="store_true", help="tiny loads, to see that everything runs")
    parser.add_argument(
        "--only", action="append", default=[], help="a part of contenders' names; may be given several times"
    )
    parser.add_argument("--shapes", default=",".join((ONE, APART)), help="with commas between (%(default)s)")
    parser.add_argument("--json", type=Path, help="write the figures there")
    parser.add_argument("--page", type=Path, help="write the page there, and its charts into `pictures` beside it")
    parser.add_argument(
        "--rewrite", type=Path, metavar="JSON", help="measure nothing; write the page from these figures"
    )
    parser.add_argument("--dir", dest="folder", type=Path, default=disk.default_folder(), help="where files are made")
    parser.add_argument("--allow-memory", action="store_true", help="accept a file system in memory")
    given = parser.parse_args()
    if given.rewrite and not given.page:
        parser.error("--rewrite needs --page")
    return given


def _measured(given: argparse.Namespace) -> Results:
    effort = SHORT if given.short else FULL
    chosen = [one for one in ALL if not given.only or any(part.lower() in one.name.lower() for part in given.only)]
    taking_part = [one for one in chosen if installed(one)]
    slots = [
        (contender, shape)
        for contender in taking_part
        for shape in contender.shapes
        if shape in given.shapes.split(",")
    ]
    results = Results(
        environment=_environment(given.folder, given.short),
        versions=versions(),
        missing=[one.name for one in chosen if one not in taking_part],
        figures={write_up.key(contender, shape): Figures() for contender, shape in slots},
    )
    began, longest = time.monotonic(), 0.0
    with (
        _postgres(any(one.store == "postgres" for one in taking_part)) as postgres,
        tempfile.TemporaryDirectory(prefix="holdfast-peers-", dir=given.folder) as folder,
    ):
        for number in range(given.rounds):
            if number and time.monotonic() - began + longest > given.minutes * 60:
                break
            round_began = time.monotonic()
            for place, (contender, shape) in enumerate(slots if number % 2 == 0 else slots[::-1]):
                progress(f"round {number + 1}, {contender.name}, {shape} ({time.monotonic() - began:.0f} s)")
                figures = results.figures[write_up.key(contender, shape)]
                where = Path(folder) / f"{number}-{place}"
                slot(contender, shape, figures, effort, where, postgres, number * 100 + place)
            longest = longest or time.monotonic() - round_began  # later rounds have no recovery, and are shorter
            results.rounds = number + 1
    results.minutes = (time.monotonic() - began) / 60
    progress("")
    return results


@contextmanager
def _postgres(is_needed: bool) -> Iterator[tuple[str, int]]:
    """Start a server, and give its address and process."""
    if not is_needed:
        yield "", 0
        return
    installation = Installation()
    try:
        server = installation.server()
        yield server.dsn, server.pid
    finally:
        installation.remove()


def _environment(folder: Path, is_short: bool) -> dict[str, str]:
    commit = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], cwd=ROOT, capture_output=True, text=True, check=False
    ).stdout.strip()
    return {
        "time": time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime()),
        "commit": commit or "unknown",
        "system": platform.platform(),
        "cores": str(os.cpu_count()),
        "load before": f"{os.getloadavg()[0]:.1f}",
        "file system": disk.filesystem(folder),
        "fsync": f"{disk.fsync_us(folder):,.0f} µs",
        "Python": platform.python_version(),
        "SQLite": sqlite3.sqlite_version,
        "PostgreSQL": str(version_of(find_binaries())),
        "effort": "short: figures mean nothing" if is_short else "full",
    }


if __name__ == "__main__":
    sys.exit(main())
