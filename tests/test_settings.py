"""Settings: where they come from, and that nothing is silently ignored."""

from pathlib import Path

import pytest

from holdfast import Settings, open_store
from holdfast.errors import InvalidInput
from holdfast.limits import Limits
from holdfast.settings import load_settings


def test_defaults_need_nothing() -> None:
    assert load_settings({}) == Settings()


def test_later_sources_win_and_merge(tmp_path: Path) -> None:
    file = tmp_path / "holdfast.toml"
    file.write_text('store = "sqlite:///file.db"\nbusy_ms = 1\n[limits]\nbatch_items = 5\npage_items = 6\n')
    environ = {"HOLDFAST_BUSY_MS": "2", "HOLDFAST_LIMITS__PAGE_ITEMS": "7", "PATH": "/bin"}
    settings = load_settings(environ, file, store="memory://")
    assert settings == Settings(store="memory://", busy_ms=2, limits=Limits(batch_items=5, page_items=7))


@pytest.mark.parametrize(
    ("environ", "text", "arguments"),
    [
        ({"HOLDFAST_STROE": "x"}, "", {}),
        ({"HOLDFAST_LIMITS__BATCH": "1"}, "", {}),
        ({"HOLDFAST_BUSY_MS": "soon"}, "", {}),
        ({}, "stroe = 1", {}),
        ({}, "store = ", {}),
        ({}, "", {"stroe": 1}),
        ({}, "", {"checkpoint_ownership": "mine"}),
        ({"HOLDFAST_LIMITS__BATCH_ITEMS": "0"}, "", {}),
    ],
)
def test_what_is_unknown_or_malformed_is_refused(
    environ: dict[str, str], text: str, arguments: dict[str, object], tmp_path: Path
) -> None:
    file = tmp_path / "holdfast.toml"
    file.write_text(text)
    with pytest.raises(InvalidInput):
        load_settings(environ, file, **arguments)


@pytest.mark.parametrize("name", ["HOLDFAST_NODE__LEASE_MS", "HOLDFAST_NODE__LEESE_MS", "HOLDFAST_STOR"])
def test_a_variable_that_is_refused_is_named(name: str) -> None:
    with pytest.raises(InvalidInput, match=f"the settings are wrong: {name}: ") as caught:
        load_settings({name: "hidden", "HOLDFAST_LIMITS__LOST_TURNS": "5"})
    assert "hidden" not in caught.value.message


def test_a_missing_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InvalidInput, match="cannot be read"):
        load_settings({}, tmp_path / "none.toml")


async def test_open_store_follows_the_address(tmp_path: Path) -> None:
    file = tmp_path / "a b.db"
    store = await open_store(Settings(store=f"sqlite:///{str(file).replace(' ', '%20')}"))
    await store.close()
    assert file.exists()
    memory = await open_store(Settings(store="memory://"))
    assert await memory.now() > 0
    await memory.close()


@pytest.mark.parametrize(
    "address", ["", "orders.db", "sqlite://", "sqlite:///", "sqlite://orders.db", "memory://x", "mongodb://x"]
)
async def test_an_unknown_address_is_refused(address: str) -> None:
    with pytest.raises(InvalidInput, match="use sqlite:///"):
        await open_store(Settings(store=address))
