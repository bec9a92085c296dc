"""`docs/postgresql.md` is typed as it stands, as a user who owns a database and has no other right on the server."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.examples.page_database import PageDatabase
from tests.examples.page_session import PageSession
from tests.postgres_server import sql

PAGE = (Path(__file__).parents[2] / "docs" / "postgresql.md").read_text()
ADDRESS = "postgresql://orders@db.example/orders"

ORDERS = """
import holdfast as hf

app = hf.App("orders")


@app.workflow
async def order() -> str:
    return "done"
"""


@pytest.mark.slow
def test_a_node_works_on_the_address_of_the_page(tmp_path: Path, page_database: PageDatabase) -> None:
    session = PageSession(tmp_path, PGPASSWORD=page_database.password)
    (tmp_path / "orders.py").write_text(ORDERS)
    try:
        assert session.play_scripts(PAGE.replace(ADDRESS, page_database.address)) == 2
        session.type("holdfast node orders.py")
        session.type("holdfast run start order --run-id order-7 --app orders.py --store $HOLDFAST_STORE")
        assert session.type("holdfast run result order-7 --store $HOLDFAST_STORE") == ['"done"']
    finally:
        session.close()
    owner = "SELECT tableowner::text FROM pg_tables WHERE schemaname = 'holdfast' GROUP BY 1"
    assert sql(page_database.dsn, owner) == [(page_database.user,)]
