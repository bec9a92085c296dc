"""A small OpenID provider, for tests: real HTTP, real keys, authorization code with PKCE."""

import asyncio
import base64
import json
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from hashlib import sha256
from typing import Any
from urllib.parse import parse_qs, urlencode

import jwt
import uvicorn
from cryptography.hazmat.primitives.asymmetric import ec, rsa
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, RedirectResponse, Response
from starlette.routing import Route

from holdfast.clock import SystemClock, SystemSecrets

CLIENT, AUDIENCE = "holdfast-page", "holdfast-api"


class OpenIdProvider:
    """Signs tokens, and people in. Tests change what it says."""

    def __init__(self, address: str) -> None:
        self.issuer = address
        self.keys: dict[str, tuple[str, Any]] = {}
        self.codes: dict[str, dict[str, str]] = {}
        self.claims: dict[str, Any] = {"sub": "ann", "roles": ["admin"]}
        self.fetches = 0
        self.add_key("rsa-1", "RS256")

    def add_key(self, kid: str, algorithm: str) -> None:
        """Begin to sign with another key."""
        is_rsa = algorithm.startswith("RS")
        made: Any = rsa.generate_private_key(65_537, 2_048) if is_rsa else ec.generate_private_key(ec.SECP256R1())
        self.keys[kid] = (algorithm, made)

    def token(self, kid: str = "rsa-1", headers: dict[str, Any] | None = None, **changes: Any) -> str:
        """Return a token; a change of None leaves a claim out."""
        now = SystemClock().now() // 1_000_000
        plain = {"iss": self.issuer, "aud": AUDIENCE, "iat": now, "exp": now + 300, **self.claims, **changes}
        claims = {name: value for name, value in plain.items() if value is not None}
        algorithm, key = self.keys[kid]
        return str(jwt.encode(claims, key, algorithm=algorithm, headers={"kid": kid, **(headers or {})}))

    def jwk(self, kid: str) -> dict[str, Any]:
        """Return the public half of a key."""
        algorithm, key = self.keys[kid]
        made: Any = jwt.get_algorithm_by_name(algorithm)
        return {**json.loads(made.to_jwk(key.public_key())), "kid": kid, "use": "sig", "alg": algorithm}

    def public_pem(self, kid: str = "rsa-1") -> bytes:
        """Return the public half of a key as an attacker would use it for a shared secret."""
        from cryptography.hazmat.primitives import serialization as form

        return bytes(
            self.keys[kid][1].public_key().public_bytes(form.Encoding.PEM, form.PublicFormat.SubjectPublicKeyInfo)
        )

    # --- what it answers

    async def about(self, request: Request) -> Response:
        """Say where everything is."""
        return JSONResponse(
            {
                "issuer": self.issuer,
                "jwks_uri": f"{self.issuer}/jwks",
                "authorization_endpoint": f"{self.issuer}/authorize",
                "token_endpoint": f"{self.issuer}/token",
            }
        )

    async def jwks(self, request: Request) -> Response:
        """Publish the keys."""
        self.fetches += 1
        return JSONResponse({"keys": [self.jwk(kid) for kid in self.keys]})

    async def authorize(self, request: Request) -> Response:
        """Sign somebody in at once, and send them back."""
        asked = dict(request.query_params)
        assert asked["response_type"] == "code"
        assert asked["code_challenge_method"] == "S256"
        code = SystemSecrets().new_secret()
        self.codes[code] = asked
        back = urlencode({"code": code, "state": asked["state"]})
        return RedirectResponse(f"{asked['redirect_uri']}?{back}", status_code=302)

    async def give(self, request: Request) -> Response:
        """Give an ID token for a code, once, to who began."""
        fields = {name: values[0] for name, values in parse_qs((await request.body()).decode()).items()}
        asked = self.codes.pop(fields.get("code", ""), None)
        challenge = base64.urlsafe_b64encode(sha256(fields.get("code_verifier", "").encode()).digest())
        if asked is None or challenge.rstrip(b"=").decode() != asked["code_challenge"]:
            return JSONResponse({"error": "invalid_grant"}, status_code=400)
        if fields["redirect_uri"] != asked["redirect_uri"] or fields["client_id"] != asked["client_id"]:
            return JSONResponse({"error": "invalid_grant"}, status_code=400)
        said = {
            "aud": CLIENT,
            "nonce": asked["nonce"],
            **{k: v for k, v in self.claims.items() if k in ("aud", "nonce")},
        }
        return JSONResponse({"id_token": self.token(**said), "token_type": "Bearer"})


@asynccontextmanager
async def openid_provider() -> AsyncIterator[OpenIdProvider]:
    """Run a provider on this machine."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        provider = OpenIdProvider(f"http://127.0.0.1:{listener.getsockname()[1]}")
        app = Starlette(
            routes=[
                Route("/.well-known/openid-configuration", provider.about),
                Route("/jwks", provider.jwks),
                Route("/authorize", provider.authorize),
                Route("/token", provider.give, methods=["POST"]),
            ]
        )
        server = uvicorn.Server(uvicorn.Config(app, lifespan="off", log_config=None))
        serving = asyncio.create_task(server.serve([listener]))
        try:
            yield provider
        finally:
            server.should_exit = True
            await serving
