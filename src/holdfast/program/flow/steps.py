"""The steps of a flow, as an author writes them.

A step is a plain value: nothing happens when it is created. Its arguments are checked immediately, so that a mistake is
reported at the author's line. What concerns the whole tree is checked when the flow is registered (`definition.py`).

The author's functions get their own copy of the state. They are called once: what they return is recorded, and a replay
reads the record. So they may read the time or draw a random number, but they start nothing and wait for nothing.
"""

import inspect
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from typing import Any, Generic, Literal, Protocol, Self, TypeVar, get_args

from holdfast.core.keys import check_signal_name, require_step_name
from holdfast.errors import InvalidInput
from holdfast.program.definitions import (
    ActivityDefinition,
    ActivityOptions,
    CallOptions,
    ChildOptions,
    ClosePolicy,
    WorkflowDefinition,
    milliseconds,
)
from holdfast.program.signals import OnMisfit, check_on_misfit
from holdfast.program.tasks import Due, Escalation, TaskDetails

S = TypeVar("S")

ChorusPolicy = Literal["fail-fast", "fail-after-all", "partial"]
"""What a chorus does when a branch fails.

`fail-fast` cancels the other branches and fails. `fail-after-all` fails when every branch has ended. `partial` undoes
the failed branch and continues with the others; it fails only if no branch is left.
"""


class RegisteredActivity(Protocol):
    """What a flow needs from a registered activity."""

    definition: ActivityDefinition
    call_options: ActivityOptions
    call: CallOptions

    def options(self, **changes: Any) -> Self:
        """Return the same activity with other options."""
        ...


class RegisteredWorkflow(Protocol):
    """What a flow needs from a registered workflow."""

    definition: WorkflowDefinition
    call: ChildOptions

    def options(self, *, close_policy: ClosePolicy) -> Self:
        """Return the same workflow with another policy."""
        ...


class Step(Generic[S]):
    """A step of a flow with the state S, or a group of steps."""

    def __init__(self, step: str | None, default: str, condition: Callable[[S], Any] | None) -> None:
        self.step = _step_name(step, default)
        """The name of the step, the last part of its path. Empty for a scene without a name."""
        self.condition = condition
        """Called once with the state when the flow reaches the step; returns whether the step runs."""
        require_plain("condition", condition)


class Act(Step[S]):
    """Run an activity. It gets the state and returns the new one, or None if it is unchanged.

    If an activity does not take the state, `input` computes its argument from it, or, for several arguments, a dict of
    them. `apply` computes the new state from the old one and the activity's result. `compensate` undoes the step if the
    flow fails later: an activity, or an `Act` with an `input`, which gets the state after the step.

    The other options are those of `Activity.options`: retry, timeout, queue, idempotency_key, on_failure, secrets.
    """

    def __init__(
        self,
        activity: Callable[..., Any],
        *,
        step: str | None = None,
        input: Callable[[S], Any] | None = None,
        apply: Callable[[S, Any], S | None] | None = None,
        compensate: "Callable[..., Any] | Act[S] | None" = None,
        condition: Callable[[S], Any] | None = None,
        **options: Any,
    ) -> None:
        given: Any = activity
        if not isinstance(getattr(given, "definition", None), ActivityDefinition):
            name = getattr(given, "__qualname__", repr(given))
            raise InvalidInput(f"Act: {name} is not an activity: register the function with @app.activity")
        self.activity: RegisteredActivity = given.options(**options) if options else given
        super().__init__(step, self.activity.definition.name, condition)
        require_plain("input", input)
        require_plain("apply", apply)
        self.input = input
        self.apply = apply
        self.compensate = _compensation(self.step, compensate)


class Scene(Step[S]):
    """Steps in sequence. A scene without a name adds nothing to their paths."""

    def __init__(self, *steps: Step[S], step: str | None = None, condition: Callable[[S], Any] | None = None) -> None:
        super().__init__(step, "", condition)
        self.steps = _checked_steps("Scene", steps)
        if condition is not None and not self.step:
            raise InvalidInput("a Scene with a condition has a name: Scene(…, step='…')", field="step")


class Chorus(Step[S]):
    """Concurrent branches. Each starts with the state at the entry.

    Their changes are merged by field. If two branches change the same field, that is an error that names both, unless
    `merge` computes the new state: it gets the state at the entry, and the states of the successful branches by name.
    """

    def __init__(
        self,
        *branches: Step[S],
        on_failure: ChorusPolicy = "fail-fast",
        merge: Callable[[S, dict[str, S]], S | None] | None = None,
        step: str | None = None,
        condition: Callable[[S], Any] | None = None,
    ) -> None:
        super().__init__(step, "chorus", condition)
        self.branches = _checked_steps("Chorus", branches)
        if on_failure not in get_args(ChorusPolicy):
            known = ", ".join(get_args(ChorusPolicy))
            raise InvalidInput(f"on_failure of a Chorus is one of {known}, not {on_failure!r}", field="on_failure")
        for branch in self.branches:
            if not branch.step:
                raise InvalidInput("a Scene that is a branch of a Chorus has a name: Scene(…, step='…')", field="step")
        require_plain("merge", merge)
        self.on_failure = on_failure
        self.merge = merge


class Cue(Step[S]):
    """A choice. `choose` gets the state. With `cases` it returns the name of a case, otherwise true or false.

    False without `otherwise` changes nothing. A name that is not among the cases needs an `otherwise`.
    """

    def __init__(
        self,
        choose: Callable[[S], Any],
        *,
        then: Step[S] | None = None,
        otherwise: Step[S] | None = None,
        cases: Mapping[str, Step[S]] | None = None,
        step: str | None = None,
        condition: Callable[[S], Any] | None = None,
    ) -> None:
        super().__init__(step, "cue", condition)
        if choose is None:
            raise InvalidInput("Cue: its first argument is the function that chooses", field="choose")
        require_plain("choose", choose)
        if (then is None) == (cases is None):
            raise InvalidInput("a Cue has either `then` or `cases`", field="then")
        if cases is not None and (not cases or any(type(name) is not str for name in cases)):
            raise InvalidInput("the cases of a Cue are a dict of steps by their names", field="cases")
        self.choose = choose
        self.has_cases = cases is not None
        ways = dict(cases) if cases is not None else {"then": then}
        if "otherwise" in ways:
            raise InvalidInput("a case is not named 'otherwise': that is an argument of its own", field="cases")
        if otherwise is not None:
            ways["otherwise"] = otherwise
        self.ways = dict(zip(ways, _checked_steps("Cue", tuple(ways.values())), strict=True))
        """The steps by the name of the case; by `then` and `otherwise` if there are no cases."""


class Signal(Step[S]):
    """Wait for a signal. `on_receive` computes the new state from the old one and the payload, and is called once.

    After `timeout` the flow continues with the state that `on_timeout` returns; without `on_timeout` it fails. If an
    operator skips the wait, the flow continues in the same way, but without `on_timeout` it keeps the state. A payload
    that does not fit `kind` is refused when it is sent. If it was accepted before, it becomes a dead letter, or fails
    the step with `on_misfit="raise"`.
    """

    def __init__(
        self,
        name: str,
        kind: Any = None,
        *,
        on_receive: Callable[[S, Any], S | None] | None = None,
        timeout: timedelta | float | None = None,
        on_timeout: Callable[[S], S | None] | None = None,
        condition: Callable[[S], Any] | None = None,
        on_misfit: OnMisfit = "dead-letter",
        step: str | None = None,
    ) -> None:
        check_signal_name(name)
        super().__init__(step, name, condition)
        check_on_misfit(on_misfit)
        require_plain("on_receive", on_receive)
        require_plain("on_timeout", on_timeout)
        if on_timeout is not None and timeout is None:
            raise InvalidInput(f"signal {name!r}: on_timeout has no effect without a timeout", field="on_timeout")
        self.name = name
        self.kind = Any if kind is None else kind
        self.on_receive = on_receive
        self.timeout_ms = milliseconds(timeout)
        self.on_timeout = on_timeout
        self.on_misfit = on_misfit


class Task(Step[S]):
    """Ask a person, as `hf.task` does. `on_answer` computes the new state from the old one and the answer.

    With `approvals` or `of` it gets the list of the answers. `payload` is a value, or a function of the state.
    """

    def __init__(
        self,
        name: str,
        form: Any,
        *,
        on_answer: Callable[[S, Any], S | None] | None = None,
        payload: Any = None,
        roles: Sequence[str] = (),
        assignee: str | None = None,
        due: Due = None,
        route: str = "",
        task_type: str = "",
        remind: timedelta | None = None,
        escalate: Escalation | None = None,
        approvals: int = 1,
        of: int | None = None,
        condition: Callable[[S], Any] | None = None,
        step: str | None = None,
    ) -> None:
        self.details = TaskDetails(
            roles=roles,
            assignee=assignee,
            due=due,
            route=route,
            task_type=task_type,
            remind=remind,
            escalate=escalate,
            approvals=approvals,
            of=of,
        )
        self.details.check(name)
        super().__init__(step, name, condition)
        require_plain("on_answer", on_answer)
        if callable(payload):
            require_plain("payload", payload)
        self.name = name
        self.form = form
        self.on_answer = on_answer
        self.payload = payload


class Sleep(Step[S]):
    """Wait for a time: a timedelta, seconds, or a function of the state that returns either."""

    def __init__(
        self,
        duration: timedelta | float | Callable[[S], timedelta | float],
        *,
        step: str | None = None,
        condition: Callable[[S], Any] | None = None,
    ) -> None:
        super().__init__(step, "sleep", condition)
        if callable(duration):
            require_plain("duration", duration)
        elif milliseconds(duration) is None:
            raise InvalidInput("Sleep takes a timedelta or a number of seconds, not None", field="duration")
        self.duration = duration


class Child(Step[S]):
    """Run another workflow, of code or a flow, as a child and wait for it. Its arguments are those of `Act`."""

    def __init__(
        self,
        workflow: Callable[..., Any],
        *,
        input: Callable[[S], Any] | None = None,
        apply: Callable[[S, Any], S | None] | None = None,
        compensate: Callable[..., Any] | Act[S] | None = None,
        close_policy: ClosePolicy | None = None,
        condition: Callable[[S], Any] | None = None,
        step: str | None = None,
    ) -> None:
        given: Any = workflow
        if not isinstance(getattr(given, "definition", None), WorkflowDefinition):
            name = getattr(given, "__qualname__", repr(given))
            raise InvalidInput(f"Child: {name} is not a workflow: register it with @app.workflow or app.flow")
        self.workflow: RegisteredWorkflow = given if close_policy is None else given.options(close_policy=close_policy)
        super().__init__(step, self.workflow.definition.name, condition)
        require_plain("input", input)
        require_plain("apply", apply)
        self.input = input
        self.apply = apply
        self.compensate = _compensation(self.step, compensate)


def require_plain(what: str, function: Any) -> None:
    """Raise `InvalidInput` if the value is given and is not a plain function."""
    if function is None:
        return
    called = getattr(function, "__call__", None)  # noqa: B004
    if not callable(function) or inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(called):
        raise InvalidInput(f"{what} is a plain function, not {function!r}: it runs once, and is recorded", field=what)
    if isinstance(getattr(function, "definition", None), ActivityDefinition | WorkflowDefinition):
        raise InvalidInput(f"{what} is a plain function, not an activity or a workflow: use a step for it", field=what)


def _step_name(step: str | None, default: str) -> str:
    name: Any = default if step is None else step
    if step is None and name == "":
        return ""
    require_step_name("a step's name", name)
    if "/" in name or ":" in name:
        problem = f"a step's name may not contain / or :, and {name!r} does; give it another one with step='…'"
        raise InvalidInput(problem, field="step")
    return str(name)


def _checked_steps(what: str, steps: tuple[Any, ...]) -> tuple[Step[Any], ...]:
    if not steps:
        raise InvalidInput(f"a {what} has at least one step")
    for step in steps:
        if not isinstance(step, Step):
            given = getattr(step, "__qualname__", None) or repr(step)
            raise InvalidInput(f"{what}: {given} is not a step; wrap an activity in Act, a workflow in Child")
    return steps


def _compensation(step: str, given: Any) -> "Act[Any] | None":
    if given is None:
        return None
    act = given if isinstance(given, Act) else Act(given)
    if act.apply is not None or act.condition is not None or act.compensate is not None:
        problem = f"step {step!r}: its compensation is an activity with an input and options, and nothing else"
        raise InvalidInput(problem, field="compensate")
    return act
