"""Authorisation of requests to runs by the app's authoriser, and the record of refusals (API-4).

A request is checked in this order (SIG-13): its form, then the authoriser; then the decision is recorded. A permitted
request is recorded by being accepted. A refused request is recorded in the run's history as SignalRejected, with the
actor and the reason, and its sender gets `NotPermitted`. Without an authoriser everything is permitted, at no cost.
"""

import logging
from collections.abc import Awaitable, Callable, Sequence
from inspect import isawaitable

from msgspec import Raw, Struct
from msgspec.structs import replace

from holdfast.clock import Ids
from holdfast.core import codec
from holdfast.core.audit import Caller, audit_entry
from holdfast.core.events import NULL, RunQueued
from holdfast.core.messages import (
    TASK_SIGNAL,
    UPDATE_SIGNAL,
    ControlName,
    SentName,
    SignalRequest,
    TaskRequest,
    UpdatePayload,
    check_signal,
    control_request,
)
from holdfast.engine.history import head_of
from holdfast.errors import CallerError, Conflict, NotPermitted, StoreCorrupt
from holdfast.limits import Limits
from holdfast.store.port import LoadedRun, RunHead, Store
from holdfast.store.types import load_each

OVERRIDE = "runs:override"
"""The scope that allows skipping tasks and waits that ask other people for an answer."""

CHECK_SIGNALS = 500
"""How many signals are looked up in one call."""

_OF_ANY_SIZE = Limits(signal_payload_bytes=2**62)
"""For checks of the form alone: the store enforces the limits on size."""

logger = logging.getLogger("holdfast.access")


def has_override(caller: Caller | None) -> bool:
    """Return whether a caller may skip tasks and waits. Code in this process may, unless the authoriser refuses it."""
    return caller is None or caller.scopes is None or OVERRIDE in caller.scopes


class ControlRequest(Struct, frozen=True, kw_only=True):
    """A request to a run, for the authoriser: a command, or SIGNAL, TASK, UPDATE, START or QUERY.

    - `caller`: the sender, as the service has authenticated it. None for code of this process.
    - `actor`: the person who decides: the caller, or the person on whose behalf an administrator acts.
    - `name`: the name of the signal, the operation on a task, the update, the workflow or the query.
    - `payload`: its payload; for SKIP_STEP the result that the workflow will get.
    - `step_kind`: the kind of the step: activity, timer, signal, task, child or update. Empty if it does not exist yet.
    - `run_id`: empty for a start, and a signal that comes with one, unless the start has an id.
    """

    run_id: str
    workflow: str
    """The workflow of the run."""
    tenant: str
    """The tenant of the run."""
    command: ControlName | SentName
    """What is requested."""
    step_id: str | None = None
    """The step that the command is about."""
    actor: str = ""
    reason: str = ""
    """The reason that the sender gave."""
    caller: Caller | None = None
    name: str = ""
    payload: Raw = NULL
    step_kind: str = ""


Verdict = bool | str
Authoriser = Callable[[ControlRequest], Verdict | Awaitable[Verdict]]
"""Returns True, False, or the reason of a refusal. What it raises is raised to the sender, and nothing is sent."""


class Permissions:
    """Asks the app's authoriser about requests to runs of one store, and records its refusals."""

    __slots__ = ("_authoriser", "_ids", "_store", "is_needed")

    def __init__(self, authoriser: Authoriser | None, store: Store, ids: Ids) -> None:
        self._authoriser = authoriser
        self._store = store
        self._ids = ids
        self.is_needed = authoriser is not None
        """Whether there is an authoriser. Without one no check refuses anything."""

    async def objection(self, request: ControlRequest) -> str:
        """Return the authoriser's reason to refuse a request, or ""."""
        if self._authoriser is None:
            return ""
        answer = self._authoriser(request)
        verdict = await answer if isawaitable(answer) else answer
        if verdict is True:
            return ""
        return verdict if isinstance(verdict, str) and verdict else "not permitted"

    # --- what no run records

    async def check_start(self, queued: RunQueued, run_id: str | None, caller: Caller | None) -> None:
        """Raise `NotPermitted` if the authoriser refuses the start of a run."""
        await self._require(
            ControlRequest(
                run_id=run_id or "",
                workflow=queued.plan_id,
                tenant=queued.tenant,
                command="START",
                name=queued.plan_id,
                caller=caller,
                payload=queued.input,
            )
        )

    async def check_query(self, run_id: str, name: str, arguments: Raw, caller: Caller | None) -> None:
        """Raise `NotPermitted` if the authoriser refuses a query."""
        head = await head_of(self._store, run_id)
        await self._require(
            ControlRequest(
                run_id=run_id,
                workflow=head.plan_id,
                tenant=head.tenant,
                command="QUERY",
                name=name,
                caller=caller,
                payload=arguments,
            )
        )

    async def _require(self, request: ControlRequest) -> None:
        caller = request.caller
        request = replace(request, actor="" if caller is None else caller.name)
        objection = await self.objection(request)
        if not objection:
            return
        what = f"{request.command} {request.name}" + (f" of run {request.run_id}" if request.run_id else "")
        if caller is None:  # otherwise the service logs it, with everything that it knows
            logger.warning("refused: who=%r what=%r why=%r", request.actor, what, objection)
        details = {"run_id": request.run_id, "command": request.command, "name": request.name, "actor": request.actor}
        raise NotPermitted(f"{what}: {objection}", **details)

    # --- signals, operations on tasks, and updates

    async def check_signals(self, requests: Sequence[SignalRequest], caller: Caller | None) -> list[CallerError | None]:
        """Return for each request the error that refuses it, or None. If the run does not exist, the store answers."""
        answers: list[CallerError | None] = []
        for start in range(0, len(requests), CHECK_SIGNALS):
            answers += await self._check_batch(requests[start : start + CHECK_SIGNALS], caller)
        return answers

    async def check_signal(self, request: SignalRequest, caller: Caller | None) -> None:
        """Raise the error if one request is refused."""
        [problem] = await self._check_batch([request], caller)
        if problem is not None:
            raise problem

    async def _check_batch(self, requests: Sequence[SignalRequest], caller: Caller | None) -> list[CallerError | None]:
        answers: list[CallerError | None] = [check_signal(request, _OF_ANY_SIZE) for request in requests]
        sound = [request.run_id for request, problem in zip(requests, answers, strict=True) if problem is None]
        run_ids = list(dict.fromkeys(sound))
        loaded = await load_each(self._store.load, run_ids)
        runs = dict(zip(run_ids, loaded, strict=True))
        refused: list[SignalRequest] = []
        for index, request in enumerate(requests):
            run = runs[request.run_id] if answers[index] is None else None
            if isinstance(run, StoreCorrupt):  # its workflow and tenant are unknown, so the authoriser cannot be asked
                answers[index] = Conflict(
                    f"run {request.run_id!r} cannot be read: {run.message}", run_id=request.run_id
                )
            if not isinstance(run, LoadedRun):
                continue
            asked = _control_request(request, run.head, caller)
            objection = await self.objection(asked)
            if objection:
                answers[index] = _not_permitted(asked, objection)
                refused.append(self._record(request, asked, objection))
        if refused:
            await self._store.deliver(refused)  # a run that has finished meanwhile accepts nothing
        return answers

    async def check_first_signal(
        self, request: SignalRequest, queued: RunQueued, run_id: str | None, caller: Caller | None
    ) -> None:
        """Raise the error if a signal may not come with the start of a run; nothing is started then.

        The refusal is recorded in the run of this id if it exists already, and in the log otherwise.
        """
        problem = check_signal(request, _OF_ANY_SIZE)
        if problem is not None:
            raise problem
        asked = replace(
            _control_request(request, None, caller),
            run_id=run_id or "",
            workflow=queued.plan_id,
            tenant=queued.tenant,
        )
        objection = await self.objection(asked)
        if not objection:
            return
        [run] = await self._store.load([run_id]) if run_id is not None else [None]
        if run is not None and (run.head.plan_id, run.head.tenant) == (asked.workflow, asked.tenant):
            await self._store.deliver([self._record(request, asked, objection)])
        elif caller is None:  # otherwise the service logs it, with everything that it knows
            what = f"{asked.command} {asked.name} with the start of {asked.workflow}"
            logger.warning("refused: who=%r what=%r why=%r", asked.actor, what, objection)
        raise _not_permitted(asked, objection)

    def _record(self, request: SignalRequest, asked: ControlRequest, objection: str) -> SignalRequest:
        record = control_request(
            request.run_id,
            asked.command,
            asked.actor,
            step_id=asked.step_id,
            signal_id=refusal_id(request.signal_id, (asked.command, asked.name, asked.actor), objection),
            refusal=objection,
            subject=asked.name,
        )
        entry = audit_entry(
            asked.caller, self._ids.new_id, actor=asked.actor, subject=asked.name, detail=objection, outcome="refused"
        )
        return replace(record, audit=entry)


def refusal_id(signal_id: str | None, asked: Sequence[str], objection: str) -> str | None:
    """Return the id of a refusal. It differs from the request's, because the request may be permitted later."""
    if signal_id is None:
        return None
    return f"refused {codec.digest('|'.join((*asked, objection, signal_id)).encode())}"


def _control_request(request: SignalRequest, head: RunHead | None, caller: Caller | None) -> ControlRequest:
    asked = ControlRequest(
        run_id=request.run_id,
        workflow="" if head is None else head.plan_id,
        tenant="" if head is None else head.tenant,
        command="SIGNAL",
        name=request.name,
        step_id=request.step_id,
        actor=request.actor or ("" if caller is None else caller.name),
        caller=caller,
        payload=request.payload,
    )
    if request.name == UPDATE_SIGNAL:
        update = codec.decode(request.payload, UpdatePayload)
        return replace(asked, command="UPDATE", name=update.name, payload=update.input)
    if request.name == TASK_SIGNAL:
        task = codec.decode(request.payload, TaskRequest)
        return replace(
            asked, command="TASK", name=task.action, step_id=task.step_id, actor=task.actor.name, payload=task.answer
        )
    return asked


def _not_permitted(asked: ControlRequest, objection: str) -> NotPermitted:
    what = f"{asked.command} {asked.name}"
    where = f"run {asked.run_id}" if asked.run_id else f"a run of {asked.workflow} that is to start"
    details = {"run_id": asked.run_id, "command": asked.command, "name": asked.name, "actor": asked.actor}
    return NotPermitted(f"{what} to {where}: {objection}", **details)
