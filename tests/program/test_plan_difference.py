"""What differs between two versions of a plan."""

from typing import Any

import msgspec

from holdfast.program.plan.definition import PlanDefinition
from holdfast.program.plan.difference import PlanDifference, difference


def differs(before: dict[str, Any], after: dict[str, Any]) -> PlanDifference:
    """Compare two documents."""
    documents = [PlanDefinition(msgspec.json.encode({"plan": "etl", **document})).plan for document in (before, after)]
    return difference(*documents)


LOAD: dict[str, Any] = {"id": "load", "activity": "load", "input": {"table": "${inputs.table}"}}
PLAN: dict[str, Any] = {"version": "1", "inputs": {"table": {"type": "string"}}, "steps": [LOAD]}


def test_steps_are_added_removed_and_changed() -> None:
    after = {
        **PLAN,
        "version": "2",
        "steps": [
            {"id": "check", "activity": "check", "depends_on": ["load"]},
            {**LOAD, "retry": {"max_attempts": 9}, "input": {"table": "${inputs.table}", "limit": 10}},
        ],
    }
    before = {**PLAN, "steps": [LOAD, {"id": "report", "activity": "report", "timeout": 5}]}

    found = differs(before, after)

    assert (found.added, found.removed, found.fields) == (("check",), ("report",), ())
    [load] = found.changed
    assert load.step_id == "load"
    changes = {
        change.field: tuple(
            None if isinstance(side, msgspec.UnsetType) else msgspec.json.decode(side)
            for side in (change.before, change.after)
        )
        for change in load.fields
    }
    assert changes == {
        "input": ({"table": "${inputs.table}"}, {"table": "${inputs.table}", "limit": 10}),
        "retry": (None, {"max_attempts": 9}),
    }


def test_the_plan_itself_is_compared() -> None:
    after = {**PLAN, "inputs": {"table": {"type": "string", "default": "t"}}, "on_failure": "compensate"}

    found = differs(PLAN, after)

    assert [change.field for change in found.fields] == ["inputs", "on_failure"]
    assert found.changed == ()


def test_what_means_the_same_does_not_differ() -> None:
    other = {"id": "other", "activity": "other"}
    before = {**PLAN, "steps": [LOAD, other]}
    after = {**PLAN, "version": "2", "steps": [other, {**LOAD, "when": True, "depends_on": []}]}

    assert differs(before, after) == PlanDifference(added=(), removed=(), changed=(), fields=())
