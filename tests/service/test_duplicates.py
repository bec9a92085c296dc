"""The same request again, over whichever transport: one is stored, and everybody is told the same."""

import asyncio
import itertools
from pathlib import Path
from typing import Any

import pytest

import holdfast as hf
from holdfast.errors import SignalAcceptanceIndeterminate
from holdfast.store.port import Refused
from holdfast.testing.clock import VirtualClock
from tests.service.stage import Stage, make_app, on_stage


async def signal(stage: Stage, **more: Any) -> dict[str, Any]:
    """Return a signal to a run that waits for others."""
    run_id = await stage.start("order", order_id="o-1")
    return {"run_id": run_id, "name": "note", "payload": {"n": 1}, "signal_id": "click-1", **more}


async def stored(stage: Stage, run_id: str) -> int:
    """Return how many signals the run's mailbox holds."""
    return len((await stage.rest("signals.mailbox", {"run_id": run_id}))[1]["items"])


@pytest.mark.contract("SIG-5", "SIG-7", "API-1")
@pytest.mark.parametrize("first", ["rest", "rpc"])
@pytest.mark.parametrize("then", ["rest", "rpc"])
async def test_a_duplicate_gets_the_first_answer_on_any_transport(first: str, then: str, tmp_path: Path) -> None:
    async with on_stage(f"sqlite:///{tmp_path}/s.db") as stage:
        ask = await signal(stage)
        callers = stage.callers()
        status, accepted = await callers[first]("signals.send", ask)
        assert status == 202
        assert await callers[then]("signals.send", ask) == (202, accepted)
        assert await stored(stage, ask["run_id"]) == 1
        status, problem = await callers[then]("signals.send", {**ask, "payload": {"n": 2}})
        assert (status, problem["code"]) == (409, "Conflict")
        assert await stored(stage, ask["run_id"]) == 1


@pytest.mark.contract("SIG-7")
async def test_a_replay_over_json_rpc_has_the_new_id() -> None:
    async with on_stage() as stage:
        ask = await signal(stage)
        answers = [
            (
                await stage.http.post(
                    "/rpc", json={"jsonrpc": "2.0", "id": id, "method": "signals.send", "params": params}
                )
            ).json()
            for id, params in (("first", ask), (2, ask), ("third", {**ask, "payload": 0}))
        ]
        assert [answer["id"] for answer in answers] == ["first", 2, "third"]
        assert answers[0]["result"] == answers[1]["result"]
        assert answers[2]["error"]["code"] == -32_009
        assert answers[2]["error"]["data"]["code"] == "Conflict"


@pytest.mark.contract("SIG-5")
async def test_of_many_at_once_one_is_stored(tmp_path: Path) -> None:
    async with on_stage(f"sqlite:///{tmp_path}/s.db") as stage:
        ask = await signal(stage)
        callers = itertools.cycle(stage.callers().values())
        answers = await asyncio.gather(*(next(callers)("signals.send", ask) for _ in range(40)))
        assert all(answer == answers[0] for answer in answers)
        assert await stored(stage, ask["run_id"]) == 1


@pytest.mark.contract("SIG-5")
async def test_without_an_id_each_is_accepted() -> None:
    async with on_stage() as stage:
        ask = await signal(stage)
        del ask["signal_id"]
        ids = {(await call("signals.send", ask))[1]["signal_id"] for call in stage.callers().values()}
        assert len(ids) == 2
        assert await stored(stage, ask["run_id"]) == 2


@pytest.mark.contract("SIG-5")
async def test_ids_are_taken_as_they_are() -> None:
    async with on_stage() as stage:
        ask = await signal(stage)
        ids = ["a:b", "a%3Ab", "a/b", "A:B", " a", "a", "\u00e9", "e\u0301", "x" * 128]
        for id in ids:
            for call in stage.callers().values():
                assert (await call("signals.send", {**ask, "signal_id": id}))[1]["signal_id"] == id
        assert await stored(stage, ask["run_id"]) == len(ids)
        receipts = [
            await stage.rest("signals.receipt", {"run_id": ask["run_id"], "name": "note", "signal_id": id})
            for id in ids
        ]
        assert all(receipt[1]["status"] == "accepted" for receipt in receipts)


@pytest.mark.contract("SIG-5", "SIG-6")
async def test_a_replay_survives_a_crash(tmp_path: Path) -> None:
    address = f"sqlite:///{tmp_path}/s.db"
    async with on_stage(address) as stage:
        ask = await signal(stage)
        first = await stage.rest("signals.send", ask)
    async with on_stage(address, app=make_app()) as stage:
        assert await stage.rpc("signals.send", ask) == first
        assert await stored(stage, ask["run_id"]) == 1


@pytest.mark.contract("SIG-6")
async def test_after_its_time_a_retry_is_a_new_request() -> None:
    clock = VirtualClock()
    store = hf.MemoryStore(clock, limits=hf.Limits(acceptance_retention_ms=1_000))
    async with on_stage(store) as stage:
        ask = await signal(stage)
        _, first = await stage.rest("signals.send", ask)
        clock.advance(ms=1_001)
        _, second = await stage.rpc("signals.send", ask)
        assert second["signal_storage_key"] != first["signal_storage_key"]
        assert await stored(stage, ask["run_id"]) == 2


@pytest.mark.contract("SIG-6", "SIG-7", "API-2")
@pytest.mark.parametrize("transport", ["rest", "rpc"])
async def test_an_acceptance_that_is_not_known_fails_closed(transport: str) -> None:
    async with on_stage() as stage:
        ask = await signal(stage, payload="hunter2")
        store: Any = stage.app.opened().store
        problem = SignalAcceptanceIndeterminate(
            "may have been delivered", workflow_id=ask["run_id"], signal_name="note", signal_id="click-1"
        )

        async def deliver(items: Any) -> Any:
            return [Refused(problem) for _ in items]

        store.deliver = deliver
        status, told = await stage.callers()[transport]("signals.send", ask)
        assert (status, told["code"]) == (409, "SignalAcceptanceIndeterminate")
        assert told["details"] == {"workflow_id": ask["run_id"], "signal_name": "note", "signal_id": "click-1"}
        assert told["correlation_id"]
        assert "hunter2" not in str(told)


@pytest.mark.contract("SIG-11", "API-2")
async def test_too_many_signals_are_told_when_to_come_back() -> None:
    async with on_stage(hf.MemoryStore(limits=hf.Limits(signals_per_run_per_minute=2))) as stage:
        run_id = await stage.start("order", order_id="o-1")
        for _ in range(2):
            assert (await stage.rest("signals.send", {"run_id": run_id, "name": "note"}))[0] == 202
        response = await stage.http.post(f"/v1/runs/{run_id}/signals/note", json={})
        assert (response.status_code, response.json()["code"]) == (429, "RateLimited")
        assert 1 <= int(response.headers["retry-after"]) <= 60
        assert await stored(stage, run_id) == 2


@pytest.mark.contract("QUE-1", "API-1")
async def test_the_same_start_over_both_transports_is_one_run(tmp_path: Path) -> None:
    async with on_stage(f"sqlite:///{tmp_path}/s.db") as stage:
        ask = {"workflow": "echo", "input": {"value": 1}, "request_id": "r-1"}
        callers = itertools.cycle(stage.callers().values())
        answers = await asyncio.gather(*(next(callers)("runs.start", ask) for _ in range(20)))
        assert all(answer == answers[0] for answer in answers)
        for more in ({"project": "p"}, {"environment": "e"}, {"request_id": "r-2"}):
            other = await stage.rpc("runs.start", {**ask, **more})
            assert other[1]["run_id"] != answers[0][1]["run_id"]
