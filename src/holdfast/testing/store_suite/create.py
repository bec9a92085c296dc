"""The store suite, creating runs: idempotent requests, refusals, and runs that are claimed on creation."""

import asyncio
from typing import Any

import pytest
from msgspec import UNSET
from msgspec.structs import replace

from holdfast.core.index_rows import Task, Wait
from holdfast.core.state import COMPLETED, PENDING
from holdfast.errors import Conflict, InvalidInput, LeaseExpired
from holdfast.store.port import Created, Existing, Refused, RunQuery, Store, TaskQuery, WaitQuery
from holdfast.testing import START, VirtualClock
from holdfast.testing.samples import SampleNode, complete, message, new_run, read_history, record, wait
from holdfast.testing.store_suite.base import (
    BAD_NAMES,
    STRANGE_NAMES,
    SuiteBase,
    check_refused,
    existing_ids,
    kinds,
    unchanged,
)

NAME_FIELDS = ("run_id", "tenant", "project", "environment", "plan_id", "plan_version", "run_request_id")


class CreateSuite(SuiteBase):
    """What `create` answers and stores."""

    @pytest.mark.contract("EVT-1", "EVT-2", "QUE-1")
    async def test_created_run_is_free_ready_and_holds_its_first_events(self, store: Store) -> None:
        """A new run has its events, its snapshot and the message that will start it; it has no owner."""
        new = new_run("run-1", request_id="req-1", reference_key="order 7", tags=("eu", "vip"))
        assert await store.create([new]) == [Created("run-1", 0)]
        [run] = await store.load(["run-1"])
        assert run is not None
        head = run.head
        assert (head.status, head.version, head.snapshot) == (PENDING, 1, new.snapshot)
        assert (head.created_at, head.updated_at, head.finished_at) == (START, START, None)
        assert (head.ready_at, head.inbox_seq, head.lease_owner, head.lease_epoch) == (START, 0, None, 0)
        assert (head.reference_key, head.tags, head.parent_run_id) == ("order 7", ("eu", "vip"), None)
        assert (head.tenant, head.project, head.environment) == ("default", "default", "default")
        assert (head.plan_id, head.plan_version, head.run_request_id) == ("order", "1", "req-1")
        assert run.messages == new.messages
        assert await read_history(store, "run-1") == [replace(new.events[0], run_seq=1, persisted_at=START)]

    async def test_several_first_events_are_numbered_from_one(self, store: Store) -> None:
        """The store numbers these events too, and the version is the number of the last one."""
        first = new_run("run-1")
        second = replace(first.events[0], idempotency_key="0" * 64, event_id="second")
        await store.create([replace(first, events=(*first.events, second))])
        assert [event.run_seq for event in await read_history(store, "run-1")] == [1, 2]
        [run] = await store.load(["run-1"])
        assert run is not None
        assert run.head.version == 2

    async def test_waits_tasks_and_messages_come_with_the_run(self, store: Store, clock: VirtualClock) -> None:
        """Signal-with-start and tasks at the start need only `create`."""
        opened = Wait(run_id="run-1", step_id="go", name="go", token="t", since=START)
        asked = Task(task_id="task-1", run_id="run-1", step_id="ask", name="ask", status="OPEN", created_at=START)
        later = message("run-1", "later", due_at=START + 5_000)
        new = replace(new_run("run-1"), waits_opened=(opened,), tasks=(asked,), messages=(later,))
        await store.create([new])
        assert await store.find(WaitQuery()) == [opened]
        assert await store.find(TaskQuery()) == [asked]
        [run] = await store.load(["run-1"])
        assert run is not None
        assert (run.head.ready_at, run.messages) == (START + 5_000, ())
        clock.advance(ms=5)
        [run] = await store.load(["run-1"])
        assert run is not None
        assert run.messages == (later,)

    @pytest.mark.contract("ACT-3")
    async def test_activity_records_come_with_the_run(self, store: Store) -> None:
        """The first turn may schedule a keyed step: the creation claims its record."""
        claimed = replace(record("run-1"), result=UNSET)
        await store.create([replace(new_run("run-1"), records=(claimed,)), new_run("run-2")])
        loaded = await store.load(["run-1", "run-2"])
        assert [run.records for run in loaded if run is not None] == [(claimed,), ()]

    async def test_run_without_a_message_is_not_ready(self, store: Store) -> None:
        """Only messages and signals make a run ready."""
        await store.create([replace(new_run("run-1"), messages=())])
        [run] = await store.load(["run-1"])
        assert run is not None
        assert run.head.ready_at is None

    async def test_two_first_messages_with_one_id_are_refused(self, store: Store) -> None:
        """Messages are identified by their id, so a run cannot begin with two of the same id."""
        late, early = message("run-1", "same", due_at=START + 5_000), message("run-1", "same", due_at=START)
        [answer] = await store.create([replace(new_run("run-1"), messages=(late, early))])
        assert isinstance(answer, Refused)
        assert isinstance(answer.error, InvalidInput)

    # --- the same request again

    @pytest.mark.contract("QUE-1")
    async def test_same_request_answers_with_the_run_it_made(self, store: Store) -> None:
        """A retry of a start creates nothing, even under another run id; the answer is the existing run."""
        await store.create([new_run("run-1", request_id="req-1", value=1)])
        async with unchanged(store):
            again = new_run("run-1", request_id="req-1", value=1)
            other = new_run("run-2", request_id="req-1", value=1)
            assert await store.create([again, other]) == [Existing("run-1"), Existing("run-1")]

    @pytest.mark.contract("QUE-1")
    async def test_same_request_after_the_run_has_finished_makes_no_second_run(
        self, store: Store, node: SampleNode
    ) -> None:
        """A late retry does not repeat the work."""
        await node.start("run-1", complete(), request_id="req-1")
        assert await store.create([new_run("run-2", request_id="req-1")]) == [Existing("run-1")]

    @pytest.mark.contract("QUE-1")
    async def test_same_request_with_other_input_is_a_conflict(self, store: Store) -> None:
        """A request id stands for one input."""
        await store.create([new_run("run-1", request_id="req-1", value=1)])
        async with unchanged(store):
            [answer] = await store.create([new_run("run-2", request_id="req-1", value=2)])
        check_refused(answer, Conflict, run_id="run-1")

    @pytest.mark.contract("QUE-1")
    async def test_same_request_id_of_another_tenant_or_plan_is_another_request(self, store: Store) -> None:
        """The key of a request contains its whole scope."""
        answers = await store.create(
            [
                new_run("run-1", request_id="req-1"),
                new_run("run-2", request_id="req-1", tenant="acme"),
                new_run("run-3", request_id="req-1", plan_id="refund"),
            ]
        )
        assert kinds(answers) == ["Created"] * 3

    async def test_run_id_of_another_request_is_refused(self, store: Store) -> None:
        """Two requests never share a run."""
        await store.create([new_run("run-1", request_id="req-1")])
        async with unchanged(store):
            [answer] = await store.create([new_run("run-1", request_id="req-2")])
        check_refused(answer, Conflict, run_id="run-1")

    async def test_requests_within_a_batch_are_answered_one_by_one(self, store: Store) -> None:
        """An item sees the ones before it, and a refused item does not affect the others."""
        answers = await store.create(
            [
                new_run("run-1", request_id="req-1", value=1),
                new_run("run-2", request_id="req-1", value=1),
                new_run("run-3", request_id="req-1", value=2),
                new_run("run-1", request_id="req-2"),
                replace(new_run("run-4"), tenant=""),
                new_run("run-5", request_id="req-3"),
            ]
        )
        assert answers[:2] == [Created("run-1"), Existing("run-1")]
        assert kinds(answers[2:]) == ["Conflict", "Conflict", "InvalidInput", "Created"]
        assert [head.run_id for head in await store.find(RunQuery())] == ["run-1", "run-5"]

    @pytest.mark.contract("QUE-1")
    async def test_of_simultaneous_equal_requests_exactly_one_creates(self, store: Store, peer: Store) -> None:
        """The store enforces uniqueness, not the caller."""
        calls = [
            way.create([new_run(f"run-{number}", request_id="req-1")]) for number, way in enumerate([store, peer] * 5)
        ]
        answers = [answer for [answer] in await asyncio.gather(*calls)]
        [created] = [answer for answer in answers if isinstance(answer, Created)]
        assert kinds(answers).count("Existing") == 9
        assert existing_ids(answers) == {created.run_id}

    # --- refusals

    async def test_bad_name_is_refused_before_anything_is_stored(self, store: Store) -> None:
        """Empty, too long, with control characters, not Unicode, not a string: refused with the field's name."""
        for field in NAME_FIELDS:
            async with unchanged(store):
                answers = await store.create([replace(new_run("run-1"), **{field: bad}) for bad in BAD_NAMES])
            for answer in answers:
                check_refused(answer, InvalidInput, field=field)

    async def test_strange_names_are_kept_apart_and_never_normalised(self, store: Store) -> None:
        """Case, Unicode form, separators, dots and escapes distinguish runs."""
        names = [*STRANGE_NAMES, "x" * 255]
        assert kinds(await store.create([new_run(name) for name in names])) == ["Created"] * len(names)
        assert [run and run.head.run_id for run in await store.load(names)] == names
        assert [head.run_id for head in await store.find(RunQuery(limit=100))] == sorted(names)

    async def test_run_without_events_is_refused(self, store: Store) -> None:
        """There is no run without a history."""
        async with unchanged(store):
            [answer] = await store.create([replace(new_run("run-1"), events=())])
        check_refused(answer, InvalidInput, field="events")

    async def test_run_that_begins_finished_is_refused(self, store: Store) -> None:
        """A run begins open."""
        new = new_run("run-1")
        async with unchanged(store):
            [answer] = await store.create([replace(new, snapshot=replace(new.snapshot, status=COMPLETED))])
        check_refused(answer, InvalidInput, field="snapshot")

    @pytest.mark.contract("EVT-4")
    async def test_run_that_begins_with_the_same_event_twice_is_refused(self, store: Store) -> None:
        """The key of an event is unique in its run from the beginning."""
        new = new_run("run-1")
        async with unchanged(store):
            [answer] = await store.create([replace(new, events=new.events * 2)])
        check_refused(answer, InvalidInput, field="events")

    async def test_run_that_begins_with_two_open_tasks_for_one_step_is_refused(self, store: Store) -> None:
        """At most one open task per wait, from the beginning."""
        asked = Task(task_id="task-1", run_id="run-1", step_id="ask", name="ask", status="OPEN", created_at=START)
        async with unchanged(store):
            [answer] = await store.create([replace(new_run("run-1"), tasks=(asked, replace(asked, task_id="task-2")))])
        check_refused(answer, InvalidInput, field="tasks")

    async def test_text_that_is_not_unicode_is_refused(self, store: Store) -> None:
        """Text that cannot be stored is refused for its run alone, instead of failing the batch."""
        for field in ("parent_run_id", "reference_key", "tags"):
            bad = ("fine", "\ud800") if field == "tags" else "\ud800"
            answers = await store.create([replace(new_run("run-1"), **{field: bad}), new_run(f"fine-{field}")])
            check_refused(answers[0], InvalidInput, field=field)
            assert answers[1] == Created(f"fine-{field}")

    async def test_create_refuses_a_batch_over_the_limit_whole(self, store: Store) -> None:
        """One call is one transaction, so its size is bounded."""
        most = self.limits.batch_items
        async with unchanged(store):
            with pytest.raises(InvalidInput):
                await store.create([new_run(f"run-{number}") for number in range(most + 1)])
        answers = await store.create([new_run(f"run-{number}") for number in range(most)])
        assert kinds(answers) == ["Created"] * most

    async def test_empty_batch_is_answered_with_nothing(self, store: Store) -> None:
        """An empty batch has no answers."""
        assert await store.create([]) == []

    # --- claimed on creation

    @pytest.mark.contract("OWN-1")
    async def test_run_created_for_a_node_belongs_to_it_at_epoch_one(self, store: Store, node: SampleNode) -> None:
        """The creator continues immediately, and no other node can claim the run."""
        await node.renew()
        assert await store.create([new_run("run-1")], claim_for="node-a") == [Created("run-1", 1)]
        assert await SampleNode(store, "node-b").claim() == []
        [run] = await node.claim()
        assert (run.head.lease_owner, run.head.lease_epoch) == ("node-a", 1)

    @pytest.mark.contract("OWN-1")
    async def test_existing_run_is_not_taken_over_by_its_request(self, store: Store, node: SampleNode) -> None:
        """A retry of a start does not change the run's owner."""
        await node.start("run-1", wait(), request_id="req-1")
        await store.renew("node-b", 30_000)
        async with unchanged(store):
            again = new_run("run-2", request_id="req-1")
            assert await store.create([again], claim_for="node-b") == [Existing("run-1")]

    @pytest.mark.contract("OWN-1")
    async def test_creating_for_a_node_without_a_lease_creates_nothing(self, store: Store, clock: VirtualClock) -> None:
        """This holds for a node that never had a lease, and for one whose lease has just expired."""
        bad: Any = None
        await store.renew("node-b", 1_000)
        clock.advance(ms=1_000)
        for name in ("node-a", "node-b", "node\x00"):
            for batch in ([new_run("run-1")], [new_run("run-1", plan_id=bad)], []):
                async with unchanged(store):
                    with pytest.raises(LeaseExpired) as raised:
                        await store.create(batch, claim_for=name)
                assert raised.value.details == {"node": name}
