"""One run of a flow: outcomes in, commands out, as for a workflow of code.

The program walks the tree. A running group has a `Frame` with the state; an open step has an entry in `_open`. There is
no event loop: an outcome ends a step, and the walk continues from there until every branch waits.

**The author's functions** are called once. A marker of the step (`ship:condition`) records what they return, in the
turn in which it was needed; another marker (`ship:condition:error`) records an error. A replay reads the markers. What
an activity returns is in its own event, so a flow of plain activities has no markers.

**The state** is kept as JSON. It is decoded only for the author's functions, and anew for each call, so that they
cannot change it behind the flow's back.

**Failure.** An error propagates up to the chorus or the root that handles it. The root, or a `partial` chorus for one
branch, undoes what was completed there, in reverse order of completion; see `Undoing`. Once undoing has started,
nothing cancels it.

**Rotation.** The program rotates the history by itself when it is long, at any position: open steps are carried over.
The input of the next part is its position (`cursor.py`).
"""

import asyncio
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

from msgspec import UNSET, Raw

from holdfast.core import codec
from holdfast.core import commands as c
from holdfast.core import events as e
from holdfast.core.events import NULL, ErrorInfo, Event
from holdfast.core.instants import Instant
from holdfast.core.state import carried_steps
from holdfast.errors import (
    ActivityFailed,
    CallerError,
    ChildFailed,
    Conflict,
    InvalidInput,
    NondeterminismError,
    NotDurable,
    NotFound,
    RunawayWorkflow,
    RunError,
    UnhandledError,
)
from holdfast.limits import DURATION_MS, ERROR_TEXT_CHARS, EVENT_BYTES, NESTED_RUNS, Limits
from holdfast.program.definitions import (
    WorkflowDefinition,
    child_run_id,
    decode_options,
    encode_options,
    milliseconds,
)
from holdfast.program.flow.cursor import Frame, Position, Undoing, restored, saved
from holdfast.program.flow.definition import Call, FlowDefinition, Node
from holdfast.program.flow.merge import merged
from holdfast.program.flow.steps import Act, Child, Chorus, Cue, Signal, Sleep, Task
from holdfast.program.loop import Watch
from holdfast.program.outcomes import (
    Handler,
    Received,
    error_bytes,
    error_info,
    is_failure,
    recorded,
    unhandled,
)
from holdfast.program.read_only import read_only

_NO_MARKERS: Mapping[str, Raw] = MappingProxyType({})
_NO_STEPS: frozenset[str] = frozenset()

_MAY_REFUSE = frozenset({"on_receive", "on_timeout"})
"""The functions that may fail their step by raising."""

_HANDLED = Handler(lambda payload: payload, Any)
"""Stands for any function of the author: the history and the code have to agree on whether a signal has a handler."""

_Result = tuple[Raw, ErrorInfo | None]
"""The state after a step that has ended, and the error if it failed."""


class FlowProgram:
    """One run of a flow."""

    stream_writes = None
    """A flow writes to no streams: only its activities do."""

    __slots__ = (
        "_at",
        "_carried",
        "_commands",
        "_completed",
        "_depth",
        "_flow",
        "_handled",
        "_input",
        "_is_done",
        "_is_rotating",
        "_limits",
        "_not_before",
        "_now",
        "_rotation",
        "_run_id",
        "_size",
        "_steps",
        "_unrecorded",
        "_watch",
        "accepts_end",
        "definition",
        "handlers",
        "is_replaying",
        "kinds",
        "known_markers",
        "lost_waits",
        "problem",
        "seed",
    )

    def __init__(
        self,
        definition: FlowDefinition,
        run_id: str,
        input: Raw,
        rotation: int,
        depth: int,
        limits: Limits,
        turn_s: float | None,
    ) -> None:
        self.definition: WorkflowDefinition = definition
        self._flow = definition
        self.seed = f"{run_id}|{rotation}"
        self.is_replaying = False
        self.accepts_end = False
        self.problem: RunError | None = None
        self._unrecorded = ""
        self.known_markers = _NO_MARKERS
        self.lost_waits = _NO_STEPS
        self.handlers: dict[str, Any] = {}
        self.kinds: dict[str, Any] = {}
        self._run_id = run_id
        self._input = input
        self._rotation = rotation
        self._depth = depth
        self._limits = limits
        self._watch = Watch(turn_s, run_id, definition.name)
        self._now: Instant = 0
        self._commands: dict[str, c.Command] = {}
        self._at = Position(Frame(definition.root, None, NULL))
        self._is_done = False
        self._is_rotating = False
        self._completed: dict[str, Raw] = {}
        self._handled = 0
        self._carried = 0
        self._not_before = 0
        self._steps = 0
        self._size = 0

    # --- called by the engine

    def handle(self, event: Event) -> list[c.Command]:
        """Take an outcome, continue until every branch waits, and return the commands that were issued."""
        self._now = event.emitted_at
        if not self._is_done:
            self._handled += 1
            take = _ON_EVENT.get(type(event.data))
            if take is not None:
                try:
                    take(self, event)
                except UnhandledError as problem:
                    self.problem = problem
                    commands, self._commands = list(self._commands.values()), {}
                    return commands
                if not self._is_done:
                    self._rotate_if_long()
        commands, self._commands = list(self._commands.values()), {}
        return commands

    def arranged(self, outcomes: list[Event]) -> list[Event]:
        """Return outcomes with failures at the end, and a cancellation after them.

        Then what was completed during a pause is known before a failure cancels it, and is undone.
        """
        ended = (e.StepCompleted, e.ChildCompleted)
        self._completed = {
            outcome.step_id or "": outcome.data.result for outcome in outcomes if isinstance(outcome.data, ended)
        }
        return sorted(outcomes, key=lambda outcome: _TAKEN_LATE.get(type(outcome.data), 0))

    def defer(self, deferred: Mapping[int, bool]) -> None:
        """Do nothing: a flow answers no updates, so its end waits for none."""

    @property
    def takes_updates(self) -> bool:
        """Whether an update would be answered: yes, with a refusal."""
        return True

    @property
    def takes_signals(self) -> bool:
        """Whether the effect of a signal received now would be kept."""
        return not self._is_done

    def misfit_of(self, step_id: str, payload: Raw) -> str | None:
        """Return why a wait does not take this payload, or None. The text shows nothing of the payload."""
        if step_id not in self.kinds:
            return None
        try:
            self._flow.values.decode(payload, self.kinds[step_id])
            return None
        except InvalidInput as problem:
            where, reason = codec.explain_unfit(problem.__cause__ or problem)
            return f"payload{where}: {reason}"

    def receive(self, step_id: str, payload: Raw) -> Received | None:
        """Apply `on_receive` of a wait to a signal, and return the new state; None if the wait has none."""
        function = self.handlers.get(step_id)
        if function is None:
            return None
        node, frame = self._at.open[step_id]
        assert isinstance(node.step, Signal)
        assert frame is not None
        kind, state = node.step.kind, frame.state
        values = self._flow.values
        value, error = self._called(
            node.path, "on_receive", lambda: self._next_state(state, function, values.decode(payload, kind))
        )
        return Received(UNSET if error is not None else value, error)

    def refusal_of(self, name: str, input: Raw) -> ErrorInfo:
        """Return why an update is not accepted: a flow takes none."""
        return error_info(NotFound(f"run {self._run_id} takes no update {name!r}: it is a flow; send it a signal"))

    def query(self, name: str, arguments: Raw) -> Raw:
        """Answer the query `state`, the only one."""
        if name != "state":
            raise NotFound(f"run {self._run_id} answers no query {name!r}; it answers ['state']")
        self._flow.queries["state"].unpack(arguments)
        return codec.bounded(self.state, self._limits.value_bytes, "the state")

    @property
    def state(self) -> Raw:
        """The current state; in a chorus, the state at its entry."""
        return self._at.state

    def has_recorded_input(self, command: c.RunActivity | c.StartChild, recorded: Raw) -> bool:
        """Return whether a step takes the recorded input, regardless of its JSON formatting; at replay only."""
        call = self._call_of(command.step_id)
        if call is None or bytes(command.input) == bytes(recorded):
            return True
        try:
            taken = call.signature.unpack(recorded)
            return call.input is not None or taken == call.signature.unpack(command.input)
        except InvalidInput:  # parameters that were removed, or now have another type
            return False

    def _call_of(self, step_id: str) -> Call | None:
        node, _ = self._at.open.get(step_id, (None, None))
        return None if node is None else node.call

    def where(self, command: c.Command | None, event: Event | None = None) -> str:
        """Return which step issued the command, and how the tree differs from the history."""
        flow, nodes = self._flow, self._flow.nodes
        asked = nodes.get(_path_of(getattr(command, "step_id", "")))
        found = _path_of(event.step_id if event is not None and event.step_id else "")
        text = f" at flow {flow.name!r}, version {flow.version!r}" + (f", step {asked.path!r}" if asked else "")
        if found and found not in nodes:
            return f"{text}; the flow has no step {found!r} any more"
        if asked is not None and found and asked.number < nodes[found].number:
            return f"{text}; the flow now has {asked.path!r} before {found!r}, which the run has passed"
        return text

    def close(self) -> None:
        """Release everything."""
        self._at = Position(Frame(self._flow.root, None, NULL))
        self.handlers, self.kinds = {}, {}

    # --- rotation

    def _rotate_if_long(self) -> None:
        """Rotate the history if it is long, and at least twice the size of what has to be carried over."""
        step_id = f"cut:{self._rotation}:{self._handled}"
        if self.is_replaying:
            if step_id not in self.known_markers:
                return
        elif not self._is_rotating and not self._is_long():
            return
        cursor = saved(self._at)
        if len(cursor) > self._limits.value_bytes and not self._is_rotating:
            self._not_before = 2 * self._steps  # it may become smaller; until then only replay time is lost
            return
        self._is_rotating = True  # if there are several outcomes, the position after the last one counts
        self._commands[c.command_key(c.RecordMarker, step_id)] = c.RecordMarker(step_id=step_id, name="cut")
        self._commands[c.OF_THE_RUN] = c.ContinueAsNew(input=cursor, steps=tuple(self._at.open))

    def _is_long(self) -> bool:
        if self._steps < self._not_before:
            return False
        ended = self._carried + self._steps - len(self._at.open)
        if self._steps >= self._limits.rotation_steps and ended >= len(self._at.open):
            return True
        size = self._size + 2 * EVENT_BYTES * self._steps
        return size >= self._limits.rotation_bytes and size >= 2 * self._at.size and ended > 0

    # --- walking the tree

    def _enter(self, node: Node, frame: Frame) -> _Result | None:
        """Enter a step. Return its result if it ended immediately, or None if it is running."""
        step, state = node.step, frame.state
        if step.condition is not None:
            taken, error = self._recorded(node.path, "condition", lambda: self._holds(step.condition, state))
            if error is not None:
                return state, error
            if bytes(taken) != b"true":
                return state, None
        open_step = _OPEN.get(type(step))
        if open_step is not None:
            error = open_step(self, node, state)
            if error is not None:
                return state, error
            self._at.open[node.path] = node, frame
            self._steps += 1
            return None
        inner = Frame(node, frame, state)
        if isinstance(step, Chorus):
            self._at.frames[node.path] = inner
            return self._enter_branches(inner)
        if isinstance(step, Cue):
            error = self._choose(inner, step)
            if error is not None:
                return state, error
        self._at.frames[node.path] = inner
        return self._advance(inner)

    def _advance(self, frame: Frame) -> _Result | None:
        """Continue a scene or a cue until one of its steps is running."""
        steps = frame.steps
        while frame.position < len(steps):
            result = self._enter(steps[frame.position], frame)
            if result is None:
                return None
            if result[1] is not None:
                return self._leave(frame, result)
            frame.state = result[0]
            frame.position += 1
        return self._leave(frame, (frame.state, None))

    def _leave(self, frame: Frame, result: _Result) -> _Result:
        self._at.frames.pop(frame.node.path, None)
        return result

    def _ended(self, node: Node, frame: Frame | None, result: _Result) -> None:
        """Continue after a step has ended, and go up through the groups that end with it."""
        going: _Result | None = result
        while frame is not None and going is not None:
            if isinstance(frame.node.step, Chorus):
                going = self._branch_ended(frame, node, going)
            elif going[1] is not None:
                going = self._leave(frame, going)
            else:
                frame.state = going[0]
                frame.position += 1
                going = self._advance(frame)
            node, frame = frame.node, frame.parent
        if going is not None:
            self._end(going)

    def _end(self, result: _Result) -> None:
        """End the run: the root has ended."""
        state, error = result
        if error is not None:
            self._begin_undoing(Undoing(None, None, error), self._flow.root)
            return
        self._is_done = True
        self._commands[c.OF_THE_RUN] = c.CompleteRun(result=state)

    # --- groups

    def _choose(self, frame: Frame, cue: Cue[Any]) -> ErrorInfo | None:
        """Take one of the branches of a cue."""
        node, state = frame.node, frame.state
        chosen, error = self._recorded(node.path, "choice", lambda: self._choice(cue, state))
        if error is not None:
            return error
        way = codec.decode(chosen, str)
        if way and way not in node.ways:
            raise NondeterminismError(
                f"flow {self._flow.name!r}: the history has the choice {way!r} of step {node.path!r}; "
                f"the flow has {', '.join(node.ways)}",
                expected=f"choice {way!r} of step {node.path!r}",
                found=", ".join(node.ways),
                source=self._source(node.path),
            )
        frame.way = way
        frame.steps = node.ways[way] if way else ()
        return None

    def _choice(self, cue: Cue[Any], state: Raw) -> Raw:
        """Return the name of the chosen branch; empty if there is nothing to do."""
        chosen = cue.choose(self._decoded(state))
        if not cue.has_cases:
            way = "then" if chosen else "otherwise"
            return codec.encode(way if way in cue.ways else "")
        name = self._flow.values.encode(chosen)
        way = str(codec.decode(name, Any))
        if way in cue.ways and way != "otherwise":
            return codec.encode(way)
        if "otherwise" in cue.ways:
            return codec.encode("otherwise")
        raise InvalidInput(f"cue {cue.step!r} chooses {way!r}, and has {', '.join(cue.ways)}", field="choose")

    def _enter_branches(self, frame: Frame) -> _Result | None:
        for branch in frame.steps:
            result = self._enter(branch, frame)
            if result is not None:
                outcome = self._branch_ended(frame, branch, result)
                if outcome is not None:
                    return outcome
        return None

    def _branch_ended(self, frame: Frame, branch: Node, result: _Result) -> _Result | None:
        """Note that a branch has ended. Return the result of its chorus if that has ended as well."""
        chorus = frame.node.step
        assert isinstance(chorus, Chorus)
        state, error = result
        name = branch.step.step
        if error is None:
            frame.ended[name] = state
        elif chorus.on_failure == "fail-fast":
            return self._fail_chorus(frame, error)
        elif chorus.on_failure == "partial" and self._has_to_undo(branch):
            self._begin_undoing(Undoing(frame, branch, error), branch)
            return None
        else:
            frame.failed[name] = error
        return self._chorus_result(frame, chorus)

    def _chorus_result(self, frame: Frame, chorus: Chorus[Any]) -> _Result | None:
        """Return the result of a chorus if every branch has ended."""
        if len(frame.ended) + len(frame.failed) < len(frame.steps):
            return None
        if frame.failed and (chorus.on_failure != "partial" or not frame.ended):
            errors = [frame.failed[branch.step.step] for branch in frame.steps if branch.step.step in frame.failed]
            what = f"{len(errors)} branches of {frame.node.path!r} have failed"
            return self._leave(frame, (frame.state, _group_error(what, errors)))
        return self._leave(frame, self._merge(frame, chorus))

    def _merge(self, frame: Frame, chorus: Chorus[Any]) -> _Result:
        before = frame.state
        after = {
            branch.step.step: frame.ended[branch.step.step] for branch in frame.steps if branch.step.step in frame.ended
        }
        if chorus.merge is None:
            try:
                return merged(frame.node.path, before, after), None
            except Conflict as conflict:
                return before, error_info(conflict)
        merge = chorus.merge
        state, error = self._recorded(
            frame.node.path,
            "merge",
            lambda: self._next_state(before, merge, {name: self._decoded(each) for name, each in after.items()}),
        )
        return (before, error) if error is not None else (state, None)

    def _fail_chorus(self, frame: Frame, error: ErrorInfo) -> _Result:
        """Cancel what is running in a chorus, and fail it."""
        self._give_up(frame.node)
        return self._leave(frame, (frame.state, error))

    def _give_up(self, group: Node) -> None:
        """Cancel the open steps and frames of a group. Undoing continues."""
        for step_id, (node, frame) in list(self._at.open.items()):
            if frame is not None and node.is_in(group):
                if node.compensation is not None and step_id in self._completed:  # it has to be undone as well
                    after, _ = self._after(node, frame.state, self._completed[step_id])
                    self._at.undo.append((node, after))
                del self._at.open[step_id]
                self.handlers.pop(step_id, None)
                self.kinds.pop(step_id, None)
                if self._commands.pop(step_id, None) is None:
                    self._commands[c.command_key(c.CancelStep, step_id)] = c.CancelStep(step_id=step_id)
                else:
                    self._steps -= 1  # opened in the same turn: it leaves no trace
        for path, inner in list(self._at.frames.items()):
            if inner.node.is_in(group):
                del self._at.frames[path]

    # --- undoing

    def _has_to_undo(self, scope: Node) -> bool:
        under_way = (each.branch for each in self._at.undoing if each.branch is not None)
        known = (*(node for node, _ in self._at.undo), *(node for node, _ in self._at.strays), *under_way)
        return any(node.is_in(scope) for node in known)

    def _begin_undoing(self, undoing: Undoing, scope: Node) -> None:
        """Undo what was completed in a part of the tree. Undoing that is already running there becomes part of it."""
        undoing.left = [entry for entry in self._at.undo if entry[0].is_in(scope)]
        self._at.undo = [entry for entry in self._at.undo if not entry[0].is_in(scope)]
        for other in [each for each in self._at.undoing if each.branch is not None and each.branch.is_in(scope)]:
            self._at.undoing.remove(other)
            undoing.left += other.left
            undoing.open |= other.open
            undoing.failures += other.failures
        undoing.failures += [error for node, error in self._at.strays if node.is_in(scope)]
        self._at.strays = [stray for stray in self._at.strays if not stray[0].is_in(scope)]
        self._at.undoing.append(undoing)
        self._undo_next(undoing)

    def _undo_next(self, undoing: Undoing) -> None:
        """Undo the most recently completed of the remaining steps."""
        if undoing.open:
            return
        while undoing.left:
            done, state = undoing.left.pop()
            node = done.compensation
            assert node is not None
            error = self._run_activity(node, state)
            if error is None:
                self._at.open[node.path] = node, None
                self._steps += 1
                undoing.open.add(node.path)
                return
            undoing.failures.append(error)
        self._at.undoing.remove(undoing)
        self._undone(undoing)

    def _undone(self, undoing: Undoing) -> None:
        error = undoing.error
        if undoing.failures:
            first = error or ErrorInfo("CancelledError", "the run was cancelled")
            error = _group_error("what was done could not all be undone", [first, *undoing.failures])
        frame, branch = undoing.frame, undoing.branch
        if frame is None or branch is None:
            self._is_done = True
            self._commands[c.OF_THE_RUN] = c.CancelRun() if error is None else c.FailRun(error=error)
            return
        if (
            self._at.frames.get(frame.node.path) is not frame
        ):  # cancelled meanwhile: the rest waits for the flow's own undoing
            self._at.strays += [(branch, failure) for failure in undoing.failures]
            return
        chorus = frame.node.step
        assert isinstance(chorus, Chorus)
        assert error is not None
        if undoing.failures:  # no chorus continues when the remains of a branch are unknown
            outcome: _Result | None = self._fail_chorus(frame, error)
        else:
            frame.failed[branch.step.step] = error
            outcome = self._chorus_result(frame, chorus)
        if outcome is not None:
            self._ended(frame.node, frame.parent, outcome)

    def _compensated(self, node: Node, error: ErrorInfo | None) -> None:
        for undoing in self._at.undoing:
            if node.path in undoing.open:
                undoing.open.discard(node.path)
                if error is not None:
                    undoing.failures.append(error)
                self._undo_next(undoing)
                return

    # --- steps

    def _run_activity(self, node: Node, state: Raw) -> ErrorInfo | None:
        activity = node.activity
        assert activity is not None
        key = node.key
        input, error = self._input_of(node, state, f"the input of activity {activity.name!r}")
        if error is not None:
            return error
        if self.is_replaying and activity.key_function is not None:
            self._raise_recorded(node.path, "idempotency_key")
        if key is None and activity.key_function is not None and not self.is_replaying:
            # Computed once: if the history has the step, it has its key.
            found, error = self._called(node.path, "idempotency_key", lambda: codec.encode(activity.key_of(input)))
            if error is not None:
                return self._note_error(node.path, "input", error)
            key = codec.decode(found, str)
        queue, options = node.options.queue, node.encoded_options
        limited = activity.limited
        if limited is not None and not self.is_replaying:
            options, error = self._called(
                node.path, "limit", lambda: encode_options(limited.applied(node.options, input))
            )
            if error is not None:
                return self._note_error(node.path, "input", error)
            queue = decode_options(options).queue
        self._size += len(input)
        self._commands[node.path] = c.RunActivity(
            name=activity.name,
            input=input,
            step_id=node.path,
            queue=queue,
            idempotency_key=key,
            options=options,
        )
        return None

    def _start_child(self, node: Node, state: Raw) -> ErrorInfo | None:
        child = node.child
        assert child is not None
        assert isinstance(node.step, Child)
        input, error = self._input_of(node, state, f"the input of {child.name!r}")
        if error is not None:
            return error
        if self._depth >= NESTED_RUNS:
            return error_info(InvalidInput(f"runs are nested at most {NESTED_RUNS} deep"))
        self._size += len(input)
        self._commands[node.path] = c.StartChild(
            step_id=node.path,
            child_run_id=child_run_id(self._run_id, node.path),
            plan_id=child.name,
            plan_version=child.version,
            input=input,
            close_policy=node.step.workflow.call.close_policy,
            timeouts=node.step.workflow.call.timeouts,
        )
        return None

    def _input_of(self, node: Node, state: Raw, what: str) -> tuple[Raw, ErrorInfo | None]:
        """Return the arguments of a call. A replay does not compute them: the history has them."""
        call = node.call
        assert call is not None
        if call.input is None:
            input = call.with_state(state)
            if len(input) <= self._limits.value_bytes:
                return input, None
        if self.is_replaying:
            self._raise_recorded(node.path, "input")
            failed = self.known_markers.get(f"{node.path}:input:error")
            if failed is None:
                return NULL, None
            return NULL, self._note_error(node.path, "input", codec.decode(failed, ErrorInfo))
        given, error = self._called(node.path, "input", lambda: self._bounded(self._made_input(call, state), what))
        return given, None if error is None else self._note_error(node.path, "input", error)

    def _made_input(self, call: Call, state: Raw) -> Raw:
        return call.with_state(state) if call.input is None else call.with_value(call.input(self._decoded(state)))

    def _wait_signal(self, node: Node, state: Raw) -> ErrorInfo | None:
        step = node.step
        assert isinstance(step, Signal)
        until = None if step.timeout_ms is None else self._now + step.timeout_ms * 1_000
        self._commands[node.path] = c.WaitSignal(step_id=node.path, name=step.name, until=until)
        self._listen(node, step)
        return None

    def _listen(self, node: Node, step: Signal[Any]) -> None:
        if step.on_receive is not None:
            self.handlers[node.path] = step.on_receive
        if step.kind is not Any and step.on_misfit == "dead-letter":
            self.kinds[node.path] = step.kind

    def _ask(self, node: Node, state: Raw) -> ErrorInfo | None:
        step = node.step
        assert isinstance(step, Task)
        assert node.form is not None
        payload, error = self._value_of(node, "payload", lambda: self._payload(step, state))
        if error is not None:
            return error
        self._size += len(payload)
        self._commands[node.path] = step.details.command(node.path, step.name, node.form[0], payload, self._now)
        return None

    def _payload(self, step: Task[Any], state: Raw) -> Raw:
        given = step.payload(self._decoded(state)) if callable(step.payload) else step.payload
        return self._bounded(self._flow.values.encode(given), f"the payload of task {step.name!r}")

    def _sleep(self, node: Node, state: Raw) -> ErrorInfo | None:
        step = node.step
        assert isinstance(step, Sleep)
        duration: Any = step.duration
        if callable(duration):
            found, error = self._value_of(
                node, "duration", lambda: codec.encode(_sleep_ms(duration(self._decoded(state))))
            )
            if error is not None:
                return error
            duration_ms = codec.decode(found, int | None) or 0  # type: ignore[arg-type]
        else:
            duration_ms = milliseconds(duration) or 0
        self._commands[node.path] = c.StartTimer(step_id=node.path, due_at=self._now + duration_ms * 1_000)
        return None

    def _value_of(self, node: Node, what: str, make: Callable[[], Raw]) -> tuple[Raw, ErrorInfo | None]:
        """Return a value that the step's own event records, so that only an error needs a marker."""
        if self.is_replaying:
            self._raise_recorded(node.path, what)
            failed = self.known_markers.get(f"{node.path}:{what}:error")
            if failed is None:
                return NULL, None
            return NULL, self._note_error(node.path, what, codec.decode(failed, ErrorInfo))
        value, error = self._called(node.path, what, make)
        return value, None if error is None else self._note_error(node.path, what, error)

    # --- the author's functions

    def _decoded(self, state: Raw) -> Any:
        return codec.decode_with(self._flow.state_decoder, state)

    def _next_state(self, state: Raw, function: Callable[..., Any], *more: Any) -> Raw:
        """Return the state after a function: what it returned, or the state that it was given and may have changed."""
        given = self._decoded(state)
        returned = function(given, *more)
        after = self._flow.values.encode(given if returned is None else returned)
        self._decoded(after)
        return self._bounded(after, "the state")

    def _holds(self, condition: Any, state: Raw) -> Raw:
        return codec.encode(bool(condition(self._decoded(state))))

    def _bounded(self, raw: Raw, what: str) -> Raw:
        return codec.bounded(raw, self._limits.value_bytes, what)

    def _recorded(self, path: str, what: str, make: Callable[[], Raw]) -> tuple[Raw, ErrorInfo | None]:
        """Return what the history has; otherwise compute it and record it."""
        step_id = f"{path}:{what}"
        if not self.is_replaying:
            value, error = self._called(path, what, make)
        else:
            self._raise_recorded(path, what)
            known, failed = self.known_markers.get(step_id), self.known_markers.get(f"{step_id}:error")
            if known is None and failed is None:
                raise NondeterminismError(
                    f"flow {self._flow.name!r}: the history has no {what} of step {path!r}, which the run has "
                    f"passed; the flow now has one",
                    expected=f"no {what} of step {path!r}",
                    found=f"{what} of step {path!r}",
                    source=self._source(path),
                )
            value, error = known or NULL, None if failed is None else codec.decode(failed, ErrorInfo)
        if error is not None:
            return NULL, self._note_error(path, what, error)
        self._size += len(value)
        self._steps += 1
        self._commands[c.command_key(c.RecordMarker, step_id)] = c.RecordMarker(step_id=step_id, name=what, value=value)
        return value, None

    def _source(self, path: str) -> str:
        return f"flow {self._flow.name!r}, version {self._flow.version!r}, step {path!r}"

    def _note_error(self, path: str, what: str, error: ErrorInfo) -> ErrorInfo:
        step_id = f"{path}:{what}:error"
        self._steps += 1
        self._size += error_bytes(error)
        marker = c.RecordMarker(step_id=step_id, name=f"{what}:error", value=codec.encode(error))
        self._commands[c.command_key(c.RecordMarker, step_id)] = marker
        return error

    def _called(self, path: str, what: str, make: Callable[[], Raw]) -> tuple[Raw, ErrorInfo | None]:
        """Call a function of the author, read-only and under the watchdog.

        The step fails if the function's argument or result does not fit, if `on_receive` or `on_timeout` refuses by
        raising, or if the function raises what fails a run. Any other exception is a mistake in the code: it pauses the
        run, and is not recorded.
        """
        with read_only(f"{what} of step {path!r}"):
            try:
                return self._watch.run(make), None
            except (NotDurable, RunawayWorkflow):
                raise
            except (Exception, asyncio.CancelledError) as problem:
                is_refusal = what in _MAY_REFUSE and not isinstance(problem, RunError)
                if is_refusal or isinstance(problem, CallerError) or is_failure(problem, self._flow):
                    return NULL, error_info(problem)
                self._unrecorded = f"{path}:{what}:unhandled"
                raise unhandled(problem, f"{what} of step {path!r}") from problem

    def _raise_recorded(self, path: str, what: str) -> None:
        """Raise at replay if a function had raised an exception that paused the run, and the run was then cancelled."""
        if f"{path}:{what}:unhandled" in self.known_markers:
            self._unrecorded = f"{path}:{what}:unhandled"
            raise UnhandledError(f"{what} of step {path!r} raised when it was called")

    # --- outcomes

    def _go_on(self, event: Event) -> None:
        """Continue after a rotation: the steps that were open are still open."""
        assert isinstance(event.data, e.ContinuedAsNew)
        self._at = restored(self._input, self._flow, carried_steps(event.data))
        self._carried = len(self._at.open)
        for node, _ in self._at.open.values():
            if isinstance(node.step, Signal):
                self._listen(node, node.step)

    def _begin(self, event: Event) -> None:
        try:
            arguments = self._flow.signature.unpack(self._input)
        except InvalidInput as problem:
            reason = problem.__cause__ or problem
            raise NondeterminismError(
                f"event {event.run_seq}: the recorded state does not fit flow {self._flow.name!r}: {reason}",
                run_seq=event.run_seq,
                expected=bytes(self._input).decode(errors="replace")[:ERROR_TEXT_CHARS],
                found=f"flow {self._flow.name}{self._flow.signature}",
            ) from problem
        given = codec.decode(self._input, dict[str, Raw])["state"]
        if self.is_replaying:
            whole = self.known_markers.get(":state", given)
        else:
            whole = self._flow.values.encode(arguments["state"])
        if bytes(whole) != bytes(given):  # with defaults that the caller omitted: recorded, as they may differ
            self._commands[c.command_key(c.RecordMarker, ":state")] = c.RecordMarker(
                step_id=":state", name="state", value=whole
            )
        self._at.root.state = whole
        going = self._advance(self._at.root)
        if going is not None:
            self._end(going)

    def _cancel(self, event: Event) -> None:
        if self._at.is_cancelling:
            return
        self._at.is_cancelling = True
        if self.problem is not None:  # the walk stopped where a function raised: recorded for a replay
            marker = c.RecordMarker(step_id=self._unrecorded, name="unhandled")
            self._commands[c.command_key(c.RecordMarker, self._unrecorded)] = marker
            self.problem = None
        if any(undoing.frame is None for undoing in self._at.undoing):
            return  # the flow has failed, and undoes what it can
        self._give_up(self._flow.root)
        self._begin_undoing(Undoing(None, None, None), self._flow.root)

    def _closed(self, event: Event) -> tuple[Node | None, Frame | None]:
        """Return the step that an outcome belongs to; no node if the program no longer waits for it."""
        step_id = event.step_id or ""
        self.handlers.pop(step_id, None)
        self.kinds.pop(step_id, None)
        return self._at.open.pop(step_id, (None, None))

    def _returned(self, event: Event, result: Raw | None, *, is_skipped: bool = False) -> None:
        """Continue after an activity or a child has returned, or an operator has skipped any step."""
        node, frame = self._closed(event)
        if node is None:
            return
        if result is not None:
            self._size += len(result)
        if frame is None:
            self._compensated(node, None)
            return
        try:
            after = self._after(node, frame.state, result)
        except UnhandledError:
            if node.compensation is not None and not is_skipped:  # it was done, whatever becomes of its result
                self._at.undo.append((node, frame.state))
            raise
        if after[1] is None and node.compensation is not None and not is_skipped:
            self._at.undo.append((node, after[0]))
        self._ended(node, frame, after)

    def _after(self, node: Node, state: Raw, result: Raw | None) -> _Result:
        """Return the state after a step with this result; null changes nothing."""
        step = node.step
        if result is None:
            return state, None
        if isinstance(step, Act | Child) and step.apply is not None:
            apply, call = step.apply, node.call
            assert call is not None
            after, error = self._recorded(
                node.path, "apply", lambda: self._next_state(state, apply, call.signature.result_of(result))
            )
            return (state, error) if error is not None else (after, None)
        if not isinstance(step, Act | Child) or bytes(result) == b"null":
            return state, None
        try:
            self._decoded(result)
        except InvalidInput as problem:
            unfit = InvalidInput(f"step {node.path!r} returned no state: {problem.message}")
            return state, error_info(unfit)
        return result, None

    def _failed(self, event: Event, problem: Exception) -> None:
        node, frame = self._closed(event)
        if node is None:
            return
        error = error_info(problem)
        self._size += error_bytes(error)
        if frame is None:
            self._compensated(node, error)
        else:
            self._ended(node, frame, (frame.state, error))

    def _signalled(self, event: Event) -> None:
        body = event.data
        assert isinstance(body, e.SignalReceived)
        node, frame = self._closed(event)
        if node is None or frame is None:
            return
        assert isinstance(node.step, Signal)
        self._size += len(body.payload)
        handler = None if node.step.on_receive is None else _HANDLED
        outcome = recorded(event, body, handler)
        result: _Result = frame.state, None
        if isinstance(outcome, Exception):
            result = frame.state, error_info(outcome)
        elif handler is not None:
            result = outcome, None
        elif node.step.on_misfit == "raise" and node.step.kind is not Any:
            try:
                self._flow.values.decode(body.payload, node.step.kind)
            except InvalidInput as unfit:
                result = frame.state, error_info(unfit)
        self._ended(node, frame, result)

    def _timed_out(self, event: Event) -> None:
        """Continue after a wait has ended without a signal."""
        node, frame = self._closed(event)
        if node is None or frame is None:
            return
        assert isinstance(node.step, Signal)
        on_timeout, state = node.step.on_timeout, frame.state
        if on_timeout is None:
            result: _Result = state, error_info(TimeoutError(f"no signal {node.step.name!r} came in time"))
            if isinstance(event.data, e.StepSkipped):
                result = state, None
        else:
            after, error = self._recorded(node.path, "on_timeout", lambda: self._next_state(state, on_timeout))
            result = (state, error) if error is not None else (after, None)
            if error is not None and isinstance(event.data, e.StepSkipped):
                result = state, None  # skipping never fails a run
        self._ended(node, frame, result)

    def _answered(self, event: Event) -> None:
        body = event.data
        assert isinstance(body, e.TaskCompleted)
        node, frame = self._closed(event)
        if node is None or frame is None:
            return
        step, state = node.step, frame.state
        assert isinstance(step, Task)
        assert node.form is not None
        self._size += len(body.answer)
        result: _Result = state, None
        if step.on_answer is not None:
            on_answer, decoder = step.on_answer, node.form[1]
            after, error = self._recorded(
                node.path,
                "on_answer",
                lambda: self._next_state(state, on_answer, step.details.answer_of(body.answer, decoder)),
            )
            result = (state, error) if error is not None else (after, None)
        self._ended(node, frame, result)


def _path_of(step_id: str) -> str:
    """Return the path of the step that a step id or a marker belongs to."""
    return step_id.partition(":")[0]


def _sleep_ms(duration: Any) -> int:
    """Return a duration that a function computed; None if it has already passed."""
    seconds = duration.total_seconds() if hasattr(duration, "total_seconds") else duration
    if isinstance(seconds, int | float) and not isinstance(seconds, bool) and seconds <= 0:
        return 0
    found = milliseconds(duration)
    if found is None or found > DURATION_MS:
        raise InvalidInput("Sleep takes a timedelta or a number of seconds, not None", field="duration")
    return found


def _group_error(what: str, errors: list[ErrorInfo]) -> ErrorInfo:
    """Return several errors as one, in the form in which an exception group is stored."""
    if len(errors) == 1:
        return errors[0]
    text = "; ".join(f"{error}" for error in errors)
    return ErrorInfo("ExceptionGroup", f"{what}: {text}"[:ERROR_TEXT_CHARS], cause=errors[0])


def _on_completed(program: FlowProgram, event: Event) -> None:
    program._returned(event, getattr(event.data, "result", NULL))


def _on_failed(program: FlowProgram, event: Event) -> None:
    assert isinstance(event.data, e.StepFailed)
    error = event.data.error
    program._failed(event, ActivityFailed(f"step {event.step_id}: {error}", error))


def _on_child_failed(program: FlowProgram, event: Event) -> None:
    assert isinstance(event.data, e.ChildFailed)
    error = event.data.error
    program._failed(event, ChildFailed(f"child {event.step_id}: {error}", error))


def _on_skipped(program: FlowProgram, event: Event) -> None:
    node, _ = program._at.open.get(event.step_id or "", (None, None))
    if node is not None and isinstance(node.step, Signal):
        program._timed_out(event)
        return
    given: Raw = getattr(event.data, "result", NULL)  # from the operator
    program._returned(event, None if given == NULL else given, is_skipped=True)


_TAKEN_LATE: dict[type[e.Body], int] = {e.StepFailed: 1, e.ChildFailed: 1, e.SignalTimedOut: 1, e.RunCancelRequested: 2}

_OPEN: dict[type, Callable[[FlowProgram, Node, Raw], ErrorInfo | None]] = {
    Act: FlowProgram._run_activity,
    Child: FlowProgram._start_child,
    Signal: FlowProgram._wait_signal,
    Task: FlowProgram._ask,
    Sleep: FlowProgram._sleep,
}
"""How a step of each type is opened. The function returns an error if the step cannot be opened."""

_ON_EVENT: dict[type[e.Body], Callable[[FlowProgram, Event], None]] = {
    e.RunStarted: FlowProgram._begin,
    e.ContinuedAsNew: FlowProgram._go_on,
    e.RunCancelRequested: FlowProgram._cancel,
    e.StepCompleted: _on_completed,
    e.StepFailed: _on_failed,
    e.StepSkipped: _on_skipped,
    e.TimerFired: _on_completed,
    e.SignalReceived: FlowProgram._signalled,
    e.SignalTimedOut: FlowProgram._timed_out,
    e.TaskCompleted: FlowProgram._answered,
    e.ChildCompleted: _on_completed,
    e.ChildFailed: _on_child_failed,
}
"""What a program does with each event that it receives: those that start it, and outcomes."""
