"""Operators' commands as they are sent: form, authoriser, inbox and, with `wait`, the recorded decision.

The core decides what a command does when the run takes its next turn (`holdfast.core.operator_commands`). A command
that the authoriser refuses is sent too, as a refusal, so that it is recorded in the run's history.
"""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from re import compile as pattern
from typing import Any

from msgspec import Raw, Struct
from msgspec.structs import replace

from holdfast.clock import Ids
from holdfast.core import codec
from holdfast.core import events as e
from holdfast.core.audit import AuditEntry, Caller, audit_entry
from holdfast.core.events import NULL, OPENING, EngineRunRef, Event
from holdfast.core.fork import (
    Fork,
    Kept,
    attempt_of,
    events_of,
    failures_since_rotation,
    find_cut,
    fork,
    has_handled_failure,
    kept_to_continue,
    kept_until,
    without,
)
from holdfast.core.index_rows import index_changes, record_changes, runtime_snapshot
from holdfast.core.instants import Instant
from holdfast.core.keys import (
    check_name,
    check_signal_id,
    check_unicode,
    descended,
    fork_tag,
    is_lock,
    retry_tag,
    signal_uuid,
)
from holdfast.core.messages import ControlName, SignalRequest, control_request
from holdfast.core.operator_commands import OVERRIDES, certain_objection_to_retry, objection_to_resume
from holdfast.core.plans import is_plan
from holdfast.core.state import FAILED, TERMINAL, RunState, state_of
from holdfast.engine.history import (
    find_event,
    head_of,
    read_history,
    read_since_rotation,
    since_rotation,
    wait_for_event,
)
from holdfast.engine.inbox.authorization import OVERRIDE, Authorizer, ControlRequest, has_override, refusal_id
from holdfast.engine.plans import input_of_retry
from holdfast.engine.turns.draft import prepare_run, start_key
from holdfast.engine.turns.execute import rebuild
from holdfast.errors import CallerError, Conflict, CorruptHistory, InvalidInput, NotPermitted, RunTerminal
from holdfast.limits import NAME_BYTES
from holdfast.registry import Registry
from holdfast.store import port
from holdfast.store.artifacts import SCHEME, runs_of_artifacts
from holdfast.store.payloads import refuse_sealed

OF_A_STEP: frozenset[ControlName] = frozenset({"RETRY_STEP", "SKIP_STEP"})
"""The commands that are about one step of a run."""

MOST_REPLAYED = 20_000
"""How many events are replayed to find the earlier failures of a failed run that a retry can leave out."""

_REFERENCE = pattern(rb'"(%b[^"]+)"' % SCHEME.encode())

Create = Callable[[port.NewRun, Instant], Awaitable[port.Created | port.Existing | port.Refused]]


class OperatorCommand(Struct, frozen=True, kw_only=True):
    """A command to a run. With a `signal_id` a retry is recognised.

    `result` is what the workflow gets from a step that is skipped. With `raise_failure` a run that is resumed gets the
    error of the failed step that has paused it. `may_override` is set here, for a caller who may skip tasks and waits.
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
        """Raise `InvalidInput` if the command is malformed. Nothing is asked or stored then."""
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
        """Return the signal that carries the command, or the refusal of it."""
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
    """Sends operators' commands through one store. `create` creates the run that does a finished one again."""

    def __init__(self, store: port.Store, registry: Registry, authorizer: Authorizer, ids: Ids, create: Create) -> None:
        self._store = store
        self._registry = registry
        self._authorizer = authorizer
        self._ids = ids
        self._create = create

    async def send(self, run_id: str, command: OperatorCommand, caller: Caller | None, *, wait: bool) -> None:
        """Send a command. It is durable when this returns; with `wait`, the run has decided.

        A rejection by the run is `Conflict`, with the reason; one by the authoriser is `NotPermitted`.
        """
        command = self._checked(command)
        kind = ""
        if command.step_id is not None:
            step = await self._step(run_id, command.step_id)
            kind = "" if step is None else OPENING[type(step)]
            if command.result != NULL and step is not None:
                self._registry.check_result(step, command.result)
            if command.name == "SKIP_STEP":
                is_seen = kind in OVERRIDES or not self._authorizer.is_needed
                command = replace(command, may_override=is_seen and has_override(caller))
        await self._authorise(run_id, command, kind, caller)
        is_followed = wait or command.name == "RETRY_STEP"
        after = (await head_of(self._store, run_id)).version if is_followed else 0
        answer = await self._deliver(self._request(run_id, command, caller))
        after = after if isinstance(answer, port.Accepted) else 0
        if wait:
            _check_verdict(run_id, command, await wait_for_event(self._store, run_id, after, _decision_by(answer)))
        elif command.name == "RETRY_STEP":
            await self._check_retried(run_id, command, answer, after)
        elif command.name == "RESUME" and not command.raise_failure:
            await self._check_resumed(run_id, command)

    async def permitted(self, run_id: str, command: OperatorCommand, caller: Caller | None) -> SignalRequest:
        """Return the signal that carries a command, once the authoriser has permitted it. Raise `NotPermitted`."""
        command = self._checked(command)
        await self._authorise(run_id, command, "", caller)
        return self._request(run_id, command, caller)

    async def retry_run(
        self, run_id: str, command: OperatorCommand, caller: Caller | None, node: str, *, from_start: bool = False
    ) -> str:
        """Do a finished run again, as a new run; return its id. An unfinished one: `Conflict`.

        A failed run goes on from the step that failed, with the recorded results; with `from_start`, and after another
        end, the new run begins with the same input.
        """
        command = self._checked(command)
        flag: Any = from_start
        if not isinstance(flag, bool):
            raise InvalidInput(f"from_start is True or False, not {flag!r}", field="from_start")
        await self._authorise(run_id, command, "", caller)
        head = await head_of(self._store, run_id)
        _refuse_lock(head, command)
        if head.status not in TERMINAL:
            try:
                await self._deliver(self._request(run_id, command, caller))
            except RunTerminal:
                head = await head_of(self._store, run_id)  # it has finished in the meantime
            else:
                raise Conflict(f"run {run_id} has not finished", run_id=run_id, command=command.name)
        kept = None if from_start else await self._kept_of_failed(head, command)
        if kept is None:
            return await self._start_again(head, command, caller, node, from_start=from_start)
        return await self._continue(head, kept, command, caller, node)

    async def _kept_of_failed(self, head: port.RunHead, command: OperatorCommand) -> Kept | None:
        """Return what a retry keeps of a failed run; None if it begins at the beginning.

        It does if the workflow has undone steps, or done others, after the one that failed; a run of a plan keeps the
        results of its steps otherwise (`input_of_retry`).
        """
        if head.status is not FAILED or is_plan(head.plan_id):
            return None
        history = await read_history(self._store, head.run_id)
        refuse_sealed(history)
        kept = kept_to_continue(history)
        first = kept.events[0].data
        assert isinstance(first, e.RunQueued)
        own = 0 if first.forked_from is None else first.forked_from.run_seq
        seen = [place for place in failures_since_rotation(kept) if place >= own]
        has_code = (first.plan_id, first.plan_version) in self._registry.workflows
        settled = await self._without(kept, seen) if seen and has_code else kept
        if settled is kept and has_handled_failure(history):
            if not has_code:
                problem = "after its failure it may have undone steps, which only a process with its code can decide"
                raise _conflict(head.run_id, command, f"{problem}: retry it there, or from the start")
            return None
        return settled if len(settled.events) > 1 else None

    async def _without(self, kept: Kept, places: Sequence[int]) -> Kept:
        """Return what is kept without the failures at these places that the program has not acted on.

        An example is a failure in a `gather` that waits for others: what was recorded afterwards stands without it too.
        """
        if self._fits(without(kept, places)):
            return without(kept, places)
        dropped: set[int] = set()
        tries = MOST_REPLAYED // len(kept.events)
        for place in places[: -tries - 1 : -1]:  # the last ones
            await asyncio.sleep(0)  # a replay holds up the event loop, which turns and leases share
            if self._fits(without(kept, dropped | {place})):
                dropped.add(place)
        return without(kept, dropped) if dropped else kept

    def _fits(self, kept: Kept) -> bool:
        """Return whether the code here goes with what is kept."""
        try:
            cached, problem = rebuild(kept.events[0].run_id, since_rotation(events_of(kept)), self._registry)
        except CorruptHistory:
            return False
        cached.close()
        return problem is None

    def _checked(self, command: OperatorCommand) -> OperatorCommand:
        """Return the command with an id, so that it can be sent again after a lost answer without doing it twice."""
        command.check()
        return replace(command, signal_id=self._ids.new_id()) if command.signal_id is None else command

    async def _check_resumed(self, run_id: str, command: OperatorCommand) -> None:
        """Raise `Conflict` if failed steps keep the run paused, as the run itself decides and records."""
        snapshot = (await head_of(self._store, run_id)).snapshot
        objection = objection_to_resume(snapshot.failed_step_ids) if snapshot is not None else ""
        if objection:
            raise _conflict(run_id, command, objection)

    async def _check_retried(
        self, run_id: str, command: OperatorCommand, answer: port.Accepted | port.Duplicate, after: int
    ) -> None:
        """Raise `Conflict` if the run has refused to retry a step already, or is certain to."""
        decision, _ = await find_event(self._store, run_id, after, _decision_by(answer))
        if decision is None:
            history = await read_since_rotation(self._store, await head_of(self._store, run_id))
            decision = next(filter(_decision_by(answer), history), None)  # it may have decided in the meantime
        if decision is not None:
            _check_verdict(run_id, command, decision)
            return
        objection = certain_objection_to_retry(state_of(run_id, history), command.step_id or "")
        if objection:
            raise _conflict(run_id, command, objection)

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

    async def _authorise(self, run_id: str, command: OperatorCommand, step_kind: str, caller: Caller | None) -> None:
        """Raise `NotPermitted`, and record it in the run, if the caller may not give this command."""
        refusal = await self._refusal(run_id, command, step_kind, caller)
        if not refusal:
            return
        with suppress(RunTerminal):  # nothing is recorded in a run that has finished
            await self._deliver(self._request(run_id, command, caller, refusal))
        raise NotPermitted(
            f"{command.name} of run {run_id}: {refusal}", run_id=run_id, command=command.name, actor=command.actor
        )

    async def _refusal(self, run_id: str, command: OperatorCommand, step_kind: str, caller: Caller | None) -> str:
        if command.name == "SKIP_STEP" and step_kind in OVERRIDES and not has_override(caller):
            return f"to skip a {step_kind} takes the scope {OVERRIDE!r}"
        if not self._authorizer.is_needed:
            return ""
        head = await head_of(self._store, run_id)
        return await self._authorizer.objection(
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
        """Return the signal that carries a command, or the refusal of it, with its entry of the audit log."""
        audit = audit_entry(
            caller,
            self._ids.new_id,
            actor=command.actor,
            subject=command.step_id or "",
            detail=refusal or command.reason,
            outcome="refused" if refusal else "done",
        )
        return replace(command.request(run_id, refusal), audit=audit)

    async def _deliver(self, request: SignalRequest) -> port.Accepted | port.Duplicate:
        [answer] = await self._store.deliver([request])
        if isinstance(answer, port.Refused):
            raise answer.error
        return answer

    async def _start_again(
        self, head: port.RunHead, command: OperatorCommand, caller: Caller | None, node: str, *, from_start: bool
    ) -> str:
        """Start the run that does this one again, once for each command, and return its id."""
        run_id = head.run_id
        [first] = await self._store.read_events(run_id, 0, 1)
        refuse_sealed([first])
        assert isinstance(first.data, e.RunQueued)
        new_id, number = _named_retry(run_id, command)
        queued = replace(
            first.data,
            run_request_id=f"retry:{number}",
            parent_run_id=None,
            parent_step_id=None,
            parent_token=None,
            depth=0,
            input=await self._input_of(run_id, first.data),
            start_at=None,
            debounce=None,
            needs=0,
            forked_from=None,
            retry_of=_retry_of(run_id, first.data, command),
            by=None if caller is None else caller.ref,
        )
        if queued.plan is not None:
            again = await input_of_retry(self._registry, self._store, head, queued, from_start=from_start)
            what = "what the steps that have succeeded have given to others"
            queued = replace(queued, input=codec.bounded(again, self._registry.limits.value_bytes, what))
        now = await self._store.now()
        new = prepare_run(
            new_id,
            queued,
            now,
            node,
            reference_key=head.reference_key,
            tags=descended(head.tags, retry_tag(run_id), lambda: _owners_named_in(queued.input)),
        )
        audit = audit_entry(caller, self._ids.new_id, actor=command.actor, subject=run_id, detail=command.reason)
        answer = await self._create(replace(new, audit=audit), now)
        if isinstance(answer, port.Refused):
            raise answer.error
        return answer.run_id

    async def _input_of(self, run_id: str, queued: e.RunQueued) -> Raw:
        """Return the input that a run began with: that of its start, or of the last one that was debounced."""
        if queued.debounce is None:
            return queued.input
        bodies = [event.data for event in await read_history(self._store, run_id)]
        return next((body.input for body in reversed(bodies) if isinstance(body, e.InputReplaced)), queued.input)

    async def fork_run(
        self,
        run_id: str,
        at: int | None,
        caller: Caller | None,
        node: str,
        *,
        request_id: str = "",
        input: Raw | None = None,
        command: OperatorCommand,
    ) -> tuple[str, int]:
        """Start a run with the recorded results of another up to an event, once for each request.

        Return its id, and how many events it has of the other: a history is cut where a commit ended. Without `at` it
        goes on from the failures that have ended a run (`kept_to_continue`).
        """
        command.check()
        if request_id != "" and (problem := check_name("request_id", request_id)) is not None:
            raise problem
        await self._authorise(run_id, command, "", caller)
        head = await head_of(self._store, run_id)
        _refuse_lock(head, command)
        if at is not None and (type(at) is not int or not 1 <= at <= head.version):
            raise InvalidInput(f"at: the run has the events 1 to {head.version}, not {at}", field="at")
        history = await read_history(self._store, run_id)
        refuse_sealed(history)
        kept = kept_to_continue(history) if at is None else kept_until(history, find_cut(history, at))
        request_id = request_id or self._ids.new_id()
        number = codec.digest(f"{run_id}|fork|{request_id}".encode())
        fork_id = _fitting(f"{run_id}/fork-{number[:12]}", f"fork-{number}")
        forked = fork(kept, fork_id, await self._store.now(), EngineRunRef(node), input)
        new = _new_run(
            head,
            forked,
            run_request_id=f"fork:{number}",
            request_key=number,
            input_sha256=codec.digest(f"{run_id}|{forked.copied}|{codec.value_digest(forked.queued.input)}".encode()),
            tags=descended(head.tags, fork_tag(run_id), lambda: _owners_of_artifacts(forked.events)),
            audit=audit_entry(caller, self._ids.new_id, actor=command.actor, subject=run_id, detail=command.reason),
        )
        [answer] = await self._store.create([new])
        if isinstance(answer, port.Refused):
            raise answer.error
        return answer.run_id, forked.copied

    async def _continue(
        self, head: port.RunHead, kept: Kept, command: OperatorCommand, caller: Caller | None, node: str
    ) -> str:
        """Start the run that goes on where a failed one has failed, once for each command, and return its id."""
        run_id = head.run_id
        first = kept.events[0].data
        assert isinstance(first, e.RunQueued)
        new_id, number = _named_retry(run_id, command)
        retry = _retry_of(run_id, first, command)
        forked = fork(kept, new_id, await self._store.now(), EngineRunRef(node), retry=retry)
        request = replace(first, run_request_id=f"retry:{number}")
        new = _new_run(
            head,
            forked,
            run_request_id=request.run_request_id,
            request_key=start_key(new_id, request, first.plan_version),
            input_sha256=codec.value_digest(await self._input_of(run_id, first)),
            tags=descended(head.tags, retry_tag(run_id), lambda: _owners_of_artifacts(forked.events)),
            audit=audit_entry(caller, self._ids.new_id, actor=command.actor, subject=run_id, detail=command.reason),
        )
        [answer] = await self._store.create([new])
        if isinstance(answer, port.Refused):
            raise answer.error
        return answer.run_id


def _refuse_lock(head: port.RunHead, command: OperatorCommand) -> None:
    """Raise `Conflict` for a run that holds a lock: its retry or fork would have no run to hold it for."""
    if is_lock(head.plan_id):
        raise _conflict(head.run_id, command, "a lock is held for the run that asked for it: retry or fork that run")


def _named_retry(run_id: str, command: OperatorCommand) -> tuple[str, str]:
    """Return the id of the run that a retry makes, and the number that is the same for the same command."""
    number = codec.digest(f"{run_id}|{command.signal_id or ''}".encode())
    return _fitting(f"{run_id}/retry-{number[:12]}", f"retry-{number}"), number


def _retry_of(run_id: str, queued: e.RunQueued, command: OperatorCommand) -> e.RetryOf:
    attempt = attempt_of(run_id, queued) + 1
    return e.RetryOf(run_id, command.signal_id or "", command.actor, command.reason, attempt)


def _owners_of_artifacts(events: Sequence[Event]) -> set[str]:
    """Return the runs that have made the artifacts of these events."""
    bodies = [event.data for event in events if isinstance(event.data, e.StepCompleted)]
    return runs_of_artifacts(artifact.uri for body in bodies for artifact in body.artifacts)


def _owners_named_in(value: Raw) -> set[str]:
    """Return the runs that have made the artifacts to which a value refers."""
    return runs_of_artifacts(found[1].decode() for found in _REFERENCE.finditer(bytes(value)))


def _new_run(
    head: port.RunHead,
    forked: Fork,
    *,
    run_request_id: str,
    request_key: str,
    input_sha256: str,
    tags: tuple[str, ...],
    audit: AuditEntry | None,
) -> port.NewRun:
    """Return the run to create, with what it begins with; it is of the same tenant, project and environment."""
    before = RunState(run_id=forked.state.run_id)
    changes = index_changes(before, forked.state, forked.events)
    return port.NewRun(
        run_id=forked.state.run_id,
        tenant=head.tenant,
        project=head.project,
        environment=head.environment,
        plan_id=head.plan_id,
        plan_version=head.plan_version,
        run_request_id=run_request_id,
        request_key=request_key,
        input_sha256=input_sha256,
        snapshot=runtime_snapshot(forked.state),
        events=forked.events,
        messages=forked.messages,
        waits_opened=changes.waits_opened,
        tasks=tuple(task for task in changes.tasks if task.status == "OPEN"),
        records=record_changes(before, forked.events),
        reference_key=head.reference_key,
        tags=tags,
        audit=audit,
    )


def _decision_by(answer: port.Accepted | port.Duplicate) -> Callable[[Event], bool]:
    """Return what recognises the event that records the decision about a command."""
    assert answer.result is not None
    cause = signal_uuid(answer.result.signal_storage_key)

    def is_decision(event: Event) -> bool:
        return event.caused_by_signal_id == cause and isinstance(event.data, e.SignalAccepted | e.SignalRejected)

    return is_decision


def _check_verdict(run_id: str, command: OperatorCommand, decision: Event) -> None:
    if isinstance(decision.data, e.SignalRejected):
        raise _conflict(run_id, command, decision.data.reason)


def _conflict(run_id: str, command: OperatorCommand, reason: str) -> Conflict:
    return Conflict(f"{command.name} of run {run_id}: {reason}", run_id=run_id, command=command.name)


def _fitting(name: str, otherwise: str) -> str:
    return name if len(name.encode()) <= NAME_BYTES else otherwise
