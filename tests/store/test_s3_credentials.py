"""Who opens a bucket without credentials is told what to set, and nobody is asked for some behind the user's back."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from holdfast.errors import InvalidInput
from holdfast.settings import Settings
from holdfast.store.artifacts import open_artifacts
from holdfast.store.open import open_store
from tests.s3_server import KEY_ID, S3Server

TOLD = "AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY.*AWS_METADATA_ENDPOINT"


class MetadataAddress:
    """What a virtual machine has at its metadata address, and which requests came there."""

    def __init__(self, secret: str) -> None:
        role = {"AccessKeyId": KEY_ID, "SecretAccessKey": secret, "Token": "t", "Expiration": "2100-01-01T00:00:00Z"}
        bodies = {"token": b"token", "security-credentials/": b"role", "role": json.dumps(role).encode()}
        asked: list[str] = []
        self.asked = asked

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                asked.append(self.path)
                body = next(body for end, body in bodies.items() if self.path.endswith(end))
                self.send_response(200)
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def do_PUT(self) -> None:
                self.do_GET()

            def log_message(self, *_: Any) -> None:
                """Say nothing."""

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_port}"
        threading.Thread(target=self._server.serve_forever, daemon=True).start()

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()


@pytest.fixture
def metadata(s3_server: S3Server, monkeypatch: pytest.MonkeyPatch) -> Iterator[MetadataAddress]:
    """Return a metadata address that this process would ask; its environment has no credentials."""
    for name, value in s3_server.environment().items():
        monkeypatch.setenv(name, value)
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.delenv(name)
    address = MetadataAddress(s3_server.secret)
    yield address
    address.close()


@pytest.mark.process
@pytest.mark.contract("API-2", "STO-1")
@pytest.mark.parametrize(
    ("given", "found"),
    [
        ({}, "there are none"),
        (
            {"AWS_ACCESS_KEY_ID": "", "AWS_SECRET_ACCESS_KEY": ""},
            "AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY are empty",
        ),
        ({"AWS_ACCESS_KEY_ID": KEY_ID, "AWS_SECRET_ACCESS_KEY": ""}, "AWS_SECRET_ACCESS_KEY is empty"),
        ({"AWS_ACCESS_KEY_ID": KEY_ID}, "there are none"),
        ({"AWS_WEB_IDENTITY_TOKEN_FILE": "/token"}, "there are none"),
    ],
)
async def test_a_bucket_without_credentials_is_refused_and_no_metadata_address_is_asked(
    metadata: MetadataAddress, monkeypatch: pytest.MonkeyPatch, given: dict[str, str], found: str
) -> None:
    if given:  # empty keys are wrong beside any other way
        monkeypatch.setenv("AWS_METADATA_ENDPOINT", metadata.url if "" in given.values() else "")
    for name, value in given.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(InvalidInput, match=f"{found}.*{TOLD}") as caught:
        await open_store(Settings(store="s3://bucket/shop"))
    assert caught.value.details["field"] == "store"
    with pytest.raises(InvalidInput, match=TOLD):
        open_artifacts("s3://bucket/artifacts")
    assert metadata.asked == []


@pytest.mark.process
@pytest.mark.contract("STO-1")
async def test_the_metadata_address_is_asked_where_the_environment_names_it(
    metadata: MetadataAddress, s3_server: S3Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AWS_METADATA_ENDPOINT", metadata.url)
    store = await open_store(Settings(store=f"s3://{s3_server.make_bucket()}/shop"))
    await store.close()
    assert metadata.asked[-1].endswith("/role")


@pytest.mark.contract("STO-1")
@pytest.mark.parametrize(
    "given",
    [
        {"AWS_ACCESS_KEY_ID": "k", "AWS_SECRET_ACCESS_KEY": "s"},
        {"AWS_WEB_IDENTITY_TOKEN_FILE": "/token", "AWS_ROLE_ARN": "arn"},
        {"AWS_CONTAINER_CREDENTIALS_RELATIVE_URI": "/role"},
        {"AWS_CONTAINER_CREDENTIALS_FULL_URI": "http://a/b", "AWS_CONTAINER_AUTHORIZATION_TOKEN_FILE": "/token"},
        {"AWS_SKIP_SIGNATURE": "true"},
    ],
    ids=lambda given: next(iter(given)),
)
def test_every_other_way_to_give_credentials_is_taken(monkeypatch: pytest.MonkeyPatch, given: dict[str, str]) -> None:
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.delenv(name, raising=False)
    for name, value in given.items():
        monkeypatch.setenv(name, value)
    open_artifacts("s3://bucket/artifacts")
