"""Plans: documents that are executed. They are validated, registered, shown, compared and started."""

import asyncio
from typing import Annotated, Any, Literal

from msgspec import Meta, Struct, field

from holdfast.core.graph import Graph, compared
from holdfast.core.plans import PlanRef, RegisteredPlan
from holdfast.core.run_graph import GraphFold, RunGraph
from holdfast.engine.plans import body_of
from holdfast.engine.start.requests import StartOptions
from holdfast.errors import (
    Conflict,
    InvalidInput,
    NotFound,
    NotPermitted,
    Overloaded,
    PayloadTooLarge,
    PlanInvalid,
    RateLimited,
    StoreUnavailable,
)
from holdfast.limits import PLAN_BYTES, TAGS
from holdfast.program.definitions import NO_TIMEOUTS, run_timeouts
from holdfast.program.plan.definition import PlanDefinition
from holdfast.program.plan.difference import PlanDifference, difference
from holdfast.program.plan.model import plan_schema
from holdfast.program.plan.text import PlanProblem
from holdfast.service.auth.tenancy import check_chosen_id
from holdfast.service.context import RequestContext
from holdfast.service.operations.runs import (
    MOST_EXPANDED,
    AttributesGiven,
    ContextGiven,
    DebounceAtMost,
    DebounceKey,
    DebounceQuiet,
    Reused,
    Seconds,
    StartsAfter,
    StartsAt,
    after_ms,
    debounce_of,
)
from holdfast.service.paging import Cursor, PageSize, read_page
from holdfast.service.registry import Name, Request, RunId, operation
from holdfast.service.views import GraphNodeView, Moment, RunStarted, instant_of, moment, shown
from holdfast.store.port import PlanQuery

Schema = dict[str, Any]

GRAPH_STEPS = 1_000
"""The maximum number of steps for which a response contains the graph of a plan."""

Document = Annotated[
    str, Meta(max_length=PLAN_BYTES, description="The text of the plan, JSON or YAML. Its hash is over these bytes.")
]
Tenant = Annotated[Name, Meta(description="Whose it is, where the token does not say so.")]
Hash = Annotated[str, Meta(pattern="^[0-9a-f]{64}$")]
Address = Annotated[str, Meta(max_length=2_000, description="Where the text is: an address that is allowed here.")]


class PlanVersion(Struct, frozen=True, kw_only=True):
    """A version of a plan, as it was registered."""

    plan_id: str
    plan_version: str
    sha256: str
    uri: str
    registered_by: str
    registered_at: Moment


class PlanView(Struct, frozen=True, kw_only=True):
    """A registered plan with its text, the JSON Schema of its inputs, its graph, and what it needs."""

    plan_id: str
    plan_version: str
    sha256: str
    uri: str
    registered_by: str
    registered_at: Moment
    description: str
    document: str
    input: Schema
    steps: int
    needs: list[str]
    """The activities that its runs may call."""

    problems: list[PlanProblem]
    """Its problems here and now: activities that no node has, or that take other arguments."""

    graph: Graph | None
    """Its steps and their dependencies, unless there are too many for one response."""


def _version(plan: RegisteredPlan) -> PlanVersion:
    return PlanVersion(
        plan_id=plan.plan_id,
        plan_version=plan.plan_version,
        sha256=plan.sha256,
        uri=plan.uri,
        registered_by=plan.registered_by,
        registered_at=moment(plan.registered_at),
    )


def _graph(definition: PlanDefinition) -> Graph | None:
    return definition.graph() if len(definition.steps) <= GRAPH_STEPS else None


def _tenant(context: RequestContext, tenant: str) -> str:
    return context.within(tenant, "default", "default")[0]


class SchemaOfPlans(Request, frozen=True, kw_only=True):
    """Nothing: there is one schema."""


class SchemaView(Struct, frozen=True):
    """The JSON Schema of plans (2020-12)."""

    schema: Schema


@operation("plans.schema", "GET /v1/plans/schema", scope="workflows:read")
async def schema(context: RequestContext, request: SchemaOfPlans) -> SchemaView:
    """Return the JSON Schema of plans, for editors and generators."""
    return SchemaView(plan_schema())


class ValidatePlan(Request, frozen=True, kw_only=True):
    """The plan to check."""

    document: Document


class PlanCheck(Struct, frozen=True, kw_only=True):
    """What is wrong with a plan. `place` is a JSON Pointer; `line` is there if the text is YAML."""

    is_valid: bool
    problems: list[PlanProblem]
    plan_id: str | None = None
    plan_version: str | None = None
    sha256: str | None = None
    input: Schema | None = None
    graph: Graph | None = None


@operation("plans.validate", "POST /v1/plans/validate", scope="workflows:read", audit="nothing")
async def validate(context: RequestContext, request: ValidatePlan) -> PlanCheck:
    """Return every problem of a plan, with its place, without storing anything."""
    definition, problems = await context.runtime.plans.check(request.document.encode())
    if definition is None:
        return PlanCheck(is_valid=False, problems=problems)
    return PlanCheck(
        is_valid=not problems,
        problems=problems,
        plan_id=definition.name,
        plan_version=definition.version,
        sha256=definition.sha256,
        input=definition.input_schema(),
        graph=_graph(definition),
    )


class RegisterPlan(Request, frozen=True, kw_only=True):
    """The plan to register: its text, or where that is."""

    document: Document | None = None
    uri: Address = ""
    sha256: Annotated[Hash, Meta(description="Refuse the text if it has another hash.")] | None = None
    tenant: Tenant = "default"


@operation(
    "plans.register",
    "POST /v1/plans",
    scope="runs:write",
    status=201,
    errors=(PlanInvalid, Conflict, PayloadTooLarge, NotFound, NotPermitted, StoreUnavailable),
    audit="its commit",
)
async def register(context: RequestContext, request: RegisterPlan) -> PlanVersion:
    """Register a plan under the id and version that its text has. The same version with other bytes is a `Conflict`."""
    tenant = _tenant(context, request.tenant)
    plans = context.runtime.plans
    if (request.document is None) == (request.uri == ""):
        raise InvalidInput("give the text of the plan as document, or its address as uri", field="document")
    ref = PlanRef(uri=request.uri, sha256=request.sha256 or "")
    if request.document is not None:
        definition = await plans.put(tenant, request.document.encode(), ref)
    else:
        definition = (await plans.resolve(tenant, ref))[0]
    by = context.principal.name
    entry = context.audit(subject=f"{definition.name} {definition.version}")
    return _version(await plans.register(tenant, definition.body, uri=request.uri, by=by, audit=entry))


class ListPlans(Request, frozen=True, kw_only=True):
    """Which registered versions to list."""

    plan_id: str | None = None
    tenant: Tenant = "default"
    cursor: Cursor = ""
    limit: PageSize = 100


class PlanPage(Struct, frozen=True):
    """Some registered versions of plans. `next` is the cursor of the page behind it, if there is more."""

    items: list[PlanVersion]
    next: str | None = None


@operation("plans.list", "GET /v1/plans", scope="workflows:read")
async def list_(context: RequestContext, request: ListPlans) -> PlanPage:
    """Return registered versions of plans, ordered by id and version."""
    query = PlanQuery(tenant=_tenant(context, request.tenant), plan_id=request.plan_id)
    rows, following = await read_page(
        context,
        "plans",
        context.runtime.plans.find,
        query,
        lambda plan: (plan.tenant, plan.plan_id, plan.plan_version),
        cursor=request.cursor,
        limit=request.limit,
    )
    return PlanPage([_version(plan) for plan in rows], following)


class OfPlan(Request, frozen=True, kw_only=True):
    """Which plan is meant; without a version, the one that was registered last."""

    plan_id: Name
    plan_version: Name | None = None
    tenant: Tenant = "default"


@operation("plans.get", "GET /v1/plans/{plan_id}", scope="workflows:read", errors=(NotFound,))
async def get(context: RequestContext, request: OfPlan) -> PlanView:
    """Return a registered plan with its text, its graph, and its problems on the live nodes."""
    tenant = _tenant(context, request.tenant)
    registered, definition = await context.runtime.plans.show(tenant, request.plan_id, request.plan_version)
    problems = await context.runtime.plans.problems_now(definition)
    version = _version(registered)
    return PlanView(
        plan_id=version.plan_id,
        plan_version=version.plan_version,
        sha256=version.sha256,
        uri=version.uri,
        registered_by=version.registered_by,
        registered_at=version.registered_at,
        description=definition.plan.description,
        document=definition.body.decode(),
        input=definition.input_schema(),
        steps=len(definition.steps),
        needs=sorted(definition.needs()),
        problems=problems,
        graph=_graph(definition),
    )


class StartPlan(Request, frozen=True, kw_only=True):
    """A start of a plan: a registered plan, or one by its hash, address or text."""

    plan_id: Name
    plan_version: Annotated[Name, Meta(description="Else the version that was registered last.")] | None = None
    sha256: Hash | None = None
    uri: Address = ""
    document: Document | None = None
    inputs: dict[str, Any] = field(default_factory=dict)
    request_id: Annotated[str, Meta(max_length=255, description="The same request again gives the same run.")] = ""
    run_id: Annotated[RunId, Meta(description="Else a fresh one.")] | None = None
    tenant: Tenant = "default"
    project: Name = "default"
    environment: Name = "default"
    reference_key: Name | None = None
    tags: Annotated[tuple[Name, ...], Meta(max_length=TAGS)] = ()
    priority: Annotated[int, Meta(ge=-100, le=100, description="Higher goes first where runs wait for room.")] = 0
    at: StartsAt | None = None
    after_s: StartsAfter | None = None
    reference_parts: dict[str, str] = field(default_factory=dict)
    attributes: AttributesGiven = field(default_factory=dict)
    execution_timeout_s: Annotated[Seconds, Meta(description="How long the whole run may take.")] | None = None
    run_timeout_s: Annotated[Seconds, Meta(description="How long each stretch between rotations may take.")] | None = (
        None
    )
    cleanup_timeout_s: Annotated[Seconds, Meta(description="How long it may clean up then: 600.")] | None = None
    reuse: Reused | None = None
    debounce_key: DebounceKey | None = None
    debounce_quiet_s: DebounceQuiet | None = None
    debounce_at_most_s: DebounceAtMost | None = None
    context: ContextGiven = field(default_factory=dict)


@operation(
    "plans.start",
    "POST /v1/plans/{plan_id}/runs",
    scope="runs:write",
    status=201,
    errors=(
        PlanInvalid,
        NotFound,
        Conflict,
        Overloaded,
        RateLimited,
        PayloadTooLarge,
        NotPermitted,
        StoreUnavailable,
    ),
    audit="its commit",
)
async def start(context: RequestContext, request: StartPlan) -> RunStarted:
    """Start a run of a plan. When this answers, the run and the text of its plan are durable."""
    if request.run_id is not None:
        check_chosen_id(context.principal.tenant, request.run_id)
    if request.reuse == "terminate-and-restart":
        context.principal.require("runs:control")
    tenant, project, environment = context.within(request.tenant, request.project, request.environment)
    bounds = (request.execution_timeout_s, request.run_timeout_s, request.cleanup_timeout_s)
    options = StartOptions(
        request_id=request.request_id,
        run_id=request.run_id,
        tenant=tenant,
        project=project,
        environment=environment,
        reference_key=request.reference_key,
        tags=request.tags,
        priority=request.priority,
        names_version=request.plan_version is not None,
        at=None if request.at is None else instant_of(request.at),
        after_ms=after_ms(request.after_s),
        reference_parts=request.reference_parts,
        attributes=request.attributes,
        timeouts=None if bounds == NO_TIMEOUTS else run_timeouts(*bounds),
        reuse=request.reuse,
        context=request.context,
        debounce=debounce_of(request.debounce_key, request.debounce_quiet_s, request.debounce_at_most_s),
    )
    definition, uri = await _chosen(context, request, tenant)
    values = context.runtime.registry.values
    inputs = values.encode(definition.check_inputs(request.inputs))
    started = await context.runtime.start(definition, inputs, options, context.principal, uri=uri)
    return RunStarted(
        run_id=started.run_id,
        workflow=f"plan:{definition.name}",
        workflow_version=started.workflow_version,
        is_reused=started.is_reused,
    )


async def _chosen(context: RequestContext, request: StartPlan, tenant: str) -> tuple[PlanDefinition, str]:
    ref = PlanRef(
        plan_id=request.plan_id,
        plan_version=request.plan_version or "",
        uri=request.uri,
        sha256=request.sha256 or "",
    )
    if request.document is None:
        return await context.runtime.plans.resolve(tenant, ref)
    if request.uri:
        raise InvalidInput("a plan that is given as document has no uri", field="document")
    return await context.runtime.plans.put(tenant, body_of(request.document), ref), ""


class ComparePlans(Request, frozen=True, kw_only=True):
    """Which two versions of a plan to compare."""

    plan_id: Name
    from_version: Name
    to_version: Name
    tenant: Tenant = "default"


@operation("plans.diff", "GET /v1/plans/{plan_id}/diff", scope="workflows:read", errors=(NotFound,), reads_much=True)
async def diff(context: RequestContext, request: ComparePlans) -> PlanDifference:
    """Return how two registered versions of a plan differ: new, removed and changed steps, with the changes of each."""
    tenant, plans = _tenant(context, request.tenant), context.runtime.plans
    before = (await plans.show(tenant, request.plan_id, request.from_version))[1]
    after = (await plans.show(tenant, request.plan_id, request.to_version))[1]
    return await asyncio.to_thread(difference, before.plan, after.plan)


class DrawPlan(OfPlan, frozen=True, kw_only=True):
    """Which groups of a plan's graph to expand, and which version to compare it with."""

    from_version: Annotated[Name, Meta(description="An earlier version; its differences are marked.")] | None = None
    expand: Annotated[tuple[Name, ...], Meta(max_length=MOST_EXPANDED, description="Groups to expand.")] = ()
    collapse: Annotated[tuple[Name, ...], Meta(max_length=MOST_EXPANDED, description="Groups not to expand.")] = ()


class PlanGraph(Struct, frozen=True, kw_only=True):
    """The graph of a plan, as much of it as is shown. `steps` is how many there are."""

    plan_id: str
    plan_version: str
    kind: Literal["plan"]
    steps: int
    nodes: tuple[GraphNodeView, ...]


@operation("plans.graph", "GET /v1/plans/{plan_id}/graph", scope="workflows:read", errors=(NotFound,), reads_much=True)
async def graph(context: RequestContext, request: DrawPlan) -> PlanGraph:
    """Return the graph of a registered plan, folded as `runs.graph` is.

    With `from_version` each node has what becomes of it (`change`), and steps that are gone are among the nodes.
    """
    tenant, plans = _tenant(context, request.tenant), context.runtime.plans
    after = (await plans.show(tenant, request.plan_id, request.plan_version))[1]
    before = None
    if request.from_version is not None:
        before = (await plans.show(tenant, request.plan_id, request.from_version))[1]
    drawn = await asyncio.to_thread(_drawn, before, after, request)
    nodes = tuple(shown(GraphNodeView, node) for node in drawn.nodes)
    return PlanGraph(plan_id=after.name, plan_version=after.version, kind="plan", steps=drawn.steps, nodes=nodes)


def _drawn(before: PlanDefinition | None, after: PlanDefinition, request: DrawPlan) -> RunGraph:
    if before is None:
        return GraphFold(after.graph()).of_versions({}, request.expand, request.collapse)
    changed = [change.step_id for change in difference(before.plan, after.plan).changed]
    merged, changes = compared(before.graph(), after.graph(), changed)
    return GraphFold(merged).of_versions(changes, request.expand, request.collapse)
