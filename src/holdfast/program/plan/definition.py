"""A plan that is ready to run: its steps, their dependencies, and its problems.

A `PlanDefinition` is made from the exact bytes of a document, and is identified by their hash. What does not depend on
an installation is validated when it is created: unknown dependencies, cycles, references to values that the plan does
not have. `problems_here` validates the rest: whether activities and workflows exist, and whether arguments fit them.
"""

from collections import OrderedDict
from collections.abc import Collection, Iterator, Mapping
from functools import cached_property
from hashlib import sha256
from typing import Any, Protocol
from weakref import WeakValueDictionary

import msgspec
from msgspec import UNSET, Raw

from holdfast.core import codec
from holdfast.core.graph import Graph, GraphNode, NodeKind
from holdfast.core.keys import check_idempotency_key
from holdfast.core.plans import PlanRef
from holdfast.errors import InvalidInput, PlanInvalid
from holdfast.limits import PLAN_PROBLEMS
from holdfast.program.definitions import ActivityDefinition, WorkflowDefinition
from holdfast.program.plan.forms import problems_of_form
from holdfast.program.plan.model import Plan, PlanInput, Step, read_plan
from holdfast.program.plan.references import Expression, Template, is_template, parse_template
from holdfast.program.plan.schemas import schema_at, types_of
from holdfast.program.plan.text import Place, PlanProblem, keys_of
from holdfast.program.values import PLAIN, Signature, Values

LAST_PLANS = 16
"""How many plans that no run in memory uses are kept in memory."""

_OWN_DATA = frozenset({"when", "for_each", "compensate"})
"""The fields of a step whose references are filled separately."""

SHOWN_STEPS = 10
"""How many steps of a cycle an error shows."""


class Installed(Protocol):
    """What a registry provides that a plan may use."""

    activities: dict[str, ActivityDefinition]
    workflows: dict[tuple[str, str], Any]


class PlanCache:
    """Plans in memory, by hash: those that are in use, and the most recent ones."""

    def __init__(self) -> None:
        self._used: WeakValueDictionary[str, PlanDefinition] = WeakValueDictionary()
        self._last: OrderedDict[str, PlanDefinition] = OrderedDict()

    def get(self, sha256: str) -> "PlanDefinition | None":
        """Return a plan if it is in memory."""
        found = self._used.get(sha256)
        if found is not None:
            self.keep(found)
        return found

    def keep(self, definition: "PlanDefinition") -> None:
        """Keep a plan for a while, even if no run uses it."""
        self._used[definition.sha256] = self._last[definition.sha256] = definition
        self._last.move_to_end(definition.sha256)
        while len(self._last) > LAST_PLANS:
            self._last.popitem(last=False)


class PlanStep:
    """A step of a plan and its position; other steps are referred to by their positions."""

    __slots__ = (
        "consumes",
        "data",
        "dependents",
        "depends_on",
        "has_when",
        "inline",
        "on_failure",
        "position",
        "step",
        "uses",
    )

    def __init__(self, step: Step, position: int, on_failure: str) -> None:
        self.step = step
        self.position = position
        self.has_when = step.when is not True
        self.on_failure = "fail" if on_failure == "pause" and step.kind != "activity" else on_failure
        self.depends_on: tuple[int, ...] = ()
        """What has to end before the step begins: dependencies that are named or implied by references."""
        self.data: frozenset[int] = frozenset()
        """The dependencies whose output it cannot do without."""
        self.consumes: frozenset[int] = frozenset()
        """The dependencies whose output, status or error it refers to."""
        self.uses: dict[str, frozenset[int]] = {}
        """The same by the field that refers to them: `when`, `for_each`, `compensate`; and `input` for all others."""
        self.dependents: list[int] = []
        self.inline: PlanDefinition | None = None
        """The plan that is written in the step itself."""

    @property
    def used_by_items(self) -> frozenset[int]:
        """The consumed steps whose results it needs as long as its items are running."""
        nothing = frozenset[int]()
        return self.uses.get("input", nothing) | self.uses.get("compensate", nothing)


class PlanDefinition:
    """A validated plan. Creating one from an invalid document raises `PlanInvalid`, with every problem."""

    def __init__(self, body: bytes, values: Values = PLAIN) -> None:
        parsed = read_plan(body)
        if parsed.plan is None:
            raise invalid(parsed.problems)
        self.plan: Plan = parsed.plan
        self.body = body
        self.sha256 = sha256(body).hexdigest()
        self.name = self.plan.plan
        self.version = self.plan.version
        self.values = values
        self.forms: dict[str, msgspec.json.Decoder[Any]] = {}
        self.queries: dict[str, Signature] = {}
        self.updates: dict[str, Signature] = {}
        self.signals: dict[str, Any] = {}
        self.allows_other_signals = True
        self.signal_decoders: dict[str, msgspec.json.Decoder[Any]] = {}
        self._parsed = parsed
        self._elsewhere: frozenset[str] = frozenset()
        self._workflows_elsewhere: frozenset[tuple[str, str]] = frozenset()
        self.by_id: dict[str, PlanStep] = {}
        problems = list(self._compile())
        if problems:
            raise invalid(problems)

    @property
    def ref(self) -> PlanRef:
        """The reference to this plan."""
        return PlanRef(plan_id=self.name, plan_version=self.version, sha256=self.sha256)

    @property
    def fingerprint(self) -> str:
        """The hash, which distinguishes it from another plan of the same name and version."""
        return self.sha256

    # --- structure

    def _compile(self) -> Iterator[PlanProblem]:
        at = self._parsed.problem
        self.steps: list[PlanStep] = []
        for position, step in enumerate(self.plan.steps):
            compiled = PlanStep(step, position, step.on_failure or self.plan.on_failure)
            if step.id in self.by_id:
                other = self.by_id[step.id].position
                yield at(f"the id {step.id!r} is taken by step {other}", "steps", position, "id")
            self.by_id.setdefault(step.id, compiled)
            self.steps.append(compiled)
        for compiled in self.steps:
            yield from self._connect(compiled)
        yield from self._check_output()
        yield from self._cycles()
        for compiled in self.steps:
            for other in compiled.depends_on:
                self.steps[other].dependents.append(compiled.position)

    def _connect(self, compiled: PlanStep) -> Iterator[PlanProblem]:
        """Determine the dependencies of a step."""
        step, at, here = compiled.step, self._parsed.problem, ("steps", compiled.position)
        found: dict[int, None] = {}
        for number, name in enumerate(step.depends_on):
            other = self.by_id.get(name)
            if name == step.id:
                yield at(f"step {step.id!r} depends on itself", *here, "depends_on", number)
            elif other is None:
                yield at(f"there is no step {name[:100]!r}", *here, "depends_on", number)
            else:
                found[other.position] = None
        data, uses = set(), dict[str, set[int]]()
        for place, expression in self._expressions(compiled):
            problem = self._objection(compiled, place, expression)
            if problem is not None:
                yield at(f"${{{expression.text[:200]}}}: {problem}", *here, *place)
                continue
            for name in expression.steps:
                other = self.by_id[name]
                if other is compiled:
                    continue
                found[other.position] = None
                uses.setdefault(place[0] if place[0] in _OWN_DATA else "input", set()).add(other.position)
                if place[0] not in ("when", "compensate"):
                    data |= {other.position for path in expression.paths if path[1:3] == (name, "output")}
        for place, problem in self._bad_templates(compiled):
            yield at(problem, *here, *place)
        if step.form is not None:
            for place, problem in problems_of_form(step.form, ("form",)):
                yield at(problem, *here, *place)
        if isinstance(step.plan, dict):
            yield from self._read_inline(compiled, step.plan)
        if step.idempotency_key is not None and not is_template(step.idempotency_key):
            unfit = check_idempotency_key(step.idempotency_key)
            if unfit is not None:
                yield at(unfit.message, *here, "idempotency_key")
        compiled.depends_on = tuple(found)
        compiled.uses = {field: frozenset(positions) for field, positions in uses.items()}
        compiled.data, compiled.consumes = frozenset(data), frozenset().union(*uses.values())

    def _read_inline(self, compiled: PlanStep, document: dict[str, Any]) -> Iterator[PlanProblem]:
        """Read the plan that is written in a step, and compare what it is given with what it takes."""
        at, here = self._parsed.problem, ("steps", compiled.position)
        try:
            compiled.inline = PlanDefinition(bytes(codec.encode(document)), self.values)
        except PlanInvalid as problem:
            for each in problem.details["problems"]:
                yield at(each["message"], *here, "plan", *keys_of(each["place"]))
            return
        given = {} if compiled.step.input is UNSET or compiled.step.input is None else compiled.step.input
        if not isinstance(given, dict):
            return  # a reference: it is checked when its value is known
        for name, declared in compiled.inline.plan.inputs.items():
            if name not in given and declared.is_required:
                yield at(f"plan {compiled.inline.name!r} needs the input {name!r}", *here, "input")
        for name in given:
            if name not in compiled.inline.plan.inputs:
                yield at(f"plan {compiled.inline.name!r} has no input {name[:100]!r}", *here, "input", name)

    def _values(self, step: Step) -> Iterator[tuple[Place, Any]]:
        """Yield the fields of a step that may hold references."""
        for field in ("when", "for_each", "input", "sleep", "idempotency_key"):
            value = getattr(step, field)
            if value is not UNSET and value is not None:
                yield (field,), value
        if step.plan is not UNSET and isinstance(step.plan, str):
            yield ("plan",), step.plan
        if step.compensate is not None:
            yield ("compensate", "input"), step.compensate.input

    def _expressions(self, compiled: PlanStep) -> Iterator[tuple[Place, Expression]]:
        for place, value in self._values(compiled.step):
            for inner, template in templates_in(value, place):
                if isinstance(template, Template):
                    for expression in template.expressions:
                        yield inner, expression

    def _bad_templates(self, compiled: PlanStep) -> Iterator[tuple[Place, str]]:
        for place, value in self._values(compiled.step):
            for inner, template in templates_in(value, place):
                if isinstance(template, str):
                    yield inner, template
            if place[0] in ("when", "for_each", "sleep", "plan") and isinstance(value, str):
                is_name = place[0] == "plan" and not is_template(value)
                if not is_name and not is_reference(value):
                    yield place, f"{place[0]} is a reference such as ${{steps.load.output}}, not {value[:100]!r}"

    def _objection(self, compiled: PlanStep, place: Place, expression: Expression) -> str | None:
        """Return why an expression cannot be used at a place in a step, or None."""
        step = compiled.step
        for path in expression.paths:
            root = path[0]
            if root == "inputs" and len(path) > 1 and path[1] not in self.plan.inputs:
                return f"there is no input {path[1][:100]!r}"
            if root == "steps" and path[1] not in self.by_id:
                return f"there is no step {path[1][:100]!r}"
            if root == "steps" and path[1] == step.id and place[0] != "compensate":
                return f"step {step.id!r} refers to itself"
            if root in ("item", "index") and (step.for_each is None or place[0] in ("when", "for_each")):
                return f"{root} is only there in a step with for_each, and not in its when and for_each"
            if root == "output" and place[0] != "compensate":
                return "output is only there in compensate; elsewhere it is steps.ID.output"
        return None

    def _check_output(self) -> Iterator[PlanProblem]:
        self.of_output: frozenset[int]
        consumes: set[int] = set()
        at = self._parsed.problem
        if self.plan.output is not UNSET:
            for place, template in templates_in(self.plan.output, ("output",)):
                if isinstance(template, str):
                    yield at(template, *place)
                    continue
                for expression in template.expressions:
                    for path in expression.paths:
                        if path[0] in ("item", "index", "output"):
                            yield at(f"${{{expression.text[:200]}}}: there is no {path[0]} here", *place)
                        elif path[0] == "inputs" and len(path) > 1 and path[1] not in self.plan.inputs:
                            yield at(f"there is no input {path[1][:100]!r}", *place)
                        elif path[0] == "steps" and path[1] not in self.by_id:
                            yield at(f"there is no step {path[1][:100]!r}", *place)
                        elif path[0] == "steps":
                            consumes.add(self.by_id[path[1]].position)
        self.of_output = frozenset(consumes)

    def _cycles(self) -> Iterator[PlanProblem]:
        """Yield a cycle with its path, if there is one: remove whatever can run until nothing can."""
        left = [len(compiled.depends_on) for compiled in self.steps]
        dependents: list[list[int]] = [[] for _ in self.steps]
        for compiled in self.steps:
            for other in compiled.depends_on:
                dependents[other].append(compiled.position)
        ready = [position for position, count in enumerate(left) if count == 0]
        done = 0
        while ready:
            done += 1
            for other in dependents[ready.pop()]:
                left[other] -= 1
                if left[other] == 0:
                    ready.append(other)
        if done == len(self.steps):
            return
        at = next(position for position, count in enumerate(left) if count)
        seen: dict[int, int] = {}
        path: list[int] = []
        while at not in seen:  # each of the remaining steps waits for another of them
            seen[at] = len(path)
            path.append(at)
            at = next(other for other in self.steps[at].depends_on if left[other])
        cycle = [self.steps[position].step.id for position in reversed([*path[seen[at] :], at])]
        shown = cycle if len(cycle) <= SHOWN_STEPS else [*cycle[: SHOWN_STEPS - 1], "…", cycle[-1]]
        text = f"the steps wait for each other in a cycle of {len(cycle) - 1}: {' → '.join(shown)}"
        yield self._parsed.problem(text, "steps", at, "depends_on")

    @cached_property
    def counts(self) -> list[int]:
        """How many other steps each step waits for."""
        return [len(compiled.depends_on) for compiled in self.steps]

    @cached_property
    def consumers(self) -> list[int]:
        """How many other steps refer to each step; one more if the plan's output needs it."""
        found = [0] * len(self.steps)
        for compiled in self.steps:
            for other in compiled.consumes:
                found[other] += 1
        kept = self.of_output if self.plan.output is not UNSET else self.last
        for position in kept:
            found[position] += 1
        return found

    @cached_property
    def last(self) -> frozenset[int]:
        """The steps that no other step depends on."""
        return frozenset(compiled.position for compiled in self.steps if not compiled.dependents)

    def needed_after(self, done: Collection[str]) -> set[str]:
        """Return the steps whose results are needed by a run in which these steps need not run again."""
        wanted = self.of_output if self.plan.output is not UNSET else self.last
        needed = {self.steps[position].step.id for position in wanted}
        needed |= {compiled.step.id for compiled in self.steps if compiled.step.compensate is not None}
        for compiled in self.steps:
            is_done = compiled.step.id in done
            fields = ("when", "compensate") if is_done else compiled.uses
            needed |= {self.steps[other].step.id for field in fields for other in compiled.uses.get(field, ())}
        return needed

    # --- what is required of an installation

    def problems_here(
        self,
        here: Installed,
        activities_elsewhere: Collection[str] = (),
        workflows_elsewhere: Collection[tuple[str, str]] = (),
    ) -> list[PlanProblem]:
        """Return what this plan requires that is missing or does not fit.

        Whether arguments fit activities that only other nodes have is not known here.
        """
        self._elsewhere = frozenset(activities_elsewhere)
        self._workflows_elsewhere = frozenset(workflows_elsewhere)
        return sorted(self._problems_here(here))[:PLAN_PROBLEMS]

    def _problems_here(self, here: Installed) -> Iterator[PlanProblem]:
        at = self._parsed.problem
        for compiled in self.steps:
            step, place = compiled.step, ("steps", compiled.position)
            if step.activity is not UNSET:
                yield from self._arguments(here, compiled, step.activity, step.input, (*place, "input"), "activity")
            elif step.workflow is not UNSET:
                signature = workflow_signature(here, step.workflow, step.version)
                names = (step.workflow, step.version)
                if signature is None and not any(_is_meant(names, each) for each in self._workflows_elsewhere):
                    wanted = "" if step.version is None else f" in version {step.version!r}"
                    yield at(f"there is no workflow {step.workflow!r}{wanted} here", *place, "workflow")
                elif isinstance(signature, Signature):
                    yield from self._fit(here, compiled, signature, step.input, (*place, "input"))
            elif compiled.inline is not None:
                for problem in compiled.inline.problems_here(here, self._elsewhere, self._workflows_elsewhere):
                    yield at(problem.message, *place, "plan", *keys_of(problem.place))
            if step.compensate is not None:
                inner = (*place, "compensate")
                yield from self._arguments(
                    here, compiled, step.compensate.activity, step.compensate.input, (*inner, "input"), "activity"
                )

    def _arguments(
        self, here: Installed, compiled: PlanStep, name: str, input: Any, place: Place, field: str
    ) -> Iterator[PlanProblem]:
        definition = here.activities.get(name)
        if definition is None and name in self._elsewhere:
            return
        if definition is None:
            yield self._parsed.problem(f"there is no activity {name!r} here", *place[:-1], field)
        else:
            yield from self._fit(here, compiled, definition.signature, input, place)

    def _fit(
        self, here: Installed, compiled: PlanStep, signature: Signature, input: Any, place: Place
    ) -> Iterator[PlanProblem]:
        """Yield why the arguments of a step do not fit a function."""
        at = self._parsed.problem
        given = {} if input is UNSET or input is None else input
        if isinstance(given, str) and is_template(given):
            return  # all arguments come from a reference; they are checked when they are known
        if not isinstance(given, dict):
            yield at(f"the input of {signature.name} is an object of arguments by their names", *place)
            return
        later = {name for name, value in given.items() if any(True for _ in templates_in(value))}
        for name, reason in signature.misfits(given, later):
            yield at(reason, *place, *([name] if name in given else []))
        properties = signature.schemas()[0] if later else {}
        for name in later & set(signature.names):
            wanted, found = types_of(schema_at(properties, (name,))), self._types_of(here, compiled, given[name])
            if wanted is not None and found is not None and not any(_fits(one, wanted) for one in found):
                problem = f"argument {name!r} of {signature.name} is {_or(wanted)}, the reference is {_or(found)}"
                yield at(problem, *place, name)

    def _types_of(self, here: Installed, compiled: PlanStep, value: Any) -> frozenset[str] | None:
        """Return the JSON types that a value with references may have, or None if that is not known."""
        if isinstance(value, dict):
            return frozenset({"object"})
        if isinstance(value, list):
            return frozenset({"array"})
        if not isinstance(value, str):
            return None
        if not is_reference(value):
            return frozenset({"string"})
        [expression] = parse_template(value).expressions
        if not expression.is_path:
            return None
        return types_of(self._schema_of(here, compiled, expression.paths[0]))

    def _schema_of(self, here: Installed, compiled: PlanStep, path: tuple[str, ...]) -> dict[str, Any] | None:
        root, *names = path
        if root == "inputs" and len(names) == 1:
            return _schema_of_input(self.plan.inputs[names[0]])
        if root == "index":
            return {"type": "integer"}
        if root == "item" and isinstance(compiled.step.for_each, str) and is_reference(compiled.step.for_each):
            [expression] = parse_template(compiled.step.for_each).expressions
            listed = self._schema_of(here, compiled, expression.paths[0]) if expression.is_path else None
            return schema_at(listed, (None, *names)) if listed is not None else None
        if root == "steps" and len(names) > 1 and names[1] == "status":
            return {"type": "string"}
        if root == "steps" and len(names) > 1 and names[1] == "output":
            return self._schema_of_output(here, self.by_id[names[0]].step, tuple(names[2:]))
        return None

    def _schema_of_output(self, here: Installed, step: Step, names: tuple[str, ...]) -> dict[str, Any] | None:
        if step.for_each is not None and names:
            return None
        signature = None
        if step.activity is not UNSET and step.activity in here.activities:
            signature = here.activities[step.activity].signature
        elif step.workflow is not UNSET:
            signature = workflow_signature(here, step.workflow, step.version)
        if not isinstance(signature, Signature):
            return None
        result = signature.schemas()[1]
        return {"type": "array", "items": result} if step.for_each is not None else schema_at(result, names)

    # --- starting a run, and showing the plan

    def check_inputs(self, given: Mapping[str, Any]) -> dict[str, Any]:
        """Return the inputs of a run, with defaults; raise `InvalidInput` if one is missing or does not fit."""
        for name in given:
            if name not in self.plan.inputs:
                known = ", ".join(self.plan.inputs) or "none"
                raise InvalidInput(f"plan {self.name!r} has no input {str(name)[:100]!r}; it has {known}", field=name)
        found: dict[str, Any] = {}
        for name, declared in self.plan.inputs.items():
            if name not in given:
                if declared.is_required:
                    raise InvalidInput(f"plan {self.name!r} needs the input {name!r}", field=name)
                found[name] = None if declared.default is UNSET else declared.default
                continue
            value = given[name]
            wanted = types_of(_schema_of_input(declared))
            is_null = value is None and not declared.is_required
            if wanted is not None and not is_null and not any(_fits(one, wanted) for one in [type_of(value)]):
                problem = f"input {name!r} of plan {self.name!r} is {_or(wanted)}, not {type_of(value)}"
                raise InvalidInput(problem, field=name)
            found[name] = value
        return found

    def input_schema(self) -> dict[str, Any]:
        """Return the JSON Schema of the inputs of a run."""
        properties = {}
        for name, declared in self.plan.inputs.items():
            properties[name] = dict(_schema_of_input(declared) or {})
            if declared.description:
                properties[name]["description"] = declared.description
            if declared.default is not UNSET:
                properties[name]["default"] = declared.default
        required = [name for name, declared in self.plan.inputs.items() if declared.is_required]
        return {"type": "object", "properties": properties, "required": required, "additionalProperties": False}

    def needs(self) -> frozenset[str]:
        """Return the activities that a run may require."""
        named = {step.activity for step in self.plan.steps if step.activity is not UNSET}
        undone = {step.compensate.activity for step in self.plan.steps if step.compensate is not None}
        return frozenset(str(name) for name in named | undone)

    def graph(self) -> Graph:
        """Return the steps and the dependencies of each."""
        return Graph(kind="plan", nodes=tuple(self._node(compiled) for compiled in self.steps))

    def _node(self, compiled: PlanStep) -> GraphNode:
        step = compiled.step
        kind: NodeKind = "for_each" if step.for_each is not None else _NODE_KINDS[step.kind]
        details = [f"{step.kind} {step.target}" if isinstance(step.target, str | float | int) else step.kind]
        if step.when is not True:
            details.append(f"when {step.when}")
        if isinstance(step.for_each, str):
            details.append(f"for each of {step.for_each}")
        depends_on = tuple(self.steps[other].step.id for other in compiled.depends_on)
        return GraphNode(id=step.id, label=step.id, kind=kind, depends_on=depends_on, detail="; ".join(details)[:500])


_NODE_KINDS: dict[str, NodeKind] = {
    "activity": "activity",
    "signal": "signal",
    "task": "task",
    "sleep": "timer",
    "workflow": "child",
    "plan": "child",
}


def invalid(problems: "list[PlanProblem] | tuple[PlanProblem, ...]") -> PlanInvalid:
    """Return the error for a plan with these problems."""
    first = problems[0]
    line = "" if first.line is None else f"line {first.line}, "
    more = "" if len(problems) == 1 else f" (and {len(problems) - 1} more)"
    shown = [msgspec.to_builtins(problem) for problem in problems[:PLAN_PROBLEMS]]
    return PlanInvalid(f"the plan is not valid: {line}{first.place or '/'}: {first.message}{more}", problems=shown)


def check_plan(body: bytes, here: Installed | None = None) -> tuple[PlanDefinition | None, list[PlanProblem]]:
    """Return the plan that a text holds, if it is valid, and all its problems, including those of an installation."""
    try:
        definition = PlanDefinition(body)
    except PlanInvalid as problem:
        return None, msgspec.convert(problem.details["problems"], list[PlanProblem])
    return definition, definition.problems_here(here) if here is not None else []


def workflow_signature(here: Installed, name: str, version: str | None) -> Signature | None:
    """Return the signature of this version of a workflow, or of the last version; None if there is none."""
    found = [one for (known, of), one in here.workflows.items() if known == name and version in (None, of)]
    definition: WorkflowDefinition | None = found[-1] if found else None
    return None if definition is None else definition.signature


def _is_meant(names: tuple[str, str | None], workflow: tuple[str, str]) -> bool:
    """Return whether a step that names a workflow, and perhaps a version, refers to this one."""
    return names[0] == workflow[0] and names[1] in (None, workflow[1])


def templates_in(value: Any, place: Place = ()) -> Iterator[tuple[Place, Template | str]]:
    """Yield the templates in a value, with their places; for one that cannot be read, the reason instead."""
    pending = [(place, value)]
    while pending:
        at, part = pending.pop()
        if isinstance(part, str):
            if is_template(part):
                try:
                    yield at, parse_template(part)
                except InvalidInput as problem:
                    yield at, problem.message
        elif isinstance(part, dict):
            pending.extend(((*at, key), inner) for key, inner in part.items())
        elif isinstance(part, list | tuple):
            pending.extend(((*at, number), inner) for number, inner in enumerate(part))


def is_reference(text: str) -> bool:
    """Return whether a text is exactly one reference."""
    if not is_template(text):
        return False
    try:
        parts = parse_template(text).parts
    except InvalidInput:
        return True  # its problem is reported separately
    return len(parts) == 1 and isinstance(parts[0], Expression)


def fill(value: Any, data: Mapping[str, Any]) -> Any:
    """Return a value with its references replaced by what they refer to."""
    if isinstance(value, str):
        return parse_template(value).evaluate(data) if is_template(value) else value
    if isinstance(value, dict):
        return {key: fill(inner, data) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [fill(inner, data) for inner in value]
    return value


def _schema_of_input(declared: PlanInput) -> dict[str, Any] | None:
    return None if declared.type == "any" else {"type": declared.type}


def _fits(found: str, wanted: frozenset[str]) -> bool:
    return found in wanted or (found == "integer" and "number" in wanted) or (found == "number" and "integer" in wanted)


def _or(types: frozenset[str]) -> str:
    return " or ".join(sorted(types))


def type_of(value: Any) -> str:
    """Return the JSON type of a plain value."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "boolean"
    if isinstance(value, int):
        return "integer"
    if isinstance(value, float):
        return "number"
    return "string" if isinstance(value, str) else "array" if isinstance(value, list) else "object"


def decoded(raw: Raw) -> Any:
    """Return the plain value of JSON."""
    return codec.decode(raw, object)
