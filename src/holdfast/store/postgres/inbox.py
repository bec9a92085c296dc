"""`deliver`: puts signals and messages into inboxes, each at most once by its id, many at a time in one round trip."""

from collections.abc import Sequence
from typing import Any

from msgspec.structs import replace

from holdfast.core.audit import AuditEntry
from holdfast.core.codec import INTEGER_LIMIT, encode_text
from holdfast.core.instants import Instant
from holdfast.core.keys import RESERVED_PREFIX, inbox_uuid, signal_storage_key, signal_suffix
from holdfast.core.messages import AcceptedSignalResult, Message, SignalRequest
from holdfast.core.state import RunStatus
from holdfast.errors import CallerError, InvalidInput
from holdfast.limits import Limits
from holdfast.store import decisions, port, sql, validation
from holdfast.store.postgres import audit
from holdfast.store.postgres.columns import columns, literals, places
from holdfast.store.postgres.faults import UNSTORABLE
from holdfast.store.postgres.pool import Db, Transaction

Answer = port.Accepted | port.Duplicate | port.Refused

SIGNAL_KINDS = ("bigint", *["text"] * 5, "bytea", "boolean", "boolean", "text")
MESSAGE_KINDS = ("bigint", "text", "text", "bigint", "text")
PLACES = f"$1, $2, $3, {places(4, (*SIGNAL_KINDS, *MESSAGE_KINDS))}"
DELIVER = f"SELECT o_now, o_ord, o_code, o_status, o_seq, o_at FROM holdfast.deliver_2({PLACES})"
DELIVER_AUDITED = audit.with_audit(DELIVER, 19, "A", is_known=True)
OUTCOMES = (
    f"SELECT o_now, o_ord, o_code, o_status, o_seq, o_at FROM holdfast.deliver_outcomes_2({PLACES}, $19, $20, $21, $22)"
)
OUTCOMES_AUDITED = audit.with_audit(OUTCOMES, 23, "A", is_known=True)
DELIVER_IF = f"SELECT o_now, o_ord, o_code, o_status, o_seq, o_at FROM holdfast.deliver_if_1({PLACES}, $19, $20)"
DELIVER_IF_AUDITED = audit.with_audit(DELIVER_IF, 21, "A", is_known=True)


async def deliver(
    db: Db, items: Sequence[SignalRequest | Message], limits: Limits, now: Instant | None
) -> list[Answer]:
    """Deliver the items; those of one run in order."""
    answers: dict[int, Answer] = {}
    waiting: list[int] = []
    for index, item in enumerate(items):
        problem = validation.check_item(item, limits)
        if problem is None:
            waiting.append(index)
        else:
            answers[index] = port.Refused(problem)
    while waiting:
        wave, later = _wave(items, waiting)
        again = await _deliver(db, items, wave, answers, limits, now)
        waiting = sorted(again + later)
    return [answers[index] for index in range(len(items))]


def _wave(items: Sequence[SignalRequest | Message], waiting: Sequence[int]) -> tuple[list[int], list[int]]:
    """Return the items that one call can deliver, and the rest.

    A signal with conditions is delivered alone, and signals to entities separately from others. An item with the id of
    an earlier one is delivered later. So is a signal that requires an open wait, if there are earlier signals for its
    run, and everything for the run after it: whether it finds a wait depends on them.
    """
    wave: list[int] = []
    later: list[int] = []
    scopes: set[tuple[str, ...]] = set()
    busy: set[str] = set()
    closed: set[str] = set()
    are_unlimited = any(_is_unlimited(items[index]) for index in waiting[:1])
    for place, index in enumerate(waiting):
        item = items[index]
        if _is_conditional(item):
            return (wave, [*later, *waiting[place:]]) if wave else ([index], [*later, *waiting[place + 1 :]])
        if isinstance(item, Message):
            scope: tuple[str, ...] = (item.run_id, item.signal_id)
        else:
            scope = (item.run_id, item.name, item.signal_id if item.signal_id is not None else f"\x00{index}")
        is_alone = isinstance(item, SignalRequest) and item.require_waiting
        is_other = isinstance(item, SignalRequest) and item.is_unlimited != are_unlimited
        if item.run_id in closed or scope in scopes or is_other or (is_alone and item.run_id in busy):
            later.append(index)
            closed.add(item.run_id)
            continue
        wave.append(index)
        scopes.add(scope)
        busy.add(item.run_id)
        if is_alone:
            closed.add(item.run_id)
    return wave, later


def _is_unlimited(item: SignalRequest | Message) -> bool:
    return isinstance(item, SignalRequest) and item.is_unlimited


def _is_conditional(item: SignalRequest | Message) -> bool:
    return isinstance(item, SignalRequest) and not (item.expected_version is None and item.accept_before is None)


async def _deliver(
    db: Db,
    items: Sequence[SignalRequest | Message],
    wave: Sequence[int],
    answers: dict[int, Answer],
    limits: Limits,
    now: Instant | None,
) -> list[int]:
    """Deliver a wave and answer it; return what must be delivered again after the rest."""
    signals: list[tuple[Any, ...]] = []
    messages: list[tuple[Any, ...]] = []
    outcomes: list[tuple[Any, ...]] = []
    entries: list[tuple[int, AuditEntry]] = []
    is_repeatable = True
    for index in wave:
        item = items[index]
        if isinstance(item, Message):
            messages.append((index, item.run_id, item.signal_id, item.due_at, encode_text(item)))
            outcomes.append((item.step_id, item.attempt, item.is_latest_only, item.opened_at))
        else:
            signals.append(_signal_row(index, item))
            is_repeatable = is_repeatable and item.signal_id is not None
            if item.audit is not None:
                entries.append((index, replace(item.audit, run_id=item.run_id)))
    retention = limits.acceptance_retention_ms * 1_000
    most = INTEGER_LIMIT if any(_is_unlimited(items[index]) for index in wave) else limits.signals_per_run_per_minute
    arguments: list[Any] = [now, retention, most, *literals(signals, SIGNAL_KINDS), *literals(messages, MESSAGE_KINDS)]
    statement, audited, first = DELIVER, DELIVER_AUDITED, items[wave[0]]
    if isinstance(first, SignalRequest) and _is_conditional(first):  # then it is alone
        statement, audited = DELIVER_IF, DELIVER_IF_AUDITED
        arguments += [first.expected_version, first.accept_before]
    elif any(attempt is not None for _, attempt, _, _ in outcomes):
        statement, audited = OUTCOMES, OUTCOMES_AUDITED
        arguments += columns(outcomes, 4)
    if entries:
        statement, arguments = audited, [*arguments, *audit.entry_columns(entries)]
    try:
        found = await db.fetch(statement, *arguments, is_repeatable=is_repeatable)
    except UNSTORABLE as problem:
        if isinstance(db, Transaction):  # the transaction has failed; its owner finds the item at fault
            raise
        if len(wave) > 1:
            return [again for index in wave for again in await _deliver(db, items, [index], answers, limits, now)]
        answers[wave[0]] = port.Refused(InvalidInput(f"it cannot be stored: {type(problem).__name__}"))
        return []
    again = []
    for heard, index, code, status, seq, at in found:
        if code == "N":
            again.append(index)
        else:
            answers[index] = _answer(items[index], code, status, seq, at, limits, heard)
    return again


def _signal_row(index: int, request: SignalRequest) -> tuple[Any, ...]:
    return (
        index,
        request.run_id,
        request.name,
        request.signal_id,
        request.step_id,
        sql.text_of(request.payload),
        request.payload_sha256,
        request.require_waiting,
        request.name.startswith(RESERVED_PREFIX),
        sql.by_of(request),
    )


def _answer(
    item: SignalRequest | Message, code: str, status: str, seq: int, at: Instant, limits: Limits, now: Instant
) -> Answer:
    if code == "F":
        return port.Refused(decisions.no_such_run(item.run_id))
    if code == "T":
        return port.Refused(decisions.run_terminal(item.run_id, RunStatus(status)))
    if isinstance(item, Message):
        if code == "L":
            return port.Refused(decisions.taken_again(item))
        if code == "O":
            return port.Refused(decisions.of_another_run(item))
        return port.Accepted() if code == "A" else port.Duplicate()
    if code in ("A", "D"):
        result = _result(item, seq, at)
        return port.Accepted(result) if code == "A" else port.Duplicate(result)
    return port.Refused(_refusal(item, code, seq, at, limits, now))


def _refusal(item: SignalRequest, code: str, seq: int, at: Instant, limits: Limits, now: Instant) -> CallerError:
    if code == "P":
        return decisions.payload_conflict(item)
    if code == "I":
        return decisions.indeterminate(item, now)
    if code == "L":
        return decisions.not_accepted_any_more(item)
    if code == "S":
        return decisions.step_is_taken(item)
    if code == "V":
        return decisions.version_moved(item, seq)
    if code == "W":
        return decisions.not_waiting(item)
    return decisions.rate_limited(item, limits, at + decisions.MINUTE, now)


def _result(request: SignalRequest, inbox_seq: int, accepted_at: Instant) -> AcceptedSignalResult:
    uuid = inbox_uuid(request.run_id, inbox_seq)
    return AcceptedSignalResult(
        workflow_id=request.run_id,
        signal_name=request.name,
        signal_id=uuid if request.signal_id is None else request.signal_id,
        accepted_at=accepted_at,
        signal_storage_key=signal_storage_key(request.run_id, request.name, signal_suffix(accepted_at, uuid)),
    )
