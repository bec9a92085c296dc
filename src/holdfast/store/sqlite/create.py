"""`create`: new runs, once per request."""

import sqlite3
from collections.abc import Sequence
from typing import Any

from msgspec.structs import replace

from holdfast.core.admission import NEVER, AdmissionRequest
from holdfast.core.audit import audit_row, run_entry
from holdfast.core.codec import encode_text
from holdfast.core.instants import Instant
from holdfast.core.messages import CONTROL_SIGNAL
from holdfast.core.plans import PLAN_PREFIX
from holdfast.core.restarts import below, restart_bounds, restart_number
from holdfast.core.state import RunStatus
from holdfast.limits import Limits
from holdfast.store import decisions, port, validation
from holdfast.store.sqlite import admission, audit, queries
from holdfast.store.sqlite.inbox import deliver

_INSERT_RUN = """
INSERT INTO runs (run_no, run_id, tenant, project, environment, plan_id, plan_version, run_request_id, request_key,
    input_sha256, parent_run_id, reference_key, tags, status, version, snapshot, created_at, updated_at, ready_at,
    lease_owner, lease_epoch)
VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)
"""

_TAKEN = "SELECT run_id, tenant, project, environment, plan_id, status, created_at, queued_at IS NOT NULL FROM runs"
_LAST_WITHIN = f"{_TAKEN} WHERE run_id > ? AND run_id < ? ORDER BY run_id DESC LIMIT 1"
_COMMANDS = """
SELECT signals.payload FROM runs JOIN signals USING (run_no)
WHERE runs.run_id = ? AND signals.name = ? AND signals.consumed_seq IS NULL
"""

LEVELS_SINCE = 11
"""The format whose builds skip runs that need a level unknown to them. Earlier builds claim such runs."""

_OLDER_NODES = f"""
SELECT node FROM nodes JOIN node_plans USING (node)
WHERE {queries.IS_CURRENT}
    AND NOT EXISTS (SELECT 1 FROM json_each(plans) WHERE substr(value, 1, 7) = char(10) || 'level' || char(10))
ORDER BY node LIMIT 10
"""

Answer = port.Created | port.Existing | port.Refused


def create(
    db: sqlite3.Connection,
    new_runs: Sequence[port.NewRun],
    owner: str | None,
    limits: Limits,
    now: Instant,
) -> list[Answer]:
    """Create runs, owned by `owner` if there is one."""
    problems = [validation.check_new_run(new) for new in new_runs]
    requests, run_ids = _known(db, [new for new, problem in zip(new_runs, problems, strict=True) if problem is None])
    (run_no,) = db.execute("SELECT coalesce(max(run_no), 0) FROM runs").fetchone()
    answers: list[Answer] = []
    created: list[tuple[int, port.NewRun]] = []
    sent = 0
    for new, problem in zip(new_runs, problems, strict=True):
        answer: Answer | None = port.Refused(problem) if problem else _existing(new, requests)
        if answer is None and new.reuse is not None:
            _insert(db, created, owner, now)  # earlier runs count, with their signals
            created = []
            _send_signals(db, new_runs, answers, sent, limits, now)
            sent = len(answers)
            answer = _reuse(db, new, limits, now)
        if answer is None and new.run_id in run_ids:
            answer = port.Refused(decisions.run_id_taken(new.run_id))
        unfit = validation.check_first_signals(new, limits) if answer is None and new.signals else None
        if unfit is not None:
            answer = port.Refused(unfit)
        if answer is None and new.snapshot.needs:
            answer = _keep_older_builds_away(db, new.snapshot.needs, now)
        if answer is None and new.admission is not None:
            answer = _create_queued(db, run_no + 1, new, new.admission, owner, now)
        elif answer is None:
            created.append((run_no + 1, new))
            answer = port.Created(new.run_id, 1 if owner else 0)
        if isinstance(answer, port.Created):
            run_no += 1
            requests[new.request_key] = (new.run_id, new.input_sha256)
            run_ids.add(new.run_id)
            if new.reuse is not None and new.reuse.stop is not None:
                deliver(db, [new.reuse.stop], limits, now)
        answers.append(answer)
    _insert(db, created, owner, now)
    entries = [
        run_entry(new.audit, new.run_id, (new.tenant, new.project, new.environment), now)
        for new, answer in zip(new_runs, answers, strict=True)
        if isinstance(answer, port.Created) and new.audit is not None
    ]
    if entries:
        db.executemany(audit.INSERT, [audit_row(entry) for entry in entries])
    _send_signals(db, new_runs, answers, sent, limits, now)
    return answers


def _keep_older_builds_away(db: sqlite3.Connection, level: int, now: Instant) -> port.Refused | None:
    """Refuse a run that needs a level while a node of an earlier build is alive; otherwise refuse such builds from now.

    They would claim the run: only the statements of this build skip it.
    """
    older = [node for (node,) in db.execute(_OLDER_NODES, {"now": now})]
    if older:
        return port.Refused(decisions.older_nodes(older, level))
    newest = "SELECT max(version) FROM holdfast_schema"
    db.execute(
        f"UPDATE holdfast_schema SET oldest_reader = max(oldest_reader, ?) WHERE version = ({newest})", (LEVELS_SINCE,)
    )
    return None


def _create_queued(
    db: sqlite3.Connection, run_no: int, new: port.NewRun, request: AdmissionRequest, owner: str | None, now: Instant
) -> Answer:
    """Create a run separately: whether it may start depends on the runs before it."""
    refusal = admission.check(db, new, request, now)
    if refusal is not None:
        return port.Refused(refusal)
    _insert(db, [(run_no, new)], None, now)
    db.execute("UPDATE messages SET due_at = ? WHERE run_no = ?", (NEVER, run_no))
    db.execute("UPDATE runs SET ready_at = NULL WHERE run_no = ?", (run_no,))
    is_owned = admission.enqueue(db, run_no, new, request, owner, now) and owner is not None
    return port.Created(new.run_id, 1 if is_owned else 0)


def _send_signals(
    db: sqlite3.Connection,
    new_runs: Sequence[port.NewRun],
    answers: list[Answer],
    first: int,
    limits: Limits,
    now: Instant,
) -> None:
    """Deliver the signals of the requests from position `first` on, and put their answers into `answers`."""
    if any(getattr(new, "signals", ()) for new in new_runs[first : len(answers)]):
        for place in range(first, len(answers)):
            answers[place] = _with_signals(db, new_runs[place], answers[place], limits, now)


def _with_signals(db: sqlite3.Connection, new: port.NewRun, answer: Answer, limits: Limits, now: Instant) -> Answer:
    """Put the signals that came with a request into the mailbox of its run, in the same transaction."""
    if isinstance(answer, port.Refused) or not new.signals or getattr(answer, "is_reused", False):
        return answer
    version = new.plan_version
    if isinstance(answer, port.Existing):
        (version,) = db.execute("SELECT plan_version FROM runs WHERE run_id = ?", (answer.run_id,)).fetchone()
    delivered = deliver(db, decisions.first_signals(new, answer.run_id, version), limits, now)
    return replace(answer, signals=tuple(delivered))


def _known(db: sqlite3.Connection, new_runs: Sequence[port.NewRun]) -> tuple[dict[str, tuple[str, str]], set[str]]:
    keys = [bytearray.fromhex(new.request_key) for new in new_runs]
    marks = ", ".join("?" * len(keys))
    known = db.execute(f"SELECT request_key, run_id, input_sha256 FROM runs WHERE request_key IN ({marks})", keys)
    requests = {key.hex(): (run_id, digest.hex()) for key, run_id, digest in known}
    ids = queries.listing(new.run_id for new in new_runs)
    taken = db.execute("SELECT run_id FROM runs WHERE run_id IN (SELECT value FROM json_each(?))", (ids,))
    return requests, {run_id for (run_id,) in taken}


def _existing(new: port.NewRun, requests: dict[str, tuple[str, str]]) -> port.Existing | port.Refused | None:
    known = requests.get(new.request_key)
    if known is None:
        return None
    run_id, input_sha256 = known
    is_same = input_sha256 == new.input_sha256
    return port.Existing(run_id) if is_same else port.Refused(decisions.request_conflict(run_id))


def _reuse(db: sqlite3.Connection, new: port.NewRun, limits: Limits, now: Instant) -> Answer | None:
    """Return the verdict on an id that may be taken; None if the run is to be created."""
    assert new.reuse is not None
    latest = _latest(db, new.reuse.run_id)
    if latest is not None and decisions.is_debounced(new):
        commands = db.execute(_COMMANDS, (latest.run_id, CONTROL_SIGNAL))
        latest = latest._replace(is_decided=any(decisions.decides(payload) for (payload,) in commands))
    verdict = decisions.reuse_of(new, latest)
    if verdict is None and latest is not None:
        delivered = deliver(db, decisions.signals_to(new, latest), limits, now)
        return decisions.accepted_before(new, latest, delivered)
    return verdict


def _latest(db: sqlite3.Connection, run_id: str) -> decisions.Taken | None:
    """Return the latest run of an id."""
    low, bound = restart_bounds(run_id)
    found = db.execute(_LAST_WITHIN, (low, bound)).fetchone()
    while found is not None and restart_number(run_id, found[0]) is None:
        found = db.execute(_LAST_WITHIN, (low, below(run_id, found[0]))).fetchone()
    if found is None:
        found = db.execute(_TAKEN + " WHERE run_id = ?", (run_id,)).fetchone()
    if found is None:
        return None
    return decisions.Taken(found[0], tuple(found[1:5]), RunStatus(found[5]), found[6], bool(found[7]))


def _insert(db: sqlite3.Connection, created: list[tuple[int, port.NewRun]], owner: str | None, now: Instant) -> None:
    db.executemany(_INSERT_RUN, [_run_row(run_no, new, owner, now) for run_no, new in created])
    queries.insert_events(
        db, [row for run_no, new in created for row in queries.event_rows(run_no, new.events, 0, now)]
    )
    db.executemany(
        queries.INSERT_MESSAGE,
        [queries.message_row(run_no, message, now) for run_no, new in created for message in new.messages],
    )
    waits = [queries.wait_row(run_no, wait) for run_no, new in created for wait in new.waits_opened]
    tasks = [queries.task_row(run_no, task) for run_no, new in created for task in new.tasks]
    records = [queries.record_row(run_no, record) for run_no, new in created for record in new.records]
    for run_no, new in created:
        if new.snapshot.attributes:
            db.executemany(queries.INSERT_ATTRIBUTE, queries.attribute_rows(run_no, new.snapshot.attributes))
        if new.plan_id.startswith(PLAN_PREFIX):
            use = (run_no, new.tenant, bytes.fromhex(new.plan_sha256 or ""))
            db.execute("INSERT OR REPLACE INTO plan_uses VALUES (?, ?, ?)", use)
    if waits or tasks or records:  # rare: a new run has done nothing yet
        db.executemany(queries.INSERT_WAIT, waits)
        db.executemany(queries.INSERT_TASK, tasks)
        db.executemany(queries.INSERT_RECORD, records)


def _run_row(run_no: int, new: port.NewRun, owner: str | None, now: Instant) -> tuple[Any, ...]:
    due: dict[str, Instant] = {}
    for message in new.messages:  # of two with the same id, the first is kept
        due.setdefault(message.signal_id, now if message.due_at is None else message.due_at)
    return (
        run_no,
        new.run_id,
        new.tenant,
        new.project,
        new.environment,
        new.plan_id,
        new.plan_version,
        new.run_request_id,
        bytearray.fromhex(new.request_key),  # `sqlite3` binds it directly, unlike bytes
        bytearray.fromhex(new.input_sha256),
        queries.NULL_VALUE if new.parent_run_id is None else new.parent_run_id,
        queries.NULL_VALUE if new.reference_key is None else new.reference_key,
        encode_text(new.tags),
        str(new.snapshot.status),
        len(new.events),
        encode_text(new.snapshot),
        now,
        now,
        min(due.values(), default=queries.NULL_VALUE),
        owner,
        1 if owner else 0,
    )
