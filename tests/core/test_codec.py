"""Values and bodies as JSON and back: canonical, typed, never falling back, and across schema versions."""

from collections.abc import Callable
from dataclasses import dataclass
from datetime import date, datetime, time, timedelta
from decimal import Decimal
from enum import Enum
from typing import Any
from uuid import UUID

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import Raw

from holdfast.core import codec
from holdfast.core import events as e
from holdfast.core.events import Body, CallerRef, EngineRunRef, UnknownBody
from holdfast.errors import CorruptHistory, InvalidInput
from tests.core.driver import Driver
from tests.core.event_bodies import SAMPLES

ANN = CallerRef("0123456789abcdef", "ann")
BY_NAME = [pytest.param(msgspec.structs.replace(body, by=ANN), id=type(body).__name__) for body, _ in SAMPLES]

json_values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**64 - 1)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(alphabet=st.characters(exclude_categories=["Cs"])),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text("abé", max_size=3), inner, max_size=4),
    max_leaves=12,
)


@dataclass
class Point:
    """A user's type."""

    x: int
    y: float = 0.0


class Colour(Enum):
    """A user's enumeration with a value that JSON cannot hold."""

    UNDEFINED = float("nan")


# --- values


@given(json_values)
def test_a_value_survives_json(value: object) -> None:
    assert codec.decode(codec.encode(value), object) == value


@pytest.mark.contract("QUE-1", "SIG-5")
def test_equal_values_have_equal_digests_whatever_the_order_of_their_keys() -> None:
    one, other = codec.encode({"b": 1, "a": {"d": 2, "c": 3}}), codec.encode({"a": {"c": 3, "d": 2}, "b": 1})
    assert bytes(one) == b'{"b":1,"a":{"d":2,"c":3}}'
    assert codec.value_digest(one) == codec.value_digest(other) == codec.digest(b'{"a":{"c":3,"d":2},"b":1}')
    assert codec.encode({"b", "a"}) == codec.encode(["a", "b"])


def test_a_digest_is_the_sha256_of_the_bytes() -> None:
    expected = "74234e98afe7498fb5daf1f36ac2d78acc339464f950703b8c019892f982b90b"  # printf null | sha256sum
    assert codec.digest(codec.encode(None)) == codec.digest(b"null") == expected


def _loop() -> list[Any]:
    loop: list[Any] = []
    loop.append(loop)
    return loop


@pytest.mark.contract("API-2")
@pytest.mark.parametrize(
    "value",
    [
        pytest.param(object(), id="object"),
        pytest.param(lambda: None, id="function"),
        pytest.param({1: "a"}, id="number as key"),
        pytest.param({"a": {(1, 2): 3}}, id="tuple as key"),
        pytest.param({1, "a"}, id="set that cannot be sorted"),
        pytest.param("\ud800", id="lone surrogate"),
        pytest.param(_loop(), id="loop"),
        pytest.param(float("nan"), id="NaN"),
        pytest.param([1, {"a": float("inf")}], id="infinity in a dict"),
        pytest.param((None, -float("inf")), id="infinity in a tuple"),
        pytest.param(Point(1, float("nan")), id="NaN in a dataclass"),
        pytest.param(Colour.UNDEFINED, id="NaN in an enumeration"),
    ],
)
def test_a_value_that_has_no_json_is_refused_and_never_stored_as_something_else(value: object) -> None:
    with pytest.raises(InvalidInput, match="cannot be stored"):
        codec.encode(value)


@pytest.mark.contract("API-2")
def test_what_is_wrong_with_a_key_is_said_in_plain_words() -> None:
    with pytest.raises(
        InvalidInput, match="of type list cannot be stored: the keys of a JSON object are text"
    ) as caught:
        codec.encode([{1: "a"}])
    assert "order" not in str(caught.value)


def test_none_and_raw_json_are_stored_as_they_are() -> None:
    assert bytes(codec.encode(None)) == b"null"
    assert bytes(codec.encode({"a": None, "b": Raw(b"[null]")})) == b'{"a":null,"b":[null]}'
    assert bytes(codec.encode("null and void")) == b'"null and void"'


@pytest.mark.contract("API-2")
@pytest.mark.parametrize(
    ("raw", "kind"),
    [
        (b'{"x": "one"}', Point),
        (b'{"y": 1.0}', Point),
        (b"[1]", Point),
        (b'"1"', int),
        (b"1.5", int),
        (b"{", object),
        (b"", object),
        (b'"\xff"', object),
        (b"[" * 100_000, object),
        (b"1e400", float),
    ],
)
def test_a_value_that_does_not_fit_its_type_raises_and_never_falls_back_to_a_dict(raw: bytes, kind: type[Any]) -> None:
    with pytest.raises(InvalidInput, match="does not fit"):
        codec.decode(raw, kind)


def test_a_value_that_fits_has_the_type_that_was_asked_for() -> None:
    assert codec.decode(Raw(b'{"x":1,"y":2.5}'), Point) == Point(1, 2.5)
    assert codec.decode('{"x":1}', Point) == Point(1)


# --- bodies


@pytest.mark.contract("EVT-3")
@pytest.mark.parametrize("body", BY_NAME)
def test_every_body_survives_json_with_all_of_its_fields(body: Body) -> None:
    text = codec.encode_body(body)
    read = codec.decode_body(type(body).__name__, 1, text)
    assert read == body
    assert type(read) is type(body)
    assert codec.encode_body(read) == text
    assert codec.decode_body(type(body).__name__, 1, text.encode()) == body


@pytest.mark.contract("EVT-3")
@pytest.mark.parametrize("body", BY_NAME)
def test_the_samples_leave_no_field_at_its_default(body: Body) -> None:
    # Otherwise the test above would not notice a field that is lost.
    assert set(msgspec.to_builtins(msgspec.json.decode(codec.encode_body(body)))) == set(body.__struct_fields__)


@pytest.mark.contract("EVT-3", "FMT-1")
@pytest.mark.parametrize(
    "text", ['{"z":1,  "a" : [null, 1.50, "\\u00e9é"]}', "[]", "null", '"x"', '{"name":"a","name":"b"}']
)
def test_a_body_of_an_unknown_type_is_preserved_byte_for_byte(text: str) -> None:
    body = codec.decode_body("FromTheFuture", 1, text)
    assert isinstance(body, UnknownBody)
    assert codec.encode_body(body) == text
    assert codec.encode_body(codec.decode_body("FromTheFuture", 7, text.encode())) == text


@pytest.mark.contract("FMT-1")
def test_a_body_of_a_newer_version_is_preserved_byte_for_byte() -> None:
    text = '{"name":{"first":"charge"}, "input":[1]}'
    body = codec.decode_body("StepStarted", 2, text)
    assert isinstance(body, UnknownBody)
    assert codec.encode_body(body) == text


@pytest.mark.contract("FMT-1")
def test_a_field_that_a_newer_writer_added_is_ignored() -> None:
    assert codec.decode_body("RunPaused", 1, '{"reason":"x","colour":"red"}') == e.RunPaused("x")


@pytest.mark.contract("FMT-1")
def test_a_field_that_an_older_writer_did_not_know_has_its_default() -> None:
    assert codec.decode_body("SignalReceived", 1, '{"name":"a","signal_id":"b","suffix":"c"}') == e.SignalReceived(
        "a", "b", "c"
    )


@pytest.mark.contract("MSG-3")
@pytest.mark.parametrize(
    ("event_type", "version", "text"),
    [
        ("StepStarted", 1, "{"),
        ("StepStarted", 1, "[]"),
        ("StepStarted", 1, '{"name":7}'),
        ("StepStarted", 1, "{}"),
        ("StepStarted", 1, b'{"name":"\xff"}'),
        ("StepStarted", 1, '{"name":"a","input":' + "[" * 100_000),
        ("StepStarted", 0, '{"name":"a"}'),
        ("StepStarted", -1, '{"name":"a"}'),
        ("StepStarted", 2, "{"),
        ("FromTheFuture", 1, "{"),
        ("FromTheFuture", 1, ""),
        ("FromTheFuture", 1, b'"\xff"'),
        ("FromTheFuture", 1, "[" * 100_000),
        ("FromTheFuture", 1, '"\ud800"'),
    ],
)
def test_an_unreadable_body_is_a_corrupt_history(event_type: str, version: int, text: str | bytes) -> None:
    with pytest.raises(CorruptHistory, match=event_type):
        codec.decode_body(event_type, version, text)


# --- schema versions


class RunPausedV3(e.RunBody, frozen=True):
    """RunPaused as it might be one day: the reason is now a list, and there is a person."""

    reasons: tuple[str, ...]
    actor: str


@pytest.fixture
def third_version(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make the present schema version of RunPaused 3, with two upcasters."""

    def to_2(plain: dict[str, Any]) -> dict[str, Any]:
        return {"reasons": [plain["reason"]], "error": plain.get("error")}

    def to_3(plain: dict[str, Any]) -> dict[str, Any]:
        return {"reasons": plain["reasons"], "actor": "unknown"}

    steps: dict[tuple[str, int], Callable[[dict[str, Any]], dict[str, Any]]]
    steps = {("RunPaused", 1): to_2, ("RunPaused", 2): to_3}
    monkeypatch.setitem(codec.SCHEMA_VERSIONS, "RunPaused", 3)
    monkeypatch.setitem(codec._decoders, "RunPaused", msgspec.json.Decoder(RunPausedV3))
    for key, upcaster in steps.items():
        monkeypatch.setitem(codec.UPCASTERS, key, upcaster)


@pytest.mark.contract("FMT-1")
@pytest.mark.usefixtures("third_version")
@pytest.mark.parametrize(
    ("version", "text", "expected"),
    [
        (1, '{"reason":"lunch"}', RunPausedV3(("lunch",), "unknown")),
        (2, '{"reasons":["lunch","rain"]}', RunPausedV3(("lunch", "rain"), "unknown")),
        (3, '{"reasons":[],"actor":"ann"}', RunPausedV3((), "ann")),
    ],
)
def test_every_older_version_is_brought_up_to_the_present_one(version: int, text: str, expected: Body) -> None:
    assert codec.decode_body("RunPaused", version, text) == expected
    assert codec.SCHEMA_VERSIONS["RunPaused"] == 3


@pytest.mark.contract("FMT-1")
@pytest.mark.usefixtures("third_version")
def test_a_version_past_the_present_one_is_preserved_and_new_events_say_their_version() -> None:
    assert isinstance(codec.decode_body("RunPaused", 4, '{"reasons":[]}'), UnknownBody)
    run = Driver().start()
    run.control("PAUSE")
    assert [event.schema_version for event in run.events] == [1, 1, 1, 3]


@pytest.mark.contract("FMT-1", "MSG-3")
@pytest.mark.usefixtures("third_version")
@pytest.mark.parametrize(
    ("version", "text"), [(1, "{}"), (1, "[]"), (1, "null"), (2, '{"reasons":7}'), (0, '{"reason":"x"}'), (1, "{")]
)
def test_a_body_that_an_upcaster_cannot_read_is_a_corrupt_history(version: int, text: str) -> None:
    with pytest.raises(CorruptHistory, match=f"schema {version}"):
        codec.decode_body("RunPaused", version, text)


@pytest.mark.contract("FMT-1")
def test_every_type_whose_version_is_past_one_has_all_upcasters() -> None:
    assert set(codec.SCHEMA_VERSIONS) <= set(e.BODIES)
    needed = {(name, step) for name, version in codec.SCHEMA_VERSIONS.items() for step in range(1, version)}
    assert set(codec.UPCASTERS) == needed


# --- references and envelopes


@pytest.mark.parametrize("ref", [EngineRunRef("n"), EngineRunRef("né", 7, "other")])
def test_an_engine_run_reference_survives_json(ref: EngineRunRef) -> None:
    assert codec.decode_ref(codec.encode_ref(ref)) == ref


@pytest.mark.contract("MSG-3")
@pytest.mark.parametrize("text", ["", "{}", '{"node":1}', "[]", b'{"node":"\xff"}'])
def test_an_unreadable_reference_is_a_corrupt_history(text: str | bytes) -> None:
    with pytest.raises(CorruptHistory):
        codec.decode_ref(text)


@pytest.mark.contract("API-2")
@pytest.mark.parametrize(
    ("kind", "text", "reason"),
    [
        (timedelta, "2 secret days", "Expected a duration in days, hours, minutes and seconds, such as P2D or PT1H30M"),
        (timedelta, "P1Y", "Expected a duration in days, hours, minutes and seconds, such as P2D or PT1H30M"),
        (datetime, "secret", "Expected a time such as 2026-01-28T12:00:00Z"),
        (date, "secret", "Expected a date such as 2026-01-28"),
        (time, "secret", "Expected a time of day such as 12:00:00"),
        (UUID, "secret", "Invalid UUID"),
        (Decimal, "secret", "Invalid decimal string"),
        (bytes, "secret", "Invalid base64 encoded string"),
    ],
)
def test_what_has_the_wrong_form_is_explained_without_being_quoted(kind: type, text: str, reason: str) -> None:
    with pytest.raises(msgspec.ValidationError) as caught:
        msgspec.convert({"when": text}, dict[str, kind])  # type: ignore[valid-type]
    assert codec.explain_unfit(caught.value)[1] == reason
