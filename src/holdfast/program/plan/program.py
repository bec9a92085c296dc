"""The interpreter of plans: outcomes in, commands out.

A `PlanProgram` is one run of a plan. It issues the same commands as code does, so a plan's history is like any other.
The cost of an outcome depends on what waits for that step, not on the size of the plan: each step counts what it still
waits for, and steps that wait for nothing any more are begun in the order of the plan.

**Recorded decisions.** A condition, the items of a `for_each`, and why a step failed before it began are recorded as
markers. Replay reads them and evaluates none of them again.

**Ids.** A step's id is the one in the document; `load[3]` is an item of a `for_each`. What belongs to a step is named
after it: `load:approval`, `load:timeout`, `load:retry2`, `load:plan`, `load:compensate`. No id of a step has a colon.

**Rotation.** The history is rotated when it is long and rotation pays: at least as many steps have ended as are carried
over. Open steps continue. The cursor holds what is needed to continue, and nothing of the document.
"""

import heapq
from collections.abc import Callable, Iterable, Mapping
from math import isfinite
from types import MappingProxyType
from typing import Any

import msgspec
from msgspec import UNSET, Raw, Struct
from msgspec.structs import replace

from holdfast.core import codec
from holdfast.core import commands as c
from holdfast.core import events as e
from holdfast.core.events import NULL, ArtifactRef, ErrorInfo, Event, PlanSource
from holdfast.core.plans import APPROVAL_PART, COMPENSATE_PART, PART_MARK, STORE_PLAN, PlanRef, workflow_of
from holdfast.core.timing import retry_delay_ms
from holdfast.errors import (
    ActivityFailed,
    ChildFailed,
    InvalidInput,
    NotFound,
    PayloadTooLarge,
    RunError,
    VersionMismatch,
)
from holdfast.limits import DURATION_MS, EVENT_BYTES, NESTED_RUNS, PLAN_STEPS, Limits
from holdfast.program.definitions import STORING_A_PLAN, ActivityOptions, child_run_id, encode_options
from holdfast.program.outcomes import Received, error_info
from holdfast.program.plan.definition import Installed, PlanDefinition, PlanStep, decoded, fill, is_reference
from holdfast.program.plan.forms import form_of
from holdfast.program.plan.model import Approval, Compensation
from holdfast.program.plan.references import key_text
from holdfast.program.secrets import Secret

PENDING, OPEN, SUCCESS, FAILED, GIVEN, UNMET, BLOCKED = range(7)
"""The status of a step. GIVEN: skipped by an operator; UNMET: skipped by its condition; BLOCKED: another has failed."""

SHOWN_AS = {SUCCESS: "SUCCESS", FAILED: "FAILED", GIVEN: "SKIPPED", UNMET: "SKIPPED", BLOCKED: "SKIPPED"}
_LETTERS = "POSFGUB"

DONE = "$done"
"""The key in the input of a run that redoes another one: the results of its steps, by their ids."""

KEPT_FOR_ONE = 4
"""How many results a rotation may write again for each step that has ended, so that all rotations together are linear.

Open and failed steps cost more: there may be at most as many as have ended.
"""

_OF_RUN = -1
"""The position of what belongs to no step."""


class _Open(Struct, array_like=True, gc=False):
    """What an open step is for: a step of the plan, an item of it, or something that belongs to it."""

    position: int
    item: int = -1
    role: str = ""
    """Empty for the step itself; otherwise approval, timeout, retry, plan or compensate."""


class StepResult(Struct, array_like=True, gc=False):
    """What is kept of a step that has ended, as long as something refers to it."""

    output: Raw = NULL
    error: ErrorInfo | None = None
    artifacts: tuple[ArtifactRef, ...] = ()


class _Each(Struct, array_like=True):
    """The items of a `for_each` that is running."""

    items: list[Any]
    outputs: list[Raw]
    begun: int = 0
    ended: int = 0
    error: ErrorInfo | None = None
    artifacts: list[ArtifactRef] = []


class _Undo(Struct, array_like=True, gc=False):
    """A compensation that would run if the run failed: its step and its input."""

    path: str
    position: int
    input: Raw


class _Cursor(Struct, omit_defaults=True):
    """The position of a run, for the history after a rotation. Steps are identified by their positions."""

    inputs: Raw = NULL
    statuses: str = ""
    left: dict[int, int] = {}
    blocked: dict[int, int] = {}
    results: dict[int, StepResult] = {}
    consumers: dict[int, int] = {}
    each: dict[int, _Each] = {}
    open: dict[str, _Open] = {}
    attempts: dict[str, int] = {}
    undo: list[_Undo] = []
    failure: ErrorInfo | None = None
    problems: list[ErrorInfo] = []
    is_cancelled: bool = False
    is_approved: bool = False
    done: dict[str, StepResult] = {}
    """The results of steps that a redone run need not run again, by their ids."""
    failed: dict[str, None] = {}
    """The failed activities that may be retried, by an operator or by the policy of the plan."""
    version: int = 1


class _Done(Struct, rename={"done": DONE}):
    """The part of the input of a redone run that is not the plan's inputs."""

    done: dict[str, StepResult]


class PlanProgram:
    """One run of a plan."""

    stream_writes = None
    """A plan writes to no streams: only its activities do."""

    def __init__(
        self,
        definition: PlanDefinition,
        run_id: str,
        input: Raw,
        rotation: int,
        depth: int,
        limits: Limits,
        here: Installed,
    ) -> None:
        self.definition = definition
        self.run_id = run_id
        self.seed = f"{run_id}|{rotation}"
        self.is_replaying = False
        self.accepts_end = False
        self.problem: RunError | None = None  # a plan has no code that could raise
        self.known_markers: Mapping[str, Raw] = MappingProxyType({})
        self.lost_waits: frozenset[str] = frozenset()
        self.handlers: dict[str, Any] = {}
        self.kinds: dict[str, Any] = {}
        self._depth = depth
        self._limits = limits
        self._here = here
        self._rotation = rotation
        self._input = input
        self._now = 0
        self._commands: list[c.Command] = []
        self._ready: list[int] = []
        self._touched: list[int] = []
        """The steps with items that have ended or may begin."""
        self._decoded: dict[int, Any] = {}
        self._inputs: Any = None
        self._steps = self._bytes = self._ended = self._taken = 0
        self._not_before = 0
        self._is_done = self._is_rotating = self._is_ending = False
        self._returned_early: dict[str, Raw] = {}
        """Successful results among outcomes that are being taken one by one."""
        self._at = _Cursor()
        self._status = bytearray(len(definition.steps))
        self._left = list(definition.counts)
        self._unfinished = len(definition.steps)

    # --- called by the engine

    def handle(self, event: Event) -> list[c.Command]:
        """Take an outcome, begin what is ready, and return the commands."""
        self._now = event.emitted_at
        take = _ON_EVENT.get(type(event.data))
        if take is not None and not self._is_done:
            self._taken += 1
            take(self, event)
            if not self._is_done:
                self._go_on()
        commands, self._commands = self._commands, []
        if not self._at.each:  # items of one step may all refer to the same result
            self._decoded.clear()
        return commands

    @property
    def takes_updates(self) -> bool:
        """Whether an update would be answered: with a refusal, because a plan has none."""
        return not self._is_done

    @property
    def takes_signals(self) -> bool:
        """Whether the effect of a signal would be kept: open waits are carried over a rotation."""
        return not self._is_done

    def arranged(self, outcomes: list[Event]) -> list[Event]:
        """Return outcomes in the order in which they were recorded, but with an operator's decisions first.

        Then a failed step that was settled during a pause is not retried by its timer, which fired before that.
        """
        ended = (e.StepCompleted, e.ChildCompleted)
        self._returned_early = {
            outcome.step_id or "": outcome.data.result for outcome in outcomes if isinstance(outcome.data, ended)
        }
        settled = {_settled_by(outcome) for outcome in outcomes}
        return sorted(outcomes, key=lambda outcome: _begun_by(outcome) in settled)

    def defer(self, deferred: Mapping[int, bool]) -> None:
        """Do nothing: a plan answers no updates, so its end waits for none."""

    def misfit_of(self, step_id: str, payload: Raw) -> str | None:
        """Return None: a wait of a plan takes every payload."""
        return None

    def receive(self, step_id: str, payload: Raw) -> Received | None:
        """Return None: a wait of a plan has no handler."""
        return None

    def refusal_of(self, name: str, input: Raw) -> ErrorInfo | None:
        """Refuse an update."""
        return error_info(NotFound(f"run {self.run_id} takes no update {name!r}: it is a plan"))

    def query(self, name: str, arguments: Raw) -> Raw:
        """Answer the query `plan`: the number of steps in each status."""
        if name != "plan":
            raise NotFound(f"run {self.run_id} answers no query {name!r}; it answers ['plan']")
        words = {PENDING: "PENDING", OPEN: "RUNNING", **SHOWN_AS}
        counts: dict[str, int] = {}
        for status, word in words.items():
            counts[word] = counts.get(word, 0) + self._status.count(status)
        return codec.encode({**msgspec_ref(self.definition.ref), "steps": counts})

    def has_recorded_input(self, command: c.RunActivity | c.StartChild, recorded: Raw) -> bool:
        """Return whether a step has the recorded input, regardless of its JSON formatting."""
        return bytes(command.input) == bytes(recorded) or bool(decoded(command.input) == decoded(recorded))

    def where(self, command: c.Command | None, event: Event | None = None) -> str:
        """Return which plan issues the command."""
        return f" at plan {self.definition.name} {self.definition.version} ({self.definition.sha256[:12]})"

    def close(self) -> None:
        """Release what the run has kept."""
        self._is_done = True
        self._at = _Cursor()
        self._decoded.clear()

    # --- start, and rotation

    def _begin(self, event: Event) -> None:
        if isinstance(event.data, e.ContinuedAsNew):
            self._at = codec.decode(event.data.input, _Cursor)
            self._status = bytearray(_unpacked(self._at.statuses))
            for position, left in self._at.left.items():
                self._left[position] = left
            self._unfinished = sum(map(self._status.count, (PENDING, OPEN)))
            self._is_ending = self._at.failure is not None or self._at.is_cancelled
            self._ready = [] if self._is_ending else self._at_the_front()
            self._touched = list(self._at.each)
            return
        try:
            given = _object(self._input)
            if DONE in given:
                self._at.done = codec.decode(self._input, _Done).done
                del given[DONE]
            self._at.inputs = codec.encode(self.definition.check_inputs(given))
        except InvalidInput as problem:
            self._stop(error_info(problem))
            return
        self._ready = [position for position, left in enumerate(self._left) if not left]
        approval = self.definition.plan.requires_approval
        if approval is not False:
            self._ask_approval(_OF_RUN, APPROVAL_PART, approval)
        else:
            self._at.is_approved = True

    def _at_the_front(self) -> list[int]:
        """Return the steps that wait for nothing and were not begun before a rotation, in order."""
        status, left = self._status, self._left
        return [position for position in range(len(left)) if status[position] == PENDING and left[position] <= 0]

    def _go_on(self) -> None:
        """Begin what is ready, or rotate before that; end the run when nothing is left."""
        if self._rotates():
            return
        while not self._is_ending:
            if self._touched:
                self._run_items(self._touched.pop())
            elif self._ready and self._at.is_approved:
                self._begin_step(heapq.heappop(self._ready))
            else:
                break
        if self._is_ending:
            self._end()
        elif not self._unfinished:
            self._complete_run()

    def _rotates(self) -> bool:
        if self._is_done or (not self._is_rotating and not self._is_worth_it()):
            return False
        if not self._unfinished and not self._at.open:
            return False
        marker = f"cut:{self._rotation}:{self._taken}"
        if self.is_replaying and marker not in self.known_markers:
            return False
        cursor = self._cursor()
        if len(cursor) > self._limits.value_bytes and not self.is_replaying and not self._is_rotating:
            self._not_before = 2 * self._steps  # too much is still needed
            return False
        self._is_rotating = True
        self._commands.append(c.RecordMarker(step_id=marker, name="cut"))
        self._commands.append(c.ContinueAsNew(input=cursor, steps=(*self._at.open, *self._at.failed)))
        return True

    def _is_worth_it(self) -> bool:
        """Return whether the history is long and a rotation pays; at replay, whether the history has one."""
        if self.is_replaying:
            return True
        size, limits = self._bytes + 2 * EVENT_BYTES * self._steps, self._limits
        if self._steps < self._not_before or (self._steps < limits.rotation_steps and size < limits.rotation_bytes):
            return False
        at = self._at
        kept = len(at.results) + len(at.undo) + sum(len(each.items) for each in at.each.values())
        return self._ended > len(at.open) + len(at.failed) and KEPT_FOR_ONE * self._ended >= kept

    def _cursor(self) -> Raw:
        at, counts = self._at, self.definition.counts
        at.statuses = _packed(self._status)
        at.left = {
            position: left
            for position, (left, all_) in enumerate(zip(self._left, counts, strict=True))
            if left != all_ and self._status[position] == PENDING
        }
        return Raw(msgspec.json.encode(at))  # values that were checked before

    # --- beginning a step

    def _begin_step(self, position: int) -> None:
        compiled = self.definition.steps[position]
        self._status[position] = OPEN
        if compiled.has_when:
            if not self._is_wanted(compiled):
                return
        elif position in self._at.blocked:
            blocker = self._at.blocked[position]
            other = self.definition.steps[blocker].step.id
            has_failed = self._status[blocker] in (FAILED, BLOCKED)
            why = (
                f"step {other!r} has failed" if has_failed else f"step {other!r} was skipped, and its output is needed"
            )
            marker = f"{compiled.step.id}:skipped"
            count = self._at.attempts[marker] = self._at.attempts.get(marker, 0) + 1
            self._mark(marker if count == 1 else f"{marker}~{count}", "skipped", why)
            self._settle(position, BLOCKED if has_failed else UNMET)
            return
        approval = compiled.step.requires_approval
        if approval is not False and compiled.step.id not in self._at.done:
            self._ask_approval(position, f"{compiled.step.id}{APPROVAL_PART}", approval)
        else:
            self._start(compiled)

    def _is_wanted(self, compiled: PlanStep) -> bool:
        """Evaluate the condition of a step, once; settle the step if the condition is false."""
        step, marker = compiled.step, f"{compiled.step.id}:when"
        if marker in self.known_markers:
            value = codec.decode(self.known_markers[marker], object)
        else:
            try:
                value = _is_true(fill(step.when, self._data(compiled, "when")))
            except InvalidInput as problem:
                value = problem.message
        self._mark(marker, "when", value)
        if isinstance(value, str):
            self._misfit(compiled.position, -1, value)
            return False
        if value is False:
            self._settle(compiled.position, UNMET)
        return value is True

    def _ask_approval(self, position: int, step_id: str, approval: bool | Approval) -> None:
        asked = approval if isinstance(approval, Approval) else Approval()
        about = {
            "plan": msgspec_ref(self.definition.ref),
            "step": None if position == _OF_RUN else self.definition.steps[position].step.id,
            "description": asked.description,
        }
        form = form_of(APPROVAL_FORM, self.definition.forms)
        self._open(
            c.AskHuman(
                step_id=step_id,
                name="approve",
                task_type="approval",
                payload=codec.encode(about),
                form=form,
                roles=asked.roles,
                assignee=asked.assignee,
            ),
            _Open(position, role="approval"),
        )

    def _start(self, compiled: PlanStep) -> None:
        if compiled.step.for_each is None:
            self._run(compiled, -1)
            return
        items = self._items_of(compiled)
        if items is None:
            return
        if not items:
            self._settle(compiled.position, SUCCESS, StepResult(codec.encode([])))
            return
        self._at.each[compiled.position] = _Each(items, [NULL] * len(items), artifacts=[])
        self._touched.append(compiled.position)
        for other in compiled.consumes - compiled.used_by_items:
            self._release(other)

    def _items_of(self, compiled: PlanStep) -> list[Any] | None:
        """Return the items of a step, which are recorded; None if the step has failed because it has none."""
        marker = f"{compiled.step.id}:items"
        if marker in self.known_markers:
            items = decoded(self.known_markers[marker])
        else:
            try:
                items = fill(compiled.step.for_each, self._data(compiled, "for_each"))
                if not isinstance(items, list):
                    raise InvalidInput(f"for_each is a list, and {compiled.step.for_each} is none")
                if len(items) > PLAN_STEPS:
                    raise InvalidInput(f"for_each has at most {PLAN_STEPS} items, not {len(items)}")
                codec.bounded(codec.encode(items), self._limits.value_bytes, f"the items of {compiled.step.id!r}")
            except (InvalidInput, PayloadTooLarge) as problem:
                items = problem.message
        self._mark(marker, "items", items)
        if isinstance(items, list):
            return items
        self._misfit(compiled.position, -1, str(items))
        return None

    def _run_items(self, position: int) -> None:
        """Begin as many items as may run concurrently; settle the step after the last one."""
        each, compiled = self._at.each.get(position), self.definition.steps[position]
        if each is None:
            return
        most = compiled.step.max_concurrency or len(each.items)
        goes_on = compiled.on_failure == "continue"
        while each.begun < len(each.items) and each.begun - each.ended < most and (goes_on or each.error is None):
            each.begun += 1
            self._run(compiled, each.begun - 1)
            if self._is_ending:
                return
        if each.ended == len(each.items):
            del self._at.each[position]
            result = StepResult(codec.encode(each.outputs), each.error, tuple(each.artifacts))
            status = SUCCESS if each.error is None else FAILED
            self._settle(position, status, result, compiled.used_by_items)

    def _run(self, compiled: PlanStep, item: int, attempt: int = 1) -> None:
        """Open a step, or fail it if its input does not fit."""
        path = self._path(compiled, item)
        if path in self._at.done:
            self._mark(f"{path}:done", "done", None)  # shown to observers of the run
            self._succeed(compiled.position, item, self._at.done.pop(path))
            return
        marker = f"{path}:failed" if attempt == 1 else f"{path}:failed~{attempt}"
        run = _RUN[compiled.step.kind]
        message = self._objection(
            marker, lambda: run(self, compiled, path, item, self._data(compiled, "input", item), attempt)
        )
        if message is not None:
            self._misfit(compiled.position, item, message)

    def _objection(self, marker: str, make: Callable[[], None]) -> str | None:
        """Do what needs an input, and return None; or return why the input cannot be computed, which is recorded."""
        if marker in self.known_markers:
            message = str(decoded(self.known_markers[marker]))
        else:
            try:
                make()
                return None
            except (InvalidInput, PayloadTooLarge) as problem:
                message = problem.message
        self._mark(marker, "failed", message)
        return message

    def _run_activity(self, compiled: PlanStep, path: str, item: int, data: Mapping[str, Any], attempt: int) -> None:
        step = compiled.step
        assert isinstance(step.activity, str)
        input = self._arguments(step.input, data)
        changes: dict[str, Any] = {"on_failure": "raise"}  # the plan decides, not the activity
        if compiled.on_failure == "pause":
            policy = self.definition.plan.retry
            changes = {"on_failure": "pause", "plan_retry": None if policy is None else policy.as_retry()}
        if step.secrets:
            changes["secrets"] = tuple(Secret(name) for name in step.secrets)
        for field in ("timeout", "schedule_to_close", "heartbeat_timeout"):
            seconds = getattr(step, field)
            if seconds is not None:
                changes[f"{field}_ms"] = _milliseconds(seconds)
        if step.retry is not None:
            changes["retry"] = step.retry.as_retry()
        if step.queue is not None:
            changes["queue"] = step.queue
        key = None
        if step.idempotency_key is not None:
            key = key_text(fill(step.idempotency_key, data))
        self._open(self._activity(path, step.activity, input, changes, key, attempt), _Open(compiled.position, item))

    def _activity(
        self, path: str, name: str, input: Raw, changes: dict[str, Any], key: str | None = None, attempt: int = 1
    ) -> c.RunActivity:
        """Return the command that runs an activity, with the activity's own options where the plan sets none."""
        definition = self._here.activities.get(name)
        if definition is not None and not self.is_replaying:
            for _, reason in definition.signature.misfits(decoded(input)):
                raise InvalidInput(reason)
        options = ActivityOptions() if definition is None else definition.options
        if definition is not None and definition.key_function is not None and key is None:
            key = None if path in self.known_markers else definition.key_of(input)
        chosen = replace(options, **changes)
        if definition is not None and definition.limited is not None:
            chosen = definition.limited.applied(chosen, input)
        return c.RunActivity(
            step_id=path,
            name=name,
            input=input,
            queue=chosen.queue,
            idempotency_key=key,
            options=encode_options(chosen),
            logical_attempt_id=attempt,
        )

    def _arguments(self, input: Any, data: Mapping[str, Any]) -> Raw:
        filled = fill({} if input is UNSET or input is None else input, data)
        if not isinstance(filled, dict) or DONE in filled:
            raise InvalidInput("the input is an object of arguments by their names")
        return self._bounded(codec.encode(filled))

    def _bounded(self, raw: Raw) -> Raw:
        return codec.bounded(raw, self._limits.value_bytes, "the input")

    def _wait_signal(self, compiled: PlanStep, path: str, item: int, data: Mapping[str, Any], attempt: int) -> None:
        timeout = compiled.step.timeout
        until = None if timeout is None else self._now + _milliseconds(timeout) * 1_000
        name = str(compiled.step.signal)
        self._open(c.WaitSignal(step_id=path, name=name, until=until), _Open(compiled.position, item))

    def _ask_human(self, compiled: PlanStep, path: str, item: int, data: Mapping[str, Any], attempt: int) -> None:
        step = compiled.step
        payload = fill(None if step.input is UNSET else step.input, data)
        form = NULL if step.form is None else form_of(codec.encode(step.form), self.definition.forms)
        command = c.AskHuman(
            step_id=path,
            name=str(step.task),
            payload=self._bounded(codec.encode(payload)),
            form=form,
            roles=step.roles,
            assignee=step.assignee,
        )
        self._open(command, _Open(compiled.position, item))
        self._limit_time(compiled, path, item)

    def _sleep(self, compiled: PlanStep, path: str, item: int, data: Mapping[str, Any], attempt: int) -> None:
        seconds = fill(compiled.step.sleep, data)
        if isinstance(seconds, bool) or not isinstance(seconds, int | float) or not isfinite(seconds):
            raise InvalidInput("sleep is a number of seconds")
        if seconds > DURATION_MS / 1_000:
            raise InvalidInput("sleep is at most a thousand years")
        if seconds <= 0:
            self._succeed(compiled.position, item, StepResult())
            return
        due_at = self._now + _milliseconds(seconds) * 1_000
        self._open(c.StartTimer(step_id=path, due_at=due_at), _Open(compiled.position, item))

    def _run_workflow(self, compiled: PlanStep, path: str, item: int, data: Mapping[str, Any], attempt: int) -> None:
        step = compiled.step
        name, version = str(step.workflow), step.version
        known = [of for known, of in self._here.workflows if known == name]
        if not self.is_replaying and version is None and not known:
            raise VersionMismatch(
                f"run {self.run_id} starts workflow {name!r}, which this node does not have; with a `version` "
                "in the plan any node could start it"
            )
        version = version or (known[-1] if known else "")
        self._start_child(compiled, path, item, name, version, self._arguments(step.input, data))

    def _start_child(
        self,
        compiled: PlanStep,
        path: str,
        item: int,
        name: str,
        version: str,
        input: Raw,
        plan: PlanSource | None = None,
    ) -> None:
        if self._depth >= NESTED_RUNS:
            raise InvalidInput(f"runs are nested at most {NESTED_RUNS} deep")
        command = c.StartChild(
            step_id=path,
            child_run_id=child_run_id(self.run_id, path),
            plan_id=name,
            plan_version=version,
            input=input,
            plan=plan,
        )
        self._open(command, _Open(compiled.position, item))
        self._limit_time(compiled, path, item)

    def _run_plan(self, compiled: PlanStep, path: str, item: int, data: Mapping[str, Any], attempt: int) -> None:
        """Have the text of the plan stored; a run of it is started after that."""
        step = compiled.step
        made = fill(step.plan, data) if isinstance(step.plan, str) and is_reference(step.plan) else step.plan
        if isinstance(made, str) and not (isinstance(step.plan, str) and is_reference(step.plan)):
            asked: dict[str, Any] = {"plan_id": made, "plan_version": step.version, "sha256": step.sha256}
        else:
            asked = {"document": made}
        input = self._bounded(codec.encode(asked))
        self._open(
            self._activity(f"{path}:plan", STORE_PLAN, input, {"retry": STORING_A_PLAN.retry}),
            _Open(compiled.position, item, "plan"),
        )

    def _run_stored(self, opened: _Open, result: Raw) -> None:
        """Start the run of a plan whose text is in the store."""
        compiled = self.definition.steps[opened.position]
        path, item = self._path(compiled, opened.item), opened.item

        def start() -> None:
            ref = codec.decode(result, PlanRef)
            input = self._arguments(compiled.step.input, self._data(compiled, "input", item))
            source = PlanSource(ref.sha256, ref.uri)
            self._start_child(compiled, path, item, workflow_of(ref.plan_id), ref.plan_version, input, source)

        message = self._objection(f"{path}:plan:failed", start)
        if message is not None:
            self._misfit(opened.position, item, message)

    def _limit_time(self, compiled: PlanStep, path: str, item: int) -> None:
        """Start the timer of a task or a child that has a timeout."""
        if compiled.step.timeout is not None:
            due_at = self._now + _milliseconds(compiled.step.timeout) * 1_000
            timer = c.StartTimer(step_id=f"{path}:timeout", due_at=due_at)
            self._open(timer, _Open(compiled.position, item, "timeout"))

    def _open(self, command: Any, opened: _Open) -> None:
        self._commands.append(command)
        self._at.open[command.step_id] = opened
        self._steps += 1
        self._bytes += len(getattr(command, "input", b""))

    def _mark(self, step_id: str, name: str, value: Any) -> None:
        raw = codec.encode(value)
        self._commands.append(c.RecordMarker(step_id=step_id, name=name, value=raw))
        self._steps += 1
        self._bytes += len(raw)

    def _path(self, compiled: PlanStep, item: int) -> str:
        return compiled.step.id if item < 0 else f"{compiled.step.id}[{item}]"

    # --- what references refer to

    def _data(self, compiled: PlanStep | None, field: str, item: int = -1) -> dict[str, Any]:
        """Return what the references of a step may name: the inputs, and the steps that it consumes."""
        if self._inputs is None:
            self._inputs = decoded(self._at.inputs)
        positions = self._of_output() if compiled is None else compiled.uses.get(field, ())
        steps = {self.definition.steps[position].step.id: self._shown(position) for position in positions}
        data: dict[str, Any] = {"inputs": self._inputs, "steps": steps}
        if compiled is not None and item >= 0:
            data["item"] = self._at.each[compiled.position].items[item]
            data["index"] = item
        return data

    def _shown(self, position: int) -> dict[str, Any]:
        """Return a step that has ended, in the form that references see."""
        known = self._decoded.get(position)
        if known is None:
            result = self._at.results.get(position) or StepResult()
            known = {
                "status": SHOWN_AS.get(self._status[position], "PENDING"),
                "output": decoded(result.output),
                "artifact_refs": decoded(codec.encode(result.artifacts)),
                "error": None if result.error is None else _plain_error(result.error),
            }
            if self._status[position] == SUCCESS:  # others may be reconsidered
                self._decoded[position] = known
        return known

    # --- outcomes

    def _pop(self, event: Event) -> _Open | None:
        return self._at.open.pop(event.step_id or "", None)

    def _close_timer(self, opened: _Open) -> None:
        """Cancel the timer of a step that has ended."""
        timer = f"{self._path(self.definition.steps[opened.position], opened.item)}:timeout"
        if self._at.open.pop(timer, None) is not None:
            self._commands.append(c.CancelStep(step_id=timer))

    def _completed(self, event: Event) -> None:
        opened = self._pop(event)
        if opened is None:
            return
        result: Raw = getattr(event.data, "result", NULL)
        self._bytes += len(result)
        if opened.role == "plan":
            self._run_stored(opened, result)
        elif opened.role == "compensate":
            self._ended += 1
        else:
            self._close_timer(opened)
            self._succeed(opened.position, opened.item, StepResult(result, None, getattr(event.data, "artifacts", ())))

    def _failed(self, event: Event) -> None:
        opened = self._pop(event)
        if opened is None:
            return
        error: ErrorInfo = event.data.error  # type: ignore[attr-defined]
        self._bytes += len(error.message) + len(error.traceback)
        if isinstance(event.data, e.StepFailed) and not opened.role:
            self._note_failed(event.step_id or "", event.logical_attempt_id or 1)
        if opened.role == "compensate":
            self._at.problems.append(_short(error))
        elif not self._tries_again(opened, event.step_id or "", error):
            self._close_timer(opened)
            self._fail(opened.position, opened.item, error)

    def _note_failed(self, step_id: str, attempt: int) -> None:
        self._at.failed[step_id] = None
        if attempt > 1:  # retried by the policy of the plan, or by an operator
            self._at.attempts[step_id] = attempt

    def _tries_again(self, opened: _Open, step_id: str, error: ErrorInfo) -> bool:
        """Retry a failed activity by the policy of the plan: as the next logical attempt, after a delay."""
        policy = self.definition.plan.retry
        if policy is None or opened.role or self.definition.steps[opened.position].step.activity is UNSET:
            return False
        attempt = self._at.attempts.get(step_id, 1)
        delay_ms = retry_delay_ms(policy.as_retry(), attempt, error, 0.0)
        if delay_ms is None:
            return False
        self._at.attempts[step_id] = attempt + 1
        due_at = self._now + max(1, delay_ms) * 1_000
        timer = c.StartTimer(step_id=f"{step_id}:retry{attempt + 1}", due_at=due_at)
        self._open(timer, _Open(opened.position, opened.item, "retry"))
        return True

    def _skipped(self, event: Event) -> None:
        """Take the decision of an operator instead of an outcome."""
        opened = self._pop(event)
        if opened is None:
            position = self._reopen(event.step_id or "")
            if position is not None:
                self._settle(position, GIVEN, StepResult(event.data.result))  # type: ignore[attr-defined]
            return
        if opened.role == "timeout" or opened.role == "compensate":
            return
        if opened.role == "retry":
            self._run_again(opened)
            return
        if opened.position == _OF_RUN:
            self._at.is_cancelled = True  # it was not refused, so it has not failed
            self._stop(None)
            return
        self._close_timer(opened)
        result = StepResult(event.data.result)  # type: ignore[attr-defined]
        if opened.item >= 0:
            self._item_ended(opened.position, opened.item, result)
        else:
            self._settle(opened.position, GIVEN, result)

    # --- failed steps that an operator retries or skips

    def _retried(self, event: Event) -> None:
        """Reopen a failed step that an operator has retried."""
        assert isinstance(event.data, e.SignalAccepted)
        step_id = event.data.target_step_id or ""
        position = self._reopen(step_id) if event.data.name == "RETRY_STEP" else None
        if position is not None:
            self._at.open[step_id] = _Open(position)
            self._steps += 1

    def _reopen(self, step_id: str) -> int | None:
        """Revert the failure of a step and what followed for other steps; return None if it has not failed."""
        at = self._at
        if step_id not in at.failed or step_id not in self.definition.by_id or self._is_ending:
            return None
        del at.failed[step_id]
        position = self.definition.by_id[step_id].position
        timer = f"{step_id}:retry{at.attempts.get(step_id, 1)}"
        if at.open.pop(timer, None) is not None:  # a later retry was scheduled
            self._commands.append(c.CancelStep(step_id=timer))
        elif self._status[position] == FAILED:
            self._status[position] = OPEN
            self._unfinished += 1
            at.results.pop(position, None)
            at.consumers.pop(position, None)
            self._reconsider(position)
        return position

    def _reconsider(self, position: int) -> None:
        """Revert what was skipped because of a step; everything that depends on it waits again."""
        steps, status, waiting = self.definition.steps, self._status, list[int]()
        found = [position]
        while found:
            for other in steps[found.pop()].dependents:
                if status[other] == BLOCKED:
                    status[other] = PENDING
                    self._unfinished += 1
                    found.append(other)
                    waiting.append(other)
                elif status[other] == PENDING:
                    waiting.append(other)
        for other in waiting:
            self._at.blocked.pop(other, None)
            self._left[other] = 0
            for needed in steps[other].depends_on:
                if status[needed] in (PENDING, OPEN):
                    self._left[other] += 1
                elif status[needed] in (FAILED, BLOCKED) or (status[needed] == UNMET and needed in steps[other].data):
                    self._at.blocked[other] = needed
        self._ready = [each for each in self._ready if not self._left[each]]
        heapq.heapify(self._ready)

    def _fired(self, event: Event) -> None:
        opened = self._pop(event)
        if opened is None:
            return
        if opened.role == "retry":
            self._run_again(opened)
        elif opened.role == "timeout":
            path = self._path(self.definition.steps[opened.position], opened.item)
            self._at.open.pop(path, None)
            self._commands.append(c.CancelStep(step_id=path, reason="it took too long"))
            self._fail(opened.position, opened.item, ErrorInfo("TimeoutError", f"step {path!r} took too long"))
        else:
            self._succeed(opened.position, opened.item, StepResult())

    def _run_again(self, opened: _Open) -> None:
        compiled = self.definition.steps[opened.position]
        path = self._path(compiled, opened.item)
        attempt = self._at.attempts[path]
        self._at.failed.pop(path, None)
        self._run(compiled, opened.item, attempt)

    def _received(self, event: Event) -> None:
        opened = self._pop(event)
        if opened is not None:
            payload: Raw = event.data.payload  # type: ignore[attr-defined]
            self._bytes += len(payload)
            self._succeed(opened.position, opened.item, StepResult(payload))

    def _timed_out(self, event: Event) -> None:
        opened = self._pop(event)
        if opened is not None:
            name = getattr(event.data, "name", "")
            self._fail(opened.position, opened.item, ErrorInfo("TimeoutError", f"no signal {name!r} came in time"))

    def _answered(self, event: Event) -> None:
        assert isinstance(event.data, e.TaskCompleted)
        opened = self._pop(event)
        if opened is None:
            return
        self._bytes += len(event.data.answer)
        if opened.role != "approval":
            self._close_timer(opened)
            self._succeed(opened.position, opened.item, StepResult(event.data.answer))
            return
        answer = decoded(event.data.answer)
        is_approved = answer is True or (isinstance(answer, dict) and answer.get("approved") is True)
        if opened.position == _OF_RUN:
            self._at.is_approved = is_approved
            if not is_approved:
                self._stop(ErrorInfo("NotApproved", f"{event.data.actor or 'an operator'} has not approved the run"))
        elif is_approved:
            self._start(self.definition.steps[opened.position])
        else:
            problem = f"{event.data.actor or 'an operator'} has not approved the step"
            self._fail(opened.position, opened.item, ErrorInfo("NotApproved", problem))

    # --- the end of a step

    def _succeed(self, position: int, item: int, result: StepResult) -> None:
        compiled = self.definition.steps[position]
        if compiled.step.compensate is not None:
            message = self._note_undo(compiled, compiled.step.compensate, item, result)
            if message is not None:
                self._fail(position, item, ErrorInfo("InvalidInput", message))
                return
        if item >= 0:
            self._item_ended(position, item, result)
        else:
            self._settle(position, SUCCESS, result)

    def _note_undo(self, compiled: PlanStep, compensate: Compensation, item: int, result: StepResult) -> str | None:
        """Record how to undo a step; or return why that is impossible."""
        path = self._path(compiled, item)

        def note() -> None:
            data = self._data(compiled, "compensate", item)
            data["output"] = decoded(result.output)
            data["steps"][compiled.step.id] = {"status": "SUCCESS", "output": data["output"], "error": None}
            self._at.undo.append(_Undo(path, compiled.position, self._arguments(compensate.input, data)))

        attempt = self._at.attempts.get(path, 1)
        marker = f"{path}{COMPENSATE_PART}:failed"
        message = self._objection(marker if attempt == 1 else f"{marker}~{attempt}", note)
        return None if message is None else f"the input of the compensation cannot be made: {message}"

    def _item_ended(self, position: int, item: int, result: StepResult) -> None:
        each = self._at.each[position]
        each.outputs[item] = result.output
        each.artifacts.extend(result.artifacts)
        each.error = each.error or result.error
        each.ended += 1
        self._ended += 1
        self._touched.append(position)

    def _misfit(self, position: int, item: int, message: str) -> None:
        """Fail a step whose input cannot be computed; skip it if an operator has skipped the answer that it needs."""
        if not self._lacks_answer(self.definition.steps[position].data):
            self._fail(position, item, ErrorInfo("InvalidInput", message))
        elif item >= 0:
            self._item_ended(position, item, StepResult(NULL))
        else:
            self._settle(position, UNMET)

    def _lacks_answer(self, positions: Iterable[int]) -> bool:
        """Return whether an operator has skipped one of these steps that waits for a signal, an answer or approval."""
        given = (self.definition.steps[each].step for each in positions if self._status[each] == GIVEN)
        return any(step.kind in ("signal", "task") or step.requires_approval is not False for step in given)

    def _fail(self, position: int, item: int, error: ErrorInfo) -> None:
        """Settle a step that has failed, and apply the consequences for the run."""
        compiled = self.definition.steps[position]
        path = self._path(compiled, item)
        if compiled.on_failure != "continue":
            is_child = compiled.step.kind in ("workflow", "plan")
            kind = ChildFailed if is_child else ActivityFailed
            self._status[position] = FAILED
            self._stop(error_info(kind(f"step {path}: {error}", error)), compiled.on_failure)
            return
        if item >= 0:
            self._at.failed.pop(path, None)
            self._item_ended(position, item, StepResult(NULL, _short(error)))
        else:
            self._settle(position, FAILED, StepResult(NULL, _short(error)))

    def _settle(
        self, position: int, status: int, result: StepResult | None = None, uses: frozenset[int] | None = None
    ) -> None:
        """Note that a step has ended, and count down what waits for it.

        `uses` are the steps whose results it has kept until now, if these are not all that it consumes.
        """
        at, compiled = self._at, self.definition.steps[position]
        self._status[position] = status
        self._unfinished -= 1
        self._ended += 1
        if result is not None and self.definition.consumers[position]:
            at.results[position] = result
            at.consumers[position] = self.definition.consumers[position]
        left = self._left
        for other in compiled.dependents:
            if self._status[other] != PENDING:
                continue  # it was begun when this step had failed, before an operator retried this one
            if status in (FAILED, BLOCKED) or (status == UNMET and position in self.definition.steps[other].data):
                at.blocked[other] = position
            left[other] -= 1
            if not left[other]:
                heapq.heappush(self._ready, other)
        if status != BLOCKED and compiled.step.id not in at.failed:  # otherwise it may be reconsidered or retried
            for other in compiled.consumes if uses is None else uses:
                self._release(other)
        at.blocked.pop(position, None)

    def _release(self, position: int) -> None:
        """Drop a result that nothing refers to any more."""
        left = self._at.consumers.get(position)
        if left is not None and left > 1:
            self._at.consumers[position] = left - 1
        elif left is not None:
            del self._at.consumers[position], self._at.results[position]

    # --- the end of the run

    def _of_output(self) -> frozenset[int]:
        return self.definition.of_output if self.definition.plan.output is not UNSET else self.definition.last

    def _complete_run(self) -> None:
        plan = self.definition.plan
        try:
            if plan.output is not UNSET:
                output = codec.encode(fill(plan.output, self._data(None, "output")))
            else:
                steps = self.definition.steps
                results = self._at.results
                output = codec.encode(
                    {
                        steps[each].step.id: results[each].output if each in results else NULL
                        for each in sorted(self._of_output())
                    }
                )
            self._bounded(output)
            self._commands.append(c.CompleteRun(result=output))
        except (InvalidInput, PayloadTooLarge) as problem:
            if isinstance(problem, InvalidInput) and self._lacks_answer(range(len(self._status))):
                self._commands.append(c.CompleteRun(result=NULL))
            else:
                self._commands.append(c.FailRun(error=error_info(problem)))
        self._is_done = True

    def _stop(self, failure: ErrorInfo | None, on_failure: str = "fail") -> None:
        """Begin to end the run: cancel what is open, and compensate if that is wanted."""
        at = self._at
        for step_id, opened in at.open.items():
            self._commands.append(c.CancelStep(step_id=step_id))
            if not opened.role and step_id in self._returned_early:
                self._note_completed(self.definition.steps[opened.position], opened.item, self._returned_early[step_id])
        at.open.clear()
        at.failed.clear()
        at.each.clear()
        self._ready.clear()
        self._touched.clear()
        self._is_ending = True
        at.failure = at.failure or failure
        if failure is not None and on_failure != "compensate":
            at.undo.clear()

    def _note_completed(self, compiled: PlanStep, item: int, result: Raw) -> None:
        """Record the compensation of a step that has ended, although the plan does not continue from it."""
        if compiled.step.compensate is not None:
            message = self._note_undo(compiled, compiled.step.compensate, item, StepResult(result))
            if message is not None:
                self._at.problems.append(ErrorInfo("InvalidInput", f"{self._path(compiled, item)}: {message}"))

    def _cancel(self, event: Event) -> None:
        if self._is_ending:
            return  # compensations are not cancelled
        self._at.is_cancelled = True
        self._stop(None)

    def _end(self) -> None:
        """Compensate one step after the other, the last first, and then end the run."""
        at = self._at
        if at.open:
            return
        while at.undo:
            undo = at.undo.pop()
            compensate = self.definition.steps[undo.position].step.compensate
            assert compensate is not None
            changes: dict[str, Any] = {}
            if compensate.retry is not None:
                changes["retry"] = compensate.retry.as_retry()
            if compensate.timeout is not None:
                changes["timeout_ms"] = _milliseconds(compensate.timeout)
            if compensate.queue is not None:
                changes["queue"] = compensate.queue
            path = f"{undo.path}{COMPENSATE_PART}"
            try:
                command = self._activity(path, compensate.activity, undo.input, changes)
            except InvalidInput as problem:
                at.problems.append(ErrorInfo("InvalidInput", f"{path}: {problem.message}"))
                continue
            self._open(command, _Open(undo.position, role="compensate"))
            return
        self._is_done = True
        if at.failure is None and not at.problems:
            self._commands.append(c.CancelRun())
        else:
            self._commands.append(c.FailRun(error=_with_problems(at.failure, at.problems)))


def _with_problems(failure: ErrorInfo | None, problems: list[ErrorInfo]) -> ErrorInfo:
    """Return the error of a run, including what could not be undone."""
    first = failure or ErrorInfo("RunCancelled", "the run was cancelled")
    if not problems:
        return first
    members = "; ".join(f"{error}" for error in (first, *problems))
    return ErrorInfo("ExceptionGroup", f"what was done could not all be undone: {members}"[:8_000], cause=first)


APPROVAL_FORM = codec.encode(
    {
        "type": "object",
        "properties": {"approved": {"type": "boolean"}, "comment": {"type": "string", "maxLength": 4_000}},
        "required": ["approved"],
        "additionalProperties": False,
    }
)
"""The form of the task that approves a run or a step."""

_Runner = Callable[[PlanProgram, PlanStep, str, int, Mapping[str, Any], int], None]

_RUN: dict[str, _Runner] = {
    "activity": PlanProgram._run_activity,
    "signal": PlanProgram._wait_signal,
    "task": PlanProgram._ask_human,
    "sleep": PlanProgram._sleep,
    "workflow": PlanProgram._run_workflow,
    "plan": PlanProgram._run_plan,
}

_ON_EVENT: dict[type[e.Body], Callable[[PlanProgram, Event], None]] = {
    e.RunStarted: PlanProgram._begin,
    e.ContinuedAsNew: PlanProgram._begin,
    e.RunCancelRequested: PlanProgram._cancel,
    e.StepCompleted: PlanProgram._completed,
    e.StepFailed: PlanProgram._failed,
    e.StepSkipped: PlanProgram._skipped,
    e.SignalAccepted: PlanProgram._retried,
    e.TimerFired: PlanProgram._fired,
    e.SignalReceived: PlanProgram._received,
    e.SignalTimedOut: PlanProgram._timed_out,
    e.TaskCompleted: PlanProgram._answered,
    e.ChildCompleted: PlanProgram._completed,
    e.ChildFailed: PlanProgram._failed,
}


def msgspec_ref(ref: PlanRef) -> dict[str, str]:
    """Return a reference as it is shown to people."""
    return {"plan_id": ref.plan_id, "plan_version": ref.plan_version, "sha256": ref.sha256}


def _settled_by(outcome: Event) -> str | None:
    """Return the step that an operator has retried or skipped."""
    if isinstance(outcome.data, e.SignalAccepted):
        return outcome.data.target_step_id
    return outcome.step_id if isinstance(outcome.data, e.StepSkipped) else None


def _begun_by(outcome: Event) -> str:
    """Return the step that is retried by the plan's policy because of an outcome, or an empty text."""
    step_id, _, part = (outcome.step_id or "").partition(PART_MARK)
    return step_id if part.startswith("retry") else ""


def _object(input: Raw) -> dict[str, Any]:
    given = decoded(input)
    if given is None:
        return {}
    if not isinstance(given, dict):
        raise InvalidInput("the inputs of a plan are an object by their names")
    return given


def _is_true(value: Any) -> bool:
    """Return whether a value counts as true by the rules of JMESPath: false, null and empty values do not."""
    return value is not None and value is not False and value != "" and value != [] and value != {}


def _milliseconds(seconds: float) -> int:
    return max(1, round(seconds * 1_000))


def _plain_error(error: ErrorInfo) -> dict[str, Any]:
    return {
        "category": error.category,
        "code": error.code,
        "message": error.message,
        "retryable": error.retryable,
    }


def _short(error: ErrorInfo) -> ErrorInfo:
    """Return an error as it is carried over rotations: without its traceback and causes."""
    return replace(error, traceback="", cause=None)


def _packed(statuses: bytearray) -> str:
    """Return statuses run-length encoded: `S120F1P9879`."""
    parts, position, size = [], 0, len(statuses)
    while position < size:
        status = statuses[position]
        end = position + 1
        while end < size and statuses[end] == status:
            end += 1
        parts.append(f"{_LETTERS[status]}{end - position}")
        position = end
    return "".join(parts)


def _unpacked(packed: str) -> bytes:
    found, position = bytearray(), 0
    while position < len(packed):
        end = position + 1
        while end < len(packed) and packed[end].isdigit():
            end += 1
        found += bytes([_LETTERS.index(packed[position])]) * int(packed[position + 1 : end])
        position = end
    return bytes(found)
