"""Operators' commands as they are sent: schema, authoriser, inbox, and, for who asks for it, the recorded decision.

What a command does is decided by the core when the run takes its next turn. A command that the authoriser refuses goes
the same way, so that the refusal stands in the run's history, and its sender gets `NotPermitted`.
"""

import logging
from collections.abc import Awaitable, Callable
from contextlib import suppress
from inspect import isawaitable
from typing import Any, Self, get_args

from msgspec import Raw, Struct
from msgspec.structs import replace

from holdfast.clock import Ids, SystemIds
from holdfast.core import codec
from holdfast.core import events as e
from holdfast.core.audit import DETAIL_CHARS, AuditEntry
from holdfast.core.events import NULL, Event
from holdfast.core.keys import signal_uuid
from holdfast.core.messages import ControlName, SentName, SignalRequest
from holdfast.core.names import check_name, check_signal_id
from holdfast.core.operator_commands import OVERRIDES, objection_to_resume
from holdfast.core.snapshot import OPENING
from holdfast.core.state import TERMINAL
from holdfast.engine.history import head_of, recorded
from holdfast.engine.inbox.signals import Sender
from holdfast.engine.node import Node
from holdfast.engine.stretch import read_stretch
from holdfast.engine.turns.draft import control_request, start_run
from holdfast.errors import CallerError, Conflict, InvalidInput, NotPermitted, RunTerminal
from holdfast.limits import NAME_BYTES
from holdfast.store import port

OF_A_STEP = frozenset({"RETRY_STEP", "SKIP_STEP"})
OVERRIDE = "runs:override"
"""The scope to skip tasks and waits, which ask others for an answer."""

logger = logging.getLogger("holdfast.access")


class Caller(Struct, frozen=True, kw_only=True):
    """Who asks through a service, as the service knows them. Without a tenant they see all of them.

    `scopes` of None are all scopes. `token_id` is what tells callers apart; without one nobody has been asked who they
    are. `operation` is what they ask for, and `correlation_id` under which id it is found in logs.
    """

    name: str
    tenant: str | None = None
    roles: tuple[str, ...] = ()
    scopes: frozenset[str] | None = None
    is_admin: bool = False
    token_id: str = ""
    operation: str = ""
    correlation_id: str = ""

    @property
    def ref(self) -> e.CallerRef | None:
        """The caller as events name them."""
        return e.CallerRef(self.token_id, self.name) if self.token_id else None


class ControlRequest(Struct, frozen=True, kw_only=True):
    """What is asked of a run, as the authoriser sees it: a command, or SIGNAL, TASK, UPDATE, START or QUERY.

    `caller` is who brings it, None if it comes from code in this process. `actor` is who gives it: the caller, or whom
    an administrator acts for. `name` is that of the signal, the operation on a task, the update, the workflow or the
    query; `payload` what it carries: for SKIP_STEP the result that the workflow is to get. `step_kind` is what kind of
    step a command is about: activity, timer, signal, task, child or update; empty if the step is not there yet. A
    start, and a signal that comes with one, has a `run_id` only if the start names one.
    """

    run_id: str
    plan_id: str
    tenant: str
    command: ControlName | SentName
    step_id: str | None
    actor: str
    reason: str
    caller: Caller | None = None
    name: str = ""
    payload: Raw = NULL
    step_kind: str = ""


Verdict = bool | str
Authoriser = Callable[[ControlRequest], Verdict | Awaitable[Verdict]]
"""Says True, or False, or why not. What it raises is raised to the sender, and nothing is sent."""


class Operators(Struct, frozen=True, kw_only=True):
    """Who may command what, and where ids come from for commands that bring none."""

    authoriser: Authoriser | None = None
    ids: Ids = SystemIds()
    caller: Caller | None = None

    async def refusal(self, store: port.Store, run_id: str, sent: "_Sent", step_kind: str) -> str:
        """Return why the command is not permitted, or nothing. Without an authoriser everything is that has a scope."""
        if sent.name == "SKIP_STEP" and step_kind in OVERRIDES and not self.has_override:
            return f"to skip a {step_kind} takes the scope {OVERRIDE!r}"
        if self.authoriser is None:
            return ""
        head = await head_of(store, run_id)
        return await self.objection(
            ControlRequest(
                run_id=run_id,
                plan_id=head.plan_id,
                tenant=head.tenant,
                command=sent.name,
                step_id=sent.step_id,
                actor=sent.actor,
                reason=sent.reason,
                caller=self.caller,
                payload=sent.result,
                step_kind=step_kind,
            )
        )

    @property
    def by(self) -> e.CallerRef | None:
        """The caller as events name them, or None."""
        return None if self.caller is None else self.caller.ref

    def audit(
        self, *, actor: str = "", subject: str = "", detail: str = "", outcome: str = "done"
    ) -> AuditEntry | None:
        """Return what the audit log is to keep of what is asked; None if code of this process asks."""
        caller = self.caller
        if caller is None or not caller.operation:
            return None
        return AuditEntry(
            entry_id=self.ids.new_id(),
            operation=caller.operation,
            actor=actor or caller.name,
            by=caller.ref,
            tenant=caller.tenant,
            subject=subject,
            detail=detail[:DETAIL_CHARS],
            outcome=outcome,
            correlation_id=caller.correlation_id,
        )

    @property
    def has_override(self) -> bool:
        """Whether the caller may skip tasks and waits. Code in this process may, unless the authoriser refuses it."""
        return self.caller is None or self.caller.scopes is None or OVERRIDE in self.caller.scopes

    async def require(self, request: ControlRequest) -> None:
        """Raise `NotPermitted` if the authoriser refuses what no run records: the start of one, or a query."""
        actor = request.actor or ("" if self.caller is None else self.caller.name)
        request = replace(request, caller=self.caller, actor=actor)
        objection = await self.objection(request)
        if not objection:
            return
        what = f"{request.command} {request.name}" + (f" of run {request.run_id}" if request.run_id else "")
        if self.caller is None:  # else the service logs it, with all that it knows
            logger.warning("refused: who=%r what=%r why=%r", request.actor, what, objection)
        details = {"run_id": request.run_id, "command": request.command, "name": request.name, "actor": request.actor}
        raise NotPermitted(f"{what}: {objection}", **details)

    async def objection(self, request: ControlRequest) -> str:
        """Return what the authoriser has against this, or nothing."""
        if self.authoriser is None:
            return ""
        answer = self.authoriser(request)
        verdict = await answer if isawaitable(answer) else answer
        if verdict is True:
            return ""
        return verdict if isinstance(verdict, str) and verdict else "not permitted"


def refused_id(signal_id: str | None, asked: "ControlRequest | _Sent", refusal: str) -> str | None:
    """Return the id of a refusal. It has one of its own: what is refused now may be permitted later."""
    if signal_id is None:
        return None
    what = asked.command if isinstance(asked, ControlRequest) else ""
    said = "|".join((what, asked.name, asked.actor, refusal, signal_id))
    return f"refused {codec.digest(said.encode())}"


class _Sent(Struct, frozen=True, kw_only=True):
    """A command whose form is right."""

    name: ControlName
    actor: str
    reason: str
    step_id: str | None
    signal_id: str | None
    result: Raw = NULL
    raise_failure: bool = False
    may_override: bool = False

    def request(self, run_id: str, refusal: str = "") -> SignalRequest:
        """Return the signal that carries it, or the refusal of it."""
        signal_id = refused_id(self.signal_id, self, refusal) if refusal else self.signal_id
        return control_request(
            run_id,
            self.name,
            self.actor,
            self.reason,
            step_id=self.step_id,
            signal_id=signal_id,
            refusal=refusal,
            result=NULL if refusal else self.result,
            raise_failure=self.raise_failure and not refusal,
            may_override=self.may_override and not refusal,
        )


class Commands:
    """What an operator can tell a run. Each command is durable when its method returns.

    With a `signal_id` a retry is recognised. With `wait` the method returns when the run has decided: `Conflict` says
    that the command was rejected there, and why. `NotPermitted` is the authoriser's.
    """

    __slots__ = ()

    run_id: str
    _store: port.Store
    _node: Node | None
    _operators: Operators
    _sender: Sender
    _definition: Any

    async def cancel(
        self, reason: str = "", *, actor: str = "", signal_id: str | None = None, wait: bool = False
    ) -> None:
        """Ask the run to cancel itself; it may clean up first. Asking twice is harmless."""
        await self._command("CANCEL", reason, actor, signal_id, wait=wait)

    async def pause(
        self, reason: str = "", *, actor: str = "", signal_id: str | None = None, wait: bool = False
    ) -> None:
        """Hold the run: results are still recorded, but its program does not go on."""
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
        """Let a paused run go on.

        While a failed step waits for an operator (`on_failure="pause"`) that is a `Conflict`: retry or skip the step.
        With `raise_failure` its error is raised in the workflow after all, which ends a run that does not catch it.
        """
        sent = _checked("RESUME", reason, actor, signal_id, raise_failure=raise_failure)
        await self._send(sent, wait=wait)
        if raise_failure or wait:
            return
        snapshot = (await head_of(self._store, self.run_id)).snapshot
        objection = objection_to_resume(snapshot.failed_step_ids) if snapshot is not None else ""
        if objection:  # as the run itself decides, and records
            raise Conflict(f"RESUME of run {self.run_id}: {objection}", run_id=self.run_id, command="RESUME")

    async def approve(
        self, reason: str = "", *, actor: str = "", signal_id: str | None = None, wait: bool = False
    ) -> None:
        """Let a run that has not started go ahead."""
        await self._command("APPROVE", reason, actor, signal_id, wait=wait)

    async def retry_step(
        self, step_id: str, reason: str = "", *, actor: str = "", signal_id: str | None = None, wait: bool = False
    ) -> None:
        """Try a failed step again that the workflow has not been told of: see `on_failure="pause"`."""
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
        """Let a step not be done, whether it is open or has failed. The workflow gets `result` in its place.

        A task or a wait for a signal is skipped without a result, by those only who may override it: the workflow gets
        None, or what `on_timeout` returns.
        """
        await self._command(
            "SKIP_STEP", reason, actor, signal_id, step_id=step_id, result=codec.encode(result), wait=wait
        )

    async def terminate(
        self, reason: str = "", *, actor: str = "", signal_id: str | None = None, wait: bool = False
    ) -> None:
        """End the run at once, as cancelled, without letting it clean up."""
        await self._command("EMERGENCY_STOP", reason, actor, signal_id, wait=wait)

    async def retry_run(self, reason: str = "", *, actor: str = "", signal_id: str | None = None) -> Self:
        """Do a finished run again, with the same input, as a new run; return that. An unfinished one: `Conflict`."""
        sent = _checked("RETRY_RUN", reason, actor, self._operators.ids.new_id() if signal_id is None else signal_id)
        await self._authorise(sent, "")
        head = await head_of(self._store, self.run_id)
        if head.status not in TERMINAL:
            try:
                await self._deliver(self._request(sent))
            except RunTerminal:
                head = await head_of(self._store, self.run_id)  # it has finished in the meantime
            else:
                raise Conflict(f"run {self.run_id} has not finished", run_id=self.run_id, command=sent.name)
        run_id = await self._start_again(head, sent)
        return type(self)(  # type: ignore[call-arg]
            run_id, self._store, self._definition, self._node, self._sender, self._operators
        )

    async def _command(
        self,
        name: str,
        reason: str,
        actor: str,
        signal_id: str | None,
        *,
        step_id: str | None = None,
        result: Raw = NULL,
        wait: bool,
    ) -> None:
        await self._send(_checked(name, reason, actor, signal_id, step_id, result), wait=wait)

    async def _send(self, sent: _Sent, *, wait: bool) -> None:
        if sent.signal_id is None:  # so that a store that lost its answer can ask again without doing it twice
            sent = replace(sent, signal_id=self._operators.ids.new_id())
        kind = ""
        if sent.step_id is not None:
            step = await self._step(sent.step_id)
            kind = "" if step is None else OPENING[type(step)]
            if sent.result != NULL and step is not None and self._node is not None:
                self._node.registry.check_result(step, sent.result)
            if sent.name == "SKIP_STEP":
                is_seen = kind in OVERRIDES or self._operators.authoriser is None
                sent = replace(sent, may_override=is_seen and self._operators.has_override)
        await self._authorise(sent, kind)
        after = (await head_of(self._store, self.run_id)).version if wait else 0
        answer = await self._deliver(self._request(sent))
        if wait:
            await self._decided(answer, after if isinstance(answer, port.Accepted) else 0, sent)

    async def _step(self, step_id: str) -> e.Body | None:
        """Return what opened a step, since the last rotation; None if it is not there, or not yet."""
        events = await read_stretch(self._store, await head_of(self._store, self.run_id))
        opened = [event.data for event in events if event.step_id == step_id and type(event.data) in OPENING]
        return opened[-1] if opened else None

    async def _authorise(self, sent: _Sent, step_kind: str) -> None:
        refusal = await self._operators.refusal(self._store, self.run_id, sent, step_kind)
        if not refusal:
            return
        with suppress(RunTerminal):  # nothing is recorded in a run that has finished
            await self._deliver(self._request(sent, refusal))
        raise NotPermitted(
            f"{sent.name} of run {self.run_id}: {refusal}", run_id=self.run_id, command=sent.name, actor=sent.actor
        )

    def _request(self, sent: _Sent, refusal: str = "") -> SignalRequest:
        """Return the signal that carries a command, or the refusal of it, with its entry of the audit log."""
        outcome = "refused" if refusal else "done"
        audit = self._operators.audit(
            actor=sent.actor, subject=sent.step_id or "", detail=refusal or sent.reason, outcome=outcome
        )
        return replace(sent.request(self.run_id, refusal), audit=audit)

    async def _deliver(self, request: SignalRequest) -> port.Accepted | port.Duplicate:
        [answer] = await self._store.deliver([request])
        if isinstance(answer, port.Refused):
            raise answer.error
        return answer

    async def _decided(self, answer: port.Accepted | port.Duplicate, after: int, sent: _Sent) -> None:
        """Wait until the decision is recorded."""
        assert answer.result is not None
        cause = signal_uuid(answer.result.signal_storage_key)

        def is_decision(event: Event) -> bool:
            is_verdict = isinstance(event.data, e.SignalAccepted | e.SignalRejected)
            return is_verdict and event.caused_by_signal_id == cause

        body = (await recorded(self._store, self.run_id, after, is_decision)).data
        if isinstance(body, e.SignalRejected):
            raise Conflict(f"{sent.name} of run {self.run_id}: {body.reason}", run_id=self.run_id, command=sent.name)

    async def _start_again(self, head: port.RunHead, sent: _Sent) -> str:
        """Start the run that does this one again, once for each command, and return its id."""
        [first] = await self._store.read_events(self.run_id, 0, 1)
        assert isinstance(first.data, e.RunQueued)
        number = codec.digest(f"{self.run_id}|{sent.signal_id}".encode())
        retry = e.RetryOf(self.run_id, sent.signal_id or "", sent.actor, sent.reason)
        queued = replace(
            first.data,
            run_request_id=f"retry:{number}",
            parent_run_id=None,
            parent_step_id=None,
            parent_token=None,
            depth=0,
            retry_of=retry,
            by=self._operators.by,
        )
        now = await self._store.now()
        tags = tuple(tag for tag in head.tags if not tag.startswith(RETRY_TAG))
        new = start_run(
            _fitting(f"{self.run_id}/retry-{number[:12]}", f"retry-{number}"),
            queued,
            now,
            self._node.name if self._node is not None else "operator",
            reference_key=head.reference_key,
            tags=(*tags, retry_tag(self.run_id)),
        )
        new = replace(new, audit=self._operators.audit(actor=sent.actor, subject=self.run_id, detail=sent.reason))
        answer: Any
        if self._node is not None:
            new = self._node.run_queue.with_admission(new)
        if self._node is not None and self._node.definition_filter.has(new.plan_id, new.plan_version):
            answer = await self._node.starter.create(new, now)
            self._node.run_queue.notice_start(new)
        else:  # somebody else has its definition
            [answer] = await self._store.create([new])
        if isinstance(answer, port.Refused):
            raise answer.error
        return str(answer.run_id)


RETRY_TAG = "retry_of:"


def retry_tag(run_id: str) -> str:
    """Return the tag by which the runs are found that do this one again."""
    return _fitting(RETRY_TAG + run_id, RETRY_TAG + codec.digest(run_id.encode()))


def _fitting(name: str, otherwise: str) -> str:
    return name if len(name.encode()) <= NAME_BYTES else otherwise


def _checked(
    name: str,
    reason: str,
    actor: str,
    signal_id: str | None,
    step_id: str | None = None,
    result: Raw = NULL,
    *,
    raise_failure: bool = False,
) -> _Sent:
    """Return the command, or refuse one that is malformed: nothing is asked or stored then."""
    problem: CallerError | None = None
    if name not in get_args(ControlName):
        problem = InvalidInput(f"there is no command {name!r}; there are {', '.join(get_args(ControlName))}")
    elif name in OF_A_STEP:
        problem = check_name("step_id", step_id)
    if problem is None and signal_id is not None:
        problem = check_signal_id(signal_id)
    texts: dict[str, Any] = {"actor": actor, "reason": reason}
    for field, text in texts.items():
        if problem is None and not isinstance(text, str):
            problem = InvalidInput(f"{field} is text, not {text!r}", field=field)
    is_raising: Any = raise_failure
    if problem is None and not isinstance(is_raising, bool):
        problem = InvalidInput(f"raise_failure is True or False, not {raise_failure!r}", field="raise_failure")
    if problem is not None:
        raise problem
    return _Sent(
        name=name,  # type: ignore[arg-type]
        actor=actor,
        reason=reason,
        step_id=step_id,
        signal_id=signal_id,
        result=result,
        raise_failure=raise_failure,
    )
