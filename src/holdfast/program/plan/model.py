"""The document of a plan: its fields, how it is read, and its JSON Schema.

Reading collects every problem with its position. A plan with valid fields may still be wrong as a whole:
`definition.py` validates the dependencies of its steps, and their arguments.
"""

import re
from collections.abc import Iterator
from difflib import get_close_matches
from itertools import islice
from typing import Annotated, Any, Literal, get_args

import msgspec
from msgspec import UNSET, Meta, Struct, UnsetType
from msgspec.structs import asdict, fields

from holdfast.core import codec
from holdfast.core.keys import check_name, check_step_name
from holdfast.core.timing import Retry
from holdfast.errors import HoldfastError, InvalidInput
from holdfast.limits import DURATION_MS, PLAN_PROBLEMS, PLAN_STEPS, SECRETS
from holdfast.program.plan.text import Place, PlanProblem, UnreadablePlan, pointer, read_text
from holdfast.program.secrets import Secret

StepKind = Literal["activity", "signal", "task", "sleep", "workflow", "plan"]
OnFailure = Literal["fail", "pause", "continue", "compensate"]
InputType = Literal["any", "string", "integer", "number", "boolean", "array", "object"]

KINDS: tuple[str, ...] = get_args(StepKind)

_ID = r"^[A-Za-z_][A-Za-z0-9_-]{0,99}$(?!\n)"  # `$` alone would accept a trailing line break

Id = Annotated[str, Meta(pattern=_ID, description="letters, digits, _ and -, up to 100 of them, without a first digit")]
Text = Annotated[str, Meta(max_length=4_000)]
Seconds = Annotated[float, Meta(gt=0, le=DURATION_MS // 1_000, description="seconds")]
Reference = Annotated[str, Meta(min_length=4, description="a reference such as ${steps.load.output}")]


class _Part(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """A part of a plan. Unknown fields are refused."""


class RetryPolicy(_Part, frozen=True, kw_only=True):
    """How often something is retried, and how long to wait before that."""

    max_attempts: Annotated[int, Meta(ge=0, lt=2**31)] = 10
    initial_ms: Annotated[int, Meta(ge=0, le=DURATION_MS)] = 1_000
    factor: Annotated[float, Meta(ge=1, le=1_000)] = 2.0
    most_ms: Annotated[int, Meta(ge=0, le=DURATION_MS)] = 100_000
    jitter: Annotated[float, Meta(ge=0, le=1)] = 0.2
    non_retryable: tuple[str, ...] = ()
    count_lost: bool = True

    def as_retry(self) -> Retry:
        """Return it as the retry policy of activities."""
        return Retry(**asdict(self))


class PlanInput(_Part, frozen=True, kw_only=True):
    """An input of a run of the plan, by name. It is required unless it has a default, or `required` is false."""

    type: InputType = "any"
    description: Text = ""
    default: Any = UNSET
    required: bool | UnsetType = UNSET

    @property
    def is_required(self) -> bool:
        """Whether a run cannot be started without it."""
        return self.default is UNSET if self.required is UNSET else self.required is True


class Compensation(_Part, frozen=True, kw_only=True):
    """The activity that undoes a step that has succeeded. Its input may refer to `output`, the step's own."""

    activity: str
    input: dict[str, Any] = {}
    retry: RetryPolicy | None = None
    timeout: Seconds | None = None
    queue: str | None = None


class Approval(_Part, frozen=True, kw_only=True):
    """Who may approve. Without roles and an assignee, everyone who may complete tasks."""

    roles: Annotated[tuple[str, ...], Meta(max_length=100)] = ()
    assignee: str | None = None
    description: Text = ""


class Step(_Part, frozen=True, kw_only=True):
    """A step: an activity, signal, task, sleep, workflow or plan, and when it runs."""

    id: Id
    activity: str | UnsetType = UNSET
    signal: str | UnsetType = UNSET
    task: str | UnsetType = UNSET
    sleep: Seconds | Reference | UnsetType = UNSET
    workflow: str | UnsetType = UNSET
    plan: str | dict[str, Any] | UnsetType = UNSET
    """A registered plan by its id, a plan itself, or a reference to one that an earlier step has created."""

    description: Text = ""
    depends_on: tuple[str, ...] = ()
    input: Any = UNSET
    when: bool | Reference = True
    for_each: list[Any] | Reference | None = None
    max_concurrency: Annotated[int, Meta(ge=1, le=PLAN_STEPS)] | None = None
    retry: RetryPolicy | None = None
    timeout: Seconds | None = None
    schedule_to_close: Seconds | None = None
    heartbeat_timeout: Seconds | None = None
    queue: str | None = None
    idempotency_key: str | None = None
    secrets: Annotated[tuple[str, ...], Meta(max_length=SECRETS)] = ()
    version: str | None = None
    """The version of the workflow or plan; if None, the one that was registered last."""

    sha256: Annotated[str, Meta(pattern="^[0-9a-f]{64}$")] | None = None
    """The expected hash of the plan's text, which is refused if it has another."""

    on_failure: OnFailure | None = None
    compensate: Compensation | None = None
    requires_approval: bool | Approval = False
    form: dict[str, Any] | None = None
    roles: Annotated[tuple[str, ...], Meta(max_length=100)] = ()
    assignee: str | None = None

    @property
    def kind(self) -> StepKind:
        """The kind of the step."""
        return next(kind for kind in get_args(StepKind) if getattr(self, kind) is not UNSET)

    @property
    def target(self) -> Any:
        """What the step runs, waits for or starts."""
        return getattr(self, self.kind)


class Plan(_Part, frozen=True, kw_only=True):
    """A plan: a directed acyclic graph of steps."""

    plan: str
    """The id of the plan."""

    version: str
    description: Text = ""
    inputs: dict[Id, PlanInput] = {}
    steps: Annotated[tuple[Step, ...], Meta(min_length=1, max_length=PLAN_STEPS)]
    output: Any = UNSET
    """The result of a run, with references; if omitted, the output of each step that no other step depends on."""

    on_failure: OnFailure = "fail"
    """What follows when a step without its own `on_failure` fails."""

    retry: RetryPolicy | None = None
    """How often a failed step is retried as a new logical attempt. Its own `retry` is exhausted first."""

    requires_approval: bool | Approval = False


OF_KIND: dict[str, frozenset[str]] = {
    "activity": frozenset(
        "input retry timeout schedule_to_close heartbeat_timeout queue idempotency_key secrets".split()
    ),
    "signal": frozenset({"timeout"}),
    "task": frozenset("input timeout form roles assignee".split()),
    "sleep": frozenset(),
    "workflow": frozenset("input timeout version".split()),
    "plan": frozenset("input timeout version sha256".split()),
}
"""The fields that only some kinds of steps have."""

_OF_SOME_KIND = frozenset().union(*OF_KIND.values())


class ParsedPlan(Struct, frozen=True):
    """The result of reading a text: the plan, if its fields are valid, and every problem."""

    plan: Plan | None
    problems: tuple[PlanProblem, ...]
    lines: dict[Place, int]

    def problem(self, message: str, *place: str | int) -> PlanProblem:
        """Return a problem at a place, with its line."""
        return problem_at(self.lines, message, place)


def problem_at(lines: dict[Place, int], message: str, place: Place) -> PlanProblem:
    """Return a problem at a place, with its line or that of the enclosing value."""
    line, inner = None, place
    while line is None and lines:
        line = lines.get(inner)
        if not inner:
            break
        inner = inner[:-1]
    return PlanProblem(pointer(place), message, line)


def read_plan(body: bytes) -> ParsedPlan:
    """Read the text of a plan."""
    try:
        value, lines = read_text(body)
        codec.encode(value)  # refuses what cannot be stored, such as lone surrogates
    except UnreadablePlan as problem:
        return ParsedPlan(None, (problem.problem,), {})
    except InvalidInput as problem:
        return ParsedPlan(None, (PlanProblem("", problem.message),), {})
    found = list(islice(_fields(value, lines), PLAN_PROBLEMS))
    if found:
        return ParsedPlan(None, tuple(found), lines)
    return ParsedPlan(msgspec.convert(value, Plan), (), lines)


def _fields(value: Any, lines: dict[Place, int]) -> Iterator[PlanProblem]:
    """Yield the problems of a document's fields: one problem for each step, and one for the rest."""
    if not isinstance(value, dict):
        yield problem_at(lines, "a plan is an object with the fields plan, version and steps", ())
        return
    steps = value.get("steps")
    rest = value if not isinstance(steps, list) else {**value, "steps": steps and [{"id": "a"}]}
    yield from _convert(rest, Plan, (), lines)
    yield from _names(value, lines)
    if not isinstance(steps, list):
        return
    if len(steps) > PLAN_STEPS:
        yield problem_at(lines, f"a plan has at most {PLAN_STEPS} steps, not {len(steps)}", ("steps",))
        return
    for number, step in enumerate(steps):
        place = ("steps", number)
        unfit = list(_convert(step, Step, place, lines))
        yield from unfit or _step_fields(step, place, lines)


def _convert(value: Any, kind: type[Struct], place: Place, lines: dict[Place, int]) -> Iterator[PlanProblem]:
    """Yield why a value is not of this type: every problem of a mapping, for each of its fields."""
    for _ in range(PROBLEMS_OF_ONE):
        try:
            msgspec.convert(value, kind)
            return
        except msgspec.ValidationError as problem:
            where, reason = codec.explain_unfit(problem)
            keys = list(_keys(where))
            unknown = _UNKNOWN.match(str(problem))
            if unknown is not None:
                keys.append(unknown[1])
                reason = f"there is no field `{unknown[1]}`{_similar(unknown[1], kind) if len(keys) == 1 else ''}"
            elif reason == codec.NO_CHOICE:
                reason = str(problem).split(" - at ")[0] + _choices(keys)
            elif _UNQUOTED.match(reason):
                reason += "; in YAML put it in quotes"
            yield problem_at(lines, reason, (*place, *keys))
        except RecursionError:
            yield problem_at(lines, "it is nested too deep", place)
            return
        if not keys or not isinstance(value, dict) or keys[0] not in value or keys[0] == "steps":
            return
        field = keys[0]
        value = {name: part for name, part in value.items() if name != field}
        if field in _REQUIRED:
            value[field] = "a"


PROBLEMS_OF_ONE = 10
"""The maximum number of problems that are reported for one step."""

_REQUIRED = frozenset({"id", "plan", "version"})
_UNKNOWN = re.compile(r"Object contains unknown field `(.{1,200}?)`")
_UNQUOTED = re.compile(r"Expected `str`, got `(int|float|bool)`")


def _similar(name: str, kind: type[Struct]) -> str:
    """Return a hint with the field that was probably meant."""
    found = get_close_matches(name, [field.encode_name for field in fields(kind)], 1)
    return f"; did you mean `{found[0]}`?" if found else ""


def _choices(keys: list[str | int]) -> str:
    known: Any = {"on_failure": OnFailure, "type": InputType}.get(str(keys[-1]) if keys else "")
    return "" if known is None else f"; it is one of {', '.join(get_args(known))}"


def _keys(where: str) -> Iterator[str | int]:
    """Yield the keys of a path in msgspec's notation: `.steps[0].retry`."""
    for name, number in re.findall(r"\.([^.\[]+)|\[([0-9.]+)\]", where):
        if name:
            yield name
        elif number.isdigit():
            yield int(number)


def _names(value: dict[str, Any], lines: dict[Place, int]) -> Iterator[PlanProblem]:
    name = value.get("plan")
    problem: HoldfastError | None = check_step_name("the id of a plan", name) if isinstance(name, str) else None
    if problem is None and isinstance(name, str) and "|" in name:
        problem = InvalidInput(f"the id of a plan may not contain '|': {name!r}")
    if problem is not None:
        yield problem_at(lines, problem.message, ("plan",))
    version = value.get("version")
    problem = check_name("version", version) if isinstance(version, str) else None
    if problem is None and isinstance(version, str) and "|" in version:
        problem = InvalidInput(f"version may not contain '|': {version!r}")
    if problem is not None:
        yield problem_at(lines, problem.message, ("version",))


def _step_fields(step: dict[str, Any], place: Place, lines: dict[Place, int]) -> Iterator[PlanProblem]:
    """Yield the problems of a step whose fields have the right types."""
    kinds = [kind for kind in KINDS if kind in step]
    if len(kinds) != 1:
        found = f"and this has {' and '.join(kinds)}" if kinds else "and this has none"
        yield problem_at(lines, f"a step has exactly one of {', '.join(KINDS)}, {found}", place)
        return
    [kind] = kinds
    for field in step:
        if field in _OF_SOME_KIND and field not in OF_KIND[kind]:
            yield problem_at(lines, f"a step of kind {kind} has no {field}", (*place, field))
    if "max_concurrency" in step and step.get("for_each") is None:
        yield problem_at(lines, "max_concurrency bounds a for_each, and there is none", (*place, "max_concurrency"))
    if step.get("on_failure") == "pause" and kind != "activity":
        problem = "on_failure: pause is for activities: what else fails has ended, and cannot be begun anew in place"
        yield problem_at(lines, problem, (*place, "on_failure"))
    if step.get("compensate") is not None and kind == "sleep":
        yield problem_at(lines, "a step of kind sleep has nothing to compensate", (*place, "compensate"))
    if step.get("sha256") is not None and not isinstance(step["plan"], str):
        yield problem_at(lines, "sha256 is of a plan that is named by its id", (*place, "sha256"))
    yield from _step_names(step, kind, place, lines)


def _step_names(step: dict[str, Any], kind: str, place: Place, lines: dict[Place, int]) -> Iterator[PlanProblem]:
    named: list[tuple[Place, Any]] = [((kind,), step[kind])] if isinstance(step[kind], str) and kind != "sleep" else []
    named += [(("queue",), step["queue"])] if step.get("queue") else []
    compensate = step.get("compensate")
    if compensate is not None:
        named += [(("compensate", "activity"), compensate["activity"])]
        named += [(("compensate", "queue"), compensate["queue"])] if compensate.get("queue") else []
    for where, name in named:
        if kind == "plan" and "${" in name:
            continue
        problem = check_step_name(str(where[-1]), name)
        if problem is not None:
            yield problem_at(lines, problem.message, (*place, *where))
    for number, secret in enumerate(step.get("secrets", ())):
        try:
            Secret(secret)
        except InvalidInput as unfit:
            yield problem_at(lines, unfit.message, (*place, "secrets", number))
    people = [("roles", role) for role in step.get("roles", ())] + [("assignee", step.get("assignee"))]
    approval = step.get("requires_approval")
    if isinstance(approval, dict):
        people += [("roles", role) for role in approval.get("roles", ())] + [("assignee", approval.get("assignee"))]
    for field, name in people:
        problem = None if name is None else check_name(field, name)
        if problem is not None:
            yield problem_at(lines, problem.message, (*place, field))


def plan_schema() -> dict[str, Any]:
    """Return the JSON Schema of a plan (2020-12)."""
    definitions = msgspec.json.schema(Plan)["$defs"]
    step = definitions["Step"]
    step["oneOf"] = [
        {
            "required": [kind],
            "properties": {
                field.encode_name: False for field in fields(Step) if field.name in _OF_SOME_KIND - OF_KIND[kind]
            },
        }
        for kind in KINDS
    ]
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        **definitions.pop("Plan"),
        "title": "Holdfast plan",
        "$defs": definitions,
    }
