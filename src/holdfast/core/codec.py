"""Values and events as JSON and back, and what happens when formats change.

**User values** are encoded as JSON in their own order: dicts and fields are decoded as they were.
Sets, which have no order, are sorted, so that every process writes them alike. Only `value_digest` uses the canonical
form (keys sorted, no spaces): equal values have equal digests, however their JSON was written. A value that cannot be
encoded, or does not fit the type it is read as, raises an error; there is no fallback. NaN and the infinities have no
JSON, so they are refused. `Encoders` have a function for types that JSON does not know.

**Event bodies** carry the schema version of their type. `SCHEMA_VERSIONS` names the types whose version is past 1;
`UPCASTERS[type, n]` turns the plain dict of version n into that of n + 1. A body of an unknown type, or of a newer
version than this one knows, becomes an `UnknownBody`: it is preserved unchanged and readers skip it.

**Instants** are ISO 8601 in UTC with a fixed width, so that sorting the text sorts the time: signal keys on object
storage depend on it.
"""

import re
from collections.abc import Callable
from datetime import datetime, timedelta
from functools import lru_cache
from hashlib import sha256
from itertools import accumulate
from math import isfinite
from typing import Any, TypeVar

import msgspec
from msgspec import Raw

from holdfast.core.events import BODIES, NULL, Body, EngineRunRef, UnknownBody
from holdfast.core.instants import EPOCH, Instant, instant_of
from holdfast.errors import CorruptHistory, InvalidInput, PayloadTooLarge, PayloadUnreadable
from holdfast.limits import JSON_DEPTH

T = TypeVar("T")

SCHEMA_VERSIONS: dict[str, int] = {"ContinuedAsNew": 2}
"""The current schema version of each event type; types that are not listed are at 1.

Version 2 of ContinuedAsNew carries steps over. A rotation without steps is written as 1, so that older versions can
read it.
"""


def unchanged(plain: dict[str, Any]) -> dict[str, Any]:
    """Return a body unchanged: the next version has the same form."""
    return plain


UPCASTERS: dict[tuple[str, int], Callable[[dict[str, Any]], dict[str, Any]]] = {("ContinuedAsNew", 1): unchanged}
"""From (event type, version) to the function that makes the next version's dict."""


class Encoders:
    """The encoders of values. `to_plain` is called only for values of types that msgspec does not know."""

    __slots__ = ("canonical", "in_order", "to_plain")

    def __init__(self, to_plain: Callable[[Any], Any] | None = None) -> None:
        self.to_plain = to_plain
        self.canonical = msgspec.json.Encoder(order="deterministic", enc_hook=to_plain)
        self.in_order = msgspec.json.Encoder(enc_hook=to_plain)

    def builtins_of(self, value: object) -> Any:
        """Return a value as builtins. Raw JSON becomes None: it cannot contain numbers that are not finite."""
        return msgspec.to_builtins(value, enc_hook=self._or_none)

    def _or_none(self, value: Any) -> Any:
        return None if self.to_plain is None or type(value) is Raw else self.to_plain(value)


class Misfit(ValueError):
    """Why a value does not fit a type that is converted by code. `where` and `reason` reveal nothing of the value."""

    def __init__(self, message: str, where: str, reason: str) -> None:
        super().__init__(message)
        self.where = where
        self.reason = reason


_PLAIN = Encoders()
_canonical = _PLAIN.canonical
_encoder = _PLAIN.in_order
_decoders = {name: msgspec.json.Decoder(body) for name, body in BODIES.items()}
_plain = msgspec.json.Decoder()
# A string from its first quote to its last, or to the end of the text. It always matches after a quote, so no byte is
# read twice, whatever a caller sends.
_STRING = re.compile(rb'"(?:[^"\\]++|\\.)*+"?', re.DOTALL)
_UNSUPPORTED = re.compile(r"Encoding objects of type (\S+) is unsupported")
_NO_BRACKET = bytes(set(range(256)) - set(b"[]{}"))
_STEPS = bytes.maketrans(b"[]{}", b"\x01\xff\x01\xff")
_CHUNK = 64 * 1024

SEAL = "$holdfast"
"""The first key of a sealed value, which is the output of a payload codec (`store/payloads.py`)."""
SEALED = b'{"$holdfast":['
"""The prefix of a sealed value."""

_UNREADABLE = (msgspec.ValidationError, msgspec.DecodeError, UnicodeError, RecursionError)


def encode(value: object, using: Encoders = _PLAIN, depth: int = JSON_DEPTH) -> Raw:
    """Return the value as JSON, in its own order; raise `InvalidInput` if it would be decoded as another value."""
    if value is None:
        return NULL
    try:
        raw = using.canonical.encode(value)  # also refuses keys that are not text
        # `find` is faster than `in`, which first tries to read its operand as a number and catches the error.
        if raw.find(b",") >= 0 and raw.find(b"{") >= 0:  # else no keys could be reordered
            raw = _in_given_order(using.in_order.encode(value), raw)
        if raw.find(b"null") >= 0:  # msgspec encodes numbers that are not finite as null
            _refuse_not_finite(using.builtins_of(value))
    except (TypeError, ValueError, OverflowError, RecursionError) as problem:
        raise InvalidInput(_unstorable(value, problem)) from problem
    if len(raw) > depth and is_deeper(raw, depth):
        raise InvalidInput(f"a value is nested more than {depth} deep; keep it elsewhere and store a reference")
    return Raw(raw)


def encode_text(value: object) -> str:
    """Return one of our structs as JSON text. Its contents were checked before and are not checked again."""
    return _encoder.encode(value).decode()


def bounded(raw: Raw, most_bytes: int, what: str, setting: str = "Limits.value_bytes") -> Raw:
    """Return an encoded value, or raise `PayloadTooLarge` if it has more bytes than a history keeps for one value."""
    size = len(raw)
    if size > most_bytes:
        raise PayloadTooLarge(
            f"{what} has {size} bytes; the limit is {most_bytes}{setting and f' ({setting})'}; "
            "keep it elsewhere and store a reference",
            size_bytes=size,
            limit_bytes=most_bytes,
        )
    return raw


def _in_given_order(given: bytes, canonical: bytes) -> bytes:
    """Return the JSON in the order of the value, except for sets: they are as in the canonical form."""
    if given == canonical or b"[" not in given:  # without an array there is no set
        return given
    value, sorted_value = _plain.decode(given), _plain.decode(canonical)
    if value == sorted_value:  # only the order of dict keys differs
        return given
    return _encoder.encode(_in_order_of(value, sorted_value))


def _in_order_of(given: Any, canonical: Any) -> Any:
    if isinstance(given, dict):
        return {key: _in_order_of(value, canonical[key]) for key, value in given.items()}
    if isinstance(given, list) and given != canonical:
        pairs = list(zip(given, canonical, strict=True))
        if all(_canonical.encode(one) == _canonical.encode(other) or _holds_set(one, other) for one, other in pairs):
            return [_in_order_of(one, other) for one, other in pairs]
        return canonical  # a set: its elements have no order
    return given


def _holds_set(given: Any, canonical: Any) -> bool:
    """Return whether two elements can be the same item of a list: a value that contains a set, in two orders."""
    if isinstance(given, dict) and isinstance(canonical, dict):
        return given.keys() == canonical.keys() and all(
            given[key] == canonical[key] or _holds_set(given[key], canonical[key]) for key in given
        )
    if isinstance(given, list) and isinstance(canonical, list) and len(given) == len(canonical):
        return sorted(map(_canonical.encode, given)) == sorted(map(_canonical.encode, canonical)) or all(
            one == other or _holds_set(one, other) for one, other in zip(given, canonical, strict=True)
        )
    return False


def decode(raw: Raw | bytes | str, kind: type[T]) -> T:
    """Return the value that `raw` holds, as `kind`; raise `InvalidInput` if it does not fit."""
    try:
        value = msgspec.json.decode(raw, type=kind)
    except _UNREADABLE as problem:
        refuse_sealed(raw)
        raise InvalidInput(f"the value does not fit {type_name(kind)}: {problem}") from problem
    if isinstance(value, dict) and SEAL in value:
        refuse_sealed(raw)
    return value


def type_name(kind: Any) -> str:
    """Return the name of a type for an error."""
    return str(getattr(kind, "__qualname__", None) or kind)


def decode_with(decoder: msgspec.json.Decoder[T], raw: Raw | bytes | str) -> T:
    """Return the value that `raw` holds, as the decoder's type. For values that are decoded often."""
    try:
        value = decoder.decode(raw)
    except _UNREADABLE as problem:
        refuse_sealed(raw)
        raise InvalidInput(f"the value does not fit {type_name(decoder.type)}: {problem}") from problem
    if isinstance(value, dict) and SEAL in value:
        refuse_sealed(raw)
    return value


def holds_sealed(raw: Raw | bytes) -> bool:
    """Return whether JSON is a sealed value or contains one."""
    return bytes(raw).find(SEALED) >= 0


def is_sealed(raw: Raw | bytes) -> bool:
    """Return whether JSON is a sealed value."""
    return bytes(raw).startswith(SEALED)


def refuse_sealed(raw: Raw | bytes | str) -> None:
    """Raise `PayloadUnreadable` if a value is still sealed: a type that accepts any field would be decoded from it."""
    text = raw.encode() if isinstance(raw, str) else bytes(raw)
    if text.startswith(SEALED):
        raise unreadable_payload()


def unreadable_payload() -> PayloadUnreadable:
    """Return the error for a value that is still sealed where its content is needed."""
    return PayloadUnreadable(
        "a value is encrypted or kept elsewhere, and cannot be opened here: its key or its content is missing"
    )


def value_digest(raw: Raw) -> str:
    """Return the SHA256 of a value, however its JSON was written."""
    return sha256(_canonical.encode(_plain.decode(raw))).hexdigest()


def check(raw: Any, field: str) -> InvalidInput | None:
    """Return why raw JSON from outside cannot be stored, or None: it must be JSON, and not nested too deep."""
    if raw is NULL:  # most messages
        return None
    if type(raw) is not Raw:
        return InvalidInput(
            f"{field} must be encoded JSON (see codec.encode), not {type(raw).__qualname__}", field=field
        )
    text = bytes(raw)
    if is_deeper(text, JSON_DEPTH):
        return InvalidInput(f"{field} is nested more than {JSON_DEPTH} deep", field=field)
    try:
        _plain.decode(text)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as problem:
        return InvalidInput(f"{field} is not JSON: {problem}", field=field)
    return None


def check_as(raw: Raw, kind: type) -> InvalidInput | None:
    """Return why JSON cannot be read as this type, or None."""
    try:
        decode(raw, kind)
    except InvalidInput as unfit:
        return unfit
    return None


INTEGER_LIMIT = 2**62
"""Every stored whole number is smaller than this, and larger than its negative."""


def check_integer(field: str, value: Any, *, optional: bool = False) -> InvalidInput | None:
    """Return why `value` cannot be stored as a whole number, or None."""
    if optional and value is None:
        return None
    if type(value) is not int or not -INTEGER_LIMIT < value < INTEGER_LIMIT:
        return InvalidInput(f"{field} must be a whole number of less than 2^62, not {value!r}", field=field)
    return None


def is_deeper(text: bytes, most: int) -> bool:
    """Return whether JSON is nested deeper than this, without decoding it: one pass, which stops where it is."""
    if text.count(b"[") + text.count(b"{") <= most:
        return False
    steps = _STRING.sub(b"", text).translate(_STEPS, _NO_BRACKET)
    depth = 0
    for start in range(0, len(steps), _CHUNK):
        depths = list(accumulate(memoryview(steps)[start : start + _CHUNK].cast("b"), initial=depth))
        if max(depths) > most:
            return True
        depth = depths[-1]
    return False


def digest(raw: Raw | bytes) -> str:
    """Return the SHA256 of encoded bytes as 64 hex digits."""
    return sha256(raw).hexdigest()


def number_of(text: str) -> int:
    """Return a 56-bit hash of the text."""
    return int.from_bytes(sha256(text.encode()).digest()[:7])


def encode_body(body: Body) -> str:
    """Return the JSON text of an event's body."""
    if type(body) is UnknownBody:
        return bytes(body.raw).decode()
    return _encoder.encode(body).decode()


def decode_body(event_type: str, version: int, text: str | bytes) -> Body:
    """Return the body that `text` holds, upgraded to the current schema version."""
    decoder = _decoders.get(event_type)
    present = SCHEMA_VERSIONS.get(event_type, 1)
    try:
        if decoder is None or version > present:
            raw = text.encode() if isinstance(text, str) else text
            _plain.decode(raw)
            return UnknownBody(Raw(raw))
        if version == present:
            return decoder.decode(text)
        return _upcast(event_type, version, present, text)
    except (*_UNREADABLE, LookupError, TypeError, AttributeError) as problem:  # an upcaster raises the last three
        raise CorruptHistory(f"the body of a {event_type} (schema {version}) is unreadable: {problem}") from problem


_ref_decoder = msgspec.json.Decoder(EngineRunRef)


@lru_cache(maxsize=1_024)
def encode_ref(ref: EngineRunRef) -> str:
    """Return the JSON text of an engine run reference."""
    return _encoder.encode(ref).decode()


def decode_ref(text: str | bytes) -> EngineRunRef:
    """Return the engine run reference that `text` holds."""
    try:
        return _ref_decoder.decode(text)
    except _UNREADABLE as problem:
        raise CorruptHistory(f"an engine run reference is unreadable: {problem}") from problem


def _unstorable(value: object, problem: Exception) -> str:
    """Return which value cannot be stored, and what to do instead."""
    outer, found = type(value).__qualname__, _UNSUPPORTED.match(str(problem))
    if found is None:
        if "str keys" in str(problem):
            problem = TypeError("the keys of a JSON object are text; use str() of them, or a list of pairs")
        return f"a value of type {outer} cannot be stored: {problem}"
    kind = found[1]
    inside = "" if kind == type(value).__name__ else f" (in a {outer})"
    instead = "str() of it" if kind.endswith("Path") else "a dataclass, a Struct or plain values"
    return f"a value of type {kind}{inside} cannot be stored; use {instead}"


def _refuse_not_finite(plain: Any) -> None:
    if isinstance(plain, float) and not isfinite(plain):
        raise ValueError(f"{plain} has no JSON")
    if isinstance(plain, dict):
        for value in plain.values():
            _refuse_not_finite(value)
    elif isinstance(plain, (list, tuple)):
        for value in plain:
            _refuse_not_finite(value)


def _upcast(event_type: str, version: int, present: int, text: str | bytes) -> Body:
    upcasters = [UPCASTERS[event_type, step] for step in range(version, present)]
    if all(upcaster is unchanged for upcaster in upcasters):
        return _decoders[event_type].decode(text)
    plain = _plain.decode(text)
    for upcaster in upcasters:
        plain = upcaster(plain)
    return _decoders[event_type].decode(_encoder.encode(plain))


def explain_unfit(problem: BaseException) -> tuple[str, str]:
    """Return where a value does not fit its type, and why, without revealing any of the value."""
    found = _WHERE.search(str(problem))
    if isinstance(problem.__cause__, Misfit):
        return f"{found[1] if found else ''}{problem.__cause__.where}", problem.__cause__.reason
    text = str(problem)[: found.start()] if found else str(problem)
    if _SAFE.match(text):
        reason = text
    else:
        reason = next((mild for start, mild in _MILD.items() if text.startswith(start)), "it does not fit")
    return found[1] if found else "", reason


_WHERE = re.compile(r" - at `(?:key in )?\$([^`]*)`$")
_SAFE = re.compile(r"Expected `|Object missing required field `|Invalid (UUID|decimal string|base64 encoded string)$")
NO_CHOICE = "Not one of the values that are declared"
_DURATION = "Expected a duration in days, hours, minutes and seconds, such as P2D or PT1H30M"
_MILD = {
    "Invalid ISO8601 duration": _DURATION,
    "Only units 'D', 'H', 'M', and 'S'": _DURATION,
    "Invalid RFC3339 encoded datetime": "Expected a time such as 2026-01-28T12:00:00Z",
    "Invalid RFC3339 encoded date": "Expected a date such as 2026-01-28",
    "Invalid RFC3339 encoded time": "Expected a time of day such as 12:00:00",
    "Object contains unknown field": "Object contains a field that is not declared",
    "Invalid enum value": NO_CHOICE,
    "Invalid value": NO_CHOICE,
}


# --- instants as text


def format_instant(instant: Instant) -> str:
    """Return the instant as `2026-01-28T12:00:00.000000Z`: always 27 characters."""
    second, microsecond = divmod(instant, 1_000_000)
    return f"{_format_second(second)}.{microsecond:06d}Z"


@lru_cache(maxsize=1_024)
def _format_second(second: int) -> str:
    return f"{EPOCH + timedelta(seconds=second):%Y-%m-%dT%H:%M:%S}"


def parse_instant(text: str) -> Instant:
    """Return the instant of an ISO 8601 text with a time zone."""
    try:
        moment = datetime.fromisoformat(text)
    except ValueError as problem:
        raise InvalidInput(f"not an ISO 8601 instant: {text!r}") from problem
    if moment.tzinfo is None:
        raise InvalidInput(f"an instant needs a zone, such as a final Z: {text!r}")
    return instant_of(moment)
