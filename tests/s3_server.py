"""An S3 server for tests, in a process of its own: moto's, with signatures checked. Its objects are in its memory.

`S3Server().start()` starts it; buckets are made with `make_bucket`, and `store` and `environment` lead to them, as they
do to every other endpoint. Moto takes every caller, so the process refuses what is not signed with the one key it
knows, as AWS does (Signature Version 4). It answers one request at a time: it is for dialects and errors, and
`seaweed_server.py` has the server that stands for those of production.
This file is also the server's program. It ends when its standard input does: with the test session, however that ends.
"""

from __future__ import annotations

import hmac
import os
import secrets
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from datetime import UTC, datetime
from hashlib import sha256
from typing import TYPE_CHECKING, Any
from urllib.parse import parse_qsl, quote

import httpx

if TYPE_CHECKING:
    from obstore.store import S3Store

REGION = "eu-central-1"
KEY_ID = "AKIAHOLDFASTTESTS000"
UNSIGNED = "UNSIGNED-PAYLOAD"

Environ = dict[str, Any]
Answer = Callable[[str, list[tuple[str, str]]], Any]


def signature(
    secret: str, method: str, path: str, query: str, headers: Mapping[str, str], scope: str, payload_sha256: str
) -> str:
    """Return the signature of a request. `headers` are those that are signed, with lower-case names."""
    pairs = sorted((quote(name, safe="~"), quote(value, safe="~")) for name, value in parse_qsl(query, True))
    canonical = "\n".join(
        [
            method,
            path,
            "&".join(f"{name}={value}" for name, value in pairs),
            *(f"{name}:{' '.join(headers[name].split())}" for name in sorted(headers)),
            "",
            ";".join(sorted(headers)),
            payload_sha256,
        ]
    )
    to_sign = f"AWS4-HMAC-SHA256\n{headers['x-amz-date']}\n{scope}\n{sha256(canonical.encode()).hexdigest()}"
    key = f"AWS4{secret}".encode()
    for part in scope.split("/"):
        key = hmac.digest(key, part.encode(), "sha256")
    return hmac.digest(key, to_sign.encode(), "sha256").hex()


class Endpoint:
    """Where an S3 server is, and the key that it knows."""

    def __init__(self, url: str = "", secret: str = "") -> None:
        self.url = url
        self.secret = secret or secrets.token_hex(20)

    def make_bucket(self) -> str:
        """Make a bucket, and return its name."""
        name = f"test-{secrets.token_hex(8)}"
        where = (
            f"<CreateBucketConfiguration><LocationConstraint>{REGION}</LocationConstraint></CreateBucketConfiguration>"
        )
        self.request("PUT", f"/{name}", where.encode()).raise_for_status()
        return name

    def remove_bucket(self, name: str) -> None:
        """Remove a bucket with all that is in it. A real server has some open files for each that there is."""
        self.request("DELETE", f"/{name}").raise_for_status()

    def request(self, method: str, path: str, content: bytes = b"") -> httpx.Response:
        """Send a request that is signed by the server's key."""
        moment = datetime.now(UTC).strftime("%Y%m%dT%H%M%SZ")
        scope = f"{moment[:8]}/{REGION}/s3/aws4_request"
        digest = sha256(content).hexdigest()
        signed = {"host": self.url.removeprefix("http://"), "x-amz-content-sha256": digest, "x-amz-date": moment}
        proof = signature(self.secret, method, path, "", signed, scope, digest)
        names = ";".join(sorted(signed))
        said = f"AWS4-HMAC-SHA256 Credential={KEY_ID}/{scope}, SignedHeaders={names}, Signature={proof}"
        headers = signed | {"authorization": said}
        return httpx.request(method, self.url + path, headers=headers, content=content, timeout=60)

    def environment(self) -> dict[str, str]:
        """Return the variables by which a process finds the server and is admitted."""
        return {
            "AWS_ENDPOINT_URL": self.url,
            "AWS_ALLOW_HTTP": "true",
            "AWS_REGION": REGION,
            "AWS_ACCESS_KEY_ID": KEY_ID,
            "AWS_SECRET_ACCESS_KEY": self.secret,
        }

    def store(self, bucket: str, **changed: Any) -> S3Store:
        """Return a bucket as `obstore` knows it."""
        from obstore.store import S3Store

        given: dict[str, Any] = {
            "endpoint": self.url,
            "region": REGION,
            "access_key_id": KEY_ID,
            "secret_access_key": self.secret,
            "client_options": {"allow_http": True},
        }
        return S3Store(bucket, **given | changed)


class S3Server(Endpoint):
    """A server on 127.0.0.1. What is in it is gone when it ends."""

    _process: subprocess.Popen[str] | None = None

    def start(self) -> None:
        """Start it, and wait until it takes connections."""
        self._process = subprocess.Popen(
            [sys.executable, __file__],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=os.environ | {"S3_SERVER_SECRET": self.secret},
            text=True,
        )
        assert self._process.stdout is not None
        port = self._process.stdout.readline().strip()
        assert port, "the S3 server ended: `make dev` installs what it needs"
        self.url = f"http://127.0.0.1:{port}"

    def kill(self) -> None:
        """Kill it."""
        process = self._running
        self._process = None
        process.kill()
        process.wait()
        for pipe in (process.stdin, process.stdout):
            assert pipe is not None
            pipe.close()

    def freeze(self) -> None:
        """Stop it where it is: connections are taken, and nothing answers."""
        self._running.send_signal(signal.SIGSTOP)

    def thaw(self) -> None:
        """Let it go on."""
        self._running.send_signal(signal.SIGCONT)

    @property
    def is_running(self) -> bool:
        """Whether it was started, and not killed since."""
        return self._process is not None

    @property
    def _running(self) -> subprocess.Popen[str]:
        assert self._process is not None, "the S3 server is not running"
        return self._process


# --- the server's process


class Guarded:
    """A WSGI application that refuses what is not signed with the key."""

    def __init__(self, application: Callable[[Environ, Answer], Iterable[bytes]], secret: str) -> None:
        self._application = application
        self._secret = secret
        self._one_at_a_time = threading.Lock()  # moto compares and writes in two steps

    def __call__(self, environ: Environ, answer: Answer) -> Iterable[bytes]:
        """Answer a request."""
        code = self._refusal(environ)
        if code is None:
            with self._one_at_a_time:
                return list(self._application(environ, answer))
        answer("403 Forbidden", [("Content-Type", "application/xml"), ("Connection", "close")])
        return [f"<?xml version='1.0'?><Error><Code>{code}</Code><Message>refused</Message></Error>".encode()]

    def _refusal(self, environ: Environ) -> str | None:
        said = dict(part.strip().split("=", 1) for part in _after_first_word(environ.get("HTTP_AUTHORIZATION", "")))
        key_id, _, scope = said.get("Credential", "").partition("/")
        if not said:
            return "AccessDenied"
        if key_id != KEY_ID:
            return "InvalidAccessKeyId"
        path, _, query = str(environ["RAW_URI"]).partition("?")
        headers = {name: _header(environ, name) for name in said["SignedHeaders"].split(";")}
        payload = environ.get("HTTP_X_AMZ_CONTENT_SHA256", UNSIGNED)
        proof = signature(self._secret, environ["REQUEST_METHOD"], path, query, headers, scope, payload)
        return None if hmac.compare_digest(proof, said["Signature"]) else "SignatureDoesNotMatch"


def _after_first_word(text: str) -> Iterator[str]:
    return iter([part for part in text.partition(" ")[2].split(",") if "=" in part])


def _header(environ: Environ, name: str) -> str:
    variable = name.upper().replace("-", "_")
    return str(environ.get(f"HTTP_{variable}", environ.get(variable, "")))


def main() -> None:
    """Serve until standard input ends."""
    from moto.moto_server.werkzeug_app import DomainDispatcherApplication, MotoRequestHandler, create_backend_app
    from werkzeug.serving import make_server

    class Silent(MotoRequestHandler):
        def log(self, type: str, message: str, *args: Any) -> None:
            """Say nothing."""

    application: Any = DomainDispatcherApplication(create_backend_app)
    guarded: Any = Guarded(application, os.environ["S3_SERVER_SECRET"])
    server = make_server("127.0.0.1", 0, guarded, threaded=True, request_handler=Silent)
    sys.stdout.write(f"{server.port}\n")
    sys.stdout.flush()
    threading.Thread(target=server.serve_forever, daemon=True).start()
    sys.stdin.read()
    os._exit(0)


if __name__ == "__main__":
    main()
