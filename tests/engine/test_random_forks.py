"""Random runs, forked at each of their events: what was recorded before is kept, and the fork ends as the run did."""

import asyncio
import time
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import suppress
from pathlib import Path
from random import Random
from typing import Any

import pytest
from msgspec import json
from obstore.store import MemoryStore as ObjectsInMemory

import holdfast as hf
from holdfast.clock import SystemClock
from holdfast.core.events import Event, StepStarted
from holdfast.core.fork import find_cut, first_difference
from holdfast.errors import Conflict, RunFailed, RunTerminal
from holdfast.limits import Limits
from holdfast.store.memory import MemoryStore
from holdfast.store.port import RunQuery, Store, TaskQuery, WaitQuery
from holdfast.store.postgres import PostgresStore
from holdfast.store.s3 import S3Store
from holdfast.store.s3.bucket import Bucket
from holdfast.store.sqlite import SqliteStore
from tests.engine import test_random_plans as random_plans
from tests.flows.random_flows import Counts, leaves_of
from tests.flows.test_crashes import RUN_ID, without_tasks
from tests.flows.test_crashes import check as check_flow
from tests.program.naive_plan import random_plan

KEY = bytes(range(32))
OPERATIONS = ("act", "queued", "keyed", "large", "both", "sleep", "child", "draw", "signal", "task", "update", "set")
SIGNALS = ("go", "stop")
MOST_SECONDS = 120.0
LENGTH = 9
SEEDS = range(2)


def draw_script(random: Random, length: int) -> list[str]:
    """Draw what a run does, in order; a rotation begins a new stretch with what is left."""
    script = [random.choice(OPERATIONS) for _ in range(length)]
    script.insert(random.randrange(1, length), "rotate")
    return script


def make_app(folder: Path, queue: str) -> tuple[hf.App, Any, Counter[str]]:
    """Return an app whose workflow plays a script; its payloads are sealed, and large ones are kept elsewhere."""
    limits = hf.Limits(value_bytes=8 * 2**20)
    app = hf.App(
        "forks",
        codecs=[hf.Encryption({"k1": KEY})],
        artifacts=hf.Artifacts(folder / "artifacts"),
        limits=limits,
        attributes={"step": int},
    )
    keyed: Counter[str] = Counter()

    @app.activity
    async def act(value: str) -> str:
        return f"act {value}"

    @app.activity(queue=queue)
    async def queued(value: str) -> str:
        return f"queued {value}"

    books: set[str] = set()

    def find(value: str) -> hf.Completed | hf.NotCompleted:
        return hf.Completed(f"keyed {value}") if value in books else hf.NotCompleted()

    @app.activity(idempotency_key=lambda value: f"key {value}", verify=find)
    async def booked(value: str) -> str:
        books.add(value)
        keyed[value] += 1
        return f"keyed {value}"

    @app.activity
    async def large(value: str) -> str:
        return value * 30_000

    @app.workflow
    async def child(value: str) -> str:
        return f"child {await act(value)}"

    async def play(operation: str, value: str, added: list[str], place: int) -> Any:
        match operation:
            case "act" | "queued" | "keyed":
                return await {"act": act, "queued": queued, "keyed": booked}[operation](value)
            case "large":
                return len(await large(value))
            case "both":
                return await asyncio.gather(act(f"{value} left"), queued(f"{value} right"))
            case "sleep":
                return await hf.sleep(0.001)
            case "child":
                return await child(value)
            case "draw":
                return f"{hf.uuid4()} {hf.random().randrange(1_000)}"
            case "signal":
                return await hf.wait_signal(SIGNALS[place % 2], str)
            case "task":
                return await hf.task("decide", str, roles=["boss"])
            case "update":
                await hf.wait_until(lambda: bool(added))
                return added.pop(0)
            case _:
                return hf.set_attributes(step=place)

    @app.workflow
    async def script(operations: list[str], done: list[Any]) -> list[Any]:
        added: list[str] = []
        hf.on_update("add", lambda text: added.append(text))
        for place, operation in enumerate(operations):
            if operation == "rotate":
                hf.continue_as_new(operations[place + 1 :], done)
            done.append(await play(operation, f"{len(done)}", added, place))
        return done

    return app, script, keyed


async def attend(app: hf.App, run: hf.RunHandle[list[Any]], script: list[str]) -> list[Any]:
    """Give a run what it waits for, always the same, and return its result."""
    ended = asyncio.create_task(run.result())
    store = app.runtime().store
    answered: set[str] = set()
    while not ended.done():
        for wait in await store.find(WaitQuery(run_id=run.run_id)):
            if wait.token not in answered:
                answered.add(wait.token)
                await run.signal(wait.name, f"signal {wait.name}")
        for task in await store.find(TaskQuery(run_id=run.run_id, status="OPEN")):
            with suppress(Conflict, RunTerminal):
                await app.tasks.complete(task.task_id, "yes", actor=hf.Actor("ann", ("boss",)))
        if "update" in script:
            with suppress(RunTerminal):
                await run.update("add", text="update")
        await asyncio.wait([ended], timeout=0.02)
    return await ended


@pytest.fixture(params=["memory", "sqlite", "postgres", "s3"])
async def store(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[Store]:
    """Return an empty store of each kind."""
    opened: Store
    if request.param == "memory":
        opened = MemoryStore()
    elif request.param == "sqlite":
        opened = await SqliteStore.open(tmp_path / "store.db")
    elif request.param == "s3":
        opened = S3Store(Bucket(ObjectsInMemory()), SystemClock(), Limits())
    else:
        opened = await PostgresStore.open(request.getfixturevalue("postgres_url"))
    await opened.migrate()
    yield opened
    await opened.close()


@pytest.mark.contract("WF-2", "EVT-4", "ACT-2", "SIG-4", "TSK-1", "CAN-1")
@pytest.mark.parametrize("seed", SEEDS)
async def test_a_fork_at_every_event_of_a_random_run_ends_as_the_run_did(
    store: Store, tmp_path: Path, seed: int
) -> None:
    """A keyed step that had begun before the cut is verified, and not done again."""
    script = draw_script(Random(f"{seed} {type(store).__name__}"), LENGTH)
    app, workflow, keyed = make_app(tmp_path, "elsewhere")
    options = hf.NodeOptions(cached_runs=0, drain_s=2.0, queues=("elsewhere",))
    async with asyncio.timeout(MOST_SECONDS), app.node(store, options=options):
        run = await app.start(workflow, script, [])
        expected = await attend(app, run, script)
        history = await run.events()
        assert keyed.total() == script.count("keyed")
        cuts = sorted({find_cut(history, at) for at in range(1, len(history) + 1)})
        for cut in cuts[:: 1 if isinstance(store, MemoryStore) else 3]:
            keyed.clear()
            fork = await run.fork(at=cut)
            assert await attend(app, fork, script) == expected, (cut, script)
            events = await fork.events()
            assert first_difference(history[:cut], events[:cut]) is None, (cut, script)
            begun = sum(_is_start_of(event, "booked") for event in history[:cut])
            assert keyed.total() == script.count("keyed") - begun, (cut, script)
            assert [event.run_seq for event in events] == list(range(1, len(events) + 1))


def _is_start_of(event: Event, activity: str) -> bool:
    return isinstance(event.data, StepStarted) and activity in (event.step_id or "")


async def forked_at_every_cut(run: hf.RunHandle[Any], every: int = 1) -> AsyncIterator[tuple[int, hf.RunHandle[Any]]]:
    """Yield a fork at each place where a history can be cut; what was recorded before is in the fork in the end."""
    history = await run.events()
    for cut in sorted({find_cut(history, at) for at in range(1, len(history) + 1)})[::every]:
        fork = await run.fork(at=cut)
        yield cut, fork
        events = await fork.events()
        assert first_difference(history[:cut], events[:cut]) is None, cut
        assert [event.run_seq for event in events] == list(range(1, len(events) + 1))


@pytest.mark.contract("WF-1", "WF-2", "WF-5", "CAN-1")
@pytest.mark.parametrize("seed", range(4))
async def test_a_fork_at_every_event_of_a_random_flow_ends_as_the_naive_interpreter_says(seed: int) -> None:
    """With children, compensation and rotations; each third flow fails, and so do its forks."""
    story = without_tasks(seed)
    signals = [leaf.name for leaf in leaves_of(story.shape).values() if leaf.kind == "signal"]
    options = hf.NodeOptions(cached_runs=0, drain_s=2.0)
    async with asyncio.timeout(MOST_SECONDS), story.app.node(MemoryStore(), options=options):
        check_flow(story, await story(story.app), f"seed {seed}")
        count = 0
        async for cut, fork in forked_at_every_cut(story.app.run(RUN_ID)):
            for name in signals:
                with suppress(RunTerminal):
                    await fork.signal(f"go-{name}", 1, signal_id=name)
            try:
                result: Any = Counts(**await fork.result())
            except RunFailed as failure:
                result = failure.info.message
            check_flow(story, result, f"seed {seed}, cut at {cut}")
            count += 1
        assert count > 1


@pytest.mark.contract("WF-1", "WF-2", "SEC-2", "CAN-1")
@pytest.mark.parametrize("rotation_steps", [1, 50])
async def test_a_fork_at_every_event_of_a_random_plan_ends_as_the_naive_interpreter_says(rotation_steps: int) -> None:
    app = random_plans.make_app(rotation_steps)
    options = hf.NodeOptions(cached_runs=0, drain_s=2.0)
    async with asyncio.timeout(MOST_SECONDS), app.node(MemoryStore(), options=options):
        for seed in range(6):
            plan, inputs = random_plan(Random(seed))
            for step in plan["steps"]:
                step |= {"sleep": 0.001} if "sleep" in step else {}
            result, is_good = random_plans.expected_of(seed, plan, inputs)
            signals = [step["signal"] for step in plan["steps"] if "signal" in step]
            run = await app.plans.start(json.encode(plan), inputs, run_id=str(seed))
            await plan_ends(run, signals, result, is_good, f"seed {seed}")
            async for cut, fork in forked_at_every_cut(run):
                await plan_ends(fork, signals, result, is_good, f"seed {seed}, cut at {cut}")


async def plan_ends(run: hf.RunHandle[Any], signals: list[str], result: Any, is_good: bool, where: str) -> None:
    """Send a run of a plan what it may wait for, and compare its end."""
    for name in signals:
        with suppress(RunTerminal):
            await run.signal(name, None)
    try:
        assert await run.result() == result, where
        assert is_good, where
    except RunFailed:
        assert not is_good, where


@pytest.mark.contract("QUE-4")
async def test_a_fork_says_of_itself_what_the_run_it_is_from_did() -> None:
    """Its code has already gone on with that; the tag of the fork is for those who look for it."""
    app = hf.App("forks")

    @app.workflow
    async def telling() -> list[str]:
        info = hf.run_info()
        return [*info.tags, info.reference_key or "", info.request_id]

    async with asyncio.timeout(MOST_SECONDS), app.node(MemoryStore(), options=hf.NodeOptions(drain_s=2.0)):
        run = await app.start(telling, tags=("blue",), reference_key="o-1", request_id="r-1")
        said = await run.result()
        fork = await run.fork(at=1)
        assert await fork.result() == said == ["blue", "o-1", "r-1"]
        [head] = await app.runtime().store.find(RunQuery(run_ids=(fork.run_id,)))
        assert head.tags == ("blue", f"forked_from:{run.run_id}")


@pytest.mark.contract("WF-2")
async def test_a_run_of_ten_thousand_events_is_forked_within_a_second(tmp_path: Path) -> None:
    """By the time on the processor, because the machine has other work as well."""
    app = hf.App("forks")

    @app.activity
    async def act(number: int) -> int:
        return number

    @app.workflow
    async def long(rounds: int) -> int:
        for number in range(rounds):
            await asyncio.gather(*(act(number) for _ in range(50)))
        return await hf.wait_signal("go", int)

    options = hf.NodeOptions(drain_s=2.0)
    async with asyncio.timeout(MOST_SECONDS), app.node(f"sqlite:///{tmp_path}/long.db", options=options):
        run = await app.start(long, 100)
        await run.signal("go", 7)
        assert await run.result() == 7
        history = await run.events()
        assert len(history) >= 10_000
        began = time.process_time()
        fork = await run.fork(at=len(history) - 3)
        took_s = time.process_time() - began
        assert took_s < 1.0, took_s
        await fork.signal("go", 8)
        assert await fork.result() in (7, 8)
