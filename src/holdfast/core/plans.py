"""Plans as a store and an engine see them: which runs are of plans, and the versions that are registered.

A plan is data. Its body, the exact bytes of its document, is kept by its hash, and a run of it refers to that hash
(`PlanSource` on `RunQueued`). The workflow of such a run is the plan's id behind a prefix, `plan:etl`, so that it is
never taken for code of the same name. A node claims runs of plans by one definition that stands for all of them: what a
plan needs is known from the plan.

**Levels.** A run may be in a state that a node of an older release would get wrong. Then its snapshot says which level
of the format it `needs`, and it is claimed by its definition with that level behind it, which only nodes that know the
level ask for. `FORMAT_LEVEL` is what this release understands; each level and what it stands for is listed there.
"""

from collections.abc import Iterable

from msgspec import Struct

from holdfast.core.instants import Instant

PLAN_PREFIX = "plan:"
"""How the workflow of a run of a plan begins. No workflow in code has such a name."""

ANY_PLAN = (PLAN_PREFIX, "*")
"""The definition that stands for all plans, in what a node publishes and claims."""


def is_plan(workflow: str) -> bool:
    """Return whether the runs of a workflow are runs of a plan."""
    return workflow.startswith(PLAN_PREFIX)


def workflow_of(plan_id: str) -> str:
    """Return the workflow of the runs of a plan."""
    return PLAN_PREFIX + plan_id


def definition_of(workflow: str, version: str) -> tuple[str, str]:
    """Return the definition by which a run is claimed."""
    return ANY_PLAN if workflow.startswith(PLAN_PREFIX) else (workflow, version)


HELD_LEVEL = 1
"""The run is queued for admission when it is released: see `core/admission.py`. Until it has started."""

TIMEOUT_LEVEL = 2
"""The time of the run is bounded: see `core/run_timeouts.py`. For as long as the run is kept."""

CONTEXT_LEVEL = 3
"""The run has a context: see `core/run_context.py`. For as long as the run is kept."""

DEBOUNCE_LEVEL = 4
"""A later start may replace the input of the run: see `core/debounce.py`. For as long as the run is kept."""

FORMAT_LEVEL = DEBOUNCE_LEVEL
"""The highest level that a node of this release understands; with it, all lower ones. 0 is what all releases know."""

_LEVEL_MARK = "\n"


def claimed_as(workflow: str, version: str, needs: int = 0) -> tuple[str, str]:
    """Return by what a run is claimed that needs this level."""
    name, version = definition_of(workflow, version)
    return (name, f"{version}{_LEVEL_MARK}{needs}") if needs else (name, version)


def with_levels(definitions: Iterable[tuple[str, str]]) -> list[tuple[str, str]]:
    """Return by what a node of this release claims the runs of these definitions."""
    known = list(definitions)
    return known + [(name, f"{version}{_LEVEL_MARK}{level}") for name, version in known for level in LEVELS]


LEVELS = range(1, FORMAT_LEVEL + 1)


def level_needed(*, is_bounded: bool, has_context: bool) -> int:
    """Return the level that a run needs for its whole life, because its time is bounded or it has a context."""
    return CONTEXT_LEVEL if has_context else TIMEOUT_LEVEL if is_bounded else 0


def level_of(version: str) -> tuple[str, int]:
    """Return the version and the level in what a run is claimed by."""
    version, _, level = version.partition(_LEVEL_MARK)
    return version, int(level) if level.isdecimal() else 0


STORE_PLAN = "holdfast.plan"
"""The activity that keeps the body of a plan in the store, before a run of it is started."""


class PlanRef(Struct, frozen=True, kw_only=True, omit_defaults=True, forbid_unknown_fields=True):
    """Which plan: its id and version, where its text is, and the hash of that text.

    Fields without a value match anything. The hash decides.
    """

    plan_id: str = ""
    """The id of the plan."""
    plan_version: str = ""
    """Its version."""
    uri: str = ""
    """Where its text is fetched, if the store does not have it."""
    sha256: str = ""
    """The SHA-256 of its text, in hex."""


PART_MARK = ":"
"""What separates the id of a step from what belongs to it: `load:approval`. No id of a step of a plan has it."""

APPROVAL_PART = f"{PART_MARK}approval"
"""The task in which a step is approved; alone, without the id of a step, the one in which the run is."""

COMPENSATE_PART = f"{PART_MARK}compensate"
"""The activity that undoes a step."""


def is_own_step(step_id: str) -> bool:
    """Return whether a step of a run of a plan is a step of the plan: no item of one, nor what belongs to one."""
    return PART_MARK not in step_id and not step_id.endswith("]")


class RegisteredPlan(Struct, frozen=True, kw_only=True):
    """A version of a plan that was registered under its name. `sha256` is the hash of its body."""

    tenant: str = "default"
    plan_id: str
    plan_version: str
    sha256: str
    uri: str = ""
    registered_by: str = ""
    registered_at: Instant = 0
