"""The store suite, reading: loading, finding, paging and counting."""

from collections.abc import Awaitable
from typing import Any

import pytest
from msgspec import Raw
from msgspec.structs import replace

from holdfast.core.events import ErrorInfo
from holdfast.core.messages import ActivityErrored
from holdfast.core.state import COMPLETED, RUNNING
from holdfast.core.timing import Retry
from holdfast.errors import InvalidInput
from holdfast.limits import SEARCH_CHARS, SEARCH_WORDS
from holdfast.store.port import EventQuery, MailboxQuery, RunQuery, Stats, Store, TaskQuery, WaitQuery
from holdfast.store.queries import DeadLetterQuery
from holdfast.store.types import PurgePolicy
from holdfast.testing import START, VirtualClock
from holdfast.testing.samples import (
    SampleNode,
    activity,
    complete,
    dead_letter,
    fail,
    marker,
    message,
    new_run,
    read_history,
    signal,
    task,
    timer,
    wait,
)
from holdfast.testing.store_suite.base import MINUTE_MS, STRANGE_NAMES, SuiteBase, accept


async def run_ids(store: Store, **query: Any) -> list[str]:
    """Return the ids of the runs that a query finds."""
    return [head.run_id for head in await store.find(RunQuery(**query))]


def wrong_bounds(bound: Any) -> list[dict[str, Any]]:
    """Return each bound of a query with this value."""
    return [{"look": bound}, {"most_bytes": bound}]


class QuerySuite(SuiteBase):
    """What can be read."""

    # --- loading

    async def test_runs_are_loaded_in_the_order_asked_with_none_for_missing_ones(self, store: Store) -> None:
        """Each position in the answer corresponds to one in the request, including repeated ids."""
        await store.create([new_run("run-1"), new_run("run-2")])
        loaded = await store.load(["run-2", "missing", "run-1", "run-2"])
        assert [run and run.head.run_id for run in loaded] == ["run-2", None, "run-1", "run-2"]
        assert await store.load([]) == []

    async def test_loading_more_than_a_batch_is_refused(self, store: Store) -> None:
        """One call is bounded."""
        with pytest.raises(InvalidInput):
            await store.load(["run"] * (self.limits.batch_items + 1))

    async def test_loaded_run_agrees_with_what_is_found(self, store: Store, node: SampleNode) -> None:
        """A run has the same head, whichever way it is read."""
        await node.start("run-1", wait("go"), reference_key="order 7", tags=("b", "a", "b"))
        [found] = await store.find(RunQuery())
        assert found == (await node.load("run-1")).head
        assert found.tags == ("b", "a", "b")

    # --- runs

    async def test_runs_are_found_by_what_they_are(self, store: Store, node: SampleNode) -> None:
        """Each filter works alone and in combination; text matches exactly."""
        await node.start("run-1", tenant="acme", tags=("eu", "vip"), reference_key="order 7")
        await node.start("run-2", complete(), plan_id="refund", tags=("vi",), parent="run-1")
        await node.create("run-3", tenant="Acme", tags=("v%",), reference_key="order")
        assert await run_ids(store) == ["run-1", "run-2", "run-3"]
        assert await run_ids(store, tenant="acme") == ["run-1"]
        assert await run_ids(store, workflow="refund") == ["run-2"]
        assert await run_ids(store, status=RUNNING) == ["run-1"]
        assert await run_ids(store, status=COMPLETED) == ["run-2"]
        assert await run_ids(store, reference_key="order") == ["run-3"]
        assert await run_ids(store, tag="vip") == ["run-1"]
        assert await run_ids(store, tag="vi") == ["run-2"]
        assert await run_ids(store, tag="v%") == ["run-3"]
        assert await run_ids(store, parent_run_id="run-1") == ["run-2"]
        assert await run_ids(store, roots=True) == ["run-1", "run-3"]
        assert await run_ids(store, roots=True, newest=True) == ["run-3", "run-1"]
        assert await run_ids(store, tenant="acme", tag="eu", status=RUNNING) == ["run-1"]
        assert await run_ids(store, tenant="acme", status=COMPLETED) == []

    async def test_runs_are_found_whose_activity_is_tried_again(self, store: Store, node: SampleNode) -> None:
        """What the run is doing counts, not a text in it; a finished run does not match."""
        broken = ErrorInfo("ConnectionError", 'no answer; "retrying":{"step_id":"a"}', retryable=True)
        for run_id, retry in (("run-1", Retry(initial_ms=60_000)), ("run-2", Retry(max_attempts=1))):
            await node.start(run_id, activity("charge"))
            await node.step(run_id, inputs=[ActivityErrored("charge", 1, 1, broken, retry)])
        await node.start("run-3", fail('"retrying":{"step_id":"a"}'))
        assert await run_ids(store, retrying=True) == ["run-1"]
        assert await run_ids(store, retrying=True, newest=True, look=100) == ["run-1"]
        assert await run_ids(store, retrying=True, status=COMPLETED) == []
        [head] = await store.find(RunQuery(retrying=True))
        assert head.snapshot is not None
        assert head.snapshot.retrying is not None
        assert (head.snapshot.retrying.failures, head.snapshot.waiting_name) == (1, "charge")

    async def test_runs_are_found_by_their_time_of_creation(self, store: Store, clock: VirtualClock) -> None:
        """The range includes its start and excludes its end."""
        for number in range(3):
            await store.create([new_run(f"run-{number}", now=clock.now())])
            clock.advance(us=1)
        assert await run_ids(store, created_from=START + 1) == ["run-1", "run-2"]
        assert await run_ids(store, created_until=START + 1) == ["run-0"]
        assert await run_ids(store, created_from=START + 1, created_until=START + 2) == ["run-1"]

    async def test_runs_are_paged_by_their_ids(self, store: Store) -> None:
        """The order is by id, code point by code point; a page is never longer than the store's limit."""
        names = sorted([*STRANGE_NAMES, *(f"run-{number:02}" for number in range(20))])
        await store.create([new_run(name) for name in names])
        most = self.limits.page_items
        assert await run_ids(store) == names[:most]
        assert await run_ids(store, limit=most + 5) == names[:most]
        seen: list[str] = []
        while page := await run_ids(store, after=seen[-1] if seen else "", limit=7):
            assert len(page) <= 7
            seen += page
        assert seen == names

    async def test_the_newest_runs_come_first_if_asked_for(self, store: Store, clock: VirtualClock) -> None:
        """The order is the reverse of creation, whatever their ids, even after a run that was deleted meanwhile."""
        for name in "bdac":
            await store.create([new_run(name, now=clock.now(), tenant="acme" if name in "ba" else "other")])
            clock.advance(us=10)
        newest = await store.find(RunQuery(newest=True))
        assert [head.run_id for head in newest] == ["c", "a", "d", "b"]
        seen: list[str] = []
        query = RunQuery(newest=True, limit=1)
        while page := await store.find(query):
            seen.append(page[0].run_id)
            query = replace(query, before=(page[0].created_at, page[0].run_id), after=page[0].run_id)
        assert seen == ["c", "a", "d", "b"]
        assert await run_ids(store, newest=True, before=(START + 20, "gone")) == ["a", "d", "b"]
        assert await run_ids(store, newest=True, before=(START - 1, "gone")) == []
        assert await run_ids(store, newest=True, tenant="acme") == ["a", "b"]
        assert await run_ids(store, newest=True, created_until=START + 20, created_from=START + 10) == ["d"]

    async def test_runs_are_found_by_words_in_what_is_shown_of_them(self, store: Store, node: SampleNode) -> None:
        """Each word has to occur in a text, and all have to match: there are no wildcards, and A to Z have no case."""
        await node.create("run-1", reference_key="Order 7%", tags=("eu", 'v"ip'))
        await node.create("Run_2", plan_id="refund")
        await node.start("run-é", fail("Payment\n'declined'"), tags=("É",))
        assert await run_ids(store, text="un-") == ["run-1", "run-é"]
        assert await run_ids(store, text="ER 7 run") == ["run-1"]
        assert await run_ids(store, text=" ") == ["Run_2", "run-1", "run-é"]
        assert await run_ids(store, text="é") == ["run-é"]
        assert await run_ids(store, text="É") == ["run-é"]
        assert await run_ids(store, text="ru É") == ["run-é"]
        assert await run_ids(store, text="%") == ["run-1"]
        assert await run_ids(store, text="_") == ["Run_2"]
        assert await run_ids(store, text="R", newest=True) == ["run-é", "Run_2", "run-1"]
        assert await run_ids(store, text="REFUN") == ["Run_2"]
        assert await run_ids(store, text='V"I eu') == ["run-1"]
        assert await run_ids(store, text='","') == []
        assert await run_ids(store, text="outofst 'declined'") == ["run-é"]
        assert await run_ids(store, text="last_error") == []
        assert await run_ids(store, text="declined eu") == []

    async def test_runs_are_found_among_some(self, store: Store) -> None:
        """Only those that are named match, whatever the other filters."""
        await store.create([new_run("run-1"), new_run("run-2", tenant="acme"), new_run("run-3")])
        assert await run_ids(store, run_ids=("run-3", "run-1", "gone", "run-1")) == ["run-1", "run-3"]
        assert await run_ids(store, run_ids=("run-1", "run-2"), tenant="acme") == ["run-2"]
        assert await run_ids(store, run_ids=()) == []

    # --- waits

    async def test_waits_are_found_by_run_and_by_name(self, store: Store, node: SampleNode) -> None:
        """A query finds the waits of a run, and the runs that wait for a name."""
        await node.start("run-1", wait("go", "z"), wait("stop", "a"))
        await node.start("run-2", wait("go", "m"), wait("Go", "n"))

        async def find(**query: Any) -> list[tuple[str, str]]:
            return [(found.run_id, found.step_id) for found in await store.find(WaitQuery(**query))]

        everything = [("run-1", "a"), ("run-1", "z"), ("run-2", "m"), ("run-2", "n")]
        assert await find() == everything
        assert await find(run_id="run-1") == everything[:2]
        assert await find(name="go") == [("run-1", "z"), ("run-2", "m")]
        assert await find(run_id="run-2", name="go") == [("run-2", "m")]
        assert await find(run_id="missing") == []
        assert await find(after=("run-1", "a"), limit=2) == everything[1:3]
        assert await find(after=("run-1", "zz")) == everything[2:]

    async def test_waits_are_paged(self, store: Store, node: SampleNode) -> None:
        """A page is never longer than the store's limit."""
        most = self.limits.page_items
        await node.start("run-1", *(wait("go", f"wait-{number:02}") for number in range(most + 3)))
        first = await store.find(WaitQuery(limit=10 * most))
        rest = await store.find(WaitQuery(after=(first[-1].run_id, first[-1].step_id)))
        assert [found.step_id for found in first + rest] == [f"wait-{number:02}" for number in range(most + 3)]

    # --- events of several runs

    @pytest.mark.contract("EVT-6")
    async def test_events_of_several_runs_are_found_each_behind_its_place(self, store: Store, node: SampleNode) -> None:
        """The order is by run id and number, as when reading them one by one; a missing run has no events."""
        await node.start("b", wait("go"))
        await node.start("a", wait("go"))
        await node.start("c")
        histories = {run_id: await store.read_events(run_id) for run_id in ("a", "b", "c")}

        places = (("c", 0), ("missing", 0), ("a", 1), ("b", len(histories["b"]) - 1), ("c", -1))
        found = await store.find(EventQuery(after=places))
        assert found == [*histories["a"][1:], *histories["b"][-1:], *histories["c"]]
        assert await store.find(EventQuery(after=places, limit=2)) == found[:2]
        assert await store.find(EventQuery(after=places, most_bytes=1)) == found[:1]
        assert await store.find(EventQuery(after=places, most_bytes=10**6)) == found
        assert await store.find(EventQuery(after=())) == []
        assert await store.find(EventQuery(after=places, only_ends=True)) == [], "none of them has finished"
        with pytest.raises(InvalidInput):
            await store.find(EventQuery(after=(("a", None),)))  # type: ignore[arg-type]

    @pytest.mark.contract("EVT-6")
    async def test_the_ends_of_runs_that_have_finished_are_found_together(self, store: Store, node: SampleNode) -> None:
        """Unfinished runs are left out, and so are those not past their positions. Missing runs are named."""
        for run_id in ("b", "a", "c"):
            await node.start(run_id, complete())
        await node.start("d", wait("go"))
        ends = [(await store.read_events(run_id))[-1] for run_id in ("a", "b", "c")]

        places = (("c", 0), ("missing", 0), ("a", -1), ("b", ends[1].run_seq - 1), ("d", 0))
        for bounds, count in (({}, 3), ({"limit": 2}, 2), ({"most_bytes": 1}, 1)):
            found = await store.find(EventQuery(after=places, only_ends=True, **bounds))
            assert found == ends[:count]
            assert found.missing == ("missing",), "also of an answer that is cut short"
        behind = (("a", ends[0].run_seq), ("b", ends[1].run_seq - 1), ("c", ends[2].run_seq + 5))
        found = await store.find(EventQuery(after=behind, only_ends=True))
        assert (found, found.missing) == (ends[1:2], ())
        await store.purge(PurgePolicy(finished_run_ms=0, run_ids=("a", "c")))
        found = await store.find(EventQuery(after=places, only_ends=True))
        assert (found, found.missing) == (ends[1:2], ("a", "c", "missing"))

    # --- the mailbox

    async def test_mailbox_is_found_by_name_id_and_consumption(self, store: Store, node: SampleNode) -> None:
        """Unconsumed signals are in order of acceptance; consumed ones are included on request."""
        await node.start("run-1", wait("go"))
        await store.deliver(
            [signal("run-1", "go", signal_id="a"), signal("run-1", "stop", signal_id="a"), signal("run-1", "go")]
        )
        await node.step("run-1")

        async def find(**query: Any) -> list[int]:
            return [found.inbox_seq for found in await store.find(MailboxQuery(run_id="run-1", **query))]

        assert await find() == [2, 3]
        assert await find(consumed=True) == [1, 2, 3]
        assert await find(name="go") == [3]
        assert await find(name="go", consumed=True) == [1, 3]
        assert await find(signal_id="a", consumed=True) == [1, 2]
        assert await find(signal_id="A", consumed=True) == []
        assert await find(after=2, consumed=True) == [3]
        assert await find(limit=1) == [2]
        assert await store.find(MailboxQuery(run_id="missing")) == []

    @pytest.mark.contract("SIG-9")
    async def test_unconsumed_signals_are_found_over_all_runs(self, store: Store, node: SampleNode) -> None:
        """The order is that of the runs' creation, and then of acceptance, even after a deleted run."""
        await node.create("b", tenant="acme")
        await node.start("a", wait("go"))
        await node.start("c", tenant="acme")
        for run_id, name in (("c", "go"), ("a", "go"), ("a", "stop"), ("b", "go"), ("a", "go")):
            await accept(store, signal(run_id, name))
        await node.step("a")

        async def find(**query: Any) -> list[tuple[str, int]]:
            return [(found.run_id, found.inbox_seq) for found in await store.find(MailboxQuery(**query))]

        assert await find() == [("b", 1), ("a", 2), ("a", 3), ("c", 1)]
        assert await find(consumed=True) == [("b", 1), ("a", 1), ("a", 2), ("a", 3), ("c", 1)]
        assert await find(name="go") == [("b", 1), ("a", 3), ("c", 1)]
        assert await find(tenant="acme") == [("b", 1), ("c", 1)]
        assert await find(run_id="a", tenant="acme") == []
        assert await find(after_run="a", after=2) == [("a", 3), ("c", 1)]
        assert await find(after_run="a", after=3, limit=1) == [("c", 1)]
        assert await find(after_run="aa", after=1) == [("c", 1)]
        await node.step("c", complete())
        assert await find(unfinished=True) == [("b", 1), ("a", 2), ("a", 3)]
        assert await find(run_id="c", unfinished=True) == []
        assert await find(run_id="c") == [("c", 1)]

    async def test_mailbox_is_paged(self, store: Store, clock: VirtualClock) -> None:
        """A page is never longer than the store's limit."""
        await store.create([new_run("run-1")])
        most = self.limits.page_items
        for _ in range(most + 1):
            clock.advance(ms=MINUTE_MS)
            await accept(store, signal("run-1", "go"))
        page = await store.find(MailboxQuery(run_id="run-1", limit=10 * most))
        assert [found.inbox_seq for found in page] == list(range(1, most + 1))

    # --- tasks

    async def test_tasks_are_found_by_run_id_status_assignee_and_role(self, store: Store, node: SampleNode) -> None:
        """Each filter works alone and in combination; a role must equal one of the task's."""
        await node.start("run-1", task("a", roles=("boss", "clerk"), assignee="ann"), task("b", roles=("bos",)))
        await node.start("run-2", task("c", assignee="bob"))
        await node.step("run-2", complete())

        async def find(**query: Any) -> list[str]:
            return sorted(found.step_id for found in await store.find(TaskQuery(**query)))

        assert await find() == ["a", "b", "c"]
        assert await find(run_id="run-1") == ["a", "b"]
        assert await find(status="OPEN") == ["a", "b"]
        assert await find(status="CANCELLED") == ["c"]
        assert await find(assignee="ann") == ["a"]
        assert await find(role="clerk") == ["a"]
        assert await find(role="bos") == ["b"]
        assert await find(role="b%") == []
        assert await find(run_id="run-1", step_ids=("b", "c", "\x00")) == ["b"]
        assert await find(step_ids=()) == []
        assert await find(run_id="run-1", assignee="bob") == []
        [found] = await store.find(TaskQuery(assignee="ann"))
        assert await store.find(TaskQuery(task_id=found.task_id)) == [found]

    @pytest.mark.contract("TSK-1")
    async def test_tasks_are_found_by_plan_due_date_and_whom_they_concern(self, store: Store, node: SampleNode) -> None:
        """A task concerns its assignee, actors with one of its roles, and everybody if it has neither."""
        await node.start(
            "run-1", replace(task("a", roles=("boss", "clerk")), due_at=START + 5), task("b", roles=("0",))
        )
        await node.start("run-2", replace(task("c", assignee="ann"), due_at=START + 6), task("d"), plan_id="ship")
        await node.start("run-3", task("e", roles=("boss",), assignee="ann"))
        await node.step("run-3", complete())

        async def find(**query: Any) -> list[str]:
            return sorted(found.step_id for found in await store.find(TaskQuery(**query)))

        assert await find(workflow="order") == ["a", "b", "e"]
        assert await find(workflow="ship", assignee="ann") == ["c"]
        assert await find(workflow="shi") == []
        assert await find(due_before=START + 5) == []
        assert await find(due_before=START + 6, status="OPEN") == ["a"]
        assert await find(due_before=START + 7) == ["a", "c"]
        assert await find(role="") == []
        assert await find(actor="ann") == ["c", "d", "e"]
        assert await find(actor="ann", status="OPEN") == ["c", "d"]
        assert await find(actor="bob", actor_roles=("clerk", "boss")) == ["a", "d", "e"]
        assert await find(actor="bob", actor_roles=("boss",), status="CANCELLED") == ["e"]
        assert await find(actor="bob", actor_roles=("",)) == ["d"]
        assert await find(actor_roles=("boss",)) == ["a", "b", "c", "d", "e"]

    async def test_tasks_are_paged_by_their_ids(self, store: Store, node: SampleNode) -> None:
        """This holds across runs; a page is never longer than the store's limit."""
        most = self.limits.page_items
        await node.start("run-1", *(task(f"task-{number}") for number in range(most - 3)))
        await node.start("run-2", *(task(f"task-{number}") for number in range(6)))
        first = await store.find(TaskQuery(limit=10 * most))
        rest = await store.find(TaskQuery(after=first[-1].task_id))
        assert (len(first), len(rest)) == (most, 3)
        ids = [found.task_id for found in first + rest]
        assert ids == sorted(set(ids))

    @pytest.mark.contract("TSK-1")
    async def test_tasks_are_found_by_words_in_names_and_payloads(self, store: Store, node: SampleNode) -> None:
        """All words have to match, in any order, ignoring the case of A to Z; payloads are matched as JSON text."""
        await node.start(
            "run-1",
            replace(task("a"), name="Approve order", payload=Raw(b'{"who":"Ann \\"the boss\\" O\xc3\x89"}')),
            replace(task("b"), name="approve 100%", payload=Raw(b'["BOB_1"]')),
            replace(task("c"), name="pay", payload=Raw(b'"a text\\n"')),
        )

        async def find(text: str) -> list[str]:
            return sorted(found.step_id for found in await store.find(TaskQuery(text=text)))

        assert await find("approve") == ["a", "b"]
        assert await find("ORDER approve") == ["a"]
        assert await find("order bob") == []
        assert await find("ann order") == ["a"]
        assert await find('"the') == ["a"]
        assert await find("o\u00c9") == ["a"]
        assert await find("o\u00e9") == []
        assert await find("100%") == ["b"]
        assert await find("0%0") == []
        assert await find("bob_1") == ["b"]
        assert await find("bobx1") == []
        assert await find("text") == ["c"]
        assert await find("a\x00") == []
        assert await find("step_id") == [], "of a task only its name and its payload are looked at"
        assert len(await find(" ")) == 3

    @pytest.mark.contract("API-2")
    async def test_a_search_has_so_many_words_and_no_more(self, store: Store) -> None:
        """Each word is searched for in every row."""
        for text in ("x " * (SEARCH_WORDS + 1), "x" * (SEARCH_CHARS + 1)):
            for find in (store.find(RunQuery(text=text)), store.find(TaskQuery(text=text))):
                with pytest.raises(InvalidInput, match="words"):
                    await find
        for bound in (0, -1, 1.5, "7", 2**60):
            for bounds in wrong_bounds(bound):
                with pytest.raises(InvalidInput):
                    await store.find(RunQuery(**bounds))
                with pytest.raises(InvalidInput):
                    await store.find(TaskQuery(**bounds))

    @pytest.mark.contract("API-2")
    @pytest.mark.parametrize("newest", [False, True])
    async def test_a_look_at_runs_ends_after_so_many_rows(
        self, store: Store, clock: VirtualClock, newest: bool
    ) -> None:
        """It returns the position to continue from, whether or not it found anything, and continuing finds the rest."""
        for number in range(9):
            clock.advance(ms=1)
            tags = ("rare",) if number in (0, 8) else ()
            await store.create([new_run(f"run-{number}", tags=tags)])
        found: list[str] = []
        looks = 0
        query = RunQuery(text="rare", newest=newest, look=3, limit=5)
        while True:
            page = await store.find(query)
            looks += 1
            found += [head.run_id for head in page]
            if page.cursor is None and not page:
                break
            if newest:
                last = page.cursor or (page[-1].created_at, page[-1].run_id)
                query = replace(query, before=last)
            else:
                query = replace(query, after=page.cursor or page[-1].run_id)
        assert sorted(found) == ["run-0", "run-8"]
        assert 3 <= looks <= 5
        assert (await store.find(RunQuery(text="rare", newest=newest, look=100))).cursor is None
        full = await store.find(RunQuery(newest=newest, look=100, limit=2))
        assert (len(full), full.cursor) == (2, None)

    @pytest.mark.contract("API-2")
    async def test_a_look_at_tasks_ends_after_so_many_rows(self, store: Store, node: SampleNode) -> None:
        """Tasks of others count too: scanning them takes as long."""
        await node.start("run-1", *(task(f"task-{number}", roles=("boss",)) for number in range(5)), tenant="acme")
        await node.start("run-2", task("mine", roles=("clerk",)))
        found: list[str] = []
        query, looks = TaskQuery(text="mine", role="clerk", look=2), 0
        while True:
            page = await store.find(query)
            looks += 1
            found += [each.step_id for each in page]
            if page.cursor is None and not page:
                break
            query = replace(query, after=page.cursor or page[-1].task_id)
        assert len(found) <= 1
        assert 3 <= looks <= 5

    @pytest.mark.contract("API-2")
    async def test_rows_end_where_they_are_large_enough_together(
        self, store: Store, node: SampleNode, clock: VirtualClock
    ) -> None:
        """It ends with the row that reaches the size: there is at least one if any exists, however large."""
        large = Raw(b'"' + b"x" * 1_000 + b'"')
        await node.start("run-1", *(replace(task(f"task-{number}"), payload=large) for number in range(5)), wait("go"))
        for number in range(5):
            clock.advance(ms=MINUTE_MS)
            await accept(store, replace(signal("run-1", "other"), payload=large, signal_id=f"s{number}"))
        assert len(await store.find(TaskQuery(most_bytes=1))) == 1
        assert len(await store.find(TaskQuery(most_bytes=2_000))) == 2
        assert len(await store.find(TaskQuery(most_bytes=10**6))) == 5
        assert len(await store.find(MailboxQuery(run_id="run-1", most_bytes=1))) == 1
        assert len(await store.find(MailboxQuery(run_id="run-1", most_bytes=2_000))) == 2
        assert len(await store.find(MailboxQuery(most_bytes=2_500))) == 3
        history = await store.read_events("run-1")
        assert await store.read_events("run-1", most_bytes=10**6) == history
        assert await store.read_events("run-1", most_bytes=1) == history[:1]
        tasks = [event for event in history if event.step_id and event.step_id.startswith("task-")]
        some = await store.read_events("run-1", tasks[0].run_seq - 1, most_bytes=2_000)
        assert 1 <= len(some) <= 3
        assert await store.read_events("missing", most_bytes=1) == []
        assert len(await store.find(RunQuery(most_bytes=1))) == 1

    @pytest.mark.contract("API-4")
    async def test_waits_tasks_and_letters_are_found_by_tenant(self, store: Store, node: SampleNode) -> None:
        """The tenant is that of their run, compared whole; it combines with all other filters."""
        for tenant in ("acme", "Acme", "acm"):
            run_id = f"run-{tenant}"
            await node.start(run_id, wait("go"), task("a", assignee="ann"), tenant=tenant)
            await node.commit(replace(await node.turn(await node.load(run_id)), dead=(dead_letter(run_id),)))
        assert [found.run_id for found in await store.find(WaitQuery(tenant="acme"))] == ["run-acme"]
        assert await store.find(WaitQuery(tenant="acme", name="stop")) == []
        assert [found.run_id for found in await store.find(TaskQuery(tenant="acme"))] == ["run-acme"]
        assert await store.find(TaskQuery(tenant="acme", assignee="bob")) == []
        found = await store.find(DeadLetterQuery(tenant="acme"))
        assert [letter.run_id for letter in found] == ["run-acme"]
        assert await store.find(DeadLetterQuery(tenant="acme", reason="undecodable")) == []
        for query in (WaitQuery(tenant="a%"), WaitQuery(tenant="")):
            assert await store.find(query) == []

    # --- events

    @pytest.mark.contract("EVT-6")
    async def test_events_are_paged_by_run_seq(self, store: Store, node: SampleNode) -> None:
        """A reader continues after the last number it has, without gaps; it may request a longer page."""
        most = self.limits.page_items
        await node.start("run-1", *(marker(f"mark-{number}") for number in range(most + 5)))
        first = await store.read_events("run-1")
        rest = await store.read_events("run-1", after=most)
        assert [event.run_seq for event in first + rest] == list(range(1, most + 8))
        assert [event.run_seq for event in await store.read_events("run-1", after=3, limit=2)] == [4, 5]
        assert [event.run_seq for event in await store.read_events("run-1", after=-5, limit=2)] == [1, 2]
        assert len(await store.read_events("run-1", limit=10 * most)) == most + 7
        assert await store.read_events("run-1", after=1_000) == []

    @pytest.mark.contract("EVT-6")
    async def test_unknown_run_has_no_events(self, store: Store) -> None:
        """This is an answer, not an error."""
        assert await store.read_events("missing") == []

    @pytest.mark.contract("EVT-1")
    async def test_histories_of_two_runs_are_apart(self, store: Store, node: SampleNode) -> None:
        """Each counts from one."""
        await node.start("run-1", marker("mark"))
        await node.start("run-2")
        assert [event.run_seq for event in await read_history(store, "run-1")] == [1, 2, 3]
        assert {event.run_id for event in await read_history(store, "run-2")} == {"run-2"}

    async def test_page_of_fewer_than_one_is_refused(self, store: Store) -> None:
        """Every verb that pages refuses it, with the field's name."""
        await store.create([new_run("run-1")])
        calls = [
            call
            for limit in (0, -1)
            for call in (
                store.find(RunQuery(limit=limit)),
                store.find(WaitQuery(limit=limit)),
                store.find(MailboxQuery(run_id="run-1", limit=limit)),
                store.find(TaskQuery(limit=limit)),
                store.read_events("run-1", limit=limit),
            )
        ]
        for call in calls:
            with pytest.raises(InvalidInput) as raised:
                await call
            assert raised.value.details == {"field": "limit"}

    async def test_what_cannot_be_looked_up_is_refused(self, store: Store) -> None:
        """Text that is not Unicode, and numbers beyond any store, raise a typed error, never one of the driver."""
        calls: list[Awaitable[object]] = [
            store.load(["\ud800"]),
            store.read_events("\ud800"),
            store.read_events("run-1", after=2**70),
            store.find(RunQuery(tenant="\ud800")),
            store.find(WaitQuery(after=("", "\ud800"))),
            store.find(MailboxQuery(run_id="run-1", after=2**70)),
            store.find(TaskQuery(role="\ud800")),
            store.claim("\ud800", 1),
            store.renew("node-a", 2**70),
            store.release("\ud800"),
            store.next_due("\ud800"),
        ]
        for call in calls:
            with pytest.raises(InvalidInput):
                await call

    # --- counting

    async def test_stats_count_what_is_there(self, store: Store, clock: VirtualClock, node: SampleNode) -> None:
        """They count by status, readiness, and what waits, without what is closed, consumed, or due only later."""
        empty = Stats(
            runs={},
            ready=0,
            leased=0,
            messages=0,
            signals=0,
            open_tasks=0,
            jobs=0,
            dead_letters=0,
            nodes=0,
            oldest_ready_at=None,
        )
        assert await store.stats() == empty
        await node.start("run-1", wait("go"), task("approve"), timer(START + 60_000_000))
        await node.start("run-2", task("approve"))
        await node.step("run-2", complete())
        await node.start("run-3", wait("go"), timer(START + 60_000_000))
        await accept(store, signal("run-3", "go"))
        await node.step("run-3")
        clock.advance(ms=1)
        await store.create([new_run("run-4", now=clock.now())])
        await store.deliver([signal("run-1", "other"), message("run-4", "m-1", due_at=START + 60_000_000)])
        await store.renew("node-b", 10)
        clock.advance(ms=10)
        assert replace(await store.stats(), queues={}, leases={}) == replace(
            empty,
            runs={"RUNNING": 2, "COMPLETED": 1, "PENDING": 1},
            ready=2,
            leased=2,
            messages=4,
            signals=1,
            open_tasks=1,
            nodes=1,
            oldest_ready_at=START + 1_000,
        )

    async def test_stats_name_the_queues_and_the_nodes(
        self, store: Store, clock: VirtualClock, node: SampleNode
    ) -> None:
        """They contain the number of waiting jobs of each queue, and the end of each node's lease."""
        await node.start("run-1")
        end = await store.renew("node-c", 20)
        await store.renew("node-b", 10)
        clock.advance(ms=15)
        stats = await store.stats()
        assert stats.leases["node-c"] == end
        assert "node-b" not in stats.leases
        assert len(stats.leases) == stats.nodes
        assert sum(stats.queues.values()) == stats.jobs
