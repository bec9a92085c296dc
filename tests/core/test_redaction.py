"""The values of secrets are found in text and JSON, however they are written there."""

import json
import os
from functools import partial
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from holdfast.core import codec
from holdfast.core.redaction import Redactor
from tests.process_state import cpu_seconds
from tests.secret_forms import FORMS, leaks

pytestmark = pytest.mark.contract("SEC-1")

MARK = "[redacted: stripe/key]"
EXAMPLES = int(os.environ.get("TEST_EXAMPLES", "3")) * len(FORMS)
VALUES = [
    "sk_live_51HxYzAbC",
    'p"a\\ss/w+ör d\n€',
    "100%25 sure",
    "tab\there 'quoted'",
    "😀 emoji key",
    "cafébabe",
    "aaaa",
    "12345678",
]


@pytest.mark.parametrize("value", VALUES)
@pytest.mark.parametrize("form", FORMS)
def test_a_value_is_found_in_every_form(form: str, value: str) -> None:
    if form == "json, all characters escaped" and any(ord(character) > 0xFFFF for character in value):
        value = "no pairs here"
    text = f"before {FORMS[form](value)} behind"
    redacted = Redactor({"stripe/key": value}).text(text)
    assert MARK in redacted, f"{text!r} became {redacted!r}"
    assert redacted.startswith("before ")
    assert redacted.endswith(" behind")
    assert not leaks(redacted.encode(), value)


@pytest.mark.slow
@settings(max_examples=EXAMPLES)
@given(
    form=st.sampled_from(sorted(FORMS)),
    value=st.text(st.characters(codec="utf-8"), min_size=4),
    before=st.text(max_size=5),
    after=st.text(),
)
def test_any_value_is_found_in_every_form(form: str, value: str, before: str, after: str) -> None:
    if len(value.strip()) < 4 or (form == "json, all characters escaped" and any(ord(c) > 0xFFFF for c in value)):
        return
    text = f"{before!a} {FORMS[form](value)} {after!a}"
    assert MARK in Redactor({"stripe/key": value}).text(text)


@given(text=st.text())
def test_what_holds_no_value_stays_as_it_is(text: str) -> None:
    redactor = Redactor({"stripe/key": "sk_live_51HxYzAbC"})
    assert redactor.text(text) == text
    raw = codec.encode({"text": text.encode(errors="replace").decode()})
    assert redactor.json(raw) is raw


def test_only_the_value_is_replaced() -> None:
    redactor = Redactor({"a": "first-key", "b": "second-key"})
    assert redactor.text("x first-key y second-key z %41 \\n") == "x [redacted: a] y [redacted: b] z %41 \\n"
    assert redactor.text("/?a=first%2Dkey&b=%20") == "/?a=[redacted: a]&b=%20"
    assert redactor.text("first-keyfirst-key") == "[redacted: a][redacted: a]"


def test_a_value_inside_another_leaves_nothing_of_either() -> None:
    redactor = Redactor({"short": "hunter2", "long": "my-hunter2-key"})
    assert redactor.text("my-hunter2-key, hunter2") == "[redacted: long], [redacted: short]"


def test_each_line_of_a_private_key_is_redacted() -> None:
    lines = ["-----BEGIN PRIVATE KEY-----", "MIIEvQIBADANBgkqhkiG9w0BAQEF", "AASCBKcwggSjAgEAAoIBAQC7", "==="]
    redactor = Redactor({"tls": "\n".join(lines) + "\n"})
    for line in lines[:3]:
        assert redactor.text(f"bad line: {line}!") == "bad line: [redacted: tls]!"
    assert redactor.text("a === b") == "a === b"
    assert redactor.text("\r\n".join(lines)).count("[redacted: tls]") == 3


def test_a_value_is_found_without_the_space_around_it() -> None:
    assert Redactor({"key": " hunter2\n"}).text("(hunter2)") == "([redacted: key])"


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        ("a hunter2-key b", f"a {MARK} b"),
        ({"hunter2-key": 1}, {MARK: 1}),
        ([{"deep": ["hunter2-key"]}], [{"deep": [MARK]}]),
        (json.dumps({"k": "hunter2-key"}), json.dumps({"k": MARK})),
        ({"n": 1.5, "b": True, "none": None}, {"n": 1.5, "b": True, "none": None}),
    ],
)
def test_values_in_json_are_redacted_wherever_they_stand(value: Any, expected: Any) -> None:
    redacted = Redactor({"stripe/key": "hunter2-key"}).json(codec.encode(value))
    assert json.loads(bytes(redacted)) == expected


def test_bytes_that_hold_a_value_are_redacted() -> None:
    raw = codec.encode({"body": b"POST /?key=hunter2-key HTTP/1.1"})
    redacted = Redactor({"stripe/key": "hunter2-key"}).json(raw)
    assert MARK in json.loads(bytes(redacted))["body"]


def test_numbers_are_redacted_if_the_value_is_long_enough_not_to_be_there_by_chance() -> None:
    redactor = Redactor({"account": "4711471147", "pin": "1234"})
    found = json.loads(bytes(redactor.json(codec.encode([4711471147, 1234, 12345, 0.1, "1234"]))))
    assert found == ["[redacted: account]", 1234, 12345, 0.1, "[redacted: pin]"]


def test_json_stays_json_whatever_the_value_is() -> None:
    for value in ('":["', "true", "null", '\\"\\"', "},{\n", "\\\\\\\\"):
        raw = codec.encode({"a": value, "b": [True, None, f"x{value}"], "c": '"'})
        redacted = json.loads(bytes(Redactor({"key": value}).json(raw)))
        assert redacted == {"a": "[redacted: key]", "b": [True, None, "x[redacted: key]"], "c": '"'}, value


@pytest.mark.parametrize("piece", ["\\", "%", "%41", "\\u0041", "a"])
def test_redacting_a_text_takes_time_as_its_size(piece: str) -> None:
    redactor = Redactor({"a": "\\\\\\\\", "b": "%41%41", "c": "aaaab", "d": "aaaa"})
    few, many = (partial(redactor.text, piece * (size // len(piece))) for size in (50_000, 400_000))
    first = max(0.002, cpu_seconds(few))
    assert cpu_seconds(many) <= 24 * first, "8 times the text takes 8 times the time, not 64 times"


def test_what_a_long_text_hides_is_redacted() -> None:
    redactor = Redactor({"a": "\\\\\\\\", "c": "aaaab", "d": "aaaa"})
    assert "aaaa" not in redactor.text("a" * 500_000)


def test_text_with_lone_surrogates_is_redacted_too() -> None:
    assert "hunter2" not in Redactor({"key": "hunter2"}).text("\ud800 hunter2 \udfff")
