"""Retention in the reference model: what a purge may delete, and what it must not touch."""

from collections.abc import Callable
from typing import Any

from msgspec.structs import replace

from holdfast.core.codec import encode_body
from holdfast.core.instants import Instant
from holdfast.store import decisions
from holdfast.store.memory.run import Run
from holdfast.store.port import (
    ArchivedRun,
    ArchivedRunQuery,
    FinishedRunQuery,
    Found,
    PurgePolicy,
    PurgeReport,
    RunHead,
)


def purge(
    runs: dict[str, Run], policy: PurgePolicy, now: Instant, is_held: Callable[[str], bool]
) -> tuple[PurgeReport, list[str]]:
    """Purge within the runs; return the report, and the ids of runs to be deleted completely."""
    named = {
        run_id
        for run_id, run in runs.items()
        if policy.tenant in (None, run.head.tenant) and (policy.run_ids is None or run_id in policy.run_ids)
    }
    parents_in_use = {run.head.parent_run_id for run in runs.values() if not run.is_finished}
    gone = [
        run.head.run_id
        for run in _by_end(runs)
        if run.head.run_id in named
        and _is_past(run, policy.finished_run_ms, now)
        and run.head.run_id not in parents_in_use
        and not is_held(run.head.run_id)
        and not _is_unfinished(runs, run.head.parent_run_id)
    ]
    fit = policy.limit
    if policy.most_bytes is not None:
        sizes = (sum(len(encode_body(event.data).encode()) for event in runs[run_id].events) for run_id in gone[:fit])
        fit = decisions.within_bytes(sizes, policy.most_bytes)
    has_more, gone = fit < len(gone), gone[:fit]
    kept = [run for run in _by_end(runs) if run.head.run_id in named and run.head.run_id not in gone]
    tasks = [(run, id_) for run in kept if _is_past(run, policy.task_ms, now) for id_ in sorted(run.tasks)]
    states = [run for run in kept if _is_past(run, policy.runtime_state_ms, now) and run.head.snapshot is not None]
    expired: list[Any] = sorted(
        (record.expires_at, run.head.run_id, key)
        for run in kept
        for key, record in run.acceptances.items()
        if record.expires_at <= now
    )
    letters: list[Any] = sorted(
        (letter.settled_at, letter.letter_id, run.head.run_id)
        for run in kept
        for letter in run.letters.values()
        if letter.settled is not None
        and letter.settled_at is not None
        and policy.dead_letter_ms is not None
        and letter.settled_at <= now - policy.dead_letter_ms * 1_000
    )
    deleted = [runs[run_id] for run_id in gone]
    report = PurgeReport(
        runs=len(deleted),
        events=sum(run.head.version for run in deleted),
        signals=sum(len(run.signals) for run in deleted),
        tasks=sum(len(run.tasks) for run in deleted) + len(tasks[: policy.limit]),
        runtime_states=len(states[: policy.limit]),
        acceptance_records=sum(len(run.acceptances) for run in deleted) + len(expired[: policy.limit]),
        dead_letters=sum(len(run.letters) for run in deleted) + len(letters[: policy.limit]),
        stale_runs=sum(_is_stale(run, policy.stale_run_ms, now) for run in kept),
        has_more=has_more or max(len(tasks), len(states), len(expired), len(letters)) > policy.limit,
    )
    if policy.dry_run:
        return report, gone
    for run, task_id in tasks[: policy.limit]:
        del run.tasks[task_id]
    for run in states[: policy.limit]:
        run.head = replace(run.head, snapshot=None)
    for _, run_id, key in expired[: policy.limit]:
        del runs[run_id].acceptances[key]
    for _, letter_id, run_id in letters[: policy.limit]:
        del runs[run_id].letters[letter_id]
    return report, gone


def find_finished(
    runs: dict[str, Run], is_held: Callable[[str, Instant], bool], query: FinishedRunQuery
) -> Found[RunHead]:
    """Return the finished runs that could be deleted."""
    parents_in_use = {run.head.parent_run_id for run in runs.values() if not run.is_finished}
    heads = [run.head for run in _by_end(runs) if run.head.finished_at is not None]
    heads = [head for head in heads if _end_of(head) > query.after and _end_of(head)[0] <= query.until]
    place = None
    if query.look is not None and len(heads) >= query.look:
        heads = heads[: query.look]
        place = _end_of(heads[-1])
    found = [
        head
        for head in heads
        if query.tenant in (None, head.tenant)
        and query.workflow in (None, head.plan_id)
        and query.status in (None, head.status)
        and head.run_id not in parents_in_use
        and not _is_unfinished(runs, head.parent_run_id)
        and (query.held_after is None or not is_held(head.run_id, query.held_after))
    ]
    return Found(found, place if len(found) < query.limit else None)


class Archive:
    """The archive locations of deleted runs."""

    def __init__(self) -> None:
        self._runs: dict[tuple[str, Instant], ArchivedRun] = {}

    def add(self, runs: list[ArchivedRun]) -> None:
        """Store the archive locations of these runs."""
        self._runs |= {(run.run_id, run.created_at): run for run in runs}

    def old(self, policy: PurgePolicy, now: Instant) -> list[ArchivedRun]:
        """Return the locations that a purge deletes, oldest first."""
        if policy.archived_run_ms is None:
            return []
        until = now - policy.archived_run_ms * 1_000
        return [
            run
            for run in sorted(self._runs.values(), key=lambda run: (run.archived_at, run.run_id, run.created_at))
            if run.archived_at <= until
            and policy.tenant in (None, run.tenant)
            and (policy.run_ids is None or run.run_id in policy.run_ids)
        ]

    def forget(self, runs: list[ArchivedRun]) -> None:
        """Delete the archive locations of these runs."""
        for run in runs:
            del self._runs[run.run_id, run.created_at]

    def find(self, query: ArchivedRunQuery) -> Found[ArchivedRun]:
        """Return the archived runs that match the query, last to end first."""
        return Found(
            run
            for run in sorted(self._runs.values(), key=lambda run: (run.finished_at, run.run_id), reverse=True)
            if (run.finished_at, run.run_id) < query.before
            and query.tenant in (None, run.tenant)
            and query.run_id in (None, run.run_id)
            and query.workflow in (None, run.plan_id)
            and query.status in (None, run.status)
        )


def _by_end(runs: dict[str, Run]) -> list[Run]:
    return sorted(runs.values(), key=lambda run: _end_of(run.head))


def _end_of(head: RunHead) -> tuple[Instant, str]:
    return head.finished_at or 0, head.run_id


def _is_past(run: Run, window_ms: int | None, now: Instant) -> bool:
    finished_at = run.head.finished_at
    return window_ms is not None and finished_at is not None and finished_at <= now - window_ms * 1_000


def _is_stale(run: Run, window_ms: int | None, now: Instant) -> bool:
    return window_ms is not None and not run.is_finished and run.head.updated_at <= now - window_ms * 1_000


def _is_unfinished(runs: dict[str, Run], run_id: str | None) -> bool:
    return run_id in runs and not runs[run_id].is_finished
