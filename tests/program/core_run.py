"""One run on the core alone: a real program and a real history, no node, no store, no time but what a test gives it.

A test says how the world answers (`complete`, `fail`, `fire`, `send`); it records events as an engine would, and
can at any moment rebuild the program from them (`replayed`).
"""

from collections.abc import Awaitable, Callable
from typing import Any

from msgspec import Raw
from msgspec.structs import replace

from holdfast.app import App
from holdfast.core import codec
from holdfast.core import events as e
from holdfast.core.decide import Input, apply_commands, decide, queue_run
from holdfast.core.event_writer import Decision, Refusal
from holdfast.core.events import EngineRunRef, ErrorInfo, Event
from holdfast.core.keys import inbox_uuid, signal_suffix
from holdfast.core.messages import (
    ActivityErrored,
    ActivitySucceeded,
    ChildOutcome,
    Control,
    ControlName,
    Message,
    Signal,
    Update,
)
from holdfast.core.state import RUNNING, RunState, fold, state_of
from holdfast.core.timing import NO_RETRY
from holdfast.engine.turns.execute import make_program
from holdfast.program.coroutine import CoroutineProgram
from holdfast.program.port import Program
from holdfast.program.replay import Replay
from holdfast.workflow import Workflow

START = 1_767_225_600_000_000  # 2026-01-01T00:00:00Z
SECOND = 1_000_000
BY = EngineRunRef("node-a", 1)
BROKEN = ErrorInfo("Broken", "it broke")


class CoreRun:
    """A run whose world is a test."""

    def __init__(
        self, app: App, workflow: Workflow[..., Any], *args: Any, run_id: str = "run-1", **kwargs: Any
    ) -> None:
        self.app = app
        self.now = START
        self.state = RunState(run_id=run_id)
        self.events: list[Event] = []
        self.mailbox: list[Signal] = []
        self._sent = 0
        self._rotation = 0
        self.replay = Replay(self)
        definition = workflow.definition
        packed = definition.signature.pack(args, kwargs)
        queued = e.RunQueued(definition.name, definition.version, input=packed)
        first = queue_run(run_id, queued, self.now, BY)
        self._keep(first)
        [self._start] = first.messages

    def start(self) -> "CoreRun":
        """Let the program begin."""
        self.handle(self._start)
        return self

    @property
    def program(self) -> CoroutineProgram:
        program = self.replay.program
        assert isinstance(program, CoroutineProgram)
        return program

    @property
    def open(self) -> list[str]:
        """The ids of the open steps, in the order in which they were opened."""
        return list(self.state.open_steps)

    @property
    def result(self) -> Any:
        """What the run returned; raises what it failed with."""
        body = self.events[-1].data
        assert isinstance(body, e.RunCompleted), body
        return codec.decode(body.result, Any)

    @property
    def error(self) -> ErrorInfo:
        """What the run failed with."""
        body = self.events[-1].data
        assert isinstance(body, e.RunFailed), body
        return body.error

    # --- what the world says

    def complete(self, step_id: str, value: Any = None) -> None:
        """Let an activity return."""
        self.handle(ActivitySucceeded(step_id, 1, codec.encode(value)))

    def fail(self, step_id: str, error: ErrorInfo = BROKEN) -> None:
        """Let an activity fail for good."""
        self.handle(ActivityErrored(step_id, 1, 1, error, NO_RETRY))

    def fire(self, step_id: str) -> None:
        """Let time pass until a timer is due."""
        step = self.state.open_steps[step_id]
        assert step.due_at is not None
        self.now = max(self.now, step.due_at)
        self.handle(self._message("TimerDue", step_id))

    def child_returns(self, step_id: str, value: Any = None, error: ErrorInfo | None = None) -> None:
        """Let a child end."""
        outcome = ChildOutcome(codec.encode(value), error)
        self.handle(replace(self._message("SubWorkflowCompleted", step_id), payload=codec.encode(outcome)))

    def send(self, name: str, payload: Any = None) -> None:
        """Send a signal."""
        self._sent += 1
        identity = inbox_uuid(self.state.run_id, self._sent)
        suffix = signal_suffix(self.now + self._sent, identity)
        self.mailbox.append(
            Signal(
                id=identity,
                run_id=self.state.run_id,
                name=name,
                signal_id=identity,
                inbox_seq=self._sent,
                suffix=suffix,
                accepted_at=self.now,
                payload=codec.encode(payload),
            )
        )
        self._offer()

    def update(self, update_id: str, name: str, **arguments: Any) -> None:
        """Send an update."""
        self.handle(Update(id=f"id-{update_id}", update_id=update_id, name=name, input=codec.encode(arguments)))

    def control(self, name: ControlName) -> None:
        """Send an operator's command."""
        self._sent += 1
        identity = inbox_uuid(self.state.run_id, self._sent)
        self.handle(Control(id=identity, name=name, signal_id=identity, actor="ann"))

    def handle(self, given: Input) -> None:
        """Tell the run something; its program goes as far as it can."""
        answer = decide(self.state, given, self.now, BY)
        assert isinstance(answer, Decision), answer
        self._absorb(answer)
        self._offer()

    # --- going back

    def replayed(self, app: App | None = None, events: list[Event] | None = None) -> "CoreRun":
        """Return the same run, rebuilt from its history; with other code if another app is given."""
        copy = CoreRun.__new__(CoreRun)
        copy.app = app or self.app
        copy.now = self.now
        copy.events = list(self.events) if events is None else list(events)
        copy.state = state_of(self.state.run_id, copy.events)
        copy.mailbox = list(self.mailbox)
        copy._sent = self._sent
        copy._rotation = 0
        copy._start = self._start
        copy.replay = Replay(copy)
        copy.replay.replay(copy.events)
        return copy

    def close(self) -> None:
        """Let go of the program."""
        self.replay.close()

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
        run = self.state.run_id, self.state.plan_id, self.state.plan_version, self.state.depth
        return make_program(self.app.registry, *run, given, self._rotation)

    def _absorb(self, answer: Decision) -> None:
        events = self._keep(answer)
        while events:
            commands = self.replay.advance(events.pop(0))
            if commands:
                applied = apply_commands(self.state, commands, self.now, BY)
                assert not isinstance(applied, Refusal), applied
                events += self._keep(applied)

    def _offer(self) -> None:
        position = 0
        while position < len(self.mailbox) and self.state.status is RUNNING:
            answer = decide(self.state, self.mailbox[position], self.now, BY)
            if isinstance(answer, Decision) and answer.events:
                del self.mailbox[position]
                self._absorb(answer)
                position = 0
            else:
                position += 1

    def _keep(self, answer: Decision) -> list[Event]:
        kept = [
            replace(event, run_seq=number, persisted_at=self.now)
            for number, event in enumerate(answer.events, self.state.version + 1)
        ]
        self.state = fold(self.state, kept)
        self.events += kept
        return kept

    def _message(self, kind: Any, step_id: str) -> Message:
        token = self.state.open_steps[step_id].token
        return Message(
            signal_id=f"{kind}:{token}",
            run_id=self.state.run_id,
            type=kind,
            occurred_at=self.now,
            waiting_token=token,
            step_id=step_id,
        )


def start_core_run(
    function: Callable[..., Awaitable[Any]], *args: Any, app: App | None = None, **kwargs: Any
) -> CoreRun:
    """Return a started run of a function that is registered for the purpose."""
    app = app or App("core", on_error="fail")
    return CoreRun(app, app.workflow(function), *args, **kwargs).start()  # type: ignore[arg-type]
