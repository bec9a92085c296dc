"""Sending signals: checked against the types that workflows declare, and delivered many at a time."""

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any, NotRequired, TypedDict

from msgspec.structs import replace

from holdfast.core import codec
from holdfast.core.audit import AuditEntry
from holdfast.core.messages import AcceptedSignalResult, SignalRequest
from holdfast.core.names import check_name, check_signal_name
from holdfast.engine.inbox.declarations import Declarations, DeclaredByCode
from holdfast.errors import CallerError, EngineError, HoldfastError, InvalidInput
from holdfast.program.definitions import WorkflowDefinition
from holdfast.store import port

DELIVER_SIGNALS = 500
"""How many signals are delivered by one call at most."""

Asked = tuple[SignalRequest, "asyncio.Future[port.Delivered]"]
Permit = Callable[[Sequence[SignalRequest]], Awaitable[list[CallerError | None]]]
"""Says of each request, whose form is right, why it cannot be sent, or None."""

Audit = Callable[[SignalRequest], AuditEntry | None]
"""Returns what the audit log is to keep of a request."""


class FirstSignal(TypedDict):
    """A signal that comes with the start of a run. With a `signal_id` it can be sent again without harm.

    `actor` is who sends it, for the authoriser.
    """

    name: str
    payload: NotRequired[Any]
    signal_id: NotRequired[str | None]
    actor: NotRequired[str]


class Outgoing(FirstSignal):
    """A signal to a run, as one of many."""

    run_id: str
    step_id: NotRequired[str | None]
    require_waiting: NotRequired[bool]


class Sender:
    """Sends signals through one store. It knows the types that the workflows of an app declare."""

    def __init__(
        self,
        store: port.Store,
        workflows: Mapping[tuple[str, str], WorkflowDefinition],
        expect: Callable[[], None] | None = None,
    ) -> None:
        """`expect` is called right before something is delivered, for the node of this process to be ready for it."""
        self._store = store
        self._expect = expect
        self.declarations = Declarations(store, workflows)
        self._asked: list[Asked] = []
        self._task: asyncio.Task[None] | None = None

    async def send(
        self, request: SignalRequest, definition: WorkflowDefinition | None = None, permit: Permit | None = None
    ) -> AcceptedSignalResult:
        """Send a signal, together with others that are being sent. Raise why, if it is refused."""
        if definition is not None:
            declared = self.declarations.of(definition)
        else:
            declared = (await self.declarations.of_runs([request.run_id]))[request.run_id]
        warning = None if declared is None else declared.check(request.name, request.payload)
        if permit is not None:
            [problem] = await permit([request])
            if problem is not None:
                raise problem
        result = result_of(await self._deliver(request))
        return result if warning is None else replace(result, warning=warning)

    async def send_many(
        self, items: Sequence[Outgoing], permit: Permit | None = None, audit: Audit | None = None
    ) -> list[AcceptedSignalResult | CallerError]:
        """Send signals; answer each with what its sender is told, or why it is refused."""
        answers: list[Any] = [_attempt(item) for item in items]
        if audit is not None:
            answers = [replace(one, audit=audit(one)) if isinstance(one, SignalRequest) else one for one in answers]
        warnings = await self._check_declared(answers)
        waiting = [index for index, answer in enumerate(answers) if isinstance(answer, SignalRequest)]
        if permit is not None:
            for index, problem in zip(waiting, await permit([answers[i] for i in waiting]), strict=True):
                answers[index] = problem or answers[index]
            waiting = [index for index in waiting if isinstance(answers[index], SignalRequest)]
        for start in range(0, len(waiting), DELIVER_SIGNALS):
            batch = waiting[start : start + DELIVER_SIGNALS]
            for index, answer in zip(batch, await self._store.deliver([answers[i] for i in batch]), strict=True):
                answers[index] = answer.error if isinstance(answer, port.Refused) else answer.result
        for index, warning in warnings.items():
            if isinstance(answers[index], AcceptedSignalResult):
                answers[index] = replace(answers[index], warning=warning)
        return answers

    async def _check_declared(self, answers: list[Any]) -> dict[int, str]:
        """Put in the place of each request that does not keep to what is declared why; return warnings for others."""
        requests = [(index, each) for index, each in enumerate(answers) if isinstance(each, SignalRequest)]
        declared = await self.declarations.of_runs([request.run_id for _, request in requests])
        warnings = {}
        for index, request in requests:
            declaration = declared[request.run_id]
            try:
                warning = None if declaration is None else declaration.check(request.name, request.payload)
            except CallerError as problem:
                answers[index] = problem
                continue
            if warning is not None:
                warnings[index] = warning
        return warnings

    async def stop(self) -> None:
        """Give up what is under way; nobody knows what becomes of it."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait([self._task])
        _fail(self._asked, _stopped())

    # --- delivering together what is sent at the same time

    async def _deliver(self, request: SignalRequest) -> port.Delivered:
        future: asyncio.Future[port.Delivered] = asyncio.get_running_loop().create_future()
        self._asked.append((request, future))
        if self._task is None:
            self._task = asyncio.create_task(self._flush(), name="send")
        return await future

    async def _flush(self) -> None:
        try:
            while self._asked:
                batch, self._asked = self._asked[:DELIVER_SIGNALS], self._asked[DELIVER_SIGNALS:]
                await self._flush_batch(batch)
        finally:
            self._task = None

    async def _flush_batch(self, batch: list[Asked]) -> None:
        with_id = [asked for asked in batch if asked[0].signal_id is not None]
        if with_id and len(with_id) < len(batch) and not self._store.capabilities.conditional_batch:
            await self._flush_batch([asked for asked in batch if asked[0].signal_id is None])
            batch = with_id  # they will be refused together, and the others must not be refused with them
        try:
            if self._expect is not None:
                self._expect()
            answers = await self._store.deliver([request for request, _ in batch])
        except HoldfastError as problem:
            _fail(batch, problem)
            return
        except asyncio.CancelledError:
            _fail(batch, _stopped())
            raise
        for (_, future), answer in zip(batch, answers, strict=True):
            if not future.done():
                future.set_result(answer)


def request_of(item: Outgoing) -> SignalRequest:
    """Return an item of a batch as a request; raise `InvalidInput` if it is none."""
    fields: Any = item
    if not isinstance(fields, dict) or not {"run_id", "name"} <= fields.keys() <= _FIELDS:
        raise InvalidInput(f"a signal to send is a dict of {', '.join(sorted(_FIELDS))}; run_id and name are needed")
    check_signal_name(fields["name"])
    problem = check_name("run_id", fields["run_id"])
    if problem is not None:
        raise problem
    return SignalRequest(**{**fields, "payload": codec.encode(fields.get("payload"))})


def first_signal(run_id: str, signal: FirstSignal, definition: WorkflowDefinition) -> SignalRequest:
    """Return the signal that comes with the start of a run; raise `InvalidInput` if it does not fit."""
    fields: Any = signal
    if not isinstance(fields, dict) or not fields.keys() <= FirstSignal.__annotations__.keys():
        raise InvalidInput("with_signal is a dict of name, payload, signal_id and actor", field="with_signal")
    request = request_of({**fields, "run_id": run_id})  # type: ignore[typeddict-item]
    if definition.signals:
        DeclaredByCode(definition).check(request.name, request.payload)
    return request


def result_of(answer: port.Delivered) -> AcceptedSignalResult:
    """Return what the sender is told, or raise why the signal was refused."""
    if isinstance(answer, port.Refused):
        raise answer.error
    assert answer.result is not None
    return answer.result


_FIELDS = frozenset(SignalRequest.__struct_fields__) - {"audit"}


def _attempt(item: Outgoing) -> SignalRequest | CallerError:
    try:
        return request_of(item)
    except CallerError as problem:
        return problem


def _stopped() -> EngineError:
    return EngineError("the node was stopped while a signal was being sent; send it again with the same signal_id")


def _fail(asked: list[Asked], problem: Exception) -> None:
    for _, future in asked:
        if not future.done():
            future.set_exception(problem)
