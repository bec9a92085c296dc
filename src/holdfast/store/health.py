"""The health of a store: findings in plain sentences, and the facts on which most of them are based.

A store's `health` returns what only the store knows: its own findings (files, settings, other transactions), and facts
about all of its runs that no other verb returns. `engine/observe/doctor.py` evaluates the facts in the same way for
every store. The queries that the SQL stores share are here.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Literal

from msgspec import Struct

from holdfast.core.instants import Instant
from holdfast.core.state import PAUSED, TERMINAL, RunStatus
from holdfast.errors import StoreCorrupt
from holdfast.store import sql

SECOND = 1_000_000
MEGABYTE = 1024 * 1024

Level = Literal["fine", "note", "wrong"]
"""The severity: nothing to do; something to know; something to do."""


class Finding(Struct, frozen=True, kw_only=True):
    """One thing that was examined. `advice` says what to do about it, and `run_ids` name some of the affected runs."""

    level: Level
    subject: str
    sentence: str
    advice: str = ""
    run_ids: tuple[str, ...] = ()
    search: str = ""
    """The search text for the web page that finds all of the affected runs."""


class Bounds(Struct, frozen=True, kw_only=True):
    """The thresholds above which something is reported."""

    late_s: float = 60.0
    """Nodes poll every 5 seconds, and a lease lasts 10: if work waits longer, no node is processing it."""

    skew_s: float = 1.0
    """All instants are the store's, so a skew only matters when histories are compared with logs."""

    mailbox_s: float = 24 * 3_600.0
    """A signal may arrive before its wait; after a day its name may be wrong."""

    sample_runs: int = 200
    """How many runs are read in full, to check the invariants."""

    sample_events: int = 20_000
    """A longer history is left out of the sample: all of it would be in memory."""

    listed: int = 20
    """How many of each kind are listed."""

    suspects: int = 100
    """How many runs that seem to wait for nothing are examined in detail."""

    disk_share: float = 0.05
    disk_bytes: int = 1024 * MEGABYTE
    """Free space below both of these limits is reported."""

    log_bytes: int = 64 * MEGABYTE
    """SQLite checkpoints its log at 4 MB, unless a reader keeps an old snapshot."""

    free_share: float = 0.5
    free_bytes: int = 64 * MEGABYTE
    """How much of a SQLite file may be unused: retention frees space, and new runs use it."""

    transaction_s: float = 600.0
    """While a transaction is open, no dead row of any table is removed. Holdfast's own take less than seconds."""

    dead_rows: int = 100_000
    """Fewer dead rows cost nothing noticeable, whatever their share."""

    vacuum_times: float = 5.0
    """How many times its threshold a table may exceed before autovacuum counts as falling behind."""

    bloat_bytes: int = 256 * MEGABYTE
    bloat_times: float = 4.0
    """How much larger than its rows a table may be. The estimate is rough, and free space is reused."""

    replay_s: float = 60.0
    """How far behind a replica may be before a failover would take long, or lose what it has not received."""

    kept_log_bytes: int = 10 * 1024 * MEGABYTE
    """How much of its log a server may keep for a disconnected replica."""

    connections_share: float = 0.9
    transaction_age: int = 1_000_000_000
    """PostgreSQL stops accepting writes when its oldest row is 2 billion transactions old."""


class Gone(Struct, frozen=True):
    """A node whose lease has expired but that still owns runs. Without `lease_until` the node is unknown."""

    node: str
    runs: int
    lease_until: Instant | None


class Unclaimed(Struct, frozen=True):
    """Runs of one version of a workflow that have been ready since this instant without being claimed by a node."""

    plan_id: str
    plan_version: str
    runs: int
    since: Instant


class Untaken(Struct, frozen=True):
    """Jobs of one activity that have been visible since this instant without being acquired by a node."""

    queue: str
    activity: str
    jobs: int
    since: Instant


class Facts(Struct, frozen=True, kw_only=True):
    """What a store knows about all its runs. The bounds define what is late, and how many of each kind are listed.

    `retried` are runs with a message that could not be handled and is retried, and the number of attempts. `suspects`
    are unfinished runs, with their versions, that have no owner and no due time, are not paused or queued, and have no
    wait, open task, queued job or unfinished child. `sample` is spread over all runs.
    """

    software: str
    schema_version: int
    latest_version: int
    findings: tuple[Finding, ...] = ()
    gone: tuple[Gone, ...] = ()
    unclaimed: tuple[Unclaimed, ...] = ()
    untaken: tuple[Untaken, ...] = ()
    retried: tuple[tuple[str, int], ...] = ()
    oldest_signal: tuple[str, Instant] | None = None
    suspects: tuple[tuple[str, int], ...] = ()
    sample: tuple[str, ...] = ()


# --- findings -----------------------------------------------------------------------------------------------------


def fine(subject: str, sentence: str) -> Finding:
    """Return a finding that something is as it should be."""
    return Finding(level="fine", subject=subject, sentence=sentence)


def note(subject: str, sentence: str, advice: str, run_ids: Iterable[str] = (), search: str = "") -> Finding:
    """Return a finding that something is worth knowing."""
    return Finding(
        level="note", subject=subject, sentence=sentence, advice=advice, run_ids=tuple(run_ids), search=search
    )


def wrong(subject: str, sentence: str, advice: str, run_ids: Iterable[str] = (), search: str = "") -> Finding:
    """Return a finding that something is wrong."""
    return Finding(
        level="wrong", subject=subject, sentence=sentence, advice=advice, run_ids=tuple(run_ids), search=search
    )


def time_words(microseconds: float) -> str:
    """Return a duration, roughly, in words."""
    seconds = microseconds / SECOND
    for size, unit in ((86_400, "days"), (3_600, "hours"), (60, "minutes")):
        if seconds >= 2 * size:
            return f"{seconds / size:.0f} {unit}"
    return f"{seconds:.0f} seconds" if seconds >= 2 else f"{seconds:.1f} seconds"


def size_words(size_bytes: float) -> str:
    """Return a size, roughly, in words."""
    for size, unit in ((1024 * MEGABYTE, "GB"), (MEGABYTE, "MB"), (1024, "KB")):
        if size_bytes >= size:
            return f"{size_bytes / size:.1f} {unit}"
    return f"{size_bytes:.0f} bytes"


# --- queries of the SQL stores ------------------------------------------------------------------------------------

_UNFINISHED = "status NOT IN ({})".format(", ".join(f"'{status}'" for status in sorted(TERMINAL)))
OPEN = "(status IN ({}) AND status <> 'COMPLETED')".format(
    ", ".join(f"'{status}'" for status in sorted(set(RunStatus) - TERMINAL))
)
"""The same condition in a form for which both databases use an index (`runs_by_status`), however many have finished."""

QUESTIONS = {
    "gone": """
        SELECT o.owner, o.runs, n.lease_until
        FROM (SELECT lease_owner AS owner, count(*) AS runs FROM {in}runs WHERE lease_owner IS NOT NULL GROUP BY 1) o
        LEFT JOIN {in}nodes n ON n.node = o.owner
        WHERE n.lease_until IS NULL OR n.lease_until <= {late} ORDER BY n.lease_until LIMIT {listed}""",
    "unclaimed": """
        SELECT plan_id, plan_version || CASE WHEN instr(snapshot, '"needs":')
            THEN coalesce(char(10) || (snapshot ->> '$.needs'), '') ELSE '' END, count(*), min(ready_at) FROM {in}runs
        WHERE lease_owner IS NULL AND ready_at <= {late} GROUP BY 1, 2 ORDER BY 4 LIMIT {listed}""",
    "untaken": """
        SELECT queue, activity, count(*), min(visible_at) FROM {in}jobs
        WHERE visible_at <= {late} AND queue <> '' GROUP BY 1, 2 ORDER BY 4 LIMIT {listed}""",
    "retried": """
        SELECT run_id, message FROM {in}messages JOIN {in}runs USING (run_no)
        WHERE message LIKE '%"attempts":%' LIMIT {listed}""",
    "signals": f"""
        SELECT run_id, accepted_at FROM {{in}}signals JOIN {{in}}runs USING (run_no)
        WHERE consumed_seq IS NULL AND {_UNFINISHED} ORDER BY accepted_at LIMIT 1""",
    "suspects": f"""
        SELECT run_id, version FROM {{in}}runs
        WHERE {OPEN} AND status <> '{PAUSED}' AND lease_owner IS NULL AND ready_at IS NULL
            AND queued_at IS NULL
            AND NOT EXISTS (SELECT 1 FROM {{in}}waits x WHERE x.run_no = runs.run_no)
            AND NOT EXISTS (SELECT 1 FROM {{in}}tasks x WHERE x.run_no = runs.run_no AND x.status = 'OPEN')
            AND NOT EXISTS (SELECT 1 FROM {{in}}jobs x WHERE x.run_no = runs.run_no AND x.queue <> '')
            AND NOT EXISTS (SELECT 1 FROM {{in}}runs x WHERE x.parent_run_id = runs.run_id AND x.{_UNFINISHED})
        ORDER BY run_no LIMIT {{suspects}}""",
    "ends": "SELECT (SELECT min(run_no) FROM {in}runs), (SELECT max(run_no) FROM {in}runs)",
}
"""The queries by name. `{in}` stands for the schema; all values are whole numbers that we provide."""

_SPREAD = "SELECT (SELECT run_id FROM {}runs WHERE run_no >= p.column1 ORDER BY run_no LIMIT 1) FROM (VALUES {}) AS p"

Answers = Mapping[str, Sequence[Any]]


def questions(schema: str, now: Instant, bounds: Bounds, own: Mapping[str, str] | None = None) -> dict[str, str]:
    """Return the queries by name. `own` are a store's versions of some of them."""
    late = now - int(bounds.late_s * SECOND)
    values = {"in": schema, "late": late, "listed": bounds.listed, "suspects": bounds.suspects}
    return {name: sql.format_map(values) for name, sql in (QUESTIONS | dict(own or {})).items()}


def spread(schema: str, ends: Sequence[Any], bounds: Bounds) -> str | None:
    """Return the query for a sample spread over all runs, or None if there are no runs."""
    [(lowest, highest)] = ends
    if lowest is None or bounds.sample_runs < 1:
        return None
    count = min(bounds.sample_runs, highest - lowest + 1)
    points = (lowest + (highest - lowest) * number // max(1, count - 1) for number in range(count))
    return _SPREAD.format(schema, ", ".join(f"({point})" for point in points))


def facts_of(answers: Answers, sample: Sequence[Any], **more: Any) -> Facts:
    """Return the facts that the answers hold."""
    return Facts(
        gone=tuple(Gone(*row) for row in answers["gone"]),
        unclaimed=tuple(Unclaimed(*row) for row in answers["unclaimed"]),
        untaken=tuple(Untaken(*row) for row in answers["untaken"]),
        retried=tuple(_retried(answers["retried"])),
        oldest_signal=next(((row[0], row[1]) for row in answers["signals"]), None),
        suspects=tuple((row[0], row[1]) for row in answers["suspects"]),
        sample=tuple(dict.fromkeys(row[0] for row in sample)),
        **more,
    )


def _retried(found: Iterable[Any]) -> Iterable[tuple[str, int]]:
    """Leave out messages that only mention attempts. Unreadable ones become dead letters without help."""
    for run_id, text in found:
        try:
            attempts = sql.message_of(text).attempts
        except StoreCorrupt:
            continue
        if attempts:
            yield run_id, attempts
