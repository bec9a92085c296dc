"""Plans as stores and engines see them: which runs belong to plans, and the registered versions.

A plan is data. Its body, the exact bytes of its document, is stored by its hash, and a run refers to that hash
(`PlanSource` on `RunQueued`). The workflow of such a run is the plan's id with a prefix, `plan:etl`, so that it is
never confused with code of the same name. A node claims runs of plans by one definition that stands for all of them:
the requirements of a plan are known from the plan.

**Levels.** A run may be in a state that a node of an older release would misinterpret. Then its snapshot has the format
level that it `needs`, and it is claimed by its definition with that level appended. Only nodes that know the level
claim it. `FORMAT_LEVEL` is the level that this release understands; all levels are listed there.
"""

from collections.abc import Iterable

from msgspec import Struct

from holdfast.core.instants import Instant

PLAN_PREFIX = "plan:"
"""The prefix of the workflows of runs of plans. No workflow in code has such a name."""

ANY_PLAN = (PLAN_PREFIX, "*")
"""The definition that stands for all plans when a node publishes its definitions and claims runs."""


def is_plan(workflow: str) -> bool:
    """Return whether a workflow is that of a plan."""
    return workflow.startswith(PLAN_PREFIX)


def workflow_of(plan_id: str) -> str:
    """Return the workflow of the runs of a plan."""
    return PLAN_PREFIX + plan_id


def definition_of(workflow: str, version: str) -> tuple[str, str]:
    """Return the definition by which a run is claimed."""
    return ANY_PLAN if workflow.startswith(PLAN_PREFIX) else (workflow, version)


HELD_LEVEL = 1
"""The run is queued for admission when it is released: see `core/admission.py`. Needed until it has started."""

TIMEOUT_LEVEL = 2
"""The time of the run is bounded: see `core/run_timeouts.py`. Needed as long as the run is kept."""

CONTEXT_LEVEL = 3
"""The run has a context: see `core/run_context.py`. Needed as long as the run is kept."""

DEBOUNCE_LEVEL = 4
"""A later start may replace the input of the run: see `core/debounce.py`. Needed as long as the run is kept."""

FORMAT_LEVEL = DEBOUNCE_LEVEL
"""The highest level that a node of this release understands, along with all lower ones. All releases know level 0."""

_LEVEL_MARK = "\n"


def claimed_as(workflow: str, version: str, needs: int = 0) -> tuple[str, str]:
    """Return the definition by which a run with this level is claimed."""
    name, version = definition_of(workflow, version)
    return (name, f"{version}{_LEVEL_MARK}{needs}") if needs else (name, version)


def with_levels(definitions: Iterable[tuple[str, str]]) -> list[tuple[str, str]]:
    """Return the definitions with all levels, by which a node of this release claims runs."""
    known = list(definitions)
    return known + [(name, f"{version}{_LEVEL_MARK}{level}") for name, version in known for level in LEVELS]


LEVELS = range(1, FORMAT_LEVEL + 1)


def level_needed(*, is_bounded: bool, has_context: bool) -> int:
    """Return the level that a run needs for its whole lifetime, because its time is bounded or it has a context."""
    return CONTEXT_LEVEL if has_context else TIMEOUT_LEVEL if is_bounded else 0


def level_of(version: str) -> tuple[str, int]:
    """Return the version and the level from the version by which a run is claimed."""
    version, _, level = version.partition(_LEVEL_MARK)
    return version, int(level) if level.isdecimal() else 0


STORE_PLAN = "holdfast.plan"
"""The activity that stores the body of a plan before a run of it is started."""


class PlanRef(Struct, frozen=True, kw_only=True, omit_defaults=True, forbid_unknown_fields=True):
    """A reference to a plan: its id and version, where its text is, and the hash of that text.

    Fields without a value match anything. The hash takes precedence.
    """

    plan_id: str = ""
    """The id of the plan."""
    plan_version: str = ""
    """Its version."""
    uri: str = ""
    """The address from which its text is fetched if the store does not have it."""
    sha256: str = ""
    """The SHA-256 of its text, in hex."""


PART_MARK = ":"
"""Separates the id of a step from the name of an auxiliary step: `load:approval`. Step ids in plans do not have it."""

APPROVAL_PART = f"{PART_MARK}approval"
"""The task that approves a step or, without the id of a step, the run."""

COMPENSATE_PART = f"{PART_MARK}compensate"
"""The activity that undoes a step."""


def is_own_step(step_id: str) -> bool:
    """Return whether a step of a plan's run is a step of the plan, and not an item or an auxiliary step of one."""
    return PART_MARK not in step_id and not step_id.endswith("]")


class RegisteredPlan(Struct, frozen=True, kw_only=True):
    """A registered version of a plan. `sha256` is the hash of its body."""

    tenant: str = "default"
    plan_id: str
    plan_version: str
    sha256: str
    uri: str = ""
    registered_by: str = ""
    registered_at: Instant = 0
