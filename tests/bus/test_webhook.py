"""A webhook reaches public addresses only, follows nothing, and is bounded."""

from __future__ import annotations

import asyncio
import socket
import sys
from typing import Any

import pytest

from holdfast.core.bus import Sink, check_sink
from holdfast.engine.bus.webhook import ANSWER_BYTES, Answer, Webhook, is_public, signature
from holdfast.errors import InvalidInput
from tests.bus.webhook_server import KEY, Receiver

PRIVATE = (
    *("127.0.0.1", "10.0.0.1", "172.16.0.1", "192.168.1.1", "169.254.169.254", "0.0.0.0", "100.64.0.1", "224.0.0.1"),
    *("::1", "::", "fe80::1", "fe80::1%eth0", "fc00::1", "ff02::1", "::ffff:127.0.0.1", "::ffff:10.0.0.1"),
    *("2002:7f00:1::", "64:ff9b::7f00:1", "64:ff9b::a00:1", "2001:db8::1", "255.255.255.255", "240.0.0.1"),
    *("fec0::1", "::127.0.0.1", "64:ff9b:1::7f00:1", "::ffff:0:7f00:1"),
)

BODY = b'{"id":"e-1","subject":"run-1","sequence":"1"}'


async def post(webhook: Webhook) -> Answer:
    return await webhook.post("e-1", BODY, KEY, 1_700_000_000)


@pytest.mark.parametrize("address", PRIVATE)
@pytest.mark.contract("BUS-1")
def test_addresses_that_are_not_public_are_known(address: str) -> None:
    assert not is_public(address)


@pytest.mark.parametrize("address", ["93.184.215.14", "2606:4700::1111", "::ffff:93.184.215.14"])
def test_public_addresses_are_known(address: str) -> None:
    assert is_public(address)


def test_the_signature_is_that_of_standard_webhooks() -> None:
    """As the specification's own example has it."""
    body = b'{"test": 2432232314}'
    secret = "whsec_MfKQ9r8GKYqrTwjUPD8ILPZIo2LaLaSw"
    expected = "v1,g0hM9SsE+OTPJTGt/tmIKtSyZlE3uFJELVlNIOLJ1OE="
    assert signature(secret, "msg_p5jXN8AQM9LWM0D4loKWxJek", 1614265330, body) == expected


@pytest.mark.contract("BUS-1")
async def test_a_private_address_is_not_reached_unless_it_is_allowed() -> None:
    """Neither one that is written as such, nor one that a name leads to."""
    async with Receiver().serve() as receiver:
        for address in (receiver.url, receiver.url.replace("127.0.0.1", "localhost")):
            answer = await post(Webhook(address, 5))
            assert not answer.is_success
            assert "not a public address" in answer.detail
        assert receiver.requests == 0
        webhook = Webhook(receiver.url, 5, allow_private=True)
        assert (await post(webhook)).is_success
        assert (await post(webhook)).is_success
        webhook.close()
        assert (receiver.requests, receiver.unsigned) == (2, 0)


@pytest.mark.contract("BUS-1")
async def test_one_private_address_among_public_ones_is_enough(monkeypatch: pytest.MonkeyPatch) -> None:
    """And the connection goes to what was checked: the name is resolved once for it."""
    loop, asked, opened = asyncio.get_running_loop(), [], []

    async def resolve(host: str, port: int, **options: Any) -> list[Any]:
        asked.append(host)
        addresses = ["93.184.215.14"] if len(asked) == 1 else ["93.184.215.14", "127.0.0.1"]
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (address, port)) for address in addresses]

    async def connect(host: str, port: int, **options: Any) -> Any:
        opened.append(host)
        raise ConnectionRefusedError("refused")

    monkeypatch.setattr(loop, "getaddrinfo", resolve)
    monkeypatch.setattr(asyncio, "open_connection", connect)
    assert "refused" in (await post(Webhook("http://example.com/", 5))).detail
    assert "127.0.0.1" in (await post(Webhook("http://example.com/", 5))).detail
    assert (asked, opened) == (["example.com", "example.com"], ["93.184.215.14"])


@pytest.mark.contract("BUS-1")
async def test_redirects_are_not_followed_and_answers_are_bounded() -> None:
    async with Receiver().serve() as receiver:
        webhook = Webhook(receiver.url, 5, allow_private=True)
        receiver.status = 302
        answer = await post(webhook)
        assert (answer.is_success, answer.is_rejected) == (False, False)
        assert "redirects are not followed" in answer.detail
        receiver.status, receiver.padding = 200, 10 * ANSWER_BYTES
        assert (await post(webhook)).is_success
        receiver.padding = 0
        for status, is_rejected in ((400, True), (413, True), (500, False), (429, False), (404, False)):
            receiver.status = status
            assert (await post(webhook)) == Answer(
                is_success=False, detail=f"the answer is {status}", is_rejected=is_rejected
            )
        webhook.close()


@pytest.mark.contract("BUS-1")
async def test_time_is_bounded() -> None:
    async with Receiver().serve() as receiver:
        receiver.delay_s = 30.0
        webhook = Webhook(receiver.url, 0.05, allow_private=True)
        assert "no answer within 0.05 s" in (await post(webhook)).detail
        webhook.close()


async def test_a_connection_that_was_closed_meanwhile_is_replaced() -> None:
    receiver = Receiver()
    webhook = Webhook("http://127.0.0.1:1/", 5, allow_private=True)
    async with receiver.serve():
        webhook = Webhook(receiver.url, 5, allow_private=True)
        assert (await post(webhook)).is_success
    async with receiver.serve():
        assert (await post(webhook)).is_success
    webhook.close()


@pytest.mark.contract("BUS-1")
@pytest.mark.parametrize("host", ["a..b", ".example.com", "a" * 64 + ".com"])
async def test_a_name_that_is_none_is_an_answer_and_is_refused_when_a_sink_is_put(host: str) -> None:
    answer = await post(Webhook(f"https://{host}/hook", 5))
    said = answer.detail.split(":")[0]
    assert (answer.is_success, said) == (False, "UnicodeEncodeError" if sys.version_info >= (3, 13) else "UnicodeError")
    with pytest.raises(InvalidInput, match="a host"):
        check_sink(Sink(name="hook", kind="webhook", address=f"https://{host}/hook", secret="hook"))
