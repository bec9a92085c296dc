"""A long soak: seed after seed, until so many signals were sent into races. `make soak`.

Each signal, with its command, task operation, time-out, pause, rotation, crash or completion beside it, is a race.
After every commit the invariants are checked: nothing acknowledged is lost, nothing is applied twice, the order of
each name is kept. A seed that fails prints the line that plays it again.
"""

import argparse
import logging
import os
import sys
import warnings
from collections import Counter
from concurrent.futures import ProcessPoolExecutor

from tests.sim.simulation import simulate

CHUNK = 20


def play(first: int) -> tuple[Counter[str], list[str]]:
    """Play some seeds; return what happened, and what went wrong."""
    logging.disable(logging.CRITICAL)
    warnings.simplefilter("ignore")
    counts: Counter[str] = Counter()
    wrong = []
    for seed in range(first, first + CHUNK):
        report = simulate(seed)
        counts.update(report.counts)
        if report.violations:
            wrong.append(f"TEST_SEED={seed} pytest tests/sim/test_simulation.py -k nothing_acknowledged")
    return counts, wrong


def main() -> int:
    """Play until there were enough races, on every core."""
    parser = argparse.ArgumentParser(prog="python -m tests.sim.soak", description=__doc__)
    parser.add_argument("--races", type=int, default=100_000, help="how many signals to send")
    parser.add_argument("--from-seed", type=int, default=0)
    arguments = parser.parse_args()
    counts: Counter[str] = Counter()
    wrong: list[str] = []
    seed = arguments.from_seed
    with ProcessPoolExecutor() as pool:
        while counts["signals"] < arguments.races and not wrong:
            chunks = range(seed, seed + CHUNK * 4 * (os.cpu_count() or 1), CHUNK)
            for found, problems in pool.map(play, chunks):
                counts.update(found)
                wrong += problems
            seed = chunks.stop
            sys.stdout.write(f"seeds up to {seed:,}: {counts['signals']:,} signals, {counts['commits']:,} commits\n")
            sys.stdout.flush()
    sys.stdout.write("".join(f"{what}: {count:,}\n" for what, count in sorted(counts.items())))
    sys.stdout.write("".join(f"failed; replay with: {line}\n" for line in wrong))
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
