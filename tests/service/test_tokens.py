"""Tokens as callers and attackers use them: how they are said, for how long they are good, and what is kept of them."""

import logging
import re
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

import httpx
import pytest
from msgspec.structs import replace

import holdfast as hf
from holdfast.core.access import is_secret_of, read_token, write_token
from holdfast.engine.inbox.authorization import ControlRequest
from holdfast.errors import InvalidInput, StoreUnavailable
from holdfast.service.auth import tokens
from holdfast.service.auth.throttle import LINES_PER_MINUTE
from holdfast.service.auth.tokens import TokenAccess, make_token, revoke_token
from holdfast.service.context import make_service, open_access
from holdfast.service.http.server import check_access, listening, serve
from holdfast.service.options import ServiceOptions
from holdfast.store.queries import TokenQuery
from holdfast.store.sqlite import SqliteStore
from holdfast.testing import VirtualClock
from holdfast.testing.samples import access_token
from tests.service.in_process import make_app
from tests.service.operation_cases import open_task, waiting_order
from tests.service.token_callers import bearer_header, call_operation, code_in, serve_with_tokens, store_of, token_for


class CountedStore(hf.MemoryStore):
    """A store that counts what is asked of it about tokens."""

    reads = 0
    writes = 0
    is_down = False

    async def find_tokens(self, query: TokenQuery) -> Any:
        """Count."""
        self.reads += 1
        if self.is_down:
            raise StoreUnavailable("the store is away")
        return await super().find_tokens(query)

    async def put_tokens(self, tokens: Any, audit: Any = ()) -> Any:
        """Count."""
        self.writes += 1
        return await super().put_tokens(tokens, audit)


# --- how a token is said


@pytest.mark.contract("API-4")
@pytest.mark.parametrize("scheme", ["Bearer", "bearer", "BEARER", "bEaReR", "Bearer  "])
async def test_the_scheme_may_be_written_in_any_case(scheme: str) -> None:
    async with serve_with_tokens() as server:
        token = await token_for(server)
        response = await server.http.get("/v1/runs", headers={"authorization": f"{scheme} {token}"})
        assert response.status_code == 200


@pytest.mark.contract("API-4", "API-2")
async def test_whatever_else_is_said_is_refused_and_breaks_nothing() -> None:
    async with serve_with_tokens() as server:
        token = await token_for(server)
        tricks: list[bytes] = [
            b"",
            b"Bearer",
            b"Bearer ",
            token.encode(),
            b"Basic " + token.encode(),
            b"Bearer" + token.encode(),
            b"Bearer " + token.encode() + b" x",
            b"Bearer " + token.encode() + b", Bearer " + token.encode(),
            b"Bearer " + token.upper().encode(),
            b"Bearer \xef\xbc\x88" + token.encode(),
            b"Bearer " + token.encode()[:-1] + "ａ".encode(),
            b"Bearer " + token.encode()[:-1] + b"\xff",
            b"Bearer " + token.encode() + b"\x00",
            b"Bearer " + b"hf_" * 20_000,
            b"Bearer " + b"f" * 10_000,
            b"Bearer holdfast_" + b"0" * 16 + b"_" + "٠".encode() * 64,
            b"Bearer holdfast_" + b"0" * 16 + b"_" + b"0" * 72 + b"\n",
        ]
        for said in tricks:
            response = await server.http.get("/v1/runs", headers=[(b"authorization", said)])
            assert (response.status_code, code_in(response)) == (401, "NotAuthenticated"), said[:80]
        for other in ({"x-api-key": token}, {"cookie": f"token={token}"}, {"cookie": f"holdfast_session={token}"}):
            assert (await server.http.get("/v1/runs", headers=other)).status_code == 401


@pytest.mark.contract("API-4")
async def test_a_header_that_is_there_twice_is_refused() -> None:
    async with serve_with_tokens() as server:
        good, bad = f"Bearer {await token_for(server)}", "Bearer nonsense"
        for first, second in ((good, bad), (bad, good), (good, good)):
            headers = [("authorization", first), ("Authorization", second)]
            for response in (
                await server.http.get("/v1/runs", headers=headers),
                await server.http.post("/rpc", headers=headers, json={}),
            ):
                assert (response.status_code, code_in(response)) == (400, "MalformedRequest")


@pytest.mark.contract("API-4")
@pytest.mark.parametrize("query", ["token={}", "access_token={}", "limit=1&Access_Token={}", "reference_key={}"])
async def test_a_token_in_an_address_is_refused_whatever_else_is_there(query: str) -> None:
    async with serve_with_tokens() as server:
        token = await token_for(server)
        for headers in ({}, bearer_header(token)):
            for verb, path in (("GET", "/v1/runs"), ("POST", "/v1/runs"), ("POST", "/rpc")):
                response = await server.http.request(verb, f"{path}?{query.format(token)}", headers=headers)
                assert (response.status_code, code_in(response)) == (400, "MalformedRequest")
                assert "revoke" in response.json()["detail"]


@pytest.mark.contract("API-4")
async def test_each_call_of_a_batch_needs_its_own_scope() -> None:
    async with serve_with_tokens() as server:
        headers = bearer_header(await token_for(server, "viewer", name="vic"))
        calls = [
            {"jsonrpc": "2.0", "id": number, "method": name, "params": fields}
            for number, (name, fields) in enumerate(
                [
                    ("runs.list", {}),
                    ("runs.start", {"workflow": "echo"}),
                    ("tokens.create", {"name": "eve", "role": "admin"}),
                    ("system.health", {}),
                    ("runs.list", {"limit": 1}),
                ]
            )
        ]
        answers = (await server.http.post("/rpc", json=calls, headers=headers)).json()
        codes = {answer["id"]: answer.get("error", {}).get("data", {}).get("code") for answer in answers}
        assert codes == {0: None, 1: "NotPermitted", 2: "NotPermitted", 3: None, 4: None}
        unheard = [{key: value for key, value in call.items() if key != "id"} for call in calls]
        assert (await server.http.post("/rpc", json=unheard, headers=headers)).status_code == 204
        assert (await store_of(server).stats()).runs == {}
        assert len(await store_of(server).find_tokens(TokenQuery())) == 1
        assert (await server.http.post("/rpc", json=calls)).status_code == 401


@pytest.mark.contract("API-4")
async def test_what_is_not_in_the_catalogue_needs_a_token_too() -> None:
    async with serve_with_tokens() as server:
        assert (await server.http.get("/openapi.json")).status_code == 401
        described = await server.http.get("/openapi.json", headers=bearer_header(await token_for(server, "viewer")))
        assert described.json()["components"]["securitySchemes"] == {"token": {"type": "http", "scheme": "bearer"}}
        assert described.json()["paths"]["/v1/runs"]["get"]["security"] == [{"token": ["runs:read"]}]


# --- for how long it is good


@pytest.mark.contract("API-4")
async def test_a_token_revoked_here_ends_at_once_and_takes_its_sessions_along() -> None:
    async with serve_with_tokens(options=ServiceOptions(tokens_s=3_600)) as server:
        admin = bearer_header(await token_for(server))
        token = await token_for(server, "viewer", name="vic")
        assert (await call_operation(server, "rest", "runs.list", {}, bearer_header(token))).status_code == 200
        assert (
            await call_operation(server, "rest", "tokens.revoke", {"token_id": token[:25]}, admin)
        ).status_code == 200
        assert (await call_operation(server, "rest", "runs.list", {}, bearer_header(token))).status_code == 401
        listed = (await call_operation(server, "rest", "tokens.list", {}, admin)).json()["items"]
        assert [(item["name"], item["revoked_by"]) for item in listed if item["revoked_at"]] == [("vic", "ann")]


@pytest.mark.contract("API-4")
async def test_a_token_made_or_revoked_by_another_process_is_known_soon(tmp_path: Path) -> None:
    async with serve_with_tokens(f"sqlite:///{tmp_path}/store.db", options=ServiceOptions(tokens_s=0.0)) as server:
        peer = await SqliteStore.open(tmp_path / "store.db")
        token, record = await make_token(peer, "ann", role="viewer")
        assert (await call_operation(server, "rest", "runs.list", {}, bearer_header(token))).status_code == 200
        await revoke_token(peer, record, "bob")
        assert (await call_operation(server, "rest", "runs.list", {}, bearer_header(token))).status_code == 401
        await peer.close()


@pytest.mark.contract("API-4")
async def test_a_token_ends_by_the_stores_clock() -> None:
    clock = VirtualClock()
    async with serve_with_tokens(hf.MemoryStore(clock), options=ServiceOptions(tokens_s=0.0)) as server:
        headers = bearer_header(await token_for(server, expires_in_s=60))
        clock.advance(ms=59_000)
        assert (await call_operation(server, "rest", "runs.list", {}, headers)).status_code == 200
        clock.advance(ms=1_000)
        assert (await call_operation(server, "rest", "runs.list", {}, headers)).status_code == 401


@pytest.mark.contract("API-4")
async def test_requests_cost_no_query_and_uses_no_write() -> None:
    store = CountedStore()
    async with serve_with_tokens(store, options=ServiceOptions(tokens_s=3_600)) as server:
        headers = bearer_header(await token_for(server))
        for _ in range(50):
            assert (await call_operation(server, "rest", "runs.list", {}, headers)).status_code == 200
        assert (store.reads, store.writes) == (1, 2), "one look, and one word of its use"
        [kept] = await store.find_tokens(TokenQuery())
        assert kept.last_used_at is not None


@pytest.mark.contract("API-4")
async def test_a_token_that_was_used_lately_is_not_written_again() -> None:
    clock = VirtualClock()
    store = CountedStore(clock)
    async with serve_with_tokens(store, options=ServiceOptions(tokens_s=0.0)) as server:
        headers = bearer_header(await token_for(server))
        for _ in range(4):
            await call_operation(server, "rest", "runs.list", {}, headers)
            clock.advance(ms=tokens.LAST_USED_S * 1_000 // 2)
        assert store.writes == 1 + 2


@pytest.mark.contract("API-4")
async def test_without_the_store_nobody_is_let_in() -> None:
    store = CountedStore()
    async with serve_with_tokens(store) as server:
        headers = bearer_header(await token_for(server))
        store.is_down = True
        response = await call_operation(server, "rest", "runs.list", {}, headers)
        assert (response.status_code, code_in(response)) == (503, "EngineError")
        store.is_down = False
        assert (await call_operation(server, "rest", "runs.list", {}, headers)).status_code == 200


@pytest.mark.contract("API-4")
async def test_a_revocation_that_overtakes_a_look_at_the_store_counts() -> None:
    """A look that began before it, and ends after it, is not remembered."""
    store = CountedStore()
    async with serve_with_tokens(store, options=ServiceOptions(tokens_s=3_600)) as server:
        lets = server.service.authenticate
        assert isinstance(lets, TokenAccess)
        token, record = await make_token(store, "ann", role="viewer")

        async def overtaken(query: TokenQuery) -> Any:
            found = await hf.MemoryStore.find_tokens(store, query)
            await revoke_token(store, record, "bob")
            lets.forget(record.token_id)
            return found

        store.find_tokens = overtaken  # type: ignore[method-assign]
        await call_operation(server, "rest", "runs.list", {}, bearer_header(token))
        del store.find_tokens
        assert (await call_operation(server, "rest", "runs.list", {}, bearer_header(token))).status_code == 401


# --- what is kept


@pytest.mark.contract("API-4")
async def test_secrets_are_neither_kept_nor_logged(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    async with serve_with_tokens(f"sqlite:///{tmp_path}/store.db") as server:
        token = await token_for(server, "viewer")
        await call_operation(server, "rest", "runs.list", {}, bearer_header(token))
        await call_operation(server, "rest", "runs.start", {"workflow": "echo"}, bearer_header(token))
        await call_operation(server, "rest", "runs.list", {}, bearer_header(token[:-1] + "x"))
        await call_operation(server, "rest", "runs.list", {}, bearer_header("sk_live_of_another_service"))
        secret = token[26:-8]
        files = b"".join(path.read_bytes() for path in tmp_path.iterdir() if path.is_file())
        assert token[9:25].encode() in files
        assert secret.encode() not in files
        assert secret[:-1] not in caplog.text
        assert "sk_live" not in caplog.text


def test_a_secret_is_compared_with_one_that_is_not_there_too() -> None:
    token = access_token(secret="a" * 64)
    assert is_secret_of(token, "a" * 64)
    assert not is_secret_of(token, "b" * 64)
    assert not is_secret_of(None, "a" * 64)
    assert not is_secret_of(replace(token, digest="0" * 64), "a" * 64)
    assert read_token(write_token("0" * 16, "a" * 64)) == ("0" * 16, "a" * 64)


async def test_a_token_that_could_do_nothing_is_not_made() -> None:
    store = hf.MemoryStore()
    bad: list[dict[str, Any]] = [
        {},
        {"role": "king"},
        {"scopes": ["all"]},
        {"role": "viewer", "tenant": ""},
        {"role": "viewer", "tenant": "a:b"},
        {"role": "viewer", "project": "p"},
        {"role": "viewer", "expires_in_s": 0},
        {"role": "viewer", "expires_in_s": float("nan")},
        {"role": "viewer", "roles": [""]},
    ]
    for fields in bad:
        with pytest.raises(InvalidInput):
            await make_token(store, "ann", **fields)
    assert await store.find_tokens(TokenQuery()) == []


# --- who is told what


@pytest.mark.contract("API-4", "SIG-13")
async def test_the_authoriser_is_told_who_asks_and_its_refusal_is_recorded() -> None:
    seen: list[ControlRequest] = []

    def authorise(request: ControlRequest) -> bool | str:
        if request.command == "START":
            return True
        seen.append(request)
        return request.command == "PAUSE" or "not today"

    app = make_app()
    app.authoriser = authorise
    async with serve_with_tokens(app=app) as server:
        headers = bearer_header(await token_for(server, name="ann", tenant="acme", roles=["clerk"]))
        server.http.headers.update(headers)
        run_id = await waiting_order(server)
        paused = await call_operation(server, "rest", "runs.pause", {"run_id": run_id, "actor": "bob", "wait": True})
        assert paused.status_code == 202
        assert code_in(await call_operation(server, "rpc", "runs.cancel", {"run_id": run_id})) == "NotPermitted"
        assert seen[0].caller is not None
        assert (seen[0].actor, seen[0].caller.name, seen[0].caller.tenant) == ("bob", "ann", "acme")
        assert (seen[0].caller.roles, seen[0].caller.is_admin) == (("clerk",), True)

        def rejections(page: Any) -> list[Any]:
            return [event["data"] for event in page["items"] if event["event_type"] == "SignalRejected"]

        [rejected] = rejections(
            await server.until("runs.events", {"run_id": run_id}, lambda page: bool(rejections(page)))
        )
        assert (rejected["actor"], rejected["reason"]) == ("ann", "not today")


@pytest.mark.contract("API-4")
async def test_refusals_are_logged_up_to_a_bound(caplog: pytest.LogCaptureFixture) -> None:
    async with serve_with_tokens() as server:
        token = await token_for(server, "viewer", name="vic")
        fields = {"workflow": "echo"}
        response = await server.http.post(
            "/v1/runs", json=fields, headers={**bearer_header(token), "x-correlation-id": "c-7"}
        )
        assert response.status_code == 403
        [line] = [record.getMessage() for record in caplog.records if record.name == "holdfast.access"]
        assert all(part in line for part in ("vic", token[9:25], "runs.start", "runs:write", "c-7"))
        for _ in range(LINES_PER_MINUTE * 2):
            await server.http.get("/v1/runs", headers={"authorization": "nonsense"})
        lines = [record for record in caplog.records if record.name == "holdfast.access"]
        assert "what='GET /v1/runs'" in lines[1].getMessage()
        assert len(lines) == 1 + LINES_PER_MINUTE, "of each caller so many"


@pytest.mark.contract("API-4", "SIG-11")
async def test_who_is_refused_too_often_is_told_to_wait_before_a_run_hears_of_it() -> None:
    app = make_app()
    app.authoriser = lambda request: request.command == "START"
    async with serve_with_tokens(app=app, options=ServiceOptions(refusals_per_minute=3)) as server:
        server.http.headers.update(bearer_header(await token_for(server, name="ann")))
        run_id, task_id = await waiting_order(server), await open_task(server)
        codes = [code_in(await call_operation(server, "rest", "runs.cancel", {"run_id": run_id})) for _ in range(6)]
        assert codes == ["NotPermitted"] * 3 + ["RateLimited"] * 3
        for transport in ("rest", "rpc"):
            assert (
                code_in(await call_operation(server, transport, "tasks.claim", {"task_id": task_id})) == "RateLimited"
            )
        response = await call_operation(server, "rest", "runs.retry", {"run_id": run_id})
        assert response.status_code == 429
        assert 1 <= int(response.headers["retry-after"]) <= 60
        [run] = await store_of(server).load([run_id])
        assert run is not None
        assert run.head.inbox_seq == 3, "three refusals are in its history, and no more will be"
        assert code_in(await call_operation(server, "rest", "runs.get", {"run_id": run_id})) == "", (
            "looking is not limited"
        )
        other = bearer_header(await token_for(server, name="bob"))
        assert code_in(await call_operation(server, "rest", "runs.cancel", {"run_id": run_id}, other)) == "NotPermitted"


# --- over a socket


@pytest.mark.contract("API-4")
async def test_tokens_over_a_socket() -> None:
    app = make_app()
    async with app.node("memory://"):
        options = ServiceOptions(port=0)
        service = make_service(app, options, check_access(options, TokenAccess(app, options.tokens_s)))
        token, _ = await make_token(app.runtime().store, "ann", role="viewer")
        async with (
            listening(service) as port,
            httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", timeout=60) as http,
        ):
            assert (await http.get("/v1/health")).status_code == 200
            assert (await http.get("/v1/runs")).status_code == 401
            assert (await http.get("/v1/runs", headers=bearer_header(token))).status_code == 200
            for said in ("Bearer " + "f" * 100_000, f"Bearer {token}, Bearer {token}"):
                assert (await http.get("/v1/runs", headers={"authorization": said})).status_code in (400, 401, 431)
            twice = [("authorization", f"Bearer {token}")] * 2
            assert (await http.get("/v1/runs", headers=twice)).status_code == 400
            assert (await http.get("/v1/runs", headers=bearer_header(token))).status_code == 200


@pytest.mark.contract("API-4")
async def test_a_service_for_which_nobody_has_a_token_does_not_start(tmp_path: Path) -> None:
    with pytest.raises(InvalidInput, match="holdfast token create"):
        await serve(make_app(), f"sqlite:///{tmp_path}/store.db", options=ServiceOptions(port=0))


# --- open access


@pytest.mark.contract("API-4")
def test_open_access_is_chosen_and_said_so(caplog: pytest.LogCaptureFixture) -> None:
    assert ServiceOptions().host == "127.0.0.1"
    with pytest.raises(InvalidInput):
        check_access(ServiceOptions(), None)
    assert caplog.text == ""
    assert check_access(ServiceOptions(is_open=True), None) is not None
    assert "access is open" in caplog.text
    with pytest.raises(InvalidInput):
        check_access(ServiceOptions(is_open=True), open_access)


# --- ends, makers and leaks


@pytest.mark.contract("API-4")
async def test_a_token_ends_by_itself_and_none_lives_longer_than_the_service_says() -> None:
    day = 86_400
    async with serve_with_tokens(options=ServiceOptions(longest_token_s=30 * day, token_s=10 * day)) as server:
        admin = bearer_header(await token_for(server))
        made = await call_operation(server, "rest", "tokens.create", {"name": "bot", "role": "viewer"}, admin)
        item = made.json()["item"]
        life = datetime.fromisoformat(item["expires_at"]) - datetime.fromisoformat(item["created_at"])
        assert life == timedelta(days=10)
        fields = {"name": "bot", "role": "viewer", "expires_in_s": 30 * day + 1}
        refused = await call_operation(server, "rest", "tokens.create", fields, admin)
        assert (refused.status_code, code_in(refused)) == (422, "InvalidInput")
        assert (
            await call_operation(server, "rest", "tokens.create", {**fields, "expires_in_s": day}, admin)
        ).is_success
    async with serve_with_tokens() as server:
        _, token = await make_token(store_of(server), "ann", role="viewer")
        assert token.expires_at is not None
        assert token.expires_at - token.created_at == 90 * day * 1_000_000
        with pytest.raises(InvalidInput, match="no token lives for longer"):
            await make_token(store_of(server), "ann", role="viewer", expires_in_s=400 * day)


@pytest.mark.contract("API-4")
async def test_a_token_is_revoked_with_all_that_were_made_with_it() -> None:
    """And with nothing else: neither with its maker, nor with those of others."""
    async with serve_with_tokens() as server:
        first = await token_for(server, name="first")

        async def make(maker: str, name: str) -> tuple[str, dict[str, Any]]:
            fields = {"name": name, "role": "admin"}
            made = (await call_operation(server, "rest", "tokens.create", fields, bearer_header(maker))).json()
            return made["token"], made["item"]

        child, child_item = await make(first, "child")
        assert child_item["created_by"] == first[9:25]
        other, _ = await make(first, "other")
        grandchild, _ = await make(child, "grandchild")
        own = {"x-holdfast-request": "1"}
        cookie = (await server.http.post("/session", json={"token": grandchild}, headers=own)).headers["set-cookie"]
        server.http.cookies.clear()
        fields = {"token_id": child[9:25], "descendants": True}
        revoked = (await call_operation(server, "rest", "tokens.revoke", fields, bearer_header(first))).json()
        assert grandchild[9:25] in revoked["descendants"]
        for gone in (bearer_header(child), bearer_header(grandchild), {"cookie": cookie.partition(";")[0]}):
            assert (await server.http.get("/v1/runs", headers=gone)).status_code == 401
        for left in (first, other):
            assert (await server.http.get("/v1/runs", headers=bearer_header(left))).status_code == 200


@pytest.mark.contract("API-4")
async def test_tokens_begin_with_what_no_other_product_uses_and_carry_a_checksum() -> None:
    async with serve_with_tokens() as server:
        token = await token_for(server)
        assert re.fullmatch(r"holdfast_[0-9a-f]{16}_[0-9a-f]{72}", token)
        for position in (9, 30, len(token) - 1):
            other = "0" if token[position] != "0" else "1"
            assert read_token(token[:position] + other + token[position + 1 :]) is None
        former = f"hf_{token[9:25]}_{token[26:-8]}"
        response = await server.http.get("/v1/runs", headers=bearer_header(former))
        assert response.status_code == 401
        assert "holdfast_" in response.json()["detail"]


@pytest.mark.contract("API-4")
async def test_a_tenant_revokes_leaked_tokens_of_its_own_only() -> None:
    async with serve_with_tokens() as server:
        acme = bearer_header(await token_for(server, tenant="acme"))
        others = await token_for(server, tenant="globex")
        response = await call_operation(server, "rest", "tokens.revoke_leaked", {"token": others}, acme)
        assert code_in(response) == "NotFound"
        assert (await server.http.get("/v1/runs", headers=bearer_header(others))).status_code == 200
