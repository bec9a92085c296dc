"""Values come back in the order in which they were given; only digests do not depend on it."""

import asyncio
import os
import subprocess
import sys
from dataclasses import dataclass
from enum import Enum
from typing import Any, Literal, NamedTuple, TypedDict

import pytest
from msgspec import Raw, Struct, json

import holdfast as hf
from holdfast.core import codec
from holdfast.core import events as e
from holdfast.core.messages import Actor
from holdfast.errors import Conflict, InvalidInput
from holdfast.program.schema import json_schema
from holdfast.program.tasks import check_with
from tests.engine.harness import EngineVariant, wait_for_event

GIVEN: dict[str, Any] = {"zeta": 1, "alpha": {"y": [{"b": 1, "a": 2}], "x": None}, "mid": [3, 1, 2], "0": {}}
TEXT = '{"zeta":1,"alpha":{"y":[{"b":1,"a":2}],"x":null},"mid":[3,1,2],"0":{}}'


class Size(Enum):
    """Choices in the order of sizes, not of letters."""

    SMALL = "small"
    MEDIUM = "medium"
    LARGE = "large"


class Shade(Enum):
    """The same choices, in another order."""

    LARGE = "large"
    SMALL = "small"
    MEDIUM = "medium"


class Extra(TypedDict):
    """Fields of a dict."""

    why: str
    amount: int


class Pair(NamedTuple):
    """Fields of a tuple."""

    second: int
    first: Literal["yes", "maybe", "no"]


@dataclass
class Part:
    """Fields of a dataclass."""

    weight: float
    colour: Shade


class Form(Struct):
    """What is asked for."""

    size: Size
    address: str
    priority: Literal["high", "low", 3, None]
    extra: Extra
    parts: list[Part]
    pair: Pair | None = None


@pytest.mark.contract("EVT-2")
def test_dicts_keep_their_order_and_sets_have_one() -> None:
    assert bytes(codec.encode(GIVEN)).decode() == TEXT
    assert bytes(codec.encode({"z": {"b", "a", "c"}, "a": [{"d": 1, "c": {3, 1, 2}}]})) == (
        b'{"z":["a","b","c"],"a":[{"d":1,"c":[1,2,3]}]}'
    )
    part = codec.encode({"parts": [Part(1.0, Shade.SMALL)], "of": frozenset({"y", "x"})})
    assert bytes(part) == b'{"parts":[{"weight":1.0,"colour":"small"}],"of":["x","y"]}'


@pytest.mark.contract("QUE-1", "SIG-5")
def test_digests_do_not_depend_on_the_order() -> None:
    again = {key: GIVEN[key] for key in reversed(GIVEN)}
    one, other = codec.encode(GIVEN), codec.encode(again)
    assert bytes(one) != bytes(other)
    assert codec.value_digest(one) == codec.value_digest(other)


@pytest.mark.process
@pytest.mark.contract("EVT-5")
def test_sets_are_written_alike_in_every_process() -> None:
    code = "from holdfast.core import codec; print(bytes(codec.encode({'z': {f'k{n}' for n in range(50)}, 'a': 1})))"
    said = {
        subprocess.run(
            [sys.executable, "-c", code], env={**os.environ, "PYTHONHASHSEED": seed}, capture_output=True, check=True
        ).stdout
        for seed in ("1", "2", "3")
    }
    assert len(said) == 1


@pytest.mark.contract("TSK-1")
def test_fields_and_choices_of_a_form_keep_their_order() -> None:
    schema = json.decode(codec.encode(json_schema(Form)))
    kinds = schema["$defs"]
    assert list(kinds["Form"]["properties"]) == ["size", "address", "priority", "extra", "parts", "pair"]
    assert kinds["Form"]["required"] == ["size", "address", "priority", "extra", "parts"]
    assert kinds["Size"]["enum"] == ["small", "medium", "large"]
    assert kinds["Shade"]["enum"] == ["large", "small", "medium"]
    assert kinds["Form"]["properties"]["priority"]["enum"] == ["high", "low", 3, None]
    assert list(kinds["Extra"]["properties"]) == ["why", "amount"]
    assert kinds["Extra"]["required"] == ["why", "amount"]
    assert "maybe" in str(schema)
    assert str(schema).index("'yes'") < str(schema).index("'maybe'") < str(schema).index("'no'")
    assert json_schema(Literal["b", "a"]) == {"enum": ["b", "a"]}


@pytest.mark.contract("TSK-1", "EVT-2")
async def test_every_value_of_a_run_comes_back_as_it_was_given(variant: EngineVariant) -> None:
    app = hf.App("orders")

    @app.activity
    async def echo(value: dict[str, Any]) -> dict[str, Any]:
        return value

    @app.workflow(signals={"go": dict[str, Any]})
    async def order(value: dict[str, Any]) -> list[str]:
        hf.on_query("state", lambda: value)
        values = [value, await echo(value), await hf.wait_signal("go")]
        values.append(await hf.task("approve", dict[str, Any], payload=value))
        return [bytes(codec.encode(each)).decode() for each in values]

    async with variant.node(app):
        run = await app.start(order, GIVEN, request_id="r-1")
        again = await app.start(order, {key: GIVEN[key] for key in reversed(GIVEN)}, request_id="r-1")
        assert again.run_id == run.run_id, "the same input, however it is written"
        with pytest.raises(Conflict):
            await app.start(order, {**GIVEN, "zeta": 2}, request_id="r-1")
        await wait_for_event(run, "SignalWaiting")
        sent = await run.signal("go", GIVEN, signal_id="s-1")
        assert await run.signal("go", dict(reversed(GIVEN.items())), signal_id="s-1") == sent
        await wait_for_event(run, "TaskCreated")
        assert str(await run.query("state")) == str(GIVEN)
        [task] = await app.tasks.list(run_id=run.run_id)
        assert bytes(task.payload).decode() == TEXT
        await app.tasks.complete(task.task_id, GIVEN, actor=Actor("ann"))
        assert await run.result() == [TEXT] * 4
        [queued] = [event.data for event in await run.events() if isinstance(event.data, e.RunQueued)]
        assert bytes(queued.input).decode() == f'{{"value":{TEXT}}}'


@pytest.mark.contract("TSK-1")
async def test_a_form_is_found_again_whatever_order_it_was_stored_in() -> None:
    app = hf.App("orders")

    @app.workflow
    async def order() -> bool:
        return (await hf.task("approve", Form)).size is Size.SMALL

    async with asyncio.timeout(60), app.node("memory://"):
        run = await app.start(order)
        await wait_for_event(run, "TaskCreated")
        [definition] = app.registry.workflows.values()
        [task] = await app.tasks.list(run_id=run.run_id)
        check = check_with(definition.forms)
        canonical = Raw(json.encode(json.decode(task.form), order="deterministic"))
        for form in (task.form, canonical):
            with pytest.raises(InvalidInput, match="fit"):
                check(form, Raw(b"{}"))
