"""One chaos: nodes, clients and harm at the same time, then calm, then judgement."""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from random import Random

from tests.chaos.clients import Clients
from tests.chaos.diary import Diary
from tests.chaos.fleet import Chronicle, Fleet, now_us, passed
from tests.chaos.judge import Judge
from tests.chaos.programs import app
from tests.chaos.stores import HarmedStore, store_named

MOST_SHOWN = 20


@dataclass(frozen=True)
class Order:
    """What to play. `store` is sqlite, postgres, failover, or the address of a store that is empty."""

    folder: Path
    store: str = "sqlite"
    nodes: int = 4
    runs: int = 1_000
    seconds: float = 60.0
    lease_s: float = 10.0
    seed: int = 0
    plant: str = ""
    patience_s: float = 30.0
    """For how long no client may hear anything, and no run go on, before the chaos is given up."""
    killed_every_s: float | None = None
    """How often a node is killed; at random if this is None."""
    works: int = 0
    """How many activities each program has beside what is drawn for it, one after the other."""
    to_the_end: bool = False
    """Whether the storm lasts until all clients have their answers, however long that takes."""
    peace_s: float = 10.0
    """How long the server is left alone before it is harmed again, at least; at most it is twice as long."""


@dataclass
class Report:
    """What happened, and what was wrong."""

    wrong: list[str]
    counts: Counter[str]
    recoveries_s: list[float] = field(default_factory=list)
    seconds: float = 0.0

    def lines(self) -> list[str]:
        """Return it to be read."""
        told = [f"{what}: {count:,}" for what, count in sorted(self.counts.items())]
        slowest = sorted(self.recoveries_s)
        if slowest:
            middle, most = slowest[len(slowest) // 2], slowest[-1]
            told.append(f"recoveries: {len(slowest):,}, median {middle:.1f} s, slowest {most:.1f} s")
        return [
            *told,
            f"took {self.seconds:.0f} s; wrong: {len(self.wrong)}",
            *(f"WRONG {problem}" for problem in self.wrong[:MOST_SHOWN]),
        ]


def play(order: Order) -> Report:
    """Play a chaos to its end."""
    return asyncio.run(play_out(order))


async def play_out(order: Order) -> Report:
    """Play a chaos to its end, and judge it."""
    with _logged(order.folder / "clients.log"):
        return await _play(order)


@contextmanager
def _logged(path: Path) -> Iterator[None]:
    """Keep what the engine says in this process, where outages are no news, beside the logs of the nodes."""
    logger, handler = logging.getLogger("holdfast"), logging.FileHandler(path)
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
    logger.addHandler(handler)
    before, logger.propagate = logger.propagate, False
    try:
        yield
    finally:
        logger.propagate = before
        logger.removeHandler(handler)
        handler.close()


async def _play(order: Order) -> Report:
    rng = Random(order.seed)
    chronicle = Chronicle()
    store = await asyncio.to_thread(store_named, order.store, order.folder)
    fleet = Fleet(store, order.nodes, order.folder, order.lease_s, rng, chronicle)
    fleet.plant = order.plant
    clients = Clients(order.runs, order.seconds * 0.9, rng, order.works)
    began = asyncio.get_running_loop().time()
    delays = asyncio.create_task(chronicle.note_delays())
    try:
        async with app.connect(store.url):
            await fleet.open()
            over = asyncio.Event()
            if not order.to_the_end:
                asyncio.get_running_loop().call_later(order.seconds, over.set)
            storm = asyncio.create_task(_storm(order, fleet, store, rng, chronicle, over))
            watching = asyncio.create_task(clients.watch(app.runtime().store))
            answering = asyncio.create_task(clients.answer_tasks())
            await clients.serve_all(order.patience_s)
            watching.cancel()
            answering.cancel()
            if order.to_the_end:
                over.set()
            await storm
        await fleet.close()
        report = await _judged(order, store, clients, fleet, chronicle, asyncio.get_running_loop().time() - began)
    finally:
        delays.cancel()
        await fleet.abandon()
        await asyncio.to_thread(store.close)
    report.counts.update(store.counts)
    return report


async def _storm(
    order: Order, fleet: Fleet, store: HarmedStore, rng: Random, chronicle: Chronicle, over: asyncio.Event
) -> None:
    """Harm nodes and server until it is over, and leave everything running."""
    pauses = (rng.uniform(order.peace_s, 2 * order.peace_s) for _ in itertools.count())
    await asyncio.gather(
        fleet.kill_some(over, order.killed_every_s),
        fleet.freeze_some(over),
        _harm_server(over, store, pauses, chronicle),
    )


async def _harm_server(over: asyncio.Event, store: HarmedStore, pauses: Iterator[float], chronicle: Chronicle) -> None:
    """Harm the server in every way in turn, until it is over, but in each way once at least."""
    for number, (what, harm) in enumerate(itertools.cycle(store.harms)):
        if await passed(over, next(pauses)) and number >= len(store.harms):
            return
        begin = now_us()
        chronicle.outages.append((begin, begin + 3_600_000_000))
        await asyncio.to_thread(harm)
        chronicle.outages[-1] = (begin, now_us())
        chronicle.counts[f"server {what}"] += 1


async def _judged(
    order: Order, store: HarmedStore, clients: Clients, fleet: Fleet, chronicle: Chronicle, seconds: float
) -> Report:
    judge = Judge(chronicle, order.lease_s)
    async with app.connect(store.url):
        await judge.judge(app.runtime().store, clients, order.folder / "ledger")
    limit_s = order.lease_s + store.slack_s
    late = [each for each in judge.recoveries if each.seconds > limit_s]
    if late:
        most_s, diary = max(each.seconds for each in late), Diary(order.folder / "diary")
        judge.wrong.append(f"{len(late)} recoveries took longer than {limit_s:.1f} s, at most {most_s:.1f} s")
        for run_id, of, kind, by, epoch, lost_at, gone_on_at, seconds in late:
            how = diary.explain(run_id, epoch, lost_at, gone_on_at)
            judge.wrong.append(f"{run_id}: {by} went on {seconds:.1f} s after {of} was {kind} at {lost_at}: {how}")
    recoveries_s = [each.seconds for each in judge.recoveries]
    counts = chronicle.counts + judge.counts
    counts["answers"], counts["asked again"] = clients.answered, clients.repeated
    counts["turns refused"] = fleet.refusals()
    return Report(chronicle.violations + clients.refused + judge.wrong, counts, recoveries_s, seconds)
