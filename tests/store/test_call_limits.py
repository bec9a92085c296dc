"""Limits on activities: what stores let begin, in random plays, is what the rule says, and is within every bound."""

import os
import random
from bisect import bisect_right
from collections import Counter
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from msgspec.structs import replace

from holdfast.core.call_limits import CallLimit, LimitState, Line, decide_call, in_turn
from holdfast.core.instants import Instant
from holdfast.store.memory import MemoryStore
from holdfast.store.port import Accepted, Job, Store
from holdfast.store.postgres import PostgresStore
from holdfast.store.sqlite import SqliteStore
from holdfast.testing import VirtualClock
from holdfast.testing.samples import SampleNode
from holdfast.testing.store_suite.base import deliver_one
from holdfast.testing.store_suite.call_limits import NAME, beat, call
from holdfast.testing.store_suite.jobs import close, ended, put

pytestmark = pytest.mark.contract("ACT-7")

VISIBLE_MS = 50
KEYS, TENANTS = ("", "a", "b", "c"), ("acme", "zeta")


class Play:
    """A store that is asked at random for places under one limit, and what has begun there."""

    def __init__(self, store: Store, clock: VirtualClock, limit: CallLimit) -> None:
        self.store = store
        self.clock = clock
        self.limit = limit
        self.node = SampleNode(store)
        self.held: dict[str, tuple[str, Job, Instant]] = {}
        self.begins: list[tuple[Instant, str, str]] = []
        self.whose: dict[str, tuple[str, str]] = {}

    async def put(self, number: int, tenant: str, key: str, due_ms: int | None) -> None:
        """Let a run ask for a call."""
        due_at = None if due_ms is None else self.clock.now() + due_ms * 1_000
        step = f"s{number:03}"
        self.whose[step] = tenant, key
        await put(self.node, replace(call(step, key, tenant=tenant, run=f"run-{tenant}"), due_at=due_at))

    async def ask(self, node: str, most: int) -> tuple[list[str], Instant | None]:
        """Take what has room, and check every bound."""
        now = self.clock.now()
        jobs, again_at = await self.store.acquire_limited_jobs(
            node, ["limited:mail"], ["charge"], {NAME: self.limit}, most, VISIBLE_MS
        )
        for job in jobs:
            tenant, key = self.whose[job.step_id]
            self.held[job.step_id] = node, job, now + VISIBLE_MS * 1_000
            self.begins.append((now, tenant, key))
        self.check(now)
        return [job.step_id for job in jobs], again_at

    def check(self, now: Instant) -> None:
        """Check that no bound is exceeded."""
        inside = Counter[tuple[str, str] | None]()
        for step, (_, _, until) in self.held.items():
            if until > now:
                inside[None] += 1
                inside[self.whose[step]] += 1
        limit = self.limit
        assert limit.at_once is None or inside.pop(None, 0) <= limit.at_once
        assert (
            limit.per_key is None or max((n for of, n in inside.items() if of is not None), default=0) <= limit.per_key
        )
        _check_rate([at for at, *_ in self.begins], limit.calls, limit.period_ms)
        for tenant in TENANTS:
            for key in KEYS:
                own = [at for at, *whose in self.begins if whose == [tenant, key]]
                _check_rate(own, limit.key_calls, limit.key_period_ms)

    async def end(self, step: str, how: str) -> str:
        """End a call, or let its node say that it goes on; return what the store says."""
        node, job, _ = self.held[step]
        if how == "beat":
            [is_kept] = await self.store.heartbeat(node, [beat(job)], VISIBLE_MS)
            if is_kept:
                self.held[step] = node, job, self.clock.now() + VISIBLE_MS * 1_000
            return f"kept: {is_kept}"
        del self.held[step]
        if how == "close":
            await close(self.node, step, run=job.run_id)
            return "closed"
        if how == "release":
            return f"released: {await self.store.release_jobs(node, [job])}"
        return f"delivered: {isinstance(await deliver_one(self.store, ended(job, how)), Accepted)}"


def _check_rate(begins: list[Instant], most: int | None, period_ms: int) -> None:
    for at in begins if most is not None else ():
        assert bisect_right(begins, at) - bisect_right(begins, at - period_ms * 1_000) <= (most or 0)


def random_limit(rng: random.Random) -> CallLimit:
    """Return a limit with some of the numbers."""
    return CallLimit(
        at_once=rng.choice((None, 1, 3)),
        per_key=rng.choice((None, 1, 2)),
        calls=rng.choice((None, 2, 5)),
        period_ms=rng.choice((10, 100)),
        key_calls=rng.choice((None, 1)),
        key_period_ms=rng.choice((7, 60)),
    )


async def play(rng: random.Random, plays: list[Play], moves: int) -> None:
    """Ask all stores the same, and compare what they say."""
    number = 0
    for _ in range(moves):
        move = rng.random()
        if move < 0.35:
            number += 1
            asked = number, rng.choice(TENANTS), rng.choice(KEYS), rng.choice((None, None, 5, 40))
            for each in plays:
                await each.put(*asked)
        elif move < 0.65:
            node, most = rng.choice(("node-b", "node-c")), rng.choice((1, 2, 20))
            said = [await each.ask(node, most) for each in plays]
            assert all(each == said[0] for each in said), said
        elif move < 0.85 and plays[0].held:
            step = rng.choice(sorted(plays[0].held))
            how = rng.choice(("done", "failed", "beat", "beat", "close", "release"))
            words = [await each.end(step, how) for each in plays]
            assert len(set(words)) == 1, (how, words)
        else:
            ms = rng.choice((1, 5, 20, 60))
            for each in plays:
                each.clock.advance(ms=ms)


@pytest.fixture(params=["sqlite", "postgres"])
async def pair(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[list[tuple[Store, VirtualClock]]]:
    """Return the reference, and a store that must do as it does."""
    clocks = VirtualClock(), VirtualClock()
    other: Store
    if request.param == "sqlite":
        other = await SqliteStore.open(tmp_path / "limits.db", clock=clocks[1])
    else:
        other = await PostgresStore.open(request.getfixturevalue("postgres_url"), clock=clocks[1])
    stores: list[Store] = [MemoryStore(clock=clocks[0]), other]
    for store in stores:
        await store.migrate()
    yield list(zip(stores, clocks, strict=True))
    for store in stores:
        await store.close()


@pytest.mark.parametrize("seed", range(6))
async def test_stores_let_the_same_calls_begin_and_none_beyond_a_bound(
    pair: list[tuple[Store, VirtualClock]], seed: int
) -> None:
    rng = random.Random(int(os.environ.get("TEST_SEED", "0")) or seed)
    limit = random_limit(rng)
    await play(rng, [Play(store, clock, limit) for store, clock in pair], 150)


@pytest.mark.parametrize("seed", range(20))
def test_first_line_that_has_room_is_served_and_none_is_served_twice_before_all(seed: int) -> None:
    """The rule alone: of lines that always have calls, each tenant and each of its keys gets its share."""
    rng = random.Random(seed)
    lines = [
        Line(tenant=tenant, key=key, first=(tenant, key))
        for tenant in ("a", "b", "c")
        for key in rng.sample(("", "1", "2", "3"), rng.randint(1, 4))
    ]
    last_tenant, last_keys = "", dict[str, str]()
    served = Counter[tuple[str, str]]()
    for _ in range(120):
        decision = decide_call(CallLimit(), LimitState(), in_turn(lines, last_tenant, last_keys), 0)
        assert decision.line is not None
        last_tenant = decision.line.tenant
        last_keys[last_tenant] = decision.line.key
        served[decision.line.first] += 1
    by_tenant = Counter({tenant: sum(n for (of, _), n in served.items() if of == tenant) for tenant in ("a", "b", "c")})
    assert set(by_tenant.values()) == {40}
    for tenant in by_tenant:
        own = [served[line.first] for line in lines if line.tenant == tenant]
        assert max(own) - min(own) <= 1
