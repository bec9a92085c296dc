"""`RunHandle`: one run, seen from outside."""

from typing import Any, Generic, TypeVar

from msgspec import Raw

from holdfast.core import codec
from holdfast.core import events as e
from holdfast.core.decide import update_step_id
from holdfast.core.events import Event
from holdfast.core.keys import signal_uuid
from holdfast.core.messages import UPDATE_SIGNAL, AcceptedSignalResult, SignalRequest
from holdfast.core.names import check_signal_name, require_step_name
from holdfast.core.snapshot import RunSnapshot, project_run
from holdfast.core.state import TERMINAL, RunStatus
from holdfast.engine.completion_waiters import Completion
from holdfast.engine.history import head_of, recorded
from holdfast.engine.inbox.authorization import permits_of
from holdfast.engine.inbox.operator_commands import Caller, Commands, ControlRequest, Operators
from holdfast.engine.inbox.receipts import Receipt, Unconsumed, mailbox_of, receipt_of
from holdfast.engine.inbox.signals import Sender
from holdfast.engine.node import Node
from holdfast.engine.start.runtime import Opened
from holdfast.errors import (
    EngineError,
    InvalidInput,
    NotDurable,
    RunCancelled,
    RunFailed,
    RunTerminal,
    StoreUnavailable,
    UpdateFailed,
)
from holdfast.program.coroutine import current_program, refuse_inside
from holdfast.program.definitions import WorkflowDefinition
from holdfast.program.signals import send_signal
from holdfast.store import port
from holdfast.store.validation import no_such_run

R = TypeVar("R")

EVERYBODY = Operators()


class RunHandle(Commands, Generic[R]):
    """One run: its result, its history, and what can be sent to it."""

    __slots__ = ("_definition", "_node", "_operators", "_sender", "_store", "run_id")

    def __init__(
        self,
        run_id: str,
        store: port.Store,
        definition: WorkflowDefinition | None,
        node: Node | None,
        sender: Sender | None = None,
        operators: Operators | None = None,
    ) -> None:
        self.run_id = run_id
        self._store = store
        self._definition = definition
        self._node = node
        self._sender = sender or Sender(store, {})
        self._operators = operators or EVERYBODY

    async def result(self) -> R:
        """Wait for the run to finish; return what it returned, or raise `RunFailed` or `RunCancelled`."""
        body = (await self.last_event()).data
        if isinstance(body, e.RunCompleted):
            kind = self._definition.signature.result_type if self._definition else Any
            value: R = codec.decode(body.result, kind)
            return value
        if isinstance(body, e.RunFailed):
            raise RunFailed(f"run {self.run_id} failed: {body.error.code}: {body.error.message}", body.error)
        raise RunCancelled(f"run {self.run_id} was cancelled", run_id=self.run_id)

    async def signal(
        self,
        name: str,
        payload: Any = None,
        *,
        signal_id: str | None = None,
        require_waiting: bool = False,
        step_id: str | None = None,
        actor: str = "",
    ) -> AcceptedSignalResult:
        """Send a signal: to the oldest wait of its name, or with `step_id` to exactly that wait.

        With a `signal_id` a retry is recognised and answered as the first time. With `require_waiting` it is refused
        unless a wait would take it now. Inside a workflow it is sent once, with the turn, and `accepted` is False.
        `actor` is who sends it, for the authoriser.
        """
        program = current_program()
        if program is not None:
            if require_waiting:
                raise InvalidInput(
                    "a workflow does not wait for the answer to require_waiting", field="require_waiting"
                )
            return send_signal(program, self.run_id, name, payload, signal_id, step_id)
        check_signal_name(name)
        request = SignalRequest(
            run_id=self.run_id,
            name=name,
            payload=codec.encode(payload),
            signal_id=signal_id,
            step_id=step_id,
            require_waiting=require_waiting,
            actor=actor,
            audit=self._operators.audit(actor=actor, subject=name),
        )
        return await self._sender.send(request, self._definition, permits_of(self._operators, self._store))

    async def receipt(self, sent: AcceptedSignalResult | str, signal_id: str = "") -> Receipt:
        """Return what became of a signal: waiting, consumed by which event, expired, or dead-lettered and why.

        `sent` is what `signal` returned. Whoever has that no more gives the signal's name and its `signal_id`.
        """
        if isinstance(sent, str):
            return await receipt_of(self._store, self.run_id, sent, signal_id)
        return await receipt_of(self._store, self.run_id, sent.signal_name, sent.signal_id, sent.signal_storage_key)

    async def mailbox(self) -> list[Unconsumed]:
        """Return the signals that no wait has taken, oldest first, with their age."""
        return await mailbox_of(self._store, self.run_id)

    async def query(self, name: str, /, **arguments: Any) -> Any:
        """Ask the run about its present state. It is answered by this process, from the run's program."""
        return codec.decode(await query_run(self, name, codec.encode(arguments)), Any)

    async def update(self, name: str, /, *, update_id: str | None = None, **arguments: Any) -> Any:
        """Ask the run for something and wait for its answer. With an `update_id` a retry gets the first answer."""
        return await self.update_with(name, arguments, update_id)

    async def update_with(self, name: str, arguments: dict[str, Any], update_id: str | None = None) -> Any:
        """Do what `update` does, with arguments of any name."""
        require_step_name("update name", name)
        payload = codec.encode({"name": name, "input": arguments})
        update_id = self._operators.ids.new_id() if update_id is None else update_id
        request = SignalRequest(
            run_id=self.run_id,
            name=UPDATE_SIGNAL,
            payload=payload,
            signal_id=update_id,
            audit=self._operators.audit(subject=name),
        )
        before = await self._head()
        permits = permits_of(self._operators, self._store)
        if permits is not None:
            await permits.check(request)
        [answer] = await self._store.deliver([request])
        if isinstance(answer, port.Refused):
            raise answer.error
        assert answer.result is not None
        after = before.version if isinstance(answer, port.Accepted) else 0
        step_id = update_step_id(signal_uuid(answer.result.signal_storage_key))
        completed = await recorded(
            self._store,
            self.run_id,
            after,
            lambda event: event.step_id == step_id and isinstance(event.data, e.UpdateCompleted),
        )
        body = completed.data
        assert isinstance(body, e.UpdateCompleted)
        if body.error is not None and body.error.code == RunTerminal.code:
            raise RunTerminal(f"run {self.run_id} ended before it had answered", run_id=self.run_id)
        if body.error is not None:
            raise UpdateFailed(f"update {name!r}: {body.error.code}: {body.error.message}", body.error)
        return codec.decode(body.result, Any)

    async def events(self) -> list[Event]:
        """Return the whole history."""
        events: list[Event] = []
        while page := await self._store.read_events(self.run_id, len(events)):
            events += page
        if not events:
            await self._head()  # raises: there is no run without events
        return events

    async def status(self) -> RunStatus:
        """Return where the run stands, without reading its history."""
        return (await self._head()).status

    async def snapshot(self) -> RunSnapshot:
        """Return the run as operators see it."""
        return project_run(self.run_id, await self.events())

    async def last_event(self) -> Event:
        """Wait for the run to finish, here or elsewhere, and return its last event."""
        refuse_inside("a run's handle", "call a child, or wait for a signal")
        finish = await self._finished_elsewhere() if self._node is None else await self._finished(self._node)
        if finish.last is not None:
            return finish.last
        [last] = await self._store.read_events(self.run_id, finish.version - 1)
        return last

    async def _finished(self, node: Node) -> Completion:
        if node.completion_waiters.problem is not None and node.failure is None:
            return await self._finished_before(node.completion_waiters.problem)
        finished = node.completion_waiters.wait(self.run_id)
        try:
            if not node.owns(self.run_id):
                head = await node.completion_waiters.head(self.run_id)
                if head is None:
                    raise no_such_run(self.run_id)
                if head.status in TERMINAL:
                    return Completion(head.version)
            return await finished
        finally:
            node.completion_waiters.let_go(self.run_id, finished)

    async def _finished_before(self, problem: EngineError) -> Completion:
        """Look, although nobody waits for runs here any more: the store may still be open."""
        try:
            head = await self._head()
        except StoreUnavailable as closed:
            none_open = f"no node is open: ask `app.run({self.run_id!r})` inside `async with app.node(...)`"
            raise EngineError(none_open) from closed
        if head.status not in TERMINAL:
            raise problem
        return Completion(head.version)

    async def _finished_elsewhere(self) -> Completion:
        """Wait without a node: look whenever the store rings, and now and then."""
        listener = self._store.wakeups.listen()
        try:
            while (head := await self._head()).status not in TERMINAL:
                await listener.wait(1.0)
            return Completion(head.version)
        finally:
            listener.close()

    async def _head(self) -> port.RunHead:
        refuse_inside("a run's handle", "call a child, wait for a signal, or make it an activity")
        return await head_of(self._store, self.run_id)


def handle_of(
    opened: Opened, run_id: str, definition: WorkflowDefinition | None = None, caller: Caller | None = None
) -> RunHandle[Any]:
    """Return the handle of a run, whether it exists or not, for the caller of a service."""
    return RunHandle(run_id, opened.store, definition, opened.node, opened.sender, opened.operators_for(caller))


async def query_run(run: RunHandle[Any], name: str, arguments: Raw) -> Raw:
    """Do what `RunHandle.query` does, with arguments and an answer as JSON."""
    require_step_name("query name", name)
    if run._node is None:
        raise InvalidInput("a query is answered by a node, and none is open here")
    if run._operators.authoriser is not None:
        head = await run._head()
        asked = ControlRequest(
            run_id=run.run_id,
            plan_id=head.plan_id,
            tenant=head.tenant,
            command="QUERY",
            name=name,
            step_id=None,
            actor="",
            reason="",
            payload=arguments,
        )
        await run._operators.require(asked)
    return await run._node.run_cache.query(run.run_id, name, arguments)


def run_from_inside(run_id: str) -> RunHandle[Any]:
    """Return the handle of a run for a workflow, which may signal it and do nothing else: nothing else is recorded."""
    out_of_reach: Any = _OutOfReach()
    return RunHandle(run_id, out_of_reach, None, None)


class _OutOfReach:
    """The store as a workflow sees it."""

    def __getattr__(self, verb: str) -> Any:
        raise NotDurable(
            "inside a workflow a run can only be signalled; whatever else is asked of it is for activities"
        )
