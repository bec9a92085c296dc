"""The store suite, outcomes by token: one verdict for each, and no turn that misses an accepted outcome."""

import asyncio
from collections.abc import Sequence

import pytest
from msgspec.structs import replace

from holdfast.core import codec
from holdfast.core.commands import Command
from holdfast.core.messages import OUTCOME_SIGNAL, ActivityOutcome, SignalRequest
from holdfast.errors import Conflict, InvalidInput, NotFound, RunTerminal
from holdfast.limits import MAILBOX_SIGNALS
from holdfast.store.port import Accepted, CommitConflict, Committed, Duplicate, Refused, Store
from holdfast.testing import START, VirtualClock
from holdfast.testing.samples import SampleNode, complete, marker, new_run, read_mailbox, signal, wait
from holdfast.testing.store_suite.base import MINUTE_MS, SuiteBase, accept, check_deliver_refused, deliver_one, kinds

KEY = "ab" * 32


def outcome(version: int, result: object = "ann", step_id: str = "sign", **changes: object) -> SignalRequest:
    """Return the outcome of the first attempt of a step, for a run at this version."""
    payload = ActivityOutcome(logical_attempt_id=1, engine_attempt_id=1, result=codec.encode(result))
    request = SignalRequest(
        run_id="run-1",
        name=OUTCOME_SIGNAL,
        payload=codec.encode(payload),
        signal_id=f"outcome of {step_id}",
        step_id=step_id,
        expected_version=version,
    )
    return replace(request, **changes)


def accepted(answers: Sequence[object]) -> int:
    """Count the accepted ones."""
    return sum(isinstance(answer, Accepted) for answer in answers)


class OutcomeSuite(SuiteBase):
    """Signals with conditions, and keys."""

    async def _begun(self, store: Store, node: SampleNode) -> int:
        """Create and claim a run, and return its version."""
        await store.create([new_run("run-1")])
        await node.renew()
        [loaded] = await store.claim(node.name, 10)
        await node.commit(await node.turn(loaded, marker("begun")))
        return (await node.load("run-1")).head.version

    async def _record(self, node: SampleNode, command: Command) -> None:
        """Commit a turn that has seen the outcomes and records them, if the run has not ended."""
        loaded = await node.load("run-1")
        reported = [kept.inbox_seq for kept in loaded.signals if kept.name == OUTCOME_SIGNAL]
        if reported:
            turn = await node.turn(loaded, command)
            answer = await node.commit(replace(turn, received=tuple((seq, 0) for seq in reported)))
            assert isinstance(answer, Committed), answer

    # --- one verdict

    @pytest.mark.contract("ACT-1")
    async def test_the_first_outcome_stands_and_a_later_one_conflicts(self, store: Store, node: SampleNode) -> None:
        """The same outcome again is a duplicate, before and after it is recorded, and after the run has ended."""
        version = await self._begun(store, node)
        first = await accept(store, outcome(version))
        for _ in range(2):
            assert await deliver_one(store, outcome(version)) == Duplicate(first)
            assert await deliver_one(store, outcome(99)) == Duplicate(first)
            assert await deliver_one(store, outcome(version, accept_before=0)) == Duplicate(first)
            await check_deliver_refused(store, outcome(version, "bob"), Conflict)
            await self._record(node, complete())

    @pytest.mark.contract("ACT-1", "SIG-8")
    async def test_an_outcome_is_accepted_at_its_version_and_before_its_time_is_over(
        self, store: Store, node: SampleNode, clock: VirtualClock
    ) -> None:
        """Every refusal names the condition that is not met, and leaves no trace."""
        version = await self._begun(store, node)
        late = outcome(version, accept_before=START)
        assert "expected_version" not in (await check_deliver_refused(store, late, Conflict)).details
        for other in (version - 1, version + 1):
            await check_deliver_refused(store, outcome(other), Conflict, expected_version=other, version=version)
        await accept(store, outcome(version, accept_before=START + 1))
        clock.advance(us=1)
        await check_deliver_refused(store, outcome(version, step_id="other", accept_before=START + 1), Conflict)

    @pytest.mark.contract("ACT-1")
    async def test_a_step_has_one_outcome_at_a_time_whichever_attempt_it_is_of(
        self, store: Store, node: SampleNode
    ) -> None:
        """Other steps, and signals with other names for the step, do not interfere."""
        version = await self._begun(store, node)
        await accept(store, signal("run-1", "go", step_id="sign"))
        await accept(store, outcome(version))
        second = outcome(version, signal_id="of another attempt")
        await check_deliver_refused(store, second, Conflict, step_id="sign")
        await accept(store, outcome(version, step_id="other"))

    @pytest.mark.contract("ACT-1", "API-2")
    async def test_an_outcome_to_no_run_or_one_that_has_ended_is_refused(self, store: Store, node: SampleNode) -> None:
        """It is refused like every signal, whatever its conditions."""
        await check_deliver_refused(store, outcome(1), NotFound)
        version = await self._begun(store, node)
        await node.commit(await node.turn(await node.load("run-1"), complete()))
        await check_deliver_refused(store, outcome(version), RunTerminal)
        await check_deliver_refused(store, outcome(version, accept_before=0), RunTerminal)
        for unfit in ("1", 2**63):
            await check_deliver_refused(store, outcome(version, expected_version=unfit), InvalidInput)
            await check_deliver_refused(store, outcome(version, accept_before=unfit), InvalidInput)

    @pytest.mark.contract("ACT-1")
    async def test_conditions_hold_within_a_batch(self, store: Store, node: SampleNode) -> None:
        """They are checked in the order of the batch, and do not affect other items."""
        version = await self._begun(store, node)
        batch = [
            signal("run-1", "go"),
            outcome(version),
            outcome(version, "bob", signal_id="later"),
            outcome(version + 5, step_id="other"),
            outcome(version),
            signal("run-1", "go"),
            outcome(version, step_id="third"),
        ]
        answers = await store.deliver(batch)
        assert kinds(answers) == ["Accepted", "Accepted", "Conflict", "Conflict", "Duplicate", "Accepted", "Accepted"]
        assert [kept.inbox_seq for kept in await read_mailbox(store, "run-1")] == [1, 2, 3, 4]

    @pytest.mark.contract("ACT-1")
    async def test_of_simultaneous_outcomes_one_is_accepted(self, store: Store, peer: Store, node: SampleNode) -> None:
        """This holds whichever process delivers them, and whichever attempts they belong to."""
        version = await self._begun(store, node)
        for step in range(5):
            batches = [
                (store, peer)[number % 2].deliver(
                    [outcome(version, number, f"step-{step}", signal_id=f"{step} attempt {number % 3}")]
                )
                for number in range(8)
            ]
            answers = [answer for [answer] in await asyncio.gather(*batches)]
            assert accepted(answers) == 1
            assert all(isinstance(answer, Accepted | Refused) for answer in answers)

    # --- no turn without the outcome

    @pytest.mark.contract("ACT-1", "OWN-1")
    async def test_a_turn_that_has_not_seen_an_outcome_is_a_conflict(self, store: Store, node: SampleNode) -> None:
        """This holds for every turn, even the run's last one; a turn that has seen the outcome may close the step."""
        version = await self._begun(store, node)
        loaded = await node.load("run-1")
        turns = [await node.turn(loaded, command) for command in (complete(), wait(), marker("more"))]
        turns.append(await node.turn(loaded, release=True))
        await accept(store, signal("run-1", "go"))
        await accept(store, outcome(version))
        for turn in turns:
            assert await store.commit([turn]) == [CommitConflict("unseen", version, turn.epoch)]
        seen = await node.load("run-1")
        assert seen.head.lease_epoch == loaded.head.lease_epoch
        assert [kept.name for kept in seen.signals] == ["go", OUTCOME_SIGNAL]
        await self._record(node, complete())

    @pytest.mark.contract("ACT-1")
    async def test_other_signals_and_outcomes_that_were_seen_are_no_conflict(
        self, store: Store, node: SampleNode
    ) -> None:
        """An outcome that a turn has seen and not consumed stays, and later turns continue."""
        version = await self._begun(store, node)
        await accept(store, outcome(version))
        loaded = await node.load("run-1")
        await accept(store, signal("run-1", "go"))
        assert isinstance(await node.commit(await node.turn(loaded, marker("more"))), Committed)
        loaded = await node.load("run-1")
        await accept(store, signal("run-1", "go"))
        assert isinstance(await node.commit(await node.turn(loaded, complete())), Committed)

    @pytest.mark.contract("ACT-1", "OWN-1")
    async def test_one_conflict_in_a_batch_harms_no_other_turn(self, store: Store, node: SampleNode) -> None:
        """The same call commits the others, even where the store commits them all together."""
        version = await self._begun(store, node)
        await store.create([new_run(f"run-{number}") for number in range(2, 6)])
        others = [run for run in await store.claim(node.name, 10) if run.head.run_id != "run-1"]
        turns = [await node.turn(run, marker("one")) for run in (await node.load("run-1"), *others)]
        await accept(store, outcome(version))
        answers = await store.commit(turns)
        assert answers[0] == CommitConflict("unseen", version, turns[0].epoch)
        assert all(isinstance(answer, Committed) for answer in answers[1:])
        assert len(answers) == 5

    @pytest.mark.contract("ACT-1", "OWN-1")
    async def test_an_outcome_and_a_turn_race_and_one_of_them_wins(
        self, store: Store, peer: Store, node: SampleNode
    ) -> None:
        """Both never win: an outcome is accepted at a version, and no turn follows that version without it."""
        await self._begun(store, node)
        for number in range(10):
            loaded = await node.load("run-1")
            turn = await node.turn(loaded, marker(f"turn-{number}"))
            report = outcome(loaded.head.version, step_id=f"step-{number}")
            [[answer], [committed]] = await asyncio.gather(peer.deliver([report]), store.commit([turn]))
            assert isinstance(answer, Accepted) != isinstance(committed, Committed), (answer, committed)
            if isinstance(committed, Committed):
                assert isinstance(answer, Refused)
                continue
            await self._record(node, marker(f"seen-{number}"))

    @pytest.mark.contract("ACT-1")
    async def test_outcomes_are_loaded_however_full_the_mailbox_is(
        self, store: Store, node: SampleNode, clock: VirtualClock
    ) -> None:
        """A load limits other signals only: a turn sees every outcome that it must not commit without."""
        version = await self._begun(store, node)
        for _ in range(MAILBOX_SIGNALS + 1):
            clock.advance(ms=MINUTE_MS)
            await accept(store, signal("run-1", "noise"))
        for number in range(MAILBOX_SIGNALS + 2):
            await accept(store, outcome(version, step_id=f"step-{number}"))
        loaded = await node.load("run-1")
        seen = [kept.step_id for kept in loaded.signals if kept.name == OUTCOME_SIGNAL]
        assert seen == [f"step-{number}" for number in range(MAILBOX_SIGNALS + 2)]

    # --- keys

    @pytest.mark.contract("API-4", "STO-1")
    async def test_a_key_is_made_once_and_is_the_same_for_everybody(self, store: Store, peer: Store) -> None:
        """If several processes propose a key, the first one is kept; each name has its own key."""
        keys = [f"{number:064x}" for number in range(8)]
        asked = [(store, peer)[number % 2].put_key("completion", key) for number, key in enumerate(keys)]
        [kept] = set(await asyncio.gather(*asked))
        assert kept in keys
        assert await store.put_key("other", KEY) == KEY
        assert await peer.get_key("other") == KEY
        assert await peer.get_key("unheard of") is None
        assert await peer.put_key("completion", KEY) == kept

    @pytest.mark.contract("API-2")
    async def test_a_malformed_key_is_refused(self, store: Store) -> None:
        """Nothing is stored."""
        for key in ("", "ab", "g" * 64, "AB" * 32, KEY + "0", 7, None):
            with pytest.raises(InvalidInput):
                await store.put_key("completion", key)  # type: ignore[arg-type]
        for name in ("", 7, "x" * 300):
            with pytest.raises(InvalidInput):
                await store.put_key(name, KEY)  # type: ignore[arg-type]
        assert await store.put_key("completion", KEY) == KEY
