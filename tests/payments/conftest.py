"""The stores on which payments are tested."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.payments.town import Town


@pytest.fixture(params=["sqlite", "postgres"])
def town(request: pytest.FixtureRequest, tmp_path: Path) -> Town:
    """Return a town whose shop works on a store that processes share."""
    if request.param == "sqlite":
        return Town(f"sqlite:///{tmp_path}/shop.db", tmp_path)
    return Town(request.getfixturevalue("postgres_url"), tmp_path)
