"""Every operation once, with the types of its request and response, without a transport."""

from holdfast.service.operations import (
    activities,
    artifacts,
    audit,
    bulk,
    bus,
    controls,
    dead_letters,
    deletions,
    plans,
    retention,
    run_streams,
    runs,
    schedules,
    signals,
    streams,
    system,
    tasks,
    tokens,
    workflows,
)
from holdfast.service.registry import Operation, collect

OPERATIONS: dict[str, Operation] = collect(
    (
        *(runs, controls, signals, activities, tasks, dead_letters, workflows, plans, system, tokens, audit, deletions),
        *(retention, bus, schedules, bulk, run_streams),
    )
)
"""Every operation, by its name."""

STREAMS: dict[str, Operation] = collect((streams,))
"""The operations that answer with an event stream, by name. JSON-RPC does not have them."""

DOWNLOADS: dict[str, Operation] = collect((artifacts,))
"""The operations that answer with bytes, by name. They are for HTTP only."""
