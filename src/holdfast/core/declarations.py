"""What a version of a workflow declares, as stored for processes that do not have its code."""

from typing import Any

from msgspec import Struct

from holdfast.core.admission import RunLimit, check_limit
from holdfast.core.codec import check as check_json
from holdfast.core.codec import encode
from holdfast.core.keys import check_name
from holdfast.errors import CallerError, InvalidInput
from holdfast.limits import DEFINITION_BYTES


class WorkflowDeclaration(Struct, frozen=True, kw_only=True):
    """The declaration of a version of a workflow: the JSON Schema of the payload of each declared signal.

    If names are declared, others are refused, unless `allows_other_signals`. The runs of an entity take any number of
    signals per minute. Runs that other apps start are held for approval, or queued, as the workflow declares.
    """

    plan_id: str
    plan_version: str
    signals: dict[str, dict[str, Any]] = {}
    allows_other_signals: bool = False
    is_entity: bool = False
    requires_approval: bool = False
    limit: RunLimit | None = None


def check_declaration(definition: Any) -> CallerError | None:
    """Return why the declaration cannot be stored, or None."""
    if not isinstance(definition, WorkflowDeclaration):
        return InvalidInput(f"a declaration is a WorkflowDeclaration, not {type(definition).__qualname__}")
    problem: CallerError | None = check_name("plan_id", definition.plan_id)
    problem = problem or check_name("plan_version", definition.plan_version)
    if problem is None and definition.limit is not None:
        problem = check_limit(definition.limit)
    if problem is not None:
        return problem
    try:
        encoded = encode(definition)
    except InvalidInput as unfit:
        return unfit
    if len(encoded) > DEFINITION_BYTES:
        return InvalidInput(f"definition {definition.plan_id!r} has {len(encoded)} bytes; at most {DEFINITION_BYTES}")
    return check_json(encoded, "definition")
