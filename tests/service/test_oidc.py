"""Callers whom an OpenID provider knows, and those who only say so."""

import base64
import hashlib
import hmac
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any
from urllib.parse import parse_qs, urlsplit

import httpx
import jwt
import pytest

from holdfast.errors import EngineError, InvalidInput
from holdfast.service.auth import oidc
from holdfast.service.auth.oidc import OidcAccess, Provider
from holdfast.service.auth.sessions import FAILED_SIGN_INS, SIGN_INS_PER_MINUTE
from holdfast.service.http.server import access_of
from holdfast.service.options import OidcOptions, ServiceOptions
from holdfast.store.queries import AuditQuery
from tests.service.in_process import InProcessServer, make_app, serve_in_process
from tests.service.openid_provider import AUDIENCE, CLIENT, OpenIdProvider, openid_provider
from tests.service.token_callers import bearer_header, store_of, token_for

PUBLIC = "http://holdfast.test"


@asynccontextmanager
async def known_by(provider: OpenIdProvider, **changes: Any) -> AsyncIterator[InProcessServer]:
    options = OidcOptions(
        **{"issuer": provider.issuer, "audience": AUDIENCE, "client_id": CLIENT, "role_map": (), **changes}
    )
    service = ServiceOptions(oidc=options, public_url=PUBLIC)
    app = make_app()
    async with serve_in_process("memory://", app=app, options=service, authenticate=access_of(app, service)) as server:
        yield server


async def status(server: InProcessServer, token: str) -> int:
    return (await server.http.get("/v1/runs", headers=bearer_header(token))).status_code


@pytest.mark.contract("API-4")
async def test_a_token_of_the_provider_opens_the_api_and_so_do_our_own() -> None:
    async with openid_provider() as provider, known_by(provider) as server:
        assert await status(server, provider.token()) == 200
        assert await status(server, await token_for(server)) == 200
        started = await server.http.post("/v1/runs", json={"workflow": "echo"}, headers=bearer_header(provider.token()))
        assert started.status_code == 201
        [entry] = await store_of(server).find(AuditQuery(operation="runs.start"))
        assert entry.by is not None
        assert entry.by.name == "ann"
        assert entry.by.token_id.startswith("oidc:")


@pytest.mark.contract("API-4")
async def test_tokens_that_do_not_count() -> None:
    async with openid_provider() as provider, openid_provider() as other, known_by(provider) as server:
        good = provider.token()
        header, payload, signature = good.split(".")

        def part(value: Any) -> str:
            return base64.urlsafe_b64encode(json.dumps(value).encode()).rstrip(b"=").decode()

        claims = json.loads(base64.urlsafe_b64decode(payload + "=="))
        now = claims["iat"]
        secret = provider.public_pem()
        signed = f"{part({'alg': 'HS256', 'kid': 'rsa-1', 'typ': 'JWT'})}.{payload}"
        shared = jwt.utils.base64url_encode(hmac.new(secret, signed.encode(), hashlib.sha256).digest()).decode()
        wrong = {
            "another audience": provider.token(aud="others"),
            "no audience": provider.token(aud=None),
            "the page's audience": provider.token(aud=CLIENT),
            "another issuer": provider.token(iss="https://evil.example"),
            "a longer issuer": provider.token(iss=f"{provider.issuer}/x"),
            "expired": provider.token(exp=now - 31),
            "no end": provider.token(exp=None),
            "not yet": provider.token(nbf=now + 300),
            "nobody": provider.token(sub=None),
            "another's key": other.token(iss=provider.issuer),
            "another's key by its kid": other.token(iss=provider.issuer, headers={"kid": "rsa-1"}),
            "an unknown key": provider.token(headers={"kid": "nowhere"}),
            "no signature": f"{part({'alg': 'none'})}.{payload}.x",
            "none": f"{part({'alg': 'none', 'kid': 'rsa-1'})}.{payload}.",
            "the public key as a secret": f"{signed}.{shared}",
            "changed claims": f"{header}.{part({**claims, 'sub': 'root'})}.{signature}",
            "cut short": good[:-4],
            "critical": provider.token(headers={"crit": ["x"], "x": 1}),
            "too long": provider.token(more="x" * 20_000),
        }
        assert await status(server, good) == 200
        for what, token in wrong.items():
            assert await status(server, token) == 401, what
        assert await status(server, provider.token(exp=now - 10)) == 200, "clocks differ"


@pytest.mark.contract("API-4")
async def test_keys_are_rotated_and_made_up_ones_do_not_load_the_provider(monkeypatch: pytest.MonkeyPatch) -> None:
    async with openid_provider() as provider, known_by(provider) as server:
        assert await status(server, provider.token()) == 200
        assert provider.fetches == 1
        for number in range(20):
            assert await status(server, provider.token(headers={"kid": f"made-up-{number}"})) == 401
        assert provider.fetches == 1
        monkeypatch.setattr(oidc, "REST_S", 0.0)
        provider.add_key("ec-2", "ES256")
        assert await status(server, provider.token("ec-2")) == 200
        del provider.keys["rsa-1"]
        assert provider.fetches == 2


@pytest.mark.contract("API-4")
async def test_a_key_is_for_its_own_kind_of_algorithm(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(oidc, "REST_S", 0.0)
    async with openid_provider() as provider, known_by(provider, algorithms=("ES256",)) as server:
        assert await status(server, provider.token()) == 401, "RS256 is not allowed here"
        provider.add_key("ec-2", "ES256")
        assert await status(server, provider.token("ec-2", headers={"kid": "rsa-1"})) == 401
        assert await status(server, provider.token("ec-2")) == 200
    for algorithms in (("HS256",), ("none",), ()):
        with pytest.raises(InvalidInput):
            OidcOptions(issuer="https://x", audience="y", algorithms=algorithms)


@pytest.mark.contract("API-4")
async def test_claims_give_roles_and_a_tenant_and_nothing_else() -> None:
    async with openid_provider() as provider:
        mapped = {"roles_claim": "realm.groups", "role_map": (("ops", "operator"), ("root", "admin"))}
        async with known_by(provider, **mapped, tenant_claim="org", name_claim="email") as server:
            access: Any = server.service.authenticate
            assert isinstance(access, OidcAccess)

            async def principal(**claims: Any) -> Any:
                return await access({b"authorization": f"Bearer {provider.token(**claims)}".encode()})

            groups = {"groups": ["ops", "staff"]}
            found = await principal(realm=groups, org="acme", email="ann@acme.test", roles=["admin"])
            assert (found.name, found.tenant, found.is_admin) == ("ann@acme.test", "acme", False)
            assert found.roles == ("ops", "staff")
            assert "runs:control" in found.scopes
            assert (await principal(realm={"groups": ["admin", "staff"]}, org="acme")).scopes == frozenset()
            for org in (None, "", "a/b", ["acme"], 7):
                assert await status(server, provider.token(realm=groups, org=org)) == 401, org


# --- the page


async def sign_in(server: InProcessServer, **changes: str) -> tuple[httpx.Response, httpx.AsyncClient]:
    """Go through the whole way, as a browser does."""
    server.http.cookies.clear()
    began = await server.http.get("/session/oidc")
    assert began.status_code == 303
    cookie = began.headers["set-cookie"].partition(";")[0]
    async with httpx.AsyncClient(timeout=60) as browser:
        sent_back = await browser.get(began.headers["location"])
    back = urlsplit(sent_back.headers["location"])
    assert f"{back.scheme}://{back.netloc}" == PUBLIC
    fields = {name: values[0] for name, values in parse_qs(back.query).items()} | changes
    server.http.cookies.clear()
    headers = {"cookie": changes.pop("cookie", cookie)}
    fields.pop("cookie", None)
    return await server.http.get(back.path, params=fields, headers=headers), server.http


@pytest.mark.contract("API-4")
async def test_a_browser_signs_in_by_code_and_gets_a_session() -> None:
    async with openid_provider() as provider, known_by(provider) as server:
        assert (await server.http.get("/session/ways")).json() == {"oidc": True}
        response, _ = await sign_in(server)
        assert (response.status_code, response.headers["location"]) == (303, "/")
        session = next(c for c in response.headers.get_list("set-cookie") if c.startswith("holdfast_session="))
        assert "HttpOnly" in session
        assert "SameSite=Strict" in session
        server.http.cookies.clear()
        own = {"cookie": session.partition(";")[0], "x-holdfast-request": "1"}
        who = (await server.http.get("/session", headers=own)).json()
        assert (who["name"], who["is_admin"]) == ("ann", True)
        assert (await server.http.post("/v1/runs", json={"workflow": "echo"}, headers=own)).status_code == 201
        found = await store_of(server).find(AuditQuery())
        assert [(entry.operation, entry.actor) for entry in found] == [
            ("session.sign_in", "ann"),
            ("runs.start", "ann"),
        ]
        assert len({entry.by.token_id for entry in found if entry.by}) == 1, "one person, session or token"
        assert (await server.http.delete("/session", headers=own)).status_code == 204
        assert (await server.http.get("/session", headers=own)).status_code == 401


@pytest.mark.contract("API-4")
async def test_a_sign_in_that_was_not_begun_here_is_refused() -> None:
    async with openid_provider() as provider, known_by(provider) as server:
        for changes in (
            {"state": "0" * 64},
            {"code": "made-up"},
            {"cookie": "holdfast_login=" + ".".join("0" * 64 for _ in range(3))},
            {"cookie": "other=1"},
        ):
            response, _ = await sign_in(server, **changes)
            assert response.status_code == 401, changes
            assert not any("holdfast_session" in cookie for cookie in response.headers.get_list("set-cookie"))
        for claims in (
            {"nonce": "another"},
            {"aud": AUDIENCE},
            {"aud": [CLIENT, AUDIENCE]},
            {"aud": [CLIENT, AUDIENCE], "azp": AUDIENCE},
            {"azp": AUDIENCE},
        ):
            provider.claims = {"sub": "ann", "roles": ["admin"], **claims}
            response, _ = await sign_in(server)
            assert response.status_code == 401, claims
        assert await store_of(server).find(AuditQuery(operation="runs.start")) == []


@pytest.mark.contract("API-4")
async def test_a_token_for_several_audiences_counts_if_it_was_issued_to_the_page() -> None:
    async with openid_provider() as provider, known_by(provider) as stage:
        provider.claims |= {"aud": [CLIENT, AUDIENCE], "azp": CLIENT}
        response, _ = await sign_in(stage)
        assert response.status_code == 303
        assert await status(stage, provider.token(azp="any-client")) == 200, "an access token is issued to any client"


@pytest.mark.contract("API-4")
async def test_without_a_provider_there_is_no_such_way() -> None:
    async with serve_in_process() as server:
        assert (await server.http.get("/session/ways")).json() == {"oidc": False}
        assert (await server.http.get("/session/oidc")).status_code == 404
    for issuer in ("http://login.example.com", "ftp://x", "login.example.com"):
        options = ServiceOptions(oidc=OidcOptions(issuer=issuer, audience="x"))
        with pytest.raises(InvalidInput, match="https"):
            access_of(make_app(), options)


@pytest.mark.contract("API-4")
async def test_a_provider_that_is_away_is_no_refusal() -> None:
    async with openid_provider() as provider:
        token, options = provider.token(), OidcOptions(issuer=provider.issuer, audience=AUDIENCE)
    app, service = make_app(), ServiceOptions(oidc=options)
    async with serve_in_process("memory://", app=app, options=service, authenticate=access_of(app, service)) as server:
        assert await status(server, token) == 503
        assert await status(server, await token_for(server)) == 200


@pytest.mark.contract("API-4")
async def test_sign_ins_that_fail_are_audited_and_bounded() -> None:
    async with openid_provider() as provider, known_by(provider) as server:
        made_up = {"cookie": "holdfast_login=" + ".".join("0" * 64 for _ in range(3))}
        path = f"/session/oidc/callback?code=made-up&state={'0' * 64}"
        answers = [(await server.http.get(path, headers=made_up)).status_code for _ in range(SIGN_INS_PER_MINUTE + 1)]
        assert answers == [401] * SIGN_INS_PER_MINUTE + [429], "each of them asks the provider"
        found = await store_of(server).find(AuditQuery(operation="session.sign_in"))
        assert [entry.outcome for entry in found] == ["refused"] * FAILED_SIGN_INS


@pytest.mark.contract("API-4")
async def test_a_provider_that_is_away_is_not_asked_by_everybody_who_comes(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []

    async def fetch(self: Provider, address: str, form: Any = None) -> dict[str, Any]:
        asked.append(address)
        raise EngineError("it is away")

    monkeypatch.setattr(Provider, "_fetch", fetch)
    async with openid_provider() as provider, known_by(provider) as server:
        answers = [(await server.http.get("/session/oidc")).status_code for _ in range(3)]
        assert (answers, len(asked)) == ([503] * 3, 1)
