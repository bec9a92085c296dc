"""`RunHandle`: the handle of one run."""

from collections.abc import Mapping
from typing import Any, Generic, TypeVar, cast

from msgspec import Raw, Struct
from msgspec.structs import replace

from holdfast.core import codec
from holdfast.core import events as e
from holdfast.core.audit import Caller
from holdfast.core.events import NULL, Event
from holdfast.core.keys import require_step_name
from holdfast.core.messages import AcceptedSignalResult, ControlName, SignalRequest, cancelled_text
from holdfast.core.snapshot import RunSnapshot, project_run
from holdfast.core.state import RunStatus
from holdfast.engine.inbox.operator_commands import OperatorCommand
from holdfast.engine.inbox.receipts import Receipt, Unconsumed
from holdfast.engine.runtime import Runtime
from holdfast.engine.stream_reading import StreamReader
from holdfast.errors import InvalidInput, NotDurable, RunCancelled, RunFailed, RunTimedOut
from holdfast.program.coroutine import current_program, refuse_inside
from holdfast.program.definitions import WorkflowDefinition
from holdfast.program.signals import send_signal
from holdfast.program.values import named

R = TypeVar("R")


class RunHandle(Struct, Generic[R], frozen=True, eq=False):
    """One run: its result, its history, and what you can send to it.

    Operators' commands (`cancel`, `pause`, `resume`, `approve`, `retry_step`, `skip_step`, `terminate`) are durable
    when their method returns. A repeated command with the same `signal_id` counts once. With `wait` the method returns
    when the run has handled the command: `Conflict` means that the run refused it, with the reason. `NotPermitted`
    means that the authoriser did.
    """

    _runtime: Runtime
    run_id: str
    """The id of the run."""
    _definition: WorkflowDefinition | None = None
    _caller: Caller | None = None
    is_reused: bool = False
    """Whether the start found a run with this id from another request, and left it unchanged."""
    _is_known: bool = False
    """Whether it was started here, so that it exists or existed."""

    def __repr__(self) -> str:
        return f"<RunHandle {self.run_id}>"

    # --- how it ends

    async def result(self) -> R:
        """Wait for the run to finish; return its result, or raise `RunFailed`, `RunTimedOut` or `RunCancelled`."""
        refuse_inside("a run's handle", "call a child, or wait for a signal")
        body = (await self._runtime.wait_finished(self.run_id, is_known=self._is_known)).data
        if isinstance(body, e.RunCompleted):
            codec.refuse_sealed(body.result)
            if self._definition is None:
                return cast(R, codec.decode(body.result, Any))
            return cast(R, self._definition.values.decode(body.result, self._definition.signature.result_type))
        if isinstance(body, e.RunFailed):
            if body.timeout:
                raise RunTimedOut(f"run {self.run_id} failed: {body.error.message}", body.error)
            raise RunFailed(f"run {self.run_id} failed: {body.error}", body.error)
        reason = getattr(body, "reason", "")
        raise RunCancelled(cancelled_text(self.run_id, reason), run_id=self.run_id, reason=reason)

    async def last_event(self) -> Event:
        """Wait for the run to finish, on any node, and return its last event."""
        refuse_inside("a run's handle", "call a child, or wait for a signal")
        return await self._runtime.wait_finished(self.run_id, is_known=self._is_known)

    # --- what it is now

    async def status(self) -> RunStatus:
        """Return the run's status, without reading its history."""
        return (await self._outside().head(self.run_id)).status

    async def published(self) -> dict[str, Any]:
        """Return what the workflow has published so far (`hf.publish`), without reading its history."""
        snapshot = (await self._outside().head(self.run_id)).snapshot
        return {} if snapshot is None else dict(snapshot.published)

    async def events(self) -> list[Event]:
        """Return the whole history."""
        return await self._outside().events(self.run_id)

    def stream(self, name: str, *, after: int = 0, value_type: Any = Any) -> StreamReader:
        """Read a stream of the run while it is written: `async for chunk in run.stream("tokens"): print(chunk.value)`.

        It begins after chunk `after`, and ends when the stream is closed or the run has finished. Values are decoded as
        `value_type`. After a lost connection, continue with `after=` the number of the last chunk that you have.
        """
        runtime = self._outside()
        require_step_name("name", name)
        if type(after) is not int or after < 0:
            raise InvalidInput(f"after is the number of a chunk, or 0, not {after!r}", field="after")
        values = runtime.registry.values
        return StreamReader(runtime.streams, self.run_id, name, after, lambda raw: values.decode(raw, value_type))

    async def snapshot(self) -> RunSnapshot:
        """Return the run as operators see it."""
        return project_run(self.run_id, await self.events())

    async def mailbox(self) -> list[Unconsumed]:
        """Return the signals that no wait has consumed, oldest first, with their age."""
        return await self._outside().mailbox(self.run_id)

    async def query(self, name: str, /, **arguments: Any) -> Any:
        """Call a query of the run. A node answers it from the run's current state."""
        answer = await self._outside().query(
            self.run_id, name, self._runtime.registry.values.encode(arguments), self._caller
        )
        return codec.decode(answer, Any)

    async def state(self) -> R:
        """Return the current state of a flow, as its type. While branches run, it is the state before them."""
        answer = await self._outside().query(self.run_id, "state", codec.encode({}), self._caller)
        definition = self._definition
        if definition is None:
            return cast(R, codec.decode(answer, Any))
        return cast(R, definition.values.decode(answer, definition.signature.result_type))

    # --- what is sent to it

    async def signal(
        self,
        name: str,
        payload: Any = None,
        *,
        signal_id: str | None = None,
        require_waiting: bool = False,
        step_id: str | None = None,
        actor: str = "",
        connection: Any = None,
    ) -> AcceptedSignalResult:
        """Send a signal: to the oldest wait of its name, or with `step_id` to exactly that wait.

        A repeated signal with the same `signal_id` counts once and gets the first answer. With `require_waiting` it is
        refused unless a wait would consume it now. Inside a workflow it is sent once, in the commit of the turn, and
        `accepted` is False. `actor` is the sender, for the authoriser. With a `connection` it is sent in your open
        transaction and takes effect when you commit: see docs/transactions.md.
        """
        program = current_program()
        if program is not None:
            if connection is not None:
                raise InvalidInput("a workflow has no connection to a database: signal without one", field="connection")
            if require_waiting:
                raise InvalidInput(
                    "a workflow does not wait for the answer to require_waiting", field="require_waiting"
                )
            return send_signal(program, self.run_id, name, payload, signal_id, step_id)
        request = SignalRequest(
            run_id=self.run_id,
            name=name,
            payload=self._runtime.registry.values.encode(payload),
            signal_id=signal_id,
            step_id=step_id,
            require_waiting=require_waiting,
            actor=actor,
        )
        return await self._runtime.signal(request, self._definition, self._caller, connection)

    async def receipt(self, sent: AcceptedSignalResult | str, signal_id: str = "") -> Receipt:
        """Return what happened to a signal: waiting, consumed by which event, expired, or dead-lettered and why.

        `sent` is what `signal` returned, or the signal's name, with its `signal_id`.
        """
        runtime = self._outside()
        if isinstance(sent, str):
            return await runtime.receipt(self.run_id, sent, signal_id)
        if not isinstance(sent, AcceptedSignalResult):
            raise InvalidInput("sent is what `signal` returned, or a signal's name", field="sent")
        return await runtime.receipt(self.run_id, sent.signal_name, sent.signal_id, sent.signal_storage_key)

    async def update(self, name: str, /, *, update_id: str | None = None, **arguments: Any) -> Any:
        """Send an update and wait for the run's answer. A repeated `update_id` gets the first answer.

        Inside a workflow it is a step: sent once, and recorded with its answer. A refusal raises `ActivityFailed`.
        """
        return await self.update_with(name, arguments, update_id)

    async def update_with(self, name: str, arguments: dict[str, Any], update_id: str | None = None) -> Any:
        """Do the same as `update`, with arguments of any name."""
        program = current_program()
        if program is not None:
            return await program.update_run(self.run_id, name, arguments, update_id)
        answer = await self._outside().update(self.run_id, name, arguments, update_id, self._caller)
        return codec.decode(answer, Any)

    # --- operators' commands

    async def cancel(
        self, reason: str = "", *, actor: str = "", signal_id: str | None = None, wait: bool = False
    ) -> None:
        """Request the run to cancel itself; it may clean up first. A second request changes nothing."""
        await self._command("CANCEL", reason, actor, signal_id, wait=wait)

    async def pause(
        self, reason: str = "", *, actor: str = "", signal_id: str | None = None, wait: bool = False
    ) -> None:
        """Pause the run: results are still recorded, but its code does not continue."""
        await self._command("PAUSE", reason, actor, signal_id, wait=wait)

    async def resume(
        self,
        reason: str = "",
        *,
        raise_failure: bool = False,
        actor: str = "",
        signal_id: str | None = None,
        wait: bool = False,
    ) -> None:
        """Resume a paused run.

        If a failed step waits for an operator (`on_failure="pause"`), this is a `Conflict`: retry or skip the step.
        With `raise_failure` the error of the step is raised in the workflow, and the run fails if it does not catch it.
        """
        await self._command("RESUME", reason, actor, signal_id, raise_failure=raise_failure, wait=wait)

    async def approve(
        self,
        reason: str = "",
        *,
        step_id: str | None = None,
        actor: str = "",
        signal_id: str | None = None,
        wait: bool = False,
    ) -> None:
        """Approve a run that has not started; or a plan, or a step of a plan, that requires approval."""
        await self._command("APPROVE", reason, actor, signal_id, step_id=step_id, wait=wait)

    async def retry_step(
        self, step_id: str, reason: str = "", *, actor: str = "", signal_id: str | None = None, wait: bool = False
    ) -> None:
        """Retry a failed step whose failure the workflow has not seen: see `on_failure="pause"`.

        A step of a plan can be retried until the plan ends. Steps that were skipped because of its failure are
        reconsidered.
        """
        await self._command("RETRY_STEP", reason, actor, signal_id, step_id=step_id, wait=wait)

    async def skip_step(
        self,
        step_id: str,
        reason: str = "",
        *,
        result: Any = None,
        actor: str = "",
        signal_id: str | None = None,
        wait: bool = False,
    ) -> None:
        """Skip an open or failed step. The workflow gets `result` instead of the step's result.

        A task or a wait for a signal is skipped without a result, and only by an operator who may override it: the
        workflow gets None, or the result of `on_timeout`.
        """
        packed = self._outside().registry.values.encode(result)
        await self._command("SKIP_STEP", reason, actor, signal_id, step_id=step_id, result=packed, wait=wait)

    async def terminate(
        self, reason: str = "", *, actor: str = "", signal_id: str | None = None, wait: bool = False
    ) -> None:
        """End the run immediately, as cancelled, without clean-up."""
        await self._command("EMERGENCY_STOP", reason, actor, signal_id, wait=wait)

    async def retry_run(
        self, reason: str = "", *, from_start: bool = False, actor: str = "", signal_id: str | None = None
    ) -> "RunHandle[R]":
        """Start a finished run again, as a new run, and return it. An unfinished run raises `Conflict`.

        A failed run continues from the step that failed: what was recorded is not executed again. With `from_start`,
        or after another end, the new run begins with the same input.
        """
        command = OperatorCommand(name="RETRY_RUN", reason=reason, actor=actor, signal_id=signal_id)
        run_id = await self._outside().retry_run(self.run_id, command, self._caller, from_start=from_start)
        return RunHandle(self._runtime, run_id, self._definition, self._caller)

    async def fork(
        self,
        *,
        at: int | None = None,
        input: Mapping[str, Any] | None = None,
        request_id: str = "",
        reason: str = "",
        actor: str = "",
    ) -> "RunHandle[R]":
        """Start a run that begins with the recorded results of this run up to event `at`, and return it.

        The history is cut at the end of a commit: the last one at or before `at`. Without `at` it is cut at the last
        possible position before the run's end, so that a failed step is executed again. `input` replaces the arguments,
        by name. The same `request_id` returns the same fork. See docs/fork.md.
        """
        packed = None
        if input is not None:
            if self._definition is None:
                raise InvalidInput("input: the workflow of this run is not known here", field="input")
            packed = self._definition.signature.pack((), named(input, (), {}))
        command = OperatorCommand(name="RETRY_RUN", reason=reason, actor=actor)
        run_id, _ = await self._outside().fork_run(
            self.run_id, command, self._caller, at=at, input=packed, request_id=request_id
        )
        return RunHandle(self._runtime, run_id, self._definition, self._caller)

    async def _command(
        self,
        name: ControlName,
        reason: str,
        actor: str,
        signal_id: str | None,
        *,
        step_id: str | None = None,
        result: Raw = NULL,
        raise_failure: bool = False,
        wait: bool,
    ) -> None:
        command = OperatorCommand(
            name=name,
            reason=reason,
            actor=actor,
            step_id=step_id,
            signal_id=signal_id,
            result=result,
            raise_failure=raise_failure,
        )
        await self._outside().command(self.run_id, command, self._caller, wait=wait)

    def _outside(self) -> Runtime:
        """Return the runtime; raise `NotDurable` inside a workflow, where nothing that it does is recorded."""
        refuse_inside("a run's handle", "call a child, wait for a signal, or make it an activity")
        return self._runtime


def run_from_inside(run_id: str) -> RunHandle[Any]:
    """Return the handle of a run for a workflow, which can only signal and update it."""
    out_of_reach: Any = _OutOfReach()
    return RunHandle(out_of_reach, run_id)


class _OutOfReach:
    """The runtime as a workflow sees it."""

    def __getattr__(self, verb: str) -> Any:
        raise NotDurable("inside a workflow a run can be signalled and updated; other calls belong in an activity")


def reopened(handle: RunHandle[R], runtime: Runtime) -> RunHandle[R]:
    """Return a handle of the same run for another runtime: the one that is open now."""
    return replace(handle, _runtime=runtime)
