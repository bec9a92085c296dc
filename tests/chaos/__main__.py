"""`python -m tests.chaos --store sqlite --nodes 4 --runs 20000 --seconds 300`"""

import argparse
import shutil
import sys
import tempfile
from pathlib import Path

from tests.chaos.harness import Order, play


def main() -> int:
    """Play one chaos, and say what came of it."""
    parser = argparse.ArgumentParser(prog="python -m tests.chaos", description="Many processes, killed at random.")
    parser.add_argument("--store", default="sqlite", help="a name (stores.py) or an address (empty!)")
    parser.add_argument("--nodes", type=int, default=4)
    parser.add_argument("--runs", type=int, default=20_000)
    parser.add_argument("--seconds", type=float, default=300.0, help="how long the storm lasts")
    parser.add_argument("--lease-s", type=float, default=10.0)
    parser.add_argument("--peace-s", type=float, default=10.0, help="how long the server is left alone, at least")
    parser.add_argument("--killed-every-s", type=float, help="how often a node is killed; at random if not given")
    parser.add_argument("--patience-s", type=float, default=30.0, help="how long all clients may wait in vain")
    parser.add_argument("--works", type=int, default=0, help="how many activities each run has beside its program")
    parser.add_argument("--turns", type=int, default=0, help="how many turns there must have been")
    parser.add_argument("--to-the-end", action="store_true", help="the storm lasts until all have their answers")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--keep", action="store_true", help="keep the folder, with the nodes' logs, also if all is well"
    )
    given = parser.parse_args()
    folder = Path(tempfile.mkdtemp(prefix="chaos-"))
    order = Order(
        folder,
        store=given.store,
        nodes=given.nodes,
        runs=given.runs,
        seconds=given.seconds,
        lease_s=given.lease_s,
        seed=given.seed,
        peace_s=given.peace_s,
        killed_every_s=given.killed_every_s,
        works=given.works,
        to_the_end=given.to_the_end,
        patience_s=given.patience_s,
    )
    report = play(order)
    if report.counts["turns"] < given.turns:
        report.wrong.append(f"there were {report.counts['turns']:,} turns, and not {given.turns:,}")
    sys.stdout.write("\n".join(report.lines()) + "\n")
    if report.wrong or given.keep:
        sys.stdout.write(f"logs of the nodes: {folder}\n")
    else:
        shutil.rmtree(folder)
    return 1 if report.wrong else 0


if __name__ == "__main__":
    sys.exit(main())
