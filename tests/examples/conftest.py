"""What tests of pages share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.examples.page_database import PageDatabase, made_by_the_page


@pytest.fixture
def page_database(empty_database: str) -> Iterator[PageDatabase]:
    """Return a database of a PostgreSQL server and its user, made as the tutorial says."""
    with made_by_the_page(empty_database) as made:
        yield made
