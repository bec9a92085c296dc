"""Views of a store for `holdfast.core.invariants`: what it stores about one run or all runs, as plain data.

A view is made of several reads. They are repeated until the run has not changed in between, so a view taken while nodes
are working is still consistent.
"""

from collections.abc import Awaitable, Callable, Iterable
from typing import TypeVar

from holdfast.core.dead_letters import DeadLetter
from holdfast.core.events import Event
from holdfast.core.index_rows import Task, Wait
from holdfast.core.invariants import RunView, SystemView
from holdfast.core.messages import AcceptedSignalResult, Signal
from holdfast.store.port import Index, LoadedRun, MailboxQuery, RunQuery, RunStore, Store, TaskQuery, WaitQuery
from holdfast.store.queries import DeadLetterQuery

PAGE = 100

T = TypeVar("T")
K = TypeVar("K")


async def view_of(
    store: Store, run_id: str, acknowledged: Iterable[AcceptedSignalResult] = (), *, tries: int | None = None
) -> RunView | None:
    """Return the view of a run, or None if there is none. `acknowledged` is what its senders received.

    With `tries` it is also None for a run that changed during each attempt.
    """
    results = tuple(result for result in acknowledged if result.workflow_id == run_id)
    [before] = await store.load([run_id])
    while before is not None and tries != 0:
        view = await _read(store, before, results)
        [after] = await store.load([run_id])
        if after == before:
            return view
        before, tries = after, None if tries is None else tries - 1
    return None


async def system_view(store: Store, acknowledged: Iterable[AcceptedSignalResult] = ()) -> SystemView:
    """Return the view of all runs. Each is consistent; to compare runs with each other, take it while nodes idle."""
    results: dict[str, list[AcceptedSignalResult]] = {}
    for result in acknowledged:
        results.setdefault(result.workflow_id, []).append(result)
    heads = await _read_all(lambda after: store.find(RunQuery(after=after, limit=PAGE)), "", lambda h: h.run_id)
    views = [await view_of(store, head.run_id, results.get(head.run_id, ())) for head in heads]
    return SystemView(tuple(view for view in views if view is not None))


async def _read(store: Store, run: LoadedRun, acknowledged: tuple[AcceptedSignalResult, ...]) -> RunView:
    head = run.head
    return RunView(
        run_id=head.run_id,
        status=head.status,
        version=head.version,
        now=await store.now(),
        snapshot=head.snapshot,
        events=tuple(await _read_history(store, head.run_id)),
        messages=run.messages,
        signals=tuple(await _read_mailbox(store, head.run_id)),
        acknowledged=acknowledged,
        waits=tuple(await _read_waits(store, head.run_id)),
        tasks=tuple(await _read_tasks(store, head.run_id)),
        records=run.records,
        parent_run_id=head.parent_run_id,
        tenant=head.tenant,
        project=head.project,
        environment=head.environment,
        letters=tuple(await _read_letters(store, head.run_id)),
        lease_owner=head.lease_owner,
        ready_at=head.ready_at,
        queued_at=head.queued_at,
    )


async def _read_history(store: RunStore, run_id: str) -> list[Event]:
    return await _read_all(
        lambda after: store.read_events(run_id, after=after, limit=PAGE), 0, lambda event: event.run_seq
    )


async def _read_mailbox(store: Index, run_id: str) -> list[Signal]:
    return await _read_all(
        lambda after: store.find(MailboxQuery(run_id=run_id, consumed=True, after=after, limit=PAGE)),
        0,
        lambda signal: signal.inbox_seq,
    )


async def _read_waits(store: Index, run_id: str) -> list[Wait]:
    return await _read_all(
        lambda after: store.find(WaitQuery(run_id=run_id, after=after, limit=PAGE)),
        ("", ""),
        lambda wait: (wait.run_id, wait.step_id),
    )


async def _read_tasks(store: Index, run_id: str) -> list[Task]:
    return await _read_all(
        lambda after: store.find(TaskQuery(run_id=run_id, after=after, limit=PAGE)),
        "",
        lambda task: task.task_id,
    )


async def _read_letters(store: Index, run_id: str) -> list[DeadLetter]:
    return await _read_all(
        lambda after: store.find(DeadLetterQuery(run_id=run_id, settled=True, after=after, limit=PAGE)),
        (0, ""),
        lambda letter: (letter.died_at, letter.letter_id),
    )


async def _read_all(read_page: Callable[[K], Awaitable[list[T]]], after: K, key: Callable[[T], K]) -> list[T]:
    found: list[T] = []
    while True:
        page = await read_page(after)
        found += page
        place = getattr(page, "cursor", None)
        if place is None and not page:
            return found
        after = key(page[-1]) if place is None else place
