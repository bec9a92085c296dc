"""Reads the histories of a store, so that new code can be checked against them before it is deployed.

Nothing is written and nothing is carried out. Runs are read a page at a time and their histories one at a time, so
the size of the store does not matter. Each history is taken as far as it went when the run was found: nodes may go on
meanwhile, and a turn must not be seen half.
"""

from collections.abc import AsyncIterator

from msgspec import Struct
from msgspec.structs import replace

from holdfast.core.events import Event
from holdfast.core.state import TERMINAL
from holdfast.errors import HistoryGap, RunError, StoreCorrupt
from holdfast.program.replay_check import Definitions, Problem, check_history, problem_of
from holdfast.store.port import RunHead, RunQuery, Store

PAGE_RUNS = 100


class Checked(Struct, frozen=True):
    """A run that was looked at, and what would pause it, if anything."""

    run_id: str
    plan_id: str
    plan_version: str
    problem: Problem | None


async def check_runs(definitions: Definitions, store: Store, *, finished: bool = False) -> AsyncIterator[Checked]:
    """Look at one run after the other; at finished ones only if asked. A damaged run is a problem of its own."""
    async for head in _heads(store):
        if isinstance(head, StoreCorrupt):
            run_id = head.details["run_id"]
            yield Checked(run_id, "", "", Problem(run_id=run_id, code=head.code, message=head.message))
        elif finished or head.status not in TERMINAL:
            yield Checked(head.run_id, head.plan_id, head.plan_version, await _problem(definitions, store, head))


async def check_store(definitions: Definitions, store: Store, *, finished: bool = False) -> list[Problem]:
    """Return the problems that the runs of a store would have with these definitions; finished runs only if asked."""
    checked = check_runs(definitions, store, finished=finished)
    return [run.problem async for run in checked if run.problem is not None]


async def count_runs(store: Store, *, finished: bool = False) -> int:
    """Return how many runs there are to look at, about."""
    runs = (await store.stats()).runs
    return sum(count for status, count in runs.items() if finished or status not in TERMINAL)


async def _heads(store: Store) -> AsyncIterator[RunHead | StoreCorrupt]:
    """Yield every run; where one cannot be read, the reason."""
    after = ""
    while True:
        page = await store.find_runs(RunQuery(after=after, limit=PAGE_RUNS))
        if not page and page.cursor is None:
            return
        damage = {id: StoreCorrupt(f"the row of run {id!r} cannot be read", run_id=id) for id in page.unreadable}
        for _, head in sorted(({head.run_id: head for head in page} | damage).items()):
            yield head
        after = page[-1].run_id if page.cursor is None else page.cursor


async def _problem(definitions: Definitions, store: Store, head: RunHead) -> Problem | None:
    try:
        history = await _history(store, head)
    except (RunError, StoreCorrupt) as damage:
        return problem_of(damage, head.run_id, head.plan_id, head.plan_version)
    problem = check_history(definitions, history)
    return problem and replace(problem, plan_id=head.plan_id, plan_version=head.plan_version)


async def _history(store: Store, head: RunHead) -> list[Event]:
    """Return what a node would replay; nothing if the run was deleted meanwhile."""
    after = head.snapshot.resume_pointer - 1 if head.snapshot is not None else 0
    events: list[Event] = []
    while after < head.version:
        page = await store.read_events(head.run_id, after)
        if not page:
            if await store.load([head.run_id]) == [None]:
                return []
            raise HistoryGap(f"the history ends at event {after} and should go to {head.version}", run_seq=after + 1)
        events += page
        after = page[-1].run_seq
    return [event for event in events if event.run_seq <= head.version]
