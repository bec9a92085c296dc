"""What is done to the servers of a chaos is over when it returns, and nothing that was committed is lost by it."""

from __future__ import annotations

import sqlite3
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import pytest

from tests.chaos.fleet import Chronicle
from tests.chaos.stores import Failover, File, HarmedStore, Postgres, store_named
from tests.postgres_server import sql


@pytest.mark.slow
@pytest.mark.parametrize("make", [Postgres, Failover])
def test_a_server_works_again_after_each_harm_and_has_lost_nothing(make: Callable[[], HarmedStore]) -> None:
    store = make()
    try:
        sql(store.url, "CREATE TABLE kept (number int)")
        for number, (_, harm) in enumerate([*store.harms] * 2, 1):
            sql(store.url, f"INSERT INTO kept VALUES ({number})")
            harm()
            assert sql(store.url, "SELECT count(*) FROM kept") == [(number,)]
        assert number >= 2
    finally:
        store.close()


def test_a_file_says_when_somebody_holds_its_lock(tmp_path: Path) -> None:
    store = store_named("sqlite", tmp_path)
    assert isinstance(store, File)
    assert not store.is_held()
    with closing(sqlite3.connect(tmp_path / "chaos.db", isolation_level=None)) as frozen:
        frozen.execute("BEGIN IMMEDIATE")
        assert store.is_held()
        frozen.execute("ROLLBACK")
    assert not store.is_held()


def test_an_address_is_left_alone(tmp_path: Path) -> None:
    store = store_named("sqlite:////somewhere.db", tmp_path)
    assert (store.url, list(store.harms)) == ("sqlite:////somewhere.db", [])


def test_what_is_excused_is_counted_once() -> None:
    chronicle = Chronicle(outages=[(10, 20), (15, 30), (90, 200)], delays=[(18, 25), (40, 50), (300, 400)])
    assert chronicle.excused_us(0, 100) == 20 + 10 + 10
    assert chronicle.excused_us(12, 14) == 2
    assert chronicle.excused_us(60, 80) == 0
