"""Mistakes that are easy to make are refused where they are made."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from typing import Any

import pytest

import holdfast as hf
from holdfast.errors import InvalidInput


async def yields_later() -> AsyncIterator[int]:
    yield 1


def yields() -> Iterator[int]:
    yield 1


@pytest.mark.contract("API-2")
@pytest.mark.parametrize("function", [yields_later, yields])
def test_an_activity_that_yields_is_refused_when_it_is_registered(function: Any) -> None:
    app = hf.App("shop")
    with pytest.raises(InvalidInput, match="returns its result, and yields"):
        app.activity(function)
    assert app.registry.activities == {}


@pytest.mark.contract("API-2", "QUE-1")
async def test_an_option_of_start_that_could_be_an_argument_is_refused() -> None:
    app = hf.App("shop")

    @app.workflow
    async def looks(run_id: str, priority: int = 0) -> str:
        return f"{run_id} {priority}"

    async with app.node("memory://"):
        given: list[dict[str, Any]] = [{"run_id": "r-1"}, {"priority": 1}]
        for options in given:
            with pytest.raises(InvalidInput, match="is an option of start"):
                await app.start(looks, "other", **options)
        assert await (await app.start(looks, "other", 2)).result() == "other 2"
        assert await (await app.start(looks, "other", request_id="q-1")).result() == "other 0"
