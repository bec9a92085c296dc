"""Retention in the reference model: what a purge may delete, and what it must not touch."""

from msgspec.structs import replace

from holdfast.core.instants import Instant
from holdfast.store.memory.run import Run
from holdfast.store.port import PurgePolicy, PurgeReport


def purge(runs: dict[str, Run], policy: PurgePolicy, now: Instant) -> tuple[PurgeReport, list[str]]:
    """Purge within the runs; return the report, and the ids of runs that are to be deleted whole."""
    named = {
        run_id
        for run_id, run in runs.items()
        if policy.tenant in (None, run.head.tenant) and (policy.run_ids is None or run_id in policy.run_ids)
    }
    parents_in_use = {run.head.parent_run_id for run in runs.values() if not run.is_finished}
    gone = [
        run_id
        for run_id, run in sorted(runs.items())
        if run_id in named
        and _is_past(run, policy.finished_run_ms, now)
        and run_id not in parents_in_use
        and not _is_unfinished(runs, run.head.parent_run_id)
    ]
    kept = [run for run_id, run in sorted(runs.items()) if run_id in named and run_id not in gone[: policy.limit]]
    tasks = [(run, id_) for run in kept if _is_past(run, policy.task_ms, now) for id_ in sorted(run.tasks)]
    states = [run for run in kept if _is_past(run, policy.runtime_state_ms, now) and run.head.snapshot is not None]
    expired = [
        (run, key) for run in kept for key, record in sorted(run.acceptances.items()) if record.expires_at <= now
    ]
    deleted = [runs[run_id] for run_id in gone[: policy.limit]]
    report = PurgeReport(
        runs=len(deleted),
        events=sum(len(run.events) for run in deleted),
        signals=sum(len(run.signals) for run in deleted),
        tasks=sum(len(run.tasks) for run in deleted) + len(tasks[: policy.limit]),
        runtime_states=len(states[: policy.limit]),
        acceptance_records=sum(len(run.acceptances) for run in deleted) + len(expired[: policy.limit]),
        dead_letters=sum(len(run.letters) for run in deleted),
        stale_runs=sum(_is_stale(run, policy.stale_run_ms, now) for run in kept),
        has_more=max(len(gone), len(tasks), len(states), len(expired)) > policy.limit,
    )
    if policy.dry_run:
        return report, gone[: policy.limit]
    for run, task_id in tasks[: policy.limit]:
        del run.tasks[task_id]
    for run in states[: policy.limit]:
        run.head = replace(run.head, snapshot=None)
    for run, key in expired[: policy.limit]:
        del run.acceptances[key]
    return report, gone[: policy.limit]


def _is_past(run: Run, window_ms: int | None, now: Instant) -> bool:
    finished_at = run.head.finished_at
    return window_ms is not None and finished_at is not None and finished_at <= now - window_ms * 1_000


def _is_stale(run: Run, window_ms: int | None, now: Instant) -> bool:
    return window_ms is not None and not run.is_finished and run.head.updated_at <= now - window_ms * 1_000


def _is_unfinished(runs: dict[str, Run], run_id: str | None) -> bool:
    return run_id in runs and not runs[run_id].is_finished
