"""Whatever one run does, or is told, its node goes on: it is paused, or its step fails, and others are unharmed."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

import holdfast as hf
from holdfast.core.state import RunStatus
from holdfast.errors import InvalidInput, NotDurable, RunFailed
from tests.engine.harness import EngineVariant, wait_for_status


class Awkward(Exception):
    """An exception whose own code fails."""

    @property
    def code(self) -> str:
        return str(self.args[1])


def deep_group() -> BaseException:
    problem: BaseException = ValueError("at the bottom")
    for _ in range(2_000):
        problem = BaseExceptionGroup("deeper", [problem])
    return problem


async def condition_of_cancelled_task() -> None:
    task = asyncio.create_task(asyncio.sleep(1_000))
    await asyncio.sleep(0)
    task.cancel()
    await hf.wait_until(lambda: task.done() and bool(task.result()))


async def condition_that_rotates() -> None:
    await hf.wait_until(lambda: hf.continue_as_new())


async def condition_that_exits() -> None:
    def leave() -> bool:
        raise SystemExit(3)

    await hf.sleep(0.001)
    await hf.wait_until(leave)


async def awkward_error() -> None:
    raise Awkward("no second argument")


async def interrupt() -> None:
    raise KeyboardInterrupt


async def deep() -> None:
    raise deep_group()


POISONS = [
    condition_of_cancelled_task,
    condition_that_rotates,
    condition_that_exits,
    awkward_error,
    interrupt,
    deep,
]


@pytest.mark.contract("MSG-3", "INV")
@pytest.mark.parametrize("poison", POISONS, ids=lambda poison: poison.__name__)
async def test_no_workflow_ends_its_node(variant: EngineVariant, poison: Callable[[], Awaitable[None]]) -> None:
    app = hf.App("poison", on_error="fail")
    bad_workflow: Any = app.workflow(name="bad")(poison)  # type: ignore[arg-type]

    @app.workflow
    async def good() -> str:
        await hf.sleep(0.001)
        return "fine"

    async with variant.node(app) as node:
        bad = await app.start(bad_workflow)
        assert await (await app.start(good)).result() == "fine"
        async with asyncio.timeout(60):
            while await bad.status() not in (RunStatus.PAUSED, RunStatus.FAILED, RunStatus.CANCELLED):  # noqa: ASYNC110
                await asyncio.sleep(0.005)
        assert await (await app.start(good)).result() == "fine"
        assert node.failure is None


@pytest.mark.contract("MSG-3", "ACT-1")
@pytest.mark.parametrize("problem", [GeneratorExit(), KeyboardInterrupt(), Awkward("x"), deep_group()], ids=type)
async def test_whatever_an_activity_raises_its_step_fails(variant: EngineVariant, problem: BaseException) -> None:
    app = hf.App("poison")

    @app.activity(retry=hf.Retry(max_attempts=1))
    async def act() -> None:
        raise problem

    @app.activity(retry=hf.Retry(max_attempts=1))
    async def cancel_itself() -> None:
        task = asyncio.current_task()
        assert task is not None
        task.cancel()
        await asyncio.sleep(1)

    @app.workflow
    async def order() -> str:
        for call in (act, cancel_itself):
            with pytest.raises(hf.errors.ActivityFailed):
                await call()
        return "both failed"

    async with variant.node(app):
        assert await (await app.start(order)).result() == "both failed"


@pytest.mark.contract("MSG-3", "API-2")
async def test_bad_words_to_a_run_are_refused_and_not_stored(variant: EngineVariant) -> None:
    app = hf.App("poison")

    @app.workflow
    async def order() -> str:
        return await hf.wait_signal("go", str)

    async with variant.node(app):
        run = await app.start(order)
        bad: list[Callable[[], Awaitable[Any]]] = [
            lambda: run.cancel(None),  # type: ignore[arg-type]
            lambda: run.pause(5),  # type: ignore[arg-type]
            lambda: run.resume("x", actor=None),  # type: ignore[arg-type]
            lambda: run.update(5),  # type: ignore[arg-type]
            lambda: app.start(order, run_id=5),  # type: ignore[arg-type]
            lambda: app.start(order, request_id=5),  # type: ignore[arg-type]
            lambda: app.start(order, run_id="a/b"),
        ]
        for words in bad:
            with pytest.raises(InvalidInput):
                await words()
        await run.signal("go", "fine")
        assert await run.result() == "fine"


@pytest.mark.contract("WF-2")
@pytest.mark.parametrize("name", ["act#2", "1/act", "\ud800", "", "x" * 201, 5])
def test_a_name_that_could_be_a_step_id_is_refused(name: Any) -> None:
    app = hf.App("names")

    async def function() -> None: ...

    with pytest.raises(InvalidInput):
        app.activity(name=name or " \n")(function)
    with pytest.raises(InvalidInput):
        app.workflow(name=name or " \n")(function)


@pytest.mark.contract("WF-2")
async def test_what_would_be_done_again_on_every_replay_is_refused(variant: EngineVariant) -> None:
    app = hf.App("inside")

    @app.workflow
    async def child() -> None: ...

    @app.workflow
    async def order() -> list[str]:
        said = []
        for call in (lambda: app.start(child), lambda: app.run("x").result(), lambda: app.run("x").cancel()):
            try:
                await call()
            except NotDurable as problem:
                said.append(problem.message)
        return said

    async with variant.node(app):
        said = await (await app.start(order)).result()
        assert len(said) == 3
        assert "as a child" in said[0]


@pytest.mark.contract("ACT-1")
async def test_a_result_that_does_not_fit_is_refused_where_it_is_made(variant: EngineVariant) -> None:
    app = hf.App("results", on_error="fail")

    @app.activity(retry=hf.Retry(max_attempts=1))
    async def count() -> int:
        return "many"  # type: ignore[return-value]

    @app.workflow
    async def order() -> int:
        try:
            return await count()
        except hf.errors.ActivityFailed as failure:
            return str(failure.info.message)  # type: ignore[return-value]

    async with variant.node(app):
        run = await app.start(order)
        with pytest.raises(RunFailed, match="the result of workflow 'order' does not fit int"):
            await run.result()
        assert any("the result of activity 'count'" in str(event.data) for event in await run.events())


@pytest.mark.contract("ACT-1", "MSG-3")
@pytest.mark.parametrize("wrong", [3, None, {"max_attempts": 2}, "twice"], ids=["number", "nothing", "mapping", "text"])
def test_wrong_retries_are_refused_where_they_are_given(wrong: Any) -> None:
    app = hf.App("retries")
    with pytest.raises(InvalidInput, match="retry is a Retry"):
        app.activity(retry=wrong)(_nothing)
    act = app.activity(_nothing)
    with pytest.raises(InvalidInput, match="retry is a Retry"):
        act.options(retry=wrong)


async def _nothing() -> None: ...


@pytest.mark.contract("ACT-1")
def test_a_policy_is_checked_and_takes_exceptions_by_class() -> None:
    by_class: Any = (ValueError, "KeyError")
    assert hf.Retry(non_retryable=by_class).non_retryable == ("ValueError", "KeyError")
    wrongs: tuple[dict[str, Any], ...] = (
        {"max_attempts": 2.5},
        {"initial_ms": 0.5},
        {"max_attempts": "3"},
        {"non_retryable": "ValueError"},
        {"non_retryable": (5,)},
        {"factor": "2"},
    )
    for wrong in wrongs:
        with pytest.raises(InvalidInput):
            hf.Retry(**wrong)


@pytest.mark.parametrize(
    "wrong",
    [
        {"queues": "gpu"},
        {"queues": ("",)},
        {"lease_ms": 0},
        {"claim_runs": 1.5},
        {"activities_at_once": 0},
        {"cached_runs": -1},
        {"drain_s": -1},
        {"turn_s": "soon"},
    ],
    ids=str,
)
def test_wrong_options_of_a_node_are_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(InvalidInput, match=next(iter(wrong))):
        hf.NodeOptions(**wrong)


@pytest.mark.contract("OWN-3")
async def test_two_nodes_of_one_app_do_not_disturb_each_other() -> None:
    app = hf.App("two")

    @app.workflow
    async def order() -> str:
        await hf.sleep(0)
        await hf.sleep(-5)
        return "done"

    async with app.node("memory://"):
        async with app.node("memory://"):
            assert await (await app.start(order)).result() == "done"
        assert await (await app.start(order)).result() == "done"


@pytest.mark.contract("OWN-1")
async def test_who_is_only_connected_starts_and_waits_but_works_on_nothing(variant: EngineVariant) -> None:
    sender, worker = hf.App("sender"), hf.App("worker")

    async def order() -> str:
        return await hf.wait_signal("go", str)

    started = sender.workflow(order)
    worker.workflow(order)
    async with variant.opened() as store, sender.connect(store):
        run = await sender.start(started)
        await run.signal("go", "fine")
        assert await run.status() is RunStatus.PENDING
        async with variant.node(worker, store):
            assert await run.result() == "fine"


@pytest.mark.contract("ACT-1", "OWN-3")
async def test_an_activity_that_takes_its_node_along_again_and_again_fails_in_the_end() -> None:
    app = hf.App("deadly")

    has_begun = asyncio.Event()

    @app.activity(retry=hf.Retry(max_attempts=20))
    async def deadly() -> None:
        has_begun.set()
        await asyncio.Event().wait()

    @app.workflow
    async def order() -> str:
        try:
            await deadly()
        except hf.errors.ActivityFailed as failure:
            return str(failure.info.code)
        return "no"

    store = hf.MemoryStore()
    async with app.connect(store):
        run = await app.start(order)
    for _ in range(30):
        has_begun.clear()
        async with app.node(store, options=hf.NodeOptions(drain_s=0, safety_poll_s=0.05)):
            ended = asyncio.create_task(app.run(run.run_id).result())
            begun = asyncio.create_task(has_begun.wait())  # an attempt that was not begun does not count
            done, pending = await asyncio.wait({ended, begun}, timeout=60, return_when=asyncio.FIRST_COMPLETED)
            assert done
            for task in pending:
                task.cancel()
            await asyncio.wait(pending)
            if ended in done:
                break
    async with app.connect(store):
        await wait_for_status(app.run(run.run_id), RunStatus.COMPLETED)
        assert await app.run(run.run_id).result() == "NodeLost"
