"""The context of a run: recorded once, and carried to activities, children, forks, retries and schedules' runs."""

import asyncio
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

import holdfast as hf
from holdfast.core.events import NULL, ContinuedAsNew, RunQueued
from holdfast.core.plans import CONTEXT_LEVEL, FORMAT_LEVEL
from holdfast.core.state import state_of
from holdfast.engine.history import since_rotation
from holdfast.errors import InvalidInput, NotDurable, PayloadTooLarge
from holdfast.limits import CONTEXT_BYTES
from holdfast.store.memory import MemoryStore
from holdfast.store.port import RunQuery
from tests.engine.harness import EngineVariant, wait_for_event

pytestmark = pytest.mark.contract("CTX-1")

ANN = {"user": "ann", "tenant-plan": "gold"}


def seeing_app(**options: Any) -> tuple[hf.App, Any, Any]:
    """Return an app whose activities, workflows and children say which context they see."""
    app = hf.App("seeing", **options)

    @app.activity
    async def see() -> dict[str, str]:
        assert hf.context() == hf.activity_context().run_context
        return hf.context()

    @app.activity(queue="elsewhere")
    def see_in_thread() -> dict[str, str]:
        return hf.context()

    @app.workflow
    async def child() -> list[dict[str, str]]:
        return [hf.context(), await see()]

    @app.workflow
    async def parent(rounds: int = 0) -> list[Any]:
        if rounds:
            await see()
            hf.continue_as_new(rounds - 1)
        started = await hf.start(child)
        seen = [hf.context(), await see(), await see_in_thread(), *await child(), started.run_id]
        await hf.wait_signal("end")
        return [*seen, hf.context(), await see()]

    return app, parent, child


async def test_the_context_reaches_everything_that_follows_from_a_start(variant: EngineVariant) -> None:
    app, parent, _ = seeing_app()
    async with asyncio.timeout(15), variant.opened() as store, variant.node(app, store, queues=("elsewhere",)):
        run = await app.start(parent, rounds=2, context=ANN)
        await wait_for_event(run, "SignalWaiting")
        await run.signal("end")
        *before, started, late, last = await run.result()
        assert [*before, late, last] == [ANN] * 7
        assert await app.run(started).result() == [ANN, ANN]
        heads = {head.run_id: head.needs for head in await store.find(RunQuery())}
        assert set(heads.values()) == {CONTEXT_LEVEL}, "a node that does not know of contexts leaves them alone"


async def test_it_is_recorded_once_and_a_rotation_carries_it(variant: EngineVariant) -> None:
    app, parent, _ = seeing_app()
    async with asyncio.timeout(15), variant.opened() as store, variant.node(app, store, queues=("elsewhere",)):
        run = await app.start(parent, rounds=1, context=ANN)
        await wait_for_event(run, "SignalWaiting")
        events = await run.events()
        recorded = [event for event in events if b"gold" in bytes(getattr(event.data, "context", None) or b"")]
        assert [type(event.data) for event in recorded] == [RunQueued]
        [rotation] = [event.data for event in events if isinstance(event.data, ContinuedAsNew)]
        assert b"gold" in bytes(rotation.carried)
        whole = state_of(run.run_id, events)
        assert whole == replace(state_of(run.run_id, since_rotation(events)), replay_from=whole.replay_from)


async def test_what_is_bound_around_a_start_is_carried_and_the_start_adds_to_it() -> None:
    app, _, child = seeing_app()
    with hf.bind_context(user="node", trace="n"):
        async with asyncio.timeout(30), app.node(MemoryStore()):
            plain = await app.start(child)
            with hf.bind_context(user="ann"):
                assert hf.context() == {"user": "ann", "trace": "n"}
                bound = await app.start(child, context={"order": "7"})
            assert hf.context() == {"user": "node", "trace": "n"}
            assert (await plain.result())[0] == {"user": "node", "trace": "n"}
            assert (await bound.result())[1] == {"user": "ann", "trace": "n", "order": "7"}
    assert hf.context() == {}


async def test_the_context_of_a_node_is_not_that_of_its_runs() -> None:
    """A node that is opened where something is bound runs the work of others."""
    app, _, child = seeing_app()
    store = MemoryStore()
    async with asyncio.timeout(30), app.connect(store):
        run = await app.start(child)
    with hf.bind_context(user="node"):
        async with asyncio.timeout(30), app.node(store):
            assert await app.run(run.run_id).result() == [{}, {}]


async def test_an_activity_hands_its_context_on_to_what_it_starts() -> None:
    app = hf.App("handing")

    @app.workflow
    async def inner() -> dict[str, str]:
        return hf.context()

    @app.activity
    async def start_others() -> list[dict[str, str]]:
        plain = await app.start(inner)
        with hf.bind_context(step="2"):
            more = await app.start(inner)
        return [await plain.result(), await more.result()]

    @app.workflow
    async def outer() -> list[dict[str, str]]:
        return await start_others()

    async with asyncio.timeout(30), app.node(MemoryStore()):
        run = await app.start(outer, context={"user": "ann"})
        assert await run.result() == [{"user": "ann"}, {"user": "ann", "step": "2"}]


async def test_forks_and_retries_have_the_context_of_the_run(variant: EngineVariant) -> None:
    app, _, child = seeing_app()
    async with variant.node(app):
        run = await app.start(child, context=ANN)
        await run.result()
        fork = await run.fork(at=1)
        assert await fork.result() == [ANN, ANN]
        again = await run.retry_run()
        assert await again.result() == [ANN, ANN]


async def test_the_runs_of_a_schedule_have_its_context(variant: EngineVariant) -> None:
    app, _, child = seeing_app()
    async with variant.opened() as store, variant.node(app, store):
        with hf.bind_context(user="ann"):
            await app.schedules.create("s", workflow=child, every=timedelta(days=1), context={"from": "schedule"})
        run = await app.schedules.trigger("s")
        assert await run.result() == [{"user": "ann", "from": "schedule"}] * 2


async def test_the_first_request_decides_the_context() -> None:
    app, _, child = seeing_app()
    async with asyncio.timeout(30), app.node(MemoryStore()):
        first = await app.start(child, request_id="r", context=ANN)
        second = await app.start(child, request_id="r", context={"user": "bob"})
        assert first.run_id == second.run_id
        assert await second.result() == [ANN, ANN]


async def test_an_unfit_context_is_refused_and_nothing_is_stored() -> None:
    app, _, child = seeing_app()
    store = MemoryStore()
    unfit: list[Any] = [{"": "x"}, {"a b": "x"}, {"$holdfast": "x"}, {"n": 5}, {f"k{n}": "" for n in range(33)}]
    async with asyncio.timeout(30), app.node(store):
        for context in unfit:
            with pytest.raises(InvalidInput):
                await app.start(child, context=context)
        with pytest.raises(PayloadTooLarge, match="carry an id instead"):
            await app.start(child, context={"large": "x" * CONTEXT_BYTES})
        with pytest.raises(InvalidInput), hf.bind_context(**{"a b": "x"}):
            raise AssertionError("it is bound")
        assert list(await store.find(RunQuery())) == []


async def test_a_workflow_keeps_the_context_that_it_was_started_with() -> None:
    app = hf.App("keeping")

    @app.workflow
    async def changing() -> str:
        try:
            with hf.bind_context(user="bob"):
                return "bound"
        except NotDurable as problem:
            return str(problem)

    async with asyncio.timeout(30), app.node(MemoryStore()):
        assert "keeps the context" in await (await app.start(changing)).result()


async def test_the_context_is_sealed_like_other_values(tmp_path: Path) -> None:
    """In the start, in the job of a queue, in a rotation, in a child, and in a schedule."""
    path = tmp_path / "store.db"
    app, parent, child = seeing_app(codecs=[hf.Encryption({"k1": b"1" * 32})])
    hush = {"user": "hush-4111"}
    async with asyncio.timeout(30), app.node(f"sqlite:///{path}", options=hf.NodeOptions(queues=("elsewhere",))):
        run = await app.start(parent, rounds=1, context=hush)
        await wait_for_event(run, "SignalWaiting")
        await app.schedules.create("s", workflow=child, every=timedelta(days=1), context=hush)
        assert await (await app.schedules.trigger("s")).result() == [hush, hush]
    async with asyncio.timeout(30), app.node(f"sqlite:///{path}", options=hf.NodeOptions(queues=("elsewhere",))):
        await app.run(run.run_id).signal("end")
        assert (await app.run(run.run_id).result())[-1] == hush
    stored = b"".join(file.read_bytes() for file in tmp_path.iterdir())
    assert b"hush" not in stored


async def test_secrets_of_an_activity_are_redacted_from_the_context_of_what_it_starts() -> None:
    app = hf.App("secretive", secrets=_Provider())

    @app.workflow
    async def inner() -> dict[str, str]:
        return hf.context()

    @app.activity
    async def start_other(key: hf.Secret) -> dict[str, str]:
        run = await app.start(inner, context={"key": key.reveal()})
        return await run.result()

    @app.workflow
    async def outer() -> dict[str, str]:
        return await start_other(hf.Secret("api/key"))

    async with asyncio.timeout(30), app.node(MemoryStore()):
        seen = await (await app.start(outer)).result()
        assert "s3cr3t-value" not in seen["key"]
        assert "api/key" in seen["key"]


class _Provider:
    async def resolve(self, names: Any, scope: hf.SecretScope) -> dict[str, str]:
        return dict.fromkeys(names, "s3cr3t-value")


async def test_a_run_without_a_context_needs_no_level_and_records_nothing(variant: EngineVariant) -> None:
    assert CONTEXT_LEVEL <= FORMAT_LEVEL
    app, _, child = seeing_app()
    async with variant.opened() as store, variant.node(app, store):
        run = await app.start(child)
        assert await run.result() == [{}, {}]
        [first, *_] = await run.events()
        assert isinstance(first.data, RunQueued)
        assert first.data.context is NULL
        assert [head.needs for head in await store.find(RunQuery())] == [0]
