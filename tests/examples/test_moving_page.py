"""`docs/moving.md` is run as it stands, on a PostgreSQL server: an order that waits on SQLite ends there."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.examples.page_database import PageDatabase
from tests.examples.page_session import PageSession
from tests.postgres_server import sql

PAGE = (Path(__file__).parents[2] / "docs" / "moving.md").read_text()
ADDRESS = "postgresql://shop@db.internal/shop"


@pytest.mark.process
def test_every_line_of_the_page_does_what_it_shows(tmp_path: Path, page_database: PageDatabase) -> None:
    assert PAGE.count(ADDRESS) == 2
    text = PAGE.replace(ADDRESS, page_database.address)
    session = PageSession(tmp_path, PGPASSWORD=page_database.password)
    session.write_files(text)
    [install] = re.findall(r"`(pip install [^`]+)`", text)
    session.type(install)
    try:
        assert session.play(text) == 9
    finally:
        session.close()
    assert sql(page_database.dsn, "SELECT status FROM holdfast.runs WHERE run_id = 'o-1'") == [("COMPLETED",)]
