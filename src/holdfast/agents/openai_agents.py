"""Durable agents of the OpenAI Agents SDK: each model call and each tool call is a step of the run.

The loop of the SDK runs in the workflow, with copies of the agent and of the agents that it hands off to. Their models
and tools are steps, and only the activities of those steps perform I/O. A recorded call is never repeated or paid for
again. The tracing and the retries of the SDK are off: Holdfast does both.
"""

from copy import copy
from dataclasses import replace
from typing import Any, Generic, TypeVar

from agents import (
    Agent,
    AgentOutputSchemaBase,
    ApplyPatchTool,
    ComputerTool,
    CustomTool,
    FunctionTool,
    Handoff,
    LocalShellTool,
    Model,
    ModelBehaviorError,
    ModelProvider,
    ModelResponse,
    ModelSettings,
    ModelTracing,
    MultiProvider,
    RunConfig,
    Runner,
    RunResult,
    ShellTool,
    Tool,
    ToolOutputFileContent,
    ToolOutputImage,
    ToolOutputText,
    Usage,
    UserError,
)
from agents.tool import set_function_tool_failure_error_function, with_function_tool_failure_error_handler
from agents.tool_context import ToolContext
from pydantic import TypeAdapter
from pydantic_core import from_json, to_jsonable_python

from holdfast.agents.steps import AgentSteps, Approval, Approvals, ToolOutcome, final_refusals
from holdfast.app import App
from holdfast.engine.activities.context import NonRetryable, stream
from holdfast.errors import ActivityFailed, InvalidInput
from holdfast.program.coroutine import current_program

Context = TypeVar("Context")

_settings = TypeAdapter(ModelSettings)
_response = TypeAdapter(ModelResponse)
_LOCAL = (ComputerTool, LocalShellTool, ShellTool, ApplyPatchTool, CustomTool)
"""Tools that the SDK itself executes in the process of its loop, which here is the workflow."""


class DurableAgent(Generic[Context]):
    """An agent whose runs are part of the workflow that calls `run`; so are those of the agents that it hands off to.

    It registers the activities `NAME.model` and `NAME.tool` with the app; `model` and `tool` are their options, such as
    `retry`, `timeout` and `queue`. With `stream` the text of the model is written to a stream of that name as it
    arrives.
    """

    def __init__(
        self,
        app: App,
        agent: Agent[Context],
        *,
        name: str = "",
        context_type: Any = Any,
        provider: ModelProvider | None = None,
        stream: str = "",
        approvals: Approvals | None = None,
        model: dict[str, Any] | None = None,
        tool: dict[str, Any] | None = None,
    ) -> None:
        """`approvals` is who decides about tool calls that need an approval; without it they become interruptions.

        `provider` finds models by name; the default is OpenAI's. `context_type` validates the context that tools
        receive.
        """
        self.agent = agent
        self.name = name or agent.name
        self._agents = _reachable(agent)
        self._provider = provider
        self._stream = stream
        self._approvals = approvals
        self._context: TypeAdapter[Context] = TypeAdapter(context_type)
        self._steps = AgentSteps(app, self.name, self._request, self._execute, model, tool)
        self._durable = self._copies()[agent.name]

    async def run(self, prompt: Any, *, context: Any = None, **options: Any) -> RunResult:
        """Run the agent in a workflow; `options` are those of `Runner.run`. Elsewhere it runs without being durable."""
        config = replace(options.pop("run_config", None) or RunConfig(), tracing_disabled=True)
        if config.model is not None:
            raise InvalidInput("the models of a durable agent are those of its agents", field="model")
        if config.model_settings is not None and config.model_settings.retry is not None:
            raise InvalidInput(_RETRIES, field="retry")
        if options.get("session") is not None:
            raise InvalidInput("a run keeps its own history: pass earlier messages as `input`", field="session")
        if current_program() is None:
            return await Runner.run(self.agent, prompt, context=context, run_config=config, **options)
        result = await self._play(prompt, context=context, run_config=config, **options)
        again = {name: value for name, value in options.items() if name in ("max_turns", "hooks", "error_handlers")}
        while result.interruptions and self._approvals is not None:
            state = result.to_state()
            for item in result.interruptions:
                arguments = from_json(item.arguments or "{}")
                approval = await self._approvals.ask(item.agent.name, item.tool_name or "", arguments)
                if approval.approved:
                    state.approve(item)
                else:
                    state.reject(item, rejection_message=approval.note or None)
            result = await self._play(state, run_config=config, **again)
        return result

    # --- called in the workflow

    async def _play(self, prompt: Any, **options: Any) -> RunResult:
        try:
            return await Runner.run(self._durable, prompt, **options)
        except UserError as problem:  # a tool that does not handle its failure fails the run, as any step does
            if isinstance(problem.__cause__, ActivityFailed):
                raise problem.__cause__ from None
            raise

    def _copies(self) -> dict[str, Agent[Any]]:
        """Return the agents as they run in a workflow, by name."""
        copies = {
            name: agent.clone(
                model=_DurableModel(self._steps, name),
                tools=[self._durable_tool(name, tool) for tool in agent.tools],
            )
            for name, agent in self._agents.items()
        }
        for agent in copies.values():
            agent.handoffs = [_handoff_to(each, copies) for each in agent.handoffs]
        return copies

    def _durable_tool(self, agent: str, tool: Tool) -> Tool:
        if not isinstance(tool, FunctionTool):
            return tool

        async def invoke(ctx: ToolContext[Any], arguments: str) -> Any:
            context = None if ctx.context is None else self._context.dump_python(ctx.context, mode="json")
            step = self._steps.tool.options(name=f"{agent}.{tool.name}")
            outcome = await step(agent, tool.qualified_name, arguments, ctx.tool_call_id, context)
            if outcome.kind == "retry":
                raise ModelBehaviorError(outcome.text)
            return outcome.result

        prepare = getattr(getattr(tool.on_invoke_tool, "_invoke_tool_impl", None), "__agents_prepare_arguments__", None)
        if prepare is not None:  # with it the SDK decides whether a call needs an approval
            vars(invoke)["__agents_prepare_arguments__"] = prepare
        durable = copy(tool)
        durable.on_invoke_tool = with_function_tool_failure_error_handler(invoke, lambda tool, error, text: None)
        return copy(durable)  # it binds what handles failures to this tool

    # --- called in activities

    async def _request(self, agent: str, asked: dict[str, Any]) -> Any:
        known = self._known(agent)
        arguments: dict[str, Any] = {
            "system_instructions": asked["instructions"],
            "input": asked["input"],
            "model_settings": _settings.validate_python(asked["settings"]),
            "tools": [_tool(known, tool["name"]) for tool in asked["tools"]],
            "output_schema": None if asked["output"] is None else _OutputSchema(asked["output"]),
            "handoffs": [Handoff(on_invoke_handoff=_not_here, **handoff) for handoff in asked["handoffs"]],
            "tracing": ModelTracing.DISABLED,
            "previous_response_id": asked["previous"],
            "conversation_id": asked["conversation"],
            "prompt": asked["prompt"],
        }
        model = known.model if isinstance(known.model, Model) else self._found(known.model)
        with final_refusals():
            response = await (self._streamed(model, arguments) if self._stream else model.get_response(**arguments))
        # As received, with its field names and without unset fields, because it is sent to the model again.
        return _response.dump_python(response, mode="json", by_alias=True, exclude_unset=True)

    async def _streamed(self, model: Model, arguments: dict[str, Any]) -> ModelResponse:
        """Call the model, and write its text to the stream as it arrives."""
        out, items = stream(self._stream), list[Any]()
        async for event in model.stream_response(**arguments):
            if event.type == "response.output_text.delta":
                await out.write(event.delta)
            elif event.type == "response.output_item.done":
                items.append(event.item)
            elif event.type == "response.completed":
                used, usage = event.response.usage, Usage(requests=1)
                if used is not None:
                    usage = Usage(
                        requests=1,
                        input_tokens=used.input_tokens,
                        output_tokens=used.output_tokens,
                        total_tokens=used.total_tokens,
                        input_tokens_details=used.input_tokens_details,
                        output_tokens_details=used.output_tokens_details,
                    )
                return ModelResponse(event.response.output or items, usage, event.response.id)
            elif event.type in ("response.failed", "response.incomplete", "error"):
                raise ModelBehaviorError(f"the model has not answered in full: {event.model_dump_json()}")
        raise ModelBehaviorError("the model's answer has no end")

    async def _execute(self, agent: str, name: str, arguments: str, call_id: str, context: Any) -> ToolOutcome:
        known = self._known(agent)
        tool = _tool(known, name)
        ctx: ToolContext[Any] = ToolContext(
            None if context is None else self._context.validate_python(context),
            tool_name=name,
            tool_call_id=call_id,
            tool_arguments=arguments,
            agent=known,
            run_config=RunConfig(tracing_disabled=True),
        )
        failing = set_function_tool_failure_error_function(
            copy(tool), None
        )  # the step retries, and then the SDK answers
        try:
            result = await copy(failing).on_invoke_tool(ctx, arguments)
        except ModelBehaviorError as problem:  # arguments that do not fit
            return ToolOutcome(text=str(problem), kind="retry")
        return ToolOutcome(_recordable(result, tool))

    def _known(self, agent: str) -> Agent[Any]:
        if agent not in self._agents:
            raise NonRetryable(f"durable agent {self.name!r} hands off to no agent {agent!r} here")
        return self._agents[agent]

    def _found(self, model: str | None) -> Model:
        if self._provider is None:
            self._provider = MultiProvider()
        return self._provider.get_model(model)


_RETRIES = "a durable agent leaves retries to its steps: DurableAgent(…, model={'retry': hf.Retry(…)})"


def _reachable(agent: Agent[Any]) -> dict[str, Agent[Any]]:
    """Return an agent and all agents it hands off to, by name; raise `InvalidInput` for what cannot be durable."""
    found: dict[str, Agent[Any]] = {}
    waiting = [agent]
    while waiting:
        each = waiting.pop()
        if each.name not in found:
            found[each.name] = each
            _check(each)
            waiting += [_target(handoff) for handoff in each.handoffs]
        elif found[each.name] is not each:
            raise InvalidInput(f"two agents have the name {each.name!r}: their steps would have the same names")
    return found


def _check(agent: Agent[Any]) -> None:
    if agent.mcp_servers:
        raise InvalidInput(f"agent {agent.name!r} has MCP servers: give it HostedMCPTool, or functions that call them")
    if agent.model_settings.retry is not None:
        raise InvalidInput(_RETRIES, field="retry")
    for tool in agent.tools:
        if isinstance(tool, _LOCAL):
            raise InvalidInput(f"tool {tool.name!r} of agent {agent.name!r} is run by the SDK: make it a function")
        inner: Any = getattr(tool, "_agent_instance", None)  # an agent as a tool, which is a single step
        asks = [each.name for each in getattr(inner, "tools", ()) if getattr(each, "needs_approval", False)]
        if asks:
            problem = f"tool {asks[0]!r} of agent {inner.name!r} needs an approval, and that agent is a tool"
            raise InvalidInput(f"{problem} of {agent.name!r}: hand off to it")


def _target(handoff: Agent[Any] | Handoff[Any, Any]) -> Agent[Any]:
    if isinstance(handoff, Agent):
        return handoff
    reference = getattr(handoff, "_agent_ref", None)
    target = None if reference is None else reference()
    if target is None:
        raise InvalidInput(f"handoff {handoff.tool_name!r} does not name its agent: create it with agents.handoff")
    return target


def _handoff_to(handoff: Agent[Any] | Handoff[Any, Any], copies: dict[str, Agent[Any]]) -> Any:
    """Return a handoff to the copy of its agent."""
    if isinstance(handoff, Agent):
        return copies[handoff.name]

    async def invoke(ctx: Any, arguments: str) -> Agent[Any]:
        return copies[(await handoff.on_invoke_handoff(ctx, arguments)).name]

    durable = copy(handoff)
    durable.on_invoke_handoff = invoke
    return durable


def _recordable(result: Any, tool: FunctionTool) -> Any:
    """Return the result of a tool as the SDK gives it to a model: JSON values, and anything else as text."""
    plain = (str, int, float, list, dict, ToolOutputText, ToolOutputImage, ToolOutputFileContent)
    if result is None or isinstance(result, plain) or tool.output_json_schema is not None:
        return to_jsonable_python(result)
    return str(result)


async def _not_here(*_: Any) -> Any:
    raise AssertionError("handoffs are the workflow's; a model only reads what they are")


def _tool(agent: Agent[Any], name: str) -> Any:
    for tool in agent.tools:
        if _name_of(tool) == name:
            return tool
    raise NonRetryable(f"agent {agent.name!r} has no tool {name!r} here")


def _name_of(tool: Tool) -> str:
    return str(tool.qualified_name if isinstance(tool, FunctionTool) else tool.name)


class _OutputSchema(AgentOutputSchemaBase):
    """The schema of an agent's output, as a model sees it."""

    def __init__(self, schema: dict[str, Any]) -> None:
        self._schema = schema

    def is_plain_text(self) -> bool:
        return bool(self._schema["plain"])

    def name(self) -> str:
        return str(self._schema["name"])

    def json_schema(self) -> dict[str, Any]:
        schema: dict[str, Any] = self._schema["schema"]
        return schema

    def is_strict_json_schema(self) -> bool:
        return bool(self._schema["strict"])

    def validate_json(self, json_str: str) -> Any:
        raise AssertionError("the workflow checks the output")


class _DurableModel(Model):
    """The model of an agent in the workflow. It opens nothing: its activity calls the model."""

    def __init__(self, steps: AgentSteps, agent: str) -> None:
        self._steps = steps
        self._agent = agent

    async def get_response(
        self,
        system_instructions: str | None,
        input: Any,
        model_settings: ModelSettings,
        tools: list[Tool],
        output_schema: AgentOutputSchemaBase | None,
        handoffs: list[Handoff[Any, Any]],
        tracing: ModelTracing,
        **options: Any,
    ) -> ModelResponse:
        asked = {
            "instructions": system_instructions,
            "input": to_jsonable_python(input),
            "settings": _settings.dump_python(model_settings, mode="json"),
            "tools": [_described_tool(tool) for tool in tools],
            "output": _described_output(output_schema),
            "handoffs": [_described_handoff(handoff) for handoff in handoffs],
            "previous": options["previous_response_id"],
            "conversation": options["conversation_id"],
            "prompt": to_jsonable_python(options["prompt"]),
        }
        step = self._steps.model.options(name=f"{self._agent}.model")
        answer = await step(self._agent, asked)
        return _response.validate_python(answer)

    def stream_response(self, *args: Any, **kwargs: Any) -> Any:
        raise InvalidInput("a durable agent answers as a whole; DurableAgent(…, stream=…) streams its text")


def _described_tool(tool: Tool) -> dict[str, Any]:
    """Return what is recorded about a tool: a changed description changes the request."""
    described: dict[str, Any] = {"name": _name_of(tool)}
    if isinstance(tool, FunctionTool):
        described |= {"description": tool.description, "schema": tool.params_json_schema}
    return described


def _described_handoff(handoff: Handoff[Any, Any]) -> dict[str, Any]:
    return {
        "tool_name": handoff.tool_name,
        "tool_description": handoff.tool_description,
        "input_json_schema": handoff.input_json_schema,
        "agent_name": handoff.agent_name,
        "strict_json_schema": handoff.strict_json_schema,
    }


def _described_output(schema: AgentOutputSchemaBase | None) -> dict[str, Any] | None:
    if schema is None:
        return None
    plain = schema.is_plain_text()
    return {
        "plain": plain,
        "name": schema.name(),
        "schema": {} if plain else schema.json_schema(),
        "strict": schema.is_strict_json_schema(),
    }


__all__ = ["Approval", "Approvals", "DurableAgent"]
