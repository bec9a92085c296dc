"""The difference between two versions of a plan, step by step, for the approval of the newer one."""

from collections.abc import Mapping
from typing import Any

import msgspec
from msgspec import UNSET, Raw, Struct, UnsetType

from holdfast.core import codec
from holdfast.program.plan.model import Plan, Step

_OF_STEPS = frozenset({"steps", "version"})


class FieldChange(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A field that differs. A side that lacks the field is omitted."""

    field: str
    before: Raw | UnsetType = UNSET
    after: Raw | UnsetType = UNSET


class StepChange(Struct, frozen=True, kw_only=True):
    """A step that both versions have, and what differs in it."""

    step_id: str
    fields: tuple[FieldChange, ...]


class PlanDifference(Struct, frozen=True, kw_only=True):
    """What was added, removed and changed. The order of steps in the document has no meaning, and is not compared."""

    added: tuple[str, ...]
    removed: tuple[str, ...]
    changed: tuple[StepChange, ...]
    fields: tuple[FieldChange, ...]
    """What differs in the plan itself: its inputs, its output, its policies."""


def difference(before: Plan, after: Plan) -> PlanDifference:
    """Return what differs between two plans."""
    old, new = {step.id: step for step in before.steps}, {step.id: step for step in after.steps}
    changed = []
    for step_id, step in new.items():
        fields = _changes(_written(old[step_id]), _written(step)) if step_id in old else ()
        if fields:
            changed.append(StepChange(step_id=step_id, fields=fields))
    return PlanDifference(
        added=tuple(step_id for step_id in new if step_id not in old),
        removed=tuple(step_id for step_id in old if step_id not in new),
        changed=tuple(changed),
        fields=_changes(_written(before), _written(after)),
    )


def _written(part: Plan | Step) -> dict[str, Any]:
    """Return the fields in their document form; for a plan, without its steps."""
    found: dict[str, Any] = {}
    for name in part.__struct_fields__:
        value = getattr(part, name)
        default = _DEFAULTS[type(part)].get(name, _NONE)
        if value is msgspec.UNSET or value == default or (isinstance(part, Plan) and name in _OF_STEPS):
            continue
        found[name] = value
    return found


_NONE = object()
_DEFAULTS: dict[type[Struct], Mapping[str, Any]] = {
    kind: {field.name: field.default for field in msgspec.structs.fields(kind)} for kind in (Plan, Step)
}


def _changes(before: Mapping[str, Any], after: Mapping[str, Any]) -> tuple[FieldChange, ...]:
    changes = []
    for name in dict.fromkeys([*before, *after]):
        old = codec.encode(before[name]) if name in before else UNSET
        new = codec.encode(after[name]) if name in after else UNSET
        if old != new:
            changes.append(FieldChange(field=name, before=old, after=new))
    return tuple(changes)
