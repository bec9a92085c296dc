"""Dead letters: what cannot be handled is retried a few times, is then kept for an operator, and stops no other run."""

import asyncio
import sqlite3
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager, closing
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

import holdfast as hf
from holdfast.core import codec
from holdfast.core.dead_letters import defer
from holdfast.core.events import RunPaused
from holdfast.core.messages import Message
from holdfast.core.state import RunStatus, state_of
from holdfast.engine.turns.draft import TurnDraft, aside_turn
from holdfast.errors import Conflict, CorruptHistory, InvalidInput, NotFound, RunTerminal, StoreCorrupt
from holdfast.limits import ERROR_TEXT_CHARS, DeadLetterPolicy
from holdfast.run import RunHandle
from holdfast.settings import load_settings
from holdfast.store.port import LoadedRun, Turn
from holdfast.store.queries import DeadLetterQuery
from holdfast.testing import START, VirtualClock
from holdfast.testing.samples import SampleNode, message, wait
from tests.engine.harness import wait_for_event

SECOND = 1_000_000
POISON = replace(message("bad", "poison"), expected_version=99)  # of a version that the run never had
LATER = 61_000
DEFAULT = DeadLetterPolicy()


def waiting_app(**options: Any) -> tuple[hf.App, Any]:
    """Return an app whose workflow waits for a signal."""
    app = hf.App("letters", **options)

    @app.workflow
    async def wait() -> str:
        return await hf.wait_signal("go", str)

    return app, wait


class Scene:
    """A node on a store whose clock is moved by the test."""

    def __init__(self, app: hf.App, workflow: Any, store: Any, clock: VirtualClock) -> None:
        self.app = app
        self.workflow = workflow
        self.store = store
        self.clock = clock

    async def start(self, run_id: str) -> RunHandle[Any]:
        """Start a run and let it come to its wait."""
        run: RunHandle[Any] = await self.app.start(self.workflow, run_id=run_id)
        await wait_for_event(run, "SignalWaiting")
        return run

    async def until(self, condition: Callable[[], Awaitable[bool]]) -> None:
        """Let time pass until something is so."""
        async with asyncio.timeout(60):
            while not await condition():
                self.clock.advance(ms=LATER)
                self.store.wakeups.notify()
                await asyncio.sleep(0.01)

    async def is_dead(self) -> bool:
        """Return whether there is a dead letter."""
        return bool((await self.store.stats()).dead_letters)

    async def check_others(self) -> None:
        """Another run starts, goes on and ends."""
        run = await self.app.start(self.workflow)
        await run.signal("go", "fine")
        assert await run.result() == "fine"


@asynccontextmanager
async def scene(path: Path | None = None, **limits: Any) -> AsyncIterator[Scene]:
    """Open a scene; on a file, if one is given."""
    clock = VirtualClock()
    app, workflow = waiting_app(limits=hf.Limits(**limits))
    store: Any = hf.MemoryStore(clock)
    if path is not None:
        store = await hf.SqliteStore.open(path, clock=clock)
        await store.migrate()
    async with asyncio.timeout(60), app.node(store, options=hf.NodeOptions(cached_runs=0)):
        yield Scene(app, workflow, store, clock)
    await store.close()


def change(path: Path, statement: str) -> None:
    """Damage a file."""
    with closing(sqlite3.connect(path)) as db, db:
        db.execute(statement)


# --- how often


async def turns_of(given: Message, most: int, policy: DeadLetterPolicy = DEFAULT) -> list[Turn]:
    """Return the turns that a message leads to which is refused again and again."""
    store = hf.MemoryStore(VirtualClock())
    node = SampleNode(store)
    run = await node.start("bad", wait("go"))
    state = state_of("bad", await store.read_events("bad"))
    turns: list[Turn] = []
    while not turns or turns[-1].messages:
        draft = TurnDraft(state, run, START, "node-a", hf.Limits(poison_retries=most, dead_letters=policy))
        draft.handle(given)
        turns.append(draft.finish())
        assert len(turns) < 100
        given = turns[-1].messages[0] if turns[-1].messages else given
    assert all(turn.dead == () for turn in turns[:-1])
    return turns


@pytest.mark.contract("MSG-3", "MSG-4")
async def test_a_message_comes_again_later_and_later_and_is_a_dead_letter_after_ten_times() -> None:
    *turns, last = await turns_of(POISON, hf.Limits().poison_retries)
    delays = [(turn.messages[0].due_at or 0) - START for turn in turns]
    assert delays == [seconds * SECOND for seconds in (1, 2, 4, 8, 16, 32, 60, 60, 60, 60)]
    assert [turn.messages[0].attempts for turn in turns] == list(range(1, 11))
    [letter] = last.dead
    assert (last.consumed, last.messages) == (("poison",), ())
    assert (letter.run_id, letter.reason, letter.node, letter.died_at) == ("bad", "retries exhausted", "node-a", START)
    assert letter.detail == "Conflict: the message expects version 99, the run is at 3"
    assert replace(codec.decode(letter.envelope, Message), due_at=None) == POISON


@pytest.mark.contract("MSG-4")
@pytest.mark.parametrize("most", [1, 3])
async def test_how_often_can_be_set(most: int) -> None:
    assert len(await turns_of(POISON, most)) == most + 1


@pytest.mark.contract("MSG-4")
async def test_how_long_a_message_is_put_aside_can_be_set() -> None:
    policy = DeadLetterPolicy(first_ms=50, most_ms=300)
    *turns, _ = await turns_of(POISON, 5, policy)
    assert [(turn.messages[0].due_at or 0) - START for turn in turns] == [ms * 1_000 for ms in (50, 100, 200, 300, 300)]


@pytest.mark.contract("MSG-4")
async def test_a_message_that_was_put_aside_for_ever_is_put_aside_no_longer_than_at_most() -> None:
    left = defer(replace(POISON, attempts=10_000), hf.Limits(poison_retries=10**6), "undecodable", "", "n", START)
    assert isinstance(left, Message)
    assert left.due_at == START + 60 * SECOND


@pytest.mark.contract("MSG-4")
@pytest.mark.parametrize("pauses_run", [True, False])
async def test_whether_a_run_is_paused_when_a_message_dies_can_be_set(pauses_run: bool) -> None:
    policy = DeadLetterPolicy(pauses_run=pauses_run)
    async with scene(poison_retries=1, dead_letters=policy) as here:
        bad = await here.start("bad")
        await here.store.deliver([POISON])
        await here.until(here.is_dead)
        assert (await bad.snapshot()).status == (RunStatus.PAUSED if pauses_run else RunStatus.RUNNING)
        await bad.signal("go", "on")
        if pauses_run:
            paused = await wait_for_event(bad, "RunPaused")
            assert paused.data == RunPaused("a message of the run has become a dead letter")
            await bad.resume()
        assert await bad.result() == "on"
        await here.check_others()


@pytest.mark.contract("MSG-4")
@pytest.mark.parametrize(
    ("field", "value"),
    [("first_ms", 0), ("first_ms", "1"), ("most_ms", 999), ("most_ms", 2**50), ("pauses_run", 1)],
)
def test_a_policy_that_makes_no_sense_is_refused(field: str, value: Any) -> None:
    with pytest.raises(InvalidInput) as raised:
        DeadLetterPolicy(**{field: value})
    assert raised.value.details == {"field": field}


@pytest.mark.contract("MSG-4")
def test_the_policy_comes_from_the_settings_and_unknown_keys_are_refused() -> None:
    environ = {"HOLDFAST_LIMITS__DEAD_LETTERS__FIRST_MS": "5", "HOLDFAST_LIMITS__DEAD_LETTERS__PAUSES_RUN": "true"}
    policy = load_settings(environ).limits.dead_letters
    assert policy == DeadLetterPolicy(first_ms=5, pauses_run=True)
    with pytest.raises(InvalidInput):
        load_settings({"HOLDFAST_LIMITS__DEAD_LETTERS__LAST_MS": "5"})
    with pytest.raises(InvalidInput):
        load_settings({"HOLDFAST_LIMITS__DEAD_LETTERS__FIRST_MS": "0"})
    with pytest.raises(InvalidInput):
        hf.Limits(dead_letters=3)  # type: ignore[arg-type]


@pytest.mark.contract("MSG-3")
async def test_the_same_turn_always_makes_the_same_letter_and_its_text_is_bounded() -> None:
    node = SampleNode(hf.MemoryStore(VirtualClock()))
    await node.start("bad", wait("go"))
    await node.store.deliver([message("bad", "poison")])
    run = await node.load("bad")
    run = replace(run, messages=tuple(replace(given, attempts=10) for given in run.messages))
    damage = CorruptHistory("x" * ERROR_TEXT_CHARS)
    first, second = (aside_turn(run, START, "node-a", damage, hf.Limits()) for _ in range(2))
    assert first == second
    [letter] = first.dead
    assert (letter.reason, len(letter.detail)) == ("history irreparable", 500)


# --- poison of every kind, and nobody else is stopped


@pytest.mark.contract("MSG-3", "INV")
@pytest.mark.parametrize("is_file", [False, True])
async def test_a_message_that_is_always_refused_dies_and_can_be_requeued_or_dropped(
    is_file: bool, tmp_path: Path
) -> None:
    async with scene(tmp_path / "a.db" if is_file else None, poison_retries=2) as here:
        bad = await here.start("bad")
        await here.store.deliver([POISON, replace(POISON, signal_id="other")])
        await here.check_others()
        await here.until(here.is_dead)
        first, second = await here.app.dead_letters(run_id="bad")
        [page] = await here.app.dead_letters(after=first.record)
        assert page.record == second.record
        assert {letter.message().signal_id for letter in (first, second)} == {"poison", "other"}  # type: ignore[union-attr]
        await first.drop(actor="ann")
        await first.drop(actor="ann")
        with pytest.raises(Conflict):
            await first.requeue()
        await second.requeue(actor="ann")
        await here.until(here.is_dead)  # it is refused once more, as often as before
        [again] = await here.app.dead_letters(reason="retries exhausted")
        assert again.record.letter_id != second.record.letter_id
        assert len(await here.app.dead_letters(settled=True)) == 3
        await bad.signal("go", "at last")
        assert await bad.result() == "at last"
        with pytest.raises(RunTerminal):
            await again.requeue()
        assert await here.app.dead_letters(run_id="nowhere") == []


@pytest.mark.contract("MSG-3", "INV")
async def test_what_a_damaged_run_was_told_dies_and_is_handled_once_the_history_is_mended(tmp_path: Path) -> None:
    path = tmp_path / "a.db"
    async with scene(path, poison_retries=1) as here:
        bad = await here.start("bad")
        await here.store.deliver([message("bad", "poison", due_at=START + SECOND)])
        change(path, "UPDATE events SET data = replace(data, '{', '[') WHERE event_type = 'SignalWaiting'")
        await here.until(here.is_dead)
        await here.check_others()
        [letter] = await here.app.dead_letters()
        assert letter.record.reason == "history irreparable"
        assert "SignalWaiting" in letter.record.detail
        change(path, "UPDATE events SET data = replace(data, '[', '{') WHERE event_type = 'SignalWaiting'")
        await letter.requeue()
        await bad.signal("go", "mended")
        assert await bad.result() == "mended"


@pytest.mark.contract("MSG-3", "INV")
async def test_a_row_that_cannot_be_read_dies_at_once_and_the_run_goes_on(tmp_path: Path) -> None:
    path = tmp_path / "a.db"
    async with scene(path) as here:
        bad = await here.start("bad")
        await here.store.deliver([message("bad", "poison", due_at=START + SECOND)])
        change(path, "UPDATE messages SET message = '{oops'")
        await here.until(here.is_dead)
        await here.check_others()
        [letter] = await here.app.dead_letters(reason="undecodable")
        assert (letter.record.envelope, letter.message()) == (b"{oops", None)
        with pytest.raises(InvalidInput):
            await letter.requeue()
        await letter.drop()
        await bad.signal("go", "still here")
        assert await bad.result() == "still here"


@pytest.mark.contract("MSG-3", "INV")
async def test_who_waits_for_a_good_run_is_told_although_a_damaged_one_is_waited_for_too(tmp_path: Path) -> None:
    path = tmp_path / "a.db"
    async with scene(path) as here:
        bad, good = await here.start("bad"), await here.start("good")
        other, _ = waiting_app()
        async with other.node(here.store, options=hf.NodeOptions(takes_runs=False, safety_poll_s=0.05)):
            waiting = [asyncio.ensure_future(other.run(run.run_id).result()) for run in (bad, good)]
            await asyncio.sleep(0)
            await other.run("good").status()
            change(path, "UPDATE runs SET snapshot = '{oops' WHERE run_id = 'bad'")
            await good.signal("go", "told")
            assert await waiting[1] == "told"
            waiting[0].cancel()
        change(path, "UPDATE runs SET snapshot = NULL WHERE run_id = 'bad'")


class Torn(hf.MemoryStore):
    """A store in which a message is damaged after the run was claimed; the next claim gets over it."""

    claims_until_mended = 0

    async def claim(self, *args: Any) -> list[LoadedRun]:
        """Claim; the first time before the message is due."""
        claimed = await super().claim(*args)
        if claimed and self.claims_until_mended:
            self.claims_until_mended -= 1
            return [replace(run, messages=()) for run in claimed] if self.claims_until_mended else claimed
        return claimed

    async def load(self, run_ids: Sequence[str]) -> list[LoadedRun | None]:
        """Find the damage."""
        if self.claims_until_mended:
            raise StoreCorrupt("a row of the store makes no sense")
        return await super().load(run_ids)


@pytest.mark.contract("MSG-3", "INV")
async def test_damage_that_is_found_when_a_run_is_looked_at_again_stops_nobody() -> None:
    app = hf.App("torn")
    store, tries = Torn(), []

    @app.activity(retry=hf.Retry(max_attempts=3, initial_ms=200, jitter=0.0))
    async def work() -> int:
        tries.append(1)
        if len(tries) == 1:
            raise ConnectionError("no answer")
        return len(tries)

    @app.workflow
    async def order() -> int:
        return await work()

    async with asyncio.timeout(60), app.node(store, options=hf.NodeOptions(safety_poll_s=60)) as node:
        run = await app.start(order)
        await wait_for_event(run, "StepRetried")
        finished = node.completion_waiters.wait(run.run_id)
        store.claims_until_mended = 2
        await finished
        assert store.claims_until_mended == 0
        assert await run.result() == 2


# --- receipts


@pytest.mark.contract("SIG-12")
async def test_a_receipt_can_be_followed() -> None:
    async with scene() as here:
        run = await here.start("bad")
        unwanted = await run.signal("other", 1, signal_id="s-0")
        assert (await run.receipt(unwanted)).status == "accepted"
        wanted = await run.signal("go", "x", signal_id="s-1")
        received = await wait_for_event(run, "SignalReceived")
        consumed = await run.receipt(wanted)
        assert (consumed.status, consumed.consumed_at_event) == ("consumed", received.run_seq)
        await run.result()
        expired = await run.receipt(unwanted)
        assert (expired.status, expired.reason) == ("expired", "the run was COMPLETED before a wait took it")
        with pytest.raises(NotFound):
            await run.receipt(replace(unwanted, signal_storage_key="x_y.json"))
        assert await here.store.find(DeadLetterQuery()) == []
