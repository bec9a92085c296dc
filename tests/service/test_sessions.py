"""Signing in with a browser, and what pages of other origins can do with that: nothing."""

from http.cookies import SimpleCookie
from typing import Any

import httpx
import pytest

from holdfast.service.auth.sessions import SIGN_INS_PER_MINUTE
from holdfast.service.http.server import check_access
from holdfast.service.options import ServiceOptions
from holdfast.store.queries import TokenQuery
from tests.service.in_process import InProcessServer, serve_in_process
from tests.service.token_callers import bearer_header, code_in, serve_with_tokens, store_of, token_for

OWN = {"x-holdfast-request": "1"}


async def sign_in(server: InProcessServer, token: str, headers: dict[str, str] | None = None) -> httpx.Response:
    """Sign in as a page of the service does."""
    server.http.cookies.clear()
    return await server.http.post("/session", json={"token": token}, headers=OWN if headers is None else headers)


def cookie_in(response: httpx.Response) -> Any:
    """Return the cookie that an answer sets."""
    return SimpleCookie(response.headers["set-cookie"])["holdfast_session"]


@pytest.mark.contract("API-4")
async def test_signing_in_and_out() -> None:
    async with serve_with_tokens() as server:
        token = await token_for(server, "engineer", name="eve", tenant="acme", roles=["clerk"])
        response = await sign_in(server, token)
        assert response.status_code == 200
        cookie = cookie_in(response)
        assert (cookie["httponly"], cookie["samesite"], cookie["path"]) == (True, "Strict", "/")
        assert (cookie["max-age"], cookie["secure"], cookie["domain"]) == ("43200", "", "")
        assert token not in response.headers["set-cookie"]
        who = (await server.http.get("/session")).json()
        assert who == response.json()
        assert (who["name"], who["tenant"], who["is_admin"]) == ("eve", "acme", False)
        assert who["roles"] == ["clerk", "operator"]  # for tasks: an operator is asked about unresolved steps
        started = await server.http.post("/v1/runs", json={"workflow": "echo"}, headers=OWN)
        assert started.status_code == 201
        run = (await server.http.get(f"/v1/runs/{started.json()['run_id']}")).json()
        assert run["tenant"] == "acme"
        kept = server.http.cookies["holdfast_session"]
        assert (await server.http.get("/v1/runs", headers=bearer_header(kept))).status_code == 401, (
            "it is no bearer's token"
        )
        out = await server.http.delete("/session", headers=OWN)
        assert (out.status_code, cookie_in(out)["max-age"]) == (204, "0")
        server.http.cookies.clear()
        assert (await server.http.get("/v1/runs", headers={"cookie": f"holdfast_session={kept}"})).status_code == 401
        assert (await server.http.get("/v1/runs", headers=bearer_header(token))).status_code == 200, (
            "the token is still good"
        )


@pytest.mark.contract("API-4")
async def test_a_session_ends_with_the_token_it_was_made_from() -> None:
    async with serve_with_tokens(options=ServiceOptions(tokens_s=3_600)) as server:
        admin, token = await token_for(server), await token_for(server, "viewer")
        await sign_in(server, token)
        assert (await server.http.get("/v1/runs")).status_code == 200
        revoked = await server.http.post(f"/v1/tokens/{token[9:25]}/revoke", headers=bearer_header(admin))
        assert revoked.status_code == 200
        assert (await server.http.get("/v1/runs")).status_code == 401
        assert (await sign_in(server, token)).status_code == 401


@pytest.mark.contract("API-4")
@pytest.mark.parametrize(
    ("headers", "is_own"),
    [
        ({"origin": "http://shop"}, True),
        ({"origin": "https://SHOP"}, True),
        (OWN, True),
        ({**OWN, "origin": "http://evil"}, True),
        ({}, False),
        ({"origin": "null"}, False),
        ({"origin": ""}, False),
        ({"origin": "shop"}, False),
        ({"origin": "http://evil"}, False),
        ({"origin": "http://shop.evil"}, False),
        ({"origin": "http://evil/shop"}, False),
        ({"origin": "http://shop:8080"}, False),
        ({"referer": "http://shop/"}, False),
        ({"sec-fetch-site": "cross-site"}, False),
    ],
)
async def test_a_session_changes_something_only_from_a_page_of_the_service(
    headers: dict[str, str], is_own: bool
) -> None:
    """The header cannot come from elsewhere: a browser would have to be told so first, and it never is."""
    async with serve_with_tokens() as server:
        token = await token_for(server)
        await sign_in(server, token)
        session = {"cookie": f"holdfast_session={server.http.cookies['holdfast_session']}"}
        call = {"jsonrpc": "2.0", "id": 1, "method": "runs.list"}
        for verb, path, body in (("POST", "/v1/runs", {"workflow": "echo"}), ("POST", "/rpc", call)):
            server.http.cookies.clear()
            response = await server.http.request(verb, path, json=body, headers={**headers, **session})
            assert (response.status_code < 300) == is_own, response.text
            assert is_own or code_in(response) == "NotPermitted"
        seen = await server.http.get("/v1/runs", headers={**headers, **session})
        assert seen.status_code == (403 if "sec-fetch-site" in headers else 200)
        assert ((await sign_in(server, token, headers)).status_code == 200) == is_own
        bearer = {**headers, **bearer_header(token)}
        server.http.cookies.clear()
        assert (await server.http.post("/v1/runs", json={"workflow": "echo"}, headers=bearer)).status_code == 201


@pytest.mark.contract("API-4", "API-2")
async def test_signing_in_with_nonsense() -> None:
    async with serve_with_tokens() as server:
        token = await token_for(server)
        session = cookie_in(await sign_in(server, token)).value
        for wrong in ("", "x" * 900, token[:-1], token + " ", session, "holdfast_é"):
            response = await sign_in(server, wrong)
            assert (response.status_code, code_in(response)) == (401, "NotAuthenticated"), wrong[:80]
            assert "set-cookie" not in response.headers
        server.http.cookies.clear()
        for body in (b"", b"{", b"[]", b'{"token":7}', b'{"token":"a","b":1}', b'"\xff"'):
            headers = {**OWN, "content-type": "application/json"}
            response = await server.http.post("/session", content=body, headers=headers)
            assert response.status_code in (400, 422), body
        headers = {**OWN, "content-type": "text/plain"}
        assert (await server.http.post("/session", content=b'{"token":"a"}', headers=headers)).status_code == 415
        assert (await server.http.put("/session", headers=OWN)).status_code == 405
        assert (await server.http.get("/session")).status_code == 401
        assert (await server.http.delete("/session", headers=OWN)).status_code == 401
        cookies = [("cookie", f"holdfast_session={session}")] * 2
        assert (await server.http.get("/session", headers=cookies)).status_code == 400
        assert len(await store_of(server).find_tokens(TokenQuery(sessions=True))) == 2


@pytest.mark.contract("API-4")
async def test_a_token_is_not_signed_in_with_without_end() -> None:
    async with serve_with_tokens() as server:
        token = await token_for(server, "viewer")
        codes = [(await sign_in(server, token)).status_code for _ in range(SIGN_INS_PER_MINUTE + 2)]
        assert codes == [200] * SIGN_INS_PER_MINUTE + [429] * 2


@pytest.mark.contract("API-4")
async def test_where_access_is_open_there_is_nothing_to_sign_in_to() -> None:
    async with serve_in_process() as server:
        assert (await sign_in(server, "hf_x")).status_code == 404
        assert (await server.http.get("/session")).json()["is_open"]


@pytest.mark.contract("API-4")
async def test_browsers_are_told_to_be_careful_and_other_origins_nothing() -> None:
    async with serve_with_tokens() as server:
        token = await token_for(server)
        asked = {"origin": "http://evil", "access-control-request-method": "POST"}
        for response in (
            await server.http.get("/v1/runs", headers={**bearer_header(token), "origin": "http://evil"}),
            await server.http.get("/v1/runs"),
            await server.http.get("/nowhere"),
            await server.http.options("/v1/runs", headers=asked),
            await server.http.options("/rpc", headers=asked),
            await server.http.options("/session", headers=asked),
            await sign_in(server, token),
        ):
            headers = response.headers
            policy = {part.split()[0]: part.split()[1:] for part in headers["content-security-policy"].split("; ")}
            assert policy["default-src"] == ["'self'"]
            assert policy["frame-ancestors"] == ["'none'"]
            assert "unsafe-inline" not in str(policy)
            assert headers["x-content-type-options"] == "nosniff"
            assert headers["referrer-policy"] == "no-referrer"
            assert headers["cross-origin-opener-policy"] == "same-origin"
            assert headers["cross-origin-resource-policy"] == "same-origin"
            assert "geolocation=()" in headers["permissions-policy"]
            assert headers["cache-control"] == "no-store"
            assert not [name for name in headers if name.startswith("access-control-")]


# --- open access, and browsers


@pytest.mark.contract("API-4")
@pytest.mark.parametrize(
    ("headers", "is_let_in"),
    [
        ({}, True),
        ({"host": "127.0.0.1:8321"}, True),
        ({"host": "[::1]:8321"}, True),
        ({"host": "LOCALHOST:8321"}, True),
        ({"host": "shop.localhost"}, True),
        ({"host": "localhost:8321", "origin": "http://localhost:8321"}, True),
        ({"host": "localhost:8321", "origin": "http://evil"}, False),
        ({"host": "localhost:8321", "origin": "http://localhost:9999"}, False),
        ({"host": "localhost:8321", "origin": "null"}, False),
        ({"host": "evil:8321", "origin": "http://evil:8321"}, False),
        ({"sec-fetch-site": "none"}, True),
        ({"sec-fetch-site": "same-origin"}, True),
        ({"sec-fetch-site": "same-site"}, False),
        ({"sec-fetch-site": "cross-site"}, False),
        ({"sec-fetch-site": "cross-site", "sec-fetch-mode": "no-cors", "sec-fetch-dest": "image"}, False),
        ({"host": "evil"}, False),
        ({"host": "127.0.0.1.evil"}, False),
        ({"host": "localhost.evil"}, False),
    ],
)
async def test_pages_of_other_sites_get_nothing_from_open_access(headers: dict[str, str], is_let_in: bool) -> None:
    options = ServiceOptions(is_open=True)
    async with serve_in_process(authenticate=check_access(options, None)) as server:
        given = {"host": "localhost", **headers}
        for method, path in (("GET", "/v1/runs"), ("POST", "/v1/runs/r-1/cancel"), ("POST", "/rpc")):
            response = await server.http.request(method, path, headers=given)
            assert (response.status_code != 403) is is_let_in, (method, path, response.text)


async def test_open_access_for_others_may_have_any_name() -> None:
    for host in ("0.0.0.0", "::", "192.168.7.7", "shop.example"):
        options = ServiceOptions(is_open=True, host=host)
        async with serve_in_process(authenticate=check_access(options, None)) as server:
            assert (await server.http.get("/v1/runs", headers={"host": "shop.example"})).status_code == 200
            evil = {"host": "shop.example", "origin": "http://evil"}
            assert (await server.http.get("/v1/runs", headers=evil)).status_code == 403
