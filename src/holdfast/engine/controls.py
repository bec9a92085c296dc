"""Operators' commands as they are sent: schema, authoriser, inbox, and, for who asks for it, the recorded decision.

What a command does is decided by the core when the run takes its next turn. A command that the authoriser refuses goes
the same way, so that the refusal stands in the run's history, and its sender gets `NotPermitted`.
"""

from collections.abc import Awaitable, Callable
from contextlib import suppress
from inspect import isawaitable
from typing import Any, Self, get_args

from msgspec import Raw, Struct
from msgspec.structs import replace

from holdfast.core import codec
from holdfast.core import events as e
from holdfast.core.audit import DETAIL_CHARS, AuditEntry
from holdfast.core.events import NULL, Event
from holdfast.core.idempotency import signal_uuid
from holdfast.core.messages import ControlName, SentName, SignalRequest, check_name, check_signal_id
from holdfast.core.state import TERMINAL
from holdfast.engine.node import Node
from holdfast.engine.recording import head_of, recorded
from holdfast.engine.sending import Sender
from holdfast.engine.turn import control_request, start_run
from holdfast.errors import CallerError, Conflict, InvalidInput, NotPermitted, RunTerminal
from holdfast.limits import NAME_BYTES
from holdfast.ports import Ids, SystemIds
from holdfast.store import port

OF_A_STEP = frozenset({"RETRY_STEP", "SKIP_STEP"})


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
    """What is sent to a run, as the authoriser sees it: a command, or SIGNAL, TASK or UPDATE and its `name`.

    `caller` is who brings it, None if it comes from code in this process. `actor` is who gives it: the caller, or whom
    an administrator acts for. `payload` is what a signal, the answer to a task or an update carries. A signal that
    comes with a start has a `run_id` only if the start names one.
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


Verdict = bool | str
Authoriser = Callable[[ControlRequest], Verdict | Awaitable[Verdict]]
"""Says True, or False, or why not. What it raises is raised to the sender, and nothing is sent."""


class Operators(Struct, frozen=True, kw_only=True):
    """Who may command what, and where ids come from for commands that bring none."""

    authoriser: Authoriser | None = None
    ids: Ids = SystemIds()
    caller: Caller | None = None

    async def refusal(self, store: port.Store, run_id: str, sent: "_Sent") -> str:
        """Return why the command is not permitted, or nothing. Without an authoriser everything is."""
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
            result=self.result,
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
        self, reason: str = "", *, actor: str = "", signal_id: str | None = None, wait: bool = False
    ) -> None:
        """Let a paused run go on. A failure that has paused it is raised in the workflow after all."""
        await self._command("RESUME", reason, actor, signal_id, wait=wait)

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
        """Let a step not be done, whether it is open or has failed. The workflow gets `result` in its place."""
        given = codec.encode(result)
        await self._command("SKIP_STEP", reason, actor, signal_id, step_id=step_id, result=given, wait=wait)

    async def stop(
        self, reason: str = "", *, actor: str = "", signal_id: str | None = None, wait: bool = False
    ) -> None:
        """End the run at once, as cancelled, without letting it clean up."""
        await self._command("EMERGENCY_STOP", reason, actor, signal_id, wait=wait)

    async def retry_run(self, reason: str = "", *, actor: str = "", signal_id: str | None = None) -> Self:
        """Do a finished run again, with the same input, as a new run; return that. An unfinished one: `Conflict`."""
        sent = _checked("RETRY_RUN", reason, actor, signal_id or self._operators.ids.new_id())
        await self._authorise(sent)
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
        sent = _checked(name, reason, actor, signal_id, step_id, result)
        await self._authorise(sent)
        after = (await head_of(self._store, self.run_id)).version if wait else 0
        answer = await self._deliver(self._request(sent))
        if wait:
            await self._decided(answer, after if isinstance(answer, port.Accepted) else 0, sent)

    async def _authorise(self, sent: _Sent) -> None:
        refusal = await self._operators.refusal(self._store, self.run_id, sent)
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
            new = self._node.run_queue.ticketed(new)
        if self._node is not None and self._node.known.has(new.plan_id, new.plan_version):
            answer = await self._node.creations.create(new, now)
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
    name: str, reason: str, actor: str, signal_id: str | None, step_id: str | None = None, result: Raw = NULL
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
    if problem is not None:
        raise problem
    return _Sent(
        name=name,  # type: ignore[arg-type]
        actor=actor,
        reason=reason,
        step_id=step_id,
        signal_id=signal_id,
        result=result,
    )
