"""Leases of nodes, and who owns which run. `port.py` has the rules.

A node's lease is a separate object, so that renewing it touches no run. The owner and the epoch of a run are in its
head: claiming a run replaces the head.
"""

import asyncio
from collections.abc import Awaitable, Callable, Sequence

import msgspec
from msgspec.structs import replace

from holdfast.clock import Secrets
from holdfast.core.instants import Instant
from holdfast.core.plans import claimed_as, definition_of
from holdfast.limits import SUSPECT_LOSSES
from holdfast.store import decisions, port
from holdfast.store.s3.bucket import Bucket
from holdfast.store.s3.head import StoredRun
from holdfast.store.s3.heads import Heads
from holdfast.store.s3.mirror import HeldNode, Mirror, NodeRecord, node_key
from holdfast.store.s3.shards import Shares, place_for
from holdfast.store.s3.summary import Summary

Plans = Sequence[port.Plan] | None


class Leases:
    """The leases of all nodes, and the owners of all runs."""

    def __init__(
        self,
        bucket: Bucket,
        mirror: Mirror,
        heads: Heads,
        secrets: Secrets,
        follow: Callable[[Instant], Awaitable[bool]],
        grace: int,
    ) -> None:
        self._grace = grace
        self._bucket = bucket
        self._mirror = mirror
        self._heads = heads
        self._secrets = secrets
        self._follow = follow

    # --- nodes

    def ends(self) -> dict[str, Instant]:
        """Return when the leases of all known nodes end."""
        return {node: held.record.lease_until for node, held in self._mirror.nodes.items()}

    async def check(self, node: str, now: Instant) -> None:
        """Raise `LeaseExpired` if the lease of a node is not current."""
        if self._mirror.lease_end(node, now) <= now:
            await self._mirror.fetch_node(node, now)
        if self._mirror.lease_end(node, now) <= now:
            raise decisions.lease_expired(node)

    async def renew(self, node: str, lease_ms: int, plans: Plans, now: Instant, *, is_start: bool) -> Instant:
        """Give a node a lease; with `is_start` end those of its other lives."""
        held = self._mirror.nodes.get(node)
        if held is None or self._mirror.lease_end(node, now) <= now:
            await self._follow(now)
            held = await self._mirror.fetch_node(node, now)
        while True:
            others = [name for name in self._mirror.nodes if decisions.is_another_life(node, name)]
            has_lease = self._mirror.lease_end(node, now) > now
            if is_start:
                await self._end_lives(node, others, now)
            elif not has_lease and any(self._mirror.lease_end(name, now) > now for name in others):
                raise decisions.superseded(node)
            known = None if held is None else held.record.plans
            published = known if plans is None else tuple(plans)
            until = now + lease_ms * 1_000
            if await self._put_node(node, until, published, held, now):
                break
            await self._follow(now)
            held = await self._mirror.fetch_node(node, now)
        is_shorter = held is not None and until < held.record.lease_until
        if held is None or held.record.plans != published or is_start or is_shorter or not has_lease:
            self._heads.note_node(node)
        await self._drop_nodes(now)
        return until

    async def _put_node(
        self, node: str, until: Instant, plans: tuple[port.Plan, ...] | None, held: HeldNode | None, now: Instant
    ) -> bool:
        mark = self._secrets.new_secret()[:24]
        record = NodeRecord(node, until, plans, mark)
        data = msgspec.json.encode(record)
        if held is None:
            written = await self._bucket.create(node_key(node), data, mark.encode())
        else:
            written = await self._bucket.replace(node_key(node), data, held.etag, mark.encode())
        if written is not None:
            self._mirror.nodes[node] = HeldNode(record, written.etag, now)
        return written is not None

    async def _end_lives(self, node: str, others: Sequence[str], now: Instant) -> None:
        """End the leases of other lives of a node, and make the jobs that they had acquired visible."""
        for name in others:
            held: HeldNode | None = self._mirror.nodes.get(name)
            while held is not None and held.record.lease_until > now:
                if await self._put_node(name, now, held.record.plans, held, now):
                    self._heads.note_node(name)
                    break
                held = await self._mirror.fetch_node(name, now)

        def show(run: StoredRun) -> None:
            for step_id, work in run.work.items():
                is_theirs = work.taken_by is not None and decisions.is_another_life(node, work.taken_by)
                if is_theirs and work.visible_at is not None and work.visible_at > now:
                    run.work[step_id] = replace(work, visible_at=now)

        busy = [
            run_id
            for run_id in self._mirror.active
            for work in self._mirror.summaries[run_id].work
            if work.taken_by is not None and decisions.is_another_life(node, work.taken_by)
        ]
        await asyncio.gather(*(self._heads.change_readable(run_id, show) for run_id in dict.fromkeys(busy)))

    async def _drop_nodes(self, now: Instant) -> None:
        """Delete the objects of nodes that have no lease and own nothing."""
        owners = {self._mirror.summaries[run_id].lease_owner for run_id in self._mirror.active}
        late = [node for node in self._mirror.nodes if not self._mirror.may_be_alive(node, now) and node not in owners]
        await self._mirror.fetch_nodes(late, now)  # a renewed lease is not announced
        gone = [node for node in late if node in self._mirror.nodes and self._mirror.lease_end(node, now) <= now]
        await self._bucket.delete([node_key(node) for node in gone])
        for node in gone:
            self._mirror.nodes.pop(node, None)  # unless another call was faster
            self._heads.note_node(node)

    # --- runs

    async def claim(self, node: str, limit: int, plans: Plans, now: Instant) -> list[port.LoadedRun]:
        """Claim eligible runs, longest eligible first."""
        await self._mirror.check_leases(now, node)
        shares = self._shares(node, now)
        eligible = []
        for run_id in self._mirror.active:
            run = self._mirror.summaries[run_id]
            since = self._eligible_since(run, node, now) if _is_of(run, plans) else None
            if since is None:
                continue
            delay = shares.delay(run_id, definition_of(run.plan_id, run.plan_version))
            if delay == 0 or run.lease_owner == node:
                eligible.append((0, since, run.order, run_id))
            elif since + delay <= now:  # when helping others, each node begins at another position
                eligible.append((1, place_for(node, run_id), run.order, run_id))
        eligible.sort()
        claimed: list[port.LoadedRun] = []
        while eligible and len(claimed) < limit:
            wave, eligible = eligible[: limit - len(claimed)], eligible[limit - len(claimed) :]
            before = {run_id: self._mirror.summaries.get(run_id) for *_, run_id in wave}
            took = await asyncio.gather(*(self._claim(run_id, node, now) for run_id in before))
            claimed += [loaded for loaded in took if loaded is not None]
            for known, loaded in zip(before.values(), took, strict=True):
                if loaded is None and known is not None and known.lease_owner is not None:
                    self._note_last_words(known)
        return claimed

    def _note_last_words(self, known: Summary) -> None:
        """Announce a run that its owner changed but did not announce before it was killed."""
        found = self._mirror.summaries.get(known.run_id)
        if found is None or found.etag != known.etag:
            self._heads.note_found(known.run_id)

    async def _claim(self, run_id: str, node: str, now: Instant) -> port.LoadedRun | None:
        def decide(run: StoredRun) -> port.LoadedRun | None:
            if self._eligible_since(run, node, now) is None:
                return None
            owner, losses = run.head.lease_owner, run.head.losses
            epoch = run.head.lease_epoch + (owner != node)
            if owner is not None and owner != node:
                losses = max(losses, min(losses + 1, SUSPECT_LOSSES))
            run.head = replace(run.head, lease_owner=node, lease_epoch=epoch, losses=losses)
            run.wake(now)
            return run.loaded(now)

        return await self._heads.change_readable(run_id, decide)

    def _shares(self, node: str, now: Instant) -> Shares:
        """Return how the nodes share the runs now, as seen by this node."""
        mirror = self._mirror
        owners = {mirror.summaries[run_id].lease_owner for run_id in mirror.active}  # their leases were checked
        alive = {
            name: held.record.plans
            for name, held in mirror.nodes.items()
            if (mirror.lease_end(name, now) > now if name in owners else mirror.may_be_alive(name, now))
        }
        return Shares(node, alive, self._grace)

    def _eligible_since(self, run: StoredRun | Summary, node: str, now: Instant) -> Instant | None:
        """Return since when the node may claim the run, or None if it may not."""
        owner = run.head.lease_owner
        since = run.head.ready_at if owner is None or owner == node else self._mirror.lease_end(owner, now)
        return since if since is not None and since <= now else None

    async def release(self, node: str, run_ids: Sequence[str] | None, now: Instant) -> int:
        """Release runs of a node, or all of them and its lease; return their number."""

        def decide(run: StoredRun) -> bool:
            if run.head.lease_owner != node:
                return False
            run.head = replace(run.head, lease_owner=None, lease_epoch=run.head.lease_epoch + 1)
            run.wake(now)
            return True

        active = list(self._mirror.active)
        named = active if run_ids is None else [run_id for run_id in dict.fromkeys(run_ids) if run_id]
        owned = [
            run_id
            for run_id in named
            if run_id in self._mirror.summaries and self._mirror.summaries[run_id].lease_owner == node
        ]
        released = await asyncio.gather(*(self._heads.change_readable(run_id, decide) for run_id in owned))
        if run_ids is None:
            await self._bucket.delete([node_key(node)])
            self._mirror.nodes.pop(node, None)
            self._heads.note_node(node)
        return sum(map(bool, released))

    async def hand_over(self, node: str, run_ids: Sequence[str], to: str, now: Instant) -> list[str]:
        """Give runs of a node to another one with a current lease; return those that were given."""
        await self._mirror.fetch_node(to, now)
        if self._mirror.lease_end(to, now) <= now:
            return []

        def decide(run: StoredRun) -> bool:
            if run.head.lease_owner != node or node == to:
                return False
            run.head = replace(run.head, lease_owner=to, lease_epoch=run.head.lease_epoch + 1)
            run.wake(now)
            return True

        named = [run_id for run_id in dict.fromkeys(run_ids) if run_id in self._mirror.summaries]
        given = await asyncio.gather(*(self._heads.change_readable(run_id, decide) for run_id in named))
        return sorted(run_id for run_id, is_given in zip(named, given, strict=True) if is_given)

    async def next_due(self, node: str, plans: Plans, queues: Sequence[str], now: Instant) -> Instant | None:
        """Return when a claim, or an acquisition from the queues, may find something next."""
        await self._mirror.check_leases(now, node)
        shares = self._shares(node, now)
        instants: list[Instant] = []
        for run_id in self._mirror.active:
            run = self._mirror.summaries[run_id]
            jobs = [work for work in run.work if work.queue is not None and work.queue in queues]
            instants += [work.visible_at for work in jobs if work.visible_at is not None]
            owner, ready_at = run.lease_owner, run.ready_at
            if not _is_of(run, plans):
                continue
            if owner == node:
                if ready_at is not None:
                    instants.append(ready_at)
                continue
            since = ready_at if owner is None else self._mirror.lease_end(owner, now)
            if since is not None:
                delay = shares.delay(run_id, definition_of(run.plan_id, run.plan_version))
                instants.append(since + delay)
        return min(instants, default=None)


def _is_of(run: Summary, plans: Plans) -> bool:
    return plans is None or claimed_as(run.plan_id, run.plan_version, run.needs) in plans
