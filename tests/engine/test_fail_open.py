"""Failing open: activities begin while their start is over the budget, in every order in which it can end."""

import asyncio
import sys
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

import holdfast as hf
from holdfast.engine.turns.fail_open import OVER_BUDGET, Begun, Journal
from holdfast.errors import ActivityFailed, InvalidInput, RunFailed, StoreUnavailable
from holdfast.store.port import CommitConflict, Committed, Store, Turn
from holdfast.store.proxy import StoreProxy
from tests.engine.harness import EngineVariant

BUDGET_MS = 100
Answers = list[Committed | CommitConflict]


class SlowStore(StoreProxy):
    """A store whose commits wait for a gate; one may be lost behind it, before it is done or after."""

    def __init__(self, store: Store) -> None:
        super().__init__(store)
        self.gate = asyncio.Event()
        self.gate.set()
        self.holds: Callable[[Sequence[Turn]], bool] = lambda turns: True
        self.lose: str = ""
        """What becomes of the next commit that was held: "before" it is done it fails, or "after"."""
        self.renews = True
        self._is_held = asyncio.Event()

    async def hold_beyond(self, milliseconds: int) -> None:
        """Wait until a commit is held, and for so long after that."""
        await self._is_held.wait()
        await asyncio.sleep(milliseconds / 1_000)

    async def commit(self, turns: Sequence[Turn]) -> Answers:
        if self.gate.is_set() or not self.holds(turns):
            return await self._store.commit(turns)
        self._is_held.set()
        await self.gate.wait()
        lose, self.lose = self.lose, ""
        if lose != "before":
            answers = await self._store.commit(turns)
        if lose:
            raise StoreUnavailable("the connection is lost")
        return answers

    async def renew(self, *given: Any, **named: Any) -> Any:
        if not self.renews:
            raise StoreUnavailable("the connection is lost")
        return await self._store.renew(*given, **named)


class Shop:
    """An app whose activity notes when it is called, and its workflows."""

    def __init__(self) -> None:
        self.app = hf.App("shop")
        self.calls: list[int] = []
        self.ended = 0
        self.verified = 0
        self.may_end = asyncio.Event()
        self.may_end.set()

        @self.app.activity
        async def charge(amount: int) -> int:
            self.calls.append(hf.activity_context().attempt)
            hf.activity_context().heartbeat({"amount": amount})
            await self.may_end.wait()
            self.ended += 1
            return amount

        @self.app.workflow
        async def order(amount: int) -> int:
            return await charge(amount)

        @self.app.workflow
        async def listens(amount: int) -> int:
            waiting = asyncio.ensure_future(hf.wait_signal("go"))
            amount = await charge(amount)
            waiting.cancel()
            return amount

        async def find(amount: int) -> hf.Completed:
            self.verified += 1
            return hf.Completed(amount)

        @self.app.activity(idempotency_key=lambda amount: f"charge-{amount}", verify=find)
        async def charge_once(amount: int) -> int:
            self.calls.append(hf.activity_context().attempt)
            return amount

        @self.app.workflow
        async def order_once(amount: int) -> int:
            return await charge_once(amount)

        @self.app.workflow
        async def order_at_most_once(amount: int) -> str:
            try:
                return str(await charge.options(retry=hf.Retry(max_attempts=1))(amount))
            except ActivityFailed as problem:
                return str(problem.info.code)

        self.order, self.listens, self.order_once = order, listens, order_once
        self.order_at_most_once = order_at_most_once


@asynccontextmanager
async def nodes(variant: EngineVariant, shop: Shop, folder: Path, store: Store, **options: Any) -> AsyncIterator[Any]:
    """Run a node that fails open, with a name."""
    chosen = hf.NodeOptions(
        cached_runs=variant.cached_runs,
        write_latency_budget_ms=BUDGET_MS,
        fail_open=str(folder),
        drain_s=0.5,
        **options,
    )
    async with asyncio.timeout(60), shop.app.node(store, name="n-1", options=chosen) as node:
        yield node


async def created(shop: Shop, store: Store, workflow: Any = None) -> str:
    """Create a run by a process that takes none, so that a node commits its first turn."""
    async with shop.app.connect(store):
        return (await shop.app.start(workflow or shop.order, 5)).run_id


async def until(condition: Callable[[], bool]) -> None:
    """Wait until something holds."""
    async with asyncio.timeout(30):
        while not condition():  # noqa: ASYNC110
            await asyncio.sleep(0.002)


def has_completed(turns: Sequence[Turn]) -> bool:
    """Return whether a step is completed by one of the turns."""
    return any(event.event_type == "StepCompleted" for turn in turns for event in turn.events)


async def result_over_budget(shop: Shop, slow: SlowStore, workflow: Any, lose: str) -> Any:
    """Start a run whose activity ends, and let the commit of its result go on when it is over the budget."""
    slow.holds = has_completed
    slow.gate.clear()
    slow.lose = lose
    run = await shop.app.start(workflow, 5)
    await slow.hold_beyond(2 * BUDGET_MS)
    slow.gate.set()
    return run


async def types_of(shop: Shop, run_id: str) -> list[str]:
    """Return the types of a run's events."""
    return [event.event_type for event in await shop.app.run(run_id).events()]


@pytest.mark.contract("LAT-1")
async def test_a_step_begins_over_the_budget_and_its_start_is_recorded_before_its_result(
    variant: EngineVariant, tmp_path: Path
) -> None:
    shop, folder = Shop(), tmp_path / "journal"
    async with variant.opened() as inner:
        slow = SlowStore(inner)
        run_id = await created(shop, inner)
        slow.gate.clear()
        async with nodes(variant, shop, folder, slow):
            await until(lambda: shop.calls == [1])
            [journal] = folder.iterdir()
            assert f'"run_id":"{run_id}"' in journal.read_text()
            await until(lambda: shop.ended == 1)  # and its result waits
            assert (await inner.load([run_id]))[0].head.version == 1  # type: ignore[union-attr]
            slow.gate.set()
            assert await shop.app.run(run_id).result() == 5
            assert (await types_of(shop, run_id))[-4:] == ["RunStarted", "StepStarted", "StepCompleted", "RunCompleted"]
        assert list(folder.iterdir()) == []
        assert shop.calls == [1]


@pytest.mark.contract("LAT-1")
async def test_failing_open_is_off_by_default(variant: EngineVariant) -> None:
    shop = Shop()
    async with variant.opened() as inner:
        slow = SlowStore(inner)
        run_id = await created(shop, inner)
        slow.gate.clear()
        async with variant.node(shop.app, slow, write_latency_budget_ms=10):
            await slow.hold_beyond(200)
            assert shop.calls == []
            slow.gate.set()
            assert await shop.app.run(run_id).result() == 5


@pytest.mark.contract("LAT-1")
async def test_a_turn_that_does_more_than_start_steps_waits(variant: EngineVariant, tmp_path: Path) -> None:
    shop = Shop()
    async with variant.opened() as inner:
        slow = SlowStore(inner)
        run_id = await created(shop, inner, shop.listens)
        slow.gate.clear()
        async with nodes(variant, shop, tmp_path, slow):
            await slow.hold_beyond(4 * BUDGET_MS)
            assert shop.calls == []
            slow.gate.set()
            assert await shop.app.run(run_id).result() == 5


@pytest.mark.contract("LAT-1")
async def test_nothing_begins_early_when_the_lease_is_not_certain_or_the_journal_cannot_be_written(
    variant: EngineVariant, tmp_path: Path
) -> None:
    (tmp_path / "file").write_text("in the way")
    for folder, renews in ((tmp_path / "journal", False), (tmp_path / "file", True)):
        shop = Shop()
        async with variant.opened() as inner:
            slow = SlowStore(inner)
            slow.gate.clear()
            async with nodes(variant, shop, folder, slow, lease_ms=100 if not renews else 10_000):
                slow.renews = renews
                await asyncio.sleep(0.12)
                run_id = await created(shop, inner)
                await asyncio.sleep(0.5)
                assert shop.calls == []
                slow.renews = True
                slow.gate.set()
                assert await shop.app.run(run_id).result() == 5
            await inner.purge(hf.PurgePolicy(run_ids=(run_id,)))


@pytest.mark.contract("LAT-1")
@pytest.mark.parametrize("lose", ["before", "after"])
async def test_an_early_start_is_committed_however_often_the_store_fails(
    variant: EngineVariant, tmp_path: Path, lose: str
) -> None:
    shop = Shop()
    async with variant.opened() as inner:
        slow = SlowStore(inner)
        run_id = await created(shop, inner)
        slow.gate.clear()
        slow.lose = lose
        async with nodes(variant, shop, tmp_path, slow):
            await until(lambda: shop.calls == [1])
            slow.gate.set()
            assert await shop.app.run(run_id).result() == 5
            assert shop.calls == [1]
            assert (await types_of(shop, run_id)).count("StepStarted") == 1


@pytest.mark.contract("LAT-1", "ACT-1")
async def test_a_node_that_comes_back_records_that_an_attempt_was_begun_and_lost(
    variant: EngineVariant, tmp_path: Path
) -> None:
    shop = Shop()
    shop.may_end.clear()
    async with variant.opened() as inner:
        slow = SlowStore(inner)
        run_id = await created(shop, inner)
        slow.gate.clear()
        slow.lose = "before"
        async with nodes(variant, shop, tmp_path, slow):
            await until(lambda: shop.calls == [1])
            [journal] = tmp_path.glob("*.journal")
            kept = journal.read_bytes()
            # It ends here without its commit, as by a crash.
        journal.write_bytes(kept + b'{"run_id":"torn')
        shop.may_end.set()
        assert (await inner.load([run_id]))[0].head.version == 1  # type: ignore[union-attr]
        async with nodes(variant, shop, tmp_path, inner):
            assert await shop.app.run(run_id).result() == 5
            assert (await types_of(shop, run_id))[-5:] == [
                "RunStarted",
                "StepStarted",
                "StepRetried",
                "StepCompleted",
                "RunCompleted",
            ]
        assert shop.calls == [1, 2]
        assert list(tmp_path.glob("*.journal")) == []


@pytest.mark.contract("LAT-1", "ACT-1")
async def test_a_step_that_has_no_attempt_left_after_an_early_start_fails_in_the_workflow(
    variant: EngineVariant, tmp_path: Path
) -> None:
    """The program gets the failure in the turn that records the start: the run does not wait for it for ever."""
    shop = Shop()
    async with variant.opened() as inner:
        run_id = await created(shop, inner, shop.order_at_most_once)
        Journal(tmp_path, "n-1#dead").append([Begun(run_id, 1, ("charge",))])
        async with nodes(variant, shop, tmp_path, inner):
            assert await shop.app.run(run_id).result() == "NodeLost"
            assert (await types_of(shop, run_id))[-4:] == ["RunStarted", "StepStarted", "StepFailed", "RunCompleted"]
        assert shop.calls == []


@pytest.mark.contract("LAT-1")
async def test_a_journal_about_a_start_that_the_store_has_is_forgotten(variant: EngineVariant, tmp_path: Path) -> None:
    shop = Shop()
    async with variant.opened() as inner:
        async with nodes(variant, shop, tmp_path, inner):
            run_id = (await shop.app.start(shop.order, 5)).run_id
            assert await shop.app.run(run_id).result() == 5
        Journal(tmp_path, "n-1#dead").append([Begun(run_id, 1, ("charge",)), Begun("gone", 1, ("charge",))])
        Journal(tmp_path, "n-2#other").append([Begun(run_id, 1, ("charge",))])
        async with nodes(variant, shop, tmp_path, inner):
            assert [path.name for path in tmp_path.glob("*.journal")] == ["n-2#other.journal"]
        assert shop.calls == [1]


@pytest.mark.contract("LAT-1")
async def test_a_result_whose_commit_fails_beyond_the_budget_fails_its_step(
    variant: EngineVariant, tmp_path: Path
) -> None:
    shop = Shop()
    async with variant.opened() as inner:
        slow = SlowStore(inner)
        async with nodes(variant, shop, tmp_path, slow):
            run = await result_over_budget(shop, slow, shop.order, "before")
            with pytest.raises(
                RunFailed, match=f"{OVER_BUDGET}: the result of activity 'charge' could not be recorded"
            ):
                await run.result()
        assert shop.calls == [1]


@pytest.mark.contract("LAT-1", "ACT-4")
async def test_a_result_of_a_keyed_step_beyond_the_budget_is_not_known_and_is_verified(
    variant: EngineVariant, tmp_path: Path
) -> None:
    shop = Shop()
    async with variant.opened() as inner:
        slow = SlowStore(inner)
        async with nodes(variant, shop, tmp_path, slow):
            run = await result_over_budget(shop, slow, shop.order_once, "before")
            assert await run.result() == 5
        assert (shop.calls, shop.verified) == ([1], 1)


@pytest.mark.contract("LAT-1", "ACT-3")
async def test_a_keyed_step_never_begins_before_its_record_is_durable(variant: EngineVariant, tmp_path: Path) -> None:
    shop = Shop()
    async with variant.opened() as inner:
        slow = SlowStore(inner)
        run_id = await created(shop, inner, shop.order_once)
        slow.gate.clear()
        async with nodes(variant, shop, tmp_path, slow):
            await slow.hold_beyond(4 * BUDGET_MS)
            assert shop.calls == []
            slow.gate.set()
            assert await shop.app.run(run_id).result() == 5
        assert (shop.calls, shop.verified) == ([1], 0)


@pytest.mark.contract("LAT-1")
@pytest.mark.parametrize("lose", ["", "after"])
async def test_a_commit_that_succeeds_late_wins_over_the_failure(
    variant: EngineVariant, tmp_path: Path, lose: str
) -> None:
    shop = Shop()
    async with variant.opened() as inner:
        slow = SlowStore(inner)
        async with nodes(variant, shop, tmp_path, slow):
            run = await result_over_budget(shop, slow, shop.order, lose)
            assert await run.result() == 5
            assert (await types_of(shop, run.run_id)).count("StepCompleted") == 1


PROCESS = """
import asyncio, sys
from tests.engine.harness import EngineVariant
from tests.engine.test_fail_open import Shop, SlowStore, nodes
from pathlib import Path

async def main(address, folder):
    shop = Shop()
    shop.may_end.clear()
    variant = EngineVariant(address, 5_000)
    async with variant.opened() as inner:
        slow = SlowStore(inner)
        slow.gate.clear()
        async with nodes(variant, shop, Path(folder), slow, lease_ms=1_000):
            while not shop.calls:
                await asyncio.sleep(0.01)
            print("begun", flush=True)
            await asyncio.Event().wait()

asyncio.run(main(*sys.argv[1:]))
"""


@pytest.mark.process
@pytest.mark.contract("LAT-1", "ACT-1")
async def test_a_process_that_is_killed_after_it_began_a_step_early_finds_it_again(tmp_path: Path) -> None:
    shop, variant = Shop(), EngineVariant(f"sqlite:///{tmp_path}/shop.db", 5_000)
    folder = tmp_path / "journal"
    async with variant.opened() as inner:
        run_id = await created(shop, inner)
    command = [sys.executable, "-c", PROCESS, variant.store, str(folder)]
    process = await asyncio.create_subprocess_exec(*command, stdout=asyncio.subprocess.PIPE)
    assert process.stdout is not None
    async with asyncio.timeout(60):
        assert await process.stdout.readline() == b"begun\n"
    process.kill()
    await process.wait()
    assert len(list(folder.iterdir())) == 1
    async with variant.opened() as inner, nodes(variant, shop, folder, inner):
        assert await shop.app.run(run_id).result() == 5
        assert (await types_of(shop, run_id)).count("StepRetried") == 1
    assert shop.calls == [2]
    assert list(folder.iterdir()) == []


@pytest.mark.postgres
@pytest.mark.contract("LAT-1")
async def test_on_postgresql_starts_begin_early_and_late_commits_win(postgres_url: str, tmp_path: Path) -> None:
    variant = EngineVariant(postgres_url, 5_000)
    await test_a_step_begins_over_the_budget_and_its_start_is_recorded_before_its_result(variant, tmp_path / "early")
    await test_a_commit_that_succeeds_late_wins_over_the_failure(variant, tmp_path / "late", "after")
    await test_a_result_whose_commit_fails_beyond_the_budget_fails_its_step(variant, tmp_path / "failed")
    await test_a_node_that_comes_back_records_that_an_attempt_was_begun_and_lost(variant, tmp_path)


async def test_a_journal_that_cannot_be_read_keeps_the_node_from_starting(tmp_path: Path) -> None:
    (tmp_path / "n-1#dead.journal").mkdir()
    with pytest.raises(InvalidInput, match="cannot be read"):
        async with hf.App("shop").node("memory://", name="n-1", options=hf.NodeOptions(fail_open=str(tmp_path))):
            pass


async def test_a_node_that_fails_open_has_a_name(tmp_path: Path) -> None:
    with pytest.raises(InvalidInput, match="needs a name"):
        async with hf.App("shop").node("memory://", options=hf.NodeOptions(fail_open=str(tmp_path))):
            pass
    with pytest.raises(InvalidInput):
        hf.NodeOptions(fail_open=True)  # type: ignore[arg-type]
