"""`store copy`: copies everything from one store into another, live runs included.

No node may use either store meanwhile: a node's lease on one of them is a `Conflict`. Runs are copied in order of
creation, each with everything that belongs to it (`transfer.py`), followed by the data that belongs to no run. An
interrupted copy is repeated: whatever exists already, unchanged, is skipped. At the end, every run is read from both
stores and compared by its hash. A run that has changed meanwhile, because it accepted a signal, is copied again.

A run that has continued in the other store is never overwritten.
"""

import hashlib
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from msgspec import Struct
from msgspec.structs import replace

from holdfast.core.call_limits import is_limited
from holdfast.core.keys import COMPLETION_KEY
from holdfast.core.schedules import Schedule
from holdfast.errors import Conflict, InvalidInput, StoreCorrupt
from holdfast.store import port, validation
from holdfast.store.port import Store
from holdfast.store.queries import pages
from holdfast.store.transfer import RUNS_AT_ONCE, Transfer, WholeRun
from holdfast.store.types import CALL_LIMITS

Row = TypeVar("Row")
Progress = Callable[[int, int], None]
"""Gets the number of completed runs and the total."""

PASSES = 5
"""How often runs are compared before the copy of a store that keeps changing fails."""

PAGE = 500


class CopyReport(Struct, frozen=True, kw_only=True):
    """What a verified copy holds. `digest` is a hash over the digests of all runs, ordered by their ids."""

    runs: int
    runs_written: int
    unfinished_runs: int
    events: int
    signals: int
    unconsumed_signals: int
    open_waits: int
    tasks: int
    messages: int
    jobs: int
    dead_letters: int
    attributes: int
    schedules: int
    tokens: int
    plans: int
    definitions: int
    audit_entries: int
    archived_runs: int
    sinks: int
    digest: str


async def copy_store(source: Store, target: Store, progress: Progress = lambda done, of: None) -> CopyReport:
    """Copy everything, compare it, and return what the copy holds."""
    copier = _Copier(source, target, progress)
    await copier.check()
    await copier.copy_runs()
    return await copier.copy_the_rest()


def _transfer_of(store: Store) -> Transfer:
    found: Transfer | None = getattr(store, "transfer", None)
    if found is None:
        raise InvalidInput("this store cannot be copied: only SQLite, PostgreSQL and S3 can", field="store")
    return found


class _Copier:
    def __init__(self, source: Store, target: Store, progress: Progress) -> None:
        self._source, self._target = source, target
        self._from, self._to = _transfer_of(source), _transfer_of(target)
        self._progress = progress
        self._written: set[str] = set()
        self._digests: dict[str, str] = {}
        self._counts: dict[str, int] = dict.fromkeys(_COUNTED, 0)
        self._plans: set[port.Plan] = set()
        self._bodies: set[tuple[str, str]] = set()

    # --- before

    async def check(self) -> None:
        """Refuse data that cannot be copied completely, before anything is written."""
        for store, what in ((self._source, "source"), (self._target, "target")):
            leases = (await store.stats()).leases
            if leases:
                names = ", ".join(sorted(leases))
                raise Conflict(
                    f"nodes work on the {what} of the copy: {names}. Stop them, or wait until their leases have ended",
                    nodes=sorted(leases),
                )
        sinks = await self._sinks()
        if sinks and "outbox" in self._target.capabilities.lacking:
            raise validation.lacks(self._target, "outbox", f"the sink {sinks[0].sink.name!r}")
        behind = [status.sink.name for status in sinks if status.backlog or status.dead_letters]
        if behind:
            raise Conflict(
                f"sinks have yet to get events: {', '.join(behind)}. Let a node deliver them, or remove the sinks",
                sinks=behind,
            )

    async def _sinks(self) -> list[Any]:
        if "outbox" in self._source.capabilities.lacking:
            return []
        return await _all(self._source.find, port.SinkQuery(counted=True, limit=PAGE), lambda each: each.sink.name)

    # --- runs

    async def copy_runs(self) -> None:
        """Copy runs until all are equal in both stores."""
        for _ in range(PASSES):
            await self._from.settle()
            if not await self._copy_changed():
                return
        raise Conflict("the source of the copy is still being changed: stop what sends to its runs, and copy again")

    async def _copy_changed(self) -> int:
        """Copy the runs that differ between the stores; return their number."""
        run_ids = await self._run_ids()
        self._counts = dict.fromkeys(_COUNTED, 0)
        self._digests = {}
        changed = 0
        for start in range(0, len(run_ids), RUNS_AT_ONCE):
            some = run_ids[start : start + RUNS_AT_ONCE]
            here = [run for run in await self._from.read_runs(some) if run is not None]
            there = await self._to.read_runs([run.head.run_id for run in here])
            new = [run for run, known in zip(here, there, strict=True) if _has_to_be_written(run, known)]
            self._check_calls(new)
            if new:
                await self._to.write_runs(new)
            changed += len(new)
            self._note(here, new)
            self._progress(start + len(some), len(run_ids))
        return changed

    def _check_calls(self, runs: Sequence[WholeRun]) -> None:
        """Refuse runs whose activities wait for a place under a limit, if no node of the target could grant one."""
        if CALL_LIMITS not in self._target.capabilities.lacking:
            return
        for run in runs:
            for work in run.work.values():
                if work.job is not None and work.visible_at is not None and is_limited(work.job.queue):
                    what = f"a call of {work.job.activity!r}, which has a limit, of run {run.head.run_id}"
                    raise validation.lacks(self._target, CALL_LIMITS, what)

    async def _run_ids(self) -> list[str]:
        found: list[tuple[int, str]] = []
        async for page in pages(self._source.find, port.RunQuery(limit=PAGE), lambda head: head.run_id):
            if page.unreadable:
                raise StoreCorrupt(f"runs cannot be read: {', '.join(page.unreadable)}")
            found += [(head.created_at, head.run_id) for head in page]
        return [run_id for _, run_id in sorted(found)]

    def _note(self, runs: Sequence[WholeRun], new: Sequence[WholeRun]) -> None:
        self._written |= {run.head.run_id for run in new}
        for run in runs:
            self._digests[run.head.run_id] = run.digest()
            self._plans.add((run.head.plan_id, run.head.plan_version))
            if run.plan_sha256 is not None:
                self._bodies.add((run.head.tenant, run.plan_sha256))
            for name, count in _COUNTED.items():
                self._counts[name] += count(run)

    # --- data that belongs to no run

    async def copy_the_rest(self) -> CopyReport:
        """Copy the data that belongs to no run, and return what the copy holds."""
        definitions = await self._copy_definitions()
        plans = await self._copy_plans()
        schedules = await self._copy_schedules()
        tokens = await self._copy_tokens()
        key = await self._source.get_key(COMPLETION_KEY)
        if key is not None and await self._target.put_key(COMPLETION_KEY, key) != key:
            raise Conflict("the target of the copy has a key of its own: tokens of activities would not be valid there")
        audit = await _all(self._source.find, port.AuditQuery(limit=PAGE), lambda each: (each.at, each.entry_id))
        await self._to.write_audit(audit)
        archived = await self._archived()
        await self._to.write_archived(archived)
        sinks = await self._sinks()
        for status in sinks:
            await self._target.put_sink(status.sink)
        whole = hashlib.sha256("".join(self._digests[run_id] for run_id in sorted(self._digests)).encode())
        return CopyReport(
            runs=len(self._digests),
            runs_written=len(self._written),
            **self._counts,
            schedules=schedules,
            tokens=tokens,
            plans=plans,
            definitions=definitions,
            audit_entries=len(audit),
            archived_runs=len(archived),
            sinks=len(sinks),
            digest=whole.hexdigest(),
        )

    async def _copy_definitions(self) -> int:
        wanted = sorted(self._plans)
        found = [each for each in await self._source.find_definitions(wanted) if each is not None] if wanted else []
        if found:
            await self._target.publish_definitions(found)
        return len(found)

    async def _copy_plans(self) -> int:
        """Copy registered versions of plans, and the bodies that they or runs need."""
        registered = await _all(
            self._source.find_plans,
            port.PlanQuery(limit=PAGE),
            lambda plan: (plan.tenant, plan.plan_id, plan.plan_version),
        )
        for tenant, sha256 in sorted(self._bodies | {(plan.tenant, plan.sha256) for plan in registered}):
            body = await self._source.get_plan(tenant, sha256)
            if body is not None:
                await self._target.put_plan(tenant, sha256, body)
        for plan in registered:
            await self._target.register_plan(plan)
        return len(registered)

    async def _copy_schedules(self) -> int:
        schedules = await _all(self._source.find, port.ScheduleQuery(limit=PAGE), lambda each: each.place)
        for schedule in schedules:
            query = port.ScheduleQuery(
                tenant=schedule.tenant,
                project=schedule.project,
                environment=schedule.environment,
                schedule_id=schedule.schedule_id,
            )
            there = await self._target.find(query)
            if not there or _without_revision(there[0]) != _without_revision(schedule):
                await self._target.commit_schedule(schedule, there[0].revision if there else 0)
        return len(schedules)

    async def _copy_tokens(self) -> int:
        query = port.TokenQuery(sessions=True, limit=PAGE)
        tokens = await _all(self._source.find_tokens, query, lambda token: token.token_id)
        for start in range(0, len(tokens), PAGE):
            await self._target.put_tokens(tokens[start : start + PAGE])
        return len(tokens)

    async def _archived(self) -> list[port.ArchivedRun]:
        found: list[port.ArchivedRun] = []
        query = port.ArchivedRunQuery(limit=PAGE)
        while page := await self._source.find(query):
            found += page
            query = replace(query, before=(page[-1].finished_at, page[-1].run_id))
        return found


_COUNTED: dict[str, Callable[[WholeRun], int]] = {
    "unfinished_runs": lambda run: run.head.finished_at is None,
    "events": lambda run: len(run.events),
    "signals": lambda run: len(run.signals),
    "unconsumed_signals": lambda run: sum(signal.consumed_seq is None for signal in run.signals),
    "open_waits": lambda run: len(run.waits),
    "tasks": lambda run: len(run.tasks),
    "messages": lambda run: len(run.messages),
    "jobs": lambda run: sum(work.job is not None for work in run.work.values()),
    "dead_letters": lambda run: len(run.letters),
    "attributes": lambda run: len(run.attributes),
}


async def _all(find: Any, query: Any, cursor_of: Callable[[Any], Any]) -> list[Any]:
    return [row async for page in pages(find, query, cursor_of) for row in page]


def _without_revision(schedule: Schedule) -> Schedule:
    return replace(schedule, revision=0, created_at=0, updated_at=0)


def _has_to_be_written(run: WholeRun, known: WholeRun | None) -> bool:
    """Return whether a run is missing in the target or older there. It must not have continued there."""
    run_id = run.head.run_id
    if run.has_place:
        child = "" if run.head.parent_run_id is None else f", a child of run {run.head.parent_run_id},"
        raise Conflict(
            f"run {run_id}{child} is queued by the limit of its workflow, or counts there: let such runs finish, or "
            "cancel them, a child with its parent, before the store is copied",
            run_id=run_id,
        )
    if known is None:
        return True
    if known.digest() == run.digest():
        return False
    ids = [event.event_id for event in known.events]
    if ids != [event.event_id for event in run.events[: len(ids)]]:
        raise Conflict(f"run {run_id} has gone on in the target of the copy: it is not overwritten", run_id=run_id)
    return True
