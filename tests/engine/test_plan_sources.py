"""Where plans are fetched from: only what is allowed, bounded, and with the hash that was asked for."""

import asyncio
import os
import ssl
import threading
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from hashlib import sha256
from http.server import BaseHTTPRequestHandler, HTTPServer
from ipaddress import ip_address
from pathlib import Path
from typing import Any

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

import holdfast as hf
from holdfast.engine.plan_sources import PlanSources
from holdfast.errors import Conflict, InvalidInput, NotFound, NotPermitted, PayloadTooLarge, StoreUnavailable
from holdfast.limits import PLAN_BYTES
from tests.s3_server import S3Server

pytestmark = pytest.mark.contract("WF-1")

PLAN = b"plan: p\nversion: '1'\nsteps: [{id: a, sleep: 0.001}]\n"


class Pages(BaseHTTPRequestHandler):
    """Plans, a redirect, and a page without an end."""

    def do_GET(self) -> None:
        if self.path == "/plans/moved.yaml":
            self.send_response(302)
            self.send_header("location", "/plans/p.yaml")
            self.end_headers()
        elif self.path == "/plans/p.yaml":
            self._send(PLAN)
        elif self.path == "/plans/large.yaml":
            self._send(b"#" * (PLAN_BYTES + 1))
        elif self.path == "/plans/broken.yaml":
            self.send_error(500)
        else:
            self.send_error(404)

    def _send(self, body: bytes) -> None:
        self.send_response(200)
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        try:
            self.wfile.write(body)
        except OSError:
            return  # the reader has had enough

    def log_message(self, format: str, *args: Any) -> None:
        """Write nothing."""


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, ssl.SSLContext]]:
    folder = tmp_path_factory.mktemp("tls")
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "localhost")])
    now = datetime.now(UTC)
    names = x509.SubjectAlternativeName([x509.DNSName("localhost"), x509.IPAddress(ip_address("127.0.0.1"))])
    certificate = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(1)
        .not_valid_before(now - timedelta(days=1))
        .not_valid_after(now + timedelta(days=1))
        .add_extension(names, critical=False)
        .add_extension(x509.BasicConstraints(ca=True, path_length=None), critical=True)
        .sign(key, hashes.SHA256())
    )
    pem = certificate.public_bytes(serialization.Encoding.PEM)
    plain = serialization.NoEncryption()
    secret = key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, plain)
    (folder / "both.pem").write_bytes(secret + pem)
    (folder / "ca.pem").write_bytes(pem)
    serving = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    serving.load_cert_chain(folder / "both.pem")
    http = HTTPServer(("127.0.0.1", 0), Pages)
    http.socket = serving.wrap_socket(http.socket, server_side=True)
    thread = threading.Thread(target=http.serve_forever, daemon=True)
    thread.start()
    trusting = ssl.create_default_context(cafile=str(folder / "ca.pem"))
    yield f"https://localhost:{http.server_port}", trusting
    http.shutdown()
    thread.join()
    http.server_close()


async def test_https_is_fetched_by_the_allow_list(server: tuple[str, ssl.SSLContext]) -> None:
    base, trusting = server
    sources = PlanSources([f"{base}/plans/"], verify=trusting)
    assert await sources.fetch(f"{base}/plans/p.yaml") == PLAN
    for path, refusal in (
        ("/plans/moved.yaml", NotPermitted),
        ("/plans/gone.yaml", NotFound),
        ("/plans/large.yaml", PayloadTooLarge),
        ("/plans/broken.yaml", StoreUnavailable),
        ("/other/p.yaml", NotPermitted),
        ("/plans/../other/p.yaml", InvalidInput),
        ("/plans/%2e%2e/other/p.yaml", InvalidInput),
        ("/plans/p.yaml?x=1", InvalidInput),
    ):
        with pytest.raises(refusal):
            await sources.fetch(base + path)


async def test_a_server_that_is_not_trusted_is_not_believed_and_others_are_not_asked(
    server: tuple[str, ssl.SSLContext],
) -> None:
    base, _ = server
    with pytest.raises(StoreUnavailable):
        await PlanSources([f"{base}/plans/"]).fetch(f"{base}/plans/p.yaml")
    for uri in (base.replace("localhost", "localhost.evil") + "/plans/p.yaml", "https://localhost/plans/p.yaml"):
        with pytest.raises(NotPermitted):
            await PlanSources([f"{base}/plans/"]).fetch(uri)
    for uri in ("http://localhost/p.yaml", "ftp://x/p", "p.yaml", "https://user@localhost/plans/p.yaml", "https://[x"):
        with pytest.raises(InvalidInput):
            await PlanSources([f"{base}/plans/"]).fetch(uri)


async def test_a_file_does_not_lead_out_of_its_folder(tmp_path: Path) -> None:
    (tmp_path / "plans").mkdir()
    (tmp_path / "plans" / "p.yaml").write_bytes(PLAN)
    (tmp_path / "secret").write_text("secret")
    (tmp_path / "plans" / "link").symlink_to(tmp_path / "secret")
    sources = PlanSources([f"file://{tmp_path}/plans/"])
    assert await sources.fetch(f"file://{tmp_path}/plans/p.yaml") == PLAN
    for name, refusal in (("link", NotPermitted), ("gone", NotFound), ("../secret", InvalidInput)):
        with pytest.raises(refusal):
            await sources.fetch(f"file://{tmp_path}/plans/{name}")
    (tmp_path / "plans" / "loop").symlink_to(tmp_path / "plans" / "loop")
    (tmp_path / "plans" / "folder").mkdir()
    os.mkfifo(tmp_path / "plans" / "pipe")
    for name in ("loop", "folder", "pipe", "nul%00", "bell%07", "x" * 300):
        with pytest.raises(InvalidInput):
            await asyncio.wait_for(sources.fetch(f"file://{tmp_path}/plans/{name}"), 20)
    with pytest.raises(NotFound):
        await sources.fetch(f"file://{tmp_path}/plans/p.yaml/below")
    with pytest.raises(NotPermitted):
        await PlanSources().fetch(f"file://{tmp_path}/plans/p.yaml")
    with pytest.raises(InvalidInput):
        PlanSources([f"file://{tmp_path}/plans"])


async def test_a_reference_is_compared_with_what_was_fetched(tmp_path: Path) -> None:
    (tmp_path / "p.yaml").write_bytes(PLAN)
    uri, hash = f"file://{tmp_path}/p.yaml", sha256(PLAN).hexdigest()
    app = hf.App("sources", plan_sources=[f"file://{tmp_path}/"])
    async with app.node(hf.MemoryStore()):
        with pytest.raises(Conflict):
            await app.plans.start(hf.PlanRef(uri=uri, sha256="0" * 64))
        with pytest.raises(Conflict):
            await app.plans.start(hf.PlanRef(uri=uri, sha256=hash, plan_id="other"))
        run = await app.plans.start(hf.PlanRef(uri=uri, sha256=hash, plan_id="p", plan_version="1"))
        await run.result()
        (tmp_path / "p.yaml").write_bytes(PLAN + b"# changed\n")
        again = await app.plans.start(hf.PlanRef(uri=uri, sha256=hash))
        await again.result()  # the store has the bytes that were meant


async def test_a_plan_is_fetched_from_a_bucket(s3_server: S3Server, monkeypatch: pytest.MonkeyPatch) -> None:
    bucket = s3_server.make_bucket()
    s3_server.request("PUT", f"/{bucket}/plans/p.yaml", PLAN).raise_for_status()
    for name, value in s3_server.environment().items():
        monkeypatch.setenv(name, value)
    sources = PlanSources([f"s3://{bucket}/plans/"])
    assert await sources.fetch(f"s3://{bucket}/plans/p.yaml") == PLAN
    with pytest.raises(NotFound):
        await sources.fetch(f"s3://{bucket}/plans/gone.yaml")
    with pytest.raises(NotPermitted):
        await sources.fetch(f"s3://{bucket}/other/p.yaml")
