"""`app.plans`: registering plans (documents that are executed) and starting them. See docs/plans.md."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from holdfast.core.plans import PlanRef, RegisteredPlan
from holdfast.engine.inbox.signals import result_of
from holdfast.engine.plans import body_of
from holdfast.engine.runtime import Runtime
from holdfast.engine.schedules import instant_of
from holdfast.engine.start.requests import StartOptions
from holdfast.program.coroutine import refuse_inside
from holdfast.program.definitions import RUN_TIMEOUTS, milliseconds, run_timeouts
from holdfast.program.plan.definition import PlanDefinition, check_plan
from holdfast.program.plan.text import PlanProblem
from holdfast.registry import Registry
from holdfast.run import RunHandle
from holdfast.store.queries import PlanQuery

PlanDocument = dict[str, Any] | str | bytes
"""A plan: its text, the bytes of the text, or a plain value."""


class AppPlans:
    """The plans of an app's installation. `runtime` returns the open runtime."""

    def __init__(self, registry: Registry, runtime: Callable[[], Runtime]) -> None:
        self._registry = registry
        self._runtime = runtime

    def validate(self, document: PlanDocument) -> list[PlanProblem]:
        """Return every problem of a plan with its position: in the document itself, or with what is registered here."""
        return check_plan(body_of(document), self._registry)[1]

    async def register(self, document: PlanDocument, *, tenant: str = "default", uri: str = "") -> RegisteredPlan:
        """Register a plan under its id and version, and return the registered plan.

        The hash is over the exact bytes of a text. The same version with other bytes raises `Conflict`, and a plan that
        is wrong raises `PlanInvalid` with every problem.
        """
        return await self._runtime().plans.register(tenant, body_of(document), uri=uri)

    async def show(self, plan_id: str, version: str | None = None, *, tenant: str = "default") -> PlanDefinition:
        """Return a registered plan; without a version, the one that was registered last."""
        return (await self._runtime().plans.show(tenant, plan_id, version))[1]

    async def list(
        self,
        plan_id: str | None = None,
        *,
        tenant: str = "default",
        after: RegisteredPlan | None = None,
        limit: int = 100,
    ) -> Sequence[RegisteredPlan]:
        """Return registered versions, ordered by id and version, after one that was returned before."""
        place = ("", "", "") if after is None else (after.tenant, after.plan_id, after.plan_version)
        return await self._runtime().plans.find(PlanQuery(tenant=tenant, plan_id=plan_id, after=place, limit=limit))

    async def start(
        self,
        plan: PlanDocument | PlanRef,
        inputs: Mapping[str, Any] | None = None,
        **options: Any,
    ) -> RunHandle[Any]:
        """Start a run of a plan: a registered one by its id, one that a `PlanRef` names, or a document.

        A document is a dict, bytes, or a text that has several lines or begins with `{`. `options` are those of
        `App.start`.
        """
        refuse_inside("plans.start", "call hf.plan to run it as a child")
        runtime = self._runtime()
        timeouts = run_timeouts(*(options.pop(name, None) for name in RUN_TIMEOUTS))
        at, after = options.pop("at", None), options.pop("after", None)
        chosen = StartOptions(
            **options,
            at=None if at is None else instant_of("at", at),
            after_ms=None if after is None else milliseconds(after),
            timeouts=timeouts,
        )
        chosen.check()
        uri = ""
        if isinstance(plan, str) and "\n" not in plan and not plan.lstrip().startswith("{"):
            plan = PlanRef(plan_id=plan)
        if isinstance(plan, PlanRef):
            definition, uri = await runtime.plans.resolve(chosen.tenant, plan)
        else:
            definition = await runtime.plans.put(chosen.tenant, body_of(plan))
        given = definition.check_inputs(dict(inputs or {}))
        started = await runtime.start(definition, self._registry.values.encode(given), chosen, uri=uri)
        for delivered in started.signals:
            result_of(delivered)
        return RunHandle(runtime, started.run_id, is_reused=started.is_reused)
