"""Proxies, cookies over https, and TLS."""

import ssl
import warnings
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from datetime import UTC, datetime, timedelta
from ipaddress import ip_address
from pathlib import Path
from typing import Any

import httpx
import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

from holdfast.cli.main import main
from holdfast.errors import InvalidInput
from holdfast.service.auth.tokens import TokenAccess, make_token
from holdfast.service.context import make_service
from holdfast.service.http.proxies import Proxies, forwarded
from holdfast.service.http.server import listening
from holdfast.service.options import ServiceOptions
from tests.service.in_process import make_app
from tests.service.token_callers import serve_with_tokens, token_for

OWN = {"x-holdfast-request": "1"}


def settled(client: str, headers: dict[str, str], **options: Any) -> tuple[str, str, dict[bytes, bytes]]:
    raw = [(name.encode(), value.encode()) for name, value in headers.items()]
    scope: dict[str, Any] = {"client": (client, 5), "scheme": "http", "headers": raw}
    read = dict(raw)
    Proxies(ServiceOptions(**options)).settle(scope, read)
    return scope["client"][0], scope["scheme"], read


@pytest.mark.contract("API-4")
def test_only_proxies_that_are_named_are_believed() -> None:
    trusted = {"trusted_proxies": ("10.0.0.0/8", "::1")}
    said = {"x-forwarded-for": "6.6.6.6, 1.2.3.4, 10.0.0.9", "x-forwarded-proto": "https"}
    assert settled("10.0.0.1", said, **trusted)[:2] == ("1.2.3.4", "https")
    assert settled("::1", said, **trusted)[:2] == ("1.2.3.4", "https")
    assert settled("9.9.9.9", said, **trusted)[:2] == ("9.9.9.9", "http")
    assert settled("127.0.0.1", said)[:2] == ("127.0.0.1", "http"), "no proxy is trusted by default"
    by_the_rfc = {"forwarded": 'for=6.6.6.6;proto=http, for="[2001:db8::1]:4711";proto=https;by=10.0.0.1'}
    assert settled("10.0.0.1", by_the_rfc, **trusted)[:2] == ("2001:db8::1", "https")
    for nonsense in ("unknown", "_hidden", "1.2.3.4.5", "", ",,,", "x" * 10_000):
        assert settled("10.0.0.1", {"x-forwarded-for": nonsense}, **trusted)[0] == "10.0.0.1"
    assert settled("10.0.0.1", {"x-forwarded-proto": "javascript"}, **trusted)[1] == "http"
    twice = [(b"x-forwarded-for", b"6.6.6.6"), (b"x-forwarded-for", b"1.2.3.4")]
    assert [address.strip() for address, _ in forwarded(twice)] == ["6.6.6.6", "1.2.3.4"]
    with pytest.raises(InvalidInput):
        Proxies(ServiceOptions(trusted_proxies=("nowhere",)))


@pytest.mark.contract("API-4")
@pytest.mark.parametrize("url", ["holdfast.example.com", "https://a b", "https://a/b/c", "ftp://a", "https://u:p@a"])
def test_a_public_url_that_is_none_is_refused(url: str) -> None:
    with pytest.raises(InvalidInput, match="public_url"):
        ServiceOptions(public_url=url)


@pytest.mark.contract("API-4")
async def test_over_https_the_cookie_is_of_this_host_alone_and_others_do_not_count() -> None:
    options = ServiceOptions(public_url="https://holdfast.test", trusted_proxies=("127.0.0.1",))
    async with serve_with_tokens(options=options) as server:
        token = await token_for(server)
        signed_in = await server.http.post("/session", json={"token": token}, headers=OWN)
        cookie = signed_in.headers["set-cookie"]
        assert cookie.startswith("__Host-holdfast_session=")
        assert all(part in cookie for part in ("; Secure", "; Path=/", "; HttpOnly", "SameSite=Strict"))
        assert "domain" not in cookie.lower()
        server.http.cookies.clear()
        text = cookie.partition(";")[0].partition("=")[2]
        for name, status in (("__Host-holdfast_session", 200), ("holdfast_session", 401)):
            assert (await server.http.get("/session", headers={"cookie": f"{name}={text}"})).status_code == status
        mixed = f"holdfast_session=forged; __Host-holdfast_session={text}"
        assert (await server.http.get("/session", headers={"cookie": mixed})).status_code == 200
        origin = {"cookie": f"__Host-holdfast_session={text}", "origin": "https://holdfast.test"}
        started = await server.http.post("/v1/runs", json={"workflow": "echo"}, headers=origin)
        assert started.status_code == 201, "the proxy's own name for the service does not matter"
        evil = {**origin, "origin": "https://evil.test"}
        assert (await server.http.post("/v1/runs", json={"workflow": "echo"}, headers=evil)).status_code == 403


# --- TLS


def certificate(folder: Path) -> tuple[str, str]:
    """Make a certificate for this machine, and its key."""
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "localhost")])
    now = datetime.now(UTC)
    made = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - timedelta(days=1))
        .not_valid_after(now + timedelta(days=1))
        .add_extension(x509.SubjectAlternativeName([x509.IPAddress(ip_address("127.0.0.1"))]), critical=False)
        .sign(key, hashes.SHA256())
    )
    pem, unlocked = serialization.Encoding.PEM, serialization.NoEncryption()
    (folder / "cert.pem").write_bytes(made.public_bytes(pem))
    (folder / "key.pem").write_bytes(key.private_bytes(pem, serialization.PrivateFormat.PKCS8, unlocked))
    return str(folder / "cert.pem"), str(folder / "key.pem")


@asynccontextmanager
async def by_tls(folder: Path, **options: Any) -> AsyncIterator[tuple[str, str, str]]:
    cert, key = certificate(folder)
    service_options = ServiceOptions(port=0, tls_certificate=cert, tls_key=key, **options)
    app = make_app()
    async with app.node("memory://"):
        token, _ = await make_token(app.runtime().store, "ann", role="admin")
        service = make_service(app, service_options, TokenAccess(app, 2.0))
        async with listening(service) as port:
            yield f"https://127.0.0.1:{port}", cert, token


@pytest.mark.contract("API-4")
async def test_the_service_speaks_tls(tmp_path: Path) -> None:
    async with by_tls(tmp_path) as (address, cert, token):
        context = ssl.create_default_context(cafile=cert)
        async with httpx.AsyncClient(base_url=address, verify=context, timeout=60) as http:
            assert (await http.get("/v1/runs", headers={"authorization": f"Bearer {token}"})).status_code == 200
            signed_in = await http.post("/session", json={"token": token}, headers=OWN)
            assert signed_in.headers["set-cookie"].startswith("__Host-holdfast_session=")
        async with httpx.AsyncClient(base_url=address, timeout=60) as stranger:
            with pytest.raises(httpx.ConnectError):
                await stranger.get("/v1/health")
        async with httpx.AsyncClient(base_url=address.replace("https", "http"), timeout=60) as plain:
            with pytest.raises(httpx.HTTPError):
                await plain.get("/v1/health")


@pytest.mark.contract("API-4")
@pytest.mark.parametrize(
    ("least", "offered", "is_fine"), [("1.2", "1.1", False), ("1.2", "1.2", True), ("1.3", "1.2", False)]
)
async def test_old_versions_of_tls_are_refused(tmp_path: Path, least: str, offered: str, is_fine: bool) -> None:
    versions = {"1.1": ssl.TLSVersion.TLSv1_1, "1.2": ssl.TLSVersion.TLSv1_2}
    async with by_tls(tmp_path, tls_min_version=least) as (address, cert, _):
        context = ssl.create_default_context(cafile=cert)
        context.set_ciphers("DEFAULT:@SECLEVEL=0")
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # that is what is tested
            context.minimum_version = ssl.TLSVersion.TLSv1
            context.maximum_version = versions[offered]
        async with httpx.AsyncClient(base_url=address, verify=context, timeout=60) as http:
            if is_fine:
                assert (await http.get("/v1/health")).status_code == 200
            else:
                with pytest.raises(httpx.ConnectError):
                    await http.get("/v1/health")


@pytest.mark.contract("API-2")
@pytest.mark.parametrize("text", [None, "nonsense"])
async def test_a_certificate_that_cannot_be_used_is_told_before_anything_begins(
    tmp_path: Path, text: str | None
) -> None:
    if text is not None:
        (tmp_path / "cert.pem").write_text(text)
    app = make_app()
    async with app.node("memory://"):
        options = ServiceOptions(port=0, tls_certificate=str(tmp_path / "cert.pem"))
        service = make_service(app, options, TokenAccess(app, 2.0))
        with pytest.raises(InvalidInput, match="certificate"):
            async with listening(service):
                pass


@pytest.mark.contract("API-4")
def test_the_command_line_says_it_all(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    found: list[ServiceOptions] = []

    async def serve(app: Any, store: Any, *, options: ServiceOptions, node: Any) -> None:
        found.append(options)

    monkeypatch.setattr("holdfast.service.http.server.serve", serve)
    monkeypatch.setenv("HOLDFAST_OIDC_CLIENT_SECRET", "sesame")
    (tmp_path / "door.py").write_text("import holdfast as hf\n\napp = hf.App('door')\n")
    words = [
        "server",
        str(tmp_path / "door.py"),
        "--public-url",
        "https://holdfast.test",
        "--trusted-proxy",
        "10.0.0.1",
    ]
    words += [
        "--trusted-proxy",
        "10.0.0.2",
        "--tls-certificate",
        "c.pem",
        "--tls-key",
        "k.pem",
        "--tls-min-version",
        "1.3",
    ]
    words += ["--oidc-issuer", "https://login.test", "--oidc-audience", "api", "--oidc-client-id", "page"]
    words += ["--oidc-role", "ops=operator", "--oidc-role", "a=b=admin", "--oidc-tenant-claim", "org"]
    assert main(words) == 0
    [options] = found
    assert (options.trusted_proxies, options.tls_min_version) == (("10.0.0.1", "10.0.0.2"), "1.3")
    assert options.oidc is not None
    assert options.oidc.role_map == (("ops", "operator"), ("a=b", "admin"))
    assert (options.oidc.client_secret, options.oidc.tenant_claim) == ("sesame", "org")
    assert main([*words, "--oidc-role", "ops=emperor"]) == 2


@pytest.mark.contract("API-4")
def test_what_a_proxy_passes_on_as_the_caller_wrote_it_does_not_count() -> None:
    trusted = {"trusted_proxies": ("10.0.0.0/8",)}
    by_nginx = {"x-forwarded-for": "1.2.3.4", "x-forwarded-proto": "https"}
    for forged in ("for=6.6.6.6", "for=6.6.6.6;proto=http", 'for=6.6.6.6, for="10.0.0.9";proto=https'):
        assert settled("10.0.0.1", {**by_nginx, "forwarded": forged}, **trusted)[0] == "10.0.0.1"
    mixed = {"forwarded": "for=1.2.3.4;proto=https", "x-forwarded-for": "6.6.6.6", "x-forwarded-proto": "http"}
    assert settled("10.0.0.1", mixed, **trusted)[:2] == ("10.0.0.1", "http")
    both = {**by_nginx, "forwarded": "for=1.2.3.4;proto=https"}
    assert settled("10.0.0.1", both, **trusted)[:2] == ("1.2.3.4", "https")
    apart = {"forwarded": "for=1.2.3.4", "x-forwarded-proto": "https"}
    assert settled("10.0.0.1", apart, **trusted)[:2] == ("1.2.3.4", "https")
