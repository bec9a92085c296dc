"""`admit`, and how new runs enter the admission queues of their plans. They leave with their commits, by a trigger.

**The rule** is `core/admission.py`. Functions of the database (`next_run_1`, `free_slot_1`, `enqueue_1`) repeat it in
SQL, so that deciding and writing are one statement. If the caller decided, each start of a limited workflow would hold
the lock of its queue for two more round trips and a turn of the caller's event loop. In measurements with single starts
by one process and by three, that halves the rate (105 runs/s become 56 on a busy machine with two cores; batches of
twenty lose between nothing and a fifth), and a node that stops in between would hold up every start of that workflow. A
test compares the functions with the rule.

**Queries.** Tables keep the counts and the first run of each line (the queued runs of one tenant and key). So finding
the next run is one index lookup, however many runs are queued.

**Locks.** Queues first, ordered by plan name, then runs. So a transaction that will create runs with admission requests
locks their queues before anything else (`lock`). When a new run is queued, it is not known in advance which run is
next: that run is locked only if no other transaction holds it, and is otherwise left to the next `admit`. A run that
finishes takes no lock of a queue.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from holdfast.core.admission import AdmissionRequest, RunLimit, overloaded, rank
from holdfast.core.instants import Instant
from holdfast.limits import MAILBOX_SIGNALS
from holdfast.store import decisions, port, validation
from holdfast.store.postgres.columns import askable, columns
from holdfast.store.postgres.leases import readable
from holdfast.store.postgres.pool import Pool, Transaction
from holdfast.store.postgres.queries import LOADED

REQUEST_COLUMNS = 7
ADMIT = f"""
SELECT a.o_now, a.o_code, a.o_again, a.o_free, {LOADED}
FROM holdfast.admit_1($1, $2, $3, $4, $5, $6, $7, $8) a
LEFT JOIN LATERAL holdfast.loaded_3(a.o_runs, a.o_now, {MAILBOX_SIGNALS}) l ON true
"""
ENQUEUE_AGAIN = "SELECT holdfast.enqueue_again_1($1, $2, $3, $4, $5, $6, $7, $8, $9, $10)"
PLANS = "SELECT DISTINCT plan_id FROM holdfast.runs WHERE run_id = ANY ($1)"
LOCK = "SELECT holdfast.lock_queues_1($1)"
LOCK_KNOWN = "SELECT 1 FROM holdfast.runs WHERE request_key = ANY ($1) ORDER BY run_id FOR UPDATE"


def waves(new_runs: Sequence[port.NewRun], fit: Sequence[int]) -> list[list[int]]:
    """Return groups to create one after the other: whether a run is admitted depends on the runs before it.

    No two in a group have the same run id or request, all or none have admission requests, and a run that may be
    rejected is in a group by itself.
    """
    groups: list[list[int]] = []
    kind: object = None
    taken: set[str] = set()
    for index in fit:
        new = new_runs[index]
        keys = {f"run {new.run_id}", f"request {new.request_key}"}
        may_be_refused = new.admission is not None and new.admission.limit.overload == "reject"
        own_kind = (new.admission is not None, index if may_be_refused else None)
        if own_kind != kind or taken & keys:
            groups.append([])
            kind, taken = own_kind, set()
        groups[-1].append(index)
        taken |= keys
    return groups


def places_of_requests(first: int) -> str:
    """Return the parameters that take the admission requests of new runs, from number `first` on."""
    return ", ".join(f"${number}" for number in range(first, first + REQUEST_COLUMNS))


def request_columns(new_runs: Sequence[port.NewRun]) -> list[Any]:
    """Return the admission requests of runs as columns."""
    rows = [
        (request.key, -rank(request.priority, 0), *_limit_row(request.limit), request.limit.overload)
        for new in new_runs
        if (request := new.admission) is not None
    ]
    return columns(rows, REQUEST_COLUMNS)


def _limit_row(limit: RunLimit) -> tuple[Any, ...]:
    return limit.at_once, limit.per_key, limit.starts, limit.period_ms * 1_000


def refused(new: port.NewRun, row: Any) -> port.Refused:
    """Return the answer for a run that was rejected."""
    return port.Refused(overloaded(new.plan_id, row[6], row[0]))


async def enqueue_again(transaction: Transaction, turn: port.Turn, request: AdmissionRequest, now: Instant) -> None:
    """Put an existing run into its queue, unless it is there already, and admit the next run."""
    held_back = [message.signal_id for message in turn.messages]
    place = request.key, -rank(request.priority, 0)
    await transaction.fetch(
        ENQUEUE_AGAIN, now, turn.run_id, turn.seen_inbox_seq, held_back, *place, *_limit_row(request.limit)
    )


async def lock(transaction: Transaction, new_runs: Sequence[port.NewRun], turns: Sequence[port.Turn] = ()) -> None:
    """Lock what new runs with admission requests will touch, at the beginning of their transaction.

    These are their queues, the existing runs to which a known request has signals, and the queues of the runs that
    turns enqueue.
    """
    requested = [new for new in new_runs if getattr(new, "admission", None) is not None]
    requested = [new for new in requested if validation.check_new_run(new) is None]
    plans = [new.plan_id for new in requested]
    queued = [turn.run_id for turn in turns if turn.admission is not None]
    if queued:
        plans += [row[0] for row in await transaction.fetch(PLANS, queued)]
    if plans:
        await transaction.fetch(LOCK, plans)
        known = [bytes.fromhex(new.request_key) for new in requested if new.signals]
        if known:
            await transaction.fetch(LOCK_KNOWN, known)


async def admit(
    pool: Pool, limits: Mapping[str, RunLimit], most: int, node: str | None, now: Instant | None
) -> tuple[list[port.Admitted], Instant | None]:
    """Admit up to `most` runs of these plans, ordered by plan name."""
    rows = [(plan_id, *_limit_row(limits[plan_id])) for plan_id in sorted(limits)]
    found = await pool.fetch(ADMIT, now, askable(node), most, *columns(rows, 5))
    heard, code, again, were_free = tuple(found[0])[:4]
    if code is not None:
        raise decisions.lease_expired(str(node))
    admitted = [
        await _admitted(pool, tuple(row)[4:], is_free, node, heard)
        for row, is_free in zip(found, were_free or (), strict=False)
    ]
    return admitted, again


async def _admitted(pool: Pool, row: tuple[Any, ...], is_free: bool, node: str | None, now: Instant) -> port.Admitted:
    if not is_free:
        return port.Admitted(row[1], "SKIPPED")
    if node is None:
        return port.Admitted(row[1], "STARTED")
    run = await readable(pool, row, node, now)
    return port.Admitted(row[1], "FAILED" if run is None else "STARTED", run)
