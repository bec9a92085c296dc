"""Tags by which the engine decides are its own: no caller gives them to a run."""

from datetime import timedelta

import pytest

import holdfast as hf
from holdfast.core.keys import OWN_TAGS
from holdfast.errors import InvalidInput, RunFailed


@pytest.mark.contract("API-4", "QUE-4")
@pytest.mark.parametrize("prefix", OWN_TAGS)
async def test_no_caller_makes_a_run_look_as_if_another_had_descendants(prefix: str) -> None:
    """Else any tenant could hide a failed run from operators, and keep what was deleted from being swept."""
    app = hf.App("shop")

    @app.workflow
    async def order() -> None: ...

    @app.workflow
    async def starter(tag: str) -> None:
        await hf.start(order, tags=(tag,))

    async with app.node("memory://"):
        tag = f"{prefix}{(await app.start(order)).run_id}"
        with pytest.raises(InvalidInput, match="are the engine's"):
            await app.start(order, tenant="another", tags=("web", tag))
        with pytest.raises(InvalidInput, match="are the engine's"):
            await app.schedules.create("nightly", workflow=order, every=timedelta(days=1), tags=(tag,))
        with pytest.raises(InvalidInput, match="are the engine's"):
            order.options(tags=(tag,))
        run = await app.start(starter, tag)
        with pytest.raises(RunFailed, match="are the engine's"):
            await run.result()
