"""Which definitions no node alive has, in the reference model."""

from collections.abc import Iterable, Mapping

from holdfast.core.instants import Instant
from holdfast.store.memory.run import Run
from holdfast.store.port import OrphanedDefinition, Plan
from holdfast.store.validation import lease_end


def missing(
    runs: Iterable[Run],
    nodes: Mapping[str, Instant],
    known: Mapping[str, frozenset[Plan]],
    late_ms: int,
    now: Instant,
) -> list[OrphanedDefinition]:
    """Return the definitions of runs that have been eligible for so long, without those that somebody may have."""
    alive = [node for node, lease_until in nodes.items() if lease_end(lease_until, now) > now]
    if any(node not in known for node in alive):
        return []
    found: dict[Plan, Instant] = {}
    for run in runs:
        owner = run.head.lease_owner
        since = run.head.ready_at if owner is None else min(nodes[owner], now)
        is_late = since is not None and since <= now - late_ms * 1_000 and owner not in alive
        plan = run.head.plan_id, run.head.plan_version
        if is_late and since is not None and not any(plan in known[node] for node in alive):
            found[plan] = min(since, found.get(plan, since))
    return sorted(
        (OrphanedDefinition(plan, since) for plan, since in found.items()), key=lambda each: (each.since, each.plan)
    )
