"""The registry: the workflows, activities and limits of an app, as they were registered.

A node, `check-histories`, a queue worker and the service look up definitions here. If one of them needs its own bounds
(the limits of an installation, the seconds of a turn), it gets them with `bounded`, which shares the entries.
"""

from collections.abc import Callable, Mapping
from difflib import get_close_matches
from typing import Any

from msgspec import Raw

from holdfast.core import events as e
from holdfast.core.attributes import AttributeType
from holdfast.core.bus import Sink, check_sink
from holdfast.core.call_limits import CallLimit
from holdfast.core.plans import ANY_PLAN, with_levels
from holdfast.core.schedules import Schedule
from holdfast.errors import InvalidInput, NotFound
from holdfast.limits import Limits
from holdfast.program.definitions import ActivityDefinition, WorkflowDefinition, WorkflowLimit
from holdfast.program.middleware import Middlewares
from holdfast.program.plan.definition import PlanCache
from holdfast.program.secrets import SecretProvider
from holdfast.program.values import PLAIN, Values

TURN_S = 5.0
"""How long the code of a workflow may block its node, unless the node's options override it."""


RunHook = Callable[[str, str], Any]
"""Called with the id of a run and the reason of its failure or pause. It may be async."""


class Registry:
    """What an app can run. Entries are added and never removed."""

    __slots__ = (
        "activities",
        "allow_cross_tenant_signals",
        "approvals",
        "attributes",
        "built_in",
        "call_limits",
        "claimable",
        "definitions",
        "lacks_streams",
        "limits",
        "middleware",
        "newest",
        "on_failed",
        "on_paused",
        "plans",
        "projections",
        "refuse_records",
        "schedules",
        "secrets",
        "sinks",
        "turn_s",
        "values",
        "workflow_limits",
        "workflows",
    )

    def __init__(
        self,
        limits: Limits | None = None,
        turn_s: float | None = TURN_S,
        *,
        allow_cross_tenant_signals: bool = False,
        values: Values = PLAIN,
    ) -> None:
        self.workflows: dict[tuple[str, str], WorkflowDefinition] = {}
        """The workflows, by name and version."""
        self.definitions: list[tuple[str, str]] = [ANY_PLAN]
        """What a node can run: any plans, and the workflows."""
        self.claimable: list[tuple[str, str]] = with_levels(self.definitions)
        """The definitions by which a node claims runs: each with the format levels that this release understands."""
        self.newest: dict[str, WorkflowDefinition] = {}
        """The last registered version of each workflow, by name."""
        self.activities: dict[str, ActivityDefinition] = {}
        """The activities, by name."""
        self.call_limits: dict[str, CallLimit] = {}
        """The numbers of the limits on activities, by the names of the limits."""
        self.built_in: dict[str, ActivityDefinition] = {}
        """The engine's own activities, by name, as a runtime provides them."""
        self.plans = PlanCache()
        """The plans that are in memory. Plans are data: they are kept in the store."""
        self.workflow_limits: dict[str, WorkflowLimit] = {}
        """The limits of the workflows that have limits, by name: those of the last registered version."""
        self.schedules: dict[tuple[str, str, str, str], Schedule] = {}
        """The schedules that are declared in code, by tenant, project, environment and id."""
        self.approvals: set[tuple[str, str]] = set()
        """The workflows with runs that require approval before they start, by name and version."""
        self.allow_cross_tenant_signals = allow_cross_tenant_signals
        """Whether runs may signal runs of other tenants, projects and environments."""
        self.sinks: dict[str, Sink] = {}
        """The sinks of the event bus that the app declares, by name."""
        self.projections: dict[str, Callable[[list[dict[str, Any]]], Any]] = {}
        """The functions that are sinks, by name."""
        self.on_failed: list[RunHook] = []
        """Called when a run has failed."""
        self.on_paused: list[RunHook] = []
        """Called when a run is paused."""
        self.secrets: SecretProvider | None = None
        """The source of the secrets of activities."""
        self.middleware = Middlewares()
        """The middleware of the app."""
        self.values = values
        """How the app's values are stored."""
        self.attributes: Mapping[str, AttributeType] = {}
        """The types of search attributes that the app declares, by name."""
        self.limits = limits or Limits()
        """The limits that apply to its programs."""
        self.refuse_records: Callable[[], None] | None = None
        """Raises the reason why the node's store keeps no records of keyed steps. None: it keeps them."""
        self.lacks_streams = False
        """Whether the store of the node keeps no streams."""
        self.turn_s = turn_s
        """How long the code of a workflow may block its node; None sets no limit."""

    def bounded(self, limits: Limits, turn_s: float | None) -> "Registry":
        """Return a registry with the same entries, with these limits for its programs."""
        bounded = Registry(
            limits, turn_s, allow_cross_tenant_signals=self.allow_cross_tenant_signals, values=self.values
        )
        bounded.workflows, bounded.definitions, bounded.newest = self.workflows, self.definitions, self.newest
        bounded.claimable = self.claimable
        bounded.activities = self.activities
        bounded.call_limits = self.call_limits
        bounded.plans = self.plans
        bounded.workflow_limits = self.workflow_limits
        bounded.approvals = self.approvals
        bounded.sinks = self.sinks
        bounded.on_failed, bounded.on_paused = self.on_failed, self.on_paused
        bounded.projections = self.projections
        bounded.middleware = self.middleware
        bounded.secrets = self.secrets
        bounded.attributes = self.attributes
        bounded.schedules = self.schedules
        return bounded

    def add_workflow(self, definition: WorkflowDefinition, limit: WorkflowLimit | None = None) -> None:
        """Add a workflow. Its limit replaces the limit of earlier versions, even if it has none."""
        key = (definition.name, definition.version)
        if key in self.workflows:
            raise InvalidInput(f"workflow {definition.name!r} is registered twice with version {definition.version!r}")
        if definition.requires_approval:
            self.approvals.add(key)
        self.workflows[key] = self.newest[definition.name] = definition
        self.definitions.append(key)
        self.claimable += with_levels([key])
        definition.attributes = self.attributes
        definition.activities = self.activities
        definition.middleware = self.middleware.workflow
        self.workflow_limits.pop(definition.name, None)
        if limit is not None:
            self.workflow_limits[definition.name] = limit

    def add_activity(self, definition: ActivityDefinition) -> None:
        """Add an activity."""
        if definition.name in self.activities:
            raise InvalidInput(f"activity {definition.name!r} is registered twice")
        limited = definition.limited
        if limited is not None and self.call_limits.setdefault(limited.name, limited.numbers) != limited.numbers:
            problem = f"limit {limited.name!r} is declared with other numbers by another activity: declare it once"
            raise InvalidInput(problem, field="limit")
        self.activities[definition.name] = definition

    def add_sink(self, sink: Sink, projection: Callable[[list[dict[str, Any]]], Any] | None = None) -> None:
        """Add a sink of the event bus, or a function that is one."""
        if check_sink(sink).name in self.sinks:
            raise InvalidInput(f"sink {sink.name!r} is declared twice", field="name")
        self.sinks[sink.name] = sink
        if projection is not None:
            self.projections[sink.name] = projection

    def add_schedule(self, schedule: Schedule) -> None:
        """Add a schedule that is declared in code."""
        if schedule.place in self.schedules:
            text = f"schedule {schedule.schedule_id!r} is declared twice: give each an id"
            raise InvalidInput(text, field="schedule_id")
        self.schedules[schedule.place] = schedule

    def workflow(self, name: str, version: str | None = None) -> WorkflowDefinition:
        """Return a workflow by its name; without a version, the one that was registered last."""
        found = self.newest.get(name) if version is None else self.workflows.get((name, version))
        if found is not None:
            return found
        if name not in self.newest:
            near = get_close_matches(name, self.workflow_names(), 1)
            hint = f"; did you mean {near[0]!r}?" if near else ""
            raise NotFound(f"there is no workflow {name!r} here{hint}", workflow=name)
        known = sorted(known for of, known in self.workflows if of == name)
        problem = f"there is no version {version!r} of workflow {name!r} here; there are {known}"
        raise NotFound(problem, workflow=name, version=version)

    def workflow_names(self) -> list[str]:
        """Return the names of the workflows, in order."""
        return sorted(self.newest)

    def activity_names(self) -> list[str]:
        """Return the names of the activities, in order."""
        return sorted(self.activities)

    def has_keyed_activities(self) -> bool:
        """Return whether calls of some activity always have idempotency keys."""
        return any(each.key_function is not None for each in self.activities.values())

    def activities_with_secrets(self) -> list[str]:
        """Return the names of the activities that take secrets or name secrets in their options, in order."""
        return sorted(name for name, each in self.activities.items() if each.takes_secrets or each.options.secrets)

    def fingerprints(self) -> dict[tuple[str, str], str]:
        """Return the fingerprint of each workflow's code: it differs if the code of the same version differs."""
        return {key: definition.fingerprint for key, definition in self.workflows.items()}

    def check_result(self, step: e.Body, result: Raw) -> None:
        """Raise `InvalidInput` if a result does not fit what an activity or a child returns, if it is registered."""
        definition: ActivityDefinition | WorkflowDefinition | None = None
        if isinstance(step, e.StepStarted):
            definition = self.activities.get(step.name)
        elif isinstance(step, e.ChildStarted):
            definition = self.workflows.get((step.plan_id, step.plan_version))
        if definition is not None:
            definition.signature.result_of(result)
