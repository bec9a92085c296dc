"""How much goes to the server in one call: large batches are split by their bytes, and answered like any others."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import asyncpg
import pytest

from holdfast.store.port import Committed, Created, Existing, Refused
from holdfast.store.postgres import PostgresStore, columns
from holdfast.testing.samples import SampleNode, complete, marker, new_run

SPLIT_AT = 1_000
VALUE = "x" * 400
"""Two of them go into one call."""


class Recorded:
    """The way to the server: counts the calls of a function."""

    def __init__(self, inner: Any, function: str) -> None:
        self.inner = inner
        self.function = function
        self.calls = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)

    async def fetch(self, sql: str, *args: Any, **options: Any) -> Any:
        self.calls += f"holdfast.{self.function}" in sql
        return await self.inner.fetch(sql, *args, **options)


@pytest.fixture
async def store(address: str, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[PostgresStore]:
    """Return a store whose calls are small."""
    monkeypatch.setattr(columns, "CALL_BYTES", SPLIT_AT)
    store = await PostgresStore.open(address)
    await store.migrate()
    yield store
    await store.close()


def recorded(store: PostgresStore, function: str) -> Recorded:
    """Count the calls of a function from now on."""
    store._pool = Recorded(store._pool, function)  # type: ignore[assignment]
    return store._pool  # type: ignore[return-value]


@pytest.mark.contract("STO-1", "OWN-1")
@pytest.mark.parametrize("value", ["result", "marker"])
async def test_turns_are_committed_in_calls_of_so_many_bytes(store: PostgresStore, value: str) -> None:
    node = SampleNode(store)
    run_ids = [f"run-{number}" for number in range(8)]
    runs = [await node.start(run_id) for run_id in run_ids]
    asks = complete(VALUE) if value == "result" else marker("mark", VALUE)
    turns = [await node.turn(run, asks) for run in runs]
    way = recorded(store, "commit_1")
    answers = await store.commit([*turns, turns[3]])
    assert all(isinstance(answer, Committed) for answer in answers[:8])
    assert answers[8] == answers[3], "the second turn of a run comes after the first, and was committed before"
    assert way.calls == 5
    for run_id in run_ids:
        kept = (await store.read_events(run_id))[-1].data
        assert VALUE.encode() in bytes(getattr(kept, "result" if value == "result" else "value"))


@pytest.mark.contract("STO-1", "OWN-1")
async def test_one_turn_that_is_larger_than_a_call_is_committed(store: PostgresStore) -> None:
    node = SampleNode(store)
    turn = await node.turn(await node.start("run-1"), complete(VALUE * 5))
    way = recorded(store, "commit_1")
    [answer] = await store.commit([turn])
    assert isinstance(answer, Committed)
    assert way.calls == 1


@pytest.mark.contract("STO-1", "OWN-1")
@pytest.mark.parametrize("owner", [None, "node-a"])
async def test_runs_are_created_in_calls_of_so_many_bytes(store: PostgresStore, owner: str | None) -> None:
    await store.renew("node-a", 60_000)
    runs = [new_run(f"run-{number}", request_id=f"request-{number}", value=VALUE) for number in range(8)]
    again = new_run("run-9", request_id="request-5", value=VALUE)
    taken = new_run("run-2", request_id="other", value=VALUE)
    way = recorded(store, "create_1")
    answers = await store.create([*runs, again, taken], owner)
    assert [answer.run_id for answer in answers[:8] if isinstance(answer, Created)] == [run.run_id for run in runs]
    assert answers[8] == Existing("run-5")
    assert isinstance(answers[9], Refused)
    assert way.calls == 5
    loaded = await store.load([run.run_id for run in runs])
    assert [run is not None and run.head.lease_owner for run in loaded] == [owner] * 8


@pytest.mark.contract("STO-1", "OWN-1")
async def test_one_run_that_is_larger_than_a_call_is_created(store: PostgresStore) -> None:
    way = recorded(store, "create_1")
    [answer] = await store.create([new_run("run-1", value=VALUE * 5)])
    assert isinstance(answer, Created)
    assert way.calls == 1


TEXTS = [
    "",
    "NULL",
    "a,b",
    "{}",
    '"',
    "\\",
    '\\"',
    '","',
    "line\nbreak",
    "\x01",
    "ünï ✓ 𝄞",
    " padded ",
    "\\x41",
    "None",
]


@pytest.mark.parametrize("has_nulls", [False, True])
async def test_arrays_as_text_are_read_as_the_values_they_were(postgres_dsn: str, has_nulls: bool) -> None:
    texts = [*TEXTS, *([None] if has_nulls else [])]
    numbers = [number - 5 if number or not has_nulls else None for number in range(len(texts))]
    bools = [number % 2 == 0 for number in range(len(texts))]
    rows = list(zip(texts, numbers, bools, strict=True))
    kinds = ("text", "bigint", "boolean")
    connection = await asyncpg.connect(postgres_dsn)
    found = await connection.fetchrow(f"SELECT {columns.places(1, kinds)}", *columns.literals(rows, kinds))
    keys = [(digest,) for digest in ("00ff", "41", "", "AB")]
    [raw] = await connection.fetchrow(f"SELECT {columns.places(1, ['bytea'])}", *columns.literals(keys, ["bytea"]))
    await connection.close()
    assert list(found) == [texts, numbers, bools]
    assert raw == [bytes.fromhex(digest) for (digest,) in keys]


@pytest.mark.parametrize(
    ("kind", "column"),
    [("text", ["a\x00b", "c"]), ("text", [1]), ("bytea", ["ab", 'cd","ef']), ("bytea", ["xy"]), ("bytea", [None])],
)
def test_what_would_become_two_values_is_refused(kind: str, column: list[Any]) -> None:
    with pytest.raises((ValueError, TypeError, AttributeError)):
        columns.literals([(value,) for value in column], [kind])


@pytest.mark.parametrize("value", ["5", 1.5, 2**63, [1], "1, 2", "NULL"])
async def test_what_is_no_number_is_refused_by_the_server(postgres_dsn: str, value: Any) -> None:
    connection = await asyncpg.connect(postgres_dsn)
    with pytest.raises(asyncpg.DataError):
        await connection.fetch(f"SELECT {columns.places(1, ['bigint'])}", *columns.literals([(value,)], ["bigint"]))
    await connection.close()
