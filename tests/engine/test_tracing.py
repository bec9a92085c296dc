"""Traces are made from histories: every step of every node, under ids that follow from the run's."""

from contextlib import suppress
from typing import Any

import pytest

import holdfast as hf

pytest.importorskip("opentelemetry.sdk")

from opentelemetry import trace
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from holdfast.engine.tracing import context_of, traced

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
    root = context_of(run.run_id)
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


async def test_without_a_run_an_activity_is_a_plain_call() -> None:
    async with app.node(hf.MemoryStore()), traced(app, InMemorySpanExporter()):
        assert await pay(3) == 3
    assert not current["pay"].is_valid
