"""Stores for the tests of the bus: those that have an outbox."""

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from holdfast.store.port import Store
from tests.engine.conftest import opened_store


@pytest.fixture(params=["memory", "sqlite", "postgres"])
async def store(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[Store]:
    """Return an empty store of each kind."""
    async with opened_store(request.param, request, tmp_path) as opened:
        yield opened
