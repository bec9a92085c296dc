"""How much goes to the server in one call: large batches are split by their bytes, and answered like any others."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

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
