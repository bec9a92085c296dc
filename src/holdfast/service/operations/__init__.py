"""The catalogue: every operation once, typed in and out, without a transport."""

from holdfast.service.operations import (
    activities,
    audit,
    controls,
    dead_letters,
    deletions,
    mail,
    runs,
    signals,
    system,
    tasks,
    tokens,
    workflows,
)
from holdfast.service.registry import Operation, collect

OPERATIONS: dict[str, Operation] = collect(
    (runs, controls, signals, mail, activities, tasks, dead_letters, workflows, system, tokens, audit, deletions)
)
"""Every operation, by its name."""
