"""The text of a plan: what is read, what is refused, and where each problem is."""

import json
import time
from contextlib import suppress
from typing import Any

import jsonschema
import pytest

from holdfast.core.events import ArtifactRef
from holdfast.errors import HoldfastError, InvalidInput, PlanInvalid
from holdfast.limits import PLAN_BYTES, PLAN_PROBLEMS, PLAN_STEPS
from holdfast.program.definitions import ActivityDefinition, ActivityOptions, WorkflowDefinition
from holdfast.program.plan.definition import PlanDefinition, check_plan, fill
from holdfast.program.plan.forms import problems_of_form
from holdfast.program.plan.model import plan_schema
from holdfast.program.plan.references import parse_expression, parse_template
from holdfast.program.plan.text import pointer, read_text
from holdfast.program.secrets import Secret
from holdfast.registry import Registry

pytestmark = pytest.mark.contract("WF-1")

ETL = b"""
plan: etl
version: "3"
description: every night
inputs:
  day: {type: string}
  rows: {type: integer, default: 10}
steps:
  - id: extract
    activity: extract
    input: {day: "${inputs.day}", rows: "${inputs.rows}"}
    retry: {max_attempts: 5}
    timeout: 30
  - id: load
    for_each: ${steps.extract.output}
    max_concurrency: 4
    activity: load
    input: {row: "${item}"}
    compensate: {activity: unload, input: {row: "${item}"}}
  - id: check
    depends_on: [load]
    task: check
    roles: [analyst]
    when: ${inputs.rows > `5`}
  - {id: wait, signal: released, depends_on: [check], timeout: 60}
  - {id: rest, sleep: 1.5, depends_on: [wait]}
  - {id: report, workflow: report, depends_on: [rest], input: {name: no}}
output: {rows: "${steps.load.output}"}
"""


def registry() -> Registry:
    found = Registry()

    def extract(day: str, rows: int = 3) -> list[str]:
        return []

    def load(row: str) -> int:
        return 0

    def unload(row: str) -> None: ...

    def fetch(key: Secret, file: ArtifactRef, options: dict[str, int] | None = None) -> None: ...

    async def report(name: str) -> str:
        return name

    for function in (extract, load, unload, fetch):
        found.add_activity(ActivityDefinition(function, function.__name__, ActivityOptions()))
    found.add_workflow(WorkflowDefinition(report, "report", "1"))
    return found


def plan_of(*steps: dict[str, Any], **fields: Any) -> bytes:
    return json.dumps({"plan": "p", "version": "1", "steps": list(steps), **fields}).encode()


def problems_of(body: bytes, here: Registry | None = None) -> list[tuple[str, str]]:
    return [(problem.place, problem.message) for problem in check_plan(body, here)[1]]


def only_problem(body: bytes, here: Registry | None = None) -> tuple[str, str]:
    [problem] = problems_of(body, here)
    return problem


def test_yaml_and_json_of_the_same_plan_are_the_same_plan() -> None:
    definition, problems = check_plan(ETL, registry())
    assert definition is not None
    assert not problems
    assert definition.plan.steps[5].input == {"name": "no"}, "only true and false are booleans"
    as_json = PlanDefinition(json.dumps(read_text(ETL)[0]).encode())
    assert as_json.plan == definition.plan
    assert definition.sha256 != PlanDefinition(ETL + b"\n").sha256, "the hash is over the exact bytes"


def test_references_imply_dependencies() -> None:
    definition = PlanDefinition(ETL)
    graph = {node.id: (node.kind, node.depends_on) for node in definition.graph().nodes}
    assert graph["load"] == ("for_each", ("extract",))
    assert graph["check"] == ("task", ("load",))
    assert graph["rest"] == ("timer", ("wait",))
    assert graph["report"] == ("child", ("rest",))
    assert definition.needs() == {"extract", "load", "unload"}


def test_problems_have_the_line_in_yaml() -> None:
    text = (
        b"plan: p\nversion: '1'\nsteps:\n  - id: a\n    activity: x\n  - id: b\n    activity: x\n    depends_on: [c]\n"
    )
    _, [problem] = check_plan(text)
    assert (problem.place, problem.line) == ("/steps/1/depends_on/0", 8)
    assert "there is no step 'c'" in problem.message


def test_every_problem_is_reported() -> None:
    found = problems_of(
        plan_of(
            {"id": "a", "activity": "x", "depends_on": ["a", "nope"]},
            {"id": "b", "activity": "x", "input": {"v": "${inputs.nope}"}},
            {"id": "b", "activity": "x", "when": "yes!"},
            {"id": "d", "activity": "x", "input": {"v": ["${steps.a.what}", "${item}", "${(}", "${x"]}},
            output="${steps.gone.output}",
        )
    )
    places = [place for place, _ in found]
    assert sorted(set(places)) == sorted(
        [
            "/output",
            "/steps/0/depends_on/0",
            "/steps/0/depends_on/1",
            "/steps/1/input/v",
            "/steps/2/id",
            "/steps/2/when",
            "/steps/3/input/v/0",
            "/steps/3/input/v/1",
            "/steps/3/input/v/2",
            "/steps/3/input/v/3",
        ]
    )


@pytest.mark.parametrize(
    ("step", "place", "said"),
    [
        ({"id": "a"}, "/steps/0", "exactly one of"),
        ({"id": "a", "activity": "x", "signal": "y"}, "/steps/0", "activity and signal"),
        ({"id": "a", "signal": "x", "retry": {}}, "/steps/0/retry", "a step of kind signal has no retry"),
        ({"id": "a", "sleep": 1, "timeout": 1}, "/steps/0/timeout", "has no timeout"),
        ({"id": "a", "sleep": -1}, "/steps/0/sleep", ""),
        ({"id": "a", "activity": "x", "unknown": 1}, "/steps/0/unknown", "there is no field `unknown`"),
        ({"id": "a", "activity": "x", "retires": {}}, "/steps/0/retires", "did you mean `retry`?"),
        ({"id": "a", "activity": "x", "retry": {"max": 1}}, "/steps/0/retry/max", "there is no field `max`"),
        ({"id": "a", "activity": "x", "on_failure": "explode"}, "/steps/0/on_failure", "one of fail, pause"),
        ({"id": "a", "signal": "x", "on_failure": "pause"}, "/steps/0/on_failure", "for activities"),
        ({"id": "a", "activity": "x", "max_concurrency": 2}, "/steps/0/max_concurrency", "for_each"),
        ({"id": "a", "activity": "x", "retry": {"max_attempts": -1}}, "/steps/0/retry/max_attempts", ""),
        ({"id": "a", "activity": "x", "secrets": ["a//b"]}, "/steps/0/secrets/0", "secret"),
        ({"id": "ä", "activity": "x"}, "/steps/0/id", "matching"),
        ({"id": "a" * 101, "activity": "x"}, "/steps/0/id", "matching"),
        ({"id": "a[0]", "activity": "x"}, "/steps/0/id", "matching"),
        ({"id": "a\n", "activity": "x"}, "/steps/0/id", "matching"),
        ({"id": "a", "activity": "act#2"}, "/steps/0/activity", "looks like a step id"),
        ({"id": "a", "activity": "x\u0000"}, "/steps/0/activity", "NUL character"),
        ({"id": "a", "activity": ""}, "/steps/0/activity", "not empty"),
        ({"id": "a", "task": "x", "roles": [""]}, "/steps/0/roles", "not empty"),
        ({"id": "a", "activity": "x", "input": {"v": "${output}"}}, "/steps/0/input/v", "only there in compensate"),
        ({"id": "a", "activity": "x", "input": {"v": "${steps.a.output}"}}, "/steps/0/input/v", "refers to itself"),
        ({"id": "a", "activity": "x", "for_each": ["${index}"]}, "/steps/0/for_each/0", "not in its when"),
        ({"id": "a", "activity": "x", "when": "${__class__}"}, "/steps/0/when", "there is no '__class__'"),
        ({"id": "a", "activity": "x", "when": "${steps.__class__.output}"}, "/steps/0/when", "no step '__class__'"),
        ({"id": "a", "activity": "x", "when": "${steps}"}, "/steps/0/when", "followed by the id"),
        ({"id": "a", "activity": "x", "when": "${keys(@)}"}, "/steps/0/when", "name what is needed"),
        ({"id": "a", "activity": "x", "idempotency_key": ""}, "/steps/0/idempotency_key", "not empty"),
        ({"id": "a", "plan": {"plan": "q", "version": "1"}}, "/steps/0/plan", "`steps`"),
        (
            {
                "id": "a",
                "plan": {"plan": "q", "version": "1", "steps": [{"id": "b", "activity": "x", "when": "never"}]},
            },
            "/steps/0/plan/steps/0/when",
            "when is a reference",
        ),
        (
            {"id": "a", "plan": {"plan": "q", "version": "1", "steps": [{"id": "b", "sleep": 1}]}, "input": {"n": 1}},
            "/steps/0/input/n",
            "plan 'q' has no input 'n'",
        ),
        (
            {"id": "a", "plan": {"plan": "q", "version": "1", "inputs": {"n": {}}, "steps": [{"id": "b", "sleep": 1}]}},
            "/steps/0/input",
            "plan 'q' needs the input 'n'",
        ),
        ("no object", "/steps/0", "Expected `object`"),
    ],
)
def test_what_is_wrong_with_a_step_is_named(step: Any, place: str, said: str) -> None:
    found = only_problem(plan_of(step))
    assert found[0] == place
    assert said in found[1]


def test_every_problem_of_one_step_is_reported() -> None:
    text = b"""
plan: 1
version: 2
steps:
  - id: a
    activty: x
    timeout: 5s
    retry: 3
    on_failure: explode
"""
    _, problems = check_plan(text)
    assert [(each.line, each.place) for each in problems] == [
        (2, "/plan"),
        (3, "/version"),
        (6, "/steps/0/activty"),
        (7, "/steps/0/timeout"),
        (8, "/steps/0/retry"),
        (9, "/steps/0/on_failure"),
    ]
    assert problems[0].message.endswith("put it in quotes")


def test_ten_thousand_wrong_steps_are_refused_at_once() -> None:
    """What is wrong with each of them is looked for only until there are enough problems to show."""
    wrong = {"id": "a", "activity": "x", **{f"activit{number}": 1 for number in range(10)}}
    began = time.process_time()
    assert len(problems_of(plan_of(*[wrong] * 10_000))) == PLAN_PROBLEMS
    assert time.process_time() - began < 5


def test_a_reference_without_quotes_is_explained() -> None:
    _, [problem] = check_plan(
        b"plan: x\nversion: '1'\nsteps:\n  - {id: a, activity: x, input: {v: ${steps.b.output}}}\n"
    )
    assert problem.line == 4
    assert "stands in quotes" in problem.message


def test_a_cycle_is_shown_with_its_path() -> None:
    body = plan_of(
        {"id": "a", "activity": "x"},
        {"id": "b", "activity": "x", "depends_on": ["a", "d"]},
        {"id": "c", "activity": "x", "depends_on": ["b"]},
        {"id": "d", "activity": "x", "input": {"v": "${steps.c.output}"}},
    )
    place, message = only_problem(body)
    assert place == "/steps/1/depends_on"
    assert message.endswith("in a cycle of 3: b → c → d → b")


def test_a_cycle_of_ten_thousand_steps_is_found_at_once() -> None:
    steps = [{"id": f"s{n}", "activity": "x", "depends_on": [f"s{(n + 1) % PLAN_STEPS}"]} for n in range(PLAN_STEPS)]
    began = time.process_time()
    _, message = only_problem(plan_of(*steps))
    assert f"a cycle of {PLAN_STEPS}" in message
    assert len(message) < 500
    assert time.process_time() - began < 10


@pytest.mark.parametrize(
    ("step", "place", "said"),
    [
        ({"activity": "nope"}, "/steps/1/activity", "there is no activity 'nope' here"),
        ({"workflow": "nope"}, "/steps/1/workflow", "there is no workflow 'nope' here"),
        ({"workflow": "report", "version": "7"}, "/steps/1/workflow", "in version '7'"),
        ({"workflow": "report", "input": {"name": 3}}, "/steps/1/input/name", "Expected `str`"),
        ({"activity": "extract"}, "/steps/1/input", "needs the argument 'day'"),
        ({"activity": "extract", "input": {"day": 3}}, "/steps/1/input/day", "Expected `str`, got `int`"),
        ({"activity": "extract", "input": {"day": "x", "hour": 1}}, "/steps/1/input/hour", "no argument 'hour'"),
        ({"activity": "extract", "input": [1]}, "/steps/1/input", "an object of arguments"),
        ({"activity": "extract", "input": {"day": "${inputs.n}"}}, "/steps/1/input/day", "the reference is integer"),
        ({"activity": "extract", "input": {"day": "${steps.x.output}"}}, "/steps/1/input/day", "reference is array"),
        ({"activity": "extract", "input": {"day": "x", "rows": "${inputs.n} 1"}}, "/steps/1/input/rows", "is string"),
        ({"activity": "extract", "input": {"day": ["${inputs.n}"]}}, "/steps/1/input/day", "is array"),
        ({"activity": "load", "input": {"row": "${index}"}, "for_each": [1]}, "/steps/1/input/row", "is integer"),
        ({"activity": "fetch", "input": {"key": "text", "file": {}}}, "/steps/1/input/file", "uri"),
        (
            {"sleep": 1, "activity": "load", "compensate": {"activity": "no"}},
            "/steps/1",
            "exactly one of",
        ),
        (
            {"activity": "load", "input": {"row": "x"}, "compensate": {"activity": "no"}},
            "/steps/1/compensate/activity",
            "no activity 'no'",
        ),
    ],
)
def test_a_plan_is_compared_with_what_is_registered(step: Any, place: str, said: str) -> None:
    first = {"id": "x", "activity": "extract", "input": {"day": "d"}}
    body = plan_of(first, {"id": "y", **step}, inputs={"n": {"type": "integer"}})
    found = dict(problems_of(body, registry()))
    assert said in found[place]


def test_what_fits_has_no_problem() -> None:
    first = {"id": "x", "activity": "extract", "input": {"day": "d"}}
    fetch = {
        "id": "f",
        "activity": "fetch",
        "input": {"key": {"$secret": "a/b"}, "file": {"uri": "s3://b/k", "kind": "k"}, "options": None},
    }
    items = {"id": "l", "activity": "load", "for_each": "${steps.x.output}", "input": {"row": "${item}"}}
    whole = {"id": "w", "activity": "load", "input": "${steps.x.output[0]}"}
    unknown = {"id": "u", "activity": "load", "input": {"row": "${steps.x.output[0]}"}}
    assert problems_of(plan_of(first, fetch, items, whole, unknown), registry()) == []


# --- hostile texts


HOSTILE: dict[str, bytes] = {
    "nothing": b"",
    "blank": b" \n ",
    "a list": b"[]",
    "a text": b"hello",
    "no UTF-8": b"\xff\xfe",
    "NUL": b"plan: a\0",
    "ten megabytes": b"#" * 10_000_000,
    "deep JSON": b"[" * 100_000,
    "deep object": b'{"plan":' * 5_000 + b"1" + b"}" * 5_000,
    "deep YAML": b"a: " + b"[" * 100_000,
    "deep block": b"".join(b" " * n + b"a:\n" for n in range(500)),
    "an alias bomb": b"a: &a [x,x]\nb: &b [*a,*a]\nc: [*b,*b]\n",
    "a merge key": b"a: {<<: {b: 1}}",
    "a tag": b"a: !!python/object/apply:os.system ['true']",
    "a local tag": b"a: !x 1",
    "a key twice": b"plan: a\nplan: b\n",
    "a key twice in JSON": b'{"plan": "a", "plan": "b"}',
    "a key that is a list": b"? [a]\n: b\n",
    "two documents": b"a: 1\n---\nb: 2\n",
    "no YAML": b"a: [",
    "no JSON": b'{"plan": }',
    "NaN": b'{"plan": NaN}',
    "infinity": b"a: 1e999",
    "a number of many digits": b'{"plan": ' + b"9" * 10_000 + b"}",
    "a lone surrogate": b'{"plan": "\\ud800"}',
    "too many steps": json.dumps({"plan": "a", "version": "1", "steps": [{}] * (PLAN_STEPS + 1)}).encode(),
    "no steps": plan_of(),
    "a bad name": b'{"plan": "a|b", "version": "1", "steps": [{"id": "a", "sleep": 1}]}',
    "a bad version": b'{"plan": "a", "version": "1|", "steps": [{"id": "a", "sleep": 1}]}',
    "a name with NUL": b'{"plan": "a\\u0000", "version": "1", "steps": [{"id": "a", "sleep": 1}]}',
    "an input with a bad name": plan_of({"id": "a", "sleep": 1}, inputs={"ä": {}}),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_text_gets_a_typed_error(name: str) -> None:
    began = time.process_time()
    with pytest.raises(PlanInvalid) as refused:
        PlanDefinition(HOSTILE[name])
    assert refused.value.details["problems"]
    assert len(json.dumps(refused.value.as_dict())) < 100_000
    assert time.process_time() - began < 5


def test_a_body_at_the_limit_is_read() -> None:
    body = plan_of({"id": "a", "sleep": 1})
    PlanDefinition(body + b" " * (PLAN_BYTES - len(body)))
    with pytest.raises(PlanInvalid, match="the most is"):
        PlanDefinition(body + b" " * (PLAN_BYTES - len(body) + 1))


# --- references


DATA = {"inputs": {"a": 1, "day": "mo", "q": '"x', "many": [1, 2]}, "steps": {"s": {"output": {"r": [1, 2, 3]}}}}


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("${inputs.a}", 1),
        ("${inputs.day}", "mo"),
        ("on ${inputs.day}: ${inputs.a}", "on mo: 1"),
        ("${steps.s.output.r[?@ > `1`]}", [2, 3]),
        ("${ {n: inputs.a, l: length(steps.s.output.r)} }", {"n": 1, "l": 3}),
        ("${join('}', ['a', 'b'])}", "a}b"),
        ("$${inputs.a} ${inputs.a}", "${inputs.a} 1"),
        ("${inputs.gone}", None),
        ("all: ${inputs.many}", "all: [1,2]"),
        ("plain $5 {a}", "plain $5 {a}"),
    ],
)
def test_references_are_replaced(text: str, value: Any) -> None:
    assert fill({"v": [text]}, DATA) == {"v": [value]}


@pytest.mark.parametrize(
    "expression",
    [
        "inputs.q|" + "|".join(["[@,@]"] * 100),
        "inputs.q|" + "|".join(["[@,@]|join('',@)"] * 60),
        "inputs.q|" + "|".join(["[@,@][]"] * 100),
        "inputs.q|" + "|".join(["{a:@,b:@}|to_string(@)"] * 60),
        "inputs.q|" + "(" * 500 + "@" + ")" * 500,
        "inputs." + ".".join(["x"] * 990),
        "inputs.a" + "[0]" * 500,
        "x" * 3_000,
        "nope(inputs.a)",
        "length(inputs.a)",
        "inputs.many[::0]",
    ],
)
def test_a_hostile_expression_gets_a_typed_error_or_a_value_at_once(expression: str) -> None:
    began = time.process_time()
    with suppress(InvalidInput):
        parse_expression(expression).evaluate(DATA)
    assert time.process_time() - began < 3


@pytest.mark.contract("API-2")
@pytest.mark.parametrize(
    "expression",
    [
        "sort(" * 280 + "inputs.many" + ")" * 280,
        "[" + ",".join(["max(inputs.many)"] * 110) + "]",
        f"inputs.many[*].to_number('{'9' * 1_500}')|length(@)",
    ],
)
def test_what_functions_visit_is_counted(expression: str) -> None:
    with pytest.raises(InvalidInput, match="too long"):
        parse_expression(expression).evaluate({"inputs": {"many": list(range(100_000))}})


def test_an_expression_names_its_steps() -> None:
    template = parse_template('${steps.a.output[?x == `1`].y || steps."b-c".error} and ${length(steps.d.output)}')
    assert sorted(name for one in template.expressions for name in one.steps) == ["a", "b-c", "d"]


# --- the schema and the inputs of a run


def test_the_schema_agrees_with_what_is_read() -> None:
    schema = plan_schema()
    jsonschema.Draft202012Validator.check_schema(schema)
    check = jsonschema.Draft202012Validator(schema)
    good = [
        plan_of({"id": "a", "activity": "x", "retry": {"max_attempts": 2}, "on_failure": "pause"}),
        plan_of({"id": "a", "sleep": 3}, {"id": "b", "task": "t", "form": {"type": "object"}, "roles": ["r"]}),
        plan_of({"id": "a", "plan": "other", "sha256": "0" * 64, "input": {}}, retry={"max_attempts": 2}),
        plan_of({"id": "a", "workflow": "w", "version": "2"}, inputs={"a": {"type": "string", "required": False}}),
    ]
    bad = [
        plan_of({"id": "a"}),
        plan_of({"id": "1", "activity": "x"}),
        plan_of({"id": "a", "activity": "x", "signal": "y"}),
        plan_of({"id": "a", "signal": "x", "retry": {}}),
        plan_of({"id": "a", "sleep": 0}),
        plan_of({"id": "a", "activity": "x"}, more=1),
        plan_of({"id": "a", "activity": "x", "timeout": "1"}),
    ]
    for body in good:
        assert problems_of(body) == []
        check.validate(json.loads(body))
    for body in bad:
        assert problems_of(body)
        with pytest.raises(jsonschema.ValidationError):
            check.validate(json.loads(body))


def test_the_inputs_of_a_run_are_checked() -> None:
    inputs = {"a": {"type": "integer"}, "b": {"default": "x"}, "c": {"type": "number", "required": False}}
    definition = PlanDefinition(plan_of({"id": "s", "sleep": 1}, inputs=inputs))
    assert definition.check_inputs({"a": 1}) == {"a": 1, "b": "x", "c": None}
    assert definition.check_inputs({"a": 1, "c": 2, "b": None}) == {"a": 1, "b": None, "c": 2}
    for given in ({}, {"a": "x"}, {"a": True}, {"a": 1, "d": 2}, {"a": None}):
        with pytest.raises(InvalidInput):
            definition.check_inputs(given)
    assert definition.input_schema()["required"] == ["a"]


def test_the_errors_of_a_plan_are_one_type() -> None:
    assert issubclass(PlanInvalid, InvalidInput)
    assert issubclass(PlanInvalid, HoldfastError)


@pytest.mark.contract("API-4")
@pytest.mark.parametrize(
    ("form", "places"),
    [
        ({"properties": {"pattern": {"type": "string"}, "properties": {"type": "string"}}}, []),
        ({"properties": {"a": {"pattern": "(a+)+$"}}}, ["/form/properties/a/pattern"]),
        ({"properties": {"properties": {"pattern": "(a+)+$"}}}, ["/form/properties/properties/pattern"]),
        ({"allOf": [{"$ref": "https://example.com/"}]}, ["/form/allOf/0/$ref"]),
    ],
)
def test_a_form_has_no_regular_expression_wherever_it_stands(form: Any, places: list[str]) -> None:
    found = problems_of_form(form, ("form",))
    assert [pointer(place) for place, _ in found] == places
