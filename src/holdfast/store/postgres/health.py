"""`health`: the server, its replicas and its housekeeping, and facts about all runs.

Everything is read from views that any user may read. Columns that a server shows only to its monitors (`pg_monitor`)
are empty for others, and are then not evaluated.
"""

from collections.abc import Callable, Iterable, Iterator
from typing import Any

from holdfast.core.instants import Instant
from holdfast.store.health import (
    OPEN,
    SECOND,
    Bounds,
    Facts,
    Finding,
    facts_of,
    fine,
    note,
    questions,
    size_words,
    spread,
    time_words,
    wrong,
)
from holdfast.store.postgres.migrate import latest_version, schema_version
from holdfast.store.postgres.pool import Pool, Rows

# The ready set is smaller than the runs, and is what claims read.
OWN = {
    "gone": """
        SELECT o.owner, o.runs, n.lease_until
        FROM (SELECT owner, count(*) AS runs FROM {in}agenda WHERE owner <> '' GROUP BY 1) o
        LEFT JOIN {in}nodes n ON n.node = o.owner
        WHERE n.lease_until IS NULL OR n.lease_until <= {late} ORDER BY n.lease_until LIMIT {listed}""",
    "unclaimed": """
        SELECT plan_id, plan_version, count(*), min(ready_at) FROM {in}agenda
        WHERE owner = '' AND ready_at <= {late} GROUP BY 1, 2 ORDER BY 4 LIMIT {listed}""",
}

SERVER = """
SELECT current_setting('server_version') AS version, current_setting('fsync') AS fsync,
    current_setting('full_page_writes') AS full_page_writes,
    current_setting('synchronous_commit') AS synchronous_commit,
    current_setting('autovacuum') = 'on' AND current_setting('track_counts') = 'on' AS has_autovacuum,
    current_setting('synchronous_standby_names') AS standbys,
    current_setting('max_connections')::int AS max_connections,
    (SELECT count(*) FROM pg_stat_activity WHERE backend_type = 'client backend') AS connections,
    (SELECT max(age(datfrozenxid)) FROM pg_database) AS transaction_age
"""
RIGHTS = """
SELECT c.relname FROM pg_class c WHERE c.relnamespace = $1::text::regnamespace AND c.relkind IN ('r', 'p')
    AND NOT (has_table_privilege(c.oid, 'SELECT') AND has_table_privilege(c.oid, 'INSERT')
        AND has_table_privilege(c.oid, 'UPDATE') AND has_table_privilege(c.oid, 'DELETE'))
ORDER BY 1
"""
# Every entry of the agenda, and every open run: there are too many finished ones to read them each time.
MISPLACED = f"""
SELECT r.run_id FROM holdfast.agenda a LEFT JOIN holdfast.runs r ON r.run_no = a.run_no
WHERE r.run_no IS NULL OR (r.lease_owner IS NULL AND r.ready_at IS NULL)
    OR r.ready_at IS DISTINCT FROM a.ready_at OR coalesce(r.lease_owner, '') <> a.owner
UNION ALL
SELECT r.run_id FROM holdfast.runs r
WHERE {OPEN} AND (r.lease_owner IS NOT NULL OR r.ready_at IS NOT NULL)
    AND NOT EXISTS (SELECT 1 FROM holdfast.agenda a WHERE a.run_no = r.run_no)
LIMIT $1
"""
TRANSACTIONS = """
SELECT s.who, s.seconds FROM (
    SELECT format('the process %s (%s, %s)', pid, coalesce(nullif(application_name, ''), usename), state) AS who,
        extract(epoch FROM clock_timestamp() - xact_start)::float8 AS seconds
    FROM pg_stat_activity WHERE datname = current_database() AND xact_start IS NOT NULL AND pid <> pg_backend_pid()
        AND backend_type = 'client backend'
    UNION ALL
    SELECT format('the prepared transaction %s', gid), extract(epoch FROM clock_timestamp() - prepared)::float8
    FROM pg_prepared_xacts WHERE database = current_database()
) s ORDER BY s.seconds DESC LIMIT 1
"""
# The size of a table's rows according to the statistics: a header of 28 bytes, and the columns by average width.
TABLES = """
SELECT c.relname AS name, coalesce(s.n_live_tup, 0) AS live, coalesce(s.n_dead_tup, 0) AS dead,
    pg_total_relation_size(c.oid) AS total_bytes, pg_relation_size(c.oid) AS row_bytes, c.reltuples::float8 AS rows,
    (SELECT 28 + sum(avg_width * (1 - null_frac)) FROM pg_stats p
        WHERE p.schemaname = n.nspname AND p.tablename = c.relname)::float8 AS row_width,
    coalesce((SELECT option_value::float8 FROM pg_options_to_table(c.reloptions)
        WHERE option_name = 'autovacuum_vacuum_threshold'), current_setting('autovacuum_vacuum_threshold')::float8)
    + coalesce((SELECT option_value::float8 FROM pg_options_to_table(c.reloptions)
        WHERE option_name = 'autovacuum_vacuum_scale_factor'),
        current_setting('autovacuum_vacuum_scale_factor')::float8) * greatest(c.reltuples, 0) AS threshold,
    extract(epoch FROM clock_timestamp() - greatest(s.last_autovacuum, s.last_vacuum))::float8 AS vacuumed_s
FROM pg_class c JOIN pg_namespace n ON n.oid = c.relnamespace LEFT JOIN pg_stat_user_tables s ON s.relid = c.oid
WHERE n.nspname = $1 AND c.relkind = 'r' ORDER BY total_bytes DESC
"""
REPLICAS = """
SELECT application_name AS name, state, sync_state, extract(epoch FROM replay_lag)::float8 AS lag_s
FROM pg_stat_replication WHERE state IS NOT NULL ORDER BY 1
"""
SLOTS = """
SELECT slot_name, pg_wal_lsn_diff(pg_current_wal_lsn(), restart_lsn)::bigint AS kept
FROM pg_replication_slots WHERE NOT active AND restart_lsn IS NOT NULL ORDER BY 2 DESC
"""


async def examine(pool: Pool, bounds: Bounds, asked: Instant | None) -> Facts:
    """Examine the server and all runs."""
    schema = pool.address.schema
    [found] = await pool.fetch(SERVER)
    findings = [
        *_found("durability", _unsafe(found), "what was acknowledged is on the pool's disk"),
        *_found("writing", _rights(await pool.fetch(RIGHTS, schema)), "every table can be written"),
        *_found("connections", _connections(found, bounds), _connected(found)),
        *_found("transactions", _open(await pool.fetch(TRANSACTIONS), bounds), "none has been open for long"),
        *_tables(found, await pool.fetch(TABLES, schema), bounds),
        *_replicas(found, await pool.fetch(REPLICAS), await pool.fetch(SLOTS), bounds),
        *_misplaced(await pool.fetch(MISPLACED, bounds.listed)),
    ]
    [[now]] = await pool.fetch("SELECT holdfast.time_1($1)", asked)
    asks = questions("holdfast.", now, bounds, OWN)
    answers = {name: await pool.fetch(sql) for name, sql in asks.items()}
    sample = spread("holdfast.", answers["ends"], bounds)
    return facts_of(
        answers,
        await pool.fetch(sample) if sample else (),
        software=f"PostgreSQL {found['version']}",
        schema_version=await schema_version(pool, schema, pool.address.shown),
        latest_version=latest_version(),
        findings=tuple(findings),
    )


def _found(subject: str, found: Iterable[Finding], otherwise: str) -> list[Finding]:
    return list(found) or [fine(subject, otherwise)]


def _unsafe(found: Any) -> Iterator[Finding]:
    off = [name for name in ("fsync", "full_page_writes", "synchronous_commit") if found[name] == "off"]
    if off:
        sentence = f"the server may lose what it has acknowledged: {', '.join(off)} is off"
        yield wrong("durability", sentence, "turn it on; allow_unsafe in the address only silences the refusal")


def _rights(tables: Rows) -> Iterator[Finding]:
    if tables:
        names = ", ".join(row[0] for row in tables)
        yield wrong("writing", f"this user may not read and write {names}", "GRANT it all rights on the schema")


def _connected(found: Any) -> str:
    return f"{found['connections']} of {found['max_connections']} are in use"


def _connections(found: Any, bounds: Bounds) -> Iterator[Finding]:
    if found["connections"] >= bounds.connections_share * found["max_connections"]:
        advice = "give nodes fewer (connections= in the address), put a pooler between, or raise max_connections"
        yield wrong("connections", _connected(found), advice)


def _open(transactions: Rows, bounds: Bounds) -> Iterator[Finding]:
    for who, seconds in transactions:
        if seconds >= bounds.transaction_s:
            sentence = f"{who} has a transaction open for {time_words(seconds * SECOND)}; no dead row is removed"
            yield wrong("transactions", sentence, "end it, and give its user an idle_in_transaction_session_timeout")


# --- housekeeping -------------------------------------------------------------------------------------------------


def _tables(server: Any, tables: Rows, bounds: Bounds) -> Iterator[Finding]:
    largest = ", ".join(f"{row['name']} {size_words(row['total_bytes'])}" for row in tables[:3])
    total = sum(row["total_bytes"] for row in tables)
    yield fine("size", f"the tables have {size_words(total)}, the largest are {largest}")
    yield from _found("vacuum", _vacuum(server, tables, bounds), "autovacuum keeps up with dead rows")
    yield from _found("bloat", _bloat(tables, bounds), "no table is much larger than its rows")
    if server["transaction_age"] >= bounds.transaction_age:
        sentence = f"the oldest rows are {server['transaction_age']:,} transactions old; at 2,147,483,648 writes stop"
        yield wrong("transaction age", sentence, "end what keeps rows from being frozen, and VACUUM FREEZE")


def _vacuum(server: Any, tables: Rows, bounds: Bounds) -> Iterator[Finding]:
    if not server["has_autovacuum"]:
        yield wrong("vacuum", "autovacuum is off, so tables only grow", "turn on autovacuum and track_counts")
    for row in tables:
        if row["dead"] < max(bounds.dead_rows, bounds.vacuum_times * row["threshold"]):
            continue
        share = 100 * row["dead"] / (row["dead"] + row["live"])
        last = "never" if row["vacuumed_s"] is None else f"{time_words(row['vacuumed_s'] * SECOND)} ago"
        sentence = f"{row['name']} has {row['dead']:,} dead rows ({share:.0f} %), and was last vacuumed {last}"
        advice = "end old transactions; if there are none, give autovacuum more workers or a higher cost limit"
        yield wrong("vacuum", sentence, advice)


def _bloat(tables: Rows, bounds: Bounds) -> Iterator[Finding]:
    for row in tables:
        needed = row["rows"] * row["row_width"] if row["rows"] > 0 and row["row_width"] else None
        if needed is None or row["row_bytes"] < max(bounds.bloat_bytes, bounds.bloat_times * needed):
            continue
        sentence = f"{row['name']} has {size_words(row['row_bytes'])}, and its rows need about {size_words(needed)}"
        yield note("bloat", sentence, "room is used again; to give it back use pg_repack, or VACUUM FULL, which locks")


# --- replicas -----------------------------------------------------------------------------------------------------


def _replicas(server: Any, replicas: Rows, slots: Rows, bounds: Bounds) -> Iterator[Finding]:
    described = ", ".join(f"{row['name']} ({row['state']}, {row['sync_state']})" for row in replicas)
    otherwise = f"there are {described}" if replicas else "there is none, or this user may not see it"
    checks: tuple[Callable[[], Iterable[Finding]], ...] = (
        lambda: _away(server, replicas),
        lambda: _behind(replicas, bounds),
        lambda: _kept(slots, bounds),
    )
    yield from _found("replicas", [finding for check in checks for finding in check()], otherwise)


def _away(server: Any, replicas: Rows) -> Iterator[Finding]:
    is_waited_for = server["standbys"] and server["synchronous_commit"] not in ("off", "local")
    if is_waited_for and not any(row["sync_state"] in ("sync", "quorum") for row in replicas):
        sentence = f"commits wait for a replica ({server['standbys']}), and none is there"
        yield wrong("replicas", sentence, "bring it back, or take it out of synchronous_standby_names")


def _behind(replicas: Rows, bounds: Bounds) -> Iterator[Finding]:
    for row in replicas:
        if (row["lag_s"] or 0) >= bounds.replay_s:
            sentence = f"the replica {row['name']} is {time_words(row['lag_s'] * SECOND)} behind"
            yield wrong("replicas", sentence, "see what it is busy with: a long query, its disk, or the network")


def _kept(slots: Rows, bounds: Bounds) -> Iterator[Finding]:
    for name, kept in slots:
        if kept >= bounds.kept_log_bytes:
            sentence = f"{size_words(kept)} of the log are kept for the slot {name}, which has no reader"
            yield wrong("replicas", sentence, "bring its reader back, or drop the slot; the disk fills up otherwise")


def _misplaced(runs: Rows) -> Iterator[Finding]:
    if runs:
        sentence = "runs stand in the ready set otherwise than they are, so claims may not find them"
        advice = "this is a mistake of ours: please report it; a signal to such a run enters it anew"
        yield wrong("ready set", sentence, advice, [row[0] or "(no run)" for row in runs])
