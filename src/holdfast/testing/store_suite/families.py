"""The store suite, families: what turns send to other runs arrives, or the sending run is informed why not."""

import asyncio
from typing import Any

import pytest
from msgspec.structs import replace

from holdfast.core import codec
from holdfast.core.commands import CancelStep, Command, ContinueAsNew, SendSignal, StartChild
from holdfast.core.dead_letters import DeadLetter
from holdfast.core.invariants import check
from holdfast.core.messages import CONTROL_SIGNAL, ChildOutcome, cancel_request
from holdfast.errors import InvalidInput
from holdfast.store.inspect import system_view
from holdfast.store.port import Committed, PurgePolicy, Refused, RunHead, Store
from holdfast.store.queries import DeadLetterQuery
from holdfast.testing import VirtualClock
from holdfast.testing.samples import SampleNode, complete, new_run, read_mailbox, wait
from holdfast.testing.store_suite.base import SuiteBase

CHILD = "run-1/child"
COMPLETED_MESSAGE = "SubWorkflowCompleted"


def child(step_id: str = "child", close_policy: str = "await") -> StartChild:
    """Return the command to start a child of `run-1`."""
    return StartChild(
        step_id=step_id, child_run_id=f"run-1/{step_id}", plan_id="ship", plan_version="1", close_policy=close_policy
    )


def send(run_id: str, name: str = "go", value: object = None, signal_id: str = "s-1") -> SendSignal:
    """Return the command to send a signal to another run."""
    return SendSignal(
        step_id=f"send:{run_id}:{signal_id}", run_id=run_id, name=name, signal_id=signal_id, payload=codec.encode(value)
    )


async def letters_of(store: Store, run_id: str = "run-1") -> list[DeadLetter]:
    """Return the dead letters of a run."""
    return await store.find(DeadLetterQuery(run_id=run_id))


async def head_of(store: Store, run_id: str) -> RunHead | None:
    """Return a run without its history, or None."""
    [run] = await store.load([run_id])
    return None if run is None else run.head


async def refusal_received(node: SampleNode) -> ChildOutcome:
    """Return the message about its child that the run receives, and let the run handle it."""
    loaded = await node.load("run-1")
    [message] = loaded.messages
    assert (message.type, message.step_id) == ("SubWorkflowCompleted", "child")
    await node.step("run-1")
    assert (await node.store.read_events("run-1"))[-1].event_type == "ChildFailed"
    return codec.decode(message.payload, ChildOutcome)


class FamilySuite(SuiteBase):
    """Parents and children, and runs that send signals to others."""

    # --- children

    @pytest.mark.contract("WF-4", "API-4")
    @pytest.mark.parametrize("close_policy", ["await", "abandon", "cancel"])
    async def test_child_is_of_the_same_tenant_project_and_environment(
        self, store: Store, node: SampleNode, close_policy: str
    ) -> None:
        """The same holds for the child's own child, wherever the turn is made."""
        await node.start("run-1", tenant="acme", project="shop", environment="prod")
        await node.step("run-1", child(close_policy=close_policy))
        head = await head_of(store, CHILD)
        assert head is not None
        assert (head.tenant, head.project, head.environment) == ("acme", "shop", "prod")
        [claimed] = await SampleNode(store, "node-b").claim()
        grandchild = replace(child(), child_run_id="grandchild")
        await SampleNode(store, "node-b").step(claimed.head.run_id, grandchild)
        head = await head_of(store, "grandchild")
        assert head is not None
        assert (head.tenant, head.project, head.environment) == ("acme", "shop", "prod")
        assert check(await system_view(store)) == []

    @pytest.mark.contract("WF-4", "QUE-1")
    async def test_request_of_a_caller_is_never_that_of_a_child(self, store: Store, node: SampleNode) -> None:
        """Whatever request id the caller chooses, both runs exist, and neither is taken for the other."""
        [created] = await store.create([new_run("stranger", plan_id="ship", request_id=CHILD)])
        assert created.run_id == "stranger"  # type: ignore[union-attr]
        await node.start("run-1", child())
        head = await head_of(store, CHILD)
        assert head is not None
        assert head.parent_run_id == "run-1"
        assert (await node.load("run-1")).messages == ()

    @pytest.mark.contract("WF-4", "INV")
    @pytest.mark.parametrize("tenant", ["default", "other"])
    async def test_parent_gets_a_failure_for_a_child_whose_id_is_taken(
        self, store: Store, node: SampleNode, tenant: str
    ) -> None:
        """It is part of the same commit, and sent once, however often that is repeated; the other run is unaffected."""
        await node.start(CHILD, wait("go"), tenant=tenant)
        await node.create("run-1")
        turn = await node.turn(await node.load("run-1"), child())
        for _ in range(3):
            assert isinstance(await node.commit(turn), Committed)
            assert [message.type for message in (await node.load("run-1")).messages] == ["SubWorkflowCompleted"]
        assert check(await system_view(store)) == []
        outcome = await refusal_received(node)
        assert outcome.error is not None
        assert outcome.error.code == "Conflict"
        assert CHILD in outcome.error.message
        assert isinstance(await node.commit(turn), Committed)
        assert (await node.load("run-1")).messages == ()
        assert await letters_of(store) == []
        assert check(await system_view(store)) == []

    @pytest.mark.contract("WF-4", "EVT-1")
    async def test_repeated_commit_does_not_take_its_own_child_for_a_stranger(
        self, store: Store, node: SampleNode
    ) -> None:
        """This holds although the child has continued, or has ended, since."""
        await node.create("run-1")
        turn = await node.turn(await node.load("run-1"), child())
        for todo in ((), (wait("go"),), (complete(),)):
            assert isinstance(await node.commit(turn), Committed)
            assert len((await node.load("run-1")).messages) == 0
            if (head := await head_of(store, CHILD)) is not None and head.lease_owner is None:
                await node.claim()
            await node.step(CHILD, *todo)
        [outcome] = (await node.load("run-1")).messages
        assert isinstance(await node.commit(turn), Committed)
        assert (await node.load("run-1")).messages == (outcome,)

    @pytest.mark.contract("WF-4")
    async def test_parent_whose_id_was_used_before_does_not_get_the_child_of_that_time(
        self, store: Store, clock: VirtualClock, node: SampleNode
    ) -> None:
        """Its former child outlived its parent; its outcome would never be reported."""
        await node.start("run-1", child(close_policy="abandon"), complete())
        clock.advance(ms=10_000)
        await node.claim()
        await node.step(CHILD, complete())
        await store.purge(PurgePolicy(finished_run_ms=5_000))
        assert await head_of(store, "run-1") is None
        assert await head_of(store, CHILD) is not None
        await node.start("run-1", child(close_policy="abandon"))
        outcome = await refusal_received(node)
        assert outcome.error is not None
        assert outcome.error.code == "Conflict"

    @pytest.mark.contract("WF-4", "MSG-3")
    @pytest.mark.parametrize("end", ["finished", "rotated", "given up"])
    async def test_refused_child_without_a_waiting_parent_leaves_a_dead_letter(
        self, store: Store, node: SampleNode, end: str
    ) -> None:
        """In the same turn the parent has ended, rotated, or stopped waiting. The run with the id is not cancelled."""
        await node.start(CHILD, wait("go"))
        todo: dict[str, tuple[Command, ...]] = {
            "finished": (complete(),),
            "rotated": (ContinueAsNew(),),
            "given up": (CancelStep(step_id="child"), wait("go")),
        }
        await node.start("run-1", child(close_policy="cancel"), *todo[end])
        [letter] = await letters_of(store)
        assert letter.reason == "refused"
        assert "Conflict" in letter.detail
        assert CHILD in letter.detail
        assert (await node.load("run-1")).messages == ()
        assert await read_mailbox(store, CHILD) == []
        assert check(await system_view(store)) == []

    @pytest.mark.contract("WF-4", "WF-7")
    async def test_cancellation_goes_to_children_only(self, store: Store, node: SampleNode) -> None:
        """This includes a child created by the same turn, and never a run that merely has the id."""
        await node.start("run-1", child(), CancelStep(step_id="child"), wait("go"))
        assert [sent.name for sent in await read_mailbox(store, CHILD)] == [CONTROL_SIGNAL]
        await node.start("run-2", wait("go"))
        turn = await node.turn(await node.load("run-1"))
        await node.commit(replace(turn, sends=(cancel_request("run-2", "parent:run-1", "given up"),)))
        assert await read_mailbox(store, "run-2") == []
        assert await letters_of(store) == []

    @pytest.mark.contract("WF-4", "OWN-1")
    async def test_parent_and_another_caller_start_the_same_run_at_once(self, store: Store, peer: Store) -> None:
        """One of them gets the id, and the other is refused."""
        node = SampleNode(store)
        parents = [f"run-{number}" for number in range(8)]
        turns = []
        for run_id in parents:
            await node.create(run_id)
            command = replace(child(), child_run_id=f"{run_id}/child")
            turns.append(await node.turn(await node.load(run_id), command))
        calls = [node.commit(turn) for turn in turns] + [peer.create([new_run(f"{id_}/child")]) for id_ in parents]
        calls = [calls[place] for number in range(8) for place in (number, number + 8)]
        answers: list[Any] = await asyncio.gather(*calls)
        for run_id, [created] in zip(parents, answers[1::2], strict=True):
            head = await head_of(store, f"{run_id}/child")
            assert head is not None
            received = [message.type for message in (await node.load(run_id)).messages]
            assert (head.parent_run_id, received) == (
                (run_id, []) if isinstance(created, Refused) else (None, [COMPLETED_MESSAGE])
            )

    # --- signals to other runs

    @pytest.mark.contract("SIG-3", "MSG-3")
    async def test_signal_that_the_other_run_refuses_leaves_a_letter_with_its_sender(
        self, store: Store, node: SampleNode
    ) -> None:
        """There is one letter, in the same commit; it can be dropped, but not requeued. The sender may have ended."""
        await node.start("done", complete())
        await node.start("waiting", wait("go"))
        await node.create("run-1")
        again = replace(send("waiting", "go", 7), step_id="again")
        todo = (send("nowhere"), send("done"), send("waiting"), again, complete())
        turn = await node.turn(await node.load("run-1"), *todo)
        for _ in range(2):
            assert isinstance(await node.commit(turn), Committed)
        letters = await letters_of(store)
        assert sorted(letter.detail.split(": ")[1] for letter in letters) == ["Conflict", "NotFound", "RunTerminal"]
        assert {letter.reason for letter in letters} == {"refused"}
        assert len(await read_mailbox(store, "waiting")) == 1
        assert (await store.stats()).dead_letters == 3
        [refused] = await store.settle_dead_letters([letters[0].letter_id], "requeue")
        assert isinstance(refused, Refused)
        assert isinstance(refused.error, InvalidInput)
        await store.settle_dead_letters([letter.letter_id for letter in letters], "drop")
        assert await letters_of(store) == []

    @pytest.mark.contract("API-4")
    @pytest.mark.parametrize("field", ["tenant", "project", "environment"])
    async def test_signal_stays_inside_unless_the_turn_may_cross(
        self, store: Store, node: SampleNode, field: str
    ) -> None:
        """The letter has the same text as for a run that does not exist."""
        elsewhere: dict[str, Any] = {field: "other"}
        await node.start("theirs", wait("go"), **elsewhere)
        await node.start("ours", wait("go"))
        await node.start("run-1", send("theirs"), send("ours"), send("nowhere!"))
        assert await read_mailbox(store, "theirs") == []
        assert len(await read_mailbox(store, "ours")) == 1
        details = [letter.detail for letter in await letters_of(store)]
        assert len(details) == 2
        assert len({detail.replace("theirs", "nowhere!") for detail in details}) == 1
        turn = await node.turn(await node.load("run-1"), send("theirs", signal_id="s-2"), complete())
        await node.commit(replace(turn, crosses_tenants=True))
        assert len(await read_mailbox(store, "theirs")) == 1

    @pytest.mark.contract("API-4", "WF-4")
    async def test_family_of_several_tenants_still_hears_of_each_other(self, store: Store, node: SampleNode) -> None:
        """An older release has created such families."""
        await node.create("run-1", tenant="acme")
        turn = await node.turn(await node.load("run-1"), child())
        [new] = turn.starts
        await node.commit(replace(turn, starts=(replace(new, tenant="default"),)))
        assert [violation.invariant for violation in check(await system_view(store))] == ["families_are_of_one_tenant"]
        await node.claim()
        await node.step(CHILD, wait("go"))
        await node.step("run-1", CancelStep(step_id="child"), wait("go"))
        assert [sent.name for sent in await read_mailbox(store, CHILD)] == [CONTROL_SIGNAL]
        await node.step(CHILD, complete())
        assert [message.type for message in (await node.load("run-1")).messages] == ["SubWorkflowCompleted"]
