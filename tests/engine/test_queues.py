"""Activities in queues: carried out by whichever node takes them, and recorded once."""

import asyncio
import threading
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest

import holdfast as hf
from holdfast.core import codec
from holdfast.core import events as e
from holdfast.core.messages import ActivityOutcome, activity_completed
from holdfast.core.state import retry_token
from holdfast.errors import ActivityFailed, InvalidInput, RunCancelled, StoreUnavailable
from holdfast.store.port import Job, Store
from holdfast.store.proxy import StoreProxy
from tests.engine.harness import EngineVariant, event_types, wait_for_event

QUICK = hf.Retry(max_attempts=3, initial_ms=30, factor=1.0, jitter=0.0)
WORKER: dict[str, Any] = {"queues": ("gpu",), "takes_runs": False, "visible_ms": 300}


class Shop:
    """An app that only starts runs, and apps that only carry out `render`, over one store."""

    def __init__(self, variant: EngineVariant, store: Store, render: Callable[..., Any], **options: Any) -> None:
        self.place = variant
        self.store = store
        self._render = render
        self._options = {"queue": "gpu", "retry": QUICK, **options}
        self.app = hf.App("shop")
        activity = self.app.activity(name="render", **self._options)(render)

        @self.app.workflow
        async def film(scene: str) -> str:
            try:
                result: str = await activity(scene)
            except ActivityFailed as failure:
                return f"{failure.info.code}: {failure.info.message}"
            return result

        self.film = film

    def producer(self, **options: Any) -> Any:
        """Return the node that runs workflows."""
        return self.place.node(self.app, self.store, **options)

    def worker(self, render: Callable[..., Any] | None = None, **options: Any) -> Any:
        """Return a node that only works on the queue."""
        app = hf.App("worker")
        app.activity(name="render", **self._options)(render or self._render)
        return self.place.node(app, self.store, **{**WORKER, **options})

    async def take(self, node: str = "ghost", visible_ms: int = 1) -> Job:
        """Take the job as a worker would that sends nothing any more."""
        async with asyncio.timeout(60):
            while not (jobs := await self.store.acquire_jobs(node, ["gpu"], ["render"], 1, visible_ms)):  # noqa: ASYNC110
                await asyncio.sleep(0.002)
        return jobs[0]


@asynccontextmanager
async def shop(variant: EngineVariant, render: Callable[..., Any], **options: Any) -> AsyncIterator[Shop]:
    """Open a store for several nodes at once."""
    async with variant.opened() as store:
        yield Shop(variant, store, render, **options)


async def develop(scene: str) -> str:
    """Render a scene."""
    return f"rendered {scene}"


@pytest.mark.contract("ACT-1")
async def test_a_queued_activity_is_carried_out_elsewhere_and_recorded_by_its_run(variant: EngineVariant) -> None:
    async with shop(variant, develop) as s, s.producer() as producer, s.worker():
        run = await s.app.start(s.film, "one")
        assert await run.result() == "rendered one"
        events = await run.events()
        stats = await s.store.stats()
    assert [event.event_type for event in events] == [
        "RunQueued",
        "RunStarted",
        "StepStarted",
        "StepCompleted",
        "RunCompleted",
    ]
    assert {event.engine_run_ref.node for event in events} == {producer.name}
    assert isinstance(events[2].data, e.StepStarted)
    assert events[2].data.queue == "gpu"
    assert stats.jobs == 0


@pytest.mark.contract("ACT-1")
async def test_nothing_is_carried_out_where_nobody_consumes_the_queue(variant: EngineVariant) -> None:
    async with shop(variant, develop) as s, s.producer():
        run = await s.app.start(s.film, "one")
        await wait_for_event(run, "StepStarted")
        assert (await s.store.stats()).jobs == 1
        async with s.worker():
            assert await run.result() == "rendered one"


@pytest.mark.contract("ACT-1")
async def test_one_node_may_do_both_and_the_queue_of_one_call_can_be_chosen(variant: EngineVariant) -> None:
    app = hf.App("both")

    @app.activity
    def double(n: int) -> int:
        return 2 * n

    @app.workflow
    async def sums(n: int) -> int:
        results = await asyncio.gather(*(double.options(queue="gpu")(i) for i in range(n)), double(100))
        return sum(results)

    async with variant.node(app, queues=("gpu",), activities_at_once=3):
        run = await app.start(sums, 20)
        assert await run.result() == 580
        queues = [event.data.queue for event in await run.events() if isinstance(event.data, e.StepStarted)]
    assert queues == ["gpu"] * 20 + [""]


@pytest.mark.contract("ACT-1")
async def test_a_node_that_takes_no_runs_starts_them_for_others(variant: EngineVariant) -> None:
    async with shop(variant, develop) as s:
        async with s.producer(takes_runs=False):
            run_id = (await s.app.start(s.film, "one")).run_id
            [loaded] = await s.store.load([run_id])
            assert loaded is not None
            assert loaded.head.lease_owner is None
        async with s.producer(), s.worker():
            assert await s.app.run(run_id).result() == "rendered one"


@pytest.mark.contract("ACT-1", "ATT-1")
async def test_a_failure_is_retried_through_the_queue_with_backoff(variant: EngineVariant) -> None:
    began: list[tuple[int, int]] = []

    async def flaky(scene: str) -> str:
        began.append((hf.activity_context().attempt, await s.store.now()))
        if len(began) < 3:
            raise ConnectionError("the card is hot")
        return "at last"

    async with shop(variant, flaky) as s, s.producer(), s.worker():
        run = await s.app.start(s.film, "one")
        assert await run.result() == "at last"
        retried = [event for event in await run.events() if isinstance(event.data, e.StepRetried)]
    assert [attempt for attempt, _ in began] == [1, 2, 3]
    assert [event.data.error.code for event in retried] == ["ConnectionError"] * 2  # type: ignore[attr-defined]
    for (_, at), event in zip(began[1:], retried, strict=True):
        due_at = event.data.due_at  # type: ignore[attr-defined]
        assert at >= due_at
        assert due_at - event.emitted_at == 30_000


class Torn(hf.NonRetryable):
    pass


@pytest.mark.contract("ACT-1")
@pytest.mark.parametrize(("problem", "calls"), [(Torn("no"), 1), (ConnectionError("down"), 3)])
async def test_an_error_is_judged_by_the_options_of_the_step(
    variant: EngineVariant, problem: Exception, calls: int
) -> None:
    called: list[int] = []

    async def broken(scene: str) -> str:
        called.append(1)
        raise problem

    async with shop(variant, broken) as s, s.producer(), s.worker():
        run = await s.app.start(s.film, "one")
        assert await run.result() == f"{type(problem).__name__}: {problem}"
        assert (await s.store.stats()).jobs == 0
    assert len(called) == calls


@pytest.mark.contract("ACT-1")
async def test_long_work_stays_with_its_worker_without_a_word(variant: EngineVariant) -> None:
    calls: list[int] = []

    async def long(scene: str) -> str:
        calls.append(hf.activity_context().attempt)
        await asyncio.sleep(1.5)  # the work: several times as long as it may be invisible
        return "done"

    async with shop(variant, long) as s, s.producer(), s.worker(visible_ms=400), s.worker(visible_ms=400):
        assert await (await s.app.start(s.film, "one")).result() == "done"
    assert calls == [1]


@pytest.mark.contract("ACT-1", "WF-4")
async def test_cancelling_a_run_reaches_its_activity_elsewhere(variant: EngineVariant) -> None:
    began, stopped = asyncio.Event(), asyncio.Event()

    async def endless(scene: str) -> str:
        began.set()
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            stopped.set()
            raise
        return "never"

    async with shop(variant, endless) as s, s.producer(), s.worker():
        run = await s.app.start(s.film, "one")
        await began.wait()
        await run.cancel()
        with pytest.raises(RunCancelled):
            await run.result()
        await stopped.wait()
        assert (await s.store.stats()).jobs == 0


@pytest.mark.contract("ACT-1", "WF-4")
async def test_a_heartbeat_lets_a_cancelled_activity_hear_of_it_at_once(variant: EngineVariant) -> None:
    began, over = asyncio.Event(), asyncio.Event()

    def steady(scene: str) -> str:
        context = hf.activity_context()
        loop.call_soon_threadsafe(began.set)
        try:
            while not pause.wait(0.005):
                context.heartbeat()
        except asyncio.CancelledError:
            loop.call_soon_threadsafe(over.set)
            raise
        return "never"

    pause = threading.Event()
    loop = asyncio.get_running_loop()
    # The own heartbeats of jobs come far apart here: only those of the activity bring the cancellation in time.
    async with shop(variant, steady) as s, s.producer(), s.worker(visible_ms=30_000):
        run = await s.app.start(s.film, "one")
        await began.wait()
        await run.cancel()
        with pytest.raises(RunCancelled):
            await run.result()
        await over.wait()


@pytest.mark.contract("ACT-1")
async def test_jobs_of_unknown_activities_are_left_to_others_and_reported_once(
    variant: EngineVariant, caplog: pytest.LogCaptureFixture
) -> None:
    stranger = hf.App("stranger")

    @stranger.activity(queue="gpu")
    async def paint() -> None:
        raise AssertionError("never called")

    def reports() -> list[str]:
        return [record.message for record in caplog.records if record.name == "holdfast.queues"]

    async with shop(variant, develop) as s, s.producer():
        run = await s.app.start(s.film, "one")
        await wait_for_event(run, "StepStarted")
        async with variant.node(stranger, s.store, **WORKER):
            while not reports():
                s.store.wakeups.notify()
                await asyncio.sleep(0.002)
            for _ in range(50):
                s.store.wakeups.notify()
                await asyncio.sleep(0)
            async with s.worker():
                assert await run.result() == "rendered one"
    assert len(reports()) == 1
    assert "gpu" in reports()[0]


@pytest.mark.contract("ACT-1", "ATT-1", "OWN-3")
async def test_a_job_whose_taker_is_never_heard_of_again_is_taken_by_another(variant: EngineVariant) -> None:
    attempts: list[int] = []

    async def count(scene: str) -> str:
        attempts.append(hf.activity_context().attempt)
        if len(attempts) == 1:
            raise ConnectionError("and then it fails")
        return "done"

    async with shop(variant, count) as s, s.producer():
        run = await s.app.start(s.film, "one")
        await s.take()
        async with s.worker():
            assert await run.result() == "done"
            snapshot, history = await run.snapshot(), await run.events()
    assert attempts == [2, 3]  # the lost one counts
    assert snapshot.steps[0].engine_attempt_id == 3
    assert [event.engine_attempt_id for event in history if isinstance(event.data, e.StepRetried)] == [3]


@pytest.mark.contract("ACT-1")
async def test_what_kills_every_worker_is_given_up_in_the_end(variant: EngineVariant) -> None:
    called: list[int] = []

    async def deadly(scene: str) -> str:
        called.append(1)
        return "alive"

    async with shop(variant, deadly) as s, s.producer():
        run = await s.app.start(s.film, "one")
        for _ in range(3):
            await s.take()
        async with s.worker():
            assert (await run.result()).startswith("WorkerLost: activity 'render' was taken 3 times")
    assert called == []


@pytest.mark.contract("ACT-1", "MSG-2")
async def test_a_late_success_counts_and_a_late_error_does_not(variant: EngineVariant) -> None:
    gate = asyncio.Event()

    async def slow(scene: str) -> str:
        await gate.wait()
        return "second"

    async def deliver(s: Shop, job: Job, **outcome: Any) -> None:
        attempt = job.engine_attempt_id
        sent = ActivityOutcome(logical_attempt_id=1, engine_attempt_id=attempt, **outcome)
        token = retry_token(job.step_id, attempt)
        await s.store.deliver([activity_completed(job.run_id, job.step_id, token, sent, await s.store.now())])

    async with shop(variant, slow) as s, s.producer():
        for outcome, result in (
            ({"result": codec.encode("first")}, "first"),
            ({"error": e.ErrorInfo("Late", "too late", retryable=True)}, "second"),
        ):
            run = await s.app.start(s.film, "one")
            job = await s.take()
            again = await s.take(visible_ms=60_000)
            assert (job.engine_attempt_id, again.engine_attempt_id) == (1, 2)
            if result == "second":
                await deliver(s, again, error=e.ErrorInfo("Broken", "it broke", retryable=True))
                await wait_for_event(run, "StepRetried")
                gate.set()
            await deliver(s, job, **outcome)
            async with s.worker():
                assert await run.result() == result
            assert (await event_types(run)).count("StepCompleted") == 1
            assert (await event_types(run)).count("StepRetried") == (result == "second")


@pytest.mark.contract("ACT-1", "ACT-5")
async def test_an_outcome_that_waits_for_its_run_is_followed_by_no_further_attempt(variant: EngineVariant) -> None:
    """The node of the run is gone, and so is the worker that has reported."""
    rendered: list[str] = []

    async def render(scene: str) -> str:
        rendered.append(scene)
        return "rendered again"

    async with shop(variant, render) as s:
        async with s.producer():
            run = await s.app.start(s.film, "one")
            await wait_for_event(run, "StepStarted")
            job = await s.take(visible_ms=1)
        sent = ActivityOutcome(logical_attempt_id=1, engine_attempt_id=1, error=e.ErrorInfo("Fatal", "never"))
        token = retry_token(job.step_id, 1)
        await s.store.deliver([activity_completed(job.run_id, job.step_id, token, sent, await s.store.now())])
        late = await s.store.now() + 5_000
        while await s.store.now() < late:  # noqa: ASYNC110
            await asyncio.sleep(0.002)
        assert await s.store.acquire_jobs("ghost", ["gpu"], ["render"], 1, 1) == []
        async with s.worker(), s.producer():
            assert await s.app.run(run.run_id).result() == "Fatal: never"
    assert rendered == []


class DeafStore(StoreProxy):
    """A store whose `deliver` is carried out and not answered, the first time."""

    def __init__(self, store: Store) -> None:
        super().__init__(store)
        self.delivered = 0

    async def deliver(self, items: Any) -> Any:
        answers = await self.inner.deliver(items)
        self.delivered += 1
        if self.delivered == 1:
            raise StoreUnavailable("no answer")
        return answers


@pytest.mark.contract("MSG-2", "ACT-1")
async def test_an_outcome_is_reported_until_there_is_an_answer_and_recorded_once(variant: EngineVariant) -> None:
    async with shop(variant, develop) as s, s.producer():
        deaf = DeafStore(s.store)
        run = await s.app.start(s.film, "one")
        app = hf.App("worker")
        app.activity(name="render", queue="gpu")(develop)
        async with variant.node(app, deaf, **WORKER):
            assert await run.result() == "rendered one"
        assert deaf.delivered == 2  # the node drains before it goes
        assert (await event_types(run)).count("StepCompleted") == 1


@pytest.mark.contract("ACT-1")
async def test_a_worker_that_fell_behind_with_its_beats_does_not_take_its_own_job_again(variant: EngineVariant) -> None:
    attempts: list[int] = []
    began, gate = asyncio.Event(), asyncio.Event()

    async def long(scene: str) -> str:
        attempts.append(hf.activity_context().attempt)
        began.set()
        await gate.wait()
        return "done"

    async with shop(variant, long) as s, s.producer(), s.worker(visible_ms=60) as worker:
        run = await s.app.start(s.film, "one")
        await began.wait()
        next(task for task in worker._tasks if task.get_name() == "heartbeats").cancel()
        visible_at = await s.store.next_due("nobody", (), ["gpu"])
        assert visible_at is not None
        while await s.store.next_due("nobody", (), ["gpu"]) == visible_at:  # noqa: ASYNC110
            await asyncio.sleep(0.005)
        gate.set()
        assert await run.result() == "done"
    assert attempts == [1]


@pytest.mark.contract("ACT-1", "MSG-4")
async def test_a_worker_that_stops_finishes_what_it_has(variant: EngineVariant) -> None:
    began, gate = asyncio.Event(), asyncio.Event()

    async def careful(scene: str) -> str:
        began.set()
        await gate.wait()
        return f"{scene} at attempt {hf.activity_context().attempt}"

    async with shop(variant, careful) as s, s.producer():
        run = await s.app.start(s.film, "one")
        async with s.worker():
            await began.wait()
            asyncio.get_running_loop().call_later(0.05, gate.set)
        assert await run.result() == "one at attempt 1"


@pytest.mark.contract("ACT-1", "OWN-3")
async def test_what_a_stopped_worker_did_not_finish_is_visible_again(variant: EngineVariant) -> None:
    began = asyncio.Event()

    async def hang(scene: str) -> str:
        began.set()
        await asyncio.Event().wait()
        return "never"

    async with shop(variant, hang) as s, s.producer():
        run = await s.app.start(s.film, "one")
        async with s.worker(drain_s=0.01):
            await began.wait()
        async with s.worker(develop):
            assert await run.result() == "rendered one"


@pytest.mark.contract("ACT-1")
async def test_details_travel_from_worker_to_worker(variant: EngineVariant) -> None:
    seen: list[Any] = []

    async def careful(scene: str) -> str:
        context = hf.activity_context()
        seen.append(context.details)
        context.heartbeat({"done": context.attempt})
        context.heartbeat()
        if context.attempt < 3:
            raise ConnectionError
        return "done"

    async with shop(variant, careful) as s, s.producer(), s.worker():
        assert await (await s.app.start(s.film, "one")).result() == "done"
    assert seen == [None, {"done": 1}, {"done": 2}]


@pytest.mark.contract("ACT-1", "MSG-4")
async def test_no_more_jobs_are_taken_than_there_are_slots(variant: EngineVariant) -> None:
    busy: list[int] = []
    most = 0

    async def count(scene: str) -> str:
        nonlocal most
        busy.append(1)
        most = max(most, len(busy))
        await asyncio.sleep(0)
        taken = [run for run in runs if (await s.store.load([run.run_id]))[0] is not None]
        busy.pop()
        return str(len(taken))

    async with shop(variant, count) as s, s.producer():
        runs = [await s.app.start(s.film, str(number)) for number in range(12)]
        async with s.worker(activities_at_once=2):
            for run in runs:
                assert await run.result() == "12"
    assert most == 2


@pytest.mark.contract("API-2")
@pytest.mark.parametrize("name", ["a\nb", "x" * 201, "\ud800"])
def test_a_queue_or_an_activity_that_cannot_be_kept_is_refused_where_it_is_named(name: str) -> None:
    app = hf.App("shop")
    with pytest.raises(InvalidInput):
        app.activity(queue=name)(develop)
    with pytest.raises(InvalidInput):
        app.activity(name=name)(develop)
    assert app.registry.activity_names() == []


@pytest.mark.parametrize("queue", ["", "gpu"], ids=["local", "queued"])
@pytest.mark.contract("ACT-1")
async def test_an_activity_knows_the_tenant_and_the_environment_of_its_run(variant: EngineVariant, queue: str) -> None:
    app = hf.App("places")

    @app.activity(queue=queue)
    async def ask() -> str:
        context = hf.activity_context()
        return f"{context.tenant} {context.environment}"

    @app.workflow
    async def work() -> str:
        return await ask()

    async with variant.node(app, queues=("gpu",)):
        run = await app.start(work, tenant="acme", environment="staging")
        assert await run.result() == "acme staging"
        assert await (await app.start(work)).result() == "default default"
