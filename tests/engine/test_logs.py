"""The app's log says each thing once, and where it was said; records are lines of JSON."""

import io
import json
import logging
from collections.abc import Iterator
from typing import Any

import pytest

import holdfast as hf
from holdfast.engine.observe.logs import JsonFormatter, logger_of

app = hf.App("talkative")
plain = logging.getLogger("somebody.elses")


@app.activity
async def work(number: int) -> int:
    """Say something in a step."""
    app.logger.info("working on %d", number)
    plain.warning("plain")
    return number


@app.workflow
async def talking(count: int) -> None:
    """Say something before and behind each wait."""
    for number in range(count):
        app.logger.info("before %d", number, extra={"number": number})
        await work(number)
        await hf.wait_signal("go")
    app.logger.info("done")


@app.workflow
async def tidying() -> None:
    """Say something on the way out."""
    try:
        for _ in range(3):
            await hf.wait_signal("go")
    finally:
        app.logger.info("tidying up")


@pytest.fixture
def lines() -> Iterator[Any]:
    """Return what is logged, as programs read it."""
    text = io.StringIO()
    handler = logging.StreamHandler(text)
    handler.setFormatter(JsonFormatter())
    root = logging.getLogger()
    root.addHandler(handler)
    app.logger.setLevel(logging.INFO)
    yield lambda: [json.loads(line) for line in text.getvalue().splitlines()]
    root.removeHandler(handler)


@pytest.mark.contract("WF-2")
async def test_a_program_that_is_let_go_says_nothing(lines: Any) -> None:
    async with app.node(hf.MemoryStore(), options=hf.NodeOptions(cached_runs=0)):
        run = await app.start(tidying)
        for _ in range(3):
            await run.signal("go")
        await run.result()
    assert [line["message"] for line in lines()].count("tidying up") == 1


@pytest.mark.contract("WF-2")
async def test_nothing_is_said_again_when_a_run_is_replayed(lines: Any) -> None:
    store = hf.MemoryStore()
    options = hf.NodeOptions(cached_runs=1)
    async with app.node(store, options=options):
        run = await app.start(talking, 3)
        run_id = run.run_id
    for _ in range(3):
        async with app.node(store, options=options):
            await app.run(run_id).signal("go")
            await app.run(run_id).events()
    async with app.node(store, options=options):
        await app.run(run_id).result()
    said = [line for line in lines() if line["logger"] == "holdfast.app.talkative"]
    assert [line["message"] for line in said if "step_id" not in line] == ["before 0", "before 1", "before 2", "done"]
    assert all(line["run_id"] == run_id for line in said)
    assert [line["number"] for line in said if "number" in line] == [0, 1, 2]


async def test_records_know_their_run_and_step_whatever_the_logger(lines: Any) -> None:
    async with app.node(hf.MemoryStore()):
        run = await app.start(talking, 1)
        await run.signal("go")
        await run.result()
    [mine] = [line for line in lines() if line["message"] == "working on 0"]
    [theirs] = [line for line in lines() if line["message"] == "plain"]
    for line in (mine, theirs):
        assert (line["run_id"], line["step_id"], line["attempt"]) == (run.run_id, "work", 1)
    assert mine["level"] == "INFO"
    assert mine["time"].endswith("+00:00")


def test_a_record_is_one_line_whatever_is_in_it(lines: Any) -> None:
    try:
        raise ValueError("two\nlines")
    except ValueError:
        plain.exception("it\nfailed", extra={"what": object()})
    [line] = lines()
    assert line["message"] == "it\nfailed"
    assert "two\nlines" in line["error"]
    assert "run_id" not in line
    assert logger_of("talkative").filters == app.logger.filters
    assert len(app.logger.filters) == 1
