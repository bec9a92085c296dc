"""The store suite, run ids that are taken: returned, refused, restarted, or terminated and restarted."""

import asyncio
from typing import Any

import pytest
from msgspec.structs import replace

from holdfast.core.messages import CONTROL_SIGNAL, SignalRequest, control_request
from holdfast.core.state import TERMINAL
from holdfast.errors import Conflict, InvalidInput, LeaseExpired
from holdfast.store.port import Created, Existing, NewRun, PurgePolicy, Refused, Store
from holdfast.store.types import Reuse, ReusePolicy
from holdfast.testing import VirtualClock
from holdfast.testing.samples import SampleNode, complete, new_run, read_mailbox, signal
from holdfast.testing.store_suite.base import SuiteBase, check_refused, kinds, unchanged


def asked(
    run_id: str = "cart",
    policy: ReusePolicy = "restart-if-finished",
    *,
    request_id: str = "",
    of: str = "cart",
    stops: str | None = None,
    **more: Any,
) -> NewRun:
    """Return a start with the id `of` that proposes this run id, and that stops the run `stops`."""
    new = new_run(run_id, request_id=request_id or f"{run_id} {policy} {stops}", **more)
    stop = None if stops is None else control_request(stops, "EMERGENCY_STOP", "", "replaced", signal_id="stop")
    return replace(new, reuse=Reuse(run_id=of, policy=policy, stop=stop))


def restart_as(answer: Any) -> tuple[Any, Any]:
    """Return the latest run and the next id, which the refusal of a proposal contains."""
    problem = check_refused(answer, Conflict)
    return problem.details["run_id"], problem.details["restart_as"]


class ReuseSuite(SuiteBase):
    """The store decides atomically what happens to an id that is taken."""

    async def _finish(self, node: SampleNode, run_id: str) -> None:
        await node.claim()
        if (await node.load(run_id)).head.status not in TERMINAL:
            await node.step(run_id, complete())

    @pytest.mark.contract("QUE-1", "QUE-5")
    async def test_an_id_that_is_free_is_given(self, store: Store) -> None:
        """This holds for any policy; a proposal with a later number is corrected."""
        for policy in ("return", "reject", "restart-if-finished", "terminate-and-restart"):
            [answer] = await store.create([asked(policy, policy, of=policy)])
            assert isinstance(answer, Created)
        async with unchanged(store):
            [answer] = await store.create([asked("cart~000002")])
        assert restart_as(answer) == (None, "cart")

    @pytest.mark.contract("QUE-1", "QUE-5")
    async def test_the_same_request_gives_the_run_that_it_started(self, store: Store, node: SampleNode) -> None:
        """This holds even when that run has finished, and was restarted since: a retry never restarts twice."""
        await store.create([asked("cart", request_id="r1")])
        await self._finish(node, "cart")
        [answer] = await store.create([asked("cart~000002", request_id="r2")])
        assert isinstance(answer, Created)
        await self._finish(node, "cart~000002")
        for policy in ("return", "reject", "restart-if-finished", "terminate-and-restart"):
            for proposed in ("cart", "cart~000002", "cart~000003"):
                again = asked(proposed, policy, request_id="r2")
                assert await store.create([again]) == [Existing("cart~000002")]
        async with unchanged(store):
            [answer] = await store.create([asked("cart~000003", request_id="r2", value=1)])
        check_refused(answer, Conflict)

    @pytest.mark.contract("QUE-5")
    async def test_a_run_is_returned_or_the_start_refused(self, store: Store, node: SampleNode) -> None:
        """`return` and `reject` depend neither on the run's status nor on the input."""
        await store.create([asked("cart")])
        for _ in range(2):
            async with unchanged(store):
                answers = await store.create([asked("cart", "return", value=7), asked("cart", "reject")])
            assert answers[0] == Existing("cart", is_reused=True)
            check_refused(answers[1], Conflict)
            await self._finish(node, "cart")

    @pytest.mark.contract("QUE-5")
    async def test_a_finished_run_is_restarted_once(self, store: Store, peer: Store, node: SampleNode) -> None:
        """Of simultaneous requests, one creates the next run, and the others get it."""
        await store.create([asked("cart", request_id="first")])
        [answer] = await store.create([asked("cart", request_id="second")])
        assert answer == Existing("cart", is_reused=True)
        await self._finish(node, "cart")
        [answer] = await store.create([asked("cart", request_id="third")])
        assert restart_as(answer) == ("cart", "cart~000002")
        calls = [way.create([asked("cart~000002", request_id=f"r{n}")]) for n, way in enumerate([store, peer] * 4)]
        answers = [answer for [answer] in await asyncio.gather(*calls)]
        assert sorted(kinds(answers)) == ["Created"] + ["Existing"] * 7
        assert {answer.run_id for answer in answers if not isinstance(answer, Refused)} == {"cart~000002"}

    @pytest.mark.contract("QUE-5")
    async def test_restarts_are_counted_on_whatever_is_deleted_or_looks_like_one(
        self, store: Store, node: SampleNode
    ) -> None:
        """Among them are children of restarts, and ids that only look like restarts."""
        await store.create([asked("cart")])
        await self._finish(node, "cart")
        others = ["cart~000002/pay", "cart~000003", "cart~12", "cart~000003/x/y", "cart~0000031", "cartoon", "car"]
        await store.create([new_run(other) for other in others])
        [answer] = await store.create([asked("cart~000002")])
        assert answer == Existing("cart~000003", is_reused=True)
        await self._finish(node, "cart~000003")
        await store.purge(PurgePolicy(run_ids=("cart~000003",), finished_run_ms=0))
        [answer] = await store.create([asked("cart~000004")])
        assert restart_as(answer) == ("cart", "cart~000002")
        [answer] = await store.create([asked("cart~000002")])
        assert isinstance(answer, Created)

    @pytest.mark.contract("QUE-5")
    async def test_a_run_is_replaced_and_told_in_one_step(self, store: Store, node: SampleNode) -> None:
        """The command is in its inbox once, when the next run exists; a refused request leaves no trace."""
        await store.create([asked("cart", request_id="first")])
        replacing = asked("cart~000002", "terminate-and-restart", request_id="second", stops="cart")
        async with unchanged(store):
            answers = await store.create(
                [
                    asked("cart", "terminate-and-restart", request_id="x1"),
                    asked("cart~000002", "terminate-and-restart", request_id="x2"),
                    asked("cart~000003", "terminate-and-restart", request_id="x3", stops="cart"),
                ]
            )
        assert list(map(restart_as, answers)) == [("cart", "cart~000002")] * 3
        [answer] = await store.create([replacing])
        assert isinstance(answer, Created)
        assert [each.name for each in await read_mailbox(store, "cart")] == [CONTROL_SIGNAL]
        assert await read_mailbox(store, "cart~000002") == []
        assert await store.create([replacing]) == [Existing("cart~000002")]
        assert len(await read_mailbox(store, "cart")) == 1
        await self._finish(node, "cart~000002")
        [answer] = await store.create([asked("cart~000003", "terminate-and-restart", stops="cart~000002")])
        assert isinstance(answer, Created)

    @pytest.mark.contract("QUE-5", "SIG-1")
    async def test_signals_of_a_batch_are_in_the_order_of_its_requests(self, store: Store) -> None:
        """A signal of an earlier request is in the inbox before a later request ends that run."""
        first = asked("cart", request_id="first")
        await store.create([first])
        again = replace(first, signals=(signal("x", "add", 1, signal_id="one"),))
        replacing = asked("cart~000002", "terminate-and-restart", request_id="second", stops="cart")
        answers = await store.create([again, replacing])
        assert kinds(answers) == ["Existing", "Created"]
        assert [each.name for each in await read_mailbox(store, "cart")] == ["add", CONTROL_SIGNAL]

    @pytest.mark.contract("QUE-5", "API-4")
    async def test_runs_of_others_are_neither_given_nor_stopped(self, store: Store) -> None:
        """Neither are those of another workflow. The refusal contains only that the id is taken."""
        await store.create([asked("cart")])
        for policy in ("return", "reject", "restart-if-finished", "terminate-and-restart"):
            for other in ({"tenant": "b"}, {"project": "b"}, {"environment": "b"}, {"plan_id": "b"}):
                async with unchanged(store):
                    [answer] = await store.create([asked("cart", policy, **other)])
                assert set(check_refused(answer, Conflict).details) == {"run_id"}

    @pytest.mark.contract("QUE-5", "SIG-9", "SIG-5")
    async def test_a_signal_goes_to_the_run_that_is_there_or_to_the_next(self, store: Store, node: SampleNode) -> None:
        """The caller delivers it to a run that another request has created. A signal that this run has accepted starts
        no other run, even after the run has finished.
        """

        def add(run_id: str, item: int, **more: Any) -> NewRun:
            first: SignalRequest = signal("x", "add", item, signal_id=f"item-{item}")
            return replace(asked(run_id, request_id=f"r{run_id}{item}", **more), signals=(first,))

        [one] = await store.create([add("cart", 1)])
        [two] = await store.create([add("cart", 2)])
        assert isinstance(one, Created)
        assert two == Existing("cart", is_reused=True)
        await store.deliver([signal("cart", "add", 2, signal_id="item-2")])
        await self._finish(node, "cart")
        [again] = await store.create([add("cart~000002", 2)])
        assert isinstance(again, Existing)
        assert (again.run_id, kinds(again.signals)) == ("cart", ["Duplicate"])
        [three] = await store.create([add("cart~000002", 3)])
        assert isinstance(three, Created)
        assert kinds(three.signals) == ["Accepted"]
        assert [bytes(found.payload) for found in await read_mailbox(store, "cart~000002")] == [b"3"]

    @pytest.mark.contract("QUE-5", "OWN-1")
    async def test_a_node_without_a_lease_is_not_answered(self, store: Store, clock: VirtualClock) -> None:
        """Not even if nothing would be created: the id is taken, the request is known, or the start is malformed."""
        bad: Any = None
        await store.create([asked("cart", request_id="first")])
        await store.renew("node-b", 1_000)
        clock.advance(ms=1_000)
        add = signal("x", "add", 1, signal_id="item")
        taken, known = replace(asked("cart", "return"), signals=(add,)), asked("cart", request_id="first")
        malformed = replace(asked("dog", of="dog"), plan_id=bad)
        batches = [[taken], [known], [malformed], [malformed, taken], [new_run("cat", plan_id=bad), taken, known]]
        for name in ("node-a", "node-b", "node\x00"):
            for batch in batches:
                async with unchanged(store):
                    with pytest.raises(LeaseExpired) as raised:
                        await store.create(batch, claim_for=name)
                assert raised.value.details == {"node": name}
        await store.renew("node-a", 1_000)
        answers = await store.create(batches[-1], claim_for="node-a")
        assert kinds(answers) == ["InvalidInput", "Existing", "Existing"]

    @pytest.mark.contract("QUE-5", "API-2")
    async def test_what_cannot_be_reused_is_refused(self, store: Store) -> None:
        """It is refused before anything is stored."""
        bad: Any = "sometimes"
        stop = control_request("dog", "EMERGENCY_STOP", "", signal_id="stop")
        cases = [
            asked("cart", bad),
            asked("cart~000002", of="cart~000002"),
            asked("x" * 250, of="x" * 250),
            asked("dog"),
            asked("cart~000002", "return", stops="cart"),
            asked("cart", "terminate-and-restart", stops="cart"),
            replace(asked(), reuse=Reuse(run_id="cart", policy="terminate-and-restart", stop=stop)),
        ]
        for new in cases:
            async with unchanged(store):
                [answer] = await store.create([new])
            check_refused(answer, InvalidInput)
