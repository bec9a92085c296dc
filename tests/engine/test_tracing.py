"""Traces are made from histories: every step of every node, under ids that follow from the run's."""

import asyncio
import threading
from contextlib import suppress
from typing import Any

import pytest
from opentelemetry import trace
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

import holdfast as hf
from holdfast.engine.observe import tracing
from holdfast.engine.observe.tracing import span_context, traced


class Vault:
    """Has one secret."""

    async def resolve(self, refs: Any, scope: Any) -> dict[str, str]:
        """Return its value."""
        return dict.fromkeys(refs, "sk_live_1234")


app = hf.App("traced")
current: dict[str, Any] = {}


@app.activity
async def pay(cents: int) -> int:
    """Note the current span."""
    current["pay"] = trace.get_current_span().get_span_context()
    return cents


@app.activity(retry=hf.Retry(max_attempts=1))
def ship() -> None:
    """Fail, in a thread."""
    current["ship"] = trace.get_current_span().get_span_context()
    raise ValueError("no ship")


@app.workflow
async def child(cents: int) -> int:
    """Pay."""
    return await pay(cents)


@app.workflow
async def order(cents: int) -> int:
    """Wait, pay in a child, and fail to ship."""
    await hf.wait_signal("go")
    paid = await child(cents)
    with suppress(hf.errors.ActivityFailed):
        await ship()
    return paid


async def test_a_run_becomes_one_trace_whoever_carried_out_its_steps() -> None:
    exporter = InMemorySpanExporter()
    store = hf.MemoryStore()
    async with app.node(store, name="first"):
        run = await app.start(order, 7)
    async with app.node(store, name="second"), traced(app, exporter, Resource.create({"service.name": "shop"})):
        await app.run(run.run_id).signal("go", signal_id="click")
        assert await app.run(run.run_id).result() == 7
    spans: dict[str, Any] = {span.name: span for span in exporter.get_finished_spans()}
    assert spans.keys() == {
        "run order", "signalwaiting go", "child child", "run child", "step pay", "step ship",
    }  # fmt: skip
    root = span_context(run.run_id)
    assert {span.context.trace_id for span in spans.values()} == {root.trace_id}
    assert spans["run order"].parent is None
    assert spans["step ship"].parent.span_id == spans["run order"].context.span_id == root.span_id
    assert spans["run child"].parent.span_id == spans["child child"].context.span_id
    assert spans["step pay"].parent.span_id == spans["run child"].context.span_id
    assert current["pay"].span_id == spans["step pay"].context.span_id
    assert current["ship"].span_id == spans["step ship"].context.span_id
    assert spans["step ship"].status.status_code is trace.StatusCode.ERROR
    assert spans["run order"].attributes["holdfast.run_id"] == run.run_id
    for span in spans.values():
        assert span.start_time <= span.end_time


async def test_spans_have_the_names_and_scopes_that_calls_were_given() -> None:
    exporter = InMemorySpanExporter()
    named = hf.App("named")

    @named.activity
    async def pack(item: int) -> int:
        return item

    @named.workflow
    async def packing() -> None:
        for item in (17, 18):
            async with hf.scope(f"item {item}"):
                await pack.options(name="wrap")(item)

    async with named.node(hf.MemoryStore()), traced(named, exporter):
        await (await named.start(packing)).result()
    assert {span.name for span in exporter.get_finished_spans()} == {
        "run packing", "step item 17/wrap", "step item 18/wrap",
    }  # fmt: skip


async def test_without_a_run_an_activity_is_a_plain_call() -> None:
    async with app.node(hf.MemoryStore()), traced(app, InMemorySpanExporter()):
        assert await pay(3) == 3
    assert not current["pay"].is_valid


class Broken(InMemorySpanExporter):
    """An exporter that fails the first time."""

    has_failed = False

    def export(self, spans: Any) -> Any:
        if not self.has_failed:
            self.has_failed = True
            raise ConnectionError("nobody collects")
        return super().export(spans)


async def test_an_exporter_that_raises_costs_one_trace_and_nothing_else(caplog: pytest.LogCaptureFixture) -> None:
    exporter = Broken()
    async with asyncio.timeout(60), app.node(hf.MemoryStore()), traced(app, exporter):
        runs = [await app.start(child, number) for number in range(3)]
        assert [await run.result() for run in runs] == [0, 1, 2]
    assert len([span for span in exporter.get_finished_spans() if span.name == "run child"]) == 2
    assert "nobody collects" in caplog.text


class Held(InMemorySpanExporter):
    """An exporter that goes on when it is told to."""

    def __init__(self) -> None:
        super().__init__()
        self.may_go_on = threading.Event()

    def export(self, spans: Any) -> Any:
        self.may_go_on.wait(10)
        return super().export(spans)


async def test_an_exporter_that_is_far_behind_loses_traces_and_not_memory(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(tracing, "MOST_BEHIND", 2)
    exporter = Held()
    async with asyncio.timeout(60), app.node(hf.MemoryStore()), traced(app, exporter):
        runs = [await app.start(child, number) for number in range(8)]
        assert [await run.result() for run in runs] == list(range(8))
        exporter.may_go_on.set()
    exported = len([span for span in exporter.get_finished_spans() if span.name == "run child"])
    assert 2 <= exported <= 3, "the one under way, and those that wait"
    assert "too far behind" in caplog.text


@pytest.mark.contract("ACT-4")
@pytest.mark.parametrize("is_async", [True, False], ids=["async", "thread"])
async def test_a_verifier_has_a_span_below_its_step(is_async: bool) -> None:
    bank = hf.App("bank", secrets=Vault())
    seen: list[Any] = []
    verdicts: list[Any] = [ConnectionError("down for sk_live_1234"), hf.NotCompleted(), hf.Completed("receipt")]

    def look() -> Any:
        seen.append(trace.get_current_span().get_span_context())
        said = verdicts.pop(0)
        if isinstance(said, Exception):
            raise said
        return said

    async def ask(key: hf.Secret) -> Any:
        return look()

    def ask_in_thread(key: hf.Secret) -> Any:
        return look()

    again = hf.Retry(max_attempts=2, initial_ms=1)

    @bank.activity(
        idempotency_key=lambda: "once",
        verify=ask if is_async else ask_in_thread,
        retry=hf.Retry(max_attempts=3, initial_ms=1),
        verify_retry=again,
    )
    async def charge(key: hf.Secret) -> str:
        raise ConnectionError("the line is dead")

    @bank.workflow
    async def buy() -> str:
        return await charge(hf.Secret("bank/key"))

    exporter = InMemorySpanExporter()
    async with bank.node("memory://"), traced(bank, exporter):
        run = await bank.start(buy)
        assert await run.result() == "receipt"
    spans = [span for span in exporter.get_finished_spans() if span.name == "verify charge"]
    step = span_context(run.run_id, "charge")
    assert [span.parent and span.parent.span_id for span in spans] == [step.span_id] * 3
    assert [span.context.span_id for span in spans] == [context.span_id for context in seen]
    assert {span.context.trace_id for span in spans} == {step.trace_id}
    about = [dict(span.attributes or {}) for span in spans]
    assert [(each.get("holdfast.verdict"), each["holdfast.attempt"]) for each in about] == [
        (None, 2),
        ("NotCompleted", 2),
        ("Completed", 3),
    ]
    assert spans[0].status.status_code is trace.StatusCode.ERROR
    assert "sk_live_1234" not in str(spans[0].status.description)
    assert "[redacted: bank/key]" in str(spans[0].status.description)
    assert bank.registry.activities["charge"].verifier is not None
    async with bank.node("memory://"):  # without tracing it is asked as before
        verdicts.append(hf.Completed("again"))
        assert await (await bank.start(buy)).result() == "again"


STARTER = trace.SpanContext(0x0AF7651916CD43DD8448EB211C80319C, 0xB7AD6B7169203331, True, trace.TraceFlags(1))


def flaky_shop() -> tuple[hf.App, Any, Any]:
    """Return an app whose activity fails twice before a wait, and a workflow that starts another."""
    shop = hf.App("flaky")

    @shop.activity(retry=hf.Retry(max_attempts=3, initial_ms=1))
    async def reserve() -> int:
        if hf.activity_context().attempt < 3:
            raise ConnectionError(f"down, attempt {hf.activity_context().attempt}")
        return 3

    @shop.workflow
    async def buy() -> int:
        reserved = await reserve()
        await hf.wait_signal("paid")
        return reserved

    @shop.workflow
    async def order() -> str:
        return (await hf.start(buy)).run_id

    return shop, buy, order


@pytest.mark.contract("CTX-3")
async def test_a_run_is_linked_to_its_starter_and_its_attempts_are_events() -> None:
    shop, buy, order = flaky_shop()
    exporter = InMemorySpanExporter()
    async with asyncio.timeout(60), shop.node(hf.MemoryStore()), traced(shop, exporter):
        with trace.use_span(trace.NonRecordingSpan(STARTER)):
            run = await shop.start(buy)
            first = await shop.start(order)
        await run.signal("paid")
        assert await run.result() == 3
        second = await first.result()
        await shop.run(second).signal("paid")
        await shop.run(second).result()
    spans: list[Any] = list(exporter.get_finished_spans())
    roots = {span.attributes["holdfast.run_id"]: span for span in spans if span.name.startswith("run ")}
    assert [link.context for link in roots[run.run_id].links] == [STARTER]
    assert roots[run.run_id].context.trace_id == span_context(run.run_id).trace_id, "a trace of its own"
    [link] = roots[second].links
    assert link.context.trace_id == span_context(first.run_id).trace_id, "a run is linked to the one that started it"
    [reserved] = [
        span
        for span in spans
        if span.name == "step reserve" and span.parent.span_id == roots[run.run_id].context.span_id
    ]
    said = [(event.name, event.attributes["exception.message"]) for event in reserved.events]
    assert said == [("retried", "down, attempt 1"), ("retried", "down, attempt 2")]
    assert all(reserved.start_time <= event.timestamp <= reserved.end_time for event in reserved.events)


@pytest.mark.contract("CTX-3")
async def test_a_run_that_takes_long_is_exported_before_it_ends_and_no_span_twice() -> None:
    shop, buy, _ = flaky_shop()
    exporter = InMemorySpanExporter()
    async with asyncio.timeout(60), shop.node(hf.MemoryStore()), traced(shop, exporter, long_s=0.02):
        run = await shop.start(buy)
        while len(exporter.get_finished_spans()) < 3:  # noqa: ASYNC110
            await asyncio.sleep(0.005)
        early = {span.name: span for span in exporter.get_finished_spans()}
        assert early.keys() == {"run buy started", "step reserve", "signalwaiting paid started"}
        root = span_context(run.run_id)
        assert {span.context.trace_id for span in early.values() if span.context} == {root.trace_id}
        assert [span.parent and span.parent.span_id for span in early.values()] == [root.span_id] * 3
        await run.signal("paid")
        await run.result()
    spans = exporter.get_finished_spans()
    assert sorted(span.name for span in spans) == sorted([*early, "signalwaiting paid", "run buy"])
    assert len({span.context.span_id for span in spans if span.context}) == 5


@pytest.mark.contract("CTX-3")
async def test_a_short_run_is_exported_once() -> None:
    exporter = InMemorySpanExporter()
    async with asyncio.timeout(60), app.node(hf.MemoryStore()), traced(app, exporter):
        assert await (await app.start(child, 7)).result() == 7
    assert sorted(span.name for span in exporter.get_finished_spans()) == ["run child", "step pay"]
