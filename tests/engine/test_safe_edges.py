"""Mistakes that are easy to make are refused where they are made."""

from __future__ import annotations

import asyncio
import inspect
import logging
import re
from collections.abc import AsyncIterator, Iterator
from functools import partial
from typing import Any

import pytest

import holdfast as hf
from holdfast.errors import InvalidInput, NotDurable, RateLimited, RunFailed, UpdateFailed
from holdfast.store.port import RunQuery, Store
from holdfast.testing import TestNode
from tests.engine.harness import EngineVariant, wait_for_event


async def yields_later() -> AsyncIterator[int]:
    yield 1


def yields() -> Iterator[int]:
    yield 1


@pytest.mark.contract("API-2")
@pytest.mark.parametrize("function", [yields_later, yields])
def test_an_activity_that_yields_is_refused_when_it_is_registered(function: Any) -> None:
    app = hf.App("shop")
    with pytest.raises(InvalidInput, match="returns its result, and yields"):
        app.activity(function)
    assert app.registry.activities == {}


@pytest.mark.contract("API-2", "QUE-1")
async def test_an_option_of_start_that_could_be_an_argument_is_refused() -> None:
    app = hf.App("shop")

    @app.workflow
    async def looks(run_id: str, priority: int = 0) -> str:
        return f"{run_id} {priority}"

    @app.workflow(version="2", name="looks")
    async def looks_2(run_id: str, tags: list[str]) -> str:
        return f"{run_id} {tags}"

    @app.workflow
    async def asks(how: str) -> str:
        if how == "an option that could be an argument":
            await hf.start(looks, "other", priority=0)
        if how == "beside others":
            await hf.start(looks, "other", arguments={"run_id": "mine"})
        version: dict[str, Any] = {"workflow_version": "1"}
        mine = {"run_id": "mine", "priority": 3}
        run = await hf.start(looks, arguments=mine, run_id="its-own", priority=1, **version)
        by_name: hf.RunHandle[str] = await hf.start("looks", arguments={**mine, "priority": 4}, **version)
        return f"{run.run_id} {by_name.run_id}"

    async with app.node("memory://"):
        given: list[dict[str, Any]] = [
            {"run_id": "r-1"},
            {"priority": 1},
            {"priority": 0},  # what the option is without being given
            {"run_id": None},
            {"tags": ("a",), "workflow_version": "2"},  # it is a parameter of that version
        ]
        for options in given:
            with pytest.raises(InvalidInput, match="arguments=") as refused:
                await app.start(looks, "other", **options)
            assert refused.value.details["field"] in options
        assert await (await app.start(looks, "other", 2)).result() == "other 2"
        assert await (await app.start(looks, "other", request_id="q-1", tags=("a",))).result() == "other 0"
        named = await app.start(looks, arguments={"run_id": "mine", "priority": 3}, run_id="its-own-1", priority=1)
        assert (named.run_id, await named.result()) == ("its-own-1", "mine 3")
        assert await (await app.start(looks, arguments={"run_id": "mine"}, priority=2)).result() == "mine 0"
        bad: list[tuple[Any, dict[str, Any]]] = [(("x",), {"arguments": {}}), ((), {"arguments": 3, "priority": 1})]
        bad += [((), {"arguments": {}}), ((), {"arguments": {"run_id": "x", "other": 1}}), ((), {"arguments": {1: 2}})]
        bad += [((), {"arguments": {"run_id": "x"}, "color": "red"})]
        for args, options in bad:
            with pytest.raises(InvalidInput):
                await app.start(looks, *args, **options)
        first, second = (await (await app.start(asks, "")).result()).split()
        assert (first, await app.run(first).result()) == ("its-own", "mine 3")
        assert await app.run(second).result() == "mine 4"
        for how in ("an option that could be an argument", "beside others"):
            run = await app.start(asks, how)
            paused = await wait_for_event(run, "RunPaused")
            assert "arguments" in paused.data.error.message  # type: ignore[attr-defined]
        assert len(await app.runtime().store.find(RunQuery(workflow="looks"))) == 6


@pytest.mark.contract("API-2")
async def test_every_option_of_start_can_be_the_name_of_a_parameter() -> None:
    """Also that which has the arguments."""
    names = [
        name for name, each in inspect.signature(hf.App.start).parameters.items() if each.kind is each.KEYWORD_ONLY
    ]
    assert {"arguments", "priority", "connection", "run_timeout"} < set(names)
    app, scope = hf.App("shop"), dict[str, Any]()
    exec(f"async def echo(*, {', '.join(names)}):\n    return [{', '.join(names)}]", scope)
    echo = app.workflow(scope["echo"])
    async with app.node("memory://"):
        run = await app.start(echo, arguments={name: f"its {name}" for name in names}, tags=("a",))
        assert await run.result() == [f"its {name}" for name in names]
        [head] = await app.runtime().store.find(RunQuery(run_ids=(run.run_id,)))
        assert head.tags == ("a",)


@pytest.mark.contract("API-2")
async def test_a_workflow_that_is_called_outside_of_a_run_raises_and_says_what_to_do() -> None:
    app = hf.App("shop")

    @app.activity
    def double(number: int) -> int:
        return 2 * number

    @app.workflow
    async def order(number: int) -> int:
        return await double(number)

    @app.workflow
    async def inside(number: int) -> int:
        return await order.plain(number)

    with pytest.raises(NotDurable, match=r"app.start\(order, …\); a unit test calls order.plain"):
        await order(2)
    assert await order.plain(2) == 4
    async with app.node("memory://"):
        run = await app.start(inside, 1)
        paused = await wait_for_event(run, "RunPaused")
        assert "run it as a child" in str(paused.data)


@pytest.mark.contract("SIG-3")
async def test_a_wait_without_time_takes_what_is_in_the_mailbox(variant: EngineVariant) -> None:
    app = hf.App("shop")

    @app.workflow
    async def reads() -> list[str]:
        await hf.wait_signal("go")
        found = [await hf.wait_signal("item", str, timeout=0) for _ in range(2)]
        found += [item async for item in hf.signals("item", str, timeout=0)]
        return [*found, await hf.wait_signal("item", str, timeout=0, on_timeout=lambda: "none")]

    async with variant.node(app):
        run = await app.start(reads)
        for item in ("a", "b", "c", "d"):
            await run.signal("item", item)
        await run.signal("go")
        assert await run.result() == ["a", "b", "c", "d", "none"]


@pytest.mark.contract("SIG-7")
async def test_an_entity_takes_any_number_of_signals_a_minute(store: Store) -> None:
    app = hf.App("shop")

    async def counts(most: int) -> int:
        total = 0
        async for number in hf.signals("add", int):
            total += number
            if total >= most:
                return total
        return 0

    plain = app.workflow(name="plain")(counts)
    cart = app.workflow(name="cart", entity=True)(counts)
    sender = hf.App("sender")  # without the code: what was published holds
    most = hf.Limits().signals_per_run_per_minute
    async with app.node(store), sender.connect(store):
        entity, other = await app.start(cart, most + 4, run_id="cart"), await app.start(plain, most + 4)
        many = [{"run_id": entity.run_id, "name": "add", "payload": 1}] * most
        assert not [answer for answer in await app.signal_many(many) if isinstance(answer, Exception)]  # type: ignore[arg-type]
        await entity.signal("add", 1)
        await sender.run(entity.run_id).signal("add", 1)
        first: Any = {"name": "add", "payload": 1}
        await app.start(cart, most + 4, run_id="cart", request_id="", with_signal=first)
        mixed = [{"run_id": run_id, "name": "add", "payload": 1} for run_id in ["cart", *[other.run_id] * (most + 1)]]
        answers = await app.signal_many(mixed)  # type: ignore[arg-type]
        assert [isinstance(answer, RateLimited) for answer in answers] == [*[False] * (most + 1), True]
        assert await entity.result() == most + 4


@pytest.mark.contract("SIG-9")
async def test_what_a_run_sends_in_vain_is_reported(store: Store, caplog: pytest.LogCaptureFixture) -> None:
    app = hf.App("shop")

    @app.workflow
    async def sends() -> None:
        await app.run("nowhere").signal("hello", 1)

    async with app.node(store):
        with caplog.at_level(logging.WARNING, "holdfast.runs"):
            await (await app.start(sends, run_id="sender")).result()
        [letter] = await app.dead_letters(run_id="sender")
        assert letter.record.reason == "refused"
    assert "run sender: what it sent was not delivered: 'hello' to run 'nowhere': NotFound" in caplog.text


# --- mistakes at registration and in calls, each with an error that says what to do


class Service:
    async def charge(self, cents: int) -> int:
        return cents


async def pays(cents: int) -> int:
    return cents


NOT_REGISTERED: list[tuple[Any, str]] = [
    (lambda app: app.activity(Service.charge), "a method without its object; register a function, or the method of"),
    (lambda app: app.workflow(Service.charge), "a method without its object"),
    (lambda app: app.activity(Service), "@app.activity registers a function, not <class"),
    (lambda app: app.activity("pay"), "register it with @app.activity(name='pay')"),
    (lambda app: app.workflow("pay"), "register it with @app.workflow(name='pay')"),
    (lambda app: app.activity(partial(pays, 3)), "has no name: register it with @app.activity(name=…)"),
    (lambda app: app.activity(max), "no signature found for builtin"),
    (lambda app: app.activity(retry_if=True)(pays), "retry_if is a plain function of the exception, not True"),
    (lambda app: app.activity(max_attempts=3)(pays), "it belongs to the retry policy, retry=hf.Retry(max_attempts=…)"),
    (
        lambda app: app.activity(pays).options(raises=ValueError),
        "raises is an option of @app.activity, not of one",
    ),
    (lambda app: app.activity(tries=3)(pays), "known are cancel, heartbeat_timeout, idempotency_key, name, on_failure"),
    (
        lambda app: app.workflow(timeout=3)(pays),
        "unknown workflow option 'timeout'; known are allow_other",
    ),
    (lambda app: app.workflow(pays).options(tags=["a"]), "tags of a child is a tuple of at most"),
    (lambda app: app.workflow(pays).options(cancel="no"), "cancel of a child is one of now, wait, not 'no'"),
    (lambda app: app.external_workflow(3), "an external workflow is given by its name or as an async function, not"),
    (lambda app: app.on_failed(3), "on_failed registers a function of a run's id and the reason, not 3"),
    (lambda app: hf.App(""), "an app has a name, a string that is not empty"),
    (lambda app: hf.App("shop", limits=3), "limits are an hf.Limits, not 3"),  # type: ignore[arg-type]
    (lambda app: hf.App("shop", attributes=["a"]), "attributes are types by name"),  # type: ignore[arg-type]
    (lambda app: app.workflow(signals=["paid"])(pays), "signals is a dict of types by name"),
    (lambda app: app.workflow(at_once=1, overload="wait")(pays), "overload is one of queue, delay, reject, not 'wait'"),
]


@pytest.mark.contract("API-2")
@pytest.mark.parametrize(("register", "said"), NOT_REGISTERED)
def test_what_cannot_be_registered_says_what_to_do(register: Any, said: str) -> None:
    with pytest.raises(InvalidInput, match=re.escape(said)):
        register(hf.App("shop"))


async def test_the_method_of_an_object_is_an_activity() -> None:
    app = hf.App("shop")
    charge = app.activity(Service().charge)

    @app.workflow
    async def order() -> int:
        return await charge(3)

    async with app.node("memory://"):
        assert await (await app.start(order)).result() == 3


IN_A_WORKFLOW: list[tuple[str, str]] = [
    ("saga.undo(pay(1))", "undo: what compensates is a function, such as one after `lambda:`, not a coroutine"),
    ("saga.undo(pay)", "undo: pays cannot be called with 0 arguments: missing a required argument: 'cents'"),
    ("await hf.wait_signal('paid', timeout=9, on_timeout='no')", "wait_signal: on_timeout is a function, not 'no'"),
    ("await hf.wait_signal('paid', condition=False)", "wait_signal: a condition is a plain function, not False"),
    ("await hf.start(order2.options(tags=('a',)), 1)", "pays.options(…) is for children: give tags, priority and the"),
    ("hf.Saga().undo(pay, 1)", "undo: the saga is not open, and would undo nothing: async with hf.Saga() as saga"),
    ("saga.undo(print, 'x'); raise hf.WorkflowFailed('no')", "undo calls an activity, a workflow or an async function"),
    ("await hf.step(pay, 1)", "pays is registered: call it without hf.step"),
    ("await hf.step(max, 1)", "no signature found for builtin"),
    ("await hf.map(pay, {1, 2})", "the order of a set differs between processes; give it sorted(items)"),
    ("await hf.map(abs, [1])", "map calls an activity, a workflow or an async function; this one returned a int"),
    ("await hf.poll(lambda: 1, every=1)", "poll calls an activity, a workflow or an async function"),
    ("await hf.poll(pay(1), every=1)", "poll: what is called is a function"),
    ("await hf.wait_until(True)", "wait_until: the condition is a function"),
    ("await hf.start('pay', tags='abc')", "tags are a tuple of strings, not 'abc'"),
    ("await lock.__aenter__()", "lock 'account' is entered by a call: `async with lock(key):`, or `lock()` for all"),
    ("await app.node('memory://').__aenter__()", "node: it would be done again on every replay"),
    ("hf.publish(text='x' * 5000)", "what is published has 5011 bytes; the limit is 4096; keep it elsewhere"),
]


@pytest.mark.contract("API-2", "WF-7")
@pytest.mark.filterwarnings("ignore:coroutine .* was never awaited")
@pytest.mark.parametrize(("code", "said"), IN_A_WORKFLOW)
async def test_a_mistake_in_a_workflow_pauses_it_and_says_what_to_do(code: str, said: str) -> None:
    app = hf.App("shop")
    known: dict[str, Any] = {
        "hf": hf,
        "app": app,
        "pay": app.activity(pays),
        "lock": app.lock("account"),
        "order2": app.workflow(pays),
    }
    exec(f"async def order():\n  async with hf.Saga() as saga:\n    {code}", known)
    order = app.workflow(known["order"])
    async with app.node("memory://"):
        event = await wait_for_event(await app.start(order), "RunPaused")
    assert said in event.data.error.message  # type: ignore[attr-defined]


async def test_what_is_opened_or_started_wrongly_says_what_to_do() -> None:
    app = hf.App("shop")
    order = app.workflow(pays)
    unopened: Any = 3
    with pytest.raises(InvalidInput, match=r"a store is an address such as sqlite:///orders\.db"):
        await app.node(unopened).__aenter__()
    async with app.node("memory://"):
        name: Any = "pays"
        with pytest.raises(InvalidInput, match=r"by its name it is app\.external_workflow\('pays'\)"):
            await app.start(name, 1)
        with pytest.raises(InvalidInput, match=r"pays\.options\(…\) is for children"):
            await app.start(order.options(priority=5), 1)
        signal: Any = {"name": "go", "id": "click-1"}
        with pytest.raises(InvalidInput, match=r"with_signal is a dict of name, .*; not one of name, id"):
            await app.start(order, 1, with_signal=signal)
        run = await app.start(order, 1, run_id="o-1")
        assert repr(run) == "<RunHandle o-1>"


@pytest.mark.parametrize(
    ("waits", "said"),
    [
        (lambda: hf.poll(lambda: hf.sleep(1), every=60, timeout=600), "poll: nothing true was returned within 600 s"),
        (lambda: hf.wait_until(lambda: False, timeout=60), "wait_until: the condition did not become true within 60 s"),
    ],
)
async def test_a_time_out_says_what_did_not_happen(waits: Any, said: str) -> None:
    app = hf.App("shop")

    @app.workflow
    async def order() -> None:
        await waits()

    async with TestNode(app):
        with pytest.raises(RunFailed, match=f"TimeoutError: {said}$"):
            await (await app.start(order)).result()


async def test_an_error_without_words_ends_with_its_name() -> None:
    app = hf.App("shop")

    @app.workflow
    async def order() -> None:
        async with asyncio.timeout(5):
            await hf.wait_signal("paid")

    async with TestNode(app):
        with pytest.raises(RunFailed, match=r"failed: TimeoutError$"):
            await (await app.start(order)).result()


@pytest.mark.filterwarnings("error")
async def test_an_update_that_does_not_fit_is_named() -> None:
    app = hf.App("shop")

    @app.workflow
    async def basket() -> None:
        hf.on_update("put", put)
        await hf.wait_signal("done")

    async with TestNode(app):
        run = await app.start(basket)
        with pytest.raises(UpdateFailed, match=r"the arguments of update 'put' do not fit: .* missing required field"):
            await run.update("put")


def put(item: str) -> None:
    """Do nothing."""
