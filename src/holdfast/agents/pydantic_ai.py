"""Durable agents of Pydantic AI: each model call and each tool call is a step of the run.

The agent's loop runs in the workflow, and only what performs I/O is an activity. A recorded call is never repeated or
paid for again. The adapter uses the hooks that the library provides: a wrapper around the model, one around the tools,
stable ids, and a handler for tool calls that need an approval.
"""

from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any, Generic, TypeVar

from msgspec import Struct
from pydantic import TypeAdapter
from pydantic_ai import Agent, ModelRetry
from pydantic_ai.agent import AgentRunResult
from pydantic_ai.capabilities import AbstractCapability
from pydantic_ai.exceptions import ApprovalRequired, CallDeferred
from pydantic_ai.messages import (
    ModelMessage,
    ModelMessagesTypeAdapter,
    ModelResponse,
    PartDeltaEvent,
    PartStartEvent,
    TextPart,
    TextPartDelta,
)
from pydantic_ai.models import Model, ModelRequestParameters, infer_model
from pydantic_ai.models.wrapper import WrapperModel
from pydantic_ai.settings import ModelSettings
from pydantic_ai.tools import DeferredToolRequests, DeferredToolResults, RunContext, ToolDenied
from pydantic_ai.toolsets import AbstractToolset, CombinedToolset, ToolsetTool, WrapperToolset
from pydantic_ai.usage import RunUsage
from pydantic_core import to_json, to_jsonable_python

from holdfast.agents.steps import AgentSteps, Approval, Approvals, ToolOutcome, final_refusals
from holdfast.app import App
from holdfast.engine.activities.context import NonRetryable, stream
from holdfast.errors import InvalidInput
from holdfast.program.api import now, uuid4
from holdfast.program.coroutine import current_program

Deps = TypeVar("Deps")
Output = TypeVar("Output")

_parameters = TypeAdapter(ModelRequestParameters)
_response = TypeAdapter(ModelResponse)


class DurableAgent(Generic[Deps, Output]):
    """An agent whose runs are part of the workflow that calls `run`.

    It registers the activities `NAME.model` and `NAME.tool` with the app; `model` and `tool` are their options, such as
    `retry`, `timeout` and `queue`. With `stream` the text of the model is written to a stream of that name as it
    arrives.
    """

    def __init__(
        self,
        app: App,
        agent: Agent[Deps, Output],
        *,
        name: str = "",
        stream: str = "",
        approvals: Approvals | None = None,
        model: dict[str, Any] | None = None,
        tool: dict[str, Any] | None = None,
    ) -> None:
        """`approvals` is who decides about tool calls that need an approval; without it they are the agent's output."""
        self.agent = agent
        self.name = name or agent.name or ""
        if agent.model is None:
            raise InvalidInput(f"agent {self.name!r} has no model; one that is given to a run is not known elsewhere")
        self._model: Model = infer_model(agent.model)
        self._stream = stream
        self._toolset: CombinedToolset[Deps] = CombinedToolset(list(agent.toolsets))
        self._deps: TypeAdapter[Deps] = TypeAdapter(agent.deps_type)
        self._steps = AgentSteps(app, self.name, self._request, self._execute, model, tool)
        self._capability: _Durability[Deps] = _Durability(self, approvals)

    async def run(self, prompt: Any = None, *, deps: Any = None, **options: Any) -> AgentRunResult[Output]:
        """Run the agent in a workflow; `options` are those of `Agent.run`. Elsewhere it runs without being durable."""
        if options.get("model") is not None:
            raise InvalidInput("the model of a durable agent is that of the agent", field="model")
        if current_program() is None:
            return await self.agent.run(prompt, deps=deps, **options)
        capabilities: Sequence[Any] = (*(options.pop("capabilities", None) or ()), self._capability)
        return await self.agent.run(prompt, deps=deps, capabilities=capabilities, **options)

    # --- called in the workflow

    async def request(self, messages: list[ModelMessage], settings: ModelSettings | None, parameters: Any) -> Any:
        """Call the model, as a step."""
        given = _without_times(ModelMessagesTypeAdapter.dump_python(messages, mode="json"))
        asked = to_jsonable_python(_parameters.dump_python(parameters, mode="json"))
        answer = await self._steps.model(given, to_jsonable_python(settings), asked)
        return _response.validate_json(to_json(answer))

    async def call(self, name: str, arguments: dict[str, Any], ctx: RunContext[Deps]) -> Any:
        """Call a tool, as a step with the tool's name."""
        about = {"call": ctx.tool_call_id, "retry": ctx.retry, "approved": ctx.tool_call_approved, "step": ctx.run_step}
        deps = self._deps.dump_python(ctx.deps, mode="json")
        step = self._steps.tool.options(name=f"{self.name}.{name}")
        outcome = await step(name, to_jsonable_python(arguments), about, deps)
        if outcome.kind == "retry":
            raise ModelRetry(outcome.text)
        if outcome.kind == "approval":
            raise ApprovalRequired
        return outcome.result

    # --- called in activities

    async def _request(self, messages: Any, settings: Any, parameters: Any) -> Any:
        given = ModelMessagesTypeAdapter.validate_python(messages)
        asked = _parameters.validate_json(to_json(parameters))
        with final_refusals():
            if not self._stream:
                response = await self._model.request(given, settings, asked)
            else:
                out = stream(self._stream)
                async with self._model.request_stream(given, settings, asked) as streamed:
                    async for event in streamed:
                        if text := _text_of(event):
                            await out.write(text)
                    response = streamed.get()
        return _response.dump_python(response, mode="json")

    async def _execute(self, name: str, arguments: Any, about: dict[str, Any], deps: Any) -> ToolOutcome:
        ctx: RunContext[Deps] = RunContext(
            deps=self._deps.validate_python(deps),
            model=self._model,
            usage=RunUsage(),
            agent=self.agent,
            tool_name=name,
            tool_call_id=about["call"],
            tool_call_approved=about["approved"],
            retry=about["retry"],
            run_step=about["step"],
        )
        async with self._toolset:
            tools = await self._toolset.get_tools(ctx)
            if name not in tools:
                raise NonRetryable(f"agent {self.name!r} has no tool {name!r} here")
            tool = tools[name]
            given = tool.args_validator.validate_json(to_json(arguments))
            try:
                result = await self._toolset.call_tool(name, given, ctx, tool)
            except ModelRetry as retry:
                return ToolOutcome(text=retry.message, kind="retry")
            except ApprovalRequired:
                return ToolOutcome(kind="approval")
            except CallDeferred as problem:
                raise NonRetryable(f"tool {name!r} defers its call: make it a step of the workflow") from problem
        return ToolOutcome(to_jsonable_python(result))


def _text_of(event: Any) -> str:
    if isinstance(event, PartStartEvent) and isinstance(event.part, TextPart):
        return str(event.part.content)
    if isinstance(event, PartDeltaEvent) and isinstance(event.delta, TextPartDelta):
        return str(event.delta.content_delta)
    return ""


def _without_times(messages: Any) -> Any:
    """Return the messages to a model without their timestamps, which differ at each replay."""
    for message in messages:
        if message["kind"] == "request":
            message.pop("timestamp", None)
            for part in message["parts"]:
                part.pop("timestamp", None)
    return messages


class _Durability(AbstractCapability[Deps]):
    """The capability that is added to a run of the agent."""

    def __init__(self, agent: DurableAgent[Deps, Any], approvals: Approvals | None) -> None:
        self._agent = agent
        self._approvals = approvals

    def get_default_run_id(self) -> str | None:
        return str(uuid4())

    def get_default_conversation_id(self, run_id: str) -> str | None:
        return run_id

    def get_run_clock(self) -> Callable[[], datetime] | None:
        return now

    def get_wrapper_model(self, model: Model) -> Model | None:
        return _DurableModel(model, self._agent)

    def get_wrapper_toolset(self, toolset: AbstractToolset[Deps]) -> AbstractToolset[Deps] | None:
        return _DurableToolset(toolset, self._agent)

    async def handle_deferred_tool_calls(
        self, ctx: RunContext[Deps], *, requests: DeferredToolRequests
    ) -> DeferredToolResults | None:
        if self._approvals is None:
            return None
        decided: dict[str, Any] = {}
        for call in requests.approvals:
            approval = await self._approvals.ask(self._agent.name, call.tool_name, call.args_as_dict())
            denied = ToolDenied(approval.note or ToolDenied.message)
            decided[call.tool_call_id] = True if approval.approved else denied
        return requests.build_results(approvals=decided)


class _Ready(Struct, frozen=True):
    """An awaitable whose value is already there. A program that is dropped meanwhile leaves nothing of it behind."""

    value: Any = None

    def __await__(self) -> Generator[Any, None, Any]:
        yield from ()
        return self.value


class _DurableModel(WrapperModel):
    """The model in the workflow. It opens nothing: its activity calls the model."""

    def __init__(self, model: Model, agent: DurableAgent[Any, Any]) -> None:
        super().__init__(model)
        self._agent = agent

    def __aenter__(self) -> Any:
        return _Ready(self)

    def __aexit__(self, *problem: Any) -> Any:
        return _Ready()

    async def request(
        self,
        messages: list[ModelMessage],
        model_settings: ModelSettings | None,
        model_request_parameters: ModelRequestParameters,
    ) -> ModelResponse:
        response: ModelResponse = await self._agent.request(messages, model_settings, model_request_parameters)
        return response

    def request_stream(self, *args: Any, **kwargs: Any) -> Any:
        raise InvalidInput("a durable agent answers as a whole; DurableAgent(…, stream=…) streams its text")


@dataclass
class _DurableToolset(WrapperToolset[Deps]):
    """The tools in the workflow."""

    agent: DurableAgent[Deps, Any]

    async def call_tool(
        self, name: str, tool_args: dict[str, Any], ctx: RunContext[Deps], tool: ToolsetTool[Deps]
    ) -> Any:
        return await self.agent.call(name, tool_args, ctx)


__all__ = ["Approval", "Approvals", "DurableAgent"]
