"""Workflows: those that can be started here, and the input of their runs."""

from typing import Any, Literal

from msgspec import Struct

from holdfast.core.admission import RunLimit
from holdfast.core.graph import Graph
from holdfast.errors import NotFound
from holdfast.program.definitions import WorkflowDefinition
from holdfast.program.values import Signature
from holdfast.service.context import RequestContext
from holdfast.service.registry import Name, Request, operation

Schema = dict[str, Any]


class Handled(Struct, frozen=True):
    """What a query or an update takes and gives, as JSON Schemas."""

    input: Schema
    result: Schema


class WorkflowView(Struct, frozen=True, kw_only=True):
    """A workflow that can be started here, with JSON Schemas.

    Its runs take signals of other names than those in `signals` with `allow_other_signals`, or if there are none in it.
    `queries` and `updates` are those that its runs have said they answer, as far as they have run in this process.
    """

    name: str
    version: str
    doc: str
    kind: Literal["code", "flow", "plan"]
    input: Schema
    result: Schema
    signals: dict[str, Schema]
    allow_other_signals: bool
    requires_approval: bool = False
    queries: dict[str, Handled]
    updates: dict[str, Handled]
    limit: RunLimit | None = None
    graph: Graph | None = None
    """For a flow, its steps; only if a single workflow is requested."""


def _handled(known: dict[str, Signature]) -> dict[str, Handled]:
    return {name: Handled(*signature.schemas()) for name, signature in sorted(known.items())}


def _view(context: RequestContext, definition: WorkflowDefinition, *, has_graph: bool = False) -> WorkflowView:
    input, result = definition.signature.schemas()
    graph = definition.graph()
    limited = context.runtime.registry.workflow_limits.get(definition.name)
    return WorkflowView(
        name=definition.name,
        version=definition.version,
        doc=(definition.function.__doc__ or "").strip(),
        kind="code" if graph is None else graph.kind,
        input=input,
        result=result,
        signals={name: definition.values.schema(kind) for name, kind in definition.signals.items()},
        allow_other_signals=definition.allows_other_signals,
        requires_approval=definition.requires_approval,
        queries=_handled(definition.queries),
        updates=_handled(definition.updates),
        limit=None if limited is None else limited.limit,
        graph=graph if has_graph else None,
    )


class ListWorkflows(Request, frozen=True, kw_only=True):
    """Nothing: there are few enough to list them all."""


class WorkflowList(Struct, frozen=True):
    """The workflows that can be started here."""

    items: list[WorkflowView]


@operation("workflows.list", "GET /v1/workflows", scope="workflows:read")
async def list_(context: RequestContext, request: ListWorkflows) -> WorkflowList:
    """Return the workflows that can be started here, with the JSON Schemas of what they take."""
    return WorkflowList(
        [_view(context, definition) for _, definition in sorted(context.runtime.registry.workflows.items())]
    )


class OfWorkflow(Request, frozen=True, kw_only=True):
    """Which workflow is meant; without a version, the one that was registered last."""

    name: Name
    version: Name | None = None


@operation("workflows.get", "GET /v1/workflows/{name}", scope="workflows:read", errors=(NotFound,))
async def get(context: RequestContext, request: OfWorkflow) -> WorkflowView:
    """Return one workflow with the JSON Schemas of what it takes; for a flow, also its graph."""
    return _view(context, context.runtime.registry.workflow(request.name, request.version), has_graph=True)
