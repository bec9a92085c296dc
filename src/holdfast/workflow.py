"""`Workflow` and `Flow`: what `@app.workflow` and `App.flow` return. Inside a workflow, calling one runs a child."""

import asyncio
from collections.abc import Coroutine, Generator, Mapping
from datetime import timedelta
from functools import update_wrapper
from typing import Any, Generic, ParamSpec, TypedDict, TypeVar, Unpack

from holdfast.core.graph import Graph
from holdfast.core.timing import Retry
from holdfast.errors import NotDurable
from holdfast.program.coroutine import CoroutineProgram, current_program, refuse_inside
from holdfast.program.definitions import (
    PLAIN_CHILD,
    CancelPolicy,
    ChildOptions,
    ClosePolicy,
    WorkflowDefinition,
    child_options,
)
from holdfast.program.flow.definition import FlowDefinition
from holdfast.run import run_from_inside

P = ParamSpec("P")
R = TypeVar("R")
S = TypeVar("S")


class ChildCall(TypedDict, total=False):
    """How a child is called, and what it is started with."""

    name: str
    """What its step is called, instead of its workflow."""
    cancel: CancelPolicy
    """What a cancellation does while it is awaited: give it up at once, or cancel it and `wait` for its outcome."""
    close_policy: ClosePolicy
    """What becomes of it when its parent ends."""
    attributes: Mapping[str, Any]
    """Its search attributes."""
    run_id: str
    tags: tuple[str, ...]
    priority: int
    """The order in which it is admitted, if its workflow has limits."""
    retry: Retry | None
    """How often it is started again, as another child, when it has failed."""
    execution_timeout: timedelta | float
    run_timeout: timedelta | float
    cleanup_timeout: timedelta | float


class Workflow(Generic[P, R]):
    """A registered workflow. Start it with `App.start`; call it inside another workflow to run it as a child."""

    def __init__(self, definition: WorkflowDefinition, call: ChildOptions = PLAIN_CHILD) -> None:
        self.definition = definition
        self.call = call
        """How children are called."""
        update_wrapper(self, definition.function)

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> Coroutine[Any, Any, R]:
        """Run it as a child inside a workflow, and wait for it. Outside of one it raises `NotDurable`: see `plain`."""
        return self._program().run_child(self.definition, args, kwargs, self.call)

    def child(self, *args: P.args, **kwargs: P.kwargs) -> "ChildRun[R]":
        """Start it as a child inside a workflow, without waiting: await what this returns for the result."""
        run_id, waiting = self._program().start_child(self.definition, args, kwargs, self.call)
        return ChildRun(run_id, waiting)

    def _program(self) -> CoroutineProgram:
        program = current_program()
        if program is None:
            name = self.definition.name
            raise NotDurable(
                f"workflow {name!r} is called outside of a run, where nothing is durable: start it with "
                f"app.start({name}, …); a unit test calls {name}.plain(…)"
            )
        return program

    def plain(self, *args: P.args, **kwargs: P.kwargs) -> Coroutine[Any, Any, R]:
        """Call the function itself, for unit tests: activities are only called, and nothing is recorded.

        What needs a run raises `NotDurable` there: sleeping, waiting for signals, children. For those there is
        `holdfast.testing.TestNode`.
        """
        refuse_inside("plain", "call the workflow to run it as a child")
        return self.definition.function(*args, **kwargs)  # type: ignore[no-any-return]

    def options(self, **call: Unpack[ChildCall]) -> "Workflow[P, R]":
        """Return the same workflow with other options for children.

        `close_policy` is what becomes of one when its parent ends; `attributes`, `tags`, `priority` and `run_id` are
        what it is started with, and `name` is what its step is called. With `retry` another child is started when it
        has failed. With `cancel="wait"` a cancellation of the parent while it waits for the child cancels the child,
        waits until it has ended, and only then goes on: what the child returns is not lost.
        """
        return Workflow(self.definition, child_options(self.call, {**call}))


class ChildRun(Generic[R]):
    """A child that was started without waiting for it. Await it for its result."""

    def __init__(self, run_id: str, waiting: "asyncio.Task[R]") -> None:
        self.run_id = run_id
        """Its id; with a retry policy, that of the first attempt."""
        self._waiting = waiting

    def __await__(self) -> Generator[Any, None, R]:
        return self._waiting.__await__()

    def done(self) -> bool:
        """Return whether its outcome is known."""
        return self._waiting.done()

    def cancel(self, reason: str = "") -> None:
        """Give it up: it is cancelled too, unless it is abandoned."""
        self._waiting.cancel(reason or None)

    async def signal(self, name: str, payload: Any = None, *, signal_id: str | None = None) -> None:
        """Send it a signal, with the turn."""
        await run_from_inside(self.run_id).signal(name, payload, signal_id=signal_id)

    async def update(self, name: str, /, *, update_id: str | None = None, **arguments: Any) -> Any:
        """Send it an update, and wait for its answer."""
        return await run_from_inside(self.run_id).update(name, update_id=update_id, **arguments)


class Flow(Workflow[[S], S], Generic[S]):
    """A registered flow: a workflow that is written as a tree of steps around a state. See `App.flow`."""

    definition: FlowDefinition

    def options(self, **call: Unpack[ChildCall]) -> "Flow[S]":
        """Return the same flow with other options for children: see `Workflow.options`."""
        return Flow(self.definition, child_options(self.call, {**call}))

    def graph(self) -> Graph:
        """Return the tree as it is drawn."""
        return self.definition.graph()

    def mermaid(self) -> str:
        """Return the tree as a flowchart of Mermaid."""
        return self.definition.graph().mermaid()
