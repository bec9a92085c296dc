"""A run of a plan on the core alone, whose world is a test."""

import json
from typing import Any

from msgspec import Raw

from holdfast.app import App
from holdfast.core import codec
from holdfast.core import events as e
from holdfast.core.decide import queue_run
from holdfast.core.events import Event
from holdfast.core.messages import ActivityErrored, ActivitySucceeded, Actor, Control, TaskOperation, TaskRequest
from holdfast.core.state import RunState
from holdfast.core.timing import NO_RETRY
from holdfast.limits import Limits
from holdfast.program.plan.definition import PlanDefinition
from holdfast.program.plan.program import PlanProgram
from holdfast.program.port import Program
from holdfast.program.replay import Replay
from tests.program.core_run import BROKEN, BY, START, CoreRun


def plan_of(*steps: dict[str, Any], **fields: Any) -> bytes:
    """Return the text of a plan with these steps."""
    return json.dumps({"plan": "p", "version": "1", "steps": list(steps), **fields}).encode()


class PlanRun(CoreRun):
    """A run of a plan. Activities are not registered, so that any name and any input will do."""

    def __init__(
        self, body: bytes, inputs: Any = None, *, limits: Limits | None = None, app: App | None = None
    ) -> None:
        self.app = app or App("core")
        self.plan = PlanDefinition(body)
        self.limits = limits or Limits()
        self.now = START
        self.state = RunState(run_id="run-1")
        self.events: list[Event] = []
        self.mailbox = []
        self._sent = 0
        self._rotation = 0
        self.replay = Replay(self)
        queued = e.RunQueued("plan:p", self.plan.version, input=codec.encode(inputs or {}))
        first = queue_run("run-1", queued, self.now, BY)
        self._keep(first)
        [self._start] = first.messages
        self.handle(self._start)

    formers: tuple[e.FormerRun, ...] = ()

    def reach(self, run_seq: int | None, program: Program | None) -> None:
        raise AssertionError("no run of these tests is a fork")

    def replace_input(self, event: Event) -> None:
        raise AssertionError("no run of these tests is debounced")

    def __call__(self, event: Event) -> Program:
        given: Raw
        if isinstance(event.data, e.ContinuedAsNew):
            self._rotation += 1
            given = event.data.input
        else:
            queued = self.events[0].data
            assert isinstance(queued, e.RunQueued)
            given = queued.input
        return PlanProgram(self.plan, "run-1", given, self._rotation, 0, self.limits, self.app.registry)

    def again(self, since_rotation: bool = True) -> "PlanRun":
        """Return the same run, rebuilt from its history, since the last rotation or whole."""
        copy = PlanRun.__new__(PlanRun)
        copy.__dict__.update(self.__dict__)
        copy.events = list(self.events)
        copy.mailbox = list(self.mailbox)
        copy.replay = Replay(copy)
        starts = [n for n, event in enumerate(self.events) if isinstance(event.data, e.ContinuedAsNew)]
        if since_rotation and starts:
            copy._rotation = len(starts) - 1
            copy.replay.replay(self.events[starts[-1] :])
        else:
            copy._rotation = 0
            copy.replay.replay(self.events)
        return copy

    def attempt_of(self, step_id: str) -> int:
        return self.state.open_steps[step_id].logical_attempt_id

    def complete(self, step_id: str, value: Any = None) -> None:
        self.handle(ActivitySucceeded(step_id, self.attempt_of(step_id), codec.encode(value)))

    def fail(self, step_id: str, error: e.ErrorInfo = BROKEN) -> None:
        step = self.state.open_steps[step_id]
        failed = ActivityErrored(step_id, step.logical_attempt_id, step.engine_attempt_id, error, NO_RETRY)
        self.handle(failed)

    def answer(self, step_id: str, value: Any, actor: str = "ann") -> None:
        """Complete a task."""
        task_id = getattr(self.state.open_steps[step_id].body, "task_id")  # noqa: B009
        self._sent += 1
        request = TaskRequest(
            task_id=task_id,
            step_id=step_id,
            action="complete",
            actor=Actor(actor, ("ops", "boss")),
            answer=codec.encode(value),
        )
        self.handle(TaskOperation(id=f"t{self._sent}", request=request, problem=None, inbox_seq=self._sent, by=None))

    def ask(self, name: Any, step_id: str | None = None, **more: Any) -> None:
        """Send an operator's command."""
        self._sent += 1
        self.handle(
            Control(id=f"c{self._sent}", name=name, signal_id=f"c{self._sent}", actor="ann", step_id=step_id, **more)
        )

    def input_of(self, step_id: str) -> Any:
        body: Any = self.state.open_steps[step_id].body
        return codec.decode(getattr(body, "input", None) or body.payload, Any)

    def markers(self) -> dict[str, Any]:
        found = [event for event in self.events if isinstance(event.data, e.MarkerRecorded)]
        return {str(event.step_id): codec.decode(event.data.value, Any) for event in found}  # type: ignore[attr-defined]

    @property
    def status(self) -> str:
        return str(self.state.status)

    @property
    def rotations(self) -> int:
        return sum(isinstance(event.data, e.ContinuedAsNew) for event in self.events)
