"""A database and a user of a PostgreSQL server, made by the statements of the tutorial."""

from __future__ import annotations

import re
import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from urllib.parse import urlsplit

from tests.postgres_server import sql

TUTORIAL = Path(__file__).parents[2] / "docs" / "tutorial" / "5-deployment.md"


class PageDatabase:
    """A user who owns a database and has no other right. `shop` and `…` on the page stand for names of the test."""

    def __init__(self, server: str) -> None:
        self.user = f"shop_{secrets.token_hex(6)}"
        self.password = secrets.token_hex(16)
        where = urlsplit(server)
        self.address = f"postgresql://{self.user}@{where.hostname}:{where.port}/{self.user}"
        self.dsn = self.address.replace("@", f":{self.password}@")

    @property
    def statements(self) -> list[str]:
        """The statements of the page."""
        [block] = re.findall(r"^```sql\n(.*?)^```", TUTORIAL.read_text(), re.DOTALL | re.MULTILINE)
        return [line.replace("shop", self.user).replace("…", self.password) for line in block.splitlines()]


@contextmanager
def made_by_the_page(server: str) -> Iterator[PageDatabase]:
    """Make a user and a database in a server, and leave nothing of them."""
    made = PageDatabase(server)
    try:
        for statement in made.statements:
            sql(server, statement)
        yield made
    finally:
        sql(server, f"DROP DATABASE IF EXISTS {made.user} WITH (FORCE)")
        sql(server, f"DROP ROLE IF EXISTS {made.user}")
