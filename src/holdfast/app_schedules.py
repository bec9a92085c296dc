"""`app.schedules`: schedules, declared in code or changed at run time. See docs/schedules.md."""

from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime, timedelta
from typing import Any, TypedDict, Unpack

from msgspec.structs import replace

from holdfast.core.plans import is_plan
from holdfast.core.schedules import Overlap, Schedule, check_schedule
from holdfast.engine.run_context import context_of_start
from holdfast.engine.runtime import Runtime
from holdfast.engine.schedules import Schedules, instant_of, spec_of
from holdfast.engine.ticks import check_calendar
from holdfast.errors import InvalidInput
from holdfast.program.definitions import WorkflowDefinition
from holdfast.registry import Registry
from holdfast.run import RunHandle
from holdfast.store.queries import ScheduleQuery
from holdfast.workflow import Workflow


class SchedulePlace(TypedDict, total=False):
    """The owner of a schedule; omitted fields are `default`."""

    tenant: str
    project: str
    environment: str


class ScheduleOptions(SchedulePlace, total=False):
    """When a schedule starts runs, which workflow, and with which options."""

    workflow: Workflow[..., Any] | str
    """A workflow or flow, its name, or `plan:ID` for a registered plan."""
    input: Mapping[str, Any]
    """The arguments of the workflow by name, or the inputs of the plan."""
    every: timedelta
    at: datetime
    tz: str
    start_at: datetime
    end_at: datetime
    overlap: Overlap
    """While an earlier run is not finished: `skip` (the default), `queue`, `cancel-running` or `allow`."""
    jitter: timedelta
    """Each tick is delayed by up to this, always equally for the same tick."""
    catch_up: timedelta
    """Ticks that no node could fire for longer than this are missed. The default is a day."""
    workflow_version: str
    reference_key: str
    tags: tuple[str, ...]
    priority: int
    context: Mapping[str, str]
    """The context of its runs, in addition to the context that is bound where the schedule is created."""


class AppSchedules:
    """The schedules of an app. Each belongs to a tenant, project and environment.

    `known` returns the definition of a workflow of the app, and `runtime` the open runtime.
    """

    def __init__(
        self,
        app: str,
        registry: Registry,
        known: Callable[[Any], WorkflowDefinition],
        runtime: Callable[[], Runtime],
    ) -> None:
        self._app = app
        self._registry = registry
        self._known = known
        self._runtime = runtime

    def declared(
        self,
        workflow: Any,
        cron: str,
        schedule_id: str | None = None,
        *,
        input: Mapping[str, Any] | None = None,
        tenant: str = "default",
        project: str = "default",
        environment: str = "default",
        workflow_version: str | None = None,
        reference_key: str | None = None,
        tags: tuple[str, ...] = (),
        priority: int = 0,
        context: Mapping[str, str] | None = None,
        **when: Any,
    ) -> Schedule:
        """Return a schedule of this app, as `App.schedule` declares and `create` creates it."""
        name = workflow if isinstance(workflow, str) else self._known(workflow).name
        if is_plan(name):
            packed = self._registry.values.encode(dict(input or {}))
        else:
            packed = self._registry.workflow(name, workflow_version).signature.pack((), dict(input or {}))
        schedule = Schedule(
            schedule_id=schedule_id or name,
            app=self._app,
            workflow=name,
            workflow_version=workflow_version,
            input=packed,
            spec=spec_of(cron, **when),
            tenant=tenant,
            project=project,
            environment=environment,
            reference_key=reference_key,
            tags=tags,
            priority=priority,
            context=context_of_start(context or {}),
        )
        if (problem := check_schedule(schedule)) is not None:
            raise problem
        check_calendar(schedule.spec)
        return schedule

    async def create(self, schedule_id: str, cron: str = "", **options: Unpack[ScheduleOptions]) -> Schedule:
        """Create a schedule. The options are those of `App.schedule`; `workflow` is required."""
        given: dict[str, Any] = {**options}
        workflow = given.pop("workflow", None)
        if workflow is None:
            raise InvalidInput("a schedule starts a workflow: name it", field="workflow")
        return await self._schedules.create(self.declared(workflow, cron, schedule_id, **given))

    async def get(
        self, schedule_id: str, *, tenant: str = "default", project: str = "default", environment: str = "default"
    ) -> Schedule:
        """Return a schedule."""
        return await self._schedules.get((tenant, project, environment, schedule_id))

    async def pause(self, schedule_id: str, note: str = "", **place: Unpack[SchedulePlace]) -> Schedule:
        """Fire no ticks until the schedule is resumed; ticks in the meantime are not made up for."""
        return await self._schedules.pause(_place(schedule_id, place), note)

    async def resume(self, schedule_id: str, note: str = "", **place: Unpack[SchedulePlace]) -> Schedule:
        """Fire the ticks from now on."""
        return await self._schedules.resume(_place(schedule_id, place), note)

    async def trigger(
        self, schedule_id: str, *, request_id: str = "", **place: Unpack[SchedulePlace]
    ) -> RunHandle[Any]:
        """Start a run now, in addition to the ticks and regardless of running ones."""
        run_id = await self._schedules.trigger(_place(schedule_id, place), request_id)
        return RunHandle(self._runtime(), run_id)

    async def backfill(
        self,
        schedule_id: str,
        since: datetime,
        until: datetime,
        *,
        overlap: Overlap = "queue",
        **place: Unpack[SchedulePlace],
    ) -> int:
        """Fire the ticks of a past period and return their number. Ticks that have fired already are skipped."""
        period = (instant_of("since", since), instant_of("until", until))
        return await self._schedules.backfill(_place(schedule_id, place), *period, overlap)

    async def delete(self, schedule_id: str, **place: Unpack[SchedulePlace]) -> None:
        """Delete a schedule. Its runs continue. The next node that starts creates it again if code declares it."""
        await self._schedules.delete(_place(schedule_id, place))

    def next_ticks(self, schedule: Schedule, count: int = 5) -> list[datetime]:
        """Return when the next ticks are due; none while it is paused."""
        ticks = self._schedules.next_ticks(schedule, count)
        return [datetime.fromtimestamp(tick / 1_000_000, UTC) for tick in ticks]

    @property
    def _schedules(self) -> Schedules:
        return self._runtime().schedules

    async def list(self, *, tenant: str | None = None, workflow: str | None = None) -> list[Schedule]:
        """Return the schedules of this app, by tenant, project, environment and id."""
        query = ScheduleQuery(app=self._app, tenant=tenant, workflow=workflow)
        found: Sequence[Schedule] = ()
        while page := await self._runtime().store.find(query):
            found = [*found, *page]
            query = replace(query, after=page[-1].place)
        return [*found]


def _place(schedule_id: str, place: SchedulePlace) -> tuple[str, str, str, str]:
    tenant, project = place.get("tenant", "default"), place.get("project", "default")
    return (tenant, project, place.get("environment", "default"), schedule_id)
