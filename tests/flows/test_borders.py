"""What holds for workflows of code holds for flows: the service, children, types, keys, queues, secrets, tenants."""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import msgspec
import pytest

import holdfast as hf
from holdfast import errors
from holdfast.cli.main import main
from holdfast.core import events as e
from tests.engine.harness import EngineVariant, event_types, wait_for_event
from tests.flows.order_flow import Approval, Order, Shop
from tests.service.in_process import serve_in_process

pydantic = pytest.importorskip("pydantic")


# --- the service


@pytest.mark.contract("API-1")
async def test_flow_is_started_asked_and_drawn_over_the_service() -> None:
    shop = Shop()
    async with serve_in_process(app=shop.app) as server:
        run_id = await server.start("fulfil", state={"cents": 500_00})
        await server.until("signals.waits", {"run_id": run_id}, lambda page: page["items"])
        snapshot = (await server.rest("runs.snapshot", {"run_id": run_id}))[1]
        assert snapshot["state"]["in_stock"] is True
        assert snapshot["state"]["parcel"] == ""
        asked = (await server.rest("runs.query", {"run_id": run_id, "name": "state", "input": {}}))[1]
        assert asked["result"]["cents"] == 500_00
        drawn = (await server.rest("runs.graph", {"run_id": run_id}))[1]
        standing = {node["id"]: node["status"] for node in drawn["nodes"]}
        assert standing["check_stock"] == "SUCCESS"
        assert standing["cue/approval"] == "WAITING"
        assert standing["ship"] == "PENDING"
        refused = await server.rest(
            "signals.send", {"run_id": run_id, "name": "approval", "payload": {"is_granted": True}}
        )
        assert refused[0] == 422
        await server.rest("signals.send", {"run_id": run_id, "name": "approval", "payload": {"by": "ann"}})
        await server.until("runs.result", {"run_id": run_id, "wait_s": 5}, lambda outcome: outcome["is_finished"])
        snapshot = (await server.rest("runs.snapshot", {"run_id": run_id}))[1]
        assert snapshot["state"]["approved_by"] == "ann"


@pytest.mark.contract("API-1")
async def test_start_with_a_state_that_does_not_fit_is_refused() -> None:
    shop = Shop()
    async with serve_in_process(app=shop.app) as server:
        status, _ = await server.rest("runs.start", {"workflow": "fulfil", "input": {"state": {"cents": "many"}}})
        assert status == 422
        described = (await server.rest("workflows.get", {"name": "fulfil"}))[1]
        assert described["kind"] == "flow"
        assert "approval" in described["signals"]
        assert "state" in described["queries"]


SHOP_FILE = """
import holdfast as hf
from tests.flows.order_flow import Shop

app = Shop().app

@app.workflow
async def code() -> None:
    pass
"""


def test_command_line_draws_a_flow(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "shop.py").write_text(SHOP_FILE)
    target = str(tmp_path / "shop.py")
    assert main(["flow", "show", target, "fulfil"]) == 0
    drawn = capsys.readouterr().out
    assert drawn.startswith("flowchart TD\n")
    assert "check_stock" in drawn
    assert main(["flow", "show", target, "code"]) != 0
    assert main(["flow", "show", target, "missing"]) != 0


# --- updates and queries


@pytest.mark.contract("WF-6")
async def test_flow_refuses_updates_and_unknown_queries(variant: EngineVariant) -> None:
    app = hf.App("asked")
    flow = app.flow("asked", Order, hf.Signal("go"))
    async with variant.node(app):
        run = await app.start(flow, Order())
        await wait_for_event(run, "SignalWaiting")
        with pytest.raises(errors.UpdateFailed, match="it is a flow"):
            await run.update("change", text="x")
        with pytest.raises(errors.NotFound, match="answers no query"):
            await run.query("progress")
        await run.signal("go")
        await run.result()


# --- children


@pytest.mark.contract("WF-4")
async def test_code_and_flows_are_each_others_children(variant: EngineVariant) -> None:
    shop = Shop()
    app = shop.app

    @app.workflow
    async def pay(order: Order) -> Order:
        return await shop.charge(order)

    @app.workflow
    async def label(text: str, count: int = 1) -> str:
        return text * count

    inner = app.flow("inner", Order, hf.Act(shop.reserve))
    outer = app.flow(
        "outer",
        Order,
        hf.Scene(
            hf.Child(pay),
            hf.Child(inner),
            hf.Child(
                label,
                input=lambda order: {"text": order.payment, "count": 2},
                apply=lambda order, text: replace(order, parcel=text),
            ),
        ),
    )

    @app.workflow
    async def parent(cents: int) -> Order:
        return await outer(Order(cents=cents))

    async with variant.node(app):
        run = await app.start(parent, 5, run_id="top")
        result = await run.result()
        child = app.run("top/outer")
        assert await event_types(child) != []
    assert result == Order(cents=5, payment="paid 5", reservation="shelf 7", parcel="paid 5paid 5")


@pytest.mark.contract("WF-4")
async def test_failed_child_fails_its_flow_and_a_completed_one_is_undone(variant: EngineVariant) -> None:
    shop = Shop(charge=1)
    app = shop.app
    good = app.flow("good", Order, hf.Act(shop.reserve))
    bad = app.flow("bad", Order, hf.Act(shop.charge, retry=hf.Retry(max_attempts=1)))
    outer = app.flow("outer", Order, hf.Scene(hf.Child(good, compensate=shop.release), hf.Child(bad)))
    async with variant.node(app):
        run = await app.start(outer, Order())
        with pytest.raises(errors.RunFailed, match="charge is broken"):
            await run.result()
    assert shop.done == ["reserve", "release shelf 7"]


# --- types of states


class Parcel(msgspec.Struct, omit_defaults=True):
    """A Struct that leaves defaults out of its JSON."""

    weight: int = 0
    to: str = ""
    at: str = "shelf"


class Letter(pydantic.BaseModel):  # type: ignore[name-defined,misc]
    """A model of pydantic."""

    weight: int = 0
    to: str = ""
    at: str = "shelf"


@dataclass(frozen=True)
class Card:
    """A frozen dataclass."""

    weight: int = 0
    to: str = ""
    at: str = "shelf"


@pytest.mark.parametrize("kind", [Parcel, Letter, Card])
async def test_state_of_any_kind_of_type_is_merged_by_field(variant: EngineVariant, kind: Any) -> None:
    def made(before: Any, **changes: Any) -> Any:
        return kind(**{**{name: getattr(before, name) for name in ("weight", "to", "at")}, **changes})

    app = hf.App("types")
    flow = app.flow(
        "types",
        kind,
        hf.Scene(
            hf.Signal("at", str, on_receive=lambda state, text: made(state, at=text)),
            hf.Chorus(
                hf.Signal("weigh", int, on_receive=lambda state, weight: made(state, weight=weight)),
                hf.Signal("address", str, on_receive=lambda state, to: made(state, to=to)),
                hf.Signal("back", on_receive=lambda state, _: made(state, at="shelf")),
            ),
        ),
    )
    async with variant.node(app):
        run = await app.start(flow, kind())
        for name, payload in (("at", "door"), ("weigh", 7), ("address", "Lisbon"), ("back", None)):
            await run.signal(name, payload)
        assert await run.result() == kind(weight=7, to="Lisbon", at="shelf")


@pytest.mark.contract("WF-2")
async def test_default_that_a_caller_leaves_out_is_made_once() -> None:
    made: list[int] = []

    def make() -> int:
        made.append(1)
        return len(made)

    class Numbered(msgspec.Struct):
        number: int = msgspec.field(default_factory=make)

    app = hf.App("defaults")

    @app.activity
    async def look(state: Numbered) -> Numbered:
        return state

    app.flow("defaults", Numbered, hf.Scene(hf.Act(look), hf.Signal("go"), hf.Act(look, step="again")))
    async with serve_in_process(app=app, node=hf.NodeOptions(cached_runs=0)) as server:
        run_id = await server.start("defaults", state={})
        await server.until("signals.waits", {"run_id": run_id}, lambda page: page["items"])
        first = (await server.rest("runs.query", {"run_id": run_id, "name": "state", "input": {}}))[1]["result"]
        await server.rest("signals.send", {"run_id": run_id, "name": "go"})
        outcome = await server.until("runs.result", {"run_id": run_id, "wait_s": 5}, lambda seen: seen["is_finished"])
        assert outcome["result"] == first


# --- activities


@pytest.mark.contract("ACT-2")
async def test_keyed_activity_of_a_flow_has_its_key(variant: EngineVariant) -> None:
    app = hf.App("keyed")
    keys: list[str | None] = []

    @app.activity(idempotency_key=lambda order: f"order-{order.cents}", verify=lambda order: hf.NotCompleted())
    async def pay(order: Order) -> Order:
        keys.append(hf.activity_context().idempotency_key)
        return replace(order, payment="paid")

    flow = app.flow("keyed", Order, hf.Scene(hf.Act(pay), hf.Signal("go"), hf.Act(pay, step="p2", idempotency_key="k")))
    async with variant.node(app):
        run = await app.start(flow, Order(7))
        await run.signal("go")
        await run.result()
    assert keys == ["order-7", "k"]


async def test_activity_of_a_flow_runs_in_its_queue(variant: EngineVariant) -> None:
    app = hf.App("queues")

    @app.activity(queue="far")
    async def pack(order: Order) -> Order:
        return replace(order, parcel="packed")

    flow = app.flow("queues", Order, hf.Act(pack))
    async with variant.node(app, queues=["far"]):
        assert (await (await app.start(flow, Order())).result()).parcel == "packed"


@dataclass
class Paid:
    """A state with the reference to a secret."""

    key: hf.Secret
    used: str = ""


@pytest.mark.contract("SEC-1")
async def test_secret_in_a_state_is_a_reference(variant: EngineVariant, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SECRET_STRIPE_KEY", "sk_live_4711")
    app = hf.App("secrets", secrets="env://")

    @app.activity
    async def pay(paid: Paid) -> Paid:
        return replace(paid, used=f"with {paid.key.reveal()}")

    flow = app.flow("secrets", Paid, hf.Scene(hf.Act(pay), hf.Signal("go", on_receive=lambda paid, _: paid)))
    async with variant.node(app):
        run = await app.start(flow, Paid(hf.Secret("STRIPE_KEY")))
        await run.signal("go")
        result = await run.result()
        assert "sk_live_4711" not in str(await run.events())
    assert result.key == hf.Secret("STRIPE_KEY")
    assert "sk_live_4711" not in result.used


@pytest.mark.contract("SEC-1")
async def test_state_is_encrypted_in_the_store(tmp_path: Path) -> None:
    shop = Shop()
    sealed = hf.App("shop", codecs=[hf.Encryption({"k1": b"0" * 32})], limits=hf.Limits(rotation_steps=2))
    for activity in (shop.check_stock, shop.charge, shop.reserve, shop.ship, shop.refund, shop.release):
        sealed.registry.add_activity(activity.definition)
    sealed.registry.add_workflow(shop.fulfil.definition)
    async with sealed.node(f"sqlite:///{tmp_path}/sealed.db"):
        run = await sealed.start(shop.fulfil, Order(cents=500_00, payment="marked-4711"))
        await wait_for_event(run, "SignalWaiting")
        assert (await run.state()).payment == "marked-4711"
        await run.signal("approval", Approval("ann-4711"))
        await run.result()
    stored = b"".join(path.read_bytes() for path in tmp_path.iterdir())
    assert b"4711" not in stored


async def test_flow_belongs_to_its_tenant(variant: EngineVariant) -> None:
    shop = Shop()
    async with variant.node(shop.app):
        run = await shop.app.start(shop.fulfil, Order(1), tenant="acme")
        await run.result()
        queued = (await run.events())[0].data
        assert isinstance(queued, e.RunQueued)
        assert queued.tenant == "acme"


async def test_flow_has_limits_by_its_state(variant: EngineVariant) -> None:
    app = hf.App("limits")
    flow = app.flow("limits", Order, hf.Signal("go"), per_key=1, key=lambda state: str(state.cents), overload="reject")
    async with variant.node(app):
        first = await app.start(flow, Order(1))
        await app.start(flow, Order(2))
        with pytest.raises(errors.Overloaded):
            await app.start(flow, Order(1))
        await first.signal("go")
        await first.result()


@pytest.mark.contract("SIG-10")
async def test_payload_that_does_not_fit_any_more_is_a_dead_letter(variant: EngineVariant) -> None:
    """It was accepted by a version that took it; the wait of the present one goes on."""
    loose = hf.App("loose")
    flow = loose.flow("letters", Order, hf.Signal("approval"))
    strict = hf.App("strict")
    strict.flow(
        "letters",
        Order,
        hf.Signal("approval", Approval, on_receive=lambda order, given: replace(order, approved_by=given.by)),
    )
    async with variant.opened() as store:
        async with loose.connect(store):
            await loose.start(flow, Order(), run_id="run-1", with_signal={"name": "approval", "payload": 7})
        async with variant.node(strict, store):
            run = strict.run("run-1")
            await wait_for_event(run, "SignalDeadLettered")
            assert len(await strict.dead_letters(run_id="run-1")) == 1
            await run.signal("approval", Approval("ann"))
            assert (await run.result())["approved_by"] == "ann"


# --- plans, and runs that are done again

PLAN = """
plan: deliver
version: "1"
inputs:
  cents: {type: integer}
steps:
  - id: order
    workflow: fulfil
    input: {state: {cents: "${inputs.cents}"}}
output: ${steps.order.output}
"""


@pytest.mark.contract("WF-4")
async def test_flows_and_plans_are_each_others_children(variant: EngineVariant) -> None:
    """A flow runs a plan by a child of code, which calls `hf.plan`."""
    shop = Shop()
    app = shop.app

    @app.workflow
    async def deliver(order: Order) -> Order:
        return Order(**await hf.plan(PLAN, {"cents": order.cents}))

    outer = app.flow("outer", Order, hf.Child(deliver))
    async with variant.node(app):
        run = await app.start(outer, Order(cents=7))
        assert (await run.result()).parcel == "paid 7, shelf 7"


@pytest.mark.contract("SIG-13")
async def test_failed_flow_is_done_again_with_the_state_that_it_began_with(variant: EngineVariant) -> None:
    shop = Shop(ship=1)
    async with variant.node(shop.app):
        run = await shop.app.start(shop.fulfil, Order(cents=3))
        with pytest.raises(errors.RunFailed):
            await run.result()
        again = await run.retry_run()
        assert (await again.result()).parcel == "paid 3, shelf 7"
