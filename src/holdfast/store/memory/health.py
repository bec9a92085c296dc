"""`health`: facts about all runs, computed from the dicts."""

from collections.abc import Mapping

from holdfast.core.instants import Instant
from holdfast.core.state import PAUSED
from holdfast.store.health import SECOND, Bounds, Facts, Gone, Unclaimed, Untaken, fine
from holdfast.store.memory.queries import claimed_as
from holdfast.store.memory.run import Run


def examine(runs: Mapping[str, Run], nodes: Mapping[str, Instant], bounds: Bounds, now: Instant) -> Facts:
    """Return facts about all runs."""
    late = now - int(bounds.late_s * SECOND)
    signals = [
        (signal.accepted_at, run_id)
        for run_id, run in runs.items()
        if not run.is_finished
        for signal in run.signals
        if signal.consumed_seq is None
    ]
    retried = [
        (run_id, message.attempts)
        for run_id, run in runs.items()
        for _, message in run.messages.values()
        if message.attempts
    ]
    suspects = [(run_id, run.head.version) for run_id, run in runs.items() if _is_suspect(run, runs)]
    return Facts(
        software="memory",
        schema_version=1,
        latest_version=1,
        findings=(fine("store", "it is in memory, and ends with its process"),),
        gone=tuple(_gone(runs, nodes, late))[: bounds.listed],
        unclaimed=tuple(_unclaimed(runs, late))[: bounds.listed],
        untaken=tuple(_untaken(runs, late))[: bounds.listed],
        retried=tuple(retried[: bounds.listed]),
        oldest_signal=next(((run_id, at) for at, run_id in sorted(signals)), None),
        suspects=tuple(suspects[: bounds.suspects]),
        sample=tuple(runs)[:: max(1, len(runs) // max(1, bounds.sample_runs))][: bounds.sample_runs],
    )


def _gone(runs: Mapping[str, Run], nodes: Mapping[str, Instant], late: Instant) -> list[Gone]:
    owners = [run.head.lease_owner for run in runs.values() if run.head.lease_owner is not None]
    return [
        Gone(owner, owners.count(owner), nodes.get(owner))
        for owner in sorted(set(owners))
        if owner not in nodes or nodes[owner] <= late
    ]


def _unclaimed(runs: Mapping[str, Run], late: Instant) -> list[Unclaimed]:
    since: dict[tuple[str, str], list[Instant]] = {}
    for run in runs.values():
        head = run.head
        if head.lease_owner is None and head.ready_at is not None and head.ready_at <= late:
            since.setdefault(claimed_as(head), []).append(head.ready_at)
    found = [Unclaimed(*kind, len(instants), min(instants)) for kind, instants in since.items()]
    return sorted(found, key=lambda unclaimed: unclaimed.since)


def _untaken(runs: Mapping[str, Run], late: Instant) -> list[Untaken]:
    since: dict[tuple[str, str], list[Instant]] = {}
    for run in runs.values():
        for work in run.work.values():
            if work.job is not None and work.visible_at is not None and work.visible_at <= late:
                since.setdefault((work.job.queue, work.job.activity), []).append(work.visible_at)
    found = [Untaken(*kind, len(instants), min(instants)) for kind, instants in since.items()]
    return sorted(found, key=lambda untaken: untaken.since)


def _is_suspect(run: Run, runs: Mapping[str, Run]) -> bool:
    head = run.head
    if run.is_finished or head.status is PAUSED or head.lease_owner is not None or head.ready_at is not None:
        return False
    is_awaited = run.waits or head.queued_at is not None or any(task.status == "OPEN" for task in run.tasks.values())
    is_elsewhere = any(work.job is not None for work in run.work.values())
    has_child = any(other.head.parent_run_id == head.run_id and not other.is_finished for other in runs.values())
    return not (is_awaited or is_elsewhere or has_child)
