"""The same request again, in whichever way: one is stored, and everybody is told the same."""

import asyncio
import itertools
import sqlite3
from pathlib import Path
from typing import Any

import pytest

import holdfast as hf
from holdfast.engine.options import NodeOptions
from holdfast.errors import Conflict, SignalAcceptanceIndeterminate
from holdfast.testing import VirtualClock
from tests.service.callers import CALLERS, all_callers, caller_by_name, client_of
from tests.service.in_process import InProcessServer, make_app, serve_in_process


async def signal(server: InProcessServer, **more: Any) -> dict[str, Any]:
    """Return a signal to a run that waits for others."""
    run_id = await server.start("order", order_id="o-1")
    return {"run_id": run_id, "name": "note", "payload": {"n": 1}, "signal_id": "click-1", **more}


async def stored(server: InProcessServer, run_id: str) -> int:
    """Return how many signals the run's mailbox holds."""
    return len((await server.rest("signals.mailbox", {"run_id": run_id}))[1]["items"])


@pytest.mark.contract("SIG-5", "SIG-7", "API-1")
@pytest.mark.parametrize("first", CALLERS)
async def test_a_duplicate_gets_the_first_answer_in_any_way(first: str, tmp_path: Path) -> None:
    async with serve_in_process(f"sqlite:///{tmp_path}/s.db") as server:
        ask = await signal(server)
        status, accepted = await caller_by_name(server, first)("signals.send", ask)
        assert status == 202
        for then in CALLERS:
            call = caller_by_name(server, then)
            assert await call("signals.send", ask) == (202, accepted), then
            status, problem = await call("signals.send", {**ask, "payload": {"n": 2}})
            assert (status, problem["code"]) == (409, "Conflict"), then
        assert await stored(server, ask["run_id"]) == 1


@pytest.mark.contract("SIG-5", "SIG-7")
async def test_the_client_raises_the_same_conflict() -> None:
    async with serve_in_process() as server:
        ask = await signal(server)
        await server.rpc("signals.send", ask)
        told = []
        for how in ("client in process", "client over HTTP"):
            with pytest.raises(Conflict) as refused:
                await client_of(server, how).signals.send(**{**ask, "payload": 0})
            details = {**refused.value.details, "correlation_id": ""}
            told.append((type(refused.value), refused.value.message, details))
        assert told[0] == told[1]


@pytest.mark.contract("SIG-7")
async def test_a_replay_over_json_rpc_has_the_new_id() -> None:
    async with serve_in_process() as server:
        ask = await signal(server)
        answers = [
            (
                await server.http.post(
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
    async with serve_in_process(f"sqlite:///{tmp_path}/s.db") as server:
        ask = await signal(server)
        callers = itertools.cycle(
            [caller_by_name(server, name) for name in CALLERS if name != "command line"]
        )  # which is a process
        answers = await asyncio.gather(*(next(callers)("signals.send", ask) for _ in range(40)))
        assert all(answer == answers[0] for answer in answers)
        assert await stored(server, ask["run_id"]) == 1


@pytest.mark.contract("SIG-5")
async def test_without_an_id_each_is_accepted() -> None:
    async with serve_in_process() as server:
        ask = await signal(server)
        del ask["signal_id"]
        ids = {(await call("signals.send", ask))[1]["signal_id"] for call in all_callers(server).values()}
        assert len(ids) == len(CALLERS)
        assert await stored(server, ask["run_id"]) == len(CALLERS)


@pytest.mark.contract("SIG-5")
async def test_ids_are_taken_as_they_are() -> None:
    async with serve_in_process() as server:
        ask = await signal(server)
        ids = ["a:b", "a%3Ab", "a/b", "A:B", " a", "a", "\u00e9", "e\u0301", "x" * 128]
        for id in ids:
            for call in all_callers(server).values():
                assert (await call("signals.send", {**ask, "signal_id": id}))[1]["signal_id"] == id
        assert await stored(server, ask["run_id"]) == len(ids)
        receipts = [
            await server.rest("signals.receipt", {"run_id": ask["run_id"], "name": "note", "signal_id": id})
            for id in ids
        ]
        assert all(receipt[1]["status"] == "accepted" for receipt in receipts)


@pytest.mark.contract("SIG-5", "SIG-6")
async def test_a_replay_survives_a_crash(tmp_path: Path) -> None:
    address = f"sqlite:///{tmp_path}/s.db"
    async with serve_in_process(address) as server:
        ask = await signal(server)
        first = await server.rest("signals.send", ask)
    async with serve_in_process(address, app=make_app()) as server:
        assert await server.rpc("signals.send", ask) == first
        assert await stored(server, ask["run_id"]) == 1


@pytest.mark.contract("SIG-6")
async def test_after_its_time_a_retry_is_a_new_request() -> None:
    clock = VirtualClock()
    store = hf.MemoryStore(clock, limits=hf.Limits(acceptance_retention_ms=1_000))
    async with serve_in_process(store) as server:
        ask = await signal(server)
        _, first = await server.rest("signals.send", ask)
        clock.advance(ms=1_001)
        _, second = await server.rpc("signals.send", ask)
        assert second["signal_storage_key"] != first["signal_storage_key"]
        assert await stored(server, ask["run_id"]) == 2


def damage(path: Path, statement: str, *values: object) -> int:
    """Do to a store's file what a bad disk, or a bad colleague, would; return how many rows it hit."""
    with sqlite3.connect(path, timeout=10) as db:
        rows = db.execute(statement, values).rowcount
    db.close()
    return rows


@pytest.mark.contract("SIG-6", "SIG-7", "API-2")
async def test_an_acceptance_whose_record_is_lost_fails_closed_in_every_way(tmp_path: Path) -> None:
    path = tmp_path / "s.db"
    async with serve_in_process(f"sqlite:///{path}") as server:
        ask = await signal(server, payload="hunter2")
        await server.rest("signals.send", ask)
        assert damage(path, "DELETE FROM acceptance_records WHERE signal_id = ?", ask["signal_id"]) == 1
        for how, call in all_callers(server).items():
            for payload in ("hunter2", "another"):
                status, told = await call("signals.send", {**ask, "payload": payload})
                assert (status, told["code"]) == (409, "SignalAcceptanceIndeterminate"), how
                named = {"workflow_id": ask["run_id"], "signal_name": "note", "signal_id": "click-1"}
                assert {**told["details"], "correlation_id": ""} == {**named, "correlation_id": ""}, how
                assert told["correlation_id"], how
                assert "hunter2" not in str(told), how
        request = {"jsonrpc": "2.0", "id": "mine", "method": "signals.send", "params": ask}
        answer = (await server.http.post("/rpc", json=request)).json()
        assert (answer["id"], answer["error"]["code"]) == ("mine", -32_009)
        for client_kind in ("client in process", "client over HTTP"):
            with pytest.raises(SignalAcceptanceIndeterminate):
                await client_of(server, client_kind).signals.send(**ask)
        items = (await server.rest("signals.send_many", {"signals": [ask]}))[1]["items"]
        assert items[0]["problem"]["code"] == "SignalAcceptanceIndeterminate"
        assert await stored(server, ask["run_id"]) == 1, "what was accepted is there, once"


@pytest.mark.contract("SIG-12", "MSG-3", "API-1")
async def test_a_signal_that_cannot_be_read_is_followed_to_its_dead_letter_in_every_way(tmp_path: Path) -> None:
    path = tmp_path / "s.db"
    async with serve_in_process(f"sqlite:///{path}", node=NodeOptions(takes_runs=False)) as server:
        ask = await signal(server, payload="hunter2")
        _, sent = await server.rest("signals.send", ask)
    assert damage(path, "UPDATE signals SET payload = ? WHERE signal_id = ?", '{"hunter2', ask["signal_id"]) == 1
    async with serve_in_process(f"sqlite:///{path}", app=make_app()) as server:
        [letter] = (await server.until("letters.list", {}, lambda page: page["items"]))["items"]
        followed = {field: ask[field] for field in ("run_id", "name", "signal_id")}
        for how, call in all_callers(server).items():
            status, receipt = await call("signals.receipt", followed)
            assert (status, receipt["status"]) == (200, "dead-lettered"), how
            by_key = {**followed, "signal_storage_key": sent["signal_storage_key"]}
            assert await call("signals.receipt", by_key) == (200, receipt), how
            assert receipt["reason"] == f"{letter['reason']}: {letter['detail']}"
            assert receipt["reason"].startswith("undecodable: the payload of signal 'note', 'click-1' cannot be read")
            assert "hunter2" not in str(receipt)
            assert (await call("signals.receipt", {**followed, "signal_id": "click-2"}))[0] == 404, how
        assert (await server.rest("letters.get", {"letter_id": letter["letter_id"]}))[1]["text"] == '{"hunter2'


@pytest.mark.contract("SIG-11", "API-2")
async def test_too_many_signals_are_told_when_to_come_back() -> None:
    async with serve_in_process(hf.MemoryStore(limits=hf.Limits(signals_per_run_per_minute=2))) as server:
        run_id = await server.start("order", order_id="o-1")
        for _ in range(2):
            assert (await server.rest("signals.send", {"run_id": run_id, "name": "note"}))[0] == 202
        response = await server.http.post(f"/v1/runs/{run_id}/signals/note", json={})
        assert (response.status_code, response.json()["code"]) == (429, "RateLimited")
        assert 1 <= int(response.headers["retry-after"]) <= 60
        assert await stored(server, run_id) == 2


@pytest.mark.contract("QUE-1", "API-1")
async def test_the_same_start_over_all_transports_is_one_run(tmp_path: Path) -> None:
    async with serve_in_process(f"sqlite:///{tmp_path}/s.db") as server:
        ask = {"workflow": "echo", "input": {"value": 1}, "request_id": "r-1"}
        callers = itertools.cycle([caller_by_name(server, name) for name in CALLERS if name != "command line"])
        answers = await asyncio.gather(*(next(callers)("runs.start", ask) for _ in range(20)))
        assert all(answer == answers[0] for answer in answers)
        for more in ({"project": "p"}, {"environment": "e"}, {"request_id": "r-2"}):
            other = await server.rpc("runs.start", {**ask, **more})
            assert other[1]["run_id"] != answers[0][1]["run_id"]
