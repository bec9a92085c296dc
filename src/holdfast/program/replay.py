"""Replay: keeps a program and its history in step.

`Replay` gets every event of a run, in order. It delivers *outcomes* (something has ended) to the program, and the
commands that the program then issues must be the ones that follow in the history. They are matched by step id and name,
not by position; activities and children by their input too. While a run is paused its program is not advanced: outcomes
that were recorded meanwhile are delivered in order when it is resumed, at the time of the resumption.

A failure that was recorded during a pause is not delivered if an operator retries or skips the step. A failure that
caused the pause is not delivered either if the run is cancelled instead. If an operator retries a step whose failure
was delivered, as in a plan, the retry is delivered like an outcome.

A start or a resumption that is directly followed by a pause with an error had no effect, because the program could not
continue. It is kept, like an outcome, until the next resumption.

Consecutive outcomes that were reported by token were recorded together, before the program got the first one. So the
commands that it issued because of any of them follow after all of them.

During replay `replay` raises `NondeterminismError` at the first difference. At the end of the history the two are in
step, and from then on `advance` returns the commands instead of comparing them.
"""

from collections.abc import Iterable, Mapping
from types import MappingProxyType
from typing import Protocol

from msgspec import Raw
from msgspec.json import decode
from msgspec.structs import replace

from holdfast.core import codec
from holdfast.core import commands as c
from holdfast.core import events as e
from holdfast.core.events import Event, FormerRun
from holdfast.core.keyed_steps import is_of_engine
from holdfast.errors import NondeterminismError
from holdfast.program.port import EndDeferred, Program, WritesStreams
from holdfast.program.source import origins

SHOWN_CHARS = 1_000
"""How many characters of an input an error shows."""


class Begin(Protocol):
    """Creates the programs of a run."""

    formers: tuple[FormerRun, ...]
    """The runs that recorded the first events of the history, if the run is a fork."""

    def __call__(self, event: Event) -> Program:
        """Create the program that begins with this event: RunStarted, or ContinuedAsNew."""
        ...

    def replace_input(self, event: Event) -> None:
        """Note the input that a later start has given the run."""
        ...

    def reach(self, run_seq: int | None, program: Program | None) -> None:
        """Give the program of a fork what it knew of its run at this event; None means that the history ends here."""
        ...


CONCERN_PROGRAM = frozenset(body for body in e.BODIES.values() if body.TO_PROGRAM is not None)
"""The events that `advance` needs; the others change nothing for a program."""

_ENDS = (e.RunCompleted, e.RunFailed)
_REPORTED = frozenset(e.recording("outcome"))
_NO_MARKERS: Mapping[str, Raw] = MappingProxyType({})
_NOT_DEFERRED: Mapping[str, Mapping[int, bool]] = MappingProxyType({})


class Replay:
    """Keeps one run's program in step with its history."""

    __slots__ = (
        "_accepts_end",
        "_begin",
        "_closed",
        "_follows_report",
        "_held",
        "_is_held",
        "_is_paused",
        "_is_replaying",
        "_issued",
        "_markers",
        "deferred",
        "program",
    )

    def __init__(self, begin: Begin) -> None:
        self._begin = begin
        self._issued: dict[str, c.Command] = {}
        self._is_paused = False
        self._is_held = False
        self._follows_report = False
        self._held: list[Event] | None = None
        self._closed: set[str] | None = None
        self._markers = _NO_MARKERS
        self._is_replaying = False
        self._accepts_end = False
        self.program: Program | None = None
        self.deferred: Mapping[str, Mapping[int, bool]] = _NOT_DEFERRED
        """The callbacks that wait for updates, by the seed of their program."""

    def defer(self, deferred: EndDeferred) -> None:
        """Note that a function has ended too early, for the program that will be rebuilt."""
        known = self.deferred.get(deferred.seed, {})
        self.deferred = {**self.deferred, deferred.seed: {**known, deferred.callback: deferred.returns}}

    def replay(self, events: Iterable[Event]) -> None:
        """Bring the program to the end of this history, or raise at the first difference."""
        events = list(events)
        markers = {e_.step_id or "": _known_of(e_.data) for e_ in events if _is_known_by_step(e_.data)}
        self._markers = markers or _NO_MARKERS
        self._closed = set()
        self._accepts_end = type(events[-1].data) in _ENDS
        self._set_replaying(True)
        with origins():
            for event, following in zip(events, [*events[1:], None], strict=True):
                if self._begin.formers:
                    self._begin.reach(event.run_seq, self.program)
                self._replay_one(event, following)
        if self._begin.formers:
            self._begin.reach(None, self.program)
        self._set_replaying(False)
        self._closed = None
        if self._issued:
            raise self._extra(events[-1])

    def _replay_one(self, event: Event, following: Event | None) -> None:
        self._compare(event)
        if following is not None and _is_stuck(event, following):
            if type(event.data) is e.RunStarted:
                self._hold_back(event)
            return
        self._note_closed(event)
        for command in self.advance(event):
            if not self._comes_too_late(command):
                if isinstance(command, c.RunActivity) and self._closed:
                    self._closed.discard(command.step_id)  # a plan retries it
                self._issued[c.command_key(type(command), getattr(command, "step_id", None))] = command

    def _note_closed(self, event: Event) -> None:
        assert self._closed is not None
        if type(event.data) in e.OUTCOMES:
            self._closed.add(event.step_id or "")
        elif type(event.data) is e.StepStarted:
            self._closed.discard(event.step_id or "")  # an operator retries it

    def _comes_too_late(self, command: c.Command) -> bool:
        """Return whether a command cancels a step that has ended meanwhile: the history has no event for that.

        It happens when a run is resumed: the program gets the outcomes from the pause one by one.
        """
        return isinstance(command, c.CancelStep) and command.step_id in (self._closed or ())

    def _hold_back(self, event: Event) -> None:
        self._held = self._held or []
        self._held.append(event)

    def advance(self, event: Event) -> list[c.Command]:
        """Take the next event of the run, and return the commands that the program issues because of it.

        Raises `UnhandledError` if the program's code did not handle an exception. When a resumption delivers several
        outcomes, it is raised after the last one, because a cancellation among them lets the program continue.
        """
        program = self.program
        if program is not None and not self._is_paused and type(event.data) in _HANDED_ON:
            commands = program.handle(event)  # the common event, on a short path
        else:
            commands = self._advance(event)
            program = self.program
        if program is not None and program.problem is not None:
            raise program.problem
        return commands

    def _advance(self, event: Event) -> list[c.Command]:
        kind = type(event.data)
        if kind in e.OUTCOMES:
            return self._take_outcome(event)
        if kind is e.RunStarted or kind is e.ContinuedAsNew:
            return self._begin_with(event)
        if kind is e.InputReplaced:
            self._begin.replace_input(event)
        elif kind is e.RunPaused:
            self._is_paused = True
            self._is_held = getattr(event.data, "failed_step_id", None) is not None
        elif kind is e.RunResumed:
            self._is_paused = False
            held, self._held = self._held, None
            outcomes = [replace(outcome, emitted_at=event.emitted_at) for outcome in held or ()]
            if self.program is not None and len(outcomes) > 1:
                outcomes = self.program.arranged(outcomes)
            return c.with_one_rotation([command for outcome in outcomes for command in self._hand(outcome)])
        elif kind is e.SignalAccepted:
            return self._take_decision(event)
        return []

    def _take_outcome(self, event: Event) -> list[c.Command]:
        """Hand an outcome to the program, immediately or when the run is resumed."""
        kind = type(event.data)
        if kind in _SOME_WITHHELD and _is_withheld(event):
            return []
        if not self._is_paused:
            return [] if self.program is None else self.program.handle(event)
        if kind is e.RunCancelRequested and self._is_held:
            self._forget_failures()
        self._hold_back(event)
        return []

    def _take_decision(self, event: Event) -> list[c.Command]:
        """Drop the failure of a step if an operator retries or skips it before delivery; deliver a later retry."""
        assert isinstance(event.data, e.SignalAccepted)
        if event.data.name not in ("RETRY_STEP", "SKIP_STEP"):
            return []
        held = len(self._held or ())
        if held:
            self._forget_failures(event.data.target_step_id)
        if event.data.name == "SKIP_STEP" or len(self._held or ()) < held:
            return []
        if not self._is_paused:
            return self._hand(event)
        self._hold_back(event)
        return []

    def _forget_failures(self, of_step: str | None = None) -> None:
        self._held = [
            held
            for held in self._held or ()
            if type(held.data) is not e.StepFailed or (of_step is not None and held.step_id != of_step)
        ]

    def _begin_with(self, event: Event) -> list[c.Command]:
        written = None if self.program is None else self.program.stream_writes
        self.close()
        self.program = self._begin(event)
        if written is not None:
            assert isinstance(self.program, WritesStreams)
            self.program.stream_writes = written  # before the rotation, in the same turn
        self._set_replaying(self._is_replaying)
        if self.deferred or self._markers:
            self.program.defer(self.deferred.get(self.program.seed, {}))
        commands = self.program.handle(event)
        reason = _cancel_reason(event)
        if reason is not None:  # the run was being cancelled before the rotation
            commands += self.program.handle(replace(event, data=e.RunCancelRequested(reason)))
        return commands

    def _set_replaying(self, is_replaying: bool) -> None:
        self._is_replaying = is_replaying
        if self.program is not None:
            self.program.is_replaying = is_replaying
            self.program.accepts_end = self._accepts_end
            self.program.known_markers = self._markers

    def close(self) -> None:
        """Close the program."""
        if self.program is not None:
            self.program.close()
            self.program = None

    def _hand(self, event: Event) -> list[c.Command]:
        if type(event.data) is e.RunStarted:
            return self._begin_with(event)
        return self.program.handle(event) if self.program is not None else []

    # --- comparing commands with events

    def _compare(self, event: Event) -> None:
        kind = type(event.data)
        if isinstance(event.data, e.RunFailed) and event.data.timeout:
            self._issued.pop(c.OF_THE_RUN, None)  # the program may or may not have ended with it, after cleaning up
            return
        expected = c.COMMAND_OF.get(kind)
        if expected is None or self.program is None or _is_from_outside(event) or is_of_engine(event.step_id):
            follows_report, self._follows_report = self._follows_report, _is_reported(event)
            if follows_report and self._follows_report:  # the commands caused by them follow after all of them
                if kind in e.OUTCOMES:  # it cannot cancel a step that has ended, only one that is retried
                    self._issued.pop(c.command_key(c.CancelStep, event.step_id), None)
            elif self._issued and kind in e.OUTCOMES and not self._is_paused:
                raise self._extra(event)
            return
        self._follows_report = False
        key = event_key(event)
        issued = self._issued.pop(key, None)
        if issued is None or type(issued) is not expected or _name(issued) != _name(event.data):
            raise self._missing(event, issued)
        if isinstance(issued, c.RunActivity | c.StartChild):
            recorded: Raw = event.data.input  # type: ignore[attr-defined]
            if not self.program.has_recorded_input(issued, recorded):  # the recorded result belongs to another call
                raise self._difference(event, _describe_event(event) + _shown(recorded), issued, _shown(issued.input))
        if isinstance(issued, c.CompleteUpdate) and (issued.error is None) is not (event.data.error is None):  # type: ignore[attr-defined]
            raise self._missing(event, issued)  # one of them was applied, the other was refused

    def _missing(self, event: Event, issued: c.Command | None) -> NondeterminismError:
        instead = issued or next(iter(self._issued.values()), None)
        return self._difference(event, _describe_event(event), instead)

    def _extra(self, event: Event) -> NondeterminismError:
        [first, *_] = self._issued.values()
        return self._difference(event, f"no such step before event {event.run_seq}", first)

    def _difference(
        self, event: Event, expected: str, command: c.Command | None, given: str = ""
    ) -> NondeterminismError:
        found = _describe(command) + given if command is not None else "nothing"
        where = self.program.where(command, event) if self.program is not None else ""
        return NondeterminismError(
            f"event {event.run_seq}: the history has {expected}; the code asks for {found}{where}",
            run_seq=event.run_seq,
            expected=expected,
            found=found,
            source=where.removeprefix(" at "),
        )


def event_key(event: Event) -> str:
    """Return the key of the command that led to an event."""
    return c.command_key(c.COMMAND_OF[type(event.data)], event.step_id)


def _is_known_by_step(body: e.Body) -> bool:
    """Return whether a program knows from the start that the history has its step: a marker, a child, a keyed step."""
    if isinstance(body, e.StepStarted):
        return body.idempotency_key is not None
    return isinstance(body, e.MarkerRecorded | e.ChildStarted)


def _known_of(body: e.Body) -> Raw:
    """Return what a program knows from the start about a step: the value of a marker, the run of a child."""
    if isinstance(body, e.ChildStarted):
        return codec.encode(body.child_run_id)
    return body.value if isinstance(body, e.MarkerRecorded) else e.NULL


def _is_stuck(event: Event, following: Event) -> bool:
    """Return whether the program could not continue after a start or a resumption."""
    if type(event.data) is not e.RunStarted and type(event.data) is not e.RunResumed:
        return False
    return isinstance(following.data, e.RunPaused) and following.data.error is not None


_SOME_WITHHELD = frozenset({e.UpdateAccepted, e.TaskCompleted})
_HANDED_ON = frozenset(e.OUTCOMES) - _SOME_WITHHELD
"""The outcomes that a program gets whatever their content, unless it is paused."""


def _is_withheld(event: Event) -> bool:
    """Return whether it is withheld from the program: a refused update, or the answer to the engine's task."""
    if isinstance(event.data, e.UpdateAccepted):
        return event.data.was_refused is True
    return is_of_engine(event.step_id)


def _is_reported(event: Event) -> bool:
    """Return whether an event records the outcome of an activity that was reported by token."""
    return event.caused_by_signal_id is not None and type(event.data) in _REPORTED


def _cancel_reason(event: Event) -> str | None:
    """Return why a run was being cancelled when its history rotated, or None."""
    if not isinstance(event.data, e.ContinuedAsNew):
        return None
    carried = decode(event.data.carried)
    is_cancelling = isinstance(carried, dict) and carried.get("is_cancelling") is True
    return str(carried.get("cancel_reason", "")) if is_cancelling else None


def _is_from_outside(event: Event) -> bool:
    """Return whether an operator, and not the program, caused this event."""
    return event.caused_by_signal_id is not None


def _name(of: object) -> str:
    return str(getattr(of, "name", "") or getattr(of, "plan_id", ""))


def _describe_event(event: Event) -> str:
    step = f" of step {event.step_id!r}" if event.step_id else ""
    return f"{event.event_type}{step}" + _more(event.data)


def _describe(command: c.Command) -> str:
    step_id = getattr(command, "step_id", None)
    step = f" for step {step_id!r}" if step_id else ""
    return type(command).__name__ + step + _more(command)


def _shown(input: Raw) -> str:
    return f" with {bytes(input).decode(errors='replace')[:SHOWN_CHARS]}"


def _more(of: object) -> str:
    if isinstance(of, c.CompleteUpdate | e.UpdateCompleted):
        return "" if of.error is None else f" with {of.error}"
    return f" ({_name(of)})" if _name(of) else ""
