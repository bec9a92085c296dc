"""The stores on which payments are tested."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.payments.town import Town

TOWNS = 3


@pytest.fixture(params=["sqlite", "postgres"])
def towns(request: pytest.FixtureRequest, tmp_path: Path) -> list[Town]:
    """Return some towns, each with a shop that works on a store of its own, which processes share."""
    folders = [tmp_path / f"town{number}" for number in range(TOWNS)]
    for folder in folders:
        folder.mkdir()
    if request.param == "sqlite":
        return [Town(f"sqlite:///{folder}/shop.db", folder) for folder in folders]
    url = request.getfixturevalue("postgres_url")
    return [Town(f"{url}{'&' if '?' in url else '?'}schema={folder.name}", folder) for folder in folders]


@pytest.fixture
def town(towns: list[Town]) -> Town:
    """Return one town."""
    return towns[0]
