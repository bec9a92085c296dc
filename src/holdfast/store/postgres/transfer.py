"""Export and import of complete runs of a PostgreSQL database."""

from collections.abc import Awaitable, Callable, Sequence
from typing import Any

from holdfast.core.attributes import rows_of
from holdfast.core.audit import AuditEntry
from holdfast.core.codec import encode_body, encode_ref, encode_text
from holdfast.core.events import Event
from holdfast.core.instants import Instant
from holdfast.core.keys import inbox_uuid, signal_storage_key, signal_suffix
from holdfast.core.messages import AcceptanceRecord, AcceptedSignalResult
from holdfast.store import port, sql
from holdfast.store.postgres import audit, retention
from holdfast.store.postgres.pool import Pool, Transaction
from holdfast.store.transfer import (
    COLUMNS,
    ORDERS,
    RUN,
    WholeRun,
    assemble,
    run_row,
    signal_row,
    stream_rows,
    work_row,
)

_HEAD = f"""
SELECT {sql.HEAD}, request_key, input_sha256, last_accepted_at,
    EXISTS (SELECT 1 FROM holdfast.gate_runs g WHERE g.number = runs.gate_no)
FROM holdfast.runs WHERE run_id = $1
"""
_ACCEPTANCES = """
SELECT name, signal_id, inbox_seq, payload_sha256, accepted_at, expires_at, version
FROM holdfast.acceptance_records WHERE run_no = $1
"""
_INSERTS = {
    "events": f"run_no, {sql.EVENT}",
    "messages": "run_no, signal_id, due_at, message",
    "signals": f"run_no, {sql.SIGNAL}",
    "acceptance_records": "run_no, name, signal_id, inbox_seq, payload_sha256, accepted_at, expires_at, version",
    "waits": "run_no, step_id, name, token, since, until",
    "tasks": "task_id, run_no, step_id, status, assignee, roles, due_at, task",
    "activity_records": "run_no, activity_name, step_id, idempotency_key, is_completed, record",
    "jobs": "run_no, step_id, queue, activity, visible_at, taken_by, next_attempt, details, job",
    "dead_letters": ("letter_id, run_no, envelope, reason, detail, node, died_at, settled, settled_by, settled_at"),
    "run_attributes": "run_no, name, kind, number, word",
    "plan_uses": "run_no, tenant, sha256",
    **{table: f"run_no, {COLUMNS[table]}" for table in ("streams", "stream_writers", "stream_segments")},
}


class PostgresTransfer:
    """The `Transfer` of a PostgreSQL database."""

    def __init__(self, pool: Pool, now: Callable[[], Awaitable[Instant]]) -> None:
        self._pool = pool
        self._now = now

    async def settle(self) -> None:
        """Do nothing: what a turn sends to other runs is delivered with its commit."""

    async def read_runs(self, run_ids: Sequence[str]) -> list[WholeRun | None]:
        """Return complete runs."""

        async def work(transaction: Transaction) -> list[WholeRun | None]:
            await transaction.script("SET TRANSACTION ISOLATION LEVEL REPEATABLE READ")
            return [await _read(transaction, run_id) for run_id in run_ids]

        return await self._pool.transact(work)

    async def write_runs(self, runs: Sequence[WholeRun]) -> None:
        """Write runs unchanged."""
        now = await self._now()

        async def work(transaction: Transaction) -> None:
            for run in runs:
                await _delete(transaction, run.head.run_id)
                await _write(transaction, run.released(now), now)

        await self._pool.transact(work)

    async def write_audit(self, entries: Sequence[AuditEntry]) -> None:
        """Write entries of the audit log with their original times."""

        async def work(transaction: Transaction) -> None:
            found = await transaction.fetch("SELECT at, entry_id FROM holdfast.audit_log")
            known = {(row[0], row[1]) for row in found}
            await audit.append(transaction, [each for each in entries if (each.at, each.entry_id) not in known])

        await self._pool.transact(work)

    async def write_archived(self, runs: Sequence[port.ArchivedRun]) -> None:
        """Write archive locations of deleted runs."""
        await self._pool.transact(lambda transaction: retention.note_archived(transaction, runs))


async def _read(transaction: Transaction, run_id: str) -> WholeRun | None:
    found = await transaction.fetch(_HEAD, run_id)
    if not found:
        return None
    head = tuple(found[0])
    number = head[0]
    rows: dict[str, Sequence[Any]] = {}
    for table, wanted in COLUMNS.items():
        order = f"ORDER BY {ORDERS[table]}" if table in ORDERS else ""
        rows[table] = await transaction.fetch(
            f"SELECT {wanted} FROM holdfast.{table} WHERE run_no = $1 {order}", number
        )
    records = [_acceptance_of(run_id, row) for row in await transaction.fetch(_ACCEPTANCES, number)]
    return assemble(head[:23], head[23:], rows, records)


def _acceptance_of(run_id: str, row: Any) -> AcceptanceRecord:
    name, signal_id, inbox_seq, payload_sha256, accepted_at, expires_at, version = row
    key = signal_storage_key(run_id, name, signal_suffix(accepted_at, inbox_uuid(run_id, inbox_seq)))
    result = AcceptedSignalResult(
        workflow_id=run_id, signal_name=name, signal_id=signal_id, accepted_at=accepted_at, signal_storage_key=key
    )
    return AcceptanceRecord(
        workflow_id=run_id,
        signal_name=name,
        signal_id=signal_id,
        signal_storage_key=key,
        payload_sha256=payload_sha256.hex(),
        response=result,
        accepted_at=accepted_at,
        expires_at=expires_at,
        version=version,
    )


async def _delete(transaction: Transaction, run_id: str) -> None:
    for [number] in await transaction.fetch("SELECT run_no FROM holdfast.runs WHERE run_id = $1", run_id):
        for table in (*_INSERTS, "agenda", "runs"):
            await transaction.fetch(f"DELETE FROM holdfast.{table} WHERE run_no = $1", number)


async def _write(transaction: Transaction, run: WholeRun, now: Instant) -> None:
    [[number]] = await transaction.fetch("SELECT nextval('holdfast.run_numbers')")
    row = run_row(number, run)
    places = ", ".join(f"${place}" for place in range(1, len(row) + 1))
    await transaction.fetch(f"INSERT INTO holdfast.runs ({RUN}) VALUES ({places})", *row)
    for table, rows in _rows(number, run).items():
        wanted = _INSERTS[table]
        places = ", ".join(f"${place}" for place in range(1, wanted.count(",") + 2))
        for each in rows:
            await transaction.fetch(f"INSERT INTO holdfast.{table} ({wanted}) VALUES ({places})", *each)
    await transaction.fetch("SELECT holdfast.enter_1($1::bigint[], $2)", [number], now)


def _rows(number: int, run: WholeRun) -> dict[str, list[tuple[Any, ...]]]:
    """Return everything that belongs to a run, by table."""
    by_id = {(signal.name, signal.signal_id): signal.inbox_seq for signal in run.signals}
    sha256 = [] if run.plan_sha256 is None else [(number, run.head.tenant, bytes.fromhex(run.plan_sha256))]
    return {
        "events": [_event_row(number, event) for event in run.events],
        "messages": [(number, one.signal_id, due_at, encode_text(one)) for due_at, one in run.messages],
        "signals": [signal_row(number, signal) for signal in run.signals],
        "acceptance_records": [_acceptance_row(number, each, by_id) for each in run.acceptances],
        "waits": [(number, wait.step_id, wait.name, wait.token, wait.since, wait.until) for wait in run.waits],
        "tasks": [
            (
                *(one.task_id, number, one.step_id, one.status, one.assignee, list(one.roles), one.due_at),
                encode_text(one),
            )
            for one in run.tasks
        ],
        "activity_records": [
            (number, one.activity_name, one.step_id, one.idempotency_key, one.status == "completed", encode_text(one))
            for one in run.records
        ],
        "jobs": [(number, *work_row(step_id, work)) for step_id, work in run.work.items()],
        "dead_letters": [
            (
                *(one.letter_id, number, one.envelope, one.reason, one.detail.encode(), one.node, one.died_at),
                *(one.settled, one.settled_by.encode(), one.settled_at),
            )
            for one in run.letters
        ],
        "run_attributes": [
            (number, name, kind, *((None, value) if kind == "s" else (value, None)))
            for name, kind, value in rows_of(run.attributes)
        ],
        "plan_uses": sha256,
        **stream_rows(number, run),
    }


def _event_row(number: int, event: Event) -> tuple[Any, ...]:
    return (
        *(number, event.run_seq, event.event_id, event.event_type, event.step_id, event.engine_attempt_id),
        *(event.logical_attempt_id, encode_body(event.data), bytes.fromhex(event.idempotency_key), event.emitted_at),
        *(event.persisted_at, event.adapter_version, encode_ref(event.engine_run_ref), event.caused_by_signal_id),
        *(event.parent_event_id, event.schema_version),
    )


def _acceptance_row(number: int, record: AcceptanceRecord, by_id: dict[tuple[str, str], int]) -> tuple[Any, ...]:
    inbox_seq = by_id.get((record.signal_name, record.signal_id), 0)
    return (
        *(number, record.signal_name, record.signal_id, inbox_seq, bytes.fromhex(record.payload_sha256)),
        *(record.accepted_at, record.expires_at, record.version),
    )
