"""The doctor finds what is wrong, in every store, and says of a healthy one that it is."""

from __future__ import annotations

import sqlite3
from collections.abc import AsyncIterator, Callable
from contextlib import closing
from datetime import timedelta
from itertools import pairwise
from pathlib import Path
from typing import Any

import msgspec
import pytest
from msgspec import Raw
from msgspec.structs import replace

import holdfast as hf
from holdfast.core import commands
from holdfast.core.messages import ActivityDetached
from holdfast.core.search import parse_query
from holdfast.core.state import FAILED
from holdfast.engine.abilities import Abilities
from holdfast.engine.observe.doctor import Report, examine
from holdfast.errors import RunFailed
from holdfast.store.health import Bounds, Finding
from holdfast.store.memory import MemoryStore
from holdfast.store.port import Committed, PurgePolicy, RunQuery, Store
from holdfast.store.postgres import PostgresStore
from holdfast.store.sqlite import SqliteStore
from holdfast.testing import START, VirtualClock, samples
from holdfast.testing.samples import SampleNode
from tests.engine.harness import wait_for_history
from tests.postgres_server import sql

MINUTE = 60_000
HOUR = 60 * MINUTE
DAY = 24 * HOUR


class DoctorCase:
    """A store with a clock, and a way to change rows behind its back."""

    def __init__(self, store: Any, clock: VirtualClock, change: Callable[[str], object] | None) -> None:
        self.store = store
        self.clock = clock
        self._change = change

    async def forget(self, run_id: str, *, table: str = "messages") -> None:
        """Lose something of a run, and that it is ready, as no store ever should."""
        if isinstance(self.store, MemoryStore):
            run = self.store._runs[run_id]
            (run.messages if table == "messages" else run.work).clear()
            run.head = replace(run.head, ready_at=None, lease_owner=None)
            return
        assert self._change is not None
        of_run = f"run_no = (SELECT run_no FROM runs WHERE run_id = '{run_id}')"
        self._change(f"DELETE FROM {table} WHERE {of_run}")
        self._change(f"UPDATE runs SET ready_at = NULL, lease_owner = NULL WHERE run_id = '{run_id}'")
        if isinstance(self.store, PostgresStore):
            self._change(f"DELETE FROM agenda WHERE {of_run}")

    async def report(self, **bounds: Any) -> Report:
        """Examine the store by a clock that agrees with its own."""
        return await examine(self.store, self.clock, shown="here", bounds=Bounds(**bounds))

    async def found(self, subject: str, **bounds: Any) -> list[Finding]:
        """Return what the doctor says of a subject that is not fine."""
        report = await self.report(**bounds)
        return [one for one in report.findings if one.subject == subject and one.level != "fine"]


@pytest.fixture(params=["memory", "sqlite", "postgres"])
async def case(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[DoctorCase]:
    """Return an empty store of each kind."""
    clock = VirtualClock()
    store: Any = MemoryStore(clock)
    change: Callable[[str], object] | None = None
    if request.param == "sqlite":
        store = await SqliteStore.open(tmp_path / "store.db", clock=clock)
        change = sqlite_change(tmp_path / "store.db")
    if request.param == "postgres":
        url = request.getfixturevalue("postgres_url")
        store = await PostgresStore.open(url, clock=clock)
        name = url.rpartition("/")[2].partition("?")[0]
        sql(url, f"ALTER DATABASE {name} SET search_path = holdfast")
        change = lambda statement: sql(url, statement)  # noqa: E731
    await store.migrate()
    yield DoctorCase(store, clock, change)
    await store.close()


def sqlite_change(path: Path) -> Callable[[str], object]:
    """Return a way to change a file with a connection of its own."""

    def change(statement: str) -> None:
        with closing(sqlite3.connect(path, isolation_level=None)) as db:
            db.execute(statement)

    return change


def queued(step_id: str = "charge") -> commands.RunActivity:
    return commands.RunActivity(step_id=step_id, name="charge", queue="mail")


async def begin(node: SampleNode, run_id: str, *todo: commands.Command) -> None:
    """Start a run that nobody owns when it waits."""
    await node.create(run_id)
    await node.step(run_id, *todo, release=True)


async def busy(store: Store) -> None:
    """Leave runs that wait for all that a run can wait for, and one that has ended."""
    node = SampleNode(store)
    child = commands.StartChild(step_id="child", child_run_id="a-child", plan_id="order", plan_version="1")
    await begin(node, "waits", samples.wait("go"))
    await begin(node, "asks", samples.task())
    await begin(node, "sleeps", samples.timer(START + HOUR * 1_000))
    await begin(node, "queued", queued())
    await begin(node, "parent", child)
    await node.claim()
    await node.step("a-child", samples.wait("stop"))
    await node.start("works", samples.activity())
    await node.start("ended", samples.complete())


@pytest.mark.contract("INV")
async def test_of_a_healthy_store_it_says_so(case: DoctorCase) -> None:
    await busy(case.store)
    await case.store.renew("node-a", HOUR, [("order", "1")])
    report = await case.report()
    assert [one for one in report.findings if one.level != "fine"] == []
    assert report.is_fine
    assert report.looked
    assert report.runs_read == 8
    for instant in (case.clock.advance(ms=30_000), case.clock.advance(ms=1)):
        assert instant
        assert (await case.report()).is_fine, "a lease that has just run out is nothing to speak of"


async def test_an_empty_store_is_healthy(case: DoctorCase) -> None:
    report = await case.report()
    assert [one for one in report.findings if one.level != "fine"] == []
    assert report.runs_read == 0


@pytest.mark.contract("INV")
async def test_a_run_that_rests_in_its_code_until_an_update_comes_is_not_stuck(case: DoctorCase) -> None:
    await begin(SampleNode(case.store), "basket")
    assert await case.found("stuck runs", sample_runs=10) == []


@pytest.mark.contract("INV")
async def test_a_run_that_nothing_will_wake_is_named(case: DoctorCase) -> None:
    await busy(case.store)
    await case.forget("sleeps")
    [stuck] = await case.found("stuck runs", sample_runs=0)
    assert (stuck.level, stuck.run_ids) == ("wrong", ("sleeps",))
    assert "neither leased nor ready nor waiting for anything" in stuck.sentence
    assert stuck.advice


@pytest.mark.contract("INV")
async def test_a_run_whose_job_is_gone_from_its_queue_is_named(case: DoctorCase) -> None:
    await busy(case.store)
    await case.forget("queued", table="jobs")
    [stuck] = await case.found("stuck runs", sample_runs=0)
    assert stuck.run_ids == ("queued",)
    assert "has no job in the queue 'mail'" in stuck.sentence


@pytest.mark.contract("INV")
async def test_a_run_that_waits_for_a_child_that_has_ended_is_named(case: DoctorCase) -> None:
    await busy(case.store)
    node = SampleNode(case.store)
    await node.claim()
    await node.step("a-child", samples.complete())
    assert await case.found("stuck runs", sample_runs=0) == [], "the parent was told"
    await case.forget("parent")
    [stuck] = await case.found("stuck runs", sample_runs=0)
    assert stuck.run_ids == ("parent",)
    assert "waits for a child that has ended" in stuck.sentence


@pytest.mark.contract("ACT-1")
async def test_an_activity_that_somebody_completes_later_is_not_stuck(case: DoctorCase) -> None:
    node = SampleNode(case.store)
    await node.start("detached", samples.activity())
    await node.step("detached", inputs=[ActivityDetached("charge", 1, 1)], release=True)
    facts = await case.store.health(Bounds())
    assert [run_id for run_id, _ in facts.suspects] == ["detached"], "the store alone cannot tell"
    assert await case.found("stuck runs") == []


async def test_unfinished_runs_without_a_node_are_noted(case: DoctorCase) -> None:
    await begin(SampleNode(case.store), "waits", samples.wait("go"))
    await case.store.renew("server", HOUR, Abilities(version="1").encode())
    [none] = await case.found("nodes")
    assert (none.level, none.sentence) == ("note", "1 run is not finished, and no node that runs workflows is alive")
    assert "holdfast node" in none.advice
    await case.store.renew("node-a", HOUR, Abilities(workflows=frozenset({("order", "1")})).encode())
    assert await case.found("nodes") == []


@pytest.mark.contract("OWN-3")
async def test_a_node_that_is_gone_with_its_runs_is_named_until_another_takes_over(case: DoctorCase) -> None:
    await SampleNode(case.store, "node-a").start("run-1", samples.wait("go"))
    case.clock.advance(ms=10 * MINUTE)
    [gone] = await case.found("leases")
    assert gone.level == "wrong"
    assert gone.sentence == "node-a is gone for 10 minutes, and 1 runs still belong to it"
    node = SampleNode(case.store, "node-b")
    await node.claim()
    await node.step("run-1")
    assert (await case.report()).is_fine


async def test_runs_of_a_workflow_that_no_node_knows_are_named(case: DoctorCase) -> None:
    await case.store.create([samples.new_run("run-1", plan_id="new"), samples.new_run("run-2", plan_id="new")])
    node = SampleNode(case.store, lease_ms=HOUR)
    await node.renew()
    case.clock.advance(ms=5 * MINUTE)
    [unclaimed] = await case.found("ready runs")
    assert "2 runs of new version 1 are ready, the oldest for 5 minutes, and no node claims them" in unclaimed.sentence
    assert "there are 1 nodes" in unclaimed.sentence
    await case.store.renew(node.name, HOUR, [("new", "2")])
    [unclaimed] = await case.found("ready runs")
    assert unclaimed.sentence.endswith("there are 1 nodes, and none of them has this version")
    await node.claim()
    for run_id in ("run-1", "run-2"):
        await node.step(run_id, samples.wait("go"))
    assert await case.found("ready runs") == []


async def test_a_node_that_takes_no_turn_is_noticed(case: DoctorCase) -> None:
    await SampleNode(case.store, lease_ms=HOUR).create("run-1")
    case.clock.advance(ms=5 * MINUTE)
    [behind] = await case.found("ready runs")
    assert behind.sentence == "a run has been ready for 5 minutes, and the node that has it takes no turn"


async def test_a_queue_that_nobody_takes_from_is_named(case: DoctorCase) -> None:
    node = SampleNode(case.store, lease_ms=HOUR)
    await node.start("run-1", queued("first"), queued("second"))
    case.clock.advance(ms=3 * MINUTE)
    [untaken] = await case.found("queues")
    assert untaken.sentence == "2 jobs of charge wait in the queue mail, the oldest for 3 minutes"
    assert "--queue mail" in untaken.advice
    await case.store.acquire_jobs("node-b", ["mail"], ["charge"], 10, HOUR)
    assert await case.found("queues") == []


@pytest.mark.contract("ACT-7")
async def test_calls_that_wait_under_a_limit_are_as_they_should_be_while_a_node_takes_them(case: DoctorCase) -> None:
    options = Raw(b'{"limit":{"name":"bank API"}}')
    calls = [replace(samples.job("run-1", step, "limited:"), options=options) for step in ("first", "second")]
    node = SampleNode(case.store, lease_ms=HOUR)
    await node.start("run-1", samples.wait("go"))
    loaded = await node.load("run-1")
    await node.commit(replace(await node.turn(loaded, samples.marker("mark")), jobs=tuple(calls)))
    case.clock.advance(ms=3 * MINUTE)
    [waiting] = await case.found("queues")
    assert waiting.sentence == (
        "2 calls of charge wait for a place under the limit, the oldest for 3 minutes, and no node takes them"
    )
    assert not (await case.report()).is_fine
    await case.store.renew("node-b", HOUR, Abilities(activities=frozenset({"charge"})).encode())
    [waiting] = await case.found("queues")
    assert (waiting.level, "raise the limit" in waiting.advice) == ("note", True)


@pytest.mark.contract("MSG-3")
async def test_poison_is_noted_and_dead_letters_are_wrong(case: DoctorCase) -> None:
    node = SampleNode(case.store, lease_ms=HOUR)
    await node.start("run-1", samples.wait("go"))
    later = case.clock.now() + HOUR * 1_000
    innocent = samples.message("run-1", "innocent", due_at=later)
    poison = replace(samples.message("run-1", "poison", due_at=later), attempts=7)
    await case.store.deliver([innocent])
    assert (await case.report()).is_fine
    await case.store.deliver([poison])
    [retried] = await case.found("poison")
    assert (retried.level, retried.run_ids) == ("note", ("run-1",))
    assert "tried up to 7 times" in retried.sentence
    assert (await case.report()).is_fine, "perhaps it will be handled yet"
    turn = await node.turn(await node.load("run-1"))
    answer = await node.commit(replace(turn, consumed=("poison",), dead=(samples.dead_letter(),)))
    assert isinstance(answer, Committed)
    [letters] = await case.found("dead letters")
    assert (letters.level, letters.sentence) == ("wrong", "1 dead letter is not settled")


async def test_a_signal_that_nobody_waits_for_is_noted(case: DoctorCase) -> None:
    node = SampleNode(case.store, lease_ms=HOUR)
    await node.start("run-1", samples.wait("go"))
    await case.store.deliver([samples.signal("run-1", name="gone", signal_id="click")])
    await node.step("run-1")
    assert await case.found("mailboxes") == []
    case.clock.advance(ms=3 * DAY)
    [mail] = await case.found("mailboxes")
    assert (mail.level, mail.run_ids) == ("note", ("run-1",))
    assert "for 3 days" in mail.sentence
    await node.renew()
    await node.step("run-1", samples.complete())
    assert await case.found("mailboxes") == [], "of a finished run it is of no interest"


@pytest.mark.contract("SIG-2")
@pytest.mark.parametrize(("apart_ms", "which"), [(5_000, "behind"), (-5_000, "ahead of")])
async def test_clocks_that_disagree_are_noted(case: DoctorCase, apart_ms: int, which: str) -> None:
    machine = VirtualClock(case.clock.now() + apart_ms * 1_000)
    report = await examine(case.store, machine)
    [clock] = [one for one in report.findings if one.subject == "clock"]
    assert (clock.level, clock.sentence) == ("note", f"the store's clock is 5 seconds {which} this machine's")


async def test_the_sample_is_bounded_and_spread_over_all_runs(case: DoctorCase) -> None:
    await case.store.create([samples.new_run(f"run-{number:02}") for number in range(50)])
    told: list[tuple[int, int]] = []
    report = await examine(
        case.store, case.clock, bounds=Bounds(sample_runs=10), progress=lambda done, of: told.append((done, of))
    )
    assert report.runs_read == 10
    assert told == [(4, 10), (8, 10), (10, 10)]
    facts = await case.store.health(Bounds(sample_runs=10))
    numbers = sorted(int(run_id.removeprefix("run-")) for run_id in facts.sample)
    assert numbers[0] == 0
    assert max(later - earlier for earlier, later in pairwise(numbers)) <= 6


async def test_a_long_history_is_left_out_of_the_sample(case: DoctorCase) -> None:
    await SampleNode(case.store).start("run-1", samples.wait("go"))
    assert (await case.report(sample_events=1)).runs_read == 0
    assert (await case.report()).runs_read == 1


async def test_runs_that_an_error_has_paused_are_named(tmp_path: Path) -> None:
    def app_of(name: str) -> tuple[hf.App, Any]:
        app = hf.App("shop")

        @app.workflow
        async def order() -> bool:
            return await hf.wait_signal(name, bool)

        return app, order

    store, (old, order), (new, _) = MemoryStore(), app_of("go"), app_of("other")
    async with old.node(store):
        for run_id in ("asked", "diverged"):
            await (await old.start(order, run_id=run_id)).pause(wait=True)
        await old.run("diverged").resume(wait=True)
    async with new.node(store):
        await new.run("diverged").signal("go", True)
        await wait_for_history(new.run("diverged"), lambda events: events[-1].event_type == "RunPaused")
    report = await examine(store, VirtualClock(await store.now()))
    [paused] = [one for one in report.findings if one.subject == "paused runs"]
    assert (paused.level, paused.run_ids) == ("wrong", ("diverged",))
    assert paused.sentence == "1 run was paused by NondeterminismError"


@pytest.mark.contract("SIG-13")
async def test_for_a_run_that_a_failed_step_has_paused_to_retry_the_step_is_advised() -> None:
    app = hf.App("shop")

    @app.activity(on_failure="pause", retry=hf.Retry(max_attempts=1))
    async def charge() -> None:
        raise ValueError("the card was refused")

    @app.workflow
    async def order() -> None:
        await charge()

    store = MemoryStore()
    async with app.node(store):
        run = await app.start(order, run_id="unpaid")
        await wait_for_history(run, lambda events: events[-1].event_type == "StepFailed")
    report = await examine(store, VirtualClock(await store.now()))
    [paused] = [one for one in report.findings if one.subject == "paused runs"]
    assert (paused.level, paused.run_ids) == ("wrong", ("unpaid",))
    assert paused.sentence == "1 run was paused by a failed step: charge with ValueError"
    assert paused.search == "status:paused with:children ValueError", "it finds these, and not all that are paused"
    retry = '`holdfast run bulk retry_step --status PAUSED --text "ValueError"`'
    assert paused.advice.index(retry) < paused.advice.index("`holdfast run bulk raise ")
    assert "resume" not in paused.advice


@pytest.mark.contract("SIG-13")
async def test_what_an_operator_has_paused_or_done_again_is_nothing_that_is_wrong() -> None:
    app = hf.App("shop")
    is_back = False

    @app.activity(retry=hf.Retry(initial_ms=3_600_000))
    async def send() -> None:
        raise ConnectionError("refused")

    @app.workflow
    async def mail() -> None:
        await send()

    @app.workflow
    async def order() -> str:
        if not is_back:
            raise hf.WorkflowFailed("no parcel")
        return "sent"

    store = MemoryStore()

    async def found() -> dict[str, str]:
        report = await examine(store, VirtualClock(await store.now()))
        subjects = ("paused runs", "failed runs")
        return {one.subject: f"{one.level}: {one.sentence}" for one in report.findings if one.subject in subjects}

    async with app.node(store):
        retried = await app.start(mail)
        await wait_for_history(retried, lambda events: events[-1].event_type == "StepRetried")
        await retried.pause("the mail server is away", actor="ann", wait=True)
        failed = [await app.start(order) for _ in range(2)]
        for run in failed:
            with pytest.raises(RunFailed):
                await run.result()
        assert await found() == {
            "paused runs": "fine: 1 run was paused by operators",
            "failed runs": "note: 2 runs have failed with WorkflowFailed within the last hour",
        }
        is_back = True
        await (await failed[0].retry_run()).result()
        await (await failed[1].fork()).result()
        assert (await found())["failed runs"] == "fine: none has failed within the last hour that was not done again"


@pytest.mark.contract("SIG-13")
async def test_what_is_advised_for_failed_runs_finds_those_that_were_started_long_ago_and_no_others() -> None:
    clock = VirtualClock()
    store = MemoryStore(clock=clock)
    app = hf.App("shop")

    @app.workflow(signals={"go": None})
    async def order() -> None:
        await hf.wait_signal("go")
        raise hf.WorkflowFailed("no parcel")

    async def fail(run_id: str) -> None:
        await app.run(run_id).signal("go")
        with pytest.raises(RunFailed):
            await app.run(run_id).result()

    async with app.node(store):
        for run_id in ("before", "late"):
            await app.start(order, run_id=run_id)
        await fail("before")
        clock.advance(ms=2 * HOUR)
        await fail("late")
        report = await examine(store, clock)
    [failed] = [one for one in report.findings if one.subject == "failed runs"]
    assert failed.run_ids == ("late",)
    assert '`holdfast run bulk retry --status FAILED --finished-from 1h --text "WorkflowFailed"`' in failed.advice
    conditions = " ".join(word for word in failed.search.split() if word.startswith(("status:", "finished_at")))
    parsed = parse_query(conditions, {})
    query = RunQuery(status=FAILED, finished_from=int(parsed.fields["finished_from"]))
    assert parsed.fields["status"] == "FAILED"
    assert [head.run_id for head in await store.find(query)] == ["late"]


@pytest.mark.contract("TSK-1")
async def test_overdue_tasks_are_named_with_whom_they_are_for() -> None:
    clock = VirtualClock()
    store = MemoryStore(clock=clock)
    app = hf.App("shop")

    @app.workflow
    async def review(roles: list[str], assignee: str | None) -> bool:
        return await hf.task("review", bool, roles=roles, assignee=assignee, due=timedelta(minutes=1))

    async with app.node(store):
        for roles, assignee in [(["clerk"], None), (["clerk"], None), ([], "bob"), ([], None)]:
            run = await app.start(review, roles, assignee)
            await wait_for_history(run, lambda events: events[-1].event_type == "TaskCreated")
        clock.advance(ms=3 * MINUTE)
        report = await examine(store, clock)
    [tasks] = [one for one in report.findings if one.subject == "tasks"]
    assert tasks.sentence.endswith(": for clerk (2), for everybody (1), of bob (1)")
    assert "and to an admin" in tasks.advice


@pytest.mark.contract("OWN-3")
async def test_nodes_that_ended_one_after_the_other_are_counted() -> None:
    clock = VirtualClock()
    store = MemoryStore(clock=clock)

    async def said(number: int, node: str, taken_from: str) -> str:
        body = Raw(msgspec.json.encode({"node": node, "taken_from": taken_from, "runs": 2}))
        await store.put_bulletins("takeover", {str(number): body}, HOUR)
        clock.advance(ms=2 * MINUTE)
        report = await examine(store, clock)
        return next(one.sentence for one in report.findings if one.subject == "takeovers")

    assert await said(1, "b", "a") == "b has taken over 2 runs of a 2 minutes ago"
    assert await said(2, "b", "a") == "b has taken over 4 runs of a 2 minutes ago", "as several batches"
    assert await said(3, "c", "b") == (
        "2 nodes ended without stopping within the last quarter of an hour, and others have taken over 6 runs; "
        "the last was b, 2 minutes ago"
    )


@pytest.mark.contract("MSG-3")
async def test_a_run_that_is_damaged_or_inconsistent_is_named_and_the_others_are_read(tmp_path: Path) -> None:
    clock = VirtualClock()
    store = await SqliteStore.open(tmp_path / "store.db", clock=clock)
    await store.migrate()
    await busy(store)
    change = sqlite_change(tmp_path / "store.db")
    change("UPDATE runs SET snapshot = '{' WHERE run_id = 'waits'")
    change("DELETE FROM events WHERE run_seq = 2 AND run_no = (SELECT run_no FROM runs WHERE run_id = 'ended')")
    report = await examine(store, clock)
    await store.close()
    of_runs = [one for one in report.findings if one.subject == "runs"]
    assert of_runs[0].run_ids == ("waits",)
    assert "cannot be read" in of_runs[0].sentence
    assert {one.run_ids for one in of_runs[1:]} == {("ended",)}
    assert any("run_seq_is_gapless" in one.sentence for one in of_runs)
    assert report.runs_read == 7


async def test_nothing_is_changed_by_looking(case: DoctorCase) -> None:
    await busy(case.store)
    run_ids = ["waits", "asks", "sleeps", "queued", "parent", "a-child", "works", "ended"]
    before, stats = await case.store.load(run_ids), await case.store.stats()
    await case.report()
    assert (await case.store.load(run_ids), await case.store.stats()) == (before, stats)


async def test_what_retention_has_taken_is_not_missed(case: DoctorCase) -> None:
    await busy(case.store)
    case.clock.advance(ms=1_000)
    if not isinstance(case.store, PostgresStore):
        await case.store.purge(PurgePolicy(task_ms=0, runtime_state_ms=0))
    assert (await case.report()).is_fine


@pytest.mark.contract("OWN-4")
async def test_it_says_which_node_has_which_lock(case: DoctorCase) -> None:
    await case.store.acquire_lock("retention", "node-a#1", 1_000)
    [held] = [one for one in (await case.report()).findings if one.subject == "locks"]
    assert (held.level, held.sentence.startswith("node-a has the lock retention")) == ("fine", True)
    case.clock.advance(ms=60_000)
    [free] = await case.found("locks")
    assert (free.level, "it has been free for 59 s" in free.sentence) == ("note", True)
