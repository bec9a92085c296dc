"""Durable agents of the OpenAI Agents SDK: handoffs, approvals, tools that fail; and the SDK itself calls nobody."""

import asyncio
import threading
from typing import Any

import agents
import pytest
from agents import Agent, MaxTurnsExceeded, ModelProvider, ModelSettings, RunConfig, RunContextWrapper, function_tool
from agents.retry import ModelRetrySettings
from agents.testing import assistant_message, function_call
from agents.tracing import TracingProcessor
from pydantic import BaseModel

import holdfast as hf
from holdfast.agents.openai_agents import Approval, Approvals, DurableAgent
from holdfast.errors import InvalidInput
from holdfast.testing import explore
from tests.engine.agent_kits import CLERK, ScriptedModel
from tests.engine.harness import MOST_SECONDS, EngineVariant, wait_for_event
from tests.engine.test_durable_agents import steps


class Ticket(BaseModel):
    """What the billing agent answers with."""

    customer: str
    cents: int


def answers_of(given: Any) -> list[str]:
    """Return what tools have answered."""
    return [] if isinstance(given, str) else [str(item["output"]) for item in given if item.get("output") is not None]


def triage(app: hf.App, **options: Any) -> DurableAgent[Any]:
    """Return an agent that hands off to one for bills, which hands back: a circle."""

    async def route(given: Any) -> list[Any]:
        return [function_call("transfer_to_billing", {}, call_id="h-1")]

    async def settle(given: Any) -> list[Any]:
        if len(answers_of(given)) < 2:
            return [function_call("look_up", {"order": "o-1"}, call_id="c-1")]
        return [assistant_message(Ticket(customer="bob", cents=4200).model_dump_json())]

    @function_tool
    async def look_up(order: str) -> str:
        return f"{order} cost 4200 cents"

    billing: Agent[Any] = Agent("billing", model=ScriptedModel(settle), tools=[look_up], output_type=Ticket)
    front: Agent[Any] = Agent("triage", model=ScriptedModel(route), handoffs=[billing])
    billing.handoffs = [agents.handoff(front)]
    return DurableAgent(app, front, **options)


def handing_off() -> tuple[hf.App, Any]:
    """Return an app whose workflow runs the circle."""
    app = hf.App("support")
    durable = triage(app)

    @app.workflow
    async def support(question: str) -> str:
        result = await durable.run(question)
        ticket = result.final_output_as(Ticket, raise_if_incorrect_type=True)
        return f"{result.last_agent.name}: {ticket.customer} {ticket.cents}"

    return app, support


async def test_agents_that_are_handed_off_to_are_durable_too(variant: EngineVariant) -> None:
    app, support = handing_off()
    async with asyncio.timeout(MOST_SECONDS), variant.node(app):
        run = await app.start(support, "My bill?")
        assert await run.result() == "billing: bob 4200"
        assert await steps(run) == ["triage.model", "billing.model", "billing.look_up", "billing.model#2"]


def test_a_crash_repeats_no_handoff_that_was_recorded() -> None:
    app, support = handing_off()
    shown = explore(app, support, "My bill?", repeatable=["triage.model", "triage.tool"])
    shown.assert_clean()
    assert shown.plays[0].calls == {"triage.model": 3, "triage.tool": 1}
    for play in shown.plays[1:]:
        if play.point.startswith("after commit"):
            assert play.calls == shown.plays[0].calls, play


async def test_several_calls_at_once_are_decided_one_by_one(variant: EngineVariant) -> None:
    app, paid = hf.App("shop"), list[int]()

    async def script(given: Any) -> list[Any]:
        if not (said := answers_of(given)):
            return [function_call("refund", {"cents": cents}, call_id=f"c-{cents}") for cents in (50, 900, 700)]
        return [assistant_message("; ".join(sorted(said)))]

    async def is_much(ctx: RunContextWrapper[Any], given: dict[str, Any], call_id: str) -> bool:
        return bool(given["cents"] > 100)

    @function_tool(needs_approval=is_much)
    async def refund(cents: int) -> str:
        paid.append(cents)
        return f"refunded {cents}"

    agent: Agent[Any] = Agent("cashier", model=ScriptedModel(script), tools=[refund])
    durable: DurableAgent[Any] = DurableAgent(app, agent, approvals=Approvals(roles=["clerk"]))

    @app.workflow
    async def serve() -> str:
        return str((await durable.run("Refund it all.")).final_output)

    async with asyncio.timeout(MOST_SECONDS), variant.node(app):
        run = await app.start(serve)
        for approved in (True, False):
            await wait_for_event(run, "TaskCreated", times=1 if approved else 2)
            [task] = await app.tasks.list(run_id=run.run_id, status="OPEN", actor=CLERK)
            await app.tasks.complete(task.task_id, Approval(approved, "too much"), actor=CLERK)
        assert await run.result() == "refunded 50; refunded 900; too much"
        assert sorted(paid) == [50, 900]


async def test_without_approvals_a_call_that_needs_one_is_an_interruption() -> None:
    app = hf.App("shop")

    async def script(given: Any) -> list[Any]:
        return [function_call("refund", {}, call_id="c-1")]

    @function_tool(needs_approval=True)
    async def refund() -> str:
        raise AssertionError

    durable: DurableAgent[Any] = DurableAgent(app, Agent("cashier", model=ScriptedModel(script), tools=[refund]))

    @app.workflow
    async def serve() -> list[str]:
        result = await durable.run("Refund it.")
        return [str(item.tool_name) for item in result.interruptions]

    async with asyncio.timeout(MOST_SECONDS), app.node("memory://"):
        assert await (await app.start(serve)).result() == ["refund"]


async def test_a_tool_is_retried_by_its_step_and_its_last_failure_is_what_the_tool_makes_of_it(
    variant: EngineVariant,
) -> None:
    app, called = hf.App("shop"), list[str]()

    async def script(given: Any) -> list[Any]:
        said = answers_of(given)
        wanted = [("shaky", {}), ("broken", {}), ("picky", {"cents": "many"}), ("strict", {})]
        if len(said) < len(wanted):
            name, arguments = wanted[len(said)]
            return [function_call(name, arguments, call_id=f"c-{name}")]
        return [assistant_message("; ".join(said))]

    @function_tool
    async def shaky() -> str:
        called.append("shaky")
        if called.count("shaky") < 3:
            raise ConnectionError("the line is bad")
        return "at last"

    @function_tool(failure_error_function=lambda ctx, error: f"sorry: {type(error).__name__}")
    async def broken() -> str:
        called.append("broken")
        raise ConnectionError("the line is dead")

    @function_tool(failure_error_function=lambda ctx, error: "cents is a number")
    async def picky(cents: int) -> str:
        raise AssertionError

    @function_tool(failure_error_function=None)
    async def strict() -> str:
        raise ConnectionError("no line at all")

    agent: Agent[Any] = Agent("caller", model=ScriptedModel(script), tools=[shaky, broken, picky, strict])
    retry = hf.Retry(max_attempts=3, initial_ms=1)
    durable: DurableAgent[Any] = DurableAgent(app, agent, tool={"retry": retry})

    @app.workflow
    async def call(most: int) -> str:
        try:
            return str((await durable.run("Call them.", max_turns=most)).final_output)
        except MaxTurnsExceeded:
            return "too many turns"

    async with asyncio.timeout(MOST_SECONDS), variant.node(app):
        assert await (await app.start(call, 1)).result() == "too many turns"
        called.clear()
        run = await app.start(call, 9)
        with pytest.raises(hf.errors.RunFailed, match="no line at all"):
            await run.result()
        assert called == ["shaky"] * 3 + ["broken"] * 3
        asked = agent.model
        assert isinstance(asked, ScriptedModel)
        assert answers_of(asked.asked[-1]["input"]) == ["at last", "sorry: ActivityFailed", "cents is a number"]


async def test_the_sdk_traces_nothing_and_starts_no_thread_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[str] = []

    class Recorder(TracingProcessor):
        def on_trace_start(self, trace: Any) -> None:
            seen.append("trace")

        def on_trace_end(self, trace: Any) -> None:
            seen.append("trace")

        def on_span_start(self, span: Any) -> None:
            seen.append("span")

        def on_span_end(self, span: Any) -> None:
            seen.append("span")

        def shutdown(self) -> None: ...

        def force_flush(self) -> None: ...

    monkeypatch.setenv("OPENAI_API_KEY", "sk-test")
    agents.add_trace_processor(Recorder())
    app = hf.App("support")
    durable = triage(app, stream="tokens")
    before = set(threading.enumerate())

    @app.workflow
    async def support() -> str:
        return str((await durable.run("My bill?", run_config=RunConfig(workflow_name="bill"))).last_agent.name)

    async with asyncio.timeout(MOST_SECONDS), app.node("memory://"):
        assert await (await app.start(support)).result() == "billing"
        assert (await durable.run("My bill?")).last_agent.name == "billing", "outside of a workflow"
    assert seen == []
    assert not [thread.name for thread in set(threading.enumerate()) - before if "race" in thread.name.lower()]


async def test_the_model_is_asked_what_it_is_asked_without_durability(variant: EngineVariant) -> None:
    app = hf.App("shop")

    async def script(given: Any) -> list[Any]:
        if not answers_of(given):
            return [function_call("look_up", {"order": "o-1"}, call_id="c-1", item_id="i-1")]
        return [assistant_message("It is paid.")]

    @function_tool
    async def look_up(order: str) -> dict[str, Any]:
        return {"order": order, "paid": True}

    model = ScriptedModel(script)
    agent: Agent[Any] = Agent("helper", model=model, tools=[look_up])
    durable: DurableAgent[Any] = DurableAgent(app, agent)

    @app.workflow
    async def help_out() -> Any:
        return (await durable.run("Is it paid?")).to_input_list()

    async with asyncio.timeout(MOST_SECONDS), variant.node(app):
        said = await (await app.start(help_out)).result()
        durably, model.asked = [each["input"] for each in model.asked], []
        plain = await durable.run("Is it paid?")
    assert durably == [each["input"] for each in model.asked]
    assert said == plain.to_input_list()


async def test_the_model_gets_what_the_agent_has_and_is_found_by_its_name() -> None:
    app = hf.App("support")

    async def script(given: Any) -> list[Any]:
        return [assistant_message("Good day.")]

    model, names = ScriptedModel(script), list[str | None]()

    class Provider(ModelProvider):
        def get_model(self, model_name: str | None) -> Any:
            names.append(model_name)
            return model

    hosted = agents.WebSearchTool()
    agent: Agent[Any] = Agent(
        "helper",
        model="small",
        instructions=lambda ctx, agent: f"Greet {ctx.context}.",
        model_settings=ModelSettings(temperature=0.5, extra_args={"seed": 7}),
        tools=[hosted],
    )
    durable: DurableAgent[Any] = DurableAgent(app, agent, provider=Provider())

    @app.workflow
    async def greet(name: str) -> str:
        result = await durable.run("Hello!", context=name)
        return str(result.final_output)

    async with asyncio.timeout(MOST_SECONDS), app.node("memory://"):
        assert await (await app.start(greet, "bob")).result() == "Good day."
    [asked] = model.asked
    settings, tools = asked["model_settings"], asked["tools"]
    assert names == ["small"]
    assert asked["instructions"] == "Greet bob."
    assert (settings.temperature, settings.extra_args) == (0.5, {"seed": 7})
    assert tools == [hosted]


def test_what_cannot_be_durable_is_refused_where_it_is_named() -> None:
    @function_tool(needs_approval=True)
    async def refund() -> str:
        raise AssertionError

    def agent(name: str = "a", **options: Any) -> Agent[Any]:
        return Agent(name, **options)

    shell: Any = agents.LocalShellTool(executor=lambda request: "")
    asking = agent("inner", tools=[refund]).as_tool("inner", "asks")
    stray = agents.Handoff("go", "goes", {}, lambda ctx, arguments: None, "b")
    refused: list[tuple[Agent[Any], str]] = [
        (agent(""), "has a name"),
        (agent(tools=[shell]), "make it a function"),
        (agent(mcp_servers=[object()]), "MCP servers"),
        (agent(model_settings=ModelSettings(retry=ModelRetrySettings(max_retries=2))), "retries to its steps"),
        (agent(tools=[asking]), "hand off to it"),
        (agent(handoffs=[stray]), "does not name its agent"),
        (agent(handoffs=[agent()]), "would have the same names"),
    ]
    for each, why in refused:
        with pytest.raises(InvalidInput, match=why):
            DurableAgent(hf.App("alone"), each)


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ({"run_config": RunConfig(model="gpt-5")}, "models of a durable agent"),
        ({"run_config": RunConfig(model_settings=ModelSettings(retry=ModelRetrySettings(max_retries=1)))}, "retries"),
        ({"session": object()}, "keeps its own history"),
    ],
)
async def test_options_of_a_run_that_another_process_would_not_know_are_refused(
    options: dict[str, Any], why: str
) -> None:
    durable = triage(hf.App("alone"))
    with pytest.raises(InvalidInput, match=why):
        await durable.run("Hello.", **options)
