"""One command to many runs: what becomes of a run that ends, or goes on, between the search and the command."""

import asyncio

import pytest

import holdfast as hf
from holdfast.cli.run_words import sentences_of
from holdfast.errors import RunTerminal
from holdfast.limits import SIGNAL_ID_BYTES
from holdfast.service.context import RequestContext
from holdfast.service.operations import bulk
from holdfast.service.operations.bulk import CommandRuns
from holdfast.service.operations.runs import done_again_by
from holdfast.store.port import Index, RunHead
from tests.service.in_process import serve_in_process


@pytest.mark.contract("SIG-13")
async def test_a_run_that_has_finished_meanwhile_is_left_alone_and_no_refusal(monkeypatch: pytest.MonkeyPatch) -> None:
    async def too_late(context: RequestContext, request: CommandRuns, head: RunHead) -> str | None:
        raise RunTerminal(f"run {head.run_id} is COMPLETED")

    monkeypatch.setattr(bulk, "_carry_out", too_late)
    async with serve_in_process() as server:
        run_id = await server.start("order", order_id="o-1")
        ask = {"command": "cancel", "request_id": "r"}
        answer = (await server.http.post("/v1/run-commands", json=ask)).json()
        assert answer["items"] == [{"run_id": run_id, "not_concerned": "it has finished meanwhile"}]


@pytest.mark.contract("SIG-13")
async def test_a_step_that_is_tried_by_itself_meanwhile_is_no_refusal(monkeypatch: pytest.MonkeyPatch) -> None:
    app, calls, carry_out = hf.App("shop"), [], bulk._carry_out

    @app.activity(retry=hf.Retry(max_attempts=3, initial_ms=60_000))
    async def send() -> None:
        calls.append("send")
        if len(calls) == 1:
            raise ConnectionError("no answer")

    @app.workflow
    async def mail() -> str:
        await send()
        return await hf.wait_signal("read", str)

    async def late(context: RequestContext, request: CommandRuns, head: RunHead) -> str | None:
        await app.run(head.run_id).retry_step("send")  # as the attempt would have begun by itself
        await server.until("runs.get", {"run_id": head.run_id}, lambda run: run["waiting_kind"] == "signal")
        return await carry_out(context, request, head)

    async with serve_in_process(app=app) as server:
        run_id = await server.start("mail")
        await server.until("runs.get", {"run_id": run_id}, lambda run: run.get("retrying") is not None)
        monkeypatch.setattr(bulk, "_carry_out", late)
        ask = {"command": "try_now", "retrying": True, "request_id": "r"}
        answer = (await server.http.post("/v1/run-commands", json=ask)).json()
        assert answer["items"] == [{"run_id": run_id, "not_concerned": "it was tried again meanwhile"}]
        assert calls == ["send", "send"]


@pytest.mark.contract("SIG-5", "SIG-13")
def test_commands_to_steps_with_long_names_have_ids_that_are_taken() -> None:
    """Two steps whose names begin alike have two ids, and a repeated request has the same."""
    long = "item " * 40
    ids = [bulk._id_for("bulk-1", f"{long}{end}") for end in ("a", "b", "a")]
    assert (ids[0] == ids[2], ids[0] == ids[1]) == (True, False)
    assert all(len(each.encode()) <= SIGNAL_ID_BYTES for each in ids)
    assert bulk._id_for("bulk-1", "charge") == "bulk-1:charge"


@pytest.mark.contract("SIG-13")
async def test_a_search_for_failed_runs_does_none_of_them_again_a_second_time() -> None:
    async with serve_in_process() as server:
        run_id = await server.start("failing")
        await server.until("runs.get", {"run_id": run_id}, lambda run: run["status"] == "FAILED")
        ask = {"command": "retry", "status": "FAILED"}
        first = (await server.http.post("/v1/run-commands", json={**ask, "request_id": "r1"})).json()
        [made] = [item["made"] for item in first["items"]]
        await server.until("runs.get", {"run_id": made}, lambda run: run["status"] == "FAILED")
        for request_id, preview in (("r2", True), ("r3", False)):
            again = {**ask, "request_id": request_id, "preview": preview}
            answer = (await server.http.post("/v1/run-commands", json=again)).json()
            left = {item["run_id"]: item.get("not_concerned") for item in answer["items"]}
            assert (left[run_id], answer["concerned"]) == ("it was done again already", 1), "its retry has failed too"
        failed = (await server.http.get(f"/v1/runs/{run_id}")).json()
        newest = failed["done_again_by"]
        assert newest.startswith(f"{made}/retry-"), "the last of those that descend from it"
        assert f"-> it was done again already: `holdfast run show {newest}` shows how that went" in sentences_of(failed)
        chosen = {**ask, "request_id": "r4", "run_ids": [run_id], "only_once": True}
        answer = (await server.http.post("/v1/run-commands", json=chosen)).json()
        left = {"run_id": run_id, "made": newest, "not_concerned": "it was done again already"}
        assert (answer["items"], answer["concerned"]) == ([left], 0)
        named = {**ask, "request_id": "r5", "run_ids": [run_id]}
        [item] = (await server.http.post("/v1/run-commands", json=named)).json()["items"]
        assert item["made"] not in (None, made), "who names it means it"


@pytest.mark.contract("SIG-13")
@pytest.mark.parametrize("command", ["retry", "retry_failed", "retry_from_start", "fork"])
async def test_two_operators_at_the_same_moment_do_a_failed_run_again_once(
    command: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    both = asyncio.Barrier(2)

    async def looks_with_the_other(store: Index, run_id: str) -> str | None:
        again = await done_again_by(store, run_id)
        await both.wait()
        return again

    monkeypatch.setattr(bulk, "done_again_by", looks_with_the_other)
    async with serve_in_process() as server:
        run_id = await server.start("failing")
        await server.until("runs.get", {"run_id": run_id}, lambda run: run["status"] == "FAILED")

        async def by(name: str) -> str:
            ask = {"command": command, "status": "FAILED", "request_id": name, "reason": f"as {name} says"}
            [item] = (await server.http.post("/v1/run-commands", json=ask)).json()["items"]
            return str(item["made"])

        one, other = await asyncio.gather(by("ann"), by("bob"))
        assert one == other
