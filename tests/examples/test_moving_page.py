"""`docs/moving.md` is run as it stands, on a PostgreSQL server: an order that waits on SQLite ends there."""

from __future__ import annotations

from pathlib import Path

import asyncpg
import pytest

from tests.examples.page_session import PageSession

PAGE = (Path(__file__).parents[2] / "docs" / "moving.md").read_text()
ADDRESS = "postgresql://shop@db.internal/shop"


@pytest.mark.process
async def test_every_line_of_the_page_does_what_it_shows(tmp_path: Path, postgres_url: str) -> None:
    assert PAGE.count(ADDRESS) == 2
    text = PAGE.replace(ADDRESS, postgres_url)
    session = PageSession(tmp_path)
    session.write_files(text)
    try:
        assert session.play(text) == 9
    finally:
        session.close()
    connection = await asyncpg.connect(postgres_url)
    try:
        [[status]] = await connection.fetch("SELECT status FROM holdfast.runs WHERE run_id = 'o-1'")
    finally:
        await connection.close()
    assert status == "COMPLETED"
