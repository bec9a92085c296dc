"""Runs, turns, signals and messages for tests of stores: valid, small, and created by the engine's own rules.

`SampleNode` does what a node does, one step at a time and without a program: it starts runs, claims them, and commits
turns that handle everything that waits and then do what the test specifies.
"""

from collections.abc import Awaitable, Callable, Iterable, Sequence
from typing import Any, TypeVar

from msgspec.structs import replace

from holdfast.core import codec, commands
from holdfast.core.access import AccessToken, digest_of
from holdfast.core.attributes import Attributes
from holdfast.core.bus import OutboxEntry
from holdfast.core.dead_letters import DeadLetter, Reason, to_dead_letter
from holdfast.core.decide import Input
from holdfast.core.event_writer import Refusal
from holdfast.core.events import ErrorInfo, Event, PlanSource, RunQueued
from holdfast.core.index_rows import ActivityRecord
from holdfast.core.instants import Instant
from holdfast.core.messages import Message, MessageType, Signal, SignalRequest
from holdfast.core.state import RunState, state_of
from holdfast.engine.turns.draft import TurnDraft, prepare_run
from holdfast.store.port import (
    CommitConflict,
    Committed,
    Created,
    Index,
    Job,
    LoadedRun,
    MailboxQuery,
    NewRun,
    RunQuery,
    RunStore,
    Store,
    TaskQuery,
    Turn,
    WaitQuery,
)
from holdfast.store.queries import (
    AlertQuery,
    BusDeadLetterQuery,
    DeadLetterQuery,
    OutboxQuery,
    PlanQuery,
    SinkQuery,
    TokenQuery,
)
from holdfast.testing.clock import START

T = TypeVar("T")
K = TypeVar("K", str, int, tuple[str, str], tuple[int, str], tuple[str, str, str])

PAGE = 100
"""The number of rows that are read at a time; a store's own limit may be lower."""

FEW = 5
"""The number of runs that are loaded at a time: less than the smallest batch that a test allows."""


# --- what goes in -------------------------------------------------------------------------------------------------


def new_run(
    run_id: str = "run-1",
    *,
    now: Instant = START,
    request_id: str = "",
    value: object = None,
    tenant: str = "default",
    project: str = "default",
    environment: str = "default",
    plan_id: str = "order",
    plan_version: str = "1",
    parent: str | None = None,
    reference_key: str | None = None,
    tags: tuple[str, ...] = (),
    plan: str | None = None,
    attributes: Attributes | None = None,
    requires_approval: bool = False,
) -> NewRun:
    """Return a run to create: queued, with the message that will start it. `value` is its input.

    `plan` is the hash of its plan's body.
    """
    queued = RunQueued(
        plan_id=plan_id,
        plan_version=plan_version,
        tenant=tenant,
        project=project,
        environment=environment,
        run_request_id=request_id,
        input=codec.encode(value),
        parent_run_id=parent,
        plan=None if plan is None else PlanSource(plan),
        attributes=attributes or {},
        requires_approval=requires_approval,
    )
    return prepare_run(run_id, queued, now, "starter", reference_key=reference_key, tags=tags)


def signal(
    run_id: str = "run-1",
    name: str = "go",
    value: object = None,
    *,
    signal_id: str | None = None,
    step_id: str | None = None,
    require_waiting: bool = False,
) -> SignalRequest:
    """Return a signal to deliver; `value` is its payload."""
    return SignalRequest(
        run_id=run_id,
        name=name,
        payload=codec.encode(value),
        signal_id=signal_id,
        step_id=step_id,
        require_waiting=require_waiting,
    )


def message(
    run_id: str = "run-1",
    signal_id: str = "message-1",
    *,
    due_at: Instant | None = None,
    kind: MessageType = "InternalContinue",
    occurred_at: Instant = START,
) -> Message:
    """Return a message to deliver."""
    return Message(signal_id=signal_id, run_id=run_id, type=kind, occurred_at=occurred_at, due_at=due_at)


def dead_letter(
    run_id: str = "run-1", signal_id: str = "poison", reason: Reason = "retries exhausted", died_at: Instant = START
) -> DeadLetter:
    """Return the dead letter of a message that could not be handled."""
    return to_dead_letter(message(run_id, signal_id), reason, "Conflict: not now", "node-a", died_at)


def record(
    run_id: str = "run-1",
    step_id: str = "charge",
    *,
    activity_name: str = "charge",
    idempotency_key: str = "order-1",
    result: object = None,
    at: Instant = START,
) -> ActivityRecord:
    """Return the record of an activity that completed."""
    return ActivityRecord(
        run_id=run_id,
        activity_name=activity_name,
        step_id=step_id,
        idempotency_key=idempotency_key,
        status="indeterminate",
        result=codec.encode(result),
        created_at=at,
        updated_at=at,
    )


def job(
    run_id: str = "run-1",
    step_id: str = "charge",
    queue: str = "mail",
    *,
    activity_name: str = "charge",
    attempt: int = 1,
    due_at: Instant | None = None,
    details: object = None,
) -> Job:
    """Return an activity to put into a queue."""
    return Job(
        run_id=run_id,
        step_id=step_id,
        queue=queue,
        activity=activity_name,
        input=codec.encode([run_id, step_id]),
        engine_attempt_id=attempt,
        scheduled_at=START,
        due_at=due_at,
        details=codec.encode(details),
        context=codec.encode({"user": "ann"}),
    )


def wait(name: str = "go", step_id: str | None = None, until: Instant | None = None) -> commands.WaitSignal:
    """Return the command to wait for a signal. By default the step has the signal's name."""
    return commands.WaitSignal(step_id=step_id or name, name=name, until=until)


def timer(due_at: Instant, step_id: str = "sleep") -> commands.StartTimer:
    """Return the command to sleep until then."""
    return commands.StartTimer(step_id=step_id, due_at=due_at)


def task(step_id: str = "approve", *, roles: tuple[str, ...] = (), assignee: str | None = None) -> commands.AskHuman:
    """Return the command to ask a human."""
    return commands.AskHuman(step_id=step_id, name=step_id, roles=roles, assignee=assignee)


def activity(step_id: str = "charge", *, idempotency_key: str | None = None) -> commands.RunActivity:
    """Return the command to run an activity of the step's name."""
    return commands.RunActivity(step_id=step_id, name=step_id, idempotency_key=idempotency_key)


def marker(step_id: str = "mark", value: object = None) -> commands.RecordMarker:
    """Return the command to record a value: an event that changes nothing else."""
    return commands.RecordMarker(step_id=step_id, name=step_id, value=codec.encode(value))


def complete(result: object = None) -> commands.CompleteRun:
    """Return the command to finish."""
    return commands.CompleteRun(result=codec.encode(result))


def fail(text: str = "no stock") -> commands.FailRun:
    """Return the command to finish with an error."""
    return commands.FailRun(error=ErrorInfo("OutOfStock", text))


def answer(run_id: str, step_id: str, token: str, actor: str = "ann", value: object = None) -> Message:
    """Return the message that completes a task."""
    return Message(
        signal_id=f"answer-{step_id}",
        run_id=run_id,
        type="TaskCompleted",
        occurred_at=START,
        waiting_token=token,
        step_id=step_id,
        payload=codec.encode({"actor": actor, "answer": value}),
    )


# --- one node -----------------------------------------------------------------------------------------------------


class SampleNode:
    """A node that does one thing at a time."""

    def __init__(self, store: Store, name: str = "node-a", lease_ms: int = 30_000) -> None:
        self.store = store
        self.name = name
        self.lease_ms = lease_ms

    async def renew(self, *, is_start: bool = False) -> Instant:
        """Renew the node's lease."""
        return await self.store.renew(self.name, self.lease_ms, None, is_start)

    async def create(self, run_id: str, **options: Any) -> LoadedRun:
        """Create a run owned by this node, and return it before its first turn. Options: see `new_run`."""
        await self.renew()
        [created] = await self.store.create([new_run(run_id, now=await self.store.now(), **options)], self.name)
        assert isinstance(created, Created), created
        return await self.load(run_id)

    async def start(self, run_id: str = "run-1", *todo: commands.Command, **options: Any) -> LoadedRun:
        """Create a run owned by this node, and commit its first turn. Options: see `new_run`."""
        await self.create(run_id, **options)
        return await self.step(run_id, *todo)

    async def load(self, run_id: str) -> LoadedRun:
        """Return a run that must exist."""
        [run] = await self.store.load([run_id])
        assert run is not None, f"there is no run {run_id!r}"
        return run

    async def claim(self, limit: int = 100) -> list[LoadedRun]:
        """Claim after renewing the lease."""
        await self.renew()
        return await self.store.claim(self.name, limit)

    async def turn(
        self,
        run: LoadedRun,
        *todo: commands.Command,
        inputs: Iterable[Input] = (),
        records: Iterable[ActivityRecord] = (),
        release: bool = False,
    ) -> Turn:
        """Return a turn that handles what was waiting for the run when it was loaded, and then does these things."""
        history = await read_history(self.store, run.head.run_id)
        state = state_of(run.head.run_id, history[: run.head.version])
        return draft_turn(state, run, await self.store.now(), self.name, todo, inputs, records, release=release)

    async def commit(self, turn: Turn) -> Committed | CommitConflict:
        """Commit one turn and return its answer."""
        [answer] = await self.store.commit([turn])
        return answer

    async def step(self, run_id: str, *todo: commands.Command, **options: Any) -> LoadedRun:
        """Load a run, commit a turn that must succeed, and load it again. Options: see `turn`."""
        turn = await self.turn(await self.load(run_id), *todo, **options)
        answer = await self.commit(turn)
        assert isinstance(answer, Committed), answer
        return await self.load(run_id)


def draft_turn(
    state: RunState,
    run: LoadedRun,
    now: Instant,
    node: str,
    todo: Sequence[commands.Command] = (),
    inputs: Iterable[Input] = (),
    records: Iterable[ActivityRecord] = (),
    *,
    release: bool = False,
) -> Turn:
    """Return a turn that handles what waits for the run, and then performs these actions."""
    draft = TurnDraft(state, run, now, node)
    for item in (*run.messages, *inputs, *run.signals):
        draft.handle(item)
    if todo:
        outcome = draft.apply_commands(todo)
        if isinstance(outcome, Refusal):
            raise outcome.error
        for waiting in run.signals:
            draft.handle(waiting)  # a step that was just opened may use what was there before it
    turn = draft.finish(release=release)
    known = tuple(records)
    return replace(turn, records=turn.records + known) if known else turn


# --- what comes out -----------------------------------------------------------------------------------------------


async def read_history(store: RunStore, run_id: str, version: int | None = None) -> list[Event]:
    """Return all events of a run, page by page, without gaps. Passing its `version` saves one read."""
    events: list[Event] = []
    while (version is None or len(events) < version) and (
        page := await store.read_events(run_id, after=len(events), limit=PAGE)
    ):
        assert page[0].run_seq == len(events) + 1, f"the page after {len(events)} begins with {page[0].run_seq}"
        events += page
    return events


async def read_mailbox(store: Index, run_id: str, inbox_seq: int | None = None) -> list[Signal]:
    """Return all signals of a run, including consumed ones. Passing the last `inbox_seq` saves one read."""
    return await _read_all(
        lambda after: store.find(MailboxQuery(run_id=run_id, consumed=True, after=after, limit=PAGE)),
        0,
        lambda found: found.inbox_seq,
        inbox_seq,
    )


def access_token(token_id: str = "0123456789abcdef", secret: str = "f" * 64, **fields: Any) -> AccessToken:
    """Return the stored record of the token with this secret."""
    given = {"name": "ann", "role": "admin", "created_at": START, **fields}
    return AccessToken(token_id=token_id, digest=digest_of(secret), **given)


async def read_picture(store: Store, nodes: Iterable[str] = (), queues: Iterable[str] = ("mail",)) -> dict[str, Any]:
    """Return everything that can be read from a store, for comparison with another time or another store."""
    heads = await _read_all(lambda after: store.find(RunQuery(after=after, limit=PAGE)), "", lambda head: head.run_id)
    waits = await _read_all(
        lambda after: store.find(WaitQuery(after=after, limit=PAGE)),
        ("", ""),
        lambda wait: (wait.run_id, wait.step_id),
    )
    tasks = await _read_all(lambda after: store.find(TaskQuery(after=after, limit=PAGE)), "", lambda task: task.task_id)
    letters = await _read_all(
        lambda after: store.find(DeadLetterQuery(settled=True, after=after, limit=PAGE)),
        (0, ""),
        lambda letter: (letter.died_at, letter.letter_id),
    )
    tokens = await _read_all(
        lambda after: store.find_tokens(TokenQuery(sessions=True, after=after, limit=PAGE)),
        "",
        lambda token: token.token_id,
    )
    plans = await _read_all(
        lambda after: store.find_plans(PlanQuery(after=after, limit=PAGE)),
        ("", "", ""),
        lambda plan: (plan.tenant, plan.plan_id, plan.plan_version),
    )
    ids = [head.run_id for head in heads]
    sinks = await store.find(SinkQuery(counted=True))
    return {
        "sinks": sinks,
        "outbox": {status.sink.name: await read_outbox(store, status.sink.name) for status in sinks},
        "bus letters": await store.find(BusDeadLetterQuery()),
        "alerts": await store.find(AlertQuery()),
        "tokens": tokens,
        "plans": plans,
        "runs": heads,
        "loaded": [run for first in range(0, len(ids), FEW) for run in await store.load(ids[first : first + FEW])],
        "events": {head.run_id: await read_history(store, head.run_id, head.version) for head in heads},
        "mailboxes": {head.run_id: await read_mailbox(store, head.run_id, head.inbox_seq) for head in heads},
        "waits": waits,
        "tasks": tasks,
        "letters": letters,
        "stats": await store.stats(),
        "next_due": {node: await store.next_due(node) for node in ("no-node", *nodes)},
        "next_visible": {queue: await store.next_due("no-node", [], [queue]) for queue in queues},
    }


async def read_outbox(store: Index, sink: str) -> list[OutboxEntry]:
    """Return what a sink has yet to receive, by run and number, without the store's own numbers of the runs."""
    entries: list[OutboxEntry] = []
    query = OutboxQuery(sink=sink, limit=PAGE)
    while page := await store.find(query):
        entries += page
        query = replace(query, after=(page[-1].number, page[-1].from_seq))
    return sorted((replace(entry, number=0) for entry in entries), key=lambda entry: (entry.run_id, entry.from_seq))


async def _read_all(
    read_page: Callable[[K], Awaitable[list[T]]], after: K, key: Callable[[T], K], last: K | None = None
) -> list[T]:
    found: list[T] = []
    while after != last and (page := await read_page(after)):
        assert key(page[0]) > after, f"the page after {after!r} begins with {key(page[0])!r}"
        found += page
        after = key(page[-1])
    return found
