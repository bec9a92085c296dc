"""The store suite, dead letters: kept with the turn that gave up, found by page, settled once."""

from typing import Any

import pytest
from msgspec.structs import replace

from holdfast.core.dead_letters import Settled
from holdfast.errors import CallerError, Conflict, InvalidInput, NotFound, RunTerminal
from holdfast.store.port import CommitConflict, Committed, PurgePolicy, Refused, Store
from holdfast.store.queries import DeadLetterQuery
from holdfast.testing import START, VirtualClock
from holdfast.testing.samples import SampleNode, complete, dead_letter, message, wait
from holdfast.testing.store_suite.base import SuiteBase, unchanged


async def let_die(node: SampleNode, run_id: str = "run-1", *names: str) -> list[str]:
    """Start a run and commit a turn that dead-letters messages; return the ids of the letters."""
    await node.start(run_id, wait("go"))
    letters = tuple(dead_letter(run_id, name, died_at=START + number) for number, name in enumerate(names))
    turn = await node.turn(await node.load(run_id))
    assert isinstance(await node.commit(replace(turn, dead=letters)), Committed)
    return [letter.letter_id for letter in letters]


def error_of(answer: object) -> CallerError:
    """Return the reason of a refusal."""
    assert isinstance(answer, Refused), answer
    return answer.error


class DeadLetterSuite(SuiteBase):
    """A message that could not be handled is kept until an operator settles it."""

    @pytest.mark.contract("MSG-3")
    async def test_a_turn_gives_up_a_message_and_keeps_its_letter(self, store: Store, node: SampleNode) -> None:
        """One commit removes the message from the inbox and keeps it as a letter."""
        await node.start("run-1", wait("go"))
        await store.deliver([message("run-1", "poison")])
        turn = await node.turn(await node.load("run-1"))
        assert turn.consumed == ("poison",)
        await node.commit(replace(turn, dead=(dead_letter(),)))
        assert await store.find(DeadLetterQuery()) == [dead_letter()]
        assert (await node.load("run-1")).messages == ()
        assert (await store.stats()).dead_letters == 1

    @pytest.mark.contract("MSG-3", "OWN-1")
    async def test_a_turn_with_a_conflict_writes_no_dead_letter(self, store: Store, node: SampleNode) -> None:
        """Neither does a turn whose letters cannot be kept."""
        await node.start("run-1", wait("go"))
        turn = replace(await node.turn(await node.load("run-1")), dead=(dead_letter(),))
        bad = [
            replace(turn, expected_version=7),
            replace(turn, epoch=7),
            replace(turn, dead=(dead_letter("run-2"),)),
            replace(turn, dead=(replace(dead_letter(), detail="\ud800"),)),
            replace(turn, dead=(replace(dead_letter(), reason="boredom"),)),
            replace(turn, dead=(replace(dead_letter(), envelope="text"),)),
            replace(turn, dead=(replace(dead_letter(), died_at=2**70),)),
        ]
        async with unchanged(store):
            for unfit in bad:
                assert isinstance(await node.commit(unfit), CommitConflict)

    @pytest.mark.contract("MSG-3", "MSG-2")
    async def test_committing_the_same_turn_again_leaves_one_letter(self, store: Store, node: SampleNode) -> None:
        """Its id is derived from the message and the time."""
        await node.create("run-1")
        turn = replace(await node.turn(await node.load("run-1"), wait("go")), dead=(dead_letter(),))
        assert await node.commit(turn) == await node.commit(turn)
        assert await store.find(DeadLetterQuery()) == [dead_letter()]

    @pytest.mark.contract("MSG-3")
    async def test_letters_are_found_by_run_and_reason_and_page(self, store: Store, node: SampleNode) -> None:
        """The oldest come first."""
        ids = await let_die(node, "run-1", "a", "b", "c")
        others = await let_die(node, "run-2", "d")
        everything = await store.find(DeadLetterQuery())
        assert {letter.letter_id for letter in everything} == {*ids, *others}
        assert everything == sorted(everything, key=lambda letter: (letter.died_at, letter.letter_id))
        of_run = await store.find(DeadLetterQuery(run_id="run-1"))
        assert [letter.letter_id for letter in of_run] == ids
        assert await store.find(DeadLetterQuery(run_id="nowhere")) == []
        assert len(await store.find(DeadLetterQuery(reason="retries exhausted"))) == 4
        assert await store.find(DeadLetterQuery(reason="undecodable")) == []
        [one] = await store.find(DeadLetterQuery(letter_id=ids[1]))
        assert one == of_run[1]
        first = await store.find(DeadLetterQuery(limit=3))
        last = (first[-1].died_at, first[-1].letter_id)
        assert first + await store.find(DeadLetterQuery(after=last)) == everything

    @pytest.mark.contract("MSG-3")
    async def test_a_letter_that_is_requeued_is_due_now_as_if_for_the_first_time(
        self, store: Store, clock: VirtualClock, node: SampleNode
    ) -> None:
        """It also wakes its run. A repeated request changes nothing, even after the message was handled."""
        [letter_id] = await let_die(node, "run-1", "poison")
        clock.advance(ms=500)
        assert await store.settle_dead_letters([letter_id], "requeue", "ann") == [Settled(letter_id, "requeue")]
        [run] = await node.claim()
        assert run.messages == (message("run-1", "poison"),)
        assert run.messages[0].attempts == 0
        await node.step("run-1")
        async with unchanged(store):
            assert await store.settle_dead_letters([letter_id], "requeue", "bob") == [Settled(letter_id, "requeue")]
        assert await store.find(DeadLetterQuery()) == []
        [letter] = await store.find(DeadLetterQuery(settled=True))
        assert (letter.settled, letter.settled_by, letter.settled_at) == ("requeue", "ann", START + 500_000)
        assert (await store.stats()).dead_letters == 0

    @pytest.mark.contract("MSG-3")
    async def test_a_message_of_the_same_id_that_waits_by_now_stays(self, store: Store, node: SampleNode) -> None:
        """There are never two messages with the same id."""
        [letter_id] = await let_die(node, "run-1", "poison")
        newer = message("run-1", "poison", occurred_at=START + 7)
        await store.deliver([newer])
        assert await store.settle_dead_letters([letter_id], "requeue") == [Settled(letter_id, "requeue")]
        assert (await node.load("run-1")).messages == (newer,)

    @pytest.mark.contract("MSG-3", "WF-7")
    async def test_each_letter_is_answered_by_itself(self, store: Store, node: SampleNode) -> None:
        """The cases: unknown, settled otherwise, unreadable, of a finished run. A refusal does not affect others."""
        kept, dropped = await let_die(node, "run-1", "a", "b")
        [late] = await let_die(node, "run-2", "c")
        await node.step("run-2", complete())
        unreadable = replace(dead_letter("run-1", "d"), envelope=b"\xff{", reason="undecodable")
        await node.commit(replace(await node.turn(await node.load("run-1")), dead=(unreadable,)))
        assert await store.settle_dead_letters([dropped], "drop", "ann") == [Settled(dropped, "drop")]
        answers = await store.settle_dead_letters(
            ["nowhere", dropped, late, unreadable.letter_id, kept, kept], "requeue", "ann"
        )
        expected = (NotFound, Conflict, RunTerminal, InvalidInput)
        assert [type(error_of(answer)) for answer in answers[:4]] == list(expected)
        assert answers[4:] == [Settled(kept, "requeue")] * 2
        assert [type(error_of(a)) for a in await store.settle_dead_letters([kept], "drop")] == [Conflict]
        assert await store.settle_dead_letters([late], "drop") == [Settled(late, "drop")]

    @pytest.mark.contract("API-2")
    async def test_a_malformed_settlement_is_refused(self, store: Store) -> None:
        """It is refused before anything is looked up."""
        malformed: list[tuple[list[Any], Any, str]] = [
            (["\ud800"], "drop", ""),
            ([7], "drop", ""),
            ([], "burn", ""),
            ([], "drop", "\ud800"),
            (["x"] * 61, "drop", ""),
        ]
        for ids, action, actor in malformed:
            with pytest.raises(InvalidInput):
                await store.settle_dead_letters(ids, action, actor)

    @pytest.mark.contract("FMT-2", "MSG-3")
    async def test_letters_stay_until_their_run_is_purged(
        self, store: Store, clock: VirtualClock, node: SampleNode
    ) -> None:
        """They stay even after the end of the run."""
        await let_die(node, "run-1", "a", "b")
        await let_die(node, "run-2", "c")
        await node.step("run-1", complete())
        clock.advance(ms=1)
        assert (await store.stats()).dead_letters == 3
        assert (await store.purge(PurgePolicy(finished_run_ms=0, dry_run=True))).dead_letters == 2
        assert (await store.purge(PurgePolicy(finished_run_ms=0))).dead_letters == 2
        [left] = await store.find(DeadLetterQuery(settled=True))
        assert left.run_id == "run-2"
