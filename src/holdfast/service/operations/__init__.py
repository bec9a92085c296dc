"""The catalogue: every operation once, typed in and out, without a transport."""

from holdfast.service.catalogue import Operation, collect
from holdfast.service.operations import (
    activities,
    audit,
    controls,
    deletions,
    letters,
    mail,
    runs,
    signals,
    system,
    tasks,
    tokens,
    workflows,
)

CATALOGUE: dict[str, Operation] = collect(
    (runs, controls, signals, mail, activities, tasks, letters, workflows, system, tokens, audit, deletions)
)
"""Every operation, by its name."""
