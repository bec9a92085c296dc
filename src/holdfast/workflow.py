"""`Workflow` and `Flow`: what `@app.workflow` and `App.flow` return, and how a workflow starts others.

Calling one inside a workflow runs a child; `start` starts an independent run.
"""

import asyncio
from collections.abc import Coroutine, Generator, Mapping
from datetime import timedelta
from functools import update_wrapper
from typing import Any, Generic, NoReturn, ParamSpec, TypedDict, TypeVar, Unpack

from msgspec.structs import replace

from holdfast.core.debounce import Debounce
from holdfast.core.graph import Graph
from holdfast.core.keys import require_step_name
from holdfast.core.plans import PlanRef
from holdfast.core.timing import Retry
from holdfast.errors import InvalidInput, NotDurable
from holdfast.program.coroutine import CoroutineProgram, current_program, refuse_inside
from holdfast.program.definitions import (
    PLAIN_CHILD,
    CancelPolicy,
    ChildOptions,
    ClosePolicy,
    StartRequest,
    WorkflowDefinition,
    child_options,
    run_timeouts,
)
from holdfast.program.flow.definition import FlowDefinition
from holdfast.program.values import keywords_are_options, named
from holdfast.run import RunHandle, run_from_inside
from holdfast.store.types import ReusePolicy

P = ParamSpec("P")
R = TypeVar("R")
S = TypeVar("S")


class ChildCall(TypedDict, total=False):
    """How a child is called, and with which options it is started."""

    name: str
    """The name of its step, instead of the name of its workflow."""
    cancel: CancelPolicy
    """The effect of a cancellation while it is awaited: abandon it now, or cancel it and `wait` for its outcome."""
    close_policy: ClosePolicy
    """What happens to it when its parent ends."""
    attributes: Mapping[str, Any]
    """Its search attributes."""
    run_id: str
    tags: tuple[str, ...]
    priority: int
    """The order in which it is admitted, if its workflow has limits."""
    retry: Retry | None
    """How often it is started again, as another child, if it fails."""
    execution_timeout: timedelta | float
    run_timeout: timedelta | float
    cleanup_timeout: timedelta | float


class Workflow(Generic[P, R]):
    """A registered workflow. Start it with `App.start`. Call it inside another workflow to run it as a child."""

    def __init__(self, definition: WorkflowDefinition, call: ChildOptions = PLAIN_CHILD) -> None:
        self.definition = definition
        self.call = call
        """The options of the call of a child."""
        update_wrapper(self, definition.function)

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> Coroutine[Any, Any, R]:
        """Run it as a child inside a workflow, and wait for it. Elsewhere it raises `NotDurable`: see `plain`."""
        return self._program().run_child(self.definition, args, kwargs, self.call)

    def child(self, *args: P.args, **kwargs: P.kwargs) -> "ChildRun[R]":
        """Start it as a child inside a workflow without waiting. Await the returned object for the result."""
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
        """Call the function itself, for unit tests: activities are called directly, and nothing is recorded.

        Calls that need a run raise `NotDurable`: sleeping, waiting for signals, children. Use
        `holdfast.testing.TestNode` for those.
        """
        refuse_inside("plain", "call the workflow to run it as a child")
        return self.definition.function(*args, **kwargs)  # type: ignore[no-any-return]

    def options(self, **call: Unpack[ChildCall]) -> "Workflow[P, R]":
        """Return the same workflow with other options for children.

        - `close_policy`: what happens to a child when its parent ends.
        - `attributes`, `tags`, `priority`, `run_id`: as for `App.start`.
        - `name`: the name of its step.
        - `retry`: another child is started if it fails.
        - `cancel="wait"`: if the parent is cancelled while it waits for the child, it cancels the child and waits for
          its end. So the result is not lost.
        """
        return Workflow(self.definition, child_options(self.call, {**call}))


class ChildRun(Generic[R]):
    """A child that was started without waiting for it. Await it for its result."""

    def __init__(self, run_id: str, waiting: "asyncio.Task[R]") -> None:
        self.run_id = run_id
        """The id of the run; with a retry policy, of the first attempt."""
        self._waiting = waiting

    def __await__(self) -> Generator[Any, None, R]:
        return self._waiting.__await__()

    def done(self) -> bool:
        """Return whether its outcome is known."""
        return self._waiting.done()

    def cancel(self, reason: str = "") -> None:
        """Stop waiting for it. It is cancelled too, unless its `close_policy` abandons it."""
        self._waiting.cancel(reason or None)

    async def signal(self, name: str, payload: Any = None, *, signal_id: str | None = None) -> None:
        """Send it a signal, in the commit of the turn."""
        await run_from_inside(self.run_id).signal(name, payload, signal_id=signal_id)

    async def update(self, name: str, /, *, update_id: str | None = None, **arguments: Any) -> Any:
        """Send it an update, and wait for its answer."""
        return await run_from_inside(self.run_id).update(name, update_id=update_id, **arguments)


class Flow(Workflow[[S], S], Generic[S]):
    """A registered flow: a workflow that is a tree of steps around a state. See `App.flow`."""

    definition: FlowDefinition
    """Its tree of steps."""

    def options(self, **call: Unpack[ChildCall]) -> "Flow[S]":
        """Return the same flow with other options for children: see `Workflow.options`."""
        return Flow(self.definition, child_options(self.call, {**call}))

    def graph(self) -> Graph:
        """Return the tree as a graph."""
        return self.definition.graph()

    def mermaid(self) -> str:
        """Return the tree as a Mermaid flowchart."""
        return self.definition.graph().mermaid()


def refuse_child_options(workflow: Workflow[..., Any]) -> NoReturn:
    """Raise `InvalidInput`: an independently started workflow has options for children, which would be ignored."""
    name = workflow.definition.name
    raise InvalidInput(f"{name}.options(…) is for children: give tags, priority and the like to start")


def _tags(given: Any) -> tuple[str, ...]:
    if not isinstance(given, tuple | list):
        raise InvalidInput(f"tags are a tuple of strings, not {given!r}", field="tags")
    return tuple(given)


@keywords_are_options
async def start(
    workflow: Workflow[..., R] | PlanRef | str,
    *args: Any,
    arguments: Mapping[str, Any] | None = None,
    request_id: str | None = None,
    run_id: str | None = None,
    reference_key: str | None = None,
    tags: tuple[str, ...] = (),
    priority: int = 0,
    attributes: Mapping[str, Any] | None = None,
    workflow_version: str | None = None,
    execution_timeout: timedelta | float | None = None,
    run_timeout: timedelta | float | None = None,
    cleanup_timeout: timedelta | float | None = None,
    reuse: ReusePolicy | None = None,
    debounce: Debounce | None = None,
    **kwargs: Any,
) -> RunHandle[R]:
    """Start an independent run from inside a workflow: it is not a child, and continues when this run ends.

    Start a workflow or a flow with its arguments; by its name with keyword arguments; or a plan, by a `PlanRef`, with
    its inputs. The run has the same tenant, project and environment. It is started once, even after a crash: by its
    `request_id`, as with `App.start`, or by the step. If the start is refused, it raises `StartRefused`. `reuse` and
    `debounce` are those of `App.start`.
    """
    program = current_program()
    if program is None:
        raise NotDurable("hf.start can only be used inside a workflow; outside of one call app.start")
    request = StartRequest(
        request_id=request_id or "",
        run_id=run_id,
        reference_key=reference_key,
        tags=_tags(tags),
        priority=priority,
        attributes=None if attributes is None else dict(attributes),
        version=workflow_version,
        timeouts=run_timeouts(execution_timeout, run_timeout, cleanup_timeout),
        reuse=reuse,
        debounce=debounce,
    )
    values = program.definition.values
    if arguments is not None:
        arguments = named(arguments, args, kwargs)
        args, kwargs = ((arguments,), {}) if isinstance(workflow, PlanRef) else ((), arguments)
    if isinstance(workflow, PlanRef):
        if len(args) > 1 or kwargs:
            raise InvalidInput("a plan is started with its inputs: hf.start(PlanRef(…), {…})", field="inputs")
        request = replace(request, plan=workflow, input=values.encode(dict(args[0]) if args else {}))
    elif isinstance(workflow, str):
        if args:
            problem = f"workflow {workflow!r} is started by its name: give its arguments by name too"
            raise InvalidInput(problem, field="args")
        require_step_name("workflow", workflow)
        request = replace(request, workflow=workflow, input=values.encode(kwargs))
    else:
        if workflow.call != PLAIN_CHILD:
            refuse_child_options(workflow)
        definition = workflow.definition
        request = replace(request, workflow=definition.name, input=definition.signature.pack(args, kwargs))
        if definition.is_external:
            request = replace(request, version=definition.version)
    return run_from_inside(await program.start_run(request))
