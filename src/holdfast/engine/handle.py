"""`RunHandle`: one run, seen from outside."""

from typing import Any, Generic, TypeVar

from holdfast.core import codec
from holdfast.core import events as e
from holdfast.core.decide import update_step_id
from holdfast.core.events import Event
from holdfast.core.idempotency import signal_uuid
from holdfast.core.messages import RESERVED_PREFIX, UPDATE_SIGNAL, AcceptedSignalResult, SignalRequest
from holdfast.core.snapshot import RunSnapshot, project_run
from holdfast.core.state import TERMINAL, RunStatus
from holdfast.engine.controls import Commands, Operators
from holdfast.engine.finishes import Finish
from holdfast.engine.recording import head_of, recorded
from holdfast.engine.letters import Fate, fate_of
from holdfast.engine.node import Node
from holdfast.errors import InvalidInput, RunCancelled, RunFailed, UpdateFailed
from holdfast.program.definitions import WorkflowDefinition
from holdfast.store import port

R = TypeVar("R")

EVERYBODY = Operators()


class RunHandle(Commands, Generic[R]):
    """One run: its result, its history, and what can be sent to it."""

    __slots__ = ("_definition", "_node", "_operators", "_store", "run_id")

    def __init__(
        self,
        run_id: str,
        store: port.Store,
        definition: WorkflowDefinition | None,
        node: Node | None,
        operators: Operators | None = None,
    ) -> None:
        self.run_id = run_id
        self._store = store
        self._definition = definition
        self._node = node
        self._operators = operators or EVERYBODY

    async def result(self) -> R:
        """Wait for the run to finish; return what it returned, or raise `RunFailed` or `RunCancelled`."""
        body = (await self._last_event()).data
        if isinstance(body, e.RunCompleted):
            kind = self._definition.signature.result_type if self._definition else Any
            value: R = codec.decode(body.result, kind)
            return value
        if isinstance(body, e.RunFailed):
            raise RunFailed(f"run {self.run_id} failed: {body.error.code}: {body.error.message}", body.error)
        raise RunCancelled(f"run {self.run_id} was cancelled", run_id=self.run_id)

    async def signal(
        self, name: str, payload: Any = None, *, signal_id: str | None = None, require_waiting: bool = False
    ) -> AcceptedSignalResult:
        """Send a signal. With a `signal_id` a retry is recognised and answered as the first time."""
        if name.startswith(RESERVED_PREFIX):
            raise InvalidInput(f"signal {name!r}: names that begin with {RESERVED_PREFIX!r} are the engine's own")
        request = SignalRequest(
            run_id=self.run_id,
            name=name,
            payload=codec.encode(payload),
            signal_id=signal_id,
            require_waiting=require_waiting,
        )
        [answer] = await self._store.deliver([request])
        if isinstance(answer, port.Refused):
            raise answer.error
        assert answer.result is not None
        return answer.result

    async def follow(self, receipt: AcceptedSignalResult) -> Fate:
        """Return what became of a signal: waiting, consumed by which event, expired, or dead-lettered and why."""
        return await fate_of(self._store, receipt)

    async def query(self, name: str, /, **arguments: Any) -> Any:
        """Ask the run about its present state. It is answered by this process, from the run's program."""
        if self._node is None:
            raise InvalidInput("a query is answered by a node, and none is open here")
        return codec.decode(await self._node.lives.query(self.run_id, name, codec.encode(arguments)), Any)

    async def update(self, name: str, /, *, update_id: str | None = None, **arguments: Any) -> Any:
        """Ask the run for something and wait for its answer. With an `update_id` a retry gets the first answer."""
        payload = codec.encode({"name": name, "input": arguments})
        request = SignalRequest(run_id=self.run_id, name=UPDATE_SIGNAL, payload=payload, signal_id=update_id)
        before = await self._head()
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

    async def _last_event(self) -> Event:
        """Wait for the run to finish, here or elsewhere, and return its last event."""
        finish = await self._finished_elsewhere() if self._node is None else await self._finished(self._node)
        if finish.last is not None:
            return finish.last
        [last] = await self._store.read_events(self.run_id, finish.version - 1)
        return last

    async def _finished(self, node: Node) -> Finish:
        finished = node.finishes.wait(self.run_id)
        try:
            if not node.holds(self.run_id):
                head = await self._head()
                if head.status in TERMINAL:
                    return Finish(head.version)
            return await finished
        finally:
            node.finishes.let_go(self.run_id, finished)

    async def _finished_elsewhere(self) -> Finish:
        """Wait without a node: look whenever the store rings, and now and then."""
        listener = self._store.wakeups.listen()
        try:
            while (head := await self._head()).status not in TERMINAL:
                await listener.wait(1.0)
            return Finish(head.version)
        finally:
            listener.close()

    async def _head(self) -> port.RunHead:
        return await head_of(self._store, self.run_id)
