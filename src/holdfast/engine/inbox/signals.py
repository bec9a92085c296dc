"""Sending signals: checked against the types that workflows declare, then delivered in batches."""

from collections.abc import Callable, Sequence
from typing import Any, NotRequired, TypedDict

from msgspec.structs import replace

from holdfast.clock import Ids
from holdfast.core.audit import Caller, audit_entry
from holdfast.core.keys import check_name, check_signal_name
from holdfast.core.messages import AcceptedSignalResult, SignalRequest
from holdfast.engine.batcher import Batcher
from holdfast.engine.inbox.authorization import Permissions
from holdfast.engine.inbox.declarations import Declarations, DeclaredByCode, verdict_of
from holdfast.errors import CallerError, EngineError, HoldfastError, InvalidInput, SignalAcceptanceIndeterminate
from holdfast.program.definitions import WorkflowDefinition
from holdfast.program.values import Values
from holdfast.registry import Registry
from holdfast.store import port, validation
from holdfast.store.joined import JoinedStore

DELIVER_SIGNALS = 500
"""The maximum number of signals that one call delivers."""


class FirstSignal(TypedDict):
    """A signal that comes with the start of a run. With a `signal_id` it can safely be sent again.

    `actor` is the sender, for the authoriser.
    """

    name: str
    payload: NotRequired[Any]
    signal_id: NotRequired[str | None]
    actor: NotRequired[str]


class Outgoing(FirstSignal):
    """A signal to a run, as part of a batch."""

    run_id: str
    step_id: NotRequired[str | None]
    require_waiting: NotRequired[bool]


class SignalSender:
    """Sends signals through one store, after checking them against the types that workflows declare."""

    def __init__(
        self, store: port.Store, registry: Registry, permissions: Permissions, expect: Callable[[], None]
    ) -> None:
        """`expect` is called right before a delivery, so that the node of this process is ready for it."""
        self._store = store
        self._values = registry.values
        self._permissions = permissions
        self._expect = expect
        self.declarations = Declarations(store, registry.workflows)
        self._batcher: Batcher[SignalRequest, port.Delivered] = Batcher(
            self._deliver, _stopped, DELIVER_SIGNALS, "send signals"
        )

    async def send(
        self,
        request: SignalRequest,
        definition: WorkflowDefinition | None,
        caller: Caller | None,
        joined: JoinedStore | None = None,
    ) -> AcceptedSignalResult:
        """Send a signal, batched with others that are being sent; or alone, in a transaction of the caller.

        Raise the error if it is refused.
        """
        if definition is not None and not definition.signals:
            warning = None  # it declares nothing, and accepts any signal
        else:
            declared = None if definition is None else DeclaredByCode(definition)
            [verdict] = [verdict_of(declared, request)] if declared else await self.declarations.check([request])
            if isinstance(verdict, CallerError):
                [known] = await self._answers_to_unfit([(request, verdict)], caller, joined)
                if isinstance(known, CallerError):
                    raise known
                return known
            warning = verdict
        if self.declarations.is_entity(request.run_id) if definition is None else definition.is_entity:
            request = replace(request, is_unlimited=True)
        if self._permissions.is_needed:
            await self._permissions.check_signal(request, caller)
        validation.require_for_signals(self._store, [request])  # otherwise others in its batch would fail with it
        if joined is None:
            answer = await self._batcher.ask(request)
        else:
            [answer] = await joined.deliver([request])
        result = result_of(answer)
        return result if warning is None else replace(result, warning=warning)

    async def send_many(
        self, items: Sequence[Outgoing], caller: Caller | None, ids: Ids
    ) -> list[AcceptedSignalResult | CallerError]:
        """Send signals; return for each its result, or the error that refuses it."""
        answers: list[Any] = [_attempt(item, self._values) for item in items]
        if caller is not None:
            answers = [audited(one, caller, ids) if isinstance(one, SignalRequest) else one for one in answers]
        warnings = await self._check_declared(answers, caller)
        waiting = [index for index, answer in enumerate(answers) if isinstance(answer, SignalRequest)]
        if self._permissions.is_needed:
            problems = await self._permissions.check_signals([answers[i] for i in waiting], caller)
            for index, problem in zip(waiting, problems, strict=True):
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

    async def _check_declared(self, answers: list[Any], caller: Caller | None) -> dict[int, str]:
        """Replace each request that does not match its declaration by its answer; return warnings for others."""
        requests = [(index, each) for index, each in enumerate(answers) if isinstance(each, SignalRequest)]
        verdicts = await self.declarations.check([request for _, request in requests])
        warnings: dict[int, str] = {}
        unfit: dict[int, tuple[SignalRequest, CallerError]] = {}
        for (index, request), verdict in zip(requests, verdicts, strict=True):
            if isinstance(verdict, CallerError):
                unfit[index] = request, verdict
                continue
            if verdict is not None:
                warnings[index] = verdict
            if self.declarations.is_entity(answers[index].run_id):
                answers[index] = replace(answers[index], is_unlimited=True)
        for index, answer in zip(unfit, await self._answers_to_unfit([*unfit.values()], caller), strict=True):
            answers[index] = answer
        return warnings

    async def _answers_to_unfit(
        self,
        unfit: Sequence[tuple[SignalRequest, CallerError]],
        caller: Caller | None,
        joined: JoinedStore | None = None,
    ) -> list[AcceptedSignalResult | CallerError]:
        """Return the answers to signals that do not match what their workflows declare: usually the error.

        A signal that was accepted before gets its first answer: a declaration that has changed since does not make its
        retry a new signal. So the store is asked to accept nothing new.
        """
        asked = [place for place, (request, _) in enumerate(unfit) if request.signal_id is not None]
        known: dict[int, AcceptedSignalResult | CallerError] = {}
        if not self._store.capabilities.conditional_batch:
            return [problem for _, problem in unfit]
        for start in range(0, len(asked), DELIVER_SIGNALS):
            places = asked[start : start + DELIVER_SIGNALS]
            repeated = [replace(unfit[place][0], accept_before=0) for place in places]
            for place, answer in zip(places, await (joined or self._store).deliver(repeated), strict=True):
                if isinstance(answer, port.Duplicate):
                    known[place] = result_of(answer)
                elif isinstance(answer, port.Refused) and isinstance(answer.error, SignalAcceptanceIndeterminate):
                    known[place] = answer.error
        if known and self._permissions.is_needed:
            problems = await self._permissions.check_signals([unfit[place][0] for place in known], caller)
            known = {place: problem or known[place] for place, problem in zip(known, problems, strict=True)}
        return [known.get(place, problem) for place, (_, problem) in enumerate(unfit)]

    async def stop(self) -> None:
        """Cancel the running deliveries; their outcome is then unknown."""
        await self._batcher.stop()

    async def _deliver(self, requests: list[SignalRequest]) -> Sequence[port.Delivered | Exception]:
        """Deliver signals that were sent at the same time; return the result of each."""
        if self._store.capabilities.conditional_batch or len({each.signal_id is None for each in requests}) == 1:
            return await self._deliver_batch(requests)
        # Signals with an id are refused together. Signals without one must not be refused with them.
        without_id = iter(await self._deliver_batch([each for each in requests if each.signal_id is None]))
        with_id = iter(await self._deliver_batch([each for each in requests if each.signal_id is not None]))
        return [next(without_id if each.signal_id is None else with_id) for each in requests]

    async def _deliver_batch(self, requests: list[SignalRequest]) -> Sequence[port.Delivered | Exception]:
        self._expect()
        try:
            return await self._store.deliver(requests)
        except HoldfastError as problem:
            return [problem] * len(requests)


def request_of(item: Outgoing, values: Values) -> SignalRequest:
    """Return an item of a batch as a request; raise `InvalidInput` if it is malformed."""
    fields: Any = item
    if not isinstance(fields, dict) or not {"run_id", "name"} <= fields.keys() <= Outgoing.__annotations__.keys():
        known = ", ".join(sorted(Outgoing.__annotations__))
        raise InvalidInput(f"a signal to send is a dict of {known}; run_id and name are needed")
    check_signal_name(fields["name"])
    problem = check_name("run_id", fields["run_id"])
    if problem is not None:
        raise problem
    return SignalRequest(**{**fields, "payload": values.encode(fields.get("payload"))})


def _shape(given: Any) -> str:
    """Describe the shape of a value that should be a dict, without showing payloads."""
    return f"one of {', '.join(map(str, given))}" if isinstance(given, dict) and given else f"a {type(given).__name__}"


def first_signal(run_id: str, signal: FirstSignal, values: Values) -> SignalRequest:
    """Return the signal that comes with the start of a run; raise `InvalidInput` if it is malformed."""
    fields: Any = signal
    if not isinstance(fields, dict) or not {"name"} <= fields.keys() <= FirstSignal.__annotations__.keys():
        problem = f"with_signal is a dict of name, payload, signal_id and actor; name is needed; not {_shape(fields)}"
        raise InvalidInput(problem, field="with_signal")
    return request_of({**fields, "run_id": run_id}, values)  # type: ignore[typeddict-item]


def result_of(answer: port.Delivered) -> AcceptedSignalResult:
    """Return the result for the sender, or raise the error that refuses the signal."""
    if isinstance(answer, port.Refused):
        raise answer.error
    assert answer.result is not None
    return answer.result


def audited(request: SignalRequest, caller: Caller | None, ids: Ids) -> SignalRequest:
    """Return a signal with its entry for the audit log. A signal from code in this process has none."""
    return replace(request, audit=audit_entry(caller, ids.new_id, actor=request.actor, subject=request.name))


def _attempt(item: Outgoing, values: Values) -> SignalRequest | CallerError:
    try:
        return request_of(item, values)
    except CallerError as problem:
        return problem


def _stopped(request: SignalRequest) -> EngineError:
    return EngineError("the node was stopped while a signal was being sent; send it again with the same signal_id")
