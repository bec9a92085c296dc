"""The same request after a deployment: it is the same, unless it names a version."""

from typing import Any

import pytest

import holdfast as hf
from holdfast.core.events import RunQueued
from holdfast.errors import Conflict, InvalidInput, NotFound
from tests.engine.harness import EngineVariant
from tests.service.in_process import serve_in_process


def release(*versions: str) -> tuple[hf.App, dict[str, Any]]:
    """Return an app that has these versions of a workflow."""
    app = hf.App("shop")
    workflows: dict[str, Any] = {}

    def register(version: str) -> None:
        @app.workflow(name="order", version=version, signals={"go": str})
        async def order(number: int) -> str:
            return f"{number} by {version}: {await hf.wait_signal('go', str)}"

        workflows[version] = order

    for version in versions:
        register(version)
    return app, workflows


@pytest.mark.contract("QUE-1")
@pytest.mark.parametrize(
    "ids", [{"request_id": "r-1"}, {"run_id": "r-1"}, {"request_id": "r-1", "run_id": "a"}], ids=str
)
async def test_a_retry_that_meets_a_new_release_gets_the_first_run(variant: EngineVariant, ids: Any) -> None:
    old, of_old = release("1")
    new, of_new = release("1", "2")
    async with variant.opened() as store:
        async with variant.node(old, store):
            first = await old.start(of_old["1"], 7, **ids)
        async with variant.node(new, store):
            again = await new.start(of_new["2"], 7, **ids)
            assert again.run_id == first.run_id
            with pytest.raises(Conflict):
                await new.start(of_new["2"], 8, **ids)
            other = await new.start(of_new["2"], 7, request_id="r-2")
            for run in (again, other):
                await run.signal("go", "now")
            assert await again.result() == "7 by 1: now"
            assert await other.result() == "7 by 2: now"
        newest, of_newest = release("3")
        async with variant.node(newest, store):
            assert (await newest.start(of_newest["3"], 7, **ids)).run_id == first.run_id


@pytest.mark.contract("QUE-1")
async def test_a_request_that_names_a_version_is_of_that_version(variant: EngineVariant) -> None:
    app, order = release("1", "2")
    async with variant.node(app):
        runs = [
            await app.start(order["2"], 7, request_id="r-1", workflow_version=version)
            for version in (None, "1", "2", "1", None)
        ]
        ids = [run.run_id for run in runs]
        assert ids[3:] == [ids[1], ids[0]]
        assert len(set(ids)) == 3
        queued = [(await run.events())[0].data for run in runs[:3]]
        assert [body.plan_version for body in queued if isinstance(body, RunQueued)] == ["2", "1", "2"]
        with pytest.raises(NotFound):
            await app.start(order["1"], 7, workflow_version="9")
        with pytest.raises(InvalidInput, match="at most 50 tags"):
            await app.start(order["1"], 7, tags=tuple(map(str, range(51))))
        unfit: Any
        for unfit in ([], 5, ""):
            with pytest.raises(InvalidInput, match="workflow_version"):
                await app.start(order["1"], 7, workflow_version=unfit)
            if unfit != "":
                with pytest.raises(InvalidInput, match="sent"):
                    await app.run("r").receipt(unfit)


@pytest.mark.contract("QUE-1", "SIG-6")
async def test_a_signal_that_comes_with_a_retry_goes_to_the_first_run(variant: EngineVariant) -> None:
    old, of_old = release("1")
    new, of_new = release("1", "2")
    async with variant.opened() as store:
        async with variant.node(old, store):
            first = await old.start(of_old["1"], 7, request_id="r-1")
        async with variant.node(new, store):
            go: Any = {"name": "go", "payload": "with it", "signal_id": "s-1"}
            again = await new.start(of_new["2"], 7, request_id="r-1", with_signal=go)
            assert again.run_id == first.run_id
            assert await again.result() == "7 by 1: with it"


@pytest.mark.contract("QUE-1", "API-1")
@pytest.mark.parametrize("name", ["runs.start", "signals.start_with"])
async def test_the_service_answers_a_retry_with_the_version_of_its_run(variant: EngineVariant, name: str) -> None:
    ask = {"workflow": "order", "input": {"number": 7}, "request_id": "r-1"}
    if name == "signals.start_with":
        ask |= {"signal_name": "go", "signal_payload": "x", "signal_id": "s-1"}
    async with variant.opened() as store:
        async with serve_in_process(store, app=release("1")[0]) as server:
            status, first = await server.rest(name, ask)
            assert status == 201, first
        async with serve_in_process(store, app=release("1", "2")[0]) as server:
            status, again = await server.rest(name, ask)
            assert (status, again.get("run", again)) == (201, first.get("run", first))
            status, named = await server.rest(name, {**ask, "workflow_version": "2"})
            started = named.get("run", named)
            assert started["run_id"] != first.get("run", first)["run_id"], named
            assert started["workflow_version"] == "2"
            assert (await server.rest(name, {**ask, "input": {"number": 8}}))[0] == 409
