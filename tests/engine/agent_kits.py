"""The same agent in each library that has an adapter: a cashier who looks up an order, refunds it, and says so.

Its model is a script: it asks for the tool `refund` until that has answered, and then repeats the answer. What was
called is noted in `Cashier.called`, so a test sees what a crash, a pause or another node has repeated.
"""

from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

from agents import Agent as OpenAIAgent
from agents import Model as OpenAIModel
from agents import ModelResponse as OpenAIResponse
from agents import RunContextWrapper, Usage, function_tool
from agents.testing import assistant_message, function_call
from msgspec import Struct, field
from pydantic_ai import Agent, RunContext
from pydantic_ai.messages import (
    ModelMessage,
    ModelMessagesTypeAdapter,
    ModelResponse,
    TextPart,
    ToolCallPart,
    ToolReturnPart,
    UserPromptPart,
)
from pydantic_ai.models.function import AgentInfo, DeltaToolCall, FunctionModel

import holdfast as hf
from holdfast.agents import openai_agents, pydantic_ai
from holdfast.agents.steps import Approvals

CLERK = hf.Actor("ann", roles=("clerk",))
STEPS = ["cashier.model", "cashier.refund", "cashier.model#2"]

Ask = Callable[[str, str, Any], Awaitable[tuple[str, Any]]]
"""Ask for a customer, with what was said before; return the answer, and all that was said."""


class Cashier(Struct):
    """An app, how to ask its agent, and what the agent's model and tool were called with."""

    app: hf.App
    ask: Ask
    called: list[str] = field(default_factory=list)


class Options(Struct):
    """How a test wants the agent."""

    approves: bool = False
    stream: str = ""
    model: dict[str, Any] = field(default_factory=dict)
    tool: dict[str, Any] = field(default_factory=dict)
    before_model: Callable[[], Awaitable[None]] | None = None
    before_tool: Callable[[], Awaitable[None]] | None = None
    settings: dict[str, Any] = field(default_factory=dict)


def of_pydantic_ai(options: Options) -> Cashier:
    """Return the cashier as an agent of Pydantic AI."""
    called: list[str] = []

    def said(messages: list[ModelMessage]) -> tuple[str, str | None]:
        """Return what was asked last, and what the tool has answered since."""
        asked, answer = "", None
        for part in (part for message in messages for part in message.parts):
            if isinstance(part, UserPromptPart):
                asked, answer = str(part.content), None
            elif isinstance(part, ToolReturnPart):
                answer = str(part.content)
        return asked, answer

    async def script(messages: list[ModelMessage], info: AgentInfo) -> ModelResponse:
        called.append("model")
        if options.before_model is not None:
            await options.before_model()
        asked, answer = said(messages)
        if answer is None:
            return ModelResponse([ToolCallPart("refund", {"order": asked}, tool_call_id=f"call-{asked}")])
        return ModelResponse([TextPart(answer)])

    async def streamed(messages: list[ModelMessage], info: AgentInfo) -> AsyncIterator[Any]:
        response = await script(messages, info)
        for index, part in enumerate(response.parts):
            if isinstance(part, ToolCallPart):
                yield {index: DeltaToolCall(part.tool_name, part.args_as_json_str(), tool_call_id=part.tool_call_id)}
            else:
                assert isinstance(part, TextPart)
                for word in part.content.split(" "):
                    yield word + " "

    agent: Agent[str, str] = Agent(
        FunctionModel(script, stream_function=streamed), name="cashier", deps_type=str, instructions="Be kind."
    )

    @agent.tool(requires_approval=options.approves)
    async def refund(ctx: RunContext[str], order: str) -> str:
        called.append(f"refund {order} of {ctx.deps}")
        if options.before_tool is not None:
            await options.before_tool()
        return f"refunded {order} of {ctx.deps}"

    app = hf.App("shop", **options.settings)
    durable: Any = pydantic_ai.DurableAgent(
        app,
        agent,
        stream=options.stream,
        approvals=Approvals(roles=["clerk"]),
        model=options.model,
        tool=options.tool,
    )

    async def ask(customer: str, question: str, before: Any) -> tuple[str, Any]:
        history = ModelMessagesTypeAdapter.validate_python(before) if before else None
        result = await durable.run(question, deps=customer, message_history=history)
        return str(result.output), ModelMessagesTypeAdapter.dump_python(result.all_messages(), mode="json")

    return Cashier(app, ask, called)


class ScriptedModel(OpenAIModel):
    """A model of the OpenAI Agents SDK that answers by a function of what it is asked."""

    def __init__(self, script: Callable[[Any], Awaitable[list[Any]]]) -> None:
        self.script = script
        self.asked: list[dict[str, Any]] = []

    async def get_response(self, system_instructions: Any, input: Any, *args: Any, **options: Any) -> OpenAIResponse:
        self.asked.append({"instructions": system_instructions, "input": input, "others": args, **options})
        return OpenAIResponse(await self.script(input), Usage(requests=1), None)

    async def stream_response(self, system_instructions: Any, input: Any, *args: Any, **options: Any) -> Any:
        from agents.testing import ScriptedModel as Streaming

        streaming = Streaming([await self.script(input)])
        async for event in streaming.stream_response(system_instructions, input, *args, **options):
            yield event


def of_openai_agents(options: Options) -> Cashier:
    """Return the cashier as an agent of the OpenAI Agents SDK."""
    called: list[str] = []

    async def script(given: Any) -> list[Any]:
        called.append("model")
        if options.before_model is not None:
            await options.before_model()
        asked, answer = "", None
        for item in [{"role": "user", "content": given}] if isinstance(given, str) else given:
            if item.get("role") == "user":
                asked, answer = str(item["content"]), None
            elif item.get("type") == "function_call_output":
                answer = str(item["output"])
        if answer is None:
            return [function_call("refund", {"order": asked}, call_id=f"call-{asked}")]
        return [assistant_message(answer)]

    @function_tool(needs_approval=options.approves, failure_error_function=None)
    async def refund(ctx: RunContextWrapper[str], order: str) -> str:
        called.append(f"refund {order} of {ctx.context}")
        if options.before_tool is not None:
            await options.before_tool()
        return f"refunded {order} of {ctx.context}"

    agent: OpenAIAgent[str] = OpenAIAgent(
        "cashier", instructions="Be kind.", model=ScriptedModel(script), tools=[refund]
    )
    app = hf.App("shop", **options.settings)
    durable: Any = openai_agents.DurableAgent(
        app,
        agent,
        context_type=str,
        stream=options.stream,
        approvals=Approvals(roles=["clerk"]),
        model=options.model,
        tool=options.tool,
    )

    async def ask(customer: str, question: str, before: Any) -> tuple[str, Any]:
        given = [*before, {"role": "user", "content": question}] if before else question
        result = await durable.run(given, context=customer)
        return str(result.final_output), result.to_input_list()

    return Cashier(app, ask, called)


KITS = {"pydantic_ai": of_pydantic_ai, "openai_agents": of_openai_agents}
