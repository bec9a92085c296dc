"""What callers send is read in time that grows with its size; and little of it before it is known who they are."""

import asyncio
import logging
import time
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import Any

import pytest
from msgspec import Raw

from holdfast.clock import SystemIds
from holdfast.core import codec, keys
from holdfast.core.access import read_token
from holdfast.errors import HoldfastError
from holdfast.service.auth.csrf import check_open, check_origin
from holdfast.service.auth.oidc import _JWT, LOGIN_COOKIE, _unpacked
from holdfast.service.auth.tokens import given_token, shown_caller
from holdfast.service.context import OPEN
from holdfast.service.http.exchange import BODY_DEPTH, Exchange, check_head, correlation_of
from holdfast.service.http.prometheus import Metrics
from holdfast.service.http.proxies import forwarded
from holdfast.service.http.rest import OperationRouter
from holdfast.service.live.sse import parse_last_id
from holdfast.service.operations import OPERATIONS
from holdfast.service.paging import decode_cursor
from holdfast.service.registry import RequestBinder, refusal
from holdfast.store.sql import words_of
from tests.process_state import cpu_seconds
from tests.service.in_process import serve_in_process
from tests.service.test_server import socketed
from tests.service.token_callers import bearer_header, serve_with_tokens, token_for

SMALL = 8 * 1024
TIMES = 8
MOST_GROWTH = 20
"""Eight times the bytes may take twenty times as long, for caches and collectors. Quadratic would be sixty-four."""

NOISE_S = 0.001
"""Less is not measured: on a busy machine the same work takes three times as long now and then."""

Shape = Callable[[int], bytes]

JSON_SHAPES: dict[str, Shape] = {
    "one string without end": lambda n: b"{" * 200 + b'"' + b"a" * n,
    "escaped quotes without end": lambda n: b"{" * 200 + b'"' + b'\\"' * (n // 2),
    "escaped quotes and half an escape": lambda n: b"{" * 200 + b'"' + b'\\"' * (n // 2) + b"\\",
    "quotes": lambda n: b"{" * 200 + b'"' * n,
    "backslashes": lambda n: b"{" * 200 + b'"' + b"\\" * n,
    "deep": lambda n: b"[" * n,
    "deep objects": lambda n: b'{"a":' * (n // 5),
    "closing": lambda n: b"]" * n + b"[" * 200,
    "flat": lambda n: b"[" + b",".join([b"[]"] * (n // 3)) + b"]",
    "many strings": lambda n: b"[" + b",".join([b'"",[]'] * (n // 6)) + b"]",
    "a hundred deep": lambda n: b"[" + b",".join([b"[" * 100 + b"]" * 100] * (n // 201)) + b"]",
    "one number": lambda n: b'{"a":' + b"9" * n + b"}",
    "a long fraction": lambda n: b'{"a":0.' + b"1" * n + b"}",
    "a long exponent": lambda n: b'{"a":1e' + b"1" * n + b"}",
    "many keys": lambda n: b"{" + b",".join(b'"%d":1' % number for number in range(n // 8)) + b"}",
    "one key again and again": lambda n: b"{" + b",".join([b'"input":{}'] * (n // 11)) + b"}",
    "one field of another type": lambda n: b'{"workflow":' + b"[" * (n // 2) + b"]" * (n // 2) + b"}",
    "an unknown field": lambda n: b'{"' + b"a - at `$" * (n // 9) + b'":1}',
    "surrogates": lambda n: b'{"a":"' + b"\\ud800" * (n // 6) + b'"}',
    "batch": lambda n: b"[" + b",".join([b"1"] * (n // 2)) + b"]",
    "batch of calls": lambda n: b"[" + b",".join([b'{"jsonrpc":"2.0","method":"x"}'] * (n // 31)) + b"]",
}
TEXT_SHAPES: dict[str, Shape] = {
    "letters": lambda n: b"a" * n,
    "spaces": lambda n: b" " * n + b"x",
    "pairs": lambda n: b"a=b&" * (n // 4),
    "tokens": lambda n: b"hf_0123456789abcdef" * (n // 19),
    "almost tokens": lambda n: b"&access_token" * (n // 13),
    "semicolons": lambda n: b"; holdfast_session" * (n // 18),
    "commas": lambda n: b"*/*;q=0 ,;" * (n // 10),
    "percents": lambda n: b"%41" * (n // 3),
    "slashes": lambda n: b"/v1/runs/" + b"a/" * (n // 2),
    "digits": lambda n: b"1" * n,
    "bearer": lambda n: b"bearer " + b" " * n,
    "forwarded": lambda n: b"for=1.2.3.4;proto=https," * (n // 24),
    "almost forwarded": lambda n: b"for" + b" " * n + b"=" + b" " * n,
    "dots": lambda n: b"bearer " + b"a." * (n // 2),
    "colons": lambda n: b"[" + b":1" * (n // 2),
}


def _exchange(headers: dict[bytes, bytes]) -> Exchange:
    scope = {
        "holdfast.headers": headers,
        "method": "GET",
        "holdfast.path": b"/",
        "holdfast.mount": "",
        "query_string": b"",
        "holdfast.correlation_id": "c",
        "headers": [],
    }
    unused: Any = None
    return Exchange(unused, scope, unused, unused)


READER = RequestBinder(OPERATIONS["runs.start"])
LISTING = RequestBinder(OPERATIONS["runs.list"])
ROUTER = OperationRouter(OPERATIONS)


def _of_json(text: bytes) -> list[Callable[[], object]]:
    return [
        lambda: codec.is_deeper(text, BODY_DEPTH),
        lambda: codec.check(Raw(text), "payload"),
        lambda: READER.from_json(text),
        lambda: READER.from_body({"run_id": "r"}, text),
        lambda: refusal(ValueError(text.decode())),
    ]


def _of_text(text: bytes) -> list[Callable[[], object]]:
    return [
        lambda: LISTING.from_query({}, text),
        lambda: check_head([(b"cookie", text)], text),
        lambda: given_token({b"authorization": text}),
        lambda: given_token({b"cookie": text}),
        lambda: shown_caller({b"cookie": text}),
        lambda: check_origin({b"origin": text, b"host": text + b"x"}),
        lambda: check_open({b"host": text}, is_local=True),
        lambda: correlation_of({b"x-correlation-id": text}, SystemIds()),
        lambda: parse_last_id(text),
        lambda: ROUTER.match(b"/" + text),
        lambda: decode_cursor("runs", text.decode(), str),
        lambda: read_token(text.decode()),
        lambda: words_of(text.decode()),
        _exchange({b"accept": text}).check_accept,
        lambda: forwarded([(b"forwarded", text)]),
        lambda: forwarded([(b"forwarded", b"for" + text)]),
        lambda: forwarded([(b"forwarded", part) for part in text.split(b"=")]),
        lambda: forwarded([(b"x-forwarded-for", text), (b"x-forwarded-proto", text)]),
        lambda: _JWT.fullmatch(text),
        lambda: _unpacked({b"cookie": text}, LOGIN_COOKIE),
        lambda: keys.read_activity_token(text.decode(), "00" * 32),
    ]


def _tolerant(work: Callable[[], object]) -> None:
    """Do it; what it refuses is no mistake here."""
    with suppress(HoldfastError):
        work()


def _check_growth(shape: Shape, works: Callable[[bytes], list[Callable[[], object]]]) -> None:
    for number, (small, large) in enumerate(zip(works(shape(SMALL)), works(shape(SMALL * TIMES)), strict=True)):
        first = max(NOISE_S, cpu_seconds(partial(_tolerant, small)))
        then = cpu_seconds(partial(_tolerant, large))
        for _ in range(6):  # by chance, on a machine whose caches others use as well; what is quadratic stays so
            if then <= MOST_GROWTH * first:
                break
            first = max(first, cpu_seconds(partial(_tolerant, small)))
            then = min(then, cpu_seconds(partial(_tolerant, large)))
        assert then <= MOST_GROWTH * first, f"reader {number}: {first:.4f} s became {then:.4f} s"


@pytest.mark.contract("API-2")
@pytest.mark.parametrize("shape", JSON_SHAPES.values(), ids=JSON_SHAPES.keys())
def test_reading_json_takes_time_as_its_size(shape: Shape) -> None:
    _check_growth(shape, _of_json)


@pytest.mark.contract("API-2")
@pytest.mark.parametrize("shape", TEXT_SHAPES.values(), ids=TEXT_SHAPES.keys())
def test_reading_heads_takes_time_as_their_size(shape: Shape) -> None:
    _check_growth(shape, _of_text)


@pytest.mark.contract("API-2")
@pytest.mark.parametrize("shape", JSON_SHAPES.values(), ids=JSON_SHAPES.keys())
async def test_a_hostile_body_does_not_hold_up_the_service(shape: Shape) -> None:
    async with serve_in_process() as server:
        for path in ("/rpc", "/v1/runs", "/v1/signals"):
            before = time.thread_time()
            headers = {"content-type": "application/json"}
            response = await server.http.post(path, content=shape(64 * 1024), headers=headers)
            assert response.status_code in (200, 204, 400, 422), response.text[:200]
            assert time.thread_time() - before < 2.0


@pytest.mark.contract("API-2")
def test_depth_is_what_it_is_whatever_strings_hold() -> None:
    for text, depth in [
        (b"[" * 5 + b"]" * 5, 5),
        (b'["[[[[[[",{"a":"}}}}"}]', 2),
        (b'["\\"[[[[",[[]]]', 3),
        (b'["\\\\",[[]]]', 3),
        (b'{"a":[{"b":[]}]}', 4),
    ]:
        assert not codec.is_deeper(text, depth)
        assert codec.is_deeper(text, depth - 1)


@pytest.mark.contract("API-4")
async def test_who_signs_in_sends_a_kilobyte_at_most() -> None:
    async with serve_with_tokens() as server:
        headers = {"content-type": "application/json", "x-holdfast-request": "1"}
        token = await token_for(server)
        large = b'{"token":"' + b"a" * 1_024 + b'"}'
        refused = await server.http.post("/session", content=large, headers=headers)
        assert (refused.status_code, refused.json()["details"]["limit_bytes"]) == (413, 1_024)

        async def parts() -> Any:
            for _ in range(200):
                yield b" " * 1_000

        refused = await server.http.post("/session", content=parts(), headers=headers)
        assert refused.status_code == 413
        assert (await server.http.post("/session", json={"token": token}, headers=headers)).status_code == 200


@pytest.mark.contract("API-4")
async def test_a_body_is_not_read_for_who_may_not_ask() -> None:
    async with serve_with_tokens() as server:
        viewer = bearer_header(await token_for(server, "viewer"))

        async def parts() -> Any:
            raise AssertionError("the body was read")
            yield b""

        headers = {"content-type": "application/json", **viewer}
        for path in ("/v1/runs", "/v1/signals", "/v1/tokens"):
            assert (await server.http.post(path, content=parts(), headers=headers)).status_code == 403
        assert (await server.http.post("/rpc", content=parts(), headers={"authorization": "x"})).status_code == 401


@pytest.mark.contract("API-2")
async def test_the_log_names_the_operation_that_holds_up_the_loop(caplog: pytest.LogCaptureFixture) -> None:
    async with socketed(loop_s=0.05) as (service, _):
        with caplog.at_level(logging.WARNING, logger="holdfast.service.loop"):
            with service.in_flight.doing("runs.list"):
                while service.watchdog.stalls == 0:
                    pass  # the loop is held up
            while service.watchdog.stalled_s == 0.0:  # noqa: ASYNC110
                await asyncio.sleep(0.002)
        assert service.watchdog.stalls == 1
        assert service.watchdog.stalled_s > 0.025
        assert "by runs.list, at" in caplog.text
        assert "test_callers_bytes.py" in caplog.text
        call = service.context(OPEN, "c")

        assert b"holdfast_loop_stalls_total 1" in await Metrics(service).text(call)


async def test_a_loop_that_comes_round_is_not_in_the_log(caplog: pytest.LogCaptureFixture) -> None:
    async with socketed(loop_s=30.0) as (service, _):
        await asyncio.sleep(0)
        assert service.watchdog.stalls == 0
    assert "event loop" not in caplog.text
