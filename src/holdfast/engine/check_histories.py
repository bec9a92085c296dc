"""Checks new code against the histories of a store, before it is deployed.

Each run is rebuilt with the current registry, by the function that a node uses (`execute.rebuild`). Whatever would
pause the run on a node is a problem here: a divergence, a missing version, arguments that no longer fit, code that
raises outside a task. Nothing is written and no activity is executed.

Runs are read a page at a time and histories one at a time, so the size of the store does not matter. Each history is
read up to the version at which its run was found: nodes may continue meanwhile, and this must not see half a turn.
"""

from collections.abc import AsyncIterator, Iterable, Sequence

from msgspec import Struct
from msgspec.structs import replace

from holdfast.core.events import Event
from holdfast.core.state import TERMINAL
from holdfast.engine.history import read_since_rotation, since_rotation
from holdfast.engine.plans import load_plan_of
from holdfast.engine.turns.execute import problem_of_resuming, rebuild
from holdfast.errors import HistoryGap, HoldfastError, RunError, StoreCorrupt
from holdfast.registry import Registry
from holdfast.store.port import RunHead, RunQuery, Store

PAGE_RUNS = 100


class Problem(Struct, frozen=True, kw_only=True):
    """A reason why a run would be paused. `run_seq` is the first event that differs, or 0 if none does."""

    run_id: str
    plan_id: str = ""
    plan_version: str = ""
    code: str
    message: str
    run_seq: int = 0
    expected: str = ""
    """The command in the history."""

    found: str = ""
    """The command that the code issues."""

    source: str = ""
    """The line of the code, as `file:line`."""


class Checked(Struct, frozen=True):
    """A run that was checked, and its problem, if it has one."""

    run_id: str
    plan_id: str
    plan_version: str
    problem: Problem | None


async def check_runs(registry: Registry, store: Store, *, finished: bool = False) -> AsyncIterator[Checked]:
    """Check each run; finished runs only with `finished`. A damaged run counts as a problem."""
    async for head in _heads(store):
        if isinstance(head, StoreCorrupt):
            run_id = head.details["run_id"]
            yield Checked(run_id, "", "", Problem(run_id=run_id, code=head.code, message=head.message))
        elif finished or head.status not in TERMINAL:
            yield Checked(head.run_id, head.plan_id, head.plan_version, await _problem(registry, store, head))


async def check_store(registry: Registry, store: Store, *, finished: bool = False) -> list[Problem]:
    """Return the problems that the runs of a store would have with this code; finished runs only with `finished`."""
    checked = check_runs(registry, store, finished=finished)
    return [run.problem async for run in checked if run.problem is not None]


async def count_runs(store: Store, *, finished: bool = False) -> int:
    """Return about how many runs there are to check."""
    runs = (await store.stats()).runs
    return sum(count for status, count in runs.items() if finished or status not in TERMINAL)


def check_histories(registry: Registry, histories: Iterable[Sequence[Event]]) -> list[Problem]:
    """Return the problems that these runs would have, at most one per run. A history is complete, or starts at a
    rotation.
    """
    problems = (check_history(registry, history) for history in histories)
    return [problem for problem in problems if problem is not None]


def check_history(registry: Registry, history: Sequence[Event]) -> Problem | None:
    """Return the first problem that this run would have. A run without a history has none."""
    if not history:
        return None
    run_id = history[0].run_id
    try:
        cached, problem = rebuild(run_id, since_rotation(history), registry)
        problem = problem or problem_of_resuming(cached)
    except RunError as damage:
        return problem_of(damage, run_id, "", "")
    cached.close()
    return None if problem is None else problem_of(problem, run_id, cached.state.plan_id, cached.state.plan_version)


def problem_of(error: HoldfastError, run_id: str, plan_id: str, plan_version: str) -> Problem:
    """Convert an error to the problem of a run."""
    details = error.details
    return Problem(
        run_id=run_id,
        plan_id=plan_id,
        plan_version=plan_version,
        code=error.code,
        message=error.message,
        run_seq=details.get("run_seq", 0),
        expected=str(details.get("expected", "")),
        found=str(details.get("found", "")),
        source=str(details.get("source", "")),
    )


async def _heads(store: Store) -> AsyncIterator[RunHead | StoreCorrupt]:
    """Yield every run, or the error if it cannot be read."""
    after = ""
    while True:
        page = await store.find(RunQuery(after=after, limit=PAGE_RUNS))
        if not page and page.cursor is None:
            return
        damage = {id: StoreCorrupt(f"the row of run {id!r} cannot be read", run_id=id) for id in page.unreadable}
        for _, head in sorted(({head.run_id: head for head in page} | damage).items()):
            yield head
        after = page[-1].run_id if page.cursor is None else page.cursor


async def _problem(registry: Registry, store: Store, head: RunHead) -> Problem | None:
    try:
        history = await _history(store, head)
    except (RunError, StoreCorrupt) as damage:
        return problem_of(damage, head.run_id, head.plan_id, head.plan_version)
    await load_plan_of(registry, store, head, history)
    problem = check_history(registry, history)
    return problem and replace(problem, plan_id=head.plan_id, plan_version=head.plan_version)


async def _history(store: Store, head: RunHead) -> list[Event]:
    """Return the events that a node would replay; none if the run was deleted meanwhile."""
    try:
        events = await read_since_rotation(store, head)
    except HistoryGap:
        if await store.load([head.run_id]) == [None]:
            return []
        raise
    return [event for event in events if event.run_seq <= head.version]
