"""What the adapters share: an agent's steps, approvals as tasks, and which errors of a provider are final.

An adapter registers the activities `NAME.model` and `NAME.tool`. The agent's loop runs in the workflow and calls them.
Everything specific to a library is in the module of its adapter.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, Literal

from msgspec import Struct

from holdfast.activity import Activity
from holdfast.app import App
from holdfast.engine.activities.context import NonRetryable, RetryAfter
from holdfast.errors import InvalidInput
from holdfast.program.tasks import task

_TEMPORARY = frozenset({408, 409, 425, 429})
"""Statuses that blame the request, but for a request that may succeed later."""


class Approval(Struct, frozen=True):
    """A person's decision about a tool call. If they refuse, the model gets `note`."""

    approved: bool
    """Whether the tool may be called."""
    note: str = ""


class Approvals(Struct, frozen=True, kw_only=True):
    """Who decides about tool calls, with the options of `hf.task`."""

    roles: Sequence[str] = ()
    """The roles that may decide."""
    assignee: str | None = None
    """The one person who may decide."""
    due: timedelta | None = None
    """How long until the task is overdue."""

    async def ask(self, agent: str, tool: str, arguments: Any) -> Approval:
        """Wait for the decision about a call. If an operator skips the task, the call is refused."""
        payload = {"agent": agent, "tool": tool, "arguments": arguments}
        given = await task(
            f"approve {tool}",
            Approval,
            payload=payload,
            roles=self.roles,
            assignee=self.assignee,
            due=self.due,
        )
        skipped: Approval | None = given
        return Approval(False, "an operator has skipped the approval") if skipped is None else skipped


class ToolOutcome(Struct, frozen=True):
    """The outcome of a tool call: its result, or what the model gets instead."""

    result: Any = None
    text: str = ""
    kind: Literal["result", "retry", "approval"] = "result"


class AgentSteps:
    """The activities of one durable agent."""

    def __init__(
        self,
        app: App,
        name: str,
        request: Callable[..., Any],
        execute: Callable[..., Any],
        model: dict[str, Any] | None,
        tool: dict[str, Any] | None,
    ) -> None:
        """Register `request`, which calls the model, and `execute`, which calls a tool, with the options of each."""
        if not name:
            raise InvalidInput("a durable agent has a name, which its steps begin with: Agent(…, name=…)", field="name")
        self.model: Activity[..., Any] = app.activity(name=f"{name}.model", **(model or {}))(request)
        self.tool: Activity[..., Any] = app.activity(name=f"{name}.tool", **(tool or {}))(execute)


@contextmanager
def final_refusals() -> Iterator[None]:
    """Inside this context, a final refusal by the provider of a model is not retried.

    The errors of the libraries have a `status_code`. The step waits as long as the provider asks for (`Retry-After`).
    """
    try:
        yield
    except Exception as problem:
        status = getattr(problem, "status_code", None)
        if not isinstance(status, int):
            raise
        if 400 <= status < 500 and status not in _TEMPORARY:
            raise NonRetryable(f"the provider of the model answers {status}: {problem}") from problem
        delay_s = _retry_after_s(problem)
        if delay_s is None:
            raise
        raise RetryAfter(delay_s, f"the provider of the model answers {status}: {problem}") from problem


def _retry_after_s(problem: BaseException | None) -> float | None:
    """Return how many seconds the provider wants to be left alone, if it gives a number."""
    while problem is not None:
        headers = getattr(getattr(problem, "response", None), "headers", None)
        text = str(headers.get("retry-after", "")) if headers is not None else ""
        if text.isascii() and text.isdigit():
            return float(text)
        problem = problem.__cause__
    return None
