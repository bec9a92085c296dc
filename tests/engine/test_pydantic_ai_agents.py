"""Durable agents of Pydantic AI: what is a step, what is recorded, who approves, and what a crash repeats."""

import asyncio
from typing import Any

import pytest
from pydantic_ai import Agent, ModelRetry, RunContext
from pydantic_ai.exceptions import UsageLimitExceeded
from pydantic_ai.messages import ModelMessage, ModelResponse, TextPart, ToolCallPart, ToolReturnPart
from pydantic_ai.models.function import AgentInfo, FunctionModel
from pydantic_ai.models.test import TestModel
from pydantic_ai.usage import UsageLimits

import holdfast as hf
from holdfast.agents.pydantic_ai import Approval, Approvals, DurableAgent
from holdfast.core.events import RunPaused
from holdfast.errors import InvalidInput
from holdfast.run import RunHandle
from holdfast.testing import explore
from tests.engine.harness import MOST_SECONDS, EngineVariant, wait_for_event

# A program that is dropped, to be replayed later, closes nothing: the library's queues within it are garbage then.
pytestmark = pytest.mark.filterwarnings("ignore:Unclosed <MemoryObject:ResourceWarning")
CLERK = hf.Actor("ann", roles=("clerk",))


async def script(messages: list[ModelMessage], info: AgentInfo) -> ModelResponse:
    """Look at the weather of two cities, then say what the tools have answered."""
    parts = [part for message in messages for part in message.parts if isinstance(part, ToolReturnPart)]
    results = [part for part in parts if str(part.content).startswith("sun")]
    if len(results) < 2:
        city = ("Oslo", "Rome")[len(results)]
        return ModelResponse([ToolCallPart("weather", {"city": city}, tool_call_id=f"call-{city}")])
    return ModelResponse([TextPart("; ".join(str(result.content) for result in results))])


def forecaster() -> tuple[hf.App, Any]:
    """Return an app with an agent that has a tool, and the workflow that runs it."""
    app = hf.App("agents")
    agent: Agent[None, str] = Agent(FunctionModel(script), name="forecaster")

    @agent.tool_plain
    async def weather(city: str) -> str:
        return f"sun in {city}"

    durable: DurableAgent[Any, Any] = DurableAgent(app, agent)

    @app.workflow
    async def forecast(question: str) -> str:
        return str((await durable.run(question)).output)

    return app, forecast


async def steps(run: RunHandle[Any]) -> list[str]:
    """Return the steps that a run has begun, in order."""
    return [event.step_id or "" for event in await run.events() if event.event_type in ("StepStarted", "TaskCreated")]


async def test_each_call_of_the_model_and_of_a_tool_is_a_step(variant: EngineVariant) -> None:
    app, forecast = forecaster()
    async with asyncio.timeout(MOST_SECONDS), variant.node(app):
        run = await app.start(forecast, "Where is the sun?")
        assert await run.result() == "sun in Oslo; sun in Rome"
        assert await steps(run) == [
            *("forecaster.model", "forecaster.weather", "forecaster.model#2", "forecaster.weather#2"),
            "forecaster.model#3",
        ]


def test_a_crash_repeats_nothing_that_was_recorded() -> None:
    app, forecast = forecaster()
    shown = explore(app, forecast, "Where is the sun?", repeatable=["forecaster.model", "forecaster.tool"])
    shown.assert_clean()
    first = shown.plays[0]
    assert first.calls == {"forecaster.model": 3, "forecaster.tool": 2}
    assert len(shown.plays) > 15
    for play in shown.plays[1:]:  # what had no record by then, and only that, is called again: once at most
        assert play.ending == first.ending
        assert sum(play.calls.values()) <= sum(first.calls.values()) + 1
        if play.point.startswith("after commit"):
            assert play.calls == first.calls, play
    assert any(play.point.startswith("after commit") for play in shown.plays), [play.point for play in shown.plays]


async def test_a_person_approves_calls_and_the_text_of_the_model_is_streamed(variant: EngineVariant) -> None:
    app = hf.App("agents")
    agent: Agent[str, str] = Agent(TestModel(), name="cashier", deps_type=str)
    paid: list[tuple[str, int]] = []

    @agent.tool(requires_approval=True)
    async def refund(ctx: RunContext[str], cents: int) -> str:
        paid.append((ctx.deps, cents))
        return "refunded"

    durable: DurableAgent[Any, Any] = DurableAgent(app, agent, stream="tokens", approvals=Approvals(roles=["clerk"]))

    @app.workflow
    async def serve(customer: str) -> str:
        return str((await durable.run("Please refund me.", deps=customer)).output)

    async with asyncio.timeout(MOST_SECONDS), variant.node(app):
        for approved, shown in ((True, '{"refund":"refunded"}'), (False, '{"refund":"too late"}')):
            run = await app.start(serve, "bob")
            await wait_for_event(run, "TaskCreated")
            [open_task] = await app.tasks.list(run_id=run.run_id, status="OPEN", actor=CLERK)
            assert bytes(open_task.payload) == b'{"agent":"cashier","tool":"refund","arguments":{"cents":0}}'
            assert paid == ([] if approved else [("bob", 0)])
            await app.tasks.complete(open_task.task_id, Approval(approved, "too late"), actor=CLERK)
            assert await run.result() == shown
            assert "".join([chunk.value async for chunk in run.stream("tokens")]) == shown
        assert paid == [("bob", 0)]


async def test_failures_retries_and_limits_are_those_of_library_and_steps(variant: EngineVariant) -> None:
    app, called = hf.App("agents"), list[str]()
    agent: Agent[None, str] = Agent(FunctionModel(script), name="forecaster", retries=2)

    @agent.tool_plain
    async def weather(city: str) -> str:
        called.append(city)
        if called.count(city) == 1:
            raise ConnectionError("the station is away")  # which the step retries
        if called.count(city) == 2:
            raise ModelRetry("ask again")  # which the model gets
        return f"sun in {city}"

    durable: DurableAgent[Any, Any] = DurableAgent(app, agent, tool={"retry": hf.Retry(max_attempts=3, initial_ms=1)})

    @app.workflow
    async def forecast(most: int) -> str:
        try:
            return str((await durable.run("?", usage_limits=UsageLimits(request_limit=most))).output)
        except UsageLimitExceeded:
            return "too many requests"

    async with asyncio.timeout(MOST_SECONDS), variant.node(app):
        assert await (await app.start(forecast, 9)).result() == "sun in Oslo; sun in Rome"
        assert called == ["Oslo"] * 3 + ["Rome"] * 3
        assert await (await app.start(forecast, 1)).result() == "too many requests"


async def test_another_prompt_than_the_recorded_one_is_a_divergence_that_names_the_step() -> None:
    store = hf.MemoryStore()

    def version(prompt: str) -> tuple[hf.App, Any]:
        app = hf.App("agents")
        durable: DurableAgent[Any, Any] = DurableAgent(app, Agent(TestModel(), name="helper"))

        @app.workflow
        async def helping() -> str:
            first = str((await durable.run(prompt)).output)
            await hf.wait_signal("go")
            return first

        return app, helping

    async with asyncio.timeout(MOST_SECONDS):
        app, helping = version("Be kind.")
        async with app.node(store):
            run = await app.start(helping, run_id="run-1")
            await wait_for_event(run, "SignalWaiting")
        app, _ = version("Be strict.")
        async with app.node(store):
            run = app.run("run-1")
            await run.signal("go")
            paused = (await wait_for_event(run, "RunPaused")).data
            assert isinstance(paused, RunPaused)
            assert paused.error is not None
            assert paused.error.code == "NondeterminismError"
            assert "helper.model" in paused.error.message
            assert "Be strict." in paused.error.message
        app, _ = version("Be kind.")
        async with app.node(store):
            run = app.run("run-1")
            await run.resume()
            assert await run.result() == "success (no tool calls)"


async def test_a_run_is_cancelled_in_the_middle_of_a_call_and_agents_that_cannot_be_durable_are_refused() -> None:
    app, asked = hf.App("agents"), asyncio.Event()

    async def endless(messages: list[ModelMessage], info: AgentInfo) -> ModelResponse:
        asked.set()
        await asyncio.Event().wait()
        raise AssertionError

    durable: DurableAgent[Any, Any] = DurableAgent(app, Agent(FunctionModel(endless), name="helper"))

    @app.workflow
    async def helping() -> str:
        return str((await durable.run("Hello.")).output)

    async with asyncio.timeout(MOST_SECONDS), app.node("memory://"):
        run = await app.start(helping)
        await asked.wait()
        await run.cancel()
        with pytest.raises(hf.errors.RunCancelled):
            await run.result()
    for bad in (Agent(TestModel()), Agent(name="bare")):
        with pytest.raises(InvalidInput):
            DurableAgent(app, bad)
    alone: DurableAgent[Any, Any] = DurableAgent(hf.App("alone"), Agent(TestModel(), name="helper"))
    assert (await alone.run("Hello.")).output == "success (no tool calls)"
