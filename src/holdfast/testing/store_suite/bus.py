"""The store suite, the event bus: an outbox that is written by commits, settled by relays, and held by retention."""

import pytest
from msgspec.structs import replace

from holdfast.core.bus import (
    OutboxEntry,
    OutboxReplay,
    OutboxSettlement,
    Sink,
    SinkProgress,
    SinkStatus,
    alert_of,
    letter_of,
)
from holdfast.core.dead_letters import Settled
from holdfast.errors import Conflict, InvalidInput, NotFound
from holdfast.store.port import CommitConflict, Committed, Created, Existing, PurgePolicy, Store
from holdfast.store.queries import AlertQuery, BusDeadLetterQuery, OutboxQuery, SinkQuery
from holdfast.testing.clock import START, VirtualClock
from holdfast.testing.samples import SampleNode, complete, marker, new_run, read_outbox, wait
from holdfast.testing.store_suite.audit import entry as audit_entry
from holdfast.testing.store_suite.audit import ids as audit_ids
from holdfast.testing.store_suite.base import BAD_NAMES, SuiteBase, check_refused, unchanged

HOOK = Sink(name="hook", kind="webhook", address="https://example.com/hook", secret="hook/key")


async def ranges(store: Store, sink: str = "hook") -> list[tuple[str, int, int]]:
    """Return what a sink has yet to receive."""
    return [(entry.run_id, entry.from_seq, entry.to_seq) for entry in await read_outbox(store, sink)]


async def entries(store: Store, sink: str = "hook") -> list[OutboxEntry]:
    """Return the entries of a sink as a relay finds them."""
    return await store.find(OutboxQuery(sink=sink))


async def settle_all(store: Store, sink: str = "hook") -> None:
    """Settle all entries of a sink."""
    found = [OutboxSettlement(entry=entry) for entry in await entries(store, sink)]
    assert all(await store.settle_outbox(sink, found, SinkProgress(delivered=len(found))))


async def status_of(store: Store, sink: str = "hook") -> SinkStatus:
    """Return a sink and its status."""
    [found] = await store.find(SinkQuery(name=sink, counted=True))
    return found


class BusSuite(SuiteBase):
    """How events leave the store."""

    @pytest.fixture(autouse=True)
    def _with_an_outbox(self, request: pytest.FixtureRequest, store: Store) -> None:
        is_of_the_bus = request.function.__qualname__.startswith(BusSuite.__name__)
        if is_of_the_bus and "outbox" in store.capabilities.lacking:
            pytest.skip("the store declares that it has no outbox, and refuses sinks")

    # --- what commits write

    @pytest.mark.contract("BUS-1")
    async def test_the_outbox_has_one_entry_for_each_commit_once_there_is_a_sink(
        self, store: Store, peer: Store, node: SampleNode
    ) -> None:
        """There is no entry per event. The store itself knows the sink, even one that another process stored."""
        await node.start("run-0", wait("go"))
        assert await ranges(store) == []
        await peer.put_sink(HOOK)
        await node.create("run-1")
        created = (await node.load("run-1")).head.version
        await node.step("run-1", marker("a"), marker("b"), wait("go"))
        after_turn = (await node.load("run-1")).head.version
        assert after_turn > created + 1
        await node.step("run-0", complete())
        versions = {run_id: (await node.load(run_id)).head.version for run_id in ("run-0", "run-1")}
        late = [found for found in await ranges(peer) if found[0] == "run-0"]
        assert [to for _, _, to in late] == [versions["run-0"]]
        assert late[0][1] > 1
        mine = [found for found in await ranges(peer) if found[0] == "run-1"]
        assert mine == [("run-1", 1, created), ("run-1", created + 1, after_turn)]
        found = (await entries(store))[-1]
        assert (found.workflow, found.tenant, found.project, found.environment) == (
            *((await node.load("run-1")).head.plan_id, "default"),
            *("default", "default"),
        )
        assert (found.attempts, found.at, found.due_at) == (0, START, START)

    @pytest.mark.contract("BUS-1")
    async def test_what_is_not_committed_is_not_in_the_outbox(self, store: Store, node: SampleNode) -> None:
        """A turn that lost, a turn that was committed before, a run that exists: none of them is sent again."""
        await store.put_sink(HOOK)
        run = await node.create("run-1")
        turn = await node.turn(run, wait("go"))
        assert isinstance(await node.commit(turn), Committed)
        before = await ranges(store)
        assert isinstance(await node.commit(turn), Committed)
        assert isinstance(await node.commit(replace(turn, expected_version=99)), CommitConflict)
        again = new_run("run-1", now=START)
        assert isinstance((await store.create([again]))[0], Existing)
        assert await ranges(store) == before

    @pytest.mark.contract("BUS-1", "API-4")
    async def test_a_sink_gets_the_runs_of_its_tenant_and_workflows_only(self, store: Store, node: SampleNode) -> None:
        """Each run has one entry for each sink that wants it."""
        await store.put_sink(HOOK)
        await store.put_sink(replace(HOOK, name="acme:hook", tenant="acme"))
        other = replace(HOOK, name="other", workflows=("refund", "order 2"))
        await store.put_sink(other)
        await store.create([new_run("run-1", now=START, tenant="acme")])
        await store.create([new_run("run-2", now=START, tenant="emca", plan_id="refund")])
        assert {found[0] for found in await ranges(store)} == {"run-1", "run-2"}
        assert {found[0] for found in await ranges(store, "acme:hook")} == {"run-1"}
        assert {found[0] for found in await ranges(store, "other")} == {"run-2"}
        await store.put_sink(replace(other, workflows=()))
        await store.create([new_run("run-3", now=START)])
        assert {found[0] for found in await ranges(store, "other")} == {"run-2", "run-3"}

    # --- sinks

    @pytest.mark.contract("BUS-1", "API-4")
    async def test_a_sink_is_stored_replaced_and_removed(self, store: Store, peer: Store, clock: VirtualClock) -> None:
        """A replaced sink keeps what it has yet to receive; a removed one leaves nothing."""
        stored = await store.put_sink(replace(HOOK, created_at=7), audit_entry("e-1", "sinks.put"))
        assert stored == replace(HOOK, created_at=START)
        await store.create([new_run("run-1", now=START)])
        await store.settle_outbox("hook", [], SinkProgress(failures=3, due_at=START + 5, error="no route"))
        failing = await status_of(peer)
        assert (failing.failures, failing.due_at, failing.error, failing.failed_at) == (3, START + 5, "no route", START)
        clock.advance(ms=1)
        changed = replace(HOOK, address="https://example.com/other", is_paused=True)
        assert await peer.put_sink(changed) == replace(changed, created_at=START)
        found = await status_of(store)
        assert (found.sink, found.failures, found.due_at, found.backlog) == (
            replace(changed, created_at=START),
            *(0, 0, 1),
        )
        with pytest.raises(Conflict):
            await store.put_sink(replace(HOOK, tenant="acme"))
        assert await store.remove_sink("hook", audit_entry("e-2", "sinks.remove"))
        assert not await store.remove_sink("hook", audit_entry("e-3", "sinks.remove"))
        assert (await store.find(SinkQuery()), await entries(store)) == ([], [])
        assert await audit_ids(store) == ["e-1", "e-2"]
        await store.put_sink(HOOK)
        assert await entries(store) == []

    @pytest.mark.contract("BUS-1")
    async def test_sinks_are_numbered_as_they_are_made(self, store: Store) -> None:
        """Replacing a sink skips no number, and a sink that is created again gets another one."""
        for name in ("hook", "hook", "other"):
            await store.put_sink(replace(HOOK, name=name))
        await store.remove_sink("hook")
        await store.put_sink(HOOK)
        found = {status.sink.name: status.number for status in await store.find(SinkQuery())}
        assert found == {"hook": 3, "other": 2}

    async def test_sinks_are_found_by_name_and_tenant(self, store: Store) -> None:
        """They are ordered by name."""
        for name, tenant in (("b", None), ("a", "acme"), ("c", "acme")):
            await store.put_sink(replace(HOOK, name=name, tenant=tenant))

        async def names(query: SinkQuery) -> list[str]:
            return [status.sink.name for status in await store.find(query)]

        assert await names(SinkQuery()) == ["a", "b", "c"]
        assert await names(SinkQuery(tenant="acme")) == ["a", "c"]
        assert await names(SinkQuery(tenant="acme", name="b")) == []
        assert await names(SinkQuery(after="a", limit=1)) == ["b"]

    @pytest.mark.parametrize("name", BAD_NAMES)
    async def test_a_sink_that_cannot_be_used_is_refused(self, store: Store, name: object) -> None:
        """Nothing of it is stored."""
        async with unchanged(store):
            with pytest.raises(InvalidInput):
                await store.put_sink(replace(HOOK, name=name))
            with pytest.raises(InvalidInput):
                await store.remove_sink(name)  # type: ignore[arg-type]

    # --- settling

    @pytest.mark.contract("BUS-1")
    async def test_an_entry_is_settled_once_and_as_it_was_found(
        self, store: Store, peer: Store, clock: VirtualClock, node: SampleNode
    ) -> None:
        """A relay that was overtaken restores nothing; the counts are of what was sent."""
        await store.put_sink(HOOK)
        await node.start("run-1", marker("a"), wait("go"))
        first, second = await entries(store)
        rest = replace(first, from_seq=first.to_seq, attempts=1, due_at=START + 10)
        clock.advance(ms=1)
        progress = SinkProgress(failures=1, due_at=START + 10, error="500", delivered=3)
        assert await store.settle_outbox("hook", [OutboxSettlement(entry=first, rest=rest)], progress) == [True]
        assert await peer.settle_outbox("hook", [OutboxSettlement(entry=first, rest=first)], progress) == [False]
        assert await entries(peer) == [rest, second] if rest.from_seq <= second.from_seq else [second, rest]
        items = [OutboxSettlement(entry=rest), OutboxSettlement(entry=replace(second, to_seq=99))]
        assert await peer.settle_outbox("hook", items, SinkProgress(delivered=2)) == [True, False]
        assert await entries(store) == [second]
        status = await status_of(store)
        assert (status.delivered, status.failures, status.error, status.backlog) == (8, 0, "", 1)
        assert (status.delivered_at, status.failed_at, status.oldest_at) == (START + 1_000, START + 1_000, START)
        assert await store.settle_outbox("nowhere", items, SinkProgress()) == [False, False]

    @pytest.mark.contract("BUS-1")
    async def test_what_a_removed_sink_got_is_not_settled_for_one_of_the_same_name(
        self, store: Store, peer: Store
    ) -> None:
        """Its relay may still be sending when another sink has the name, with equal entries of equal runs."""
        await store.put_sink(HOOK)
        await store.create([new_run("run-1", now=START)])
        old, items = await status_of(store), [OutboxSettlement(entry=each) for each in await entries(store)]
        assert await peer.remove_sink("hook")
        await peer.put_sink(HOOK)
        await peer.replay_outbox(OutboxReplay(sink="hook"))
        [entry] = await entries(peer)
        assert (entry.number, entry.from_seq, entry.to_seq) == (
            items[0].entry.number,
            items[0].entry.from_seq,
            items[0].entry.to_seq,
        )
        new = await status_of(store)
        progress = SinkProgress(number=old.number, failures=2, due_at=START + 10, error="500", delivered=1)
        assert (old.number != new.number, await store.settle_outbox("hook", items, progress)) == (True, [False])
        assert (await entries(store), await status_of(store)) == ([entry], new)
        assert await store.settle_outbox("hook", items, replace(progress, number=new.number)) == [True]

    @pytest.mark.contract("BUS-1")
    async def test_sinks_are_settled_each_by_itself(self, store: Store) -> None:
        """What one sink has received is still pending for another."""
        await store.put_sink(HOOK)
        await store.put_sink(replace(HOOK, name="slow"))
        await store.create([new_run(f"run-{number}", now=START) for number in (1, 2, 3)])
        await settle_all(store)
        assert (await ranges(store), len(await ranges(store, "slow"))) == ([], 3)
        page = await store.find(OutboxQuery(sink="slow", limit=1))
        rest = await store.find(OutboxQuery(sink="slow", after=(page[0].number, page[0].from_seq)))
        assert len([*page, *rest]) == 3
        assert [entry.number for entry in rest] == sorted(entry.number for entry in rest)

    @pytest.mark.contract("BUS-1", "API-4")
    async def test_what_was_given_up_is_a_dead_letter_that_can_be_requeued_or_dropped(
        self, store: Store, peer: Store, clock: VirtualClock
    ) -> None:
        """Each action adds an entry to the audit log."""
        await store.put_sink(HOOK)
        await store.create([new_run(f"run-{number}", now=START) for number in (1, 2)])
        found = await entries(store)
        letters = [letter_of(HOOK, replace(each, attempts=25), "410 Gone", START + 1) for each in found]
        items = [OutboxSettlement(entry=each, letter=letter) for each, letter in zip(found, letters, strict=True)]
        assert await store.settle_outbox("hook", items, SinkProgress()) == [True, True]
        by_id = sorted(letters, key=lambda letter: letter.letter_id)
        assert await peer.find(BusDeadLetterQuery(sink="hook")) == by_id
        assert await peer.find(BusDeadLetterQuery(run_id="run-2", limit=5)) == [letters[1]]
        assert await peer.find(BusDeadLetterQuery(tenant="acme")) == []
        assert await peer.find(BusDeadLetterQuery(after=(by_id[0].died_at, by_id[0].letter_id))) == by_id[1:]
        assert (await status_of(store)).dead_letters == 2
        clock.advance(ms=1)
        ids = [letters[0].letter_id, "unknown"]
        answers = await peer.settle_bus_dead_letters(ids, "requeue", audit_entry("e-1", "bus.requeue"))
        assert answers[0] == Settled(letters[0].letter_id, "requeue")
        check_refused(answers[1], NotFound)
        [again] = await entries(store)
        assert (again.run_id, again.from_seq, again.to_seq) == ("run-1", found[0].from_seq, found[0].to_seq)
        assert (again.attempts, again.due_at) == (0, START + 1_000)
        assert await store.settle_bus_dead_letters([letters[1].letter_id], "drop") == [
            Settled(letters[1].letter_id, "drop")
        ]
        assert await store.find(BusDeadLetterQuery()) == []
        assert len(await entries(store)) == 1
        assert len(await audit_ids(store)) == 1

    # --- replay and alerts

    @pytest.mark.contract("BUS-1")
    async def test_events_are_replayed_from_an_instant_or_for_one_run(
        self, store: Store, clock: VirtualClock, node: SampleNode
    ) -> None:
        """The replay covers what the store still has and the sink wants."""
        await node.start("run-1", wait("go"))
        await node.start("run-2", wait("go"))
        clock.advance(ms=5)
        versions = {run_id: (await node.load(run_id)).head.version for run_id in ("run-1", "run-2")}
        await node.step("run-1", complete())
        last = (await node.load("run-1")).head.version
        await store.put_sink(HOOK)
        assert (await store.replay_outbox(OutboxReplay("hook", START + 5_000))).runs == 1
        assert await ranges(store) == [("run-1", versions["run-1"] + 1, last)]
        await settle_all(store)
        first = await store.replay_outbox(OutboxReplay("hook", limit=1))
        assert (first.runs, first.after is None) == (1, False)
        rest = await store.replay_outbox(OutboxReplay("hook", after=first.after or 0, limit=1))
        assert (rest.runs, rest.after) == (1, None)
        assert await ranges(store) == [("run-1", 1, last), ("run-2", 1, versions["run-2"])]
        await settle_all(store)
        entry = audit_entry("e-1", "bus.replay")
        assert (await store.replay_outbox(OutboxReplay("hook", run_id="run-1", from_seq=2), entry)).runs == 1
        assert await ranges(store) == [("run-1", 2, last)]
        assert await audit_ids(store) == ["e-1"]
        for sink, run_id in (("nowhere", None), ("hook", "nowhere")):
            with pytest.raises(NotFound):
                await store.replay_outbox(OutboxReplay(sink, run_id=run_id))

    @pytest.mark.contract("BUS-1", "API-4")
    async def test_a_replay_examines_a_bounded_number_of_runs(
        self, store: Store, clock: VirtualClock, node: SampleNode
    ) -> None:
        """This holds even if the sink wants none of them: others wait meanwhile. For one run, no other is examined."""
        for number in range(5):
            await node.start(f"run-{number}", complete())
        clock.advance(ms=5)
        await node.start("late", complete())
        await store.put_sink(HOOK)
        asked, calls, runs = OutboxReplay("hook", START + 5_000, look=2), 0, 0
        while True:
            replayed = await store.replay_outbox(asked)
            calls, runs = calls + 1, runs + replayed.runs
            if replayed.after is None:
                break
            asked = replace(asked, after=replayed.after)
        assert (calls, runs) == (4, 1)
        assert [run_id for run_id, _, _ in await ranges(store)] == ["late"]
        one = await store.replay_outbox(OutboxReplay("hook", run_id="run-4", look=1))
        assert (one.runs, one.after) == (1, None)

    @pytest.mark.contract("BUS-1", "PRJ-3")
    async def test_alerts_are_events_of_their_own_for_sinks_that_want_them(self, store: Store, peer: Store) -> None:
        """Alerts are numbered, sent once per id, and not sent to the sink that they are about."""
        lag, dead = alert_of("PROJECTOR_LAG_HIGH", 2, "9 s", run_id="run-1"), alert_of("DEAD", 1, "x", sink="pager")
        await store.put_sink(HOOK)
        assert await store.raise_alerts([lag]) == 0
        assert (await store.find(AlertQuery()), await ranges(store)) == ([], [])
        await store.put_sink(replace(HOOK, alerts=True))
        await store.put_sink(replace(HOOK, name="pager", alerts=True))
        assert await store.raise_alerts([lag, dead, lag]) == 2
        assert await peer.raise_alerts([dead]) == 0
        found = await peer.find(AlertQuery())
        assert found == [
            replace(lag, number=found[0].number, raised_at=START),
            replace(dead, number=found[0].number + 1, raised_at=START),
        ]
        one, two = (alert.number for alert in found)
        assert await ranges(peer) == [("", one, one), ("", two, two)]
        assert await ranges(peer, "pager") == [("", one, one)]
        assert await store.find(AlertQuery(after=one)) == found[1:]

    # --- retention

    @pytest.mark.contract("BUS-1", "FMT-2")
    async def test_a_run_is_kept_while_a_sink_has_yet_to_get_it_up_to_a_bound(
        self, store: Store, clock: VirtualClock, node: SampleNode
    ) -> None:
        """After that it is deleted, with what was not delivered of it."""
        await store.put_sink(HOOK)
        await node.start("run-1", complete())
        await node.start("run-2", complete())
        for each in await entries(store):
            if each.run_id == "run-2":
                letter = letter_of(HOOK, each, "gone", START)
                await store.settle_outbox("hook", [OutboxSettlement(entry=each, letter=letter)], SinkProgress())
        policy = PurgePolicy(finished_run_ms=0, sink_hold_ms=1_000)
        report = await store.purge(policy)
        assert (report.runs, report.outbox) == (1, 2)
        assert await store.find(BusDeadLetterQuery()) == []
        assert {found[0] for found in await ranges(store)} == {"run-1"}
        clock.advance(ms=1_000)
        assert (await store.purge(replace(policy, dry_run=True))).runs == 1
        assert (await store.purge(policy)).runs == 1
        assert await entries(store) == []

    @pytest.mark.contract("BUS-1", "FMT-2")
    async def test_what_waits_in_the_outbox_is_bounded_by_its_window(self, store: Store, clock: VirtualClock) -> None:
        """This covers entries, dead letters and alerts, of one tenant or of all."""
        await store.put_sink(replace(HOOK, alerts=True))
        await store.put_sink(replace(HOOK, name="acme:hook", tenant="acme"))
        await store.create([new_run("run-1", now=START, tenant="acme")])
        await store.raise_alerts([alert_of("X", 1, "x")])
        clock.advance(ms=1_000)
        await store.create([new_run("run-2", now=START + 1, tenant="acme")])
        policy = PurgePolicy(outbox_ms=1_000)
        assert (await store.purge(replace(policy, dry_run=True))).outbox == 4
        assert (await store.purge(replace(policy, tenant="acme"))).outbox == 1
        assert (await store.purge(policy)).outbox == 3
        assert {found[0] for found in await ranges(store)} == {"run-2"}
        assert await store.find(AlertQuery()) == []
        clock.advance(ms=1_000)
        cut = await store.purge(replace(policy, limit=1))
        assert (cut.outbox, cut.has_more) == (1, True)
        tenants = await store.purge(PurgePolicy(tenant="acme", sinks=True))
        assert tenants.outbox == 1
        assert [status.sink.name for status in await store.find(SinkQuery())] == ["hook"]
        with pytest.raises(InvalidInput):
            await store.purge(PurgePolicy(sinks=True))

    @pytest.mark.contract("BUS-1", "FMT-2")
    @pytest.mark.parametrize("outbox_ms", [None, 0, 60_000], ids=["no window", "past it", "within it"])
    async def test_purge_counts_what_goes_with_its_runs_once_as_its_dry_run_says(
        self, store: Store, node: SampleNode, outbox_ms: int | None
    ) -> None:
        """Entries and dead letters of deleted runs go regardless of their window, and do not count for the limit."""
        await store.put_sink(replace(HOOK, alerts=True))
        await node.start("run-1", marker("a"), complete())
        await node.start("run-2", wait("go"))
        found = await entries(store)
        first, gone = found[0], sum(each.run_id == "run-1" for each in found)
        left = len(found) - gone
        letter = letter_of(HOOK, first, "gone", START)
        await store.settle_outbox("hook", [OutboxSettlement(entry=first, letter=letter)], SinkProgress())
        policy = PurgePolicy(finished_run_ms=0, sink_hold_ms=0, outbox_ms=outbox_ms, limit=left)
        promised = await store.purge(replace(policy, dry_run=True))
        expired = left if outbox_ms == 0 else 0
        assert (promised.runs, promised.outbox, promised.has_more) == (1, gone + expired, False)
        assert await store.purge(policy) == promised
        assert {entry.run_id for entry in await entries(store)} == ({"run-2"} if outbox_ms != 0 else set())
        assert await store.find(BusDeadLetterQuery()) == []

    @pytest.mark.contract("BUS-1", "FMT-2")
    async def test_purge_of_named_runs_leaves_what_the_bus_has_of_others(self, store: Store, node: SampleNode) -> None:
        """This includes entries past their window."""
        await store.put_sink(replace(HOOK, alerts=True))
        await node.start("run-1", complete())
        await node.start("run-2", complete())
        await store.raise_alerts([alert_of("X", 1, "x")])
        before = await entries(store)
        found = next(each for each in before if each.run_id == "run-2")
        letter = letter_of(HOOK, found, "gone", START)
        await store.settle_outbox("hook", [OutboxSettlement(entry=found, letter=letter)], SinkProgress())
        policy = PurgePolicy(run_ids=("run-1",), finished_run_ms=0, sink_hold_ms=0, outbox_ms=0)
        mine = [each for each in before if each.run_id == "run-1"]
        assert await store.purge(replace(policy, dry_run=True)) == await store.purge(policy)
        assert await entries(store) == [each for each in before if each not in (*mine, found)]
        assert (len(await store.find(AlertQuery())), await store.find(BusDeadLetterQuery())) == (1, [letter])

    async def test_runs_that_are_created_later_have_entries_of_their_own(
        self, store: Store, clock: VirtualClock, node: SampleNode
    ) -> None:
        """This holds even where a store reuses the number of a deleted run."""
        await store.put_sink(HOOK)
        await node.start("run-1", complete())
        await settle_all(store)
        clock.advance(ms=1)
        await store.purge(PurgePolicy(finished_run_ms=0))
        [created] = await store.create([new_run("run-2", now=START)])
        assert isinstance(created, Created)
        assert {found[0] for found in await ranges(store)} == {"run-2"}
