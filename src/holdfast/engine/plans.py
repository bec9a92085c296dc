"""Plans of an installation: stored by hash, registered by name, validated, and loaded for their runs.

A plan belongs to a tenant. Its body is stored before anything refers to it, so a node that continues a run needs
nothing else. If a referenced plan is not in the store, it is fetched, and refused if its hash differs.
"""

import asyncio
from collections.abc import Sequence
from hashlib import sha256
from typing import Any

import msgspec
from msgspec import Raw

from holdfast.core import codec
from holdfast.core import events as e
from holdfast.core.audit import AuditEntry
from holdfast.core.events import Event
from holdfast.core.plans import STORE_PLAN, PlanRef, RegisteredPlan, is_plan
from holdfast.core.state import state_of
from holdfast.engine.abilities import abilities_of
from holdfast.engine.activities.context import activity_context
from holdfast.engine.history import read_history
from holdfast.engine.plan_sources import PlanSources
from holdfast.errors import Conflict, InvalidInput, NotFound, StoreCorrupt
from holdfast.limits import PLAN_BYTES
from holdfast.program.definitions import ActivityDefinition, built_in
from holdfast.program.plan.definition import PlanDefinition, check_plan, invalid
from holdfast.program.plan.program import DONE, StepResult
from holdfast.program.plan.text import PlanProblem
from holdfast.registry import Registry
from holdfast.store.port import Found, PlanQuery, PlanStore, RunHead, Store

COMPENSATED = ":compensate"
"""The suffix of the ids of compensation steps."""

THREAD_BYTES = 64 * 1024
"""The size in bytes from which a plan is parsed in a thread, to keep the event loop free for turns."""


async def load_plan(registry: Registry, store: PlanStore, tenant: str, hash: str) -> PlanDefinition:
    """Return a plan from memory or from the store; raise `NotFound` if the tenant has none with this hash."""
    known = registry.plans.get(hash)
    body = await store.get_plan(tenant, hash) if known is None else None
    if known is not None:
        return known
    if body is None:
        raise NotFound(f"there is no plan with the hash {hash}", sha256=hash)
    if sha256(body).hexdigest() != hash:
        raise StoreCorrupt(f"the body of plan {hash} is not what was stored")
    return await parse_plan(registry, body)


async def parse_plan(registry: Registry, body: bytes) -> PlanDefinition:
    """Return the plan in a text, and cache it; raise `PlanInvalid` if the text is not a plan."""
    if len(body) > THREAD_BYTES:
        definition = await asyncio.to_thread(PlanDefinition, body)
    else:
        definition = PlanDefinition(body)
    registry.plans.keep(definition)
    return definition


async def load_plan_of(registry: Registry, store: PlanStore, head: RunHead, history: Sequence[Event]) -> None:
    """Load the plan of a run into memory, if the run executes one. A missing body is reported when the run begins."""
    if not is_plan(head.plan_id) or not history:
        return
    source = state_of(head.run_id, history[:1]).plan
    if source is not None:
        try:
            await load_plan(registry, store, head.tenant, source.sha256)
        except NotFound:
            return  # the run will be paused, like one whose version is missing


async def input_of_retry(
    registry: Registry, store: Store, head: RunHead, queued: e.RunQueued, *, from_start: bool = False
) -> Raw:
    """Return the input of a run that retries a run of a plan from the steps that have not succeeded.

    It contains the results of the other steps, as far as they are needed. With `from_start`, or if anything was
    compensated, it contains none, so the new run starts from the beginning.
    """
    assert queued.plan is not None
    definition, input = await load_plan(registry, store, head.tenant, queued.plan.sha256), queued.input
    done: dict[str, StepResult] = {}
    given = msgspec.json.decode(input, type=dict[str, Raw])
    before = given.pop(DONE, None)
    if from_start:
        return Raw(msgspec.json.encode(given))
    if before is not None:
        done = msgspec.json.decode(before, type=dict[str, StepResult])
    for event in await read_history(store, head.run_id, head.version):
        if (event.step_id or "").endswith(COMPENSATED):
            return Raw(msgspec.json.encode(given))
        result = _result_of(event)
        if event.step_id is not None and result is not None and ":" not in event.step_id:
            done[event.step_id] = result
    if done:
        kept = definition.needed_after(done)
        given[DONE] = Raw(
            msgspec.json.encode(
                {path: result if path.partition("[")[0] in kept else StepResult() for path, result in done.items()}
            )
        )
    return Raw(msgspec.json.encode(given))


def _result_of(event: Event) -> StepResult | None:
    """Return the result of a step that has succeeded; a skipped step counts as one."""
    match event.data:
        case e.StepCompleted():
            return StepResult(event.data.result, artifacts=event.data.artifacts)
        case e.ChildCompleted() | e.StepSkipped():
            return StepResult(event.data.result)
        case e.SignalReceived():
            return StepResult(event.data.payload)
        case e.TaskCompleted():
            return StepResult(event.data.answer)
        case e.TimerFired():
            return StepResult()
    return None


class Plans:
    """The plans of an installation, for callers."""

    def __init__(self, store: Store, registry: Registry, sources: PlanSources) -> None:
        self._store = store
        self._registry = registry
        self._sources = sources

    async def check(self, body: bytes) -> tuple[PlanDefinition | None, list[PlanProblem]]:
        """Return the plan in a text, and its problems, including those with what all nodes have installed."""
        if len(body) > THREAD_BYTES:
            definition, problems = await asyncio.to_thread(check_plan, body)
        else:
            definition, problems = check_plan(body)
        if definition is None or problems:
            return definition, problems
        self._registry.plans.keep(definition)
        return definition, await self.problems_now(definition)

    async def problems_now(self, definition: PlanDefinition) -> list[PlanProblem]:
        """Return what a plan needs that no live node has, or that does not match what is registered here."""
        nodes = abilities_of(await self._store.find_nodes())
        elsewhere = (
            {name for node in nodes for name in node.abilities.activities},
            {workflow for node in nodes for workflow in node.abilities.workflows},
        )
        if len(definition.body) > THREAD_BYTES:
            return await asyncio.to_thread(definition.problems_here, self._registry, *elsewhere)
        return definition.problems_here(self._registry, *elsewhere)

    async def put(self, tenant: str, body: bytes, expected: PlanRef | None = None) -> PlanDefinition:
        """Check a plan and store its body; raise `PlanInvalid` with every problem, and `Conflict` if it is not the
        expected one.
        """
        definition, problems = await self.check(body)
        if definition is None or problems:
            raise invalid(problems)
        if expected is not None:
            _compare(definition, expected)
        await self._store.put_plan(tenant, definition.sha256, body)
        return definition

    async def register(
        self, tenant: str, body: bytes, *, uri: str = "", by: str = "", audit: AuditEntry | None = None
    ) -> RegisteredPlan:
        """Store a plan under its id and version. The same version with other bytes raises `Conflict`."""
        definition = await self.put(tenant, body)
        registered = RegisteredPlan(
            tenant=tenant,
            plan_id=definition.name,
            plan_version=definition.version,
            sha256=definition.sha256,
            uri=uri,
            registered_by=by,
        )
        return await self._store.register_plan(registered, audit)

    async def find(self, query: PlanQuery) -> Found[RegisteredPlan]:
        """Return the registered versions that match."""
        return await self._store.find_plans(query)

    async def registered(self, tenant: str, plan_id: str, version: str | None = None) -> RegisteredPlan:
        """Return a registered version; the most recently registered one if none is named."""
        query = PlanQuery(tenant=tenant, plan_id=plan_id, plan_version=version, newest_first=True, limit=1)
        found = await self._store.find_plans(query)
        if not found:
            wanted = "" if version is None else f" in version {version!r}"
            raise NotFound(f"there is no plan {plan_id!r}{wanted}", plan_id=plan_id)
        return found[0]

    async def show(
        self, tenant: str, plan_id: str, version: str | None = None
    ) -> tuple[RegisteredPlan, PlanDefinition]:
        """Return a registered version with its plan."""
        registered = await self.registered(tenant, plan_id, version)
        return registered, await load_plan(self._registry, self._store, tenant, registered.sha256)

    async def resolve(self, tenant: str, ref: PlanRef) -> tuple[PlanDefinition, str]:
        """Return the plan that a reference names, and its source; its body is then in the store.

        It is taken from the store if it is there; otherwise it is fetched, and refused if it differs.
        """
        if ref.sha256:
            # A plan that is only in memory was checked and not stored, or belongs to another tenant.
            if await self._store.get_plan(tenant, ref.sha256) is not None:
                definition = await load_plan(self._registry, self._store, tenant, ref.sha256)
                _compare(definition, ref)
                return definition, ref.uri
            if not ref.uri:
                raise NotFound(f"there is no plan with the hash {ref.sha256}", sha256=ref.sha256)
        if ref.uri:
            return await self.put(tenant, await self._sources.fetch(ref.uri), ref), ref.uri
        registered, definition = await self.show(tenant, ref.plan_id, ref.plan_version or None)
        return definition, registered.uri

    def activity(self) -> ActivityDefinition:
        """Return the activity that stores a plan before a run of it is started."""

        async def store_plan(
            document: Any = None,
            plan_id: str | None = None,
            plan_version: str | None = None,
            sha256: str | None = None,
            uri: str | None = None,
        ) -> PlanRef:
            tenant = activity_context().tenant
            if document is not None:
                definition, uri = await self.put(tenant, body_of(document)), ""
            else:
                ref = PlanRef(
                    plan_id=plan_id or "", plan_version=plan_version or "", sha256=sha256 or "", uri=uri or ""
                )
                definition, uri = await self.resolve(tenant, ref)
            return msgspec.structs.replace(definition.ref, uri=uri)

        return built_in(store_plan, STORE_PLAN)


def _compare(definition: PlanDefinition, ref: PlanRef) -> None:
    """Raise `Conflict` if a plan is not the one that a reference names."""
    known = (
        ("sha256", definition.sha256, ref.sha256),
        ("plan_id", definition.name, ref.plan_id),
        ("plan_version", definition.version, ref.plan_version),
    )
    for field, found, wanted in known:
        if wanted and wanted != found:
            raise Conflict(f"the plan has {field} {found!r}, and {wanted!r} is asked for", field=field)


def body_of(document: Any) -> bytes:
    """Return the body of a plan: its exact bytes, the bytes of its text, or the JSON of a plain value."""
    if isinstance(document, bytes):
        return document
    if isinstance(document, str):
        return document.encode()
    if not isinstance(document, dict):
        raise InvalidInput(f"a plan is a text, bytes or a dict, not {type(document).__qualname__}", field="document")
    body = bytes(codec.encode(document))
    if len(body) > PLAN_BYTES:
        raise InvalidInput(f"the plan has {len(body)} bytes; the most is {PLAN_BYTES}", field="document")
    return body
