"""An update is validated once, when it is accepted. At replay it is applied as it was recorded, or the run diverges."""

from collections.abc import Callable
from typing import Any

import pytest

import holdfast as hf
from holdfast.core import events as e
from holdfast.core.state import PAUSED
from holdfast.engine.check_histories import check_store
from holdfast.errors import InvalidInput, UpdateFailed
from holdfast.store.port import Store
from tests.engine.harness import EngineVariant, wait_for_event, wait_for_status

Refuse = Callable[[int], None]


def lenient(by: int) -> None:
    """Let everything pass."""


def strict(by: int) -> None:
    raise ValueError(f"{by} is too much")


def counting(validator: Refuse, handler: Callable[..., Any] | None = None, name: str = "add") -> tuple[hf.App, Any]:
    """Return an app whose workflow adds up what updates bring."""
    app = hf.App("counting")

    @app.workflow(name="count")
    async def count() -> int:
        total = 0

        def add(by: int) -> int:
            nonlocal total
            total += by
            return total

        hf.on_query("total", lambda: total)
        hf.on_update(name, handler or add, validator=validator)
        await hf.wait_signal("close", str)
        return total

    return app, count


async def begun(variant: EngineVariant, store: Store, *, is_refused: bool = False) -> str:
    """Start a run, send it an update of 5, and stop the node."""
    app, count = counting(strict if is_refused else lenient)
    async with variant.node(app, store):
        run = await app.start(count)
        if is_refused:
            with pytest.raises(UpdateFailed, match="5 is too much"):
                await run.update("add", by=5)
        else:
            assert await run.update("add", by=5) == 5
        return run.run_id


@pytest.mark.contract("WF-6")
async def test_the_validator_runs_once_for_each_update(variant: EngineVariant) -> None:
    seen: list[int] = []
    app, count = counting(lambda by: seen.append(by))
    async with variant.node(app):
        run = await app.start(count)
        assert [await run.update("add", by=by) for by in (1, 2, 3)] == [1, 3, 6]
        await run.signal("close", "")
        assert await run.result() == 6
    assert seen == [1, 2, 3]


@pytest.mark.contract("WF-6")
async def test_an_update_that_was_accepted_stays_although_its_validator_would_refuse_it_now(
    variant: EngineVariant,
) -> None:
    async with variant.opened() as store:
        run_id = await begun(variant, store)
        app, _ = counting(strict)
        assert await check_store(app.registry, store) == []
        async with variant.node(app, store):
            run = app.run(run_id)
            assert await run.query("total") == 5
            await run.signal("close", "")
            assert await run.result() == 5


@pytest.mark.contract("WF-6")
async def test_an_update_that_was_refused_is_not_applied_although_its_validator_would_accept_it_now(
    variant: EngineVariant,
) -> None:
    async with variant.opened() as store:
        run_id = await begun(variant, store, is_refused=True)
        app, _ = counting(lenient)
        assert await check_store(app.registry, store) == []
        async with variant.node(app, store):
            run = app.run(run_id)
            assert await run.query("total") == 0
            await run.signal("close", "")
            assert await run.result() == 0


def misfit(wrong: str) -> None: ...


def fails(by: int) -> int:
    raise ValueError("no longer")


CHANGES: list[tuple[str, dict[str, Any], str]] = [
    ("no handler", {"name": "subtract"}, "takes no update 'add'"),
    ("other parameters", {"handler": misfit}, "cannot be applied"),
    ("a handler that fails", {"handler": fails}, "no longer"),
]


@pytest.mark.contract("WF-2", "WF-6")
@pytest.mark.parametrize(("change", "problem"), [each[1:] for each in CHANGES], ids=[each[0] for each in CHANGES])
async def test_a_recorded_update_that_cannot_be_applied_is_a_divergence(
    variant: EngineVariant, change: dict[str, Any], problem: str
) -> None:
    async with variant.opened() as store:
        run_id = await begun(variant, store)
        app, _ = counting(lenient, **change)
        [found] = await check_store(app.registry, store)
        assert (found.run_id, found.code) == (run_id, "NondeterminismError")
        assert found.run_seq > 0
        assert problem in found.message
        async with variant.node(app, store):
            run = app.run(run_id)
            await run.signal("close", "")
            await wait_for_status(run, PAUSED)
            paused = (await wait_for_event(run, "RunPaused")).data
            assert isinstance(paused, e.RunPaused)
            assert paused.error is not None
            assert (paused.error.code, problem in paused.error.message) == ("NondeterminismError", True)


@pytest.mark.contract("WF-6")
async def test_a_validator_may_only_look(variant: EngineVariant) -> None:
    def begins_something(by: int) -> None:
        raise InvalidInput("never") if by < 0 else hf.errors.HoldfastError(str(hf.now()))

    app, count = counting(begins_something)
    async with variant.node(app):
        run = await app.start(count)
        with pytest.raises(UpdateFailed, match="NotDurable"):
            await run.update("add", by=5)
        await run.signal("close", "")
        assert await run.result() == 0
