"""`create`: new runs, once per request, many at a time, in one round trip."""

from collections.abc import Sequence
from typing import Any

from msgspec.structs import replace

from holdfast.core.audit import run_entry
from holdfast.core.codec import encode_text
from holdfast.core.instants import Instant
from holdfast.core.messages import CONTROL_SIGNAL
from holdfast.core.plans import PLAN_PREFIX
from holdfast.core.restarts import below, restart_bounds, restart_number
from holdfast.core.state import RunStatus
from holdfast.errors import InvalidInput
from holdfast.limits import Limits
from holdfast.store import decisions, port, validation
from holdfast.store.postgres import admission, audit
from holdfast.store.postgres.columns import (
    EVENT_KINDS,
    MESSAGE_KINDS,
    More,
    askable,
    event_rows,
    is_too_much,
    literals,
    message_rows,
    places,
)
from holdfast.store.postgres.faults import UNSTORABLE
from holdfast.store.postgres.inbox import deliver
from holdfast.store.postgres.pool import Db, Pool, Transaction

Answer = port.Created | port.Existing | port.Refused

RUN_KINDS = (
    *["text"] * 7,
    *("bytea", "bytea", "text", "text", "text", "text"),
    *("bigint", "text", "bigint", "boolean"),
)
KINDS = (*RUN_KINDS, *EVENT_KINDS, *MESSAGE_KINDS)
GIVEN = f"$1, $2, {places(3, KINDS)}, ${len(KINDS) + 3}"
CREATE = f"SELECT o_now, o_ord, o_code, o_run_id, o_input FROM holdfast.create_1({GIVEN})"
CREATE_LIMITED = f"""
SELECT o_now, o_ord, o_code, o_run_id, o_input, o_epoch, o_free
FROM holdfast.create_limited_1({GIVEN}, {admission.places_of_requests(40)})
"""
CREATE_AUDITED = audit.with_audit(CREATE, 40, "C", is_known=False)
ADMISSION_AUDITED = audit.with_audit(CREATE_LIMITED, 47, "C", is_known=False)


LOCK_IDS = """
SELECT
    $2::text IS NULL OR EXISTS (
        SELECT 1 FROM holdfast.nodes n CROSS JOIN holdfast.time_1($1) AS t (now)
        WHERE n.node = $2 AND holdfast.lease_end_1(n.lease_until, t.now) > t.now
    ),
    ARRAY(SELECT pg_advisory_xact_lock(hashtextextended('holdfast id ' || id, 0))::text FROM unnest($3::text[]) AS id)
"""
LAST_WITHIN = "SELECT run_id FROM holdfast.runs WHERE run_id > $1 AND run_id < $2 ORDER BY run_id DESC LIMIT 1"
TAKEN = """
SELECT run_id, tenant, project, environment, plan_id, status, created_at, queued_at IS NOT NULL
FROM holdfast.runs WHERE run_id = $1 FOR NO KEY UPDATE
"""
COMMANDS = """
SELECT s.payload FROM holdfast.runs r JOIN holdfast.signals s USING (run_no)
WHERE r.run_id = $1 AND s.name = $2 AND s.consumed_seq IS NULL
"""


async def create_on(
    pool: Pool, new_runs: Sequence[port.NewRun], owner: str | None, limits: Limits, now: Instant | None
) -> list[Answer]:
    """Create runs; those that come with signals in one transaction with the delivery of the signals."""

    async def work(transaction: Transaction) -> list[Answer]:
        await admission.lock(transaction, new_runs)
        return await create(transaction, new_runs, owner, limits, now)

    if any(getattr(new, "signals", ()) or getattr(new, "reuse", None) for new in new_runs):
        return await pool.transact(work)
    return await create(pool, new_runs, owner, limits, now)


async def create(
    db: Db, new_runs: Sequence[port.NewRun], owner: str | None, limits: Limits, now: Instant | None
) -> list[Answer]:
    """Create runs, owned by `owner` if there is one."""
    if any(getattr(new, "reuse", None) for new in new_runs):
        return await _create_reusing(db, new_runs, owner, limits, now)
    answers: dict[int, Answer] = {}
    fit: list[int] = []
    for index, new in enumerate(new_runs):
        problem = validation.check_new_run(new)
        if problem is None:
            fit.append(index)
        else:
            answers[index] = port.Refused(problem)
    # An empty call is made too: it checks the owner's lease.
    for wave in _waves(new_runs, fit) or [[]]:
        await _create(db, new_runs, wave, answers, owner, limits, now)
    ordered = [answers[index] for index in range(len(new_runs))]
    if any(getattr(new, "signals", ()) for new in new_runs):
        return [await _with_signals(db, new, one, limits, now) for new, one in zip(new_runs, ordered, strict=True)]
    return ordered


async def _create_reusing(
    db: Db, new_runs: Sequence[port.NewRun], owner: str | None, limits: Limits, now: Instant | None
) -> list[Answer]:
    """Create runs, some of whose ids may be taken, in a transaction: one after the other, under their locks."""
    unfit = [validation.check_new_run(new) for new in new_runs]
    ids = {new.reuse.run_id for new, problem in zip(new_runs, unfit, strict=True) if problem is None and new.reuse}
    [[has_lease, _]] = await db.fetch(LOCK_IDS, now, askable(owner), sorted(ids))
    if not has_lease:  # checked again when runs are created
        raise decisions.lease_expired(str(owner))
    answers: list[Answer] = []
    for new, problem in zip(new_runs, unfit, strict=True):
        answer: Answer | None = None if problem is None else port.Refused(problem)
        if answer is None and new.reuse is not None:
            answer = await _known_request(db, new)
            answer = await (
                _reuse(db, new, limits, now) if answer is None else _with_signals(db, new, answer, limits, now)
            )
        if answer is None:
            signals = () if decisions.is_debounced(new) else new.signals
            [answer] = await create(db, [replace(new, reuse=None, signals=signals)], owner, limits, now)
            if isinstance(answer, port.Created) and new.reuse is not None and new.reuse.stop is not None:
                await deliver(db, [new.reuse.stop], limits, now)
        answers.append(answer)
    return answers


async def _reuse(db: Db, new: port.NewRun, limits: Limits, now: Instant | None) -> Answer | None:
    """Return the verdict on an id that may be taken; None if the run is to be created."""
    assert new.reuse is not None
    latest = await _latest(db, new.reuse.run_id)
    if latest is not None and decisions.is_debounced(new):
        commands = await db.fetch(COMMANDS, latest.run_id, CONTROL_SIGNAL)
        latest = latest._replace(is_decided=any(decisions.decides(payload) for (payload,) in commands))
    verdict = decisions.reuse_of(new, latest)
    if verdict is None and latest is not None:
        delivered = await deliver(db, decisions.signals_to(new, latest), limits, now)
        return decisions.accepted_before(new, latest, delivered)
    return verdict


async def _latest(db: Db, run_id: str) -> decisions.Taken | None:
    """Return the latest run of an id, locked: it does not finish before the verdict on it is committed."""
    low, bound = restart_bounds(run_id)
    found = await db.fetch(LAST_WITHIN, low, bound)
    while found and restart_number(run_id, found[0][0]) is None:
        found = await db.fetch(LAST_WITHIN, low, below(run_id, found[0][0]))
    rows = await db.fetch(TAKEN, found[0][0] if found else run_id)
    if not rows and found:  # deleted meanwhile
        return await _latest(db, run_id)
    if not rows:
        return None
    [row] = rows
    return decisions.Taken(row[0], tuple(row[1:5]), RunStatus(row[5]), row[6], row[7])


def _waves(new_runs: Sequence[port.NewRun], fit: Sequence[int]) -> list[list[int]]:
    """Return groups in which no two runs share an id or request: of two that do, the earlier is in an earlier group."""
    if any(new_runs[index].admission is not None for index in fit):
        return admission.waves(new_runs, fit)
    groups: list[list[int]] = []
    taken: list[set[str]] = []
    for index in fit:
        keys = {f"run {new_runs[index].run_id}", f"request {new_runs[index].request_key}"}
        number = max((place + 1 for place, names in enumerate(taken) if names & keys), default=0)
        if number == len(groups):
            groups.append([])
            taken.append(set())
        groups[number].append(index)
        taken[number] |= keys
    return groups


async def _create(
    db: Db,
    new_runs: Sequence[port.NewRun],
    wave: Sequence[int],
    answers: dict[int, Answer],
    owner: str | None,
    limits: Limits,
    now: Instant | None,
) -> None:
    """Create runs of which no two have the same id or request."""
    runs = [new_runs[index] for index in wave]
    if is_too_much(new.events for new in runs):
        for half in (wave[: len(wave) // 2], wave[len(wave) // 2 :]):
            await _create(db, new_runs, half, answers, owner, limits, now)
        return
    unfit = [validation.check_first_signals(new, limits) if new.signals else None for new in runs]
    asked = [(index, new) for index, new, problem in zip(wave, runs, unfit, strict=True) if problem is None]
    was_lost: list[None] = []
    try:
        found = await _fetch(db, now, owner, [new for _, new in asked], was_lost)
    except UNSTORABLE:
        if len(wave) == 1:
            answers[wave[0]] = port.Refused(InvalidInput("what the run begins with cannot be stored"))
            return
        for index in wave:
            await _create(db, new_runs, [index], answers, owner, limits, now)
        return
    if found and found[0][2] == "X":
        raise decisions.lease_expired(str(owner))
    for row in found:
        index, new = asked[row[1] - 1]
        answers[index] = _answer(new, row, owner, was_lost=bool(was_lost))
    for index, new, problem in zip(wave, runs, unfit, strict=True):
        if problem is not None:  # for a repeated request, the signals are delivered like any others
            answers[index] = await _known(db, new) or port.Refused(problem)


async def _fetch(
    db: Db, now: Instant | None, owner: str | None, new_runs: Sequence[port.NewRun], was_lost: list[None]
) -> list[Any]:
    entries = [
        (number, run_entry(new.audit, new.run_id, (new.tenant, new.project, new.environment), 0))
        for number, new in enumerate(new_runs, 1)
        if new.audit is not None
    ]
    sql, arguments = CREATE_AUDITED if entries else CREATE, _arguments(now, owner, new_runs)
    if new_runs and new_runs[0].admission is not None:
        sql = ADMISSION_AUDITED if entries else CREATE_LIMITED
        arguments = [*arguments, *admission.request_columns(new_runs)]
    if entries:
        arguments = [*arguments, *audit.entry_columns(entries)]
    if isinstance(db, Transaction):  # a run that cannot be stored must not end the whole transaction
        async with db.savepoint():
            return await db.fetch(sql, *arguments)
    return await db.fetch(sql, *arguments, if_lost=lambda: was_lost.append(None))


def _answer(new: port.NewRun, row: Any, owner: str | None, *, was_lost: bool) -> Answer:
    code, run_id, digest = row[2], row[3], row[4]
    # If the answer to an earlier try was lost, that try created the run with this id.
    if code == "C" or (code == "K" and was_lost and run_id == new.run_id and digest.hex() == new.input_sha256):
        return port.Created(new.run_id, row[5] if new.admission is not None else 1 if owner else 0)
    if code == "O":
        return admission.refused(new, row)
    if code == "K":
        is_same = digest.hex() == new.input_sha256
        return port.Existing(run_id) if is_same else port.Refused(decisions.request_conflict(run_id))
    return port.Refused(decisions.run_id_taken(new.run_id))


async def _known_request(db: Db, new: port.NewRun) -> Answer | None:
    """Answer a request that was made before."""
    known = "SELECT run_id, input_sha256 FROM holdfast.runs WHERE request_key = $1"
    found = await db.fetch(known, bytes.fromhex(new.request_key))
    return _answer(new, (0, 0, "K", *found[0]), None, was_lost=False) if found else None


async def _known(db: Db, new: port.NewRun) -> Answer | None:
    """Answer a run that could not be stored: its request or its id may still be known."""
    found = await db.fetch(
        "SELECT request_key, run_id, input_sha256 FROM holdfast.runs WHERE request_key = $1 OR run_id = $2",
        bytes.fromhex(new.request_key),
        new.run_id,
    )
    for key, run_id, digest in found:
        if key.hex() == new.request_key:
            return _answer(new, (0, 0, "K", run_id, digest), None, was_lost=False)
    return port.Refused(decisions.run_id_taken(new.run_id)) if found else None


async def _with_signals(db: Db, new: port.NewRun, answer: Answer, limits: Limits, now: Instant | None) -> Answer:
    """Put the signals that came with a request into the mailbox of its run, in the same transaction."""
    if isinstance(answer, port.Refused) or not new.signals:
        return answer
    version = new.plan_version
    if isinstance(answer, port.Existing):
        found = await db.fetch("SELECT plan_version FROM holdfast.runs WHERE run_id = $1", answer.run_id)
        version = found[0][0] if found else ""
    delivered = await deliver(db, decisions.first_signals(new, answer.run_id, version), limits, now)
    return replace(answer, signals=tuple(delivered))


def _arguments(now: Instant | None, owner: str | None, new_runs: Sequence[port.NewRun]) -> list[Any]:
    runs: list[tuple[Any, ...]] = []
    events: list[tuple[Any, ...]] = []
    messages: list[tuple[Any, ...]] = []
    more = More()
    for number, new in enumerate(new_runs, 1):
        runs.append(_run_row(new))
        events += event_rows(number, 0, new.events)
        messages += message_rows(number, new.messages)
        if new.plan_id.startswith(PLAN_PREFIX):
            more.add("plans", number, [{"tenant": new.tenant, "sha256": new.plan_sha256}])
        if new.snapshot.attributes:
            more.add_attributes(number, new.snapshot.attributes)
        if new.waits_opened or new.tasks or new.records:  # rare: a new run has done nothing yet
            more.add_waits(number, new.waits_opened)
            more.add_tasks(number, new.tasks)
            more.add_records(number, new.records)
    return [
        now,
        askable(owner),
        *literals(runs, RUN_KINDS),
        *literals(events, EVENT_KINDS),
        *literals(messages, MESSAGE_KINDS),
        more.text(),
    ]


def _run_row(new: port.NewRun) -> tuple[Any, ...]:
    dues = [message.due_at for message in new.messages]
    return (
        new.run_id,
        new.tenant,
        new.project,
        new.environment,
        new.plan_id,
        new.plan_version,
        new.run_request_id,
        new.request_key,
        new.input_sha256,
        new.parent_run_id,
        new.reference_key,
        encode_text(new.tags),
        str(new.snapshot.status),
        len(new.events),
        encode_text(new.snapshot),
        min((due for due in dues if due is not None), default=None),
        None in dues,
    )
