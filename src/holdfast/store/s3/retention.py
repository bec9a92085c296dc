"""Retention in a bucket, and what outlives its run: entries of the audit log, and archive locations.

The reference model decides what a purge deletes, on a copy of all runs that are known here. A run is deleted in an
order that leaves it complete or unreachable: what outlives it is written first, then its request is deleted, then what
belongs to it, and its head last. An interrupted purge is completed by the next one.
"""

import asyncio
from collections.abc import Sequence

from msgspec import Struct
from msgspec.structs import replace

from holdfast.core.audit import AuditEntry
from holdfast.core.instants import Instant
from holdfast.core.schedules import is_of_schedule
from holdfast.store import decisions, port
from holdfast.store.memory import retention
from holdfast.store.memory.audit import AuditLog
from holdfast.store.memory.plans import Body, Plans
from holdfast.store.memory.run import Run
from holdfast.store.s3.documents import Document, Objects, PlansDocument, TokensDocument
from holdfast.store.s3.head import StoredRun
from holdfast.store.s3.heads import Heads
from holdfast.store.s3.mirror import Mirror
from holdfast.store.s3.signals import SignalObjects

Place = tuple[Instant, str]


class ArchiveDocument(Struct, frozen=True):
    """The archive locations of deleted runs."""

    runs: tuple[port.ArchivedRun, ...] = ()
    mark: str = ""


def is_held(run: Run, after: Instant) -> bool:
    """Return whether a run that ended after an instant is kept although its window is past: see `schedules.py`."""
    return is_of_schedule(run.head.run_request_id) and (run.head.finished_at or 0) > after


class Retention:
    """Deletes what may be deleted, and finds what outlives its run."""

    def __init__(
        self,
        mirror: Mirror,
        heads: Heads,
        objects: Objects,
        signals: SignalObjects,
        tokens: Document[TokensDocument],
        plans: Document[PlansDocument],
        archive: Document[ArchiveDocument],
    ) -> None:
        self._mirror = mirror
        self._heads = heads
        self._objects = objects
        self._signals = signals
        self._tokens = tokens
        self._plans = plans
        self._archive = archive

    async def find_audit(self, query: port.AuditQuery) -> port.Found[AuditEntry]:
        """Return the entries of the audit log that match the query."""
        return (await self._log()).find(query)

    async def find_archived(self, query: port.ArchivedRunQuery) -> port.Found[port.ArchivedRun]:
        """Return the archived runs that match the query."""
        return _archive_of(await self._archive.read()).find(query)

    async def _log(self) -> AuditLog:
        log = AuditLog()
        for entry in await self._objects.audit():
            log.append(entry)
        for run in (await self._mirror.read_all()).values():
            for entry in run.audit:
                log.append(entry)
        return log

    async def purge(self, policy: port.PurgePolicy, audit: AuditEntry | None, now: Instant) -> port.PurgeReport:
        """Delete what the policy allows, and return what was deleted."""
        known = await self._mirror.read_all()
        runs = {run_id: run.copy() for run_id, run in known.items() if not run.outgoing}
        held_after = now - policy.sink_hold_ms * 1_000
        report, gone = retention.purge(dict(runs), policy, now, lambda run_id: is_held(runs[run_id], held_after))
        entries = [] if policy.audit_ms is None else (await self._log()).old(now - policy.audit_ms * 1_000, policy)
        kept = [run for run_id, run in known.items() if run_id not in gone]
        used = {(run.head.tenant, run.plan_sha256) for run in kept if run.plan_sha256 is not None}
        bodies = await self._unused_bodies(policy, used, now)
        archived = _archive_of(await self._archive.read()).old(policy, now)
        tokens = [
            token.token_id
            for token in (await self._tokens.read()).tokens.values()
            if policy.tokens and token.tenant == policy.tenant
        ]
        most = policy.limit
        report = replace(
            report,
            audit_entries=len(entries[:most]),
            tokens=len(tokens),
            plans=len(bodies[:most]),
            archived_runs=len(archived[:most]),
            has_more=report.has_more or max(len(entries), len(bodies), len(archived)) > most,
        )
        if policy.dry_run:
            return report
        deleted = [runs[run_id] for run_id in gone]
        await self._note_archived(policy, deleted, archived[:most], now)
        await self._forget_entries(entries[:most])
        await self._delete_runs(deleted, set(entries[:most]))
        await asyncio.gather(*(self._write(run, now) for run_id, run in runs.items() if run_id not in gone))
        await self._delete_others(policy, bodies[:most], tokens)
        if audit is not None:
            await self._objects.append_audit([decisions.purge_entry(audit, report, now)])
        return report

    async def _unused_bodies(self, policy: port.PurgePolicy, used: set[Body], now: Instant) -> list[Body]:
        if decisions.unused_until(policy, now) is None:
            return []
        plans = Plans()
        for (tenant, sha256), put_at in (await self._objects.bodies()).items():
            plans.put(tenant, sha256, b"", put_at)
        for plan in (await self._plans.read()).plans:
            plans.restore(plan)
        return plans.unused(policy, used, now)

    async def _note_archived(
        self, policy: port.PurgePolicy, deleted: Sequence[StoredRun], old: list[port.ArchivedRun], now: Instant
    ) -> None:
        new = decisions.archived_of(policy, {run.head.run_id: run.head.created_at for run in deleted}, now)
        await self.note_archived(new, old)

    async def note_archived(self, new: Sequence[port.ArchivedRun], old: Sequence[port.ArchivedRun] = ()) -> None:
        """Store the archive locations of deleted runs, and delete others."""
        if not new and not old:
            return

        def decide(document: ArchiveDocument, mark: str) -> tuple[ArchiveDocument, None]:
            gone = {(run.run_id, run.created_at) for run in [*old, *new]}
            kept = [run for run in document.runs if (run.run_id, run.created_at) not in gone]
            return ArchiveDocument((*kept, *new), mark), None

        await self._archive.change(decide)

    async def _forget_entries(self, places: Sequence[Place]) -> None:
        """Delete entries of the audit log, wherever they are stored."""
        gone = set(places)

        def decide(run: StoredRun) -> None:
            run.audit = tuple(entry for entry in run.audit if (entry.at, entry.entry_id) not in gone)

        holders = [
            run_id
            for run_id, run in self._mirror.ordered().items()
            if any((entry.at, entry.entry_id) in gone for entry in run.audit)
        ]
        await asyncio.gather(*(self._heads.change(run_id, decide) for run_id in holders))
        await self._objects.delete_audit(places)

    async def _delete_runs(self, runs: Sequence[StoredRun], forgotten: set[Place]) -> None:
        """Delete finished runs. Their entries of the audit log stay."""
        for run in runs:
            kept = [entry for entry in run.audit if (entry.at, entry.entry_id) not in forgotten]
            await self._objects.append_audit(kept)
            await self._heads.delete(run, await self._signals.keys_of(run.head.run_id))

    async def _write(self, run: StoredRun, now: Instant) -> None:
        """Apply to a head what the purge did to its copy."""

        def decide(there: StoredRun) -> None:
            there.tasks = {id_: task for id_, task in there.tasks.items() if id_ in run.tasks}
            there.letters = {
                id_: letter for id_, letter in there.letters.items() if id_ in run.letters or letter.settled is None
            }
            if run.head.snapshot is None:
                there.head = replace(there.head, snapshot=None)
            there.acceptances = {
                key: each for key, each in there.acceptances.items() if key in run.acceptances or each.expires_at > now
            }

        there = self._mirror.ordered().get(run.head.run_id)
        if there is not None and _kept(there) != _kept(run):
            await self._heads.change(run.head.run_id, decide)

    async def _delete_others(self, policy: port.PurgePolicy, bodies: Sequence[Body], tokens: Sequence[str]) -> None:
        await self._objects.delete_bodies(bodies)
        if policy.plans:
            await self._plans.change(
                lambda d, mark: (PlansDocument(tuple(p for p in d.plans if p.tenant != policy.tenant), mark), None)
            )
        if tokens:
            await self._tokens.change(
                lambda d, mark: (TokensDocument({i: t for i, t in d.tokens.items() if i not in tokens}, mark), None)
            )


def _kept(run: StoredRun) -> tuple[object, ...]:
    return run.tasks, run.letters, run.acceptances, run.head.snapshot


def _archive_of(document: ArchiveDocument) -> retention.Archive:
    archive = retention.Archive()
    archive.add(list(document.runs))
    return archive
