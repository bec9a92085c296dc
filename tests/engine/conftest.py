"""Every feature is tested on two stores, with programs kept in memory and with every turn replayed."""

from pathlib import Path

import pytest

from tests.engine.harness import EngineVariant


@pytest.fixture(params=["memory", "sqlite"])
def address(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """Return the address of a store that is empty."""
    return "memory://" if request.param == "memory" else f"sqlite:///{tmp_path}/engine.db"


@pytest.fixture(params=[5_000, 0], ids=["live", "replayed"])
def variant(request: pytest.FixtureRequest, address: str) -> EngineVariant:
    """Return where the test runs."""
    return EngineVariant(address, request.param)
