"""Retention: how long finished data is kept, and the duty of a node that deletes it.

`Retention` is the policy. It has a window for each kind of data; None keeps it forever. For a finished run the first
rule that matches decides, and `finished` if none matches. By default nothing is deleted.

`RetentionDuty` executes it. One node has the duty, under the host lock `retention`. Each pass, including one that an
operator requests, runs under the lock `retention-pass` and is safe to repeat. It finds what is past its window in
pages, archives it if the policy says so, and deletes it in small commits with pauses between them, so that turns hardly
wait for it: at most `BATCH_RUNS` runs with `BATCH_EVENTS` events in a commit, and a pause of at least `REST` times as
long as the commit took. Stale runs and tasks are never deleted. They cause alerts, and are cancelled if the policy says
so.
"""

import asyncio
import logging
from collections import Counter, deque
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Iterator, Sequence
from contextlib import aclosing
from datetime import timedelta
from pathlib import Path
from typing import Any, TypeVar

from msgspec import Struct
from msgspec.structs import asdict, replace

from holdfast.clock import Ids
from holdfast.core.audit import DETAIL_CHARS, AuditEntry, Caller, audit_entry
from holdfast.core.instants import Instant
from holdfast.core.snapshot import Alert, AlertCode
from holdfast.core.state import TERMINAL, RunStatus
from holdfast.engine.host_locks import HeldLock, acquire, to_the_end
from holdfast.engine.observe.metrics import ObservedStore
from holdfast.errors import Conflict, HoldfastError, InvalidInput
from holdfast.settings import RetentionRuleSettings, RetentionSettings
from holdfast.store.archive import Archive
from holdfast.store.payloads import SealingStore
from holdfast.store.port import (
    ArchivedRun,
    ArchivedRunQuery,
    FinishedRunQuery,
    PurgePolicy,
    PurgeReport,
    RunHead,
    RunQuery,
    Store,
    TaskQuery,
)
from holdfast.store.queries import pages

T = TypeVar("T")
Window = timedelta | float | None
"""How long something is kept: a timedelta, or a number of days. None: forever."""

LOCK = "retention"
PASS_LOCK = "retention-pass"
PASS_LEASE_MS = 60_000
"""How long no other pass begins after a crash."""

OPERATION = "retention.run"
"""The name of deletions in the audit log."""

PAGE_RUNS = 500
"""How many runs are found at a time; they are archived together."""

LOOK_RUNS = 5_000
"""How many finished runs are examined by one read."""

BATCH_RUNS = 25
BATCH_EVENTS = 500
"""How many events one commit deletes at most. A run with more gets its own commits; in a database, several."""

BATCH_BYTES = 2 * 1024 * 1024
"""How many bytes of events one commit deletes at most. A larger run is deleted by a commit of its own."""

BATCH_ROWS = 250
"""How many rows of other kinds one commit deletes at most."""

SLOW_S = 0.25
"""A commit that takes longer halves the next ones."""

REST = 4.0
"""The pause after a commit, as a multiple of its duration."""

SHORTEST_PAUSE_S = 0.005
MOST_STALE = 10_000
"""How many stale runs and tasks one pass counts and cancels at most."""

KEPT_ALERTS = 100
SHOWN_RUNS = 5
UNFINISHED = tuple(status for status in RunStatus if status not in TERMINAL)

logger = logging.getLogger("holdfast.retention")


# --- the policy


class RetentionRule(Struct, frozen=True, kw_only=True):
    """How long finished runs of a workflow, with a status, or of a tenant are kept. None matches all."""

    finished: Window
    """How long these runs are kept after their end."""
    workflow: str | None = None
    """Only runs of this workflow."""
    status: str | None = None
    """Only runs that ended with this status."""
    tenant: str | None = None
    """Only runs of this tenant."""

    def __post_init__(self) -> None:
        _milliseconds("finished", self.finished)
        known = sorted(TERMINAL)
        if self.status is not None and self.status not in known:
            raise InvalidInput(f"status is one of {', '.join(known)}, not {self.status!r}", field="status")

    def matches(self, head: RunHead) -> bool:
        """Return whether the rule applies to this run."""
        return (
            self.workflow in (None, head.plan_id)
            and self.status in (None, head.status)
            and self.tenant in (None, head.tenant)
        )

    @property
    def window_ms(self) -> int | None:
        """How long the runs are kept."""
        return _milliseconds("finished", self.finished)


class Retention(Struct, frozen=True, kw_only=True):
    """How long finished data is kept. A window is a timedelta or a number of days. None, the default, keeps it.

    - `finished`: runs, counted from their end. `rules` come first, and the first that matches decides.
    - `tasks`, `snapshots`: those of finished runs that are kept longer.
    - `dead_letters`: counted from when they were settled.
    - `audit`: counted from when an entry was written.
    - `outbox`: entries that wait for a sink, counted from when they were added. Runs wait for sinks for at most a week.
    - `archive_index`: the record of where a run is archived, counted from when it was archived.
    - `stale_runs`, `stale_tasks`: unfinished runs that have not changed, and tasks that have been open, for this long
      raise an alert. With `cancel_stale_runs` and `cancel_stale_tasks` they are cancelled.
    - `archive`: the folder or bucket in which histories are archived before they are deleted.
    - `every`: the interval between passes.

    See docs/retention.md.
    """

    finished: Window = None
    rules: tuple[RetentionRule, ...] = ()
    tasks: Window = None
    snapshots: Window = None
    dead_letters: Window = None
    audit: Window = None
    outbox: Window = None
    archive_index: Window = None
    stale_runs: Window = None
    stale_tasks: Window = None
    cancel_stale_runs: bool = False
    cancel_stale_tasks: bool = False
    archive: str | Path | None = None
    every: timedelta = timedelta(hours=1)

    def __post_init__(self) -> None:
        for field in _WINDOWS:
            _milliseconds(field, getattr(self, field))
        every: Any = self.every
        if not isinstance(every, timedelta) or every <= timedelta():
            raise InvalidInput(f"every is a timedelta above 0, not {every!r}", field="every")
        rules: Any = self.rules
        if not isinstance(rules, tuple | list) or not all(isinstance(rule, RetentionRule) for rule in rules):
            raise InvalidInput("rules is a list of RetentionRule", field="rules")
        for field, flag in (("stale_runs", self.cancel_stale_runs), ("stale_tasks", self.cancel_stale_tasks)):
            if flag and getattr(self, field) is None:
                raise InvalidInput(f"cancel_{field} needs a window: set {field}", field=field)

    @classmethod
    def from_settings(cls, settings: RetentionSettings) -> "Retention | None":
        """Return the policy in the settings, or None if they have none."""
        if settings == RetentionSettings():
            return None
        windows: dict[str, Any] = {field: getattr(settings, f"{field}_days") for field in _WINDOWS}
        return cls(
            **windows,
            rules=tuple(map(_rule, settings.rules)),
            cancel_stale_runs=settings.cancel_stale_runs,
            cancel_stale_tasks=settings.cancel_stale_tasks,
            archive=settings.archive or None,
            every=timedelta(seconds=settings.every_s),
        )

    @property
    def all_rules(self) -> tuple[RetentionRule, ...]:
        """The rules for finished runs, including the default for runs that no other rule matches."""
        return (*self.rules, RetentionRule(finished=self.finished))

    def rule_of(self, head: RunHead) -> RetentionRule:
        """Return the rule that applies to a run."""
        return next(rule for rule in self.all_rules if rule.matches(head))

    def window_ms(self, field: str) -> int | None:
        """Return one of the windows."""
        return _milliseconds(field, getattr(self, field))


_WINDOWS = (
    *("finished", "tasks", "snapshots", "dead_letters", "audit", "outbox", "archive_index", "stale_runs"),
    "stale_tasks",
)


def _rule(settings: RetentionRuleSettings) -> RetentionRule:
    return RetentionRule(
        finished=settings.finished_days, workflow=settings.workflow, status=settings.status, tenant=settings.tenant
    )


def _milliseconds(field: str, window: Any) -> int | None:
    if window is None:
        return None
    is_number = isinstance(window, int | float) and not isinstance(window, bool)
    try:
        kept = timedelta(days=window) if is_number else window
    except (OverflowError, ValueError):
        kept = None
    if not isinstance(kept, timedelta) or kept < timedelta():
        problem = f"{field} is how long to keep it, a timedelta or a number of days, not {window!r}"
        raise InvalidInput(problem, field=field)
    return kept // timedelta(milliseconds=1)


# --- what a pass has done


class RetentionReport(Struct, frozen=True, kw_only=True):
    """What a pass has deleted, or would delete; how much it has archived; and what is stale.

    `by_workflow` counts runs. `has_more` is true if a bound ended the pass early.
    """

    at: Instant
    runs: int = 0
    events: int = 0
    signals: int = 0
    tasks: int = 0
    runtime_states: int = 0
    acceptance_records: int = 0
    dead_letters: int = 0
    audit_entries: int = 0
    plans: int = 0
    archived_runs: int = 0
    outbox: int = 0
    archived: int = 0
    stale_runs: int = 0
    stale_tasks: int = 0
    cancelled: int = 0
    by_workflow: dict[str, int] = {}
    has_more: bool = False


_DELETED = (
    *("runs", "events", "signals", "tasks", "runtime_states", "acceptance_records", "dead_letters", "audit_entries"),
    *("plans", "archived_runs", "outbox"),
)


class _Account:
    """What a pass has done so far, and the part of it that the audit log does not have yet."""

    def __init__(self, now: Instant) -> None:
        self.at = now
        self.counts: Counter[str] = Counter()
        self.unwritten: Counter[str] = Counter()
        self.by_workflow: Counter[str] = Counter()
        self.has_more = False

    def add(self, report: PurgeReport) -> None:
        for field in _DELETED:
            self.count(field, getattr(report, field))

    def count(self, field: str, number: int) -> None:
        if number:
            self.counts[field] += number
            self.unwritten[field] += number

    def report(self) -> RetentionReport:
        return RetentionReport(
            at=self.at, **self.counts, by_workflow=dict(sorted(self.by_workflow.items())), has_more=self.has_more
        )


class _Pace:
    """How much the next commit deletes, and how long to pause after each."""

    def __init__(self, loop_time: Callable[[], float]) -> None:
        self._time = loop_time
        self.share = 1.0

    async def after(self, began: float) -> None:
        """Pause after a commit that began at this time."""
        took_s = self._time() - began
        self.share = max(self.share / 2, 1 / BATCH_RUNS) if took_s > SLOW_S else min(self.share * 1.5, 1.0)
        await asyncio.sleep(max(took_s * REST, SHORTEST_PAUSE_S))

    def batches(self, heads: Sequence[RunHead]) -> Iterator[list[RunHead]]:
        """Yield groups of runs that are deleted by one commit each."""
        batch: list[RunHead] = []
        events = 0
        for head in heads:
            is_full = len(batch) >= BATCH_RUNS * self.share or events + head.version > BATCH_EVENTS * self.share
            if batch and is_full:
                yield batch
                batch, events = [], 0
            batch.append(head)
            events += head.version
        if batch:
            yield batch


# --- the duty


class RetentionDuty:
    """Executes the policy on one store."""

    def __init__(
        self,
        node: str,
        store: Store,
        policy: Retention,
        ids: Ids,
        archive: Archive | None,
        cancel: Callable[[str, str], Awaitable[None]],
    ) -> None:
        """`cancel` cancels a run, for a reason."""
        self.policy = policy
        self.archive = archive
        self.last: RetentionReport | None = None
        """The report of this process's last pass."""
        self.alerts: deque[tuple[Instant, Alert]] = deque(maxlen=KEPT_ALERTS)
        """Alerts for operators that a service has not taken yet."""
        self._node = node
        self._store = store
        self._ids = ids
        self._cancel = cancel
        self._is_sweeping = False
        self._parts_until: Instant = 0

    async def run(self, held: HeldLock) -> None:
        """Make a pass periodically, for as long as this node has the lock."""
        while True:
            try:
                report = await self.sweep(held.check)
                logger.info("retention: %s", _said(asdict(report)) or "nothing is past its window")
            except Conflict:
                logger.info("retention is under way elsewhere")
            await asyncio.sleep(self.policy.every.total_seconds())

    async def sweep(
        self, check: Callable[[], None] = lambda: None, *, until_s: float | None = None, caller: Caller | None = None
    ) -> RetentionReport:
        """Delete what is past its window. `check` raises if the duty is lost; after `until_s` the rest is left.

        The audit log names the caller, or the duty itself.

        Raise `Conflict` if another pass is running.
        """
        is_free = not self._is_sweeping
        self._is_sweeping = True
        try:
            if not is_free or await acquire(self._store, PASS_LOCK, self._node, PASS_LEASE_MS) is None:
                raise Conflict("retention is under way already: see retention.show")
            account = _Account(await self._store.now())
            try:
                await self._delete(account, check, until_s, caller)
                await self._look_for_stale(account, is_dry=False)
            finally:
                await self._write(account, caller)
        finally:
            if is_free:
                self._is_sweeping = False
                await to_the_end(self._release(), PASS_LEASE_MS / 3_000)
        self.last = account.report()
        return self.last

    async def _release(self) -> None:
        """Release the lock of the pass, even if this pass was cancelled before it knew that it had the lock."""
        for lock in await self._store.find_locks():
            if (lock.name, lock.owner) == (PASS_LOCK, self._node):
                await self._store.release_lock(lock.name, lock.owner, lock.epoch)

    async def _delete(
        self, account: _Account, check: Callable[[], None], until_s: float | None, caller: Caller | None
    ) -> None:
        """Execute the steps one by one, with pauses; periodically renew the lock and write to the audit log."""
        time = asyncio.get_running_loop().time
        began = kept = time()
        pace = _Pace(time)
        async with aclosing(self._steps(account)) as steps:
            async for step in steps:
                check()
                at = time()
                await step(pace)
                await pace.after(at)
                if time() - kept > PASS_LEASE_MS / 3_000:
                    kept = time()
                    await self._write(account, caller)
                    if await acquire(self._store, PASS_LOCK, self._node, PASS_LEASE_MS) is None:
                        raise Conflict("another pass has begun: this one took too long to renew its lock")
                if until_s is not None and time() - began > until_s:
                    account.has_more = True
                    return

    async def preview(self, until_s: float) -> RetentionReport:
        """Return what would be deleted now, and what is stale. Nothing is changed."""
        loop = asyncio.get_running_loop()
        account, until = _Account(await self._store.now()), loop.time() + until_s
        async with aclosing(self._finished(account.at)) as finished:
            async for heads in finished:
                account.by_workflow.update(head.plan_id for head in heads)
                account.counts["runs"] += len(heads)
                account.counts["events"] += sum(head.version for head in heads)
                if loop.time() > until:
                    account.has_more = True
                    break
        rest = await self._store.purge(replace(self._others(), dry_run=True, limit=PAGE_RUNS * 2))
        account.add(rest)
        account.has_more |= rest.has_more
        await self._look_for_stale(account, is_dry=True)
        return account.report()

    # --- what is deleted

    async def _steps(self, account: _Account) -> AsyncGenerator[Callable[[_Pace], Awaitable[None]], None]:
        """Yield the steps, one commit at a time."""
        async for heads in self._finished(account.at):
            begun = [] if self.archive is None else await self._begun(heads)
            places = {run.run_id: run for run in begun}
            new = [head for head in heads if head.run_id not in places]
            archived = [] if self.archive is None else await self.archive.put(new)
            places |= {run.run_id: run for run in archived}
            account.count("archived", len(archived))
            left = [head for head in heads if self.archive is None or head.run_id in places]

            async def delete(pace: _Pace, left: list[RunHead] = left, places: dict[str, Any] = places) -> None:
                batch = next(pace.batches(left))
                del left[: len(batch)]
                policy = PurgePolicy(
                    run_ids=tuple(head.run_id for head in batch),
                    finished_run_ms=self.policy.rule_of(batch[0]).window_ms,
                    archived=tuple(places[head.run_id] for head in batch if places),
                    limit=len(batch),
                    most_bytes=round(BATCH_BYTES * pace.share),
                )
                report = await self._store.purge(policy)
                # Too large together, or only a part of one run: the rest follows what was deleted.
                if report.has_more and (report.runs or report.events):
                    left[:0] = batch[report.runs :]
                account.add(report)
                account.by_workflow.update(head.plan_id for head in batch[: report.runs])

            while left:
                yield delete
        async for part in self._parts(account):
            yield part
        is_more = True

        async def others(_: _Pace) -> None:
            nonlocal is_more
            report = await self._store.purge(self._others())
            account.add(report)
            is_more = report.has_more

        while is_more:
            yield others

    async def _begun(self, heads: Sequence[RunHead]) -> list[ArchivedRun]:
        """Return where the runs are archived that an incomplete pass has partly deleted."""
        found: list[ArchivedRun] = []
        for head in heads:
            if head.version > BATCH_EVENTS:
                known = await self._store.find(ArchivedRunQuery(run_id=head.run_id))
                found += [run for run in known if run.created_at == head.created_at]
        return found

    async def _finished(self, now: Instant) -> AsyncGenerator[list[RunHead], None]:
        """Yield the finished runs that are past their window, in batches of one rule each."""
        for rule in self.policy.all_rules:
            if rule.window_ms is None:
                continue
            query = FinishedRunQuery(
                until=now - rule.window_ms * 1_000,
                tenant=rule.tenant,
                workflow=rule.workflow,
                status=None if rule.status is None else RunStatus(rule.status),
                held_after=now - PurgePolicy().sink_hold_ms * 1_000,
                limit=PAGE_RUNS,
                look=LOOK_RUNS,
            )
            async for page in pages(self._inner.find, query, _end):
                page.log("runs")
                if heads := [head for head in page if self.policy.rule_of(head) == rule]:
                    yield heads

    async def _parts(self, account: _Account) -> AsyncIterator[Callable[[_Pace], Awaitable[None]]]:
        """Yield the deletion of tasks and snapshots of finished runs that are kept.

        Runs that ended before the last pass have none left, so only later runs are examined.
        """
        windows = [self.policy.window_ms(field) for field in ("tasks", "snapshots")]
        given = [window for window in windows if window is not None]
        if not given:
            return
        until = account.at - max(given) * 1_000
        query = FinishedRunQuery(
            until=account.at - min(given) * 1_000, after=(self._parts_until, ""), limit=BATCH_ROWS, look=LOOK_RUNS
        )
        async for page in pages(self._inner.find, query, _end):
            ids = tuple(head.run_id for head in page)

            async def clear(_: _Pace, ids: tuple[str, ...] = ids) -> None:
                policy = PurgePolicy(run_ids=ids, task_ms=windows[0], runtime_state_ms=windows[1], limit=1_000)
                while (report := await self._store.purge(policy)).has_more:
                    account.add(report)
                account.add(report)

            if ids:
                yield clear
        self._parts_until = until

    def _others(self) -> PurgePolicy:
        """Return the policy for data that is not part of a finished run."""
        longest = max((rule.window_ms or 0 for rule in self.policy.all_rules), default=0)
        is_for_ever = any(rule.window_ms is None for rule in self.policy.all_rules)
        return PurgePolicy(
            audit_ms=self.policy.window_ms("audit"),
            dead_letter_ms=self.policy.window_ms("dead_letters"),
            outbox_ms=self.policy.window_ms("outbox"),
            archived_run_ms=self.policy.window_ms("archive_index"),
            plan_body_ms=None if is_for_ever else longest,
            limit=BATCH_ROWS,
        )

    @property
    def _inner(self) -> Store:
        """The store without the layer that decrypts payloads: the pass needs no payloads."""
        return unsealed(self._store)

    # --- what is stale

    async def _look_for_stale(self, account: _Account, *, is_dry: bool) -> None:
        run_ids = await _some(self._stale_runs(account.at))
        tasks = await _some(self._stale_tasks(account.at))
        account.counts["stale_runs"], account.counts["stale_tasks"] = len(run_ids), len(tasks)
        if is_dry:
            return
        of_tasks = [run_id for run_id, _ in tasks]
        self._raise(account.at, "STALE_RUNS", "runs that have not changed", run_ids, "stale_runs")
        task_ids = [task_id for _, task_id in tasks]
        self._raise(account.at, "STALE_TASKS", "tasks that have been open", task_ids, "stale_tasks")
        doomed = [*run_ids * self.policy.cancel_stale_runs, *of_tasks * self.policy.cancel_stale_tasks]
        for run_id in dict.fromkeys(doomed):
            try:
                await self._cancel(run_id, "it is stale, and retention cancels stale runs")
                account.count("cancelled", 1)
            except HoldfastError:
                logger.warning("retention: run %s could not be cancelled", run_id, exc_info=True)

    def _raise(self, now: Instant, code: AlertCode, what: str, found: list[str], field: str) -> None:
        """Raise one alert for everything that was found."""
        if found:
            days = (self.policy.window_ms(field) or 0) / 86_400_000
            detail = f"{len(found)} {what} for {days:g} days, such as {', '.join(found[:SHOWN_RUNS])}"
            self.alerts.append((now, Alert(code, 3, "", detail)))
            if isinstance(self._store, ObservedStore):
                self._store.alerts.note(code, 3, detail)
            logger.warning("retention: %s", detail)

    async def _stale_runs(self, now: Instant) -> AsyncGenerator[str, None]:
        window_ms = self.policy.window_ms("stale_runs")
        if window_ms is None:
            return
        for status in UNFINISHED:
            query = RunQuery(status=status, limit=PAGE_RUNS, look=LOOK_RUNS)
            async for page in pages(self._inner.find, query, lambda head: head.run_id):
                for head in page:
                    is_delayed = status == RunStatus.PENDING and (head.ready_at or 0) > now
                    if head.updated_at <= now - window_ms * 1_000 and not is_delayed:
                        yield head.run_id

    async def _stale_tasks(self, now: Instant) -> AsyncGenerator[tuple[str, str], None]:
        window_ms = self.policy.window_ms("stale_tasks")
        if window_ms is None:
            return
        query = TaskQuery(status="OPEN", limit=PAGE_RUNS, look=LOOK_RUNS)
        async for page in pages(self._inner.find, query, lambda task: task.task_id):
            for task in page:
                if task.created_at <= now - window_ms * 1_000:
                    yield task.run_id, task.task_id

    async def _write(self, account: _Account, caller: Caller | None) -> None:
        """Append the deletions since the last write to the audit log."""
        said, account.unwritten = _said(account.unwritten), Counter()
        if said:
            entry = audit_entry(caller, self._ids.new_id, detail=said) or AuditEntry(
                entry_id=self._ids.new_id(), operation=OPERATION, actor=LOCK, detail=said[:DETAIL_CHARS]
            )
            await self._store.append_audit([entry])


async def _some(found: AsyncGenerator[T, None]) -> list[T]:
    """Return the first items, up to `MOST_STALE`."""
    some: list[T] = []
    async with aclosing(found) as each:
        async for one in each:
            some.append(one)
            if len(some) >= MOST_STALE:
                break
    return some


def unsealed(store: Store) -> Store:
    """Return a store without the layers that count calls and decrypt payloads."""
    while isinstance(store, ObservedStore | SealingStore):
        store = store.inner
    return store


def archive_at(address: str | Path | None, store: Store) -> Archive | None:
    """Return the archive of a store, if it has one."""
    return None if address is None else Archive(address, store.inner if isinstance(store, ObservedStore) else store)


def _end(head: RunHead) -> tuple[Instant, str]:
    return head.finished_at or 0, head.run_id


def _said(counts: Any) -> str:
    return ", ".join(f"{field} {counts[field]}" for field in (*_DELETED, "archived", "cancelled") if counts.get(field))
