"""A campaign: seed after seed, of every kind of story, for as long as there is time. `make sim SIM_SECONDS=3600`.

After every commit of a story the invariants are checked, and at its end those of the whole. A seed that fails prints
the line that plays it again. What must sometimes happen is counted (`SOMETIMES`): a campaign in which something of it
never happens fails, because a simulation that never comes to a place proves nothing about it.
"""

import argparse
import logging
import os
import sys
import time
import warnings
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from typing import Any

from tests.sim.features import OVERLAPS
from tests.sim.simulation import Report, simulate
from tests.sim.story import SMALL, Story

KINDS: dict[str, Story] = {
    "code": Story(),
    "flows": Story(runs=2, payers=0, flows=8),
    "plans": Story(runs=0, payers=0, plans=8),
    "features": Story(runs=3, payers=0, featured=8),
    "small": SMALL,
}
"""The kinds of stories: what is in them, beside the nodes, their clients and the harm."""

HARM = frozenset({"kills", "stops", "lost leases", "outages", "leaves", "doubles", "conflicts", "signals", "commits"})
EVENTS = frozenset(
    {"RunStarted", "RunPaused", "RunResumed", "RunCancelRequested", "RunCancelled", "RunCompleted", "RunFailed"}
    | {"StepCompleted", "StepFailed", "StepRetried", "StepSkipped", "StepCancelled", "StepDetached", "MarkerRecorded"}
    | {"SignalReceived", "SignalRejected", "SignalTimedOut", "TimerFired", "TaskCompleted", "UpdateCompleted"}
    | {"ChildStarted", "ChildCompleted", "ChildFailed", "ContinuedAsNew"}
)
"""What a story of each kind may record: all that runs of every kind have."""

SOMETIMES: dict[str, frozenset[str]] = {
    "code": HARM
    | EVENTS
    | {
        "poison turns",
        "tries",
        "set aside",
        "sealed stories",
        "begun early",
        "charges",
        "verifications",
        "unresolved steps",
    }
    | {"paid, by verifier", "paid, by operator", "paid, by itself"}
    | {"unpaid: ReconciliationFailed", "unpaid: ConnectionError"}
    | {"takes", "reports", "late reports", "lost workers", "lost nodes"}
    | {"TaskCompleted", "TaskReminded", "TaskAssigned", "TaskRefused", "escalations"}
    | {"settled steps", "dead letters", "refused", "sent by runs", "deadlines", "admitted", "admitted later: STARTED"}
    | {"updates with 1 effects"},
    "flows": HARM | EVENTS | {"sealed stories", "flows: RunCompleted", "flows: RunFailed", "flows: undone steps"},
    "plans": HARM | EVENTS | {"sealed stories"} | {"plans: RunCompleted", "plans: RunFailed", "plans: RunCancelled"},
    "features": HARM
    | EVENTS
    | {"sealed stories", "RunApproved", "debounced starts", "inputs replaced", "chunks of runs", "chunks of steps"}
    | {"timed out: execution", "timed out: run", "started later", "started after approval", "forks", "jumps"}
    | {"version 1", "version 2", "projected", "projected again", "calls with a place"}
    | {"locks held", "steps under a lock", "callbacks asked for", "runs started by runs", "ended while they clean up"}
    | {"run again", "retried runs", *(f"ticks that {overlap}" for overlap in OVERLAPS)},
}
"""What must happen in the stories of a kind, if there are `ENOUGH` of them."""
SOMETIMES["small"] = frozenset().union(*SOMETIMES.values())

ENOUGH = {"small": 2_000}
"""How many stories have to show it: of the kinds that are not named here, `ENOUGH_BIG`."""
ENOUGH_BIG = 60
CHUNK = 5


def story(kind: str, seed: int) -> Report:
    """Play one story."""
    return simulate(seed, KINDS[kind])


def replay_line(kind: str, seed: int) -> str:
    """Return the command that plays a story again."""
    return f"python -m tests.sim.campaign --kind {kind} --seed {seed}"


def never_seen(kind: str, counts: Counter[str]) -> list[str]:
    """Return what should have happened in the stories of a kind, and did not."""
    return sorted(what for what in SOMETIMES[kind] if not counts[what])


def play(kind: str, first: int, count: int) -> tuple[str, int, Counter[str], list[str]]:
    """Play some seeds; return what happened, and how to replay what went wrong."""
    _be_quiet()
    counts: Counter[str] = Counter()
    wrong = []
    for seed in range(first, first + count):
        report = story(kind, seed)
        counts.update(report.counts)
        if report.violations:
            wrong.append(f"{replay_line(kind, seed)}  # {report.violations[0].splitlines()[0][:200]}")
    return kind, count, counts, wrong


def _be_quiet() -> None:
    logging.disable(logging.CRITICAL)
    warnings.simplefilter("ignore")


def campaign(seconds: float, first: int, kinds: list[str], workers: int) -> int:
    """Play seeds of these kinds in turns until the time is over; return how many went wrong."""
    counts: dict[str, Counter[str]] = {kind: Counter() for kind in kinds}
    seeds: Counter[str] = Counter()
    wrong: list[str] = []
    until = time.monotonic() + seconds
    with ProcessPoolExecutor(workers) as pool:
        chunks = _chunks(kinds, first)
        running: set[Future[Any]] = {pool.submit(play, *next(chunks), CHUNK) for _ in range(2 * workers)}
        while running:
            done, running = wait(running, return_when=FIRST_COMPLETED)
            for future in done:
                kind, count, found, problems = future.result()
                seeds[kind] += count
                counts[kind].update(found)
                wrong += problems
                _say(
                    f"{sum(seeds.values()):,} seeds, {sum(of['commits'] for of in counts.values()):,} commits", problems
                )
                if time.monotonic() < until:
                    running.add(pool.submit(play, *next(chunks), CHUNK))
    for kind in kinds:
        missing = never_seen(kind, counts[kind]) if seeds[kind] >= ENOUGH.get(kind, ENOUGH_BIG) else []
        _say(f"\n{kind}: {seeds[kind]:,} seeds from {first:,}", [f"never seen: {what}" for what in missing])
        _say("".join(f"  {what}: {count:,}\n" for what, count in sorted(counts[kind].items())), [])
        wrong += missing
    _say(f"{len(wrong)} findings", wrong)
    return len(wrong)


def _chunks(kinds: list[str], first: int) -> Iterator[tuple[str, int]]:
    while True:
        for kind in kinds:
            yield kind, first
        first += CHUNK


def _say(text: str, problems: list[str]) -> None:
    sys.stdout.write("\n".join([text, *problems]) + "\n")
    sys.stdout.flush()


def main() -> int:
    """Play one seed with its story on the terminal, or a campaign on every core."""
    parser = argparse.ArgumentParser(prog="python -m tests.sim.campaign", description=__doc__)
    parser.add_argument("--seconds", type=float, default=600.0, help="how long to begin new seeds (%(default)s)")
    parser.add_argument("--from-seed", type=int, default=0)
    parser.add_argument("--kind", choices=KINDS, action="append", help="only stories of this kind")
    parser.add_argument("--workers", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--seed", type=int, help="play this seed alone, and print its story")
    given = parser.parse_args()
    kinds = given.kind or list(KINDS)
    if given.seed is None:
        return 1 if campaign(given.seconds, given.from_seed, kinds, given.workers) else 0
    _be_quiet()
    report = story(kinds[0], given.seed)
    _say("\n".join(report.trace), [f"VIOLATION {problem}" for problem in report.violations])
    return 1 if report.violations else 0


if __name__ == "__main__":
    sys.exit(main())
