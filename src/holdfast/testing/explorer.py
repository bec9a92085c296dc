"""The crash explorer: plays a workflow once for each point at which its process can crash.

The first play runs to the end without a crash. It finds the points: before and after each commit, and before and after
each call of an activity's function (after: the effect has happened, and its result is not recorded). Then the workflow
is played again once for each point, with a crash there: nothing of the process runs any more, and a new process takes
over. Each play has its own store and virtual time (`sim_loop.py`), so hundreds of them take a second or two.

A difference from the first play is a finding: another result, an activity that ran more or less often, a run that is
paused or does not end, or a different value returned by the caller's `check`.
"""

import asyncio
import logging
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any

from msgspec import Struct
from msgspec.structs import replace

from holdfast.activity import Activity
from holdfast.app import App
from holdfast.core.state import PAUSED
from holdfast.engine.node import Node
from holdfast.engine.options import NodeOptions
from holdfast.engine.runtime import Runtime
from holdfast.engine.start.requests import StartOptions
from holdfast.errors import HoldfastError, InvalidInput
from holdfast.limits import LEASE_MS
from holdfast.run import RunHandle
from holdfast.store.memory import MemoryStore
from holdfast.store.port import CommitConflict, Committed, Store, Turn
from holdfast.store.proxy import StoreProxy
from holdfast.testing.awaited import awaited_by
from holdfast.testing.fakes import ActivityCalls, Call, name_of
from holdfast.testing.sim_loop import Deadlock, Livelock, LoopClock, SimLoop, SimProcess, current_process
from holdfast.workflow import Workflow

FOREVER_S = 10 * 366 * 86_400.0
"""The maximum duration of a play, in virtual time."""

PATIENT = NodeOptions(
    lease_ms=LEASE_MS,
    visible_ms=LEASE_MS,
    safety_poll_s=86_400.0,
    definition_grace_s=None,
    artifact_sweep_s=86_400.0,
    write_latency_budget_ms=int(FOREVER_S) * 1_000,
    drain_s=0.0,
    sample_s=None,
)
"""Nodes that do as little as possible while days pass. A process that takes over has the name of the one before it, so
it does not wait for the end of a lease.
"""

NO_END = "no end"

Driver = Callable[[RunHandle[Any]], Awaitable[None]]


class Finding(Struct, frozen=True):
    """A difference from the run without a crash."""

    point: str
    """Where the process crashed."""

    problem: str
    """What differs."""


class Play(Struct, frozen=True):
    """One play: where the process crashed, how the run ended, and how often each activity's function was called."""

    point: str
    ending: str
    calls: dict[str, int]
    checked: Any = None

    @property
    def is_over(self) -> bool:
        """Whether the run has ended: it is neither waiting nor paused."""
        return not self.ending.startswith((NO_END, "PAUSED"))


class Exploration(Struct, frozen=True):
    """The result of `explore`."""

    plays: list[Play]
    """The run without a crash, then one run for each point."""

    findings: list[Finding]
    """What differs from the run without a crash."""

    def table(self) -> str:
        """Return a table as text: the run without a crash, and those that differ from it."""
        odd = {finding.point for finding in self.findings}
        shown = [self.plays[0], *(play for play in self.plays[1:] if play.point in odd)]
        names = sorted({name for play in self.plays for name in play.calls})
        rows = [["crash", *names, "ending"]]
        rows += [[play.point, *(str(play.calls.get(name, 0)) for name in names), play.ending] for play in shown]
        widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
        lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
        problems = [f"- crash {finding.point}: {finding.problem}" for finding in self.findings]
        return "\n".join([f"plays: {len(self.plays)}, findings: {len(self.findings)}", *lines, *problems])

    def assert_clean(self) -> None:
        """Raise `AssertionError` with the table if there is a finding, or if the run does not end without a crash."""
        if not self.plays[0].is_over:
            raise AssertionError(
                "the run does not end even without a crash, so what follows was not tried: "
                f"{self.plays[0].ending}; give explore a `drive` that sends what it waits for\n{self.table()}"
            )
        if self.findings:
            raise AssertionError(f"a crash changes what this workflow does\n{self.table()}")


def explore(
    app: App,
    workflow: Workflow[..., Any],
    *args: Any,
    drive: Driver | None = None,
    before: Callable[[], object] | None = None,
    check: Callable[[], Any] | None = None,
    repeatable: Iterable[Activity[..., Any] | str] = (),
    **kwargs: Any,
) -> Exploration:
    """Run a workflow with these arguments, once for each point at which its process can crash; return the differences.

    `drive` gets the run's handle and sends what the run waits for; its process does not crash. `before` is called
    before each run, for example to empty a database. `check` is called after it, and must return the same value each
    time. Activities in `repeatable` may be called more often than without a crash, because a second call does no harm.
    `explore` has its own event loop, without a network: call it from a test that is not async, and replace the external
    systems that activities and verifiers use.
    """
    with suppress(RuntimeError):
        asyncio.get_running_loop()
        raise InvalidInput("explore has an event loop of its own: call it from a test that is not async")
    may_repeat = {name_of(activity) for activity in repeatable}
    if unknown := sorted(may_repeat - set(app.registry.activities)):
        known = app.registry.activity_names()
        raise InvalidInput(f"repeatable: there is no activity {unknown[0]!r}; there are {known}", field="repeatable")
    plan = _Scenario(app, workflow, args, kwargs, drive, before, check)
    first = plan.play(None)
    plays = [first, *(plan.play(point) for point in list(plan.points))]
    findings = [finding for play in plays[1:] for finding in _compare(first, play, may_repeat)]
    return Exploration(plays, findings)


def _compare(first: Play, play: Play, may_repeat: set[str]) -> list[Finding]:
    problems = []
    if play.ending != first.ending:
        problems.append(f"it ends with {play.ending}, and without a crash with {first.ending}")
    for name in sorted({*first.calls, *play.calls}):
        usual, count = first.calls.get(name, 0), play.calls.get(name, 0)
        if count < usual or (count > usual and name not in may_repeat):
            problems.append(f"{name} ran {_times(count)}, and without a crash {_times(usual)}")
    if play.checked != first.checked:
        problems.append(f"the check gives {play.checked!r}, and without a crash {first.checked!r}")
    return [Finding(play.point, problem) for problem in problems]


def _times(count: int) -> str:
    return {0: "never", 1: "once", 2: "twice"}.get(count, f"{count} times")


class _Scenario:
    """A workflow with its arguments, which can be played repeatedly."""

    def __init__(
        self,
        app: App,
        workflow: Workflow[..., Any],
        args: Sequence[Any],
        kwargs: dict[str, Any],
        drive: Driver | None,
        before: Callable[[], object] | None,
        check: Callable[[], Any] | None,
    ) -> None:
        self._app = app
        self._definition = workflow.definition
        self._input = workflow.definition.signature.pack(tuple(args), kwargs)
        self._drive = drive
        self._before = before
        self._check = check
        self.points: list[str] = []
        """The points of the first play, in order."""

    def play(self, crash: str | None) -> Play:
        """Play it in a new simulation, with a crash at this point."""
        if self._before is not None:
            self._before()
        loop = SimLoop("explore")
        calls = ActivityCalls(self._app.registry)
        stage = _Stage(self, self._app, loop, crash, calls)
        calls.install(stage.before_call, stage.after_call)
        try:
            with _takeovers_unlogged():
                ending = loop.simulate(stage.run())
        except (Deadlock, Livelock) as problem:
            ending = f"{NO_END}: {problem}"
        finally:
            calls.remove()
            stage.bury()
        if loop.network_call:
            raise InvalidInput(
                f"{loop.network_call} was called, and explore has no network, because its time is virtual. "
                "Let activities and verifiers use an object that the test replaces, such as a fake bank"
            )
        if crash is None:
            self.points = stage.points
        counts = Counter(call.activity for call in calls.made)
        return Play(crash or "never", ending, dict(counts), None if self._check is None else self._check())

    async def drive(self, runtime: Runtime) -> str:
        """Start the run from outside, send to it, and return how it ended."""
        options = StartOptions(request_id="explore", run_id="explore")
        started = await runtime.start(self._definition, self._input, options)
        run: RunHandle[Any] = RunHandle(runtime, started.run_id, self._definition)
        driving = None if self._drive is None else asyncio.ensure_future(self._drive(run))
        try:
            return f"result {await run.result()!r}"
        except HoldfastError as problem:
            return f"{type(problem).__name__}: {problem}"
        finally:
            if driving is not None:
                driving.cancel()
                with suppress(asyncio.CancelledError):
                    await driving


@contextmanager
def _takeovers_unlogged() -> Iterator[None]:
    """Do not log takeovers: every crash of a play is intended."""
    logger = logging.getLogger("holdfast.node.takeovers")
    before, logger.disabled = logger.disabled, True
    try:
        yield
    finally:
        logger.disabled = before


class _Stage:
    """One play: the simulation, the process that crashes, and the process that takes over."""

    def __init__(self, scenario: _Scenario, app: App, loop: SimLoop, crash: str | None, calls: ActivityCalls) -> None:
        self._scenario = scenario
        self._app = app
        self._loop = loop
        self._crash = crash
        self._calls = calls
        self._seen: Counter[str] = Counter()
        self._nodes: list[Node] = []
        self.points: list[str] = []
        self._store = MemoryStore(clock=LoopClock(loop), limits=app.registry.limits)

    async def run(self) -> str:
        """Play, and return how the run ended."""
        async with self._app.node(self._store, options=replace(PATIENT, takes_runs=False)):
            runtime = self._app.runtime()
            driving = asyncio.ensure_future(self._scenario.drive(runtime))
            process = self._start("first")
            watching = asyncio.ensure_future(self._watch())
            over = asyncio.ensure_future(asyncio.sleep(FOREVER_S))
            awaited: set[asyncio.Future[Any]] = {driving, watching, over}
            while not any(each.done() for each in awaited):
                await asyncio.wait({*awaited, process.death}, return_when=asyncio.FIRST_COMPLETED)
                if process.death.done() and not any(each.done() for each in awaited):
                    process = self._start("second")
            ending = driving.result() if driving.done() else watching.result() if watching.done() else NO_END
            for each in awaited:
                each.cancel()
            process.kill()
            return ending

    async def _watch(self) -> str:
        """Return why the run will never end, once that is certain: it is paused, or nothing is due any more."""
        listener = self._store.wakeups.listen()
        hours_at_rest = 0
        try:
            while hours_at_rest < 2:
                [run] = await self._store.load(["explore"])
                if run is not None and run.head.status is PAUSED:
                    error = None if run.head.snapshot is None else run.head.snapshot.last_error
                    return f"PAUSED: {'' if error is None else error.message}"
                is_notified = await listener.wait(3_600.0)
                hours_at_rest = 0 if is_notified or not await self._is_at_rest() else hours_at_rest + 1
            awaited = await awaited_by(self._store, "explore")
            return f"{NO_END}: it waits for {awaited}" if awaited else f"{NO_END}: nothing is due any more"
        finally:
            listener.close()

    async def _is_at_rest(self) -> bool:
        node = self._nodes[-1]
        return node.is_at_rest and await self._store.next_due(node.name, None, node.options.queues) is None

    def _start(self, name: str) -> SimProcess:
        process = SimProcess(self._loop, name)
        process.spawn(self._live(process), name="node")
        return process

    async def _live(self, process: SimProcess) -> None:
        queues = {each.options.queue for each in self._app.registry.activities.values()} - {""}
        options = replace(PATIENT, queues=tuple(sorted(queues)))
        opening = self._app.node(_CrashingStore(self._store, self), name="explore", options=options)
        self._nodes.append(await opening.__aenter__())  # never exited: a process that is killed does not clean up
        await asyncio.get_running_loop().create_future()

    async def reach(self, point: str) -> None:
        """Record a point, and crash if it is the chosen one."""
        if self._crash is None:
            self.points.append(point)
        elif point == self._crash:
            process = current_process()
            assert process is not None
            process.kill()
            await asyncio.get_running_loop().create_future()

    def number(self, what: str) -> str:
        """Return a point with its number among those of its kind, such as `charge #2`."""
        self._seen[what] += 1
        return f"{what} #{self._seen[what]}"

    async def before_call(self, call: Call) -> None:
        """Pass the point before a call of an activity's function."""
        await self.reach(f"before {self.number(call.activity)}")

    async def after_call(self, call: Call) -> None:
        """Pass the point between an effect and its record."""
        await self.reach(f"after {call.activity} #{self._seen[call.activity]}")

    def bury(self) -> None:
        """Release what would have gone with the dead processes."""
        for node in self._nodes:
            node.run_cache.close()
            node.starter.let_go()


class _CrashingStore(StoreProxy):
    """The store of the process that crashes before or after a commit."""

    def __init__(self, store: Store, stage: _Stage) -> None:
        super().__init__(store)
        self._stage = stage

    async def commit(self, turns: Sequence[Turn]) -> list[Committed | CommitConflict]:
        commit = self._stage.number("commit")
        await self._stage.reach(f"before {commit}")
        answers = await self._store.commit(turns)
        await self._stage.reach(f"after {commit}")
        return answers
