"""Checking new code against stored histories, before it is deployed."""

import asyncio
from collections.abc import Callable
from typing import Any

import pytest

import holdfast as hf
from holdfast.engine.check_histories import check_histories, check_store
from holdfast.engine.history import since_rotation
from tests.engine.harness import wait_for_event
from tests.program.core_run import CoreRun, start_core_run


def rounds(app: hf.App) -> Any:
    @app.activity
    async def work(number: int) -> int:
        return number

    @app.workflow
    async def order(number: int) -> None:
        await work(number)
        await hf.wait_signal("go", str)
        hf.continue_as_new(number + 1)

    return order


def other_rounds(app: hf.App) -> Any:
    @app.activity
    async def work(number: int) -> int:
        return number

    @app.workflow
    async def order(number: int) -> None:
        if number < 2:
            await hf.sleep(1)
        await work(number)
        await hf.wait_signal("go", str)
        hf.continue_as_new(number + 1)

    return order


def made(make: Callable[[hf.App], Any]) -> tuple[hf.App, Any]:
    app = hf.App("check")
    return app, make(app)


@pytest.mark.contract("WF-3", "CAN-1")
def test_only_what_a_node_would_replay_is_checked() -> None:
    run = CoreRun(*made(rounds), 0).start()
    other, _ = made(other_rounds)
    for prefix in ("", "1/", "2/"):
        run.complete(f"{prefix}work", 1)
        assert len(check_histories(other.registry, [run.events])) == (0 if prefix == "2/" else 1)
        run.send("go", "")
    assert check_histories(other.registry, [run.events]) == check_histories(run.app.registry, [run.events]) == []
    assert len(since_rotation(run.events)) == 2


@pytest.mark.contract("WF-3")
def test_a_missing_version_and_arguments_that_do_not_fit_are_problems() -> None:
    run = CoreRun(*made(rounds), 0).start()
    assert [problem.code for problem in check_histories(hf.App("empty").registry, [run.events])] == ["VersionMismatch"]

    async def order(name: str) -> None: ...

    app = hf.App("check")
    app.workflow(order)
    [problem] = check_histories(app.registry, [run.events])
    assert (problem.code, problem.run_seq, problem.expected) == ("NondeterminismError", 2, '{"number":0}')
    assert problem.found == "async def order(name: str) -> None"


@pytest.mark.contract("WF-3")
def test_runs_that_have_not_begun_or_have_ended_are_no_problem() -> None:
    async def short() -> int:
        return 1

    ended = start_core_run(short)
    waiting = CoreRun(*made(rounds), 0)
    assert check_histories(ended.app.registry, [ended.events, []]) == []
    assert check_histories(waiting.app.registry, [waiting.events]) == []


@pytest.mark.contract("WF-3")
async def test_the_runs_of_a_store_are_checked() -> None:
    store = hf.MemoryStore()
    app, order = made(rounds)
    async with app.node(store):
        runs = [await app.start(order, number) for number in (0, 1, 7)]
        for run in runs:
            await wait_for_event(run, "SignalWaiting")
    assert await check_store(app.registry, store) == []
    other, _ = made(other_rounds)
    problems = await check_store(other.registry, store)
    assert {problem.run_id for problem in problems} == {run.run_id for run in runs[:2]}
    assert {problem.run_seq for problem in problems} == {3}
    assert all("StartTimer" in problem.found and "'work'" in problem.expected for problem in problems)


@pytest.mark.contract("WF-3")
async def test_a_condition_that_exits_is_a_finding() -> None:
    """On a node it pauses its run. The check goes on with the next run."""
    is_broken = False

    async def order() -> None:
        looks = []

        def is_done() -> bool:
            looks.append(1)
            if is_broken and len(looks) > 1:  # the first look is the task's own
                raise SystemExit(3)
            return False

        timer = asyncio.create_task(hf.sleep(0.001))
        hf.on_update("look again", lambda: None)
        await hf.wait_until(is_done)
        await timer

    store, app = hf.MemoryStore(), hf.App("check")
    workflow = app.workflow(order)
    async with app.node(store):
        runs = [await app.start(workflow, run_id=run_id) for run_id in ("a", "b")]
        for run in runs:
            await wait_for_event(run, "TimerFired")
    assert await check_store(app.registry, store) == []
    is_broken = True
    found = await check_store(app.registry, store)
    assert [(each.run_id, each.code) for each in found] == [("a", "RunError"), ("b", "RunError")]
    assert all("SystemExit" in each.message for each in found)
