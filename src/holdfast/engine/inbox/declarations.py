"""The signals that workflows declare, and the check of a signal against them.

A node publishes what its workflows declare before it starts runs of them. So every process that accepts signals can
check them against the version that the run was started with: with the code if it has it, and otherwise with the JSON
Schemas in the store. A published declaration is cached for some seconds, and the workflow of a run for a minute, so
that only the first signal to a run costs a query.
"""

from asyncio import get_running_loop
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Protocol

import msgspec
from msgspec import Raw
from msgspec.structs import replace

from holdfast.core.admission import RunLimit
from holdfast.core.codec import explain_unfit
from holdfast.core.declarations import WorkflowDeclaration
from holdfast.core.instants import Instant
from holdfast.core.keys import RESERVED_PREFIX, check_name, is_lock
from holdfast.core.messages import SignalRequest
from holdfast.engine.inbox.json_schema import SchemaCheck
from holdfast.errors import CallerError, Conflict, InvalidInput, NotFound
from holdfast.program.definitions import WorkflowDefinition, WorkflowLimit
from holdfast.store import port
from holdfast.store.outgoing import refused_letter
from holdfast.store.port import RunHead, Turn

KNOWN_RUNS = 10_000
"""For how many runs the workflow is cached."""

RUN_AGE_S = 60.0
PUBLISHED_AGE_S = 5.0
UNPUBLISHED_AGE_S = 1.0
ASKED_AT_ONCE = 500


class Declared(Protocol):
    """What a version of a workflow declares."""

    @property
    def is_entity(self) -> bool:
        """Whether its runs accept any number of signals per minute."""
        ...

    def check(self, name: str, payload: Raw) -> str | None:
        """Raise if a signal does not match; return a warning for the sender, or None."""
        ...


class DeclaredByCode:
    """The declaration of a workflow whose code this process has."""

    __slots__ = ("_definition",)

    def __init__(self, definition: WorkflowDefinition) -> None:
        self._definition = definition

    @property
    def is_entity(self) -> bool:
        return self._definition.is_entity

    def check(self, name: str, payload: Raw) -> str | None:
        """Raise `InvalidInput` if the payload does not match the type."""
        definition = self._definition
        decoder = definition.signal_decoders.get(name)
        if decoder is None:
            allows = definition.allows_other_signals
            return _check_name(definition.name, definition.version, definition.signals, allows, name)
        try:
            decoder.decode(payload)
            return None
        except (msgspec.ValidationError, RecursionError) as problem:
            where, reason = explain_unfit(problem)
        raise _unfit(name, where, reason)


def declared_by(definition: WorkflowDefinition) -> DeclaredByCode | None:
    """Return the declaration of a workflow whose code this process has; None if it declares nothing."""
    return DeclaredByCode(definition) if definition.signals or definition.is_entity else None


class DeclaredInStore:
    """The declaration of a workflow whose code only other processes have."""

    __slots__ = ("_checks", "_published")

    def __init__(self, published: WorkflowDeclaration) -> None:
        self._published = published
        self._checks: dict[str, SchemaCheck] = {}

    @property
    def is_entity(self) -> bool:
        return self._published.is_entity

    def check(self, name: str, payload: Raw) -> str | None:
        """Raise `InvalidInput` if the payload does not match the schema."""
        published = self._published
        schema = published.signals.get(name)
        if schema is None:
            allows = published.allows_other_signals
            return _check_name(published.plan_id, published.plan_version, published.signals, allows, name)
        if name not in self._checks:
            self._checks[name] = SchemaCheck(schema)
        misfit = self._checks[name].misfit(bytes(payload))
        if misfit is not None:
            raise _unfit(name, *misfit)
        return None


def verdict_of(declared: Declared | None, request: SignalRequest) -> CallerError | str | None:
    """Return the error if a signal does not match a declaration, or a warning for its sender, or None."""
    try:
        return None if declared is None else declared.check(request.name, request.payload)
    except CallerError as problem:
        return problem


def _unfit(name: str, where: str, reason: str) -> InvalidInput:
    field = f"payload{where}"
    return InvalidInput(f"signal {name!r}: {field}: {reason}", field=field, reason=reason, signal_name=name)


def _check_name(workflow: str, version: str, signals: Iterable[str], allows_others: bool, name: str) -> str | None:
    """Raise `NotFound` if the workflow only declares other names; return a warning if it allows undeclared ones."""
    declared = sorted(signals)
    if not declared or name in declared:
        return None
    what = f"workflow {workflow!r}, version {version!r}, declares no signal {name!r}"
    if allows_others:
        return f"{what}; it declares {declared}"
    raise NotFound(f"{what}; it declares {declared}", signal_name=name, declared=declared)


def published(definition: WorkflowDefinition, limit: RunLimit | None = None) -> WorkflowDeclaration:
    """Return the declaration to publish for a workflow with this limit."""
    return WorkflowDeclaration(
        plan_id=definition.name,
        plan_version=definition.version,
        signals={name: definition.values.schema(kind) for name, kind in definition.signals.items()},
        allows_other_signals=definition.allows_other_signals,
        is_entity=definition.is_entity,
        requires_approval=definition.requires_approval,
        limit=limit,
    )


class Declarations:
    """The declarations of workflows, cached for one process."""

    def __init__(self, store: port.Store, workflows: Mapping[port.Plan, WorkflowDefinition]) -> None:
        self._store = store
        self._workflows = workflows
        self._plans: dict[str, tuple[port.Plan, float]] = {}
        self._uncommitted: set[str] = set()
        self.places: dict[str, tuple[str, str, str]] = {}
        """The tenant, project and environment of the runs that were looked up."""
        self._found: dict[port.Plan, tuple[Declared | None, float]] = {}

    async def publish(self, limits: Mapping[str, WorkflowLimit]) -> None:
        """Publish the declarations of the workflows that are registered here, with their limits by name."""
        if self._workflows:
            bounds = {name: limited.limit for name, limited in limits.items()}
            known = self._workflows.values()
            await self._store.publish_definitions([published(each, bounds.get(each.name)) for each in known])

    async def check(self, requests: Sequence[SignalRequest]) -> list[CallerError | str | None]:
        """Return for each signal the error that refuses it, or a warning for the sender, or None.

        Before a signal is refused, its run is looked up again: the cached run may have been deleted, and its id reused
        by another workflow.
        """
        remembered = {request.run_id for request in requests if request.run_id in self._plans}
        declared = await self.of_runs([request.run_id for request in requests])
        verdicts = [self._verdict_on(request, declared) for request in requests]
        pairs = zip(requests, verdicts, strict=True)
        doubtful = {request.run_id for request, verdict in pairs if isinstance(verdict, CallerError)} & remembered
        if not doubtful:
            return verdicts
        before = {run_id: self._plans.pop(run_id) for run_id in doubtful if run_id in self._plans}
        again = await self.of_runs(doubtful)
        for run_id in doubtful:
            if run_id not in self._plans and run_id in self._uncommitted & before.keys():  # it cannot be found yet
                self._plans[run_id] = before[run_id]
            else:
                declared[run_id] = again[run_id]
        return [self._verdict_on(request, declared) for request in requests]

    def _verdict_on(self, request: SignalRequest, declared: Mapping[str, Declared | None]) -> CallerError | str | None:
        """Return the verdict on a signal from outside of runs. A lock's run accepts none: its parent releases it."""
        known = self._plans.get(request.run_id)
        if known is not None and is_lock(known[0][0]):
            problem = (
                f"run {request.run_id!r} is a lock, which its parent holds and releases: it takes no signals; to take "
                "the lock away, terminate it"
            )
            return Conflict(problem, run_id=request.run_id, signal_name=request.name)
        return verdict_of(declared[request.run_id], request)

    def is_entity(self, run_id: str) -> bool:
        """Return whether a run, for which a signal was just checked, accepts any number of signals per minute."""
        known = self._plans.get(run_id)
        declared = None if known is None else self._of_plan(known[0])
        return declared is not None and declared.is_entity

    async def of_runs(
        self, run_ids: Iterable[str], new: Mapping[str, port.Plan] | None = None
    ) -> dict[str, Declared | None]:
        """Return the declarations of these runs' workflows; None if a workflow declares nothing or the run does not
        exist.

        `new` are runs that are about to be created.
        """
        plans, run_ids = dict(new or {}), dict.fromkeys(run_ids)
        names = [run_id for run_id in run_ids if run_id not in plans]
        plans |= await self._plans_of([run_id for run_id in names if not check_name("run_id", run_id)])
        await self._find(set(plans.values()))
        return {run_id: self._of_plan(plans.get(run_id)) for run_id in run_ids}

    def remember(self, new: port.NewRun) -> None:
        """Cache the workflow of a run that cannot be looked up yet, because the transaction that creates it is open."""
        if len(self._uncommitted) >= KNOWN_RUNS:
            self._uncommitted.clear()
        self._uncommitted.add(new.run_id)
        self._plans[new.run_id] = ((new.plan_id, new.plan_version), get_running_loop().time() + RUN_AGE_S)
        self.places[new.run_id] = (new.tenant, new.project, new.environment)

    def _of_plan(self, plan: port.Plan | None) -> Declared | None:
        if plan is None:
            return None
        definition = self._workflows.get(plan)
        return self._found[plan][0] if definition is None else declared_by(definition)

    async def _plans_of(self, run_ids: Sequence[str]) -> dict[str, port.Plan]:
        now = get_running_loop().time()
        known = {run_id: self._plans[run_id] for run_id in run_ids if run_id in self._plans}
        plans = {run_id: plan for run_id, (plan, until) in known.items() if until > now}
        unknown = [run_id for run_id in run_ids if run_id not in plans]
        if len(self._plans) + len(unknown) > KNOWN_RUNS:
            self._plans.clear()
            self.places.clear()
        for start in range(0, len(unknown), ASKED_AT_ONCE):
            asked = tuple(unknown[start : start + ASKED_AT_ONCE])
            query = port.RunQuery(run_ids=asked, limit=len(asked))
            while page := await self._store.find(query):
                found = {head.run_id: (head.plan_id, head.plan_version) for head in page}
                plans |= found
                self.places |= {head.run_id: (head.tenant, head.project, head.environment) for head in page}
                self._plans |= {run_id: (plan, now + RUN_AGE_S) for run_id, plan in found.items()}
                if all(run_id in plans for run_id in asked):
                    break
                query = replace(query, after=page[-1].run_id)
        return plans

    async def _find(self, plans: Iterable[port.Plan]) -> None:
        now = get_running_loop().time()
        strange = [plan for plan in plans if plan not in self._workflows]
        unknown = [plan for plan in strange if plan not in self._found or self._found[plan][1] <= now]
        if not unknown:
            return
        for plan, found in zip(unknown, await self._store.find_definitions(unknown), strict=True):
            is_plain = found is None or not (found.signals or found.is_entity)
            declared = None if found is None or is_plain else DeclaredInStore(found)
            self._found[plan] = declared, now + (UNPUBLISHED_AGE_S if found is None else PUBLISHED_AGE_S)


# --- signals that workflows send to other runs, checked before they are committed


def has_signals(turns: Sequence[Turn]) -> bool:
    """Return whether one of the turns sends a signal from its workflow to another run."""
    return any(turn.sends and any(map(_is_signal, turn.sends)) for turn in turns)


async def without_unfit_signals(
    declarations: Declarations, turns: Sequence[Turn], heads: Sequence[RunHead], now: Instant
) -> list[Turn]:
    """Remove the signals that do not match the declarations of their targets; each becomes a dead letter.

    A target in another tenant, project or environment is left to the store, which refuses it like a run that does not
    exist: the sender learns nothing about its declaration.
    """
    new = {new.run_id: (new.plan_id, new.plan_version) for turn in turns for new in turn.starts}
    declared = await declarations.of_runs([s.run_id for turn in turns for s in turn.sends if _is_signal(s)], new)
    checked = []
    for turn, head in zip(turns, heads, strict=True):
        place = head.tenant, head.project, head.environment
        near = {
            run_id: declaration
            for run_id, declaration in declared.items()
            if turn.crosses_tenants or declarations.places.get(run_id, place) == place
        }
        checked.append(_without_unfit(turn, near, now) if turn.sends else turn)
    return checked


def _is_signal(item: Any) -> bool:
    return isinstance(item, SignalRequest) and not item.name.startswith(RESERVED_PREFIX)


def _without_unfit(turn: Turn, declared: Mapping[str, Declared | None], now: Instant) -> Turn:
    sends: list[Any] = []
    dead = list(turn.dead)
    for place, item in enumerate(turn.sends):
        declaration = declared.get(item.run_id) if _is_signal(item) else None
        try:
            if declaration is not None and isinstance(item, SignalRequest):
                declaration.check(item.name, item.payload)
            sends.append(item)
        except CallerError as problem:
            what = f"{getattr(item, 'name', '')!r} to run {item.run_id!r}"
            dead.append(refused_letter(turn, f"undeclared {place}", what, item, problem, now))
    return turn if len(sends) == len(turn.sends) else replace(turn, sends=tuple(sends), dead=tuple(dead))
