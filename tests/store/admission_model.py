"""Admission as plain lists: every decision is `core/admission.py` over all that there is. Stores must agree with it."""

import random
from dataclasses import dataclass, field

from msgspec.structs import replace

from holdfast.core.admission import (
    AdmissionRequest,
    Overload,
    QueuedRun,
    QueueState,
    RunLimit,
    decide_admission,
    nth_last_start,
    rank,
    rejection,
)
from holdfast.store.port import Committed, Created, NewRun, Refused, Store
from holdfast.testing import VirtualClock
from holdfast.testing.samples import SampleNode, complete, new_run, wait
from holdfast.testing.store_suite.admission import release

TENANTS = ("a", "b", "é", "z")
KEYS = ("", "k", "l")


@dataclass
class Line:
    """A run that is queued or inside."""

    run_id: str
    tenant: str
    key: str
    rank: int


@dataclass
class Model:
    """One admission queue."""

    queued: list[Line] = field(default_factory=list)
    inside: list[Line] = field(default_factory=list)
    starting: set[str] = field(default_factory=set)
    starts: list[int] = field(default_factory=list)
    last_tenant: str = ""

    def state(self, limit: RunLimit) -> QueueState:
        """Return the counts that a decision needs."""
        return QueueState(
            inside=len(self.inside),
            last_tenant=self.last_tenant,
            starting=len(self.starting),
            nth_last_start=nth_last_start(self.starts, limit, len(self.starting)),
        )

    def candidate(self, line: Line) -> QueuedRun[str]:
        """Return a run as a decision sees it."""
        of_key = sum((other.tenant, other.key) == (line.tenant, line.key) for other in self.inside)
        return QueuedRun(id=line.run_id, tenant=line.tenant, rank=line.rank, of_key=of_key)

    def create(self, new: NewRun, request: AdmissionRequest, now: int) -> bool | int:
        """Return whether the new run is admitted, or after how many milliseconds a rejected one may be retried."""
        line = Line(new.run_id, new.tenant, request.key, rank(request.priority, now))
        others = [self.candidate(other) for other in self.queued]
        state = self.state(request.limit)
        refusal = rejection(new.plan_id, state, others, self.candidate(line), request.limit, now)
        if refusal is not None:
            return int(refusal.details["retry_after_ms"])
        self.queued.append(line)
        return new.run_id in self.admit(request.limit, 1, now)[0]

    def admit(self, limit: RunLimit, most: int, now: int) -> tuple[list[str], int | None]:
        """Admit up to `most` runs."""
        admitted: list[str] = []
        while True:
            queued = [self.candidate(line) for line in self.queued]
            decision = decide_admission(self.state(limit), queued, limit, now)
            if decision.run is None:
                return admitted, None
            if decision.free_at > now or len(admitted) == most:
                return admitted, decision.next_at(now)
            [line] = [line for line in self.queued if line.run_id == decision.run.id]
            self.queued.remove(line)
            self.inside.append(line)
            self.last_tenant = line.tenant
            admitted.append(line.run_id)
            if limit.starts is not None:
                self.starting.add(line.run_id)
                self.starts = self.starts[-limit.starts :]

    def start(self, run_id: str, now: int) -> None:
        """Count a run that has started."""
        if run_id in self.starting:
            self.starting.remove(run_id)
            self.starts.append(now)

    def leave(self, run_id: str) -> None:
        """Remove a run that has finished."""
        self.inside = [line for line in self.inside if line.run_id != run_id]


async def compare(store: Store, clock: VirtualClock, rng: random.Random, steps: int) -> None:
    """Let runs of one plan be created, admitted, started and finished at random, and compare each answer."""
    model, node, begun = Model(), SampleNode(store, "node-a", 3_600_000), set[str]()
    limit, held = _limit(rng), list[NewRun]()
    await node.renew()
    for step in range(steps):
        clock.advance(us=rng.choice((0, 1, rng.randint(0, 400_000), rng.randint(0, 90_000_000))))
        now = clock.now()
        match rng.choice(
            ("create", "create", "create", "hold", "release", "admit", "admit", "start", "finish", "finish", "limit")
        ):
            case "create":
                overload: Overload = rng.choice(("queue", "queue", "reject"))
                request = AdmissionRequest(
                    limit=replace(limit, overload=overload), key=rng.choice(KEYS), priority=rng.randint(-2, 2)
                )
                new = replace(new_run(f"run-{step}", now=now, tenant=rng.choice(TENANTS)), admission=request)
                [answer] = await store.create([new], rng.choice((None, node.name)))
                expected = model.create(new, request, now)
                if isinstance(answer, Refused):
                    assert expected == answer.error.details["retry_after_ms"]
                    continue
                assert isinstance(answer, Created)
                [loaded] = await store.load([new.run_id])
                assert loaded is not None
                assert expected is (loaded.head.queued_at is None), f"{new.run_id} of {model}"
            case "hold":
                new = new_run(f"run-{step}", now=now, tenant=rng.choice(TENANTS))
                await store.create([new])
                held.append(new)
            case "release" if held:
                new = held.pop(rng.randrange(len(held)))
                clock.advance(us=1)
                request = AdmissionRequest(
                    limit=replace(limit, overload=rng.choice(("queue", "reject"))),
                    key=rng.choice(KEYS),
                    priority=rng.randint(-2, 2),
                )
                turn = await release(node, new.run_id, request.limit, request.key, request.priority)
                expected = model.create(new, replace(request, limit=limit), clock.now())
                if rng.random() < 0.3:  # the answer was lost
                    assert isinstance((await store.commit([turn]))[0], Committed)
                [loaded] = await store.load([new.run_id])
                assert loaded is not None
                assert expected is (loaded.head.queued_at is None), f"{new.run_id} of {model}"
            case "admit":
                most = rng.randint(1, 4)
                admitted, next_at = await store.admit({"order": limit}, most, rng.choice((None, node.name)))
                assert ([each.run_id for each in admitted], next_at) == model.admit(limit, most, now), model
            case "start" if waiting := [line.run_id for line in model.inside if line.run_id not in begun]:
                run_id = rng.choice(waiting)
                await node.claim()
                await node.step(run_id, wait("go"))
                begun.add(run_id)
                model.start(run_id, now)
            case "finish" if model.inside:
                run_id = rng.choice(model.inside).run_id
                await node.claim()
                await node.step(run_id, complete())
                model.start(run_id, now)
                model.leave(run_id)
            case "limit":
                limit = _limit(rng)


def _limit(rng: random.Random) -> RunLimit:
    return RunLimit(
        at_once=rng.choice((None, 1, 3, 6)),
        per_key=rng.choice((None, 1, 2)),
        starts=rng.choice((None, 1, 2, 5)),
        period_ms=rng.choice((1, 200, 60_000)),
    )
