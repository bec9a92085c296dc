"""Relays: every event arrives, in order for each run, whatever fails on the way (BUS-1)."""

from __future__ import annotations

import asyncio
from contextlib import asynccontextmanager
from datetime import timedelta
from typing import Any

import pytest
from msgspec.structs import replace

import holdfast as hf
from holdfast.core.audit import AuditEntry
from holdfast.core.bus import OutboxReplay, OutboxSettlement, Sink, SinkProgress, pause_ms
from holdfast.core.events import Event
from holdfast.engine.activities.secrets import EnvironmentSecrets
from holdfast.engine.bus import relay
from holdfast.engine.bus.relay import RUNS_AT_ONCE
from holdfast.engine.observe.metrics import observer_of
from holdfast.engine.options import NodeOptions
from holdfast.store.memory import MemoryStore
from holdfast.store.payloads import SealingStore
from holdfast.store.port import Store
from holdfast.store.proxy import StoreProxy
from holdfast.store.queries import AlertQuery, BusDeadLetterQuery, EventQuery, OutboxQuery, SinkQuery
from tests.bus.webhook_server import KEY, Receiver, until

OPTIONS = NodeOptions(safety_poll_s=0.2, lease_ms=2_000, drain_s=2.0)
QUICK = {"first_ms": 5, "most_ms": 40, "allow_private": True}


def make_app(*, codecs: Any = ()) -> tuple[hf.App, Any]:
    """Return an app, and a workflow of some steps."""
    app = hf.App("shop", secrets=EnvironmentSecrets("S_", {"S_HOOK": KEY}), codecs=codecs)

    @app.activity
    async def charge(amount: int) -> str:
        return f"charged {amount}"

    @app.workflow
    async def order(amount: int) -> str:
        await charge(amount)
        return await charge(amount + 1)

    return app, order


def hook(receiver: Receiver, **fields: Any) -> Sink:
    """Return a sink that sends to a receiver."""
    given = {"name": "hook", "kind": "webhook", "address": receiver.url, "secret": "hook", **QUICK, **fields}
    return Sink(**given)


async def status_of(store: Store, name: str = "hook") -> Any:
    [found] = await store.find(SinkQuery(name=name, counted=True))
    return found


async def until_sent(store: Store, name: str = "hook") -> None:
    async with asyncio.timeout(60):
        while (await status_of(store, name)).backlog:  # noqa: ASYNC110
            await asyncio.sleep(0.01)


@asynccontextmanager
async def running(app: hf.App, store: Store, options: NodeOptions = OPTIONS) -> Any:
    async with asyncio.timeout(90), app.node(store, options=options):
        yield


@pytest.mark.contract("BUS-1")
async def test_every_event_arrives_signed_and_in_order(store: Store) -> None:
    """As CloudEvents whose ids are those of the events."""
    app, order = make_app()
    async with Receiver().serve() as receiver:
        app.sink("hook", receiver.url, secret=hf.Secret("hook"), **QUICK)
        async with running(app, store):
            runs = [await app.start(order, number, tenant="acme") for number in range(10)]
            for run in runs:
                await run.result()
            await until_sent(store)
            histories = {run.run_id: await run.events() for run in runs}
        assert receiver.unsigned == 0
        for run_id, history in histories.items():
            assert receiver.of(run_id) == [event.run_seq for event in history]
        known = {event.event_id for history in histories.values() for event in history}
        assert {event["id"] for event in receiver.events} == known
        last = receiver.events[-1]
        assert (last["specversion"], last["source"], last["datacontenttype"]) == (
            *("1.0", "/holdfast/acme/default/default"),
            "application/json",
        )
        assert {event["type"] for event in receiver.events} >= {"holdfast.RunQueued", "holdfast.StepCompleted"}
        assert (last["workflow"], last["tenant"], last["data"]["run_seq"]) == ("order", "acme", int(last["sequence"]))
        assert "application/cloudevents+json" in receiver.head
        assert "POST /hook?x=1" in receiver.head


@pytest.mark.contract("BUS-1")
async def test_a_sink_that_fails_often_gets_everything_in_order(store: Store) -> None:
    """And duplicates have equal ids."""
    app, order = make_app()
    async with Receiver(failing=0.3).serve() as receiver:
        await store.put_sink(hook(receiver))
        async with running(app, store):
            runs = [await app.start(order, number) for number in range(10)]
            for run in runs:
                await run.result()
            await until_sent(store)
            for run in runs:
                assert receiver.of(run.run_id) == [event.run_seq for event in await run.events()]
        assert all(len(ids) == 1 for ids in receiver.ids().values())
        assert receiver.requests > len(receiver.events)
        assert await store.find(BusDeadLetterQuery()) == []
        assert (await status_of(store)).delivered == sum(len(each) for each in [receiver.ids()])


@pytest.mark.contract("BUS-1")
async def test_a_sink_that_is_away_holds_up_neither_runs_nor_other_sinks(store: Store) -> None:
    """What waits is visible; when the sink is back it gets it."""
    app, order = make_app()
    async with Receiver().serve() as receiver:
        away = Receiver()
        async with away.serve():
            pass
        await store.put_sink(hook(receiver))
        await store.put_sink(hook(away, name="away", most_ms=100, max_attempts=10_000))
        async with running(app, store):
            run = await app.start(order, 1)
            assert await run.result() == "charged 2"
            await until_sent(store)
            async with asyncio.timeout(60):
                while not (await status_of(store, "away")).failures:  # noqa: ASYNC110
                    await asyncio.sleep(0.01)
            status = await status_of(store, "away")
            assert status.backlog >= 1
            assert status.oldest_at is not None
            assert "Connect" in status.error or "refused" in status.error
            async with away.serve():
                await until_sent(store, "away")
        assert away.of(run.run_id) == receiver.of(run.run_id)
        assert (await status_of(store, "away")).failures == 0


@pytest.mark.contract("BUS-1")
async def test_a_sink_that_is_made_again_under_its_name_while_its_relay_sends_gets_everything(store: Store) -> None:
    """What the old one has got is not settled for the new one, which goes elsewhere."""
    app, order = make_app()
    async with Receiver().serve() as first, Receiver().serve() as second:

        class Replacing(StoreProxy):
            """The sink is replaced after its events were sent, before they are settled."""

            async def settle_outbox(self, sink: str, items: Any, progress: SinkProgress) -> list[bool]:
                if items and not replaced:
                    replaced.append(len(items))
                    await store.remove_sink(sink)
                    await store.put_sink(hook(second))
                    await store.replay_outbox(OutboxReplay(sink))
                return await store.settle_outbox(sink, items, progress)

        replaced: list[int] = []
        await store.put_sink(hook(first))
        async with running(app, store, replace(OPTIONS, relays=False)):
            run = await app.start(order, 1)
            await run.result()
            history = [event.run_seq for event in await run.events()]
        async with running(app, Replacing(store)):
            while second.of(run.run_id) != history:  # noqa: ASYNC110 - another task sends; `running` bounds it
                await asyncio.sleep(0.01)
            await until_sent(store)
        assert (replaced != [], first.of(run.run_id), second.of(run.run_id)) == (True, history, history)
        assert (await status_of(store)).delivered == len(history)


@pytest.mark.contract("BUS-1", "API-4")
async def test_what_is_for_a_sink_that_was_made_again_is_never_sent_to_the_old_address(store: Store) -> None:
    """Also if it is replaced after the relay has read where to send, and before it reads what."""
    app, order = make_app()
    async with Receiver().serve() as first, Receiver().serve() as second:

        class Replacing(StoreProxy):
            """The sink is replaced once its relay has read it, before what it has yet to get is read."""

            async def find(self, query: Any) -> Any:
                found = await self.inner.find(query)
                if isinstance(query, SinkQuery) and query.name == "hook" and not replaced:
                    replaced.append(query)
                    await store.remove_sink("hook")
                    await store.put_sink(hook(second))
                    await store.replay_outbox(OutboxReplay("hook"))
                return found

        replaced: list[SinkQuery] = []
        await store.put_sink(hook(first))
        async with running(app, store, replace(OPTIONS, relays=False)):
            run = await app.start(order, 1)
            await run.result()
            history = [event.run_seq for event in await run.events()]
        async with running(app, Replacing(store)):
            while second.of(run.run_id) != history:  # noqa: ASYNC110 - another task sends; `running` bounds it
                await asyncio.sleep(0.01)
            await until_sent(store)
        assert (len(replaced), first.requests, second.of(run.run_id)) == (1, 0, history)


@pytest.mark.contract("BUS-1")
async def test_a_sink_that_hangs_is_left_alone_after_one_request_for_each_place(store: Store) -> None:
    """It is not asked for every run that waits, each with its time-out; when it answers again it gets everything."""
    app, order = make_app()
    async with Receiver().serve() as receiver:
        receiver.delay_s = 60.0
        await store.put_sink(hook(receiver, timeout_ms=100, first_ms=60_000, most_ms=60_000))
        async with running(app, store, replace(OPTIONS, relays=False)):
            runs = [await app.start(order, number) for number in range(30)]
            for run in runs:
                await run.result()
        async with running(app, store):
            async with asyncio.timeout(60):
                while not (await status_of(store)).failures:  # noqa: ASYNC110
                    await asyncio.sleep(0.01)
            assert 1 <= receiver.begun <= RUNS_AT_ONCE
            receiver.delay_s = 0.0
            await store.put_sink(hook(receiver))  # as an operator who resumes it
            for entry in await store.find(OutboxQuery(sink="hook")):
                done = SinkProgress()
                rest = replace(entry, due_at=0, attempts=0)
                await store.settle_outbox("hook", [OutboxSettlement(entry=entry, rest=rest)], done)
            await until_sent(store)
            for run in runs:
                assert receiver.of(run.run_id) == [event.run_seq for event in await run.events()]


@pytest.mark.contract("BUS-1")
async def test_what_a_slow_sink_has_got_is_settled_before_the_rest_has_arrived(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So a relay that dies does not send it all again: neither that of other runs, nor of one long history."""
    monkeypatch.setattr(relay, "SETTLE_S", 0.0)
    monkeypatch.setattr(relay, "PAGE_EVENTS", 2)
    app, order = make_app()
    settled: list[int] = []

    class Settling(StoreProxy):
        async def settle_outbox(self, sink: str, items: Any, progress: SinkProgress) -> list[bool]:
            settled.append(progress.delivered)
            return await self.inner.settle_outbox(sink, items, progress)

    async with Receiver().serve() as receiver:
        async with running(app, store, replace(OPTIONS, relays=False)):
            runs = [await app.start(order, number) for number in range(12)]
            for run in runs:
                await run.result()
        await store.put_sink(hook(receiver))
        await store.replay_outbox(OutboxReplay("hook", limit=100))
        async with running(app, Settling(store)):
            await until_sent(store)
            for run in runs:
                assert receiver.of(run.run_id) == [event.run_seq for event in await run.events()]
    assert max(settled) <= 2 * RUNS_AT_ONCE
    assert sum(settled) == len(receiver.events) == len(receiver.ids())


class Reading(StoreProxy):
    """A store that counts by how many calls events are read for relays."""

    reads = 0

    async def find(self, query: Any) -> Any:
        self.reads += isinstance(query, EventQuery) and query.most_bytes is not None
        return await self.inner.find(query)

    async def read_events(
        self, run_id: str, after: int = 0, limit: int | None = None, most_bytes: int | None = None
    ) -> list[Event]:
        self.reads += most_bytes is not None
        return await self.inner.read_events(run_id, after, limit, most_bytes)


@pytest.mark.contract("BUS-1")
@pytest.mark.parametrize("fits", [True, False])
async def test_events_of_many_runs_are_read_by_one_query(
    store: Store, fits: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What does not fit into it is read run by run, and nothing is left out."""
    if not fits:
        monkeypatch.setattr(relay, "AHEAD_EVENTS", 25)
    app, order = make_app()
    seen: dict[str, list[int]] = {}

    def note(events: list[dict[str, Any]]) -> None:
        for event in events:
            seen.setdefault(event["subject"], []).append(int(event["sequence"]))

    async with running(app, store, replace(OPTIONS, relays=False)):
        runs = [await app.start(order, number) for number in range(12)]
        histories = {
            run.run_id: [event.run_seq for event in (await run.result(), await run.events())[1]] for run in runs
        }
    await store.put_sink(Sink(name="all", kind="projection"))
    await store.replay_outbox(OutboxReplay("all", limit=100))
    app.projection("all")(note)
    reading = Reading(store)
    async with running(app, reading):
        await until_sent(store, "all")
    assert seen == histories
    assert reading.reads == 1 if fits else reading.reads > 8


@pytest.mark.contract("BUS-1")
async def test_what_a_sink_rejects_becomes_a_dead_letter_and_an_alert_and_can_be_requeued(store: Store) -> None:
    """Other runs go on meanwhile; the later events of the run follow without it."""
    app, order = make_app()
    async with Receiver().serve() as receiver, Receiver().serve() as pager:
        await store.put_sink(hook(receiver, event_types=("RunQueued", "RunCompleted")))
        await store.put_sink(hook(pager, name="pager", alerts=True, workflows=("none",)))
        receiver.answer_of = lambda event: 422 if event["data"].get("run_id") == "bad" else 200
        async with running(app, store):
            bad = await app.start(order, 1, run_id="bad")
            good = await app.start(order, 2)
            await bad.result()
            await good.result()
            async with asyncio.timeout(60):
                while not await store.find(BusDeadLetterQuery()):  # noqa: ASYNC110
                    await asyncio.sleep(0.01)
            await until_sent(store)
            letters = await store.find(BusDeadLetterQuery())
            assert {letter.run_id for letter in letters} == {"bad"}
            assert (letters[0].attempts, letters[0].detail) == (3, "the answer is 422")
            await until(lambda: any(event["type"] == "holdfast.Alert" for event in pager.events))
            [alert, *_] = [event for event in pager.events if event["type"] == "holdfast.Alert"]
            assert (alert["data"]["code"], alert["data"]["sink"]) == ("BUS_DEAD_LETTER", "hook")
            assert not any(event["type"] == "holdfast.Alert" for event in receiver.events)
            receiver.answer_of = lambda event: 200
            await store.settle_bus_dead_letters([letter.letter_id for letter in letters], "requeue")
            await until_sent(store)
            assert receiver.of("bad") == [
                event.run_seq for event in await bad.events() if event.event_type in ("RunQueued", "RunCompleted")
            ]
            assert len(receiver.of(good.run_id)) == 2


@pytest.mark.contract("BUS-1")
async def test_after_so_many_failures_what_cannot_be_sent_is_given_up(store: Store) -> None:
    """Then the next is tried; and it is an alert, once, that the sink fails."""
    app, order = make_app()
    async with Receiver().serve() as receiver:
        receiver.status = 500
        await store.put_sink(Sink(name="pager", kind="projection", alerts=True, workflows=("none",)))
        await store.put_sink(hook(receiver, max_attempts=3, first_ms=1, most_ms=2, event_types=("RunQueued",)))
        async with running(app, store):
            run = await app.start(order, 1)
            await run.result()
            async with asyncio.timeout(60):
                while not await store.find(BusDeadLetterQuery()):  # noqa: ASYNC110
                    await asyncio.sleep(0.01)
        [letter] = await store.find(BusDeadLetterQuery())
        assert (letter.from_seq, letter.attempts, letter.detail) == (1, 3, "the answer is 500")
        failing = [alert for alert in await store.find(AlertQuery()) if alert.code == "BUS_SINK_FAILING"]
        said = [(alert.priority, alert.sink, alert.detail) for alert in failing]
        assert said == [(1, "hook", "3 failures: the answer is 500")]


@pytest.mark.contract("BUS-1")
@pytest.mark.parametrize("fraction", [0.0, 0.5, 0.999])
def test_pauses_grow_twofold_up_to_a_bound_and_are_drawn(fraction: float) -> None:
    sink = Sink(name="hook", kind="projection", first_ms=100, most_ms=1_000)
    full = [100, 200, 400, 800, 1_000, 1_000]
    pauses = [pause_ms(sink, failures, fraction) for failures in (1, 2, 3, 4, 5, 10**9)]
    assert pauses == [int(each * (1 - fraction / 2)) for each in full]


@pytest.mark.contract("BUS-1", "TMR-1")
async def test_a_sink_that_has_failed_is_left_alone_for_its_pause(store: Store) -> None:
    """Whatever is committed meanwhile, and whichever node relays."""
    app, order = make_app()
    async with Receiver().serve() as receiver:
        receiver.status = 500
        await store.put_sink(hook(receiver, first_ms=3_600_000, most_ms=7_200_000))
        async with running(app, store):
            first = await app.start(order, 1)
            async with asyncio.timeout(60):
                while not (status := await status_of(store)).failures:  # noqa: ASYNC110
                    await asyncio.sleep(0.01)
            asked = receiver.requests
            await (await app.start(order, 2)).result()
            await first.result()
        again, _ = make_app()
        async with running(again, store):
            await (await again.start(hf.Workflow(again.registry.workflow("order")), 3)).result()
            await asyncio.sleep(1)  # a relay that did not wait would have asked by now
        assert receiver.requests == asked
        pause_s = (status.due_at - status.failed_at) / 1_000_000
        assert 1_800 <= pause_s <= 3_600
        assert (await status_of(store)).due_at == status.due_at


@pytest.mark.contract("BUS-1", "SEC-1")
async def test_of_encrypted_values_nothing_leaves_unless_the_sink_may_open_them(store: Store) -> None:
    """What an event says beside them does."""
    app, order = make_app(codecs=[hf.Encryption({"k": b"1" * 32})])
    async with Receiver().serve() as receiver, Receiver().serve() as trusted:
        await store.put_sink(hook(receiver))
        await store.put_sink(hook(trusted, name="trusted", payloads="opened"))
        async with running(app, store):
            run = await app.start(order, 41)
            await run.result()
            await until_sent(store)
            await until_sent(store, "trusted")
            is_sealed = isinstance(app.runtime().store.inner, SealingStore)  # type: ignore[attr-defined]
        assert is_sealed
        assert "charged 42" not in str(receiver.events)
        assert "encrypted" in str(receiver.events)
        assert "charged 42" in str(trusted.events)


@pytest.mark.contract("BUS-1", "PRJ-3")
async def test_a_projection_goes_on_where_it_was_when_its_process_ended(store: Store) -> None:
    """It gets each run's events in order, and none is left out."""
    seen: list[tuple[str, int]] = []
    failing = [True]

    def build() -> tuple[hf.App, Any]:
        app, order = make_app()

        @app.projection("totals", first_ms=1, most_ms=5)
        async def totals(events: list[dict[str, Any]]) -> None:
            if failing[0] and len(seen) >= 8:
                raise RuntimeError("the projector is ill")
            seen.extend((event["subject"], int(event["sequence"])) for event in events)

        return app, order

    app, order = build()
    async with running(app, store):
        runs = [await app.start(order, number) for number in range(4)]
        for run in runs:
            await run.result()
        await until(lambda: len(seen) >= 8)
    assert (await status_of(store, "totals")).backlog
    failing[0] = False
    app, _ = build()
    async with running(app, store):
        await until_sent(store, "totals")
        for run in runs:
            history = [event.run_seq for event in await app.run(run.run_id).events()]
            assert list(dict.fromkeys(seq for run_id, seq in seen if run_id == run.run_id)) == history


@pytest.mark.contract("PRJ-3", "BUS-1")
async def test_a_projection_that_is_far_behind_is_an_alert(store: Store) -> None:
    """Once, until it has caught up."""
    app, order = make_app()
    failures: list[str] = []

    @app.projection("late", first_ms=1, most_ms=5)
    async def late(events: list[dict[str, Any]]) -> None:
        if failures:
            raise RuntimeError(failures.pop())

    app.projection("pager", alerts=True, workflows=("none",))(lambda events: None)
    async with running(app, store):
        run = await app.start(order, 1)
        await run.result()
        await until_sent(store, "late")
    await store.replay_outbox(OutboxReplay("late", run_id=run.run_id))
    [entry] = await store.find(OutboxQuery(sink="late"))
    aged = OutboxSettlement(entry=entry, rest=replace(entry, at=entry.at - 60_000_000, attempts=1))
    assert await store.settle_outbox("late", [aged], SinkProgress()) == [True]
    failures += ["not yet", "not yet"]
    async with running(app, store):
        await until_sent(store, "late")
        await until_alert(store, "PROJECTOR_LAG_HIGH")
    assert failures == []
    assert [alert.code for alert in await store.find(AlertQuery())] == ["PROJECTOR_LAG_HIGH"]


@pytest.mark.contract("PRJ-3", "BUS-1")
async def test_a_projection_gets_only_events_that_it_asked_for(store: Store) -> None:
    """It is not called with none; and its name may be as long as names are."""
    app, order = make_app()
    calls: list[list[str]] = []
    name = "é" * 127
    app.projection(name, event_types=("RunCompleted",))(
        lambda events: calls.append([event["type"] for event in events])
    )
    async with running(app, store):
        await (await app.start(order, 1)).result()
        await until(lambda: bool(calls))
        await until_sent(store, name)
    assert calls == [["holdfast.RunCompleted"]]


@pytest.mark.contract("PRJ-3", "BUS-1")
async def test_a_projection_that_hangs_is_cancelled_and_tried_again(store: Store) -> None:
    app, order = make_app()
    calls: list[int] = []

    @app.projection("totals", timeout_ms=50, first_ms=1, most_ms=5)
    async def totals(events: list[dict[str, Any]]) -> None:
        calls.append(len(events))
        if len(calls) < 3:
            await asyncio.Event().wait()

    async with running(app, store):
        await (await app.start(order, 1)).result()
        await until(lambda: len(calls) >= 2)
        assert "within 0.05 s" in (await status_of(store, "totals")).error
        await until_sent(store, "totals")


class Holey(StoreProxy):
    """A store that has lost an event, for as long as it is said."""

    is_whole = False

    async def read_events(
        self, run_id: str, after: int = 0, limit: int | None = None, most_bytes: int | None = None
    ) -> list[Event]:
        found = await self._store.read_events(run_id, after, limit, most_bytes)
        return found if self.is_whole or most_bytes is None else [event for event in found if event.run_seq != 3]


@pytest.mark.contract("PRJ-3", "PRJ-2", "BUS-1")
async def test_a_gap_is_an_alert_and_is_never_skipped(store: Store) -> None:
    """However often it was tried; what is behind it is sent when it has closed. Other runs go on."""
    app, order = make_app()
    numbers: list[int] = []
    app.projection("pager", alerts=True, workflows=("none",))(lambda events: None)
    app.projection("all", first_ms=1, most_ms=5, max_attempts=2)(
        lambda events: numbers.extend(int(event["sequence"]) for event in events)
    )
    holey = Holey(store)
    async with running(app, holey):
        run = await app.start(order, 1)
        await run.result()
        await until_alert(store, "PROJECTOR_GAP_DETECTED")

        async def has_been_tried() -> bool:
            return any(entry.attempts >= 4 for entry in await store.find(OutboxQuery(sink="all")))

        async with asyncio.timeout(60):
            while not await has_been_tried():  # noqa: ASYNC110
                await asyncio.sleep(0.01)
        assert not [number for number in numbers if number > 2]
        assert await store.find(BusDeadLetterQuery()) == []
        assert (await status_of(store, "all")).failures == 0, "the sink is not why"
        holey.is_whole = True
        await until_sent(store, "all")
        assert list(dict.fromkeys(numbers)) == [event.run_seq for event in await run.events()]


@pytest.mark.contract("BUS-1", "LAT-1")
async def test_alerts_of_a_process_are_put_on_the_bus(store: Store) -> None:
    """Those about slow writes among them."""
    app, _ = make_app()
    app.projection("pager", alerts=True, workflows=("none",))(lambda events: None)
    async with running(app, store):
        observer_of(app.runtime().store).write_latency.on_alert("a commit is slow")
        await until_alert(store, "WRITE_LATENCY_HIGH")
        assert "a commit is slow" in [alert.detail for alert in await store.find(AlertQuery())]


@pytest.mark.contract("BUS-1", "MSG-3")
async def test_a_dead_letter_of_a_run_is_an_alert(store: Store) -> None:
    """With the run, and without what was in the message."""
    app, _ = make_app()
    app.projection("pager", alerts=True, workflows=("none",))(lambda events: None)

    @app.workflow
    async def counting() -> int:
        return await hf.wait_signal("number", int)

    async with running(app, store):
        run = await app.start(counting)
        await run.signal("number", "many")
        await until_alert(store, "DEAD_LETTER")
        [alert] = await store.find(AlertQuery())
        assert (alert.run_id, alert.priority) == (run.run_id, 2)
        assert alert.detail.startswith("payload does not fit")
        assert "many" not in alert.detail
        await run.cancel()


@pytest.mark.contract("BUS-1", "FMT-2")
async def test_what_is_stale_is_an_alert_on_the_bus_of_a_node_without_a_service(store: Store) -> None:
    app = hf.App("shop", retention=hf.Retention(stale_runs=0, every=timedelta(milliseconds=50)))
    app.projection("pager", alerts=True, workflows=("none",))(lambda events: None)

    @app.workflow
    async def waiting() -> int:
        return await hf.wait_signal("number", int)

    async with running(app, store):
        run = await app.start(waiting)
        await until_alert(store, "STALE_RUNS")
        assert {alert.code for alert in await store.find(AlertQuery())} == {"STALE_RUNS"}
        await run.cancel()


async def until_alert(store: Store, code: str) -> None:
    async with asyncio.timeout(60):
        while code not in [alert.code for alert in await store.find(AlertQuery())]:  # noqa: ASYNC110
            await asyncio.sleep(0.01)


@pytest.mark.contract("BUS-1", "OWN-4")
async def test_a_sink_is_relayed_by_one_node_and_by_another_when_that_stops(store: Store) -> None:
    """A sink that is paused gets nothing until it is resumed; one that is removed has no relay."""
    async with Receiver().serve() as receiver:
        first, order = make_app()
        second, _ = make_app()
        await store.put_sink(hook(receiver))
        async with running(second, store):
            async with running(first, store):
                run = await first.start(order, 1)
                await run.result()
                await until_sent(store)
                assert [lock.name for lock in await store.find_locks() if lock.name.startswith("bus/")] == ["bus/hook"]
            await store.put_sink(hook(receiver, is_paused=True))
            await store.replay_outbox(OutboxReplay("hook", run_id=run.run_id))
            assert (await status_of(store)).backlog == 1
            await store.put_sink(hook(receiver))
            await until_sent(store)
        assert len(receiver.events) == 2 * len(receiver.of(run.run_id))


class WithoutSinks(StoreProxy):
    """A store that cannot be reached while sinks are stored."""

    async def put_sink(self, sink: Sink, audit: AuditEntry | None = None) -> Sink:
        raise hf.errors.StoreUnavailable("the store could not be reached")


@pytest.mark.contract("BUS-1", "OWN-1")
async def test_a_node_whose_sinks_cannot_be_stored_does_not_live_on() -> None:
    """Who gets the error has no node: there would be nobody to stop one, and a second try would have to fight it."""
    app, _ = make_app()
    app.projection("all")(lambda events: None)
    store = MemoryStore()
    with pytest.raises(hf.errors.StoreUnavailable):
        async with app.node(WithoutSinks(store), name="n", options=OPTIONS):
            pass
    assert await store.find_nodes() == []
