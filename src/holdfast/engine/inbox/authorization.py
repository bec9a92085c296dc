"""Asking the authoriser about what is sent to runs: signals, operations on tasks and updates (API-4).

It goes as with commands (SIG-13): first the form is checked, then the authoriser is asked, then the decision recorded.
What is permitted is recorded by being accepted. What is refused stands in the run's history as SignalRejected, with who
sent it and why not, and its sender gets `NotPermitted`.
"""

import logging
from collections.abc import Sequence

from msgspec.structs import replace

from holdfast.core import codec
from holdfast.core.events import RunQueued
from holdfast.core.messages import (
    TASK_SIGNAL,
    UPDATE_SIGNAL,
    SignalRequest,
    TaskRequest,
    UpdatePayload,
    check_signal,
)
from holdfast.engine.inbox.operator_commands import ControlRequest, Operators, refused_id
from holdfast.engine.inbox.signals import DELIVER_SIGNALS
from holdfast.engine.turns.draft import control_request
from holdfast.errors import CallerError, Conflict, NotPermitted, StoreCorrupt
from holdfast.limits import Limits
from holdfast.store.port import LoadedRun, RunHead, Store
from holdfast.store.types import load_each

logger = logging.getLogger("holdfast.access")

_OF_ANY_SIZE = Limits(signal_payload_bytes=2**62)
"""For looking at the form alone: how much may be sent is the store's to say."""


class Permits:
    """Asks about what somebody sends: the caller whom the service knows, or else whom each request names."""

    __slots__ = ("_operators", "_store")

    def __init__(self, operators: Operators, store: Store) -> None:
        self._operators = operators
        self._store = store

    async def __call__(self, requests: Sequence[SignalRequest]) -> list[CallerError | None]:
        """Return of each request why it cannot be sent, or None. To a run that is not there the store answers."""
        answers: list[CallerError | None] = []
        for start in range(0, len(requests), DELIVER_SIGNALS):
            answers += await self._refusals(requests[start : start + DELIVER_SIGNALS])
        return answers

    async def _refusals(self, requests: Sequence[SignalRequest]) -> list[CallerError | None]:
        answers: list[CallerError | None] = [check_signal(request, _OF_ANY_SIZE) for request in requests]
        sound = [request.run_id for request, problem in zip(requests, answers, strict=True) if problem is None]
        run_ids = list(dict.fromkeys(sound))
        loaded = await load_each(self._store.load, run_ids)
        runs = dict(zip(run_ids, loaded, strict=True))
        refused: list[SignalRequest] = []
        for index, request in enumerate(requests):
            run = runs[request.run_id] if answers[index] is None else None
            if isinstance(run, StoreCorrupt):  # whose it is cannot be known, so the authoriser cannot be asked
                answers[index] = Conflict(
                    f"run {request.run_id!r} cannot be read: {run.message}", run_id=request.run_id
                )
            if not isinstance(run, LoadedRun):
                continue
            asked = self._asked(request, run.head)
            objection = await self._operators.objection(asked)
            if objection:
                answers[index] = _not_permitted(asked, objection)
                refused.append(self._record(request, asked, objection))
        if refused:
            await self._store.deliver(refused)  # to a run that has finished in the meantime nothing is added
        return answers

    async def check(self, request: SignalRequest) -> None:
        """Raise why one request cannot be sent, if it cannot."""
        [problem] = await self([request])
        if problem is not None:
            raise problem

    async def check_first(self, request: SignalRequest, queued: RunQueued, run_id: str | None) -> None:
        """Raise why a signal cannot come with the start of a run, if it cannot: nothing is started then.

        The refusal is recorded in the run of this id if it is there already, and in the log otherwise.
        """
        problem = check_signal(request, _OF_ANY_SIZE)
        if problem is not None:
            raise problem
        asked = replace(self._asked(request, None), run_id=run_id or "", plan_id=queued.plan_id, tenant=queued.tenant)
        objection = await self._operators.objection(asked)
        if not objection:
            return
        [run] = await self._store.load([run_id]) if run_id is not None else [None]
        if run is not None and (run.head.plan_id, run.head.tenant) == (asked.plan_id, asked.tenant):
            await self._store.deliver([self._record(request, asked, objection)])
        elif asked.caller is None:  # else the service says it, with all that it knows
            what = f"{asked.command} {asked.name} with the start of {asked.plan_id}"
            logger.warning("refused: who=%r what=%r why=%r", asked.actor, what, objection)
        raise _not_permitted(asked, objection)

    def _record(self, request: SignalRequest, asked: ControlRequest, objection: str) -> SignalRequest:
        record = control_request(
            request.run_id,
            asked.command,
            asked.actor,
            step_id=asked.step_id,
            signal_id=refused_id(request.signal_id, asked, objection),
            refusal=objection,
            subject=asked.name,
        )
        entry = self._operators.audit(actor=asked.actor, subject=asked.name, detail=objection, outcome="refused")
        return replace(record, audit=entry)

    def _asked(self, request: SignalRequest, head: RunHead | None) -> ControlRequest:
        caller = self._operators.caller
        asked = ControlRequest(
            run_id=request.run_id,
            plan_id="" if head is None else head.plan_id,
            tenant="" if head is None else head.tenant,
            command="SIGNAL",
            name=request.name,
            step_id=request.step_id,
            actor=request.actor or ("" if caller is None else caller.name),
            reason="",
            caller=caller,
            payload=request.payload,
        )
        if request.name == UPDATE_SIGNAL:
            update = codec.decode(request.payload, UpdatePayload)
            return replace(asked, command="UPDATE", name=update.name, payload=update.input)
        if request.name == TASK_SIGNAL:
            task = codec.decode(request.payload, TaskRequest)
            return replace(
                asked,
                command="TASK",
                name=task.action,
                step_id=task.step_id,
                actor=task.actor.name,
                payload=task.answer,
            )
        return asked


async def check_start(operators: Operators, queued: RunQueued, run_id: str | None) -> None:
    """Raise `NotPermitted` if the authoriser refuses the start of a run."""
    if operators.authoriser is None:
        return
    asked = ControlRequest(
        run_id=run_id or "",
        plan_id=queued.plan_id,
        tenant=queued.tenant,
        command="START",
        name=queued.plan_id,
        step_id=None,
        actor="",
        reason="",
        payload=queued.input,
    )
    await operators.require(asked)


def permits_of(operators: Operators, store: Store) -> Permits | None:
    """Return who is asked about what is sent, or None if nobody is: without an authoriser everything is permitted."""
    return None if operators.authoriser is None else Permits(operators, store)


def _not_permitted(asked: ControlRequest, objection: str) -> NotPermitted:
    what = f"{asked.command} {asked.name}"
    where = f"run {asked.run_id}" if asked.run_id else f"a run of {asked.plan_id} that is to start"
    details = {"run_id": asked.run_id, "command": asked.command, "name": asked.name, "actor": asked.actor}
    return NotPermitted(f"{what} to {where}: {objection}", **details)
