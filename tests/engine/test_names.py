"""One rule for the names of everything that becomes a step, wherever a name comes in."""

import asyncio
from collections.abc import Callable
from typing import Any

import pytest

import holdfast as hf
from holdfast.errors import InvalidInput
from tests.engine.harness import EngineVariant, event_types
from tests.program.core_run import CoreRun

GENERATED = ["approve#2", "approve#10", "1/approve", "12/x", "7", "update:abc", "patched:new", "cut:1", "approve:taken"]
"""What the engine itself calls steps: the second of a name, one after a rotation, an update, a marker."""

UNFIT: list[Any] = [*GENERATED, "go:skipped", "", " \n", "\x00", "\ud800", "x" * 201, "ü" * 101, None, 5, b"x", ["x"]]

WORDS: dict[str, Callable[[Any], Any]] = {
    "task": lambda name: hf.task(name, bool),
    "wait_signal": lambda name: hf.wait_signal(name),
    "signals": lambda name: hf.signals(name),
    "patched": lambda name: hf.patched(name),
    "on_query": lambda name: hf.on_query(name, lambda: None),
    "on_update": lambda name: hf.on_update(name, lambda: None),
}


@pytest.mark.contract("WF-2", "TSK-1")
@pytest.mark.parametrize("word", WORDS)
async def test_a_name_that_could_be_a_step_id_is_refused_inside_a_workflow_before_anything_is_stored(
    word: str, variant: EngineVariant
) -> None:
    app = hf.App("names")

    @app.workflow
    async def asks() -> list[str]:
        taken = []
        for name in UNFIT:
            try:
                found = WORDS[word](name)
                if hasattr(found, "__await__"):
                    await found
            except InvalidInput:
                continue
            taken.append(repr(name))
        return taken

    async with variant.node(app):
        run = await app.start(asks)
        assert await run.result() == []
        assert await event_types(run) == ["RunQueued", "RunStarted", "RunCompleted"]


@pytest.mark.contract("WF-2")
@pytest.mark.parametrize("name", UNFIT)
async def test_a_name_that_could_be_a_step_id_is_refused_outside_a_workflow(name: Any) -> None:
    app = hf.App("names")

    @app.workflow
    async def waits() -> None:
        await hf.wait_signal("go")

    async def function() -> None: ...

    if name is not None:
        with pytest.raises(InvalidInput):
            app.activity(name=name)(function)
        with pytest.raises(InvalidInput):
            app.workflow(name=name)(function)
    with pytest.raises(InvalidInput):
        app.activity(queue=name or None)(function)
    declared: Any = {5 if isinstance(name, list) else name: str}
    with pytest.raises(InvalidInput):
        app.workflow(name="declares", signals=declared)(function)
    async with app.node("memory://"):
        run: Any = await app.start(waits)
        with pytest.raises(InvalidInput):
            await run.signal(name)
        with pytest.raises(InvalidInput):
            await run.update(name)
        with pytest.raises(InvalidInput):
            await run.query(name)


@pytest.mark.contract("WF-2")
@pytest.mark.parametrize(
    "name", ["run", "cancel act", "answer act", "timer", "sleep", "send:go", "a/b", "go:maybe", "#2x"]
)
def test_other_names_are_taken_and_no_step_is_mixed_up_with_what_the_engine_writes(name: str) -> None:
    app = hf.App("names")

    @app.activity
    async def act() -> None: ...

    @app.activity(name=name)
    async def named() -> int:
        return 1

    @app.workflow
    async def mixes() -> Any:
        given_up = asyncio.ensure_future(act())
        await hf.sleep(1)
        given_up.cancel()
        return await named()

    run = CoreRun(app, mixes).start()
    run.fire("sleep")
    run.replayed()
    [step_id] = run.open
    run.replayed().complete(step_id, 2)
    run.complete(step_id, 2)
    assert run.result == 2
    run.replayed()


@pytest.mark.contract("WF-3", "API-2")
@pytest.mark.parametrize("name", ["lock:account", "plan:import", "a|b"])
def test_a_workflow_does_not_take_a_name_of_the_engines_own(name: str) -> None:
    """Its runs would be taken for those of a lock or a plan, or it could not be started."""
    app = hf.App("names")

    async def function() -> None: ...

    with pytest.raises(InvalidInput):
        app.workflow(name=name)(function)
    with pytest.raises(InvalidInput):
        app.external_workflow(name)
    with pytest.raises(InvalidInput):
        app.flow(name, dict, hf.Act(function))
    assert app.registry.workflow_names() == []


@pytest.mark.contract("WF-9", "API-2")
@pytest.mark.parametrize("name", ["a|b", "", "x" * 200, None, 5])
def test_a_lock_whose_workflow_could_not_be_started_is_refused(name: Any) -> None:
    with pytest.raises(InvalidInput):
        hf.App("names").lock(name)
