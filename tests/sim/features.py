"""What runs can have beside their scripts: time-outs, a later start, an approval, one of two versions, forks, the bus,
activities with a limit, a lock that they share, callbacks, runs that they start and update, streams, debounced starts,
retries, and a schedule.

These stories also have a store whose clock jumps ahead, as that of a machine that was suspended. Nodes have no clock of
their own that anything depends on. A node has one version of the workflow `dated`, or both; the first has both.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable, Sequence
from contextlib import suppress
from datetime import UTC, datetime, timedelta
from random import Random
from typing import TYPE_CHECKING, Any, get_args

import holdfast as hf
from holdfast.app import App
from holdfast.core import codec
from holdfast.core import events as e
from holdfast.core.events import Event
from holdfast.core.schedules import Overlap
from holdfast.testing.clock import START
from tests.sim.streams import register_streams

if TYPE_CHECKING:
    from holdfast.store.memory.call_limits import Call
    from tests.sim.world import World

Play = Callable[[list[Any], list[Any]], Awaitable[list[Any]]]

GATES = (
    "play",
    "play",
    "gated",
    "gated",
    "dated",
    "dated",
    "seated",
    "seated",
    "locked",
    "locked",
    "called",
    "begins",
    "streamed",
)
LOCK = "ledger"
GATED_AT_ONCE = 2
VERSIONS = ("1", "2")
SEATS, SEATS_OF_KEY, SITS, SITS_MS = 2, 1, 3, 500
"""How many calls may be under way, and of one key, and how many may begin within how many milliseconds."""
JUMPS_S = (0.5, 5.0, 60.0)
OVERLAPS: tuple[Overlap, ...] = get_args(Overlap)
TICKS = 5


class Features:
    """What the world knows of the features of one story."""

    def __init__(self, world: World, seed: int) -> None:
        self._world = world
        self.rng = Random(f"features {seed}")
        self.projected: dict[str, list[int]] = {}
        self.forks = 0
        self.sits: list[int] = []
        ticks = Random(f"ticks {seed}")
        self.overlap = ticks.choice((None, None, None, *OVERLAPS))
        """What a tick of the schedule does while an earlier run is unfinished; None if there is no schedule."""
        self.every_s = ticks.choice((1, 2))
        self.retries: dict[str, str] = {}
        """Which run a retry has made, by the id of the request."""
        self.edits: list[tuple[str, str]] = []
        """What the callers of debounced starts were told: which run begins with their input, or a later one."""

    # --- nodes

    def register(self, app: App, play: Play, inside: Play) -> None:
        """Register the workflows, in all versions, and the projection."""

        @app.workflow(requires_approval=True, at_once=GATED_AT_ONCE)
        async def gated(script: list[Any], seen: list[Any]) -> list[Any]:
            return await play(script, seen)

        limit = hf.ActivityLimit(
            "seats",
            at_once=SEATS,
            per_key=SEATS_OF_KEY,
            rate=(SITS, timedelta(milliseconds=SITS_MS)),
            key=lambda seat: seat,
        )

        @app.activity(limit=limit)
        async def sit(seat: str, seconds: float) -> str | None:
            return await self._world.effect(seconds, 0, False)

        @app.workflow
        async def seated(script: list[Any], seen: list[Any]) -> list[Any]:
            calls = (sit(seat, seconds) for seat, seconds in (("a", 0.05), ("a", 1.5), ("b", 0.3), ("c", 0.01)))
            await asyncio.gather(*calls, return_exceptions=True)
            return await play(script, seen)

        ledger = app.lock(LOCK)

        @app.workflow
        async def locked(script: list[Any], seen: list[Any]) -> list[Any]:
            async with ledger(str(len(script) % 2)):
                return await inside(script, seen)

        @app.activity(retry=hf.Retry(max_attempts=20, initial_ms=200, most_ms=2_000))
        async def submit(ref: hf.CallbackRef, seconds: float) -> None:
            await self._world.submit(ref, seconds)

        @app.workflow
        async def called(script: list[Any], seen: list[Any]) -> list[Any]:
            answer = hf.callback(str, timeout=20.0)
            await submit(answer.ref, 0.5 * len(script))
            try:
                seen.append(await answer)
            except (TimeoutError, hf.errors.InvalidInput):  # an operator may have skipped the request, or the answer
                seen.append("no answer")
            return await play(script, seen)

        @app.workflow
        async def begins(script: list[Any], seen: list[Any]) -> list[Any]:
            with suppress(hf.errors.ActivityFailed, hf.errors.InvalidInput):  # it has ended, or a step was skipped
                started: hf.RunHandle[Any] = await hf.start("play", script=script, seen=[])
                self._world.note(f"start  {started.run_id}", "runs started by runs")
                seen.append(await app.run(started.run_id).update("poke", seconds=0.3, token=str(hf.uuid4())))
            return await play(script, seen)

        @app.workflow
        async def latest(edit: str) -> str:
            return edit

        @app.workflow
        async def ticked() -> None:
            await hf.sleep(0.7)

        if self.overlap is not None:
            every, since = timedelta(seconds=self.every_s), datetime.fromtimestamp(START / 1_000_000, UTC)
            until = since + TICKS * every
            app.schedule(every=every, start_at=since, end_at=until, workflow=ticked, overlap=self.overlap)
        register_streams(app, play)
        for version in VERSIONS:
            self._dated(app, version, play)
        app.projection("all", first_ms=50, most_ms=500, max_attempts=10_000)(self._project)

    def versions_of(self, is_first: bool) -> tuple[tuple[str, ...], str]:
        """Draw which versions of workflows a node has, and which of them it starts."""
        versions = VERSIONS if is_first else self.rng.choice((("1",), ("2",), VERSIONS))
        return versions, self.rng.choice(versions)

    def _dated(self, app: App, version: str, play: Play) -> None:
        async def dated(script: list[Any], seen: list[Any]) -> list[Any]:
            if hf.run_info().version != version:
                self._world.violate(f"{hf.run_info().run_id} is of another version than {version}")
            self._world.note(f"version {version}", f"version {version}")
            return await play(script, seen)

        app.workflow(name="dated", version=version)(dated)

    async def _project(self, events: list[dict[str, Any]]) -> None:
        for event in events:
            seen = self.projected.setdefault(event["subject"], [])
            sequence = int(event["sequence"])
            self._world.note(f"project {event['subject']} {sequence}", "projected")
            if sequence in seen:
                self._world.note("again", "projected again")
            elif sequence != len(seen) + 1:
                self._world.violate(f"{event['subject']}: event {sequence} was projected after {seen[-3:]}")
            else:
                seen.append(sequence)
        if self.rng.random() < 0.1:
            raise ConnectionError("the projection is ill")

    # --- clients

    def gate(self) -> str:
        """Draw the workflow of a run."""
        return self.rng.choice(GATES)

    def start_options(self, run_id: str) -> dict[str, Any]:
        """Draw how a run is started; the same each time that it is asked for."""
        rng = Random(f"options {run_id} {self._world.seed}")
        options: dict[str, Any] = {}
        if rng.random() < 0.5:
            options["execution_timeout"] = rng.choice((1.0, 6.0, 20.0))
        elif rng.random() < 0.5:
            options["run_timeout"] = rng.choice((0.5, 4.0))
        if rng.random() < 0.5 and options:
            options["cleanup_timeout"] = rng.choice((0.3, 3.0))
        if rng.random() < 0.3:
            options["after"] = timedelta(seconds=rng.choice((0.2, 3.0, 12.0)))
        return options

    async def fork(self, app: App, run_id: str) -> None:
        """Fork a run somewhere."""
        self.forks += 1
        at = self.rng.choice((None, self.rng.randint(1, 30)))
        await app.run(run_id).fork(at=at, request_id=f"fork {self.forks}")
        self._world.note(f"fork   {run_id} at {at}", "forks")

    async def retry(self, app: App, run_id: str, number: int) -> None:
        """Retry a finished run, twice with the same id: that is one retry."""
        request, from_start = f"retry {number}", number % 2 == 0
        for _ in range(2):
            again = await app.run(run_id).retry_run(from_start=from_start, signal_id=request)
            self._world.note(f"retry  {run_id} {again.run_id}", "run again" if from_start else "retried runs")
            if self.retries.setdefault(request, again.run_id) != again.run_id:
                self._world.violate(f"{request} has made {again.run_id} and {self.retries[request]}")

    async def edit(self, app: App, workflow: Any, document: int, edit: str) -> None:
        """Start a debounced run."""
        once = hf.Debounce(f"document {document}", quiet=1.5, at_most=4.0)
        run = await app.start(workflow, edit, request_id=f"edit {edit}", debounce=once)
        self.edits.append((run.run_id, edit))
        self._world.note(f"edit   {run.run_id} {edit}", "debounced starts")

    def needs_approval(self, run_id: str) -> bool:
        """Whether a run waits for its approval."""
        history = self._world.store.events_of(run_id)
        queued = history[0].data
        assert isinstance(queued, e.RunQueued)
        return queued.requires_approval and not _is_approved(history)

    # --- the judge

    def judge_edits(self) -> None:
        """Check that each input is in the run that its caller was told, and that the run began with the last one."""
        histories = {run_id: self._world.store.events_of(run_id) for run_id, _ in self.edits}
        for run_id, history in histories.items():
            assert isinstance(history[0].data, e.RunQueued)
            inputs = [history[0].data.input, *(o.data.input for o in history if isinstance(o.data, e.InputReplaced))]
            given = [codec.decode(each, dict[str, str])["edit"] for each in inputs]
            self._world.note(f"given  {run_id} {given}", "inputs replaced" if len(given) > 1 else None)
            for lost in {edit for told, edit in self.edits if told == run_id} - {*given}:
                self._world.violate(f"{run_id}: the input {lost} was accepted, and is not there: {given}")
            last = history[-1].data
            if not isinstance(last, e.RunCompleted) or codec.decode(last.result, str) != given[-1]:
                self._world.violate(f"{run_id} has ended with {last}, and {given[-1]} was its last input")

    def judge_ticks(self, begun: Iterable[Event]) -> None:
        """Check that each tick has started one run, at most one if ticks may be skipped, and none before its time."""
        runs = [
            (event, event.data.schedule.tick)
            for event in begun
            if isinstance(event.data, e.RunQueued) and event.data.schedule is not None
        ]
        for event, tick in runs:
            self._world.note(f"tick   {event.run_id} {tick}", f"ticks that {self.overlap}")
            if event.emitted_at < tick:
                self._world.violate(f"{event.run_id} was started {tick - event.emitted_at} us before its tick")
        counts = Counter(tick for _, tick in runs)
        doubled = [tick for tick, count in counts.items() if count > 1]
        end = START + TICKS * self.every_s * 1_000_000
        due = range(min(counts, default=end), end, self.every_s * 1_000_000)  # from when it is declared on
        missed = [tick for tick in due if not counts[tick]]
        if doubled or (missed and self.overlap in ("queue", "allow")):
            self._world.violate(f"these ticks were missed: {missed}, and these have several runs: {doubled}")

    def check_event(self, event: Event, history: Sequence[Event]) -> None:
        """Check what was committed: nothing ends or starts too early, or without its approval."""
        queued, body, run_id = history[0].data, event.data, event.run_id
        assert isinstance(queued, e.RunQueued)
        if isinstance(body, e.RunTimedOut):
            self._world.note(f"timed out {run_id} {body.timeout}", f"timed out: {body.timeout}")
            since = _since(body, history, event)
            if event.persisted_at < since + body.limit_ms * 1_000:
                self._world.violate(f"{run_id}: its {body.timeout} time-out came early")
        elif is_cut(event):
            self._world.note(f"cut    {run_id}", "ended while they clean up")
            timed_out_at = [other.emitted_at for other in history if isinstance(other.data, e.RunTimedOut)][-1]
            assert queued.timeouts is not None
            if event.persisted_at < timed_out_at + queued.timeouts.cleanup_ms * 1_000:
                self._world.violate(f"{run_id}: it was ended too early while it cleans up")
        elif isinstance(body, e.RunStarted):
            if queued.start_at is not None:
                self._world.note(f"later  {run_id}", "started later")
                if event.persisted_at < queued.start_at:
                    self._world.violate(f"{run_id} started {queued.start_at - event.persisted_at} us early")
            if queued.requires_approval:
                self._world.note(f"approved {run_id}", "started after approval")
                if not _is_approved(history):
                    self._world.violate(f"{run_id} has started, and nobody has approved it")
                inside = self._world.store.under_way("gated")
                if len(inside) > GATED_AT_ONCE:
                    self._world.violate(f"more runs are under way than there is room for: {sorted(inside)}")
            if queued.plan_id == f"lock:{LOCK}":
                self._check_holders()
        elif isinstance(body, e.StepStarted) and queued.plan_id == "locked" and not is_copied(event, history):
            self._check_held(event, history)

    def _check_holders(self) -> None:
        """No key of the lock has two holders."""
        under_way = self._world.store.under_way(f"lock:{LOCK}")
        self._world.note(f"held   {' '.join(sorted(under_way))}", "locks held")
        keys = Counter(codec.decode(queued.input, dict[str, str])["key"] for queued in under_way.values())
        if any(count > 1 for count in keys.values()):
            self._world.violate(f"a key of the lock has several holders: {sorted(under_way)}")

    def _check_held(self, event: Event, history: Sequence[Event]) -> None:
        """What is done under the lock begins while the run's own holder is under way, or an operator let it in."""
        holders = [other.data.child_run_id for other in history if isinstance(other.data, e.ChildStarted)]
        under_way = self._world.store.under_way(f"lock:{LOCK}")
        self._world.note(f"locked {event.run_id} {event.step_id}", "steps under a lock")
        is_let_in = any(isinstance(other.data, e.StepSkipped) for other in history)
        if not is_let_in and not any(holder in under_way for holder in holders):
            self._world.violate(f"{event.run_id}: {event.step_id} began, and the run does not hold the lock")

    def check_places(self, calls: Sequence[Call], begun: int, now: int) -> None:
        """Check that no more calls have places than there are, and that no period holds more beginnings."""
        inside = [call for call in calls if call.has_place(now)]
        keys = Counter((call.tenant, call.key) for call in inside)
        if len(inside) > SEATS or any(count > SEATS_OF_KEY for count in keys.values()):
            self._world.violate(f"more calls have places than there are: {keys}")
        for _ in range(begun):
            self.sits.append(now)
            self._world.note(f"sit    {len(inside)} inside", "calls with a place")
        recent = [at for at in self.sits if at > now - SITS_MS * 1_000]
        if len(recent) > SITS:
            self._world.violate(f"{len(recent)} calls have begun within {SITS_MS} ms: {recent}")

    def behind(self) -> Counter[str]:
        """Return how many events of each run the projection has not got."""
        left = {run_id: len(run.events) - len(self.projected.get(run_id, ())) for run_id, run in self._runs()}
        return Counter({run_id: count for run_id, count in left.items() if count})

    def _runs(self) -> list[tuple[str, Any]]:
        return list(self._world.store._runs.items())


def is_copied(event: Event, history: Sequence[Event]) -> bool:
    """Whether an event of a fork is one of the run that it was forked from."""
    queued = history[0].data
    source = queued.forked_from if isinstance(queued, e.RunQueued) else None
    return source is not None and event.run_seq <= source.run_seq


def _is_approved(history: Sequence[Event]) -> bool:
    return any(isinstance(event.data, e.RunApproved) for event in history)


def _since(body: e.RunTimedOut, history: Sequence[Event], event: Event) -> int:
    """Return from when a time-out counts, at the earliest."""
    queued = history[0].data
    assert isinstance(queued, e.RunQueued)
    if body.timeout == "execution":
        forked_at = queued.forked_from.forked_at if queued.forked_from else 0
        return max(queued.start_at or 0, forked_at, history[0].emitted_at)
    stretches = [
        other.emitted_at
        for other in history
        if isinstance(other.data, e.RunStarted | e.ContinuedAsNew) and other.run_seq < event.run_seq
    ]
    return stretches[-1]


def is_cut(end: e.Event) -> bool:
    """Return whether a run was ended as it stood, because it did not clean up in time."""
    body = end.data
    return isinstance(body, e.RunFailed) and body.timeout != "" and "had not cleaned up" in body.error.message
