"""Millions of runs as the engine leaves them, written by the store itself: copies of one run that a node has executed.

A copy has all rows of its model. What the engine derives from a run's id (`core/keys.py`) is derived by the statement:
the keys of events, their ids, and the key of the request; instants are those of the model and some microseconds. What
has no known rule is refused (`NotCopied`): an event whose key is not found, an id within a value, rows of other tables.
"""

import sqlite3
from collections.abc import Iterator, Mapping
from contextlib import closing
from hashlib import sha256
from pathlib import Path
from typing import Any

from msgspec import Struct

from bench.engine import app, steps
from bench.stores import as_the_command
from holdfast.core import keys

DIGITS = 12
"""So many digits a copy has at the end of its id, as many as the last part of a UUID."""
GAP_US = 10
"""So much later than the copy before it a copy was created."""
AT_ONCE = 1_000
CHUNK = 50_000
"""So many copies are one transaction."""
COPIED = ("runs", "events", "waits")

Row = Mapping[str, Any]


class NotCopied(Exception):
    """The model holds something of which is not known what it would be in another run."""


class Model(Struct, frozen=True):
    """The rows of a run, what its keys are made of beside its id, and the instant that its snapshot says."""

    run: Row
    events: list[Row]
    waits: list[Row]
    suffixes: dict[str, str]
    """By the ids of events."""
    request_prefix: str
    executed_on: str


class Dialect(Struct, frozen=True):
    """What the two stores have different words for. Each is a template; `value` is an expression."""

    schema: str
    digest: str
    hexed: str
    place_of: str
    bytes: str
    padded: str
    numbers: str


SQLITE = Dialect(
    schema="",
    digest="sha256(({value}))",
    hexed="lower(hex({value}))",
    place_of="instr('{text}', {value})",
    bytes="X'{value}'",
    padded="substr('000000000000' || n, -12)",
    numbers="(WITH RECURSIVE c (n) AS (SELECT {first} UNION ALL SELECT n + 1 FROM c WHERE n < {last}) SELECT n FROM c)",
)
POSTGRES = Dialect(
    schema="{schema}.",
    digest="sha256(({value})::bytea)",
    hexed="encode({value}, 'hex')",
    place_of="strpos('{text}', {value})",
    bytes="'\\x{value}'::bytea",
    padded="lpad(n::text, 12, '0')",
    numbers="generate_series({first}::bigint, {last}::bigint) n",
)


async def finished_model(store: Any) -> str:
    """Take a run of three steps to its end, and return its id."""
    async with app.node(store, options=as_the_command()):
        run = await app.start(steps, 3)
        assert await run.result() == 3
        return run.run_id


def copy_id(prefix: str, number: int) -> str:
    """Return the id of a copy."""
    return f"{prefix}{number:0{DIGITS}}"


def prefix_of(run_id: str) -> str:
    """Return an id without the part that a copy has of its own."""
    return run_id[:-DIGITS]


def model_of(run: Row, events: list[Row], waits: list[Row]) -> Model:
    """Return how a run is copied."""
    run_id = run["run_id"]
    if run["run_request_id"] != run_id or run["parent_run_id"] or run["lease_owner"] or run["ready_at"] is not None:
        raise NotCopied(f"{run_id} was started with a request id or by a run, or is not at rest")
    for row in (run, *events, *waits):
        if any(isinstance(value, str) and run_id in value and value != run_id for value in row.values()):
            raise NotCopied(f"{run_id} is mentioned within a value")
    instant = str(run["snapshot"]).partition('"last_executed_on":')[2].partition(",")[0].rstrip("}")
    suffixes = {event["event_id"]: _suffix(run, event) for event in events}
    return Model(run, events, waits, suffixes, _request_prefix(run), instant)


def _request_prefix(run: Row) -> str:
    place = (run["tenant"], run["project"], run["environment"], run["plan_id"])
    for version in (run["plan_version"], keys.ANY_VERSION):
        if keys.request_key(*place, version, run["run_id"]) == run["request_key"].hex():
            return "|".join([*place, version, ""])
    raise NotCopied(f"the key of the request that started {run['run_id']}")


def _suffix(run: Row, event: Row) -> str:
    """Return what follows the run's id in the key of an event."""
    for position in (event["step_id"], *map(str, range(10))):
        for attempt in range(3):
            suffix = f"|{position}|{attempt}|{event['event_type']}|{run['plan_version']}"
            key = sha256(f"{run['run_id']}{suffix}".encode())
            if key.digest() == event["idempotency_key"] and keys.event_id(key.hexdigest()) == event["event_id"]:
                return suffix
    raise NotCopied(f"the key of event {event['run_seq']} of {run['run_id']}")


# --- the statements: templates with the numbers of the first and the last copy, and the `run_no` of number 0


class Copying(Struct, frozen=True):
    """Writes the statements that insert copies of a model."""

    model: Model
    prefix: str
    dialect: Dialect

    def statements(self) -> Iterator[str]:
        """Return one for each row of the model."""
        model, run_id = self.model, self._run_id()
        request_key = self._digest(f"{self._value(model.request_prefix)} || {run_id}")
        snapshot = self._value(model.run["snapshot"])
        if model.executed_on:
            before, after = self._value(model.executed_on), f"({_later(int(model.executed_on))})"
            snapshot = f"replace({snapshot}, {before}, {after}{'' if self.dialect is SQLITE else '::text'})"
        own = {"run_id": run_id, "run_request_id": run_id, "request_key": request_key, "snapshot": snapshot}
        yield self._insert("runs", model.run, own)
        for wait in model.waits:
            yield self._insert("waits", wait, {})
        for event in model.events:
            keyed = {"key": self._key(event["event_id"])}
            own = {"idempotency_key": "key", "event_id": self._event_id("key")}
            if event["parent_event_id"] is not None:
                keyed["parent_key"] = self._key(event["parent_event_id"])
                own["parent_event_id"] = self._event_id("parent_key")
            yield self._insert("events", event, own, keyed)

    def _insert(self, table: str, row: Row, own: Row, keyed: Row | None = None) -> str:
        named = "".join(f", {value} AS {name}" for name, value in (keyed or {}).items())
        hexed = "".join(f", {self.dialect.hexed.format(value=name)} AS {name}_digits" for name in keyed or {})
        values = [own.get(name) or self._column(name, value) for name, value in row.items()]
        return (
            f"WITH keyed AS MATERIALIZED (SELECT n{named} FROM {self.dialect.numbers}), "
            f"copies AS MATERIALIZED (SELECT *{hexed} FROM keyed) INSERT INTO "
            f"{self.dialect.schema}{table} ({', '.join(row)}) SELECT {', '.join(values)} FROM copies ORDER BY n"
        )

    def _column(self, name: str, value: Any) -> str:
        if name == "run_no":
            return "{zero} + n"
        if value is not None and (name in ("since", "until") or name.endswith("_at")) and value:
            return _later(value)
        return self._value(value)

    def _value(self, value: Any) -> str:
        """Return a value in SQL, with its braces doubled."""
        if isinstance(value, bytes):
            return self.dialect.bytes.format(value=value.hex())
        if isinstance(value, str):
            return "'" + value.replace("'", "''").replace("{", "{{").replace("}", "}}") + "'"
        return "NULL" if value is None else str(int(value))

    def _run_id(self) -> str:
        return f"{self._value(self.prefix)} || {self.dialect.padded}"

    def _digest(self, value: str) -> str:
        return self.dialect.digest.replace("{value}", value)

    def _key(self, event_id: str) -> str:
        return self._digest(f"{self._run_id()} || {self._value(self.model.suffixes[event_id])}")

    def _event_id(self, key: str) -> str:
        """Return the id that belongs to a key, as `keys.event_id` makes it."""
        digits = f"{key}_digits"
        place = self.dialect.place_of.format(text="0123456789abcdef", value=f"substr({digits}, 17, 1)")
        return (
            f"substr({digits}, 1, 8) || '-' || substr({digits}, 9, 4) || '-8' || substr({digits}, 14, 3) || '-' || "
            f"substr('89ab89ab89ab89ab', {place}, 1) || substr({digits}, 18, 3) || '-' || substr({digits}, 21, 12)"
        )


def _later(instant: int) -> str:
    return f"{instant} + {GAP_US} * (n - {{begin}} + 1)"


def _chunks(first: int, last: int) -> Iterator[tuple[int, int]]:
    for start in range(first, last + 1, AT_ONCE):
        yield start, min(start + AT_ONCE - 1, last)


# --- a file


def fill_file(path: Path, run_id: str, prefix: str, first: int, last: int) -> None:
    """Copy a run so many times within a file. No process may have it open, and it is lost if this one ends early."""
    with closing(sqlite3.connect(path, isolation_level=None)) as db:
        db.row_factory = sqlite3.Row
        db.create_function("sha256", 1, lambda text: sha256(text.encode()).digest(), deterministic=True)
        for setting in ("journal_mode = OFF", "synchronous = OFF", "cache_size = -1000000", "locking_mode = EXCLUSIVE"):
            db.execute(f"PRAGMA {setting}").fetchall()
        texts = list(Copying(_model_in_file(db, run_id), prefix, SQLITE).statements())
        zero = db.execute("SELECT max(run_no) FROM runs").fetchone()[0] + 1 - first
        db.execute("BEGIN")
        for start, end in _chunks(first, last):
            for text in texts:
                db.execute(text.format(first=start, last=end, zero=zero, begin=first))
            if end % CHUNK == 0:
                db.execute("COMMIT")
                db.execute("BEGIN")
        db.execute("COMMIT")
    with closing(sqlite3.connect(path)) as db:
        db.execute("PRAGMA journal_mode = WAL").fetchall()


def _model_in_file(db: sqlite3.Connection, run_id: str) -> Model:
    [run] = map(dict, db.execute("SELECT * FROM runs WHERE run_id = ?", (run_id,)))
    rows = dict[str, list[Row]]()
    for (table,) in db.execute("SELECT name FROM sqlite_master WHERE type = 'table'").fetchall():
        if any(column["name"] == "run_no" for column in db.execute(f"PRAGMA table_info({table})")):
            rows[table] = [dict(row) for row in db.execute(f"SELECT * FROM {table} WHERE run_no = ?", (run["run_no"],))]
    return _checked(run, rows)


def _checked(run: Row, rows: dict[str, list[Row]]) -> Model:
    if others := [table for table, found in rows.items() if found and table not in COPIED]:
        raise NotCopied(f"{run['run_id']} has rows in {', '.join(others)}")
    return model_of(run, sorted(rows["events"], key=lambda event: int(event["run_seq"])), rows["waits"])


# --- a schema of a server


async def fill_schema(connection: Any, schema: str, run_id: str, prefix: str, first: int, last: int) -> None:
    """Copy a run so many times within a schema, and let the server look at it, as it would by itself."""
    texts = list(Copying(await _model_in_schema(connection, schema, run_id), prefix, POSTGRES).statements())
    numbers = f"{schema}.run_numbers"
    zero = await connection.fetchval(f"SELECT nextval('{numbers}')") - first
    await connection.execute(f"SELECT setval('{numbers}', {zero + last})")
    for start, end in _chunks(first, last):
        copies = {"schema": schema, "first": start, "last": end, "zero": zero, "begin": first}
        async with connection.transaction():
            await connection.execute("SET LOCAL synchronous_commit = off")
            for text in texts:
                await connection.execute(text.format_map(copies), timeout=600)
    for table in COPIED:  # else the server would begin to do so on its own, in the middle of a measurement
        await connection.execute(f"VACUUM ANALYZE {schema}.{table}", timeout=3_600)
    await connection.execute("CHECKPOINT", timeout=600)


async def _model_in_schema(connection: Any, schema: str, run_id: str) -> Model:
    run = dict(await connection.fetchrow(f"SELECT * FROM {schema}.runs WHERE run_id = $1", run_id))
    tables = await connection.fetch(
        "SELECT c.relname FROM pg_class c JOIN pg_attribute a ON a.attrelid = c.oid "
        "WHERE c.relnamespace = $1::text::regnamespace AND a.attname = 'run_no' AND c.relkind IN ('r', 'p') "
        "AND NOT c.relispartition",
        schema,
    )
    rows = dict[str, list[Row]]()
    for (table,) in tables:
        found = await connection.fetch(f"SELECT * FROM {schema}.{table} WHERE run_no = $1", run["run_no"])
        rows[table] = [dict(row) for row in found]
    return _checked(run, rows)
