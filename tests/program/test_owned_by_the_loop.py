"""Tasks and async generators belong to the run's own loop: what it does with them is the same at every replay."""

import asyncio
import gc
from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest

import holdfast as hf
from tests.program.core_run import CoreRun


@pytest.mark.contract("WF-2")
@pytest.mark.parametrize("list_tasks", [asyncio.all_tasks, lambda: asyncio.all_tasks(asyncio.get_running_loop())])
def test_listing_all_tasks_is_refused(list_tasks: Callable[[], set[Any]]) -> None:
    app = hf.App("tasks", on_error="fail")

    @app.workflow
    async def lists() -> int:
        return len(list_tasks())

    error = CoreRun(app, lists).start().error
    assert error.code == "NotDurable"
    assert "keep your tasks in a list" in error.message


@pytest.mark.contract("WF-2")
def test_a_task_says_which_loop_it_is_of() -> None:
    app = hf.App("tasks", on_error="fail")

    @app.workflow
    async def asks() -> bool:
        task = asyncio.current_task()
        other = asyncio.create_task(asyncio.sleep(0))
        await asyncio.wait([other])
        await asyncio.shield(asyncio.create_task(asyncio.sleep(0)))
        return task is not None and task.get_loop() is asyncio.get_running_loop() is other.get_loop()

    assert CoreRun(app, asks).start().result is True


@pytest.mark.contract("WF-2")
async def test_who_lists_tasks_outside_is_not_disturbed_and_sees_none_of_a_run() -> None:
    app = hf.App("tasks")

    @app.workflow
    async def waits() -> None:
        await asyncio.gather(*(hf.wait_signal("go", str) for _ in range(5)))

    run = CoreRun(app, waits).start()
    assert asyncio.all_tasks() == {asyncio.current_task()}
    run.close()


@pytest.mark.contract("WF-2")
def test_the_current_task_is_the_runs_own() -> None:
    app = hf.App("tasks")

    @app.workflow
    async def looks() -> list[str]:
        async def name() -> str:
            task = asyncio.current_task()
            assert task is not None
            return task.get_name()

        return [await name(), await asyncio.create_task(name(), name="inner")]

    assert CoreRun(app, looks).start().result == ["looks", "inner"]


class Holder:
    """Refers to itself, so that only the collector frees it."""

    def __init__(self, held: Any) -> None:
        self.held = held
        self.me = self


def generating(collects: list[bool], *, in_a_cycle: bool) -> tuple[hf.App, Any]:
    """Return a workflow that drops a generator half-way; it is to be collected where `collects` says so."""
    app = hf.App("generators")

    @app.activity
    async def note(what: str) -> str:
        return what

    async def numbers() -> AsyncIterator[int]:
        try:
            yield 1
            yield 2
        finally:
            await note("closed")

    @app.workflow
    async def flow() -> str:
        generator: Any = numbers()
        await anext(generator)
        holder = Holder(generator) if in_a_cycle else None
        del generator, holder
        if collects.pop(0):
            gc.collect()
        return await note("on")

    return app, flow


@pytest.mark.contract("WF-2")
@pytest.mark.parametrize("collects", [(True, False), (False, True), (True, True), (False, False)])
def test_what_only_the_collector_finds_is_never_closed_in_the_middle(collects: tuple[bool, bool]) -> None:
    app, flow = generating(list(collects), in_a_cycle=True)
    run = CoreRun(app, flow).start()
    assert run.open == ["note"]
    replayed = run.replayed()
    replayed.complete("note", "on")
    assert replayed.result == "on"


@pytest.mark.contract("WF-2")
def test_what_is_dropped_is_closed_at_once() -> None:
    app, flow = generating([False, False], in_a_cycle=False)
    run = CoreRun(app, flow).start()
    assert run.open == ["note", "note#2"]
    assert run.replayed().open == ["note", "note#2"]
