"""Activities in queues. A job is part of its run's head: acquiring it replaces the head."""

import asyncio
from collections.abc import Sequence

from holdfast.core.instants import Instant
from holdfast.store import port
from holdfast.store.memory import jobs
from holdfast.store.s3.head import StoredRun
from holdfast.store.s3.heads import Heads
from holdfast.store.s3.mirror import Mirror


class Jobs:
    """The jobs of all runs."""

    def __init__(self, mirror: Mirror, heads: Heads) -> None:
        self._mirror = mirror
        self._heads = heads

    async def acquire(
        self, node: str, queues: Sequence[str], activities: Sequence[str], limit: int, until: Instant, now: Instant
    ) -> list[port.Job]:
        """Acquire visible jobs for a node, longest visible first. They are invisible until `until`."""

        async def take(run_id: str, step_ids: Sequence[str]) -> list[port.Job] | None:
            return await self._heads.change_readable(
                run_id, lambda run: _acquire(run, step_ids, activities, node, until, now)
            )

        taken: list[port.Job] = []
        wanted = self._visible(queues, activities, now)
        while wanted and len(taken) < limit:
            wave, wanted = wanted[: limit - len(taken)], wanted[limit - len(taken) :]
            by_run: dict[str, list[str]] = {}
            for _, _, run_id, step_id in wave:
                by_run.setdefault(run_id, []).append(step_id)
            found = await asyncio.gather(*(take(run_id, step_ids) for run_id, step_ids in by_run.items()))
            given = {(job.run_id, job.step_id): job for some in found for job in some or ()}
            taken += [given[run_id, step_id] for _, _, run_id, step_id in wave if (run_id, step_id) in given]
        return taken

    def _visible(
        self, queues: Sequence[str], activities: Sequence[str], now: Instant
    ) -> list[tuple[Instant, int, str, str]]:
        """Return the jobs that may be acquired, as (visible since, order of the run, run id, step id), in order."""
        active = [self._mirror.summaries[run_id] for run_id in self._mirror.active]
        return sorted(
            (work.visible_at or 0, run.order, run.run_id, work.step_id)
            for run in active
            for work in run.work
            if work.queue in queues and work.activity in activities and work.is_visible(now)
        )

    async def release(self, node: str, taken: Sequence[port.Job], now: Instant) -> int:
        """Return jobs to the queue that a node has acquired but not started; return their number."""

        async def give_back(job: port.Job) -> bool:
            def decide(run: StoredRun) -> bool:
                work = run.work.get(job.step_id)
                if work is None or not work.is_taken_by(node, job.engine_attempt_id):
                    return False
                run.work[job.step_id] = work.returned(job.engine_attempt_id, now)
                return True

            return bool(await self._heads.change_readable(job.run_id, decide))

        return sum(await asyncio.gather(*map(give_back, taken)))

    async def heartbeat(self, node: str, beats: Sequence[port.Heartbeat], until: Instant) -> list[bool]:
        """Keep jobs invisible until `until`, and store details; return for each whether the node still has it."""
        kept: list[bool] = [False] * len(beats)
        by_run: dict[str, list[int]] = {}
        for place, beat in enumerate(beats):
            by_run.setdefault(beat.run_id, []).append(place)

        async def beat_in(run_id: str, places: list[int]) -> None:
            found = await self._heads.change_readable(
                run_id, lambda run: [run.beat(node, beats[place], until) for place in places]
            )
            for place, is_kept in zip(places, found or [False] * len(places), strict=True):
                kept[place] = is_kept

        await asyncio.gather(*(beat_in(run_id, places) for run_id, places in by_run.items()))
        return kept


def _acquire(
    run: StoredRun, step_ids: Sequence[str], activities: Sequence[str], node: str, until: Instant, now: Instant
) -> list[port.Job]:
    taken = []
    for step_id in step_ids:
        work = run.work.get(step_id)
        if work is not None and work.job is not None and work.job.activity in activities and work.is_visible(now):
            run.work[step_id], given = jobs.acquire(work, work.job, node, until)
            taken.append(given)
    return taken
