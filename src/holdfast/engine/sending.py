"""Sending signals: checked against the types that workflows declare, and delivered many at a time."""

import asyncio
import re
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any, NotRequired, TypedDict

import msgspec
from msgspec import Raw
from msgspec.structs import replace

from holdfast.core import codec
from holdfast.core.audit import AuditEntry
from holdfast.core.messages import AcceptedSignalResult, SignalRequest
from holdfast.errors import CallerError, EngineError, HoldfastError, InvalidInput
from holdfast.program.definitions import WorkflowDefinition
from holdfast.program.signals import check_signal_name
from holdfast.store import port

DELIVER_SIGNALS = 500
"""How many signals are delivered by one call at most."""

KNOWN_RUNS = 10_000
"""Of how many runs a sender remembers which workflow they are of."""

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
        self._workflows = workflows
        self._known: dict[str, WorkflowDefinition | None] = {}
        self._asked: list[Asked] = []
        self._task: asyncio.Task[None] | None = None

    async def send(
        self, request: SignalRequest, definition: WorkflowDefinition | None = None, permit: Permit | None = None
    ) -> AcceptedSignalResult:
        """Send a signal, together with others that are being sent. Raise why, if it is refused."""
        if self._is_declared(request.name):
            definition = definition or (await self._definitions([request.run_id]))[request.run_id]
            check_payload(definition, request.name, request.payload)
        if permit is not None:
            [problem] = await permit([request])
            if problem is not None:
                raise problem
        return result_of(await self._deliver(request))

    async def send_many(
        self, items: Sequence[Outgoing], permit: Permit | None = None, audit: Audit | None = None
    ) -> list[AcceptedSignalResult | CallerError]:
        """Send signals; answer each with what its sender is told, or why it is refused."""
        answers: list[Any] = [_attempt(item) for item in items]
        if audit is not None:
            answers = [replace(one, audit=audit(one)) if isinstance(one, SignalRequest) else one for one in answers]
        requests = [answer for answer in answers if isinstance(answer, SignalRequest)]
        definitions = await self._definitions([r.run_id for r in requests if self._is_declared(r.name)])
        for index, request in enumerate(answers):
            if isinstance(request, SignalRequest) and self._is_declared(request.name):
                answers[index] = _checked(request, definitions[request.run_id])
        waiting = [index for index, answer in enumerate(answers) if isinstance(answer, SignalRequest)]
        if permit is not None:
            for index, problem in zip(waiting, await permit([answers[i] for i in waiting]), strict=True):
                answers[index] = problem or answers[index]
            waiting = [index for index in waiting if isinstance(answers[index], SignalRequest)]
        for start in range(0, len(waiting), DELIVER_SIGNALS):
            batch = waiting[start : start + DELIVER_SIGNALS]
            for index, answer in zip(batch, await self._store.deliver([answers[i] for i in batch]), strict=True):
                answers[index] = answer.error if isinstance(answer, port.Refused) else answer.result
        return answers

    async def stop(self) -> None:
        """Give up what is under way; nobody knows what becomes of it."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait([self._task])
        _fail(self._asked, _stopped())

    # --- which workflow a run is of

    def _is_declared(self, name: str) -> bool:
        """Say whether any workflow declares a type for this name; else nobody has to be asked of whom a run is."""
        return any(name in workflow.signals for workflow in self._workflows.values())

    async def _definitions(self, run_ids: Sequence[str]) -> dict[str, WorkflowDefinition | None]:
        """Return the workflows of these runs, where this app has them."""
        unknown = [run_id for run_id in dict.fromkeys(run_ids) if run_id not in self._known]
        found: dict[str, WorkflowDefinition | None] = dict.fromkeys(unknown)
        for start in range(0, len(unknown), DELIVER_SIGNALS):
            for run in await self._store.load(unknown[start : start + DELIVER_SIGNALS]):
                if run is not None:
                    found[run.head.run_id] = self._workflows.get((run.head.plan_id, run.head.plan_version))
                    self._known[run.head.run_id] = found[run.head.run_id]
        found |= {run_id: self._known[run_id] for run_id in run_ids if run_id in self._known}
        if len(self._known) > KNOWN_RUNS:
            self._known.clear()
        return found

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
    return SignalRequest(**{**fields, "payload": codec.encode(fields.get("payload"))})


def first_signal(run_id: str, signal: FirstSignal, definition: WorkflowDefinition) -> SignalRequest:
    """Return the signal that comes with the start of a run; raise `InvalidInput` if it does not fit."""
    fields: Any = signal
    if not isinstance(fields, dict) or not fields.keys() <= FirstSignal.__annotations__.keys():
        raise InvalidInput("with_signal is a dict of name, payload, signal_id and actor", field="with_signal")
    request = request_of({**fields, "run_id": run_id})  # type: ignore[typeddict-item]
    check_payload(definition, request.name, request.payload)
    return request


def result_of(answer: port.Delivered) -> AcceptedSignalResult:
    """Return what the sender is told, or raise why the signal was refused."""
    if isinstance(answer, port.Refused):
        raise answer.error
    assert answer.result is not None
    return answer.result


def check_payload(definition: WorkflowDefinition | None, name: str, payload: Raw) -> None:
    """Refuse a payload that does not fit the type that the workflow declares for the signal.

    The error says which field and why, in words that are made from the type alone and never from the payload.
    """
    decoder = None if definition is None else definition.signal_decoders.get(name)
    if decoder is None:
        return
    try:
        decoder.decode(payload)
        return
    except (msgspec.ValidationError, RecursionError) as problem:
        where, reason = explain_unfit(problem)
        field = f"payload{where}"
    raise InvalidInput(f"signal {name!r}: {field}: {reason}", field=field, reason=reason, signal_name=name) from None


def explain_unfit(problem: Exception) -> tuple[str, str]:
    """Return where a value does not fit its type, and why, in words that are made from the type alone."""
    found = _WHERE.search(str(problem))
    text = str(problem)[: found.start()] if found else str(problem)
    if _SAFE.match(text):
        reason = text
    else:
        reason = next((mild for start, mild in _MILD.items() if text.startswith(start)), "it does not fit")
    return found[1] if found else "", reason


_FIELDS = frozenset(SignalRequest.__struct_fields__) - {"audit"}
_WHERE = re.compile(r" - at `(?:key in )?\$([^`]*)`$")
_SAFE = re.compile(r"Expected `|Object missing required field `")
_MILD = {
    "Object contains unknown field": "Object contains a field that is not declared",
    "Invalid enum value": "Not one of the values that are declared",
    "Invalid value": "Not one of the values that are declared",
}


def _attempt(item: Outgoing) -> SignalRequest | CallerError:
    try:
        return request_of(item)
    except CallerError as problem:
        return problem


def _checked(request: SignalRequest, definition: WorkflowDefinition | None) -> SignalRequest | CallerError:
    try:
        check_payload(definition, request.name, request.payload)
        return request
    except CallerError as problem:
        return problem


def _stopped() -> EngineError:
    return EngineError("the node was stopped while a signal was being sent; send it again with the same signal_id")


def _fail(asked: list[Asked], problem: Exception) -> None:
    for _, future in asked:
        if not future.done():
            future.set_exception(problem)
