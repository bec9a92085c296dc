"""Sends operators' commands: checks their form, asks the authoriser, delivers, and with `wait` awaits the decision.

The core decides what a command does when the run takes its next turn (`holdfast.core.operator_commands`). A command
that the authoriser refuses is delivered too, as a refusal, so that it is recorded in the run's history. Commands that
create another run are in `engine/start/forks.py`.
"""

from collections.abc import Callable
from contextlib import suppress
from typing import Any

from msgspec import Raw, Struct
from msgspec.structs import replace

from holdfast.clock import Ids
from holdfast.core import events as e
from holdfast.core.audit import Caller, audit_entry
from holdfast.core.events import NULL, OPENING, Event
from holdfast.core.keys import check_name, check_signal_id, check_unicode, signal_uuid
from holdfast.core.messages import ControlName, SignalRequest, control_request
from holdfast.core.operator_commands import OVERRIDES, certain_objection_to_retry, objection_to_resume
from holdfast.core.state import state_of
from holdfast.engine.history import find_event, head_of, read_since_rotation, wait_for_event
from holdfast.engine.inbox.authorization import OVERRIDE, ControlRequest, Permissions, has_override, refusal_id
from holdfast.errors import CallerError, Conflict, InvalidInput, NotPermitted, RunTerminal
from holdfast.registry import Registry
from holdfast.store import port
from holdfast.store.validation import id_of_request

OF_A_STEP: frozenset[ControlName] = frozenset({"RETRY_STEP", "SKIP_STEP"})
"""The commands that address one step of a run."""


class OperatorCommand(Struct, frozen=True, kw_only=True):
    """A command to a run. With a `signal_id` a retry is recognised.

    `result` is what the workflow gets from a skipped step. With `raise_failure` a resumed run gets the error of the
    failed step that has paused it. `may_override` is set here, for a caller who may skip tasks and waits.
    """

    name: ControlName
    reason: str = ""
    actor: str = ""
    step_id: str | None = None
    signal_id: str | None = None
    result: Raw = NULL
    raise_failure: bool = False
    may_override: bool = False

    def check(self) -> None:
        """Raise `InvalidInput` if the command is malformed, before the authoriser is asked or anything is stored."""
        problem: CallerError | None = None
        if self.name in OF_A_STEP or self.step_id is not None:
            problem = check_name("step_id", self.step_id)
        if problem is None and self.signal_id is not None:
            problem = check_signal_id(self.signal_id)
        texts: dict[str, Any] = {"actor": self.actor, "reason": self.reason}
        for field, text in texts.items():
            if problem is None and not isinstance(text, str):
                problem = InvalidInput(f"{field} is text, not {text!r}", field=field)
            problem = problem or check_unicode(field, text)
        is_raising: Any = self.raise_failure
        if problem is None and not isinstance(is_raising, bool):
            problem = InvalidInput(f"raise_failure is True or False, not {is_raising!r}", field="raise_failure")
        if problem is not None:
            raise problem

    def request(self, run_id: str, refusal: str = "") -> SignalRequest:
        """Return the signal that carries the command, or its refusal."""
        if refusal:
            signal_id = refusal_id(self.signal_id, ("", self.name, self.actor), refusal)
            return control_request(
                run_id,
                self.name,
                self.actor,
                self.reason,
                step_id=self.step_id,
                signal_id=signal_id,
                refusal=refusal,
            )
        return control_request(
            run_id,
            self.name,
            self.actor,
            self.reason,
            step_id=self.step_id,
            signal_id=self.signal_id,
            result=self.result,
            raise_failure=self.raise_failure,
            may_override=self.may_override,
        )


class CommandSender:
    """Sends operators' commands through one store."""

    def __init__(self, store: port.Store, registry: Registry, permissions: Permissions, ids: Ids) -> None:
        self._store = store
        self._registry = registry
        self._permissions = permissions
        self._ids = ids

    async def send(self, run_id: str, command: OperatorCommand, caller: Caller | None, *, wait: bool) -> None:
        """Send a command. It is durable when this returns; with `wait`, the run has decided.

        A rejection by the run raises `Conflict`, with the reason; one by the authoriser raises `NotPermitted`.
        """
        command = self.checked(command)
        kind = ""
        if command.step_id is not None:
            step = await self._step(run_id, command.step_id)
            kind = "" if step is None else OPENING[type(step)]
            if command.result != NULL and step is not None:
                self._registry.check_result(step, command.result)
            if command.name == "SKIP_STEP":
                is_seen = kind in OVERRIDES or not self._permissions.is_needed
                command = replace(command, may_override=is_seen and has_override(caller))
        await self.authorise(run_id, command, kind, caller)
        is_followed = wait or command.name == "RETRY_STEP"
        after = (await head_of(self._store, run_id)).version if is_followed else 0
        answer = await self.deliver(run_id, command, caller)
        after = after if isinstance(answer, port.Accepted) else 0
        if wait:
            _check_verdict(run_id, command, await wait_for_event(self._store, run_id, after, _decision_by(answer)))
        elif command.name == "RETRY_STEP":
            await self._check_retried(run_id, command, answer, after)
        elif command.name == "RESUME" and not command.raise_failure:
            await self._check_resumed(run_id, command)

    async def permitted(self, run_id: str, command: OperatorCommand, caller: Caller | None) -> SignalRequest:
        """Return the signal that carries a command if the authoriser permits it; otherwise raise `NotPermitted`."""
        command = self.checked(command)
        await self.authorise(run_id, command, "", caller)
        return self._request(run_id, command, caller)

    def checked(self, command: OperatorCommand) -> OperatorCommand:
        """Return the command with an id, so that it can be sent again after a lost answer without a second effect."""
        command.check()
        return replace(command, signal_id=id_of_request(self._store, command.signal_id, self._ids))

    async def _check_resumed(self, run_id: str, command: OperatorCommand) -> None:
        """Raise `Conflict` if failed steps keep the run paused; the run itself decides and records the same."""
        snapshot = (await head_of(self._store, run_id)).snapshot
        objection = objection_to_resume(snapshot.failed_step_ids) if snapshot is not None else ""
        if objection:
            raise conflict(run_id, command, objection)

    async def _check_retried(
        self, run_id: str, command: OperatorCommand, answer: port.Accepted | port.Duplicate, after: int
    ) -> None:
        """Raise `Conflict` if the run has already refused to retry a step, or certainly will."""
        decision, _ = await find_event(self._store, run_id, after, _decision_by(answer))
        if decision is None:
            history = await read_since_rotation(self._store, await head_of(self._store, run_id))
            decision = next(filter(_decision_by(answer), history), None)  # it may have decided meanwhile
        if decision is not None:
            _check_verdict(run_id, command, decision)
            return
        objection = certain_objection_to_retry(state_of(run_id, history), command.step_id or "")
        if objection:
            raise conflict(run_id, command, objection)

    async def _step(self, run_id: str, step_id: str) -> e.Body | None:
        """Return the body that opened a step, since the last rotation; None if there is no such step yet."""
        events = await read_since_rotation(self._store, await head_of(self._store, run_id))
        state = state_of(run_id, events)
        if step_id in state.open_steps:  # it may have been opened before the rotation
            return state.open_steps[step_id].body
        if step_id in state.failed_steps:
            return state.failed_steps[step_id].started.body
        opened = [event.data for event in events if event.step_id == step_id and type(event.data) in OPENING]
        return opened[-1] if opened else None

    async def authorise(self, run_id: str, command: OperatorCommand, step_kind: str, caller: Caller | None) -> None:
        """Raise `NotPermitted`, and record it in the run, if the caller may not give this command."""
        refusal = await self._refusal(run_id, command, step_kind, caller)
        if not refusal:
            return
        with suppress(RunTerminal):  # nothing is recorded in a run that has finished
            await self.deliver(run_id, command, caller, refusal)
        raise NotPermitted(
            f"{command.name} of run {run_id}: {refusal}", run_id=run_id, command=command.name, actor=command.actor
        )

    async def _refusal(self, run_id: str, command: OperatorCommand, step_kind: str, caller: Caller | None) -> str:
        if command.name == "SKIP_STEP" and step_kind in OVERRIDES and not has_override(caller):
            return f"to skip a {step_kind} takes the scope {OVERRIDE!r}"
        if not self._permissions.is_needed:
            return ""
        head = await head_of(self._store, run_id)
        return await self._permissions.objection(
            ControlRequest(
                run_id=run_id,
                workflow=head.plan_id,
                tenant=head.tenant,
                command=command.name,
                step_id=command.step_id,
                actor=command.actor,
                reason=command.reason,
                caller=caller,
                payload=command.result,
                step_kind=step_kind,
            )
        )

    def _request(
        self, run_id: str, command: OperatorCommand, caller: Caller | None, refusal: str = ""
    ) -> SignalRequest:
        """Return the signal that carries a command, or its refusal, with the entry for the audit log."""
        audit = audit_entry(
            caller,
            self._ids.new_id,
            actor=command.actor,
            subject=command.step_id or "",
            detail=refusal or command.reason,
            outcome="refused" if refusal else "done",
        )
        return replace(command.request(run_id, refusal), audit=audit)

    async def deliver(
        self, run_id: str, command: OperatorCommand, caller: Caller | None, refusal: str = ""
    ) -> port.Accepted | port.Duplicate:
        """Put a command, or its refusal, into the inbox of its run."""
        [answer] = await self._store.deliver([self._request(run_id, command, caller, refusal)])
        if isinstance(answer, port.Refused):
            raise answer.error
        return answer


def _decision_by(answer: port.Accepted | port.Duplicate) -> Callable[[Event], bool]:
    """Return a predicate that recognises the event with the decision about a command."""
    assert answer.result is not None
    cause = signal_uuid(answer.result.signal_storage_key)

    def is_decision(event: Event) -> bool:
        return event.caused_by_signal_id == cause and isinstance(event.data, e.SignalAccepted | e.SignalRejected)

    return is_decision


def _check_verdict(run_id: str, command: OperatorCommand, decision: Event) -> None:
    if isinstance(decision.data, e.SignalRejected):
        raise conflict(run_id, command, decision.data.reason)


def conflict(run_id: str, command: OperatorCommand, reason: str) -> Conflict:
    """Return the error for a command that the state of its run does not allow."""
    return Conflict(f"{command.name} of run {run_id}: {reason}", run_id=run_id, command=command.name)
