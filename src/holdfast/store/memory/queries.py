"""Looking for runs, waits, signals and tasks in the reference model: everything that a query names, in order."""

from collections.abc import Mapping

from holdfast.core.index_rows import Task, Wait
from holdfast.core.messages import Actor, Signal
from holdfast.core.state import TERMINAL
from holdfast.core.tasks import is_effective
from holdfast.store import port
from holdfast.store.memory.run import Run
from holdfast.store.searching import is_found, is_task_found, words_of

Runs = Mapping[str, Run]


def find_runs(runs: Runs, query: port.RunQuery) -> port.Found[port.RunHead]:
    """Return the heads of the runs that the query names."""
    heads = _heads(runs, query)
    place = None
    if query.look is not None and len(heads) >= query.look:
        last = heads[query.look - 1]
        place = (last.created_at, last.run_id) if query.newest else last.run_id
        heads = heads[: query.look]
    exact = ("tenant", "plan_id", "status", "reference_key", "parent_run_id")
    words = words_of(query.text)
    found = [
        head
        for head in heads
        if all(getattr(query, field) in (None, getattr(head, field)) for field in exact)
        and (query.tag is None or query.tag in head.tags)
        and (query.created_from is None or head.created_at >= query.created_from)
        and (query.created_until is None or head.created_at < query.created_until)
        and (query.run_ids is None or head.run_id in query.run_ids)
        and is_found(head, words)
    ]
    return port.Found(found, place)


def _heads(runs: Runs, query: port.RunQuery) -> list[port.RunHead]:
    """Return the heads of all runs in the order that is asked for, from the place that is."""
    if not query.newest:
        return [run.head for run_id, run in sorted(runs.items()) if run_id > query.after]
    heads = [run.head for run in runs.values()]  # in order of creation
    created_at, run_id = query.before
    place = next((index for index, head in enumerate(heads) if head.run_id == run_id), len(heads))
    if place == len(heads):  # it has gone meanwhile, or this is the first page
        place = max((index + 1 for index, head in enumerate(heads) if head.created_at <= created_at), default=0)
    return heads[:place][::-1]


def find_waits(runs: Runs, query: port.WaitQuery) -> list[Wait]:
    """Return the open waits that the query names."""
    return [
        wait
        for run_id, run in sorted(runs.items())
        for step_id, wait in sorted(run.waits.items())
        if query.run_id in (None, run_id)
        and query.tenant in (None, run.head.tenant)
        and query.name in (None, wait.name)
        and (run_id, step_id) > query.after
    ]


def find_mailbox(runs: Runs, query: port.MailboxQuery) -> list[Signal]:
    """Return the signals that the query names."""
    return [
        signal
        for run, after in _mailboxes(runs, query)
        if query.tenant in (None, run.head.tenant) and not (query.unfinished and run.head.status in TERMINAL)
        for signal in run.signals
        if signal.inbox_seq > after
        and query.name in (None, signal.name)
        and query.signal_id in (None, signal.signal_id)
        and (query.consumed or signal.consumed_seq is None)
    ]


def _mailboxes(runs: Runs, query: port.MailboxQuery) -> list[tuple[Run, int]]:
    """Return the runs whose signals are asked for, in order, each with the number behind which to begin."""
    if query.run_id is not None:
        return [(runs[query.run_id], query.after)] if query.run_id in runs else []
    places = {run_id: place for place, run_id in enumerate(runs)}  # in order of creation
    earlier = max((run_id for run_id in runs if run_id <= query.after_run), default="")
    first = places.get(earlier, -1)
    after = query.after if earlier == query.after_run else 2**62
    return [(run, after if place == first else 0) for place, run in enumerate(runs.values()) if place >= first]


def find_tasks(runs: Runs, query: port.TaskQuery) -> port.Found[Task]:
    """Return the tasks that the query names."""
    exact = ("run_id", "task_id", "status", "assignee")
    tasks = {
        task_id: task
        for run in runs.values()
        if query.plan_id in (None, run.head.plan_id) and query.tenant in (None, run.head.tenant)
        for task_id, task in run.tasks.items()
    }
    actor = None if query.actor is None else Actor(query.actor, query.actor_roles)
    ids = sorted(task_id for run in runs.values() for task_id in run.tasks if task_id > query.after)
    place = ids[query.look - 1] if query.look is not None and len(ids) >= query.look else None
    words = words_of(query.text)
    found = [
        task
        for task_id, task in sorted(tasks.items())
        if task_id > query.after
        and (place is None or task_id <= place)
        and all(getattr(query, field) in (None, getattr(task, field)) for field in exact)
        and (query.step_ids is None or task.step_id in query.step_ids)
        and (query.role is None or query.role in task.roles)
        and (query.due_before is None or (task.due_at is not None and task.due_at < query.due_before))
        and (actor is None or is_effective(task.assignee, task.roles, actor))
        and is_task_found(task, words)
    ]
    return port.Found(found, place)
