"""Tests of replay tests: a recorded history, and code that still fits it or does not."""

import json
from pathlib import Path
from typing import Any

import pytest

import holdfast as hf
from holdfast.core import codec
from holdfast.core.events import Event
from holdfast.errors import InvalidInput
from holdfast.service.views import event_view
from holdfast.testing import TestNode, assert_replays, read_history


def shop(*, first: str = "reserve") -> tuple[hf.App, Any]:
    """Return an app whose order begins with this step."""
    app = hf.App("shop")

    @app.activity(name=first)
    async def begin(order_id: str) -> str:
        return order_id

    @app.activity
    async def charge(order_id: str) -> str:
        return order_id

    @app.workflow
    async def order(order_id: str) -> str:
        return await charge(await begin(order_id))

    return app, order


async def recorded() -> list[Event]:
    """Return the history of an order that has finished."""
    app, order = shop()
    async with TestNode(app):
        run = await app.start(order, "o-1")
        await run.result()
        return await run.events()


@pytest.mark.contract("WF-3")
async def test_a_history_replays_in_one_line_and_changed_code_is_named() -> None:
    history = await recorded()
    assert_replays(shop()[0], history)
    with pytest.raises(AssertionError, match=r"would be paused at event \d+(.|\n)*reserve(.|\n)*pick"):
        assert_replays(shop(first="pick")[0], history)


async def test_a_history_is_read_from_a_file_of_the_command_line_and_from_lines(tmp_path: Path) -> None:
    history = await recorded()
    views = [json.loads(bytes(codec.encode(event_view(event, frozenset(), 1_000_000)))) for event in history]
    page = tmp_path / "page.json"
    page.write_text(
        json.dumps({"items": views, "last_event_seq": len(views), "status": "COMPLETED"}, separators=(",", ":"))
    )
    lines = tmp_path / "lines.jsonl"
    lines.write_text("\n".join(json.dumps(view, separators=(",", ":")) for view in views) + "\n\n")
    bodies = [codec.encode_body(event.data) for event in history]
    assert [codec.encode_body(event.data) for event in read_history(page)] == bodies
    assert [codec.encode_body(event.data) for event in read_history(lines)] == bodies
    assert [event.persisted_at for event in read_history(lines)] == [event.persisted_at for event in history]
    assert_replays(shop()[0], page)
    with pytest.raises(AssertionError, match="would be paused"):
        assert_replays(shop(first="pick")[0], str(lines))


def test_a_file_that_is_no_history_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "odd.jsonl"
    path.write_text('{"event_type": "RunQueued"}\n')
    with pytest.raises(InvalidInput, match=r"odd\.jsonl, line 1: this is not an event"):
        read_history(path)
    with pytest.raises(InvalidInput, match="no event"):
        assert_replays(shop()[0], [])
