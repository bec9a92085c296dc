"""Failure, compensation, cancellation and what operators do, in flows."""

import asyncio
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

import holdfast as hf
from holdfast import errors
from holdfast.core import events as e
from holdfast.core.state import CANCELLED, PAUSED
from holdfast.engine.check_histories import check_history
from tests.engine.harness import EngineVariant, wait_for_event, wait_for_status
from tests.flows.order_flow import Order

pytestmark = pytest.mark.contract("WF-4")


class Workshop:
    """An app with activities that set a field, fail, or undo, and what they did."""

    def __init__(self, **limits: Any) -> None:
        self.app = hf.App("workshop", limits=hf.Limits(**limits) if limits else None)
        self.done: list[str] = []

    def sets(self, field: str, value: Any = "done") -> Any:
        """Register an activity that sets a field."""

        @self.app.activity(name=field)
        async def act(order: Order) -> Order:
            self.done.append(field)
            return replace(order, **{field: value})

        return act

    def fails(self, name: str = "fails", times: int = 1_000_000, **options: Any) -> Any:
        """Register an activity that fails so many times."""
        left = [times]

        @self.app.activity(name=name, **options)
        async def act(order: Order) -> Order:
            if left[0]:
                left[0] -= 1
                raise hf.NonRetryable(f"{name} is broken")
            self.done.append(name)
            return order

        return act

    def undoes(self, name: str, *, is_broken: bool = False) -> Any:
        """Register an activity that undoes something."""

        @self.app.activity(name=f"undo-{name}")
        async def undo(order: Order) -> None:
            if is_broken:
                raise hf.NonRetryable(f"undo-{name} is broken")
            self.done.append(f"undo-{name} {getattr(order, name)}")

        return undo

    def act(self, field: str, **options: Any) -> hf.Act[Order]:
        """Return a step that sets a field and can be undone."""
        return hf.Act(self.sets(field), compensate=self.undoes(field), **options)


async def failure_of(run: hf.RunHandle[Order]) -> str:
    """Return what a run has failed with."""
    with pytest.raises(errors.RunFailed) as failed:
        await run.result()
    message: str = failed.value.info.message
    return message


async def test_compensation_gets_the_state_after_the_step_that_it_undoes(variant: EngineVariant) -> None:
    shop = Workshop()
    flow = shop.app.flow("undone", Order, hf.Scene(shop.act("payment"), shop.act("parcel"), hf.Act(shop.fails())))
    async with variant.node(shop.app):
        run = await shop.app.start(flow, Order())
        assert "fails is broken" in await failure_of(run)
    assert shop.done == ["payment", "parcel", "undo-parcel done", "undo-payment done"]


async def test_both_errors_are_reported_and_the_rest_is_undone(variant: EngineVariant) -> None:
    shop = Workshop()
    broken = hf.Act(shop.sets("parcel"), compensate=shop.undoes("parcel", is_broken=True))
    flow = shop.app.flow("undone", Order, hf.Scene(shop.act("payment"), broken, hf.Act(shop.fails())))
    async with variant.node(shop.app):
        run = await shop.app.start(flow, Order())
        message = await failure_of(run)
    assert "fails is broken" in message
    assert "undo-parcel is broken" in message
    assert shop.done == ["payment", "parcel", "undo-payment done"]


async def test_compensation_with_an_input_of_its_own(variant: EngineVariant) -> None:
    shop = Workshop()

    @shop.app.activity
    async def refund(payment: str, cents: int) -> None:
        shop.done.append(f"refund {payment} {cents}")

    undo: hf.Act[Order] = hf.Act(refund, input=lambda order: {"payment": order.payment, "cents": order.cents})
    flow = shop.app.flow(
        "undone", Order, hf.Scene(hf.Act(shop.sets("payment", "p-1"), compensate=undo), hf.Act(shop.fails()))
    )
    async with variant.node(shop.app):
        run = await shop.app.start(flow, Order(cents=7))
        await failure_of(run)
    assert shop.done == ["payment", "refund p-1 7"]


# --- chorus


async def test_fail_fast_gives_up_the_other_branches(variant: EngineVariant) -> None:
    shop = Workshop()
    flow = shop.app.flow(
        "fast",
        Order,
        hf.Scene(
            shop.act("payment"),
            hf.Chorus(hf.Scene(hf.Signal("never"), step="waits"), hf.Act(shop.fails())),
        ),
    )
    async with variant.node(shop.app):
        run = await shop.app.start(flow, Order())
        assert "fails is broken" in await failure_of(run)
        given_up = [event.step_id for event in await run.events() if isinstance(event.data, e.StepCancelled)]
    assert given_up == ["chorus/waits/never"]
    assert shop.done == ["payment", "undo-payment done"]


async def test_fail_after_all_waits_for_the_other_branches(variant: EngineVariant) -> None:
    shop = Workshop()
    flow = shop.app.flow(
        "after-all",
        Order,
        hf.Chorus(
            hf.Scene(hf.Signal("go"), shop.act("payment"), step="waits"),
            hf.Act(shop.fails("left")),
            hf.Act(shop.fails("right")),
            on_failure="fail-after-all",
        ),
    )
    async with variant.node(shop.app):
        run = await shop.app.start(flow, Order())
        await wait_for_event(run, "StepFailed", 2)
        await run.signal("go")
        message = await failure_of(run)
    assert "left is broken" in message
    assert "right is broken" in message
    assert shop.done == ["payment", "undo-payment done"]


async def test_partial_undoes_the_failed_branch_and_goes_on_with_the_others(variant: EngineVariant) -> None:
    shop = Workshop()
    flow = shop.app.flow(
        "partial",
        Order,
        hf.Chorus(
            hf.Scene(shop.act("payment"), hf.Act(shop.fails()), step="left"),
            shop.act("parcel", step="right"),
            on_failure="partial",
        ),
    )
    async with variant.node(shop.app):
        run = await shop.app.start(flow, Order())
        assert await run.result() == Order(parcel="done")
    assert sorted(shop.done) == ["parcel", "payment", "undo-payment done"]


async def test_partial_fails_if_no_branch_is_left_or_one_cannot_be_undone(variant: EngineVariant) -> None:
    shop = Workshop()
    none_left = shop.app.flow(
        "none-left",
        Order,
        hf.Chorus(hf.Act(shop.fails("left")), hf.Act(shop.fails("right")), on_failure="partial"),
    )
    broken = hf.Act(shop.sets("payment"), compensate=shop.undoes("payment", is_broken=True))
    not_undone = shop.app.flow(
        "not-undone",
        Order,
        hf.Chorus(
            hf.Scene(broken, hf.Act(shop.fails("third")), step="branch"), hf.Signal("never"), on_failure="partial"
        ),
    )
    async with variant.node(shop.app):
        message = await failure_of(await shop.app.start(none_left, Order()))
        assert "left is broken" in message
        assert "right is broken" in message
        message = await failure_of(await shop.app.start(not_undone, Order()))
        assert "third is broken" in message
        assert "undo-payment is broken" in message


async def test_two_branches_that_change_one_field_are_an_error_that_names_both(variant: EngineVariant) -> None:
    shop = Workshop()
    flow = shop.app.flow(
        "conflict",
        Order,
        hf.Chorus(hf.Act(shop.sets("payment", "x")), hf.Act(shop.sets("parcel", "y"), step="second"), step="both"),
    )
    same = shop.app.flow(
        "same",
        Order,
        hf.Chorus(
            hf.Sleep(0.001, step="idle"),
            hf.Signal("a", on_receive=lambda order, _: replace(order, cents=order.cents + 1)),
            hf.Signal("b", on_receive=lambda order, _: replace(order, cents=order.cents + 1)),
            step="both",
        ),
    )
    async with variant.node(shop.app):
        run = await shop.app.start(flow, Order())
        assert await run.result() == Order(payment="x", parcel="y")
        run = await shop.app.start(same, Order())
        await run.signal("a")
        await run.signal("b")
        assert "branches 'a' and 'b' of 'both' both change the field 'cents'" in await failure_of(run)


async def test_merge_of_the_author_gets_the_branches_by_name(variant: EngineVariant) -> None:
    shop, seen = Workshop(), list[list[str]]()

    def merge(order: Order, branches: dict[str, Order]) -> Order:
        seen.append(list(branches))
        return replace(order, cents=sum(branch.cents for branch in branches.values()))

    flow = shop.app.flow(
        "merged",
        Order,
        hf.Scene(
            hf.Chorus(hf.Act(shop.sets("cents", 3)), hf.Act(shop.sets("parcel"), step="other"), merge=merge),
            hf.Signal("go"),
        ),
    )
    async with variant.node(shop.app):
        run = await shop.app.start(flow, Order(cents=10))
        await run.signal("go")
        assert await run.result() == Order(cents=13)
    assert seen == [["cents", "other"]]


# --- operators


@pytest.mark.contract("SIG-13")
async def test_cancelled_flow_gives_up_what_is_open_and_undoes_what_is_done(variant: EngineVariant) -> None:
    shop = Workshop()
    flow = shop.app.flow("cancelled", Order, hf.Scene(shop.act("payment"), hf.Signal("never")))
    async with variant.node(shop.app):
        run = await shop.app.start(flow, Order())
        await wait_for_event(run, "SignalWaiting")
        await run.cancel()
        await wait_for_status(run, CANCELLED)
    assert shop.done == ["payment", "undo-payment done"]


@pytest.mark.contract("SIG-13")
async def test_paused_step_is_retried_or_skipped_by_an_operator(variant: EngineVariant) -> None:
    shop = Workshop()
    flaky = shop.fails("flaky", times=1, on_failure="pause")
    broken = shop.fails("broken", on_failure="pause")
    flow = shop.app.flow("held", Order, hf.Scene(hf.Act(flaky), hf.Act(broken), shop.act("parcel")))
    async with variant.node(shop.app):
        run = await shop.app.start(flow, Order())
        await wait_for_status(run, PAUSED)
        await run.retry_step("flaky", wait=True)
        await wait_for_event(run, "RunPaused", 2)
        await run.skip_step("broken", wait=True)
        assert (await run.result()).parcel == "done"
    assert shop.done == ["flaky", "parcel"]


@pytest.mark.contract("SIG-13")
async def test_skipped_step_is_not_undone(variant: EngineVariant) -> None:
    shop = Workshop()
    broken = hf.Act(shop.fails("broken", on_failure="pause"), compensate=shop.undoes("payment"))
    flow = shop.app.flow("skipped", Order, hf.Scene(broken, hf.Act(shop.fails())))
    async with variant.node(shop.app):
        run = await shop.app.start(flow, Order())
        await wait_for_status(run, PAUSED)
        await run.skip_step("broken", wait=True)
        assert "fails is broken" in await failure_of(run)
    assert shop.done == []


# --- mistakes of the author


def raises(*args: Any) -> Any:
    """A mistake."""
    raise KeyError("mistake")


MISTAKES: dict[str, Callable[[Workshop], Any]] = {
    "condition": lambda shop: hf.Act(shop.sets("parcel"), condition=raises),
    "choose": lambda shop: hf.Cue(raises, then=hf.Act(shop.sets("parcel"))),
    "apply": lambda shop: hf.Act(shop.sets("parcel"), apply=raises),
    "input": lambda shop: hf.Act(shop.sets("parcel"), input=raises),
    "duration": lambda shop: hf.Sleep(raises),
    "payload": lambda shop: hf.Task("ask", str, payload=raises),
    "merge": lambda shop: hf.Chorus(hf.Act(shop.sets("parcel")), merge=raises),
}


@pytest.mark.contract("WF-7")
@pytest.mark.parametrize("what", MISTAKES)
async def test_mistake_in_a_function_pauses_the_run_until_the_code_is_mended(variant: EngineVariant, what: str) -> None:
    broken = Workshop()
    broken_flow = broken.app.flow("mistaken", Order, hf.Scene(hf.Act(broken.sets("payment")), MISTAKES[what](broken)))
    mended = Workshop()
    mended.app.flow(
        "mistaken", Order, hf.Scene(hf.Act(mended.sets("payment")), hf.Act(mended.sets("parcel"), step="end"))
    )
    async with variant.opened() as store:
        async with variant.node(broken.app, store):
            run = await broken.app.start(broken_flow, Order(), run_id="run-1")
            await wait_for_status(run, PAUSED)
            error = (await run.snapshot()).substatus
            assert error == "UnhandledError"
        if what in ("apply", "merge"):  # their steps are in the history: the mended flow has to have them
            return
        async with variant.node(mended.app, store):
            again = mended.app.run("run-1")
            assert (await again.result())["parcel"] == "done"
    assert broken.done == ["payment"]


@pytest.mark.contract("WF-7", "WF-4")
@pytest.mark.parametrize("what", MISTAKES)
async def test_run_that_a_mistake_has_paused_is_cancelled_and_undoes_what_was_done(
    variant: EngineVariant, what: str
) -> None:
    shop = Workshop()
    first = shop.act("payment") if what != "apply" else hf.Act(shop.sets("payment"))
    steps = shop.act("parcel", apply=raises) if what == "apply" else MISTAKES[what](shop)
    flow = shop.app.flow("mistaken", Order, hf.Scene(first, steps))
    async with variant.node(shop.app):
        run = await shop.app.start(flow, Order())
        await wait_for_status(run, PAUSED)
        await run.cancel()
        await wait_for_status(run, CANCELLED)
        undone = "undo-parcel " if what == "apply" else "undo-payment done"  # its result was never applied to the state
        assert shop.done[-1] == undone
        assert check_history(shop.app.registry, await run.events()) is None


@pytest.mark.contract("WF-7")
async def test_flow_fails_by_what_its_author_declared(variant: EngineVariant) -> None:
    shop = Workshop()
    steps = hf.Scene(shop.act("payment"), hf.Act(shop.sets("parcel"), condition=raises))
    declared = shop.app.flow("declared", Order, steps, failures=KeyError)
    chosen = shop.app.flow("chosen", Order, steps, on_error="fail")
    async with variant.node(shop.app):
        for flow in (declared, chosen):
            assert await failure_of(await shop.app.start(flow, Order())) == "'mistake'"
    assert shop.done == ["payment", "undo-payment done"] * 2


async def test_blocking_function_is_stopped(variant: EngineVariant) -> None:
    def block(order: Order) -> bool:
        while True:
            pass

    shop = Workshop()
    flow = shop.app.flow("blocking", Order, hf.Act(shop.sets("parcel"), condition=block))
    async with variant.node(shop.app, turn_s=0.2):
        run = await shop.app.start(flow, Order())
        await wait_for_status(run, PAUSED)
        assert (await run.snapshot()).substatus == "RunawayWorkflow"


async def test_function_that_starts_something_is_refused(variant: EngineVariant) -> None:
    shop = Workshop()
    parcel = shop.sets("parcel")

    def starts(order: Order) -> bool:
        return bool(asyncio.ensure_future(parcel(order)))

    flow = shop.app.flow("starting", Order, hf.Act(parcel, condition=starts))
    async with variant.node(shop.app):
        run = await shop.app.start(flow, Order())
        await wait_for_status(run, PAUSED)
        assert (await run.snapshot()).substatus == "NotDurable"
    assert shop.done == []


async def test_result_that_is_no_state_fails_the_step(variant: EngineVariant) -> None:
    shop = Workshop()

    @shop.app.activity
    async def wrong(order: Order):  # type: ignore[no-untyped-def]
        return {"cents": "many"}

    flow = shop.app.flow("wrong", Order, hf.Act(wrong))
    async with variant.node(shop.app):
        run = await shop.app.start(flow, Order())
        assert "step 'wrong' returned no state" in await failure_of(run)


async def test_state_that_is_too_large_fails_the_flow(variant: EngineVariant) -> None:
    shop = Workshop(value_bytes=1_000)

    def grow(order: Order, payload: Any) -> Order:
        return replace(order, parcel="x" * 2_000)

    flow = shop.app.flow("large", Order, hf.Signal("grow", on_receive=grow))
    async with variant.node(shop.app):
        run = await shop.app.start(flow, Order())
        await run.signal("grow")
        assert "the state has" in await failure_of(run)


async def test_handler_may_change_the_state_in_place(variant: EngineVariant) -> None:
    shop = Workshop()

    def approve(order: Order, by: str) -> None:
        order.approved_by = by

    flow = shop.app.flow("in-place", Order, hf.Signal("approval", str, on_receive=approve))
    async with variant.node(shop.app):
        run = await shop.app.start(flow, Order())
        await run.signal("approval", "ann")
        assert (await run.result()).approved_by == "ann"


@pytest.mark.contract("SIG-13")
async def test_skipping_a_wait_whose_time_may_not_pass_does_not_fail_the_run(variant: EngineVariant) -> None:
    shop = Workshop()

    def refuse(order: Order) -> Order:
        raise ValueError("it has to come")

    wait = hf.Signal[Order]("go", timeout=1_000, on_timeout=refuse)
    flow = shop.app.flow("strict", Order, hf.Scene(wait, shop.act("parcel")))
    async with variant.node(shop.app):
        run = await shop.app.start(flow, Order())
        await wait_for_event(run, "SignalWaiting")
        await run.skip_step("go", wait=True)
        assert (await run.result()).parcel == "done"


@pytest.mark.contract("WF-4")
async def test_what_has_ended_in_a_pause_after_what_fails_the_flow_is_undone(variant: EngineVariant) -> None:
    """Two branches of the inner chorus change one field, which is known before the other act was handed over."""
    shop, gate, last = Workshop(), asyncio.Event(), asyncio.Event()

    @shop.app.activity
    async def change(order: Order) -> Order:
        await gate.wait()
        return replace(order, parcel="done")

    @shop.app.activity
    async def late(order: Order) -> None:
        await last.wait()

    both: hf.Chorus[Order] = hf.Chorus(hf.Act(change, step="one"), hf.Act(change, step="two"), step="both")
    beside = hf.Act(late, compensate=shop.undoes("payment"))
    flow = shop.app.flow("conflict", Order, hf.Chorus(both, beside))
    async with variant.node(shop.app):
        run = await shop.app.start(flow, Order())
        await wait_for_event(run, "StepStarted", 3)
        await run.pause(wait=True)
        gate.set()
        await wait_for_event(run, "StepCompleted", 2)
        last.set()
        await wait_for_event(run, "StepCompleted", 3)
        await run.resume()
        with pytest.raises(errors.RunFailed, match="both change the field"):
            await run.result()
    assert len(shop.done) == 1, "it was undone once"
