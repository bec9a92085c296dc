"""`find` and `find_orphaned` in the reference model: everything that matches a query, in order."""

from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from operator import gt, lt
from typing import Any, Protocol, TypeVar

from msgspec.json import encode

from holdfast.core import plans as levels
from holdfast.core.attributes import items_of
from holdfast.core.codec import encode_body
from holdfast.core.dead_letters import DeadLetter
from holdfast.core.events import Event
from holdfast.core.index_rows import Task, Wait
from holdfast.core.instants import Instant
from holdfast.core.messages import Actor, Signal
from holdfast.core.search import Order, matches
from holdfast.core.state import TERMINAL, RunStatus
from holdfast.core.streams import NamedStream
from holdfast.core.tasks import is_effective
from holdfast.store import port
from holdfast.store.decisions import lease_end
from holdfast.store.memory.run import NEVER, Run
from holdfast.store.queries import within
from holdfast.store.sql import in_json, lowered, words_of

Row = TypeVar("Row")
Runs = Mapping[str, Run]


def find_runs(runs: Runs, query: port.RunQuery) -> port.Found[port.RunHead]:
    """Return the heads of the runs that match the query."""
    heads = _heads(runs, query)
    place = None
    if query.order is not None:
        return _ordered(runs, query, query.order)
    if query.look is not None and len(heads) >= query.look:
        last = heads[query.look - 1]
        place = (last.created_at, last.run_id) if query.newest else last.run_id
        heads = heads[: query.look]
    return port.Found(_matching(runs, query, heads), place)


def _matching(runs: Runs, query: port.RunQuery, heads: Iterable[port.RunHead]) -> list[port.RunHead]:
    exact = ("tenant", "status", "reference_key", "parent_run_id")
    words = words_of(query.text)
    return [
        head
        for head in heads
        if all(getattr(query, field) in (None, getattr(head, field)) for field in exact)
        and query.workflow in (None, head.plan_id)
        and (query.tag is None or query.tag in head.tags)
        and not (query.roots and head.parent_run_id is not None)
        and not (query.retrying and (head.snapshot is None or head.snapshot.retrying is None))
        and (query.created_from is None or head.created_at >= query.created_from)
        and (query.created_until is None or head.created_at < query.created_until)
        and (query.finished_from is None or (head.finished_at or -1) >= query.finished_from)
        and (query.finished_until is None or (head.finished_at or NEVER) < query.finished_until)
        and (query.run_ids is None or head.run_id in query.run_ids)
        and all(matches(runs[head.run_id].attributes, condition) for condition in query.where)
        and _is_found(head, words)
    ]


def _ordered(runs: Runs, query: port.RunQuery, order: Order) -> port.Found[port.RunHead]:
    """Return the runs in an order: sorted by its value, and then by creation."""
    keys: list[tuple[Any, int, port.RunHead]] = []
    for number, run in enumerate(runs.values()):
        value: Any = run.head.finished_at if order.name == "finished_at" else 0
        if order.kind is not None:
            own = run.attributes.get(order.name)
            value = None if own is None else dict(items_of(own)).get(order.kind)
        if value is not None:
            keys.append((value, number, run.head))
    keys.sort(key=lambda key: key[:2], reverse=order.descending)
    if query.behind is not None:
        value, _, run_id = query.behind
        number = next((place for place, known in enumerate(runs) if known == run_id), -1)
        beyond = lt if order.descending else gt
        keys = [key for key in keys if beyond(key[:2], (value, number))]
    found = _matching(runs, query, [head for _, _, head in keys])
    page = found[: query.limit]
    values = {head.run_id: value for value, _, head in keys}
    if not page or len(page) < query.limit:
        return port.Found(page)
    return port.Found(page, (values[page[-1].run_id], page[-1].created_at, page[-1].run_id))


def count_runs(runs: Runs, query: port.RunCountQuery) -> port.Found[port.RunCount]:
    """Return how many runs match a query, by workflow and status."""
    completed: list[port.RunHead] = []
    others: list[port.RunHead] = []
    for run in reversed(list(runs.values())):
        (completed if run.head.status is RunStatus.COMPLETED else others).append(run.head)
    examined = others[: query.look] + completed[: query.look]
    counts = Counter((head.plan_id, head.status) for head in _matching(runs, query.runs, examined))
    has_more = len(examined) < len(runs) or None
    return port.Found([port.RunCount(*key, count) for key, count in sorted(counts.items())], has_more)


def _heads(runs: Runs, query: port.RunQuery) -> list[port.RunHead]:
    """Return the heads of all runs in the order of the query, from its starting position."""
    if not query.newest:
        return [run.head for run_id, run in sorted(runs.items()) if run_id > query.after]
    heads = [run.head for run in runs.values()]  # in order of creation
    created_at, run_id = query.before
    place = next((index for index, head in enumerate(heads) if head.run_id == run_id), len(heads))
    if place == len(heads):  # the run was deleted meanwhile, or this is the first page
        place = max((index + 1 for index, head in enumerate(heads) if head.created_at <= created_at), default=0)
    return heads[:place][::-1]


def find_waits(runs: Runs, query: port.WaitQuery) -> port.Found[Wait]:
    """Return the open waits that match the query."""
    found = [
        wait
        for run_id, run in sorted(runs.items())
        for step_id, wait in sorted(run.waits.items())
        if query.run_id in (None, run_id)
        and query.tenant in (None, run.head.tenant)
        and query.name in (None, wait.name)
        and (run_id, step_id) > query.after
    ]
    return port.Found(found)


def find_streams(runs: Runs, query: port.StreamQuery) -> port.Found[NamedStream]:
    """Return the streams of a run."""
    run = runs.get(query.run_id)
    return port.Found([] if run is None else run.streams.named(query.run_id, query.after))


def find_mailbox(runs: Runs, query: port.MailboxQuery) -> port.Found[Signal]:
    """Return the signals that match the query."""
    found = [
        signal
        for run, after in _mailboxes(runs, query)
        if query.tenant in (None, run.head.tenant) and not (query.unfinished and run.head.status in TERMINAL)
        for signal in run.signals
        if signal.inbox_seq > after
        and query.name in (None, signal.name)
        and query.signal_id in (None, signal.signal_id)
        and (query.consumed or signal.consumed_seq is None)
    ]
    return port.Found(found)


def _mailboxes(runs: Runs, query: port.MailboxQuery) -> list[tuple[Run, int]]:
    """Return the runs whose signals match, in order, each with the number after which to start."""
    if query.run_id is not None:
        return [(runs[query.run_id], query.after)] if query.run_id in runs else []
    places = {run_id: place for place, run_id in enumerate(runs)}  # in order of creation
    earlier = max((run_id for run_id in runs if run_id <= query.after_run), default="")
    first = places.get(earlier, -1)
    after = query.after if earlier == query.after_run else 2**62
    return [(run, after if place == first else 0) for place, run in enumerate(runs.values()) if place >= first]


def find_tasks(runs: Runs, query: port.TaskQuery) -> port.Found[Task]:
    """Return the tasks that match the query."""
    exact = ("run_id", "task_id", "status", "assignee")
    tasks = {
        task_id: task
        for run in runs.values()
        if query.workflow in (None, run.head.plan_id) and query.tenant in (None, run.head.tenant)
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
        and _is_task_found(task, words)
    ]
    return port.Found(found, place)


def _is_found(head: port.RunHead, words: list[str]) -> bool:
    """Return whether every word is in one of the texts of a run."""
    if not words:
        return True
    if any("\0" in word for word in words):
        return False
    error = head.snapshot.last_error if head.snapshot else None
    texts = [head.run_id, head.plan_id, head.reference_key or "", *head.tags]
    texts += [error.code, error.message] if error else []
    return all(any(word in lowered(text) for text in texts) for word in words)


def _is_task_found(task: Task, words: list[str]) -> bool:
    """Return whether every word is in the name of a task or in its payload."""
    if not words:
        return True
    if any("\0" in word for word in words):
        return False
    name, payload = lowered(task.name), lowered(bytes(task.payload).decode())
    return all(word in name or in_json(word) in payload for word in words)


def find_events(runs: Runs, query: port.EventQuery) -> port.Found[Event]:
    """Return the events that match the query."""
    places = sorted(dict(query.after).items())
    if query.only_ends:
        ended = [(run_id, after) for run_id, after in places if run_id in runs and runs[run_id].head.status in TERMINAL]
        ends = (event for run_id, after in ended for event in runs[run_id].events[max(after, 0) :][-1:])
        return port.Found(ends, missing=tuple(run_id for run_id, _ in places if run_id not in runs))
    return port.Found(
        event for run_id, after in places if run_id in runs for event in runs[run_id].events[max(after, 0) :]
    )


def find_dead_letters(runs: Runs, query: port.DeadLetterQuery) -> port.Found[DeadLetter]:
    """Return the dead letters that match the query."""
    exact = ("run_id", "letter_id", "reason")
    letters = [letter for run in runs.values() for letter in run.letters.values()]
    found = [
        letter
        for letter in sorted(letters, key=lambda letter: (letter.died_at, letter.letter_id))
        if (letter.died_at, letter.letter_id) > query.after
        and query.tenant in (None, runs[letter.run_id].head.tenant)
        and all(getattr(query, field) in (None, getattr(letter, field)) for field in exact)
        and (query.settled or letter.settled is None)
    ]
    return port.Found(found)


_SIZE_OF: dict[type, Callable[[Any], int]] = {
    port.RunQuery: lambda head: len(encode(head.snapshot)),
    port.EventQuery: lambda event: len(encode_body(event.data)),
    port.MailboxQuery: lambda signal: len(signal.payload),
    port.TaskQuery: lambda task: len(encode(task)),
    port.DeadLetterQuery: lambda letter: len(letter.envelope),
}
"""How large a row is, for queries that have `most_bytes`."""


def page_of(found: list[Row], query: port.Query[Row], limit: int) -> list[Row]:
    """Return the rows that remain within the query's bounds."""
    size_of = _SIZE_OF.get(type(query))
    if size_of is None:
        return found[:limit]
    most_bytes: int | None = getattr(query, "most_bytes", None)
    return list(within(found[:limit], most_bytes, size_of))


class Claimable(Protocol):
    """The part of a run that decides who may claim it; a run's head has it."""

    @property
    def lease_owner(self) -> str | None:
        """The node that owns the run."""
        ...

    @property
    def ready_at(self) -> Instant | None:
        """The instant since which, or from which on, the run can continue."""
        ...

    @property
    def needs(self) -> int:
        """The format level that a node must support to continue it."""
        ...

    @property
    def plan_id(self) -> str:
        """Its workflow."""
        ...

    @property
    def plan_version(self) -> str:
        """The version of its workflow."""
        ...


def claimed_as(head: Claimable) -> port.Plan:
    """Return the definition by which a run is claimed."""
    return levels.claimed_as(head.plan_id, head.plan_version, head.needs)


def find_orphaned(
    heads: Iterable[Claimable],
    nodes: Mapping[str, Instant],
    known: Mapping[str, frozenset[port.Plan]],
    late_ms: int,
    now: Instant,
) -> list[port.OrphanedDefinition]:
    """Return the definitions of runs that have been eligible this long, without those that a live node may have."""
    alive = [node for node, lease_until in nodes.items() if lease_end(lease_until, now) > now]
    if any(node not in known for node in alive):
        return []
    found: dict[port.Plan, Instant] = {}
    for head in heads:
        owner = head.lease_owner
        since = head.ready_at if owner is None else min(nodes[owner], now)
        is_late = since is not None and since <= now - late_ms * 1_000 and owner not in alive
        plan = levels.definition_of(head.plan_id, head.plan_version)
        if is_late and since is not None and not any(plan in known[node] for node in alive):
            found[claimed_as(head)] = min(since, found.get(claimed_as(head), since))
    return sorted(
        (port.OrphanedDefinition(plan, since) for plan, since in found.items()),
        key=lambda each: (each.since, each.plan),
    )
