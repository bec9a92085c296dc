"""Redaction: replaces the values of secrets in text and in JSON by their names.

A value is found in plain text, and escaped as JSON, as Python's `repr` or for a URL, in any mixture of escaped and
plain characters, three layers deep; in hexadecimal; and in base64, with either alphabet, at any offset of the input.
The text is decoded and searched, instead of encoding the value in all possible ways. So no pattern is made from a
value, and a search takes linear time, whatever the text. The text is decoded only if it contains a part of the value
that is rarely escaped, or escapes of characters that rarely are; origins are traced only if the value is found.

A value that was changed in another way is not found: truncated, hashed, encrypted, or in other case.
"""

import re
from base64 import b64encode
from bisect import bisect_right
from collections.abc import Callable, Iterator, Mapping
from typing import Any
from urllib.parse import unquote_to_bytes

from msgspec import Raw

from holdfast.core import codec
from holdfast.limits import SECRET_CHARS_LEAST

LINE_CHARS = 8
"""The least length of a line, in a multi-line value such as a private key, to be redacted by itself."""

NUMBER_CHARS = 8
"""The least length of a value of digits to be redacted from numbers too: shorter ones occur by chance."""

_ESCAPED = re.compile(
    rb"\\(?:"
    rb"u(?:[dD][89abAB][0-9a-fA-F]{2}\\u[dD][c-fC-F][0-9a-fA-F]{2}|(?![dD][89a-fA-F])[0-9a-fA-F]{4})"
    rb"|x[0-9a-fA-F]{2}|U00(?:0[0-9a-fA-F]|10)[0-9a-fA-F]{4}"
    rb"|[btnfr\"'/\\])"
)
_CHARACTER = re.compile(rb"\\x[89a-fA-F]")
_SHORT = {b"b": b"\b", b"t": b"\t", b"n": b"\n", b"f": b"\f", b"r": b"\r"}
_NUMERIC = re.compile(rb"\\[uxU]")
_PERCENT = re.compile(rb"%[0-9a-fA-F]{2}")
_UNRESERVED = re.compile(rb"[A-Za-z0-9_.~-]{3,}")
_UNUSUAL = re.compile(
    rb"%(?:25)*(?:2[dDeE]|3[0-9]|4[1-9a-fA-F]|5[0-9aAfF]|6[1-9a-fA-F]|7[0-9aAeE])"
    rb"|(?:\\|%(?:25)*5[cC])(?:u00|x|U000000)[2-7]"
)
"""Escapes of characters that are usually not escaped: letters, digits, and `_.~-`."""
_URL_SAFE = bytes.maketrans(b"+/", b"-_")

_LAYERS = 3
"""How many layers of escapes are decoded, such as JSON in a URL in JSON."""


class Redactor:
    """Replaces the values of some secrets by their names."""

    __slots__ = ("_anchors", "_numbers", "_wanted")

    def __init__(self, values: Mapping[str, str]) -> None:
        self._wanted: dict[bytes, str] = {}
        """The searched forms, each with the name of the secret that it reveals."""
        self._anchors: set[bytes] = set()
        """A part of each form that every text with the form contains, unless it has unusual escapes."""
        self._numbers: dict[bytes, str] = {}
        self.add(values)

    def add(self, values: Mapping[str, str]) -> None:
        """Replace these values too. A thread that is redacting at the same time may miss them."""
        wanted = dict(self._wanted)
        for name, value in values.items():
            for form in _forms(value):
                wanted.setdefault(form, name)
        self._wanted = wanted
        self._anchors = {max(_UNRESERVED.findall(form), key=len, default=b"") for form in wanted}
        self._numbers = self._numbers | {
            value.encode(): name for name, value in values.items() if len(value) >= NUMBER_CHARS and value.isascii()
        }

    def text(self, text: str) -> str:
        """Return the text with names instead of values."""
        data = text.encode(errors="surrogatepass")
        if not self._may_show(data) or not self._shows(data, _LAYERS, set()):
            return text
        parts, last = [], 0
        for start, end, name in _merged(self._find(_View(data), _LAYERS, set())):
            parts += [data[last:start], _mark(name).encode()]
            last = end
        return b"".join([*parts, data[last:]]).decode(errors="replace")

    def json(self, raw: Raw) -> Raw:
        """Return a JSON value with names instead of values in its texts, including keys, and its numbers."""
        if not self._may_show(bytes(raw)):
            return raw
        value = codec.decode(raw, Any)
        redacted = self._plain(value)
        return raw if redacted == value else codec.encode(redacted)

    def _may_show(self, data: bytes) -> bool:
        """Return whether a text may show a value, so that decoding it is worthwhile."""
        if any(anchor in data for anchor in self._anchors):
            return True
        return (b"\\" in data or b"%" in data) and _UNUSUAL.search(data) is not None

    def _shows(self, data: bytes, layers: int, seen: set[bytes]) -> bool:
        """Return whether a text shows a value, after decoding up to this many layers of escapes."""
        if data in seen:  # already reached by another way of decoding
            return False
        seen.add(data)
        if any(form in data for form in self._wanted):
            return True
        return layers > 0 and any(self._shows(inner, layers - 1, seen) for inner in _decoded(data))

    def _plain(self, value: Any) -> Any:
        match value:
            case str():
                return self.text(value)
            case dict():
                return {self.text(key): self._plain(inner) for key, inner in value.items()}
            case list():
                return [self._plain(inner) for inner in value]
            case int() | float() if not isinstance(value, bool):
                digits = bytes(codec.encode(value))
                return next((_mark(name) for form, name in self._numbers.items() if form in digits), value)
            case _:
                return value

    def _find(self, view: "_View", layers: int, seen: set[bytes]) -> list[tuple[int, int, str]]:
        """Return the spans of the values, each with the name of its secret."""
        spans: list[tuple[int, int, str]] = []
        if view.data in seen:  # the same by another way
            return spans
        seen.add(view.data)
        for form, name in self._wanted.items():
            start = view.data.find(form)
            while start >= 0:
                spans.append((*view.origin(start, start + len(form)), name))
                start = view.data.find(form, start + len(form))
        if layers:
            for inner in view.decoded():
                spans += self._find(inner, layers - 1, seen)
        return spans


def _decoded(data: bytes) -> Iterator[bytes]:
    """Return the same texts as `_View.decoded`, without their origins, in a tenth of the time."""
    if b"\\" in data:
        if _NUMERIC.search(data):
            yield _ESCAPED.sub(lambda found: _unescaped(found[0]), data)
            if _CHARACTER.search(data):
                yield _ESCAPED.sub(lambda found: _unescaped_character(found[0]), data)
        else:
            plain = data.replace(b"\\\\", _NO_TEXT)
            for kind in (b"b", b"t", b"n", b"f", b"r", b'"', b"'", b"/"):
                plain = plain.replace(b"\\" + kind, _SHORT.get(kind, kind))
            yield plain.replace(_NO_TEXT, b"\\")
    if b"%" in data:
        yield unquote_to_bytes(data)


_NO_TEXT = b"\xff\xfe"
"""Bytes that never occur in UTF-8 text."""


class _View:
    """A text with one more layer of escapes decoded, and the origin of each part of it."""

    __slots__ = ("_here", "_outer", "_there", "data")

    def __init__(
        self, data: bytes, outer: "_View | None" = None, here: list[int] | None = None, there: list[int] | None = None
    ) -> None:
        self.data = data
        self._outer = outer
        # Positions, in this text and in the outer one, at which plain and decoded parts alternately begin.
        self._here = here or [0]
        self._there = there or [0]

    def decoded(self) -> "Iterator[_View]":
        """Return, for each kind of escapes in the text, the text with these escapes decoded."""
        if b"\\" in self.data:
            yield from self._decoded(_ESCAPED, _unescaped)
            if _CHARACTER.search(self.data):  # `repr` of text escapes characters like this, that of bytes escapes bytes
                yield from self._decoded(_ESCAPED, _unescaped_character)
        if b"%" in self.data:
            yield from self._decoded(_PERCENT, lambda found: bytes([int(found[1:], 16)]))

    def _decoded(self, pattern: re.Pattern[bytes], decode: Callable[[bytes], bytes]) -> "Iterator[_View]":
        parts: list[bytes] = []
        here, there = [0], [0]
        size = last = 0
        for found in pattern.finditer(self.data):
            start, end = found.span()
            plain = decode(found[0])
            parts += [self.data[last:start], plain]
            begins = size + start - last
            size, last = begins + len(plain), end
            here += [begins, size]
            there += [start, end]
        if parts:
            yield _View(b"".join([*parts, self.data[last:]]), self, here, there)

    def origin(self, start: int, end: int) -> tuple[int, int]:
        """Return the span of the outermost text from which this part was decoded."""
        if self._outer is None:
            return start, end
        first, last = bisect_right(self._here, start) - 1, bisect_right(self._here, end - 1) - 1
        begins = self._there[first] if first % 2 else self._there[first] + start - self._here[first]
        ends = self._there[last + 1] if last % 2 else self._there[last] + end - self._here[last]
        return self._outer.origin(begins, ends)


def _unescaped(found: bytes) -> bytes:
    kind, rest = found[1:2], found[2:]
    if kind in b"uU":
        if len(rest) > 8:  # a pair of surrogates
            high, low = int(rest[:4], 16), int(rest[6:], 16)
            return chr(0x10000 + ((high - 0xD800) << 10) + (low - 0xDC00)).encode()
        return chr(int(rest, 16)).encode(errors="surrogatepass")
    if kind == b"x":
        return bytes([int(rest, 16)])
    return _SHORT.get(kind, kind)


def _unescaped_character(found: bytes) -> bytes:
    kind, code = found[1:2], found[2:]
    return chr(int(code, 16)).encode() if kind == b"x" else _unescaped(found)


def _forms(value: str) -> Iterator[bytes]:
    """Return the forms that reveal a value: the whole, without surrounding space, and each longer line of it."""
    whole = [value, value.strip()]
    lines = [line.strip() for line in value.splitlines()] if len(value.splitlines()) > 1 else []
    shown = [*whole, *(line for line in lines if len(line) >= LINE_CHARS)]
    for text in dict.fromkeys(shown):
        if len(text) >= SECRET_CHARS_LEAST:
            yield from _forms_of(text)


def _forms_of(text: str) -> Iterator[bytes]:
    data = text.encode()
    yield data
    yield text.replace(" ", "+").encode()  # a form's space, after the rest is decoded
    if not text.isascii() and max(text) < "\u0100":
        yield text.encode("latin-1")  # the encoding of HTTP headers
    yield data.hex().encode()
    yield data.hex().upper().encode()
    for offset, unlike in ((0, 0), (1, 2), (2, 3)):
        # Without the characters that depend on the text before and after the value.
        code = b64encode(bytes(offset) + data)[unlike : (offset + len(data)) * 8 // 6]
        yield code
        yield code.translate(_URL_SAFE)


def _merged(spans: list[tuple[int, int, str]]) -> Iterator[tuple[int, int, str]]:
    """Return the spans in order, with overlapping ones merged."""
    [(start, end, name), *rest] = sorted(spans, key=lambda span: (span[0], -span[1]))
    for next_start, next_end, next_name in rest:
        if next_start < end:
            end = max(end, next_end)
        else:
            yield start, end, name
            start, end, name = next_start, next_end, next_name
    yield start, end, name


def _mark(name: str) -> str:
    return f"[redacted: {name}]"
