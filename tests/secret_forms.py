"""The forms in which a secret can leak, and a search for them that shares nothing with the redaction."""

import base64
import json
import re
from binascii import Error
from collections.abc import Callable, Iterator
from urllib.parse import quote, quote_plus


def lower_hex(text: str) -> str:
    """Return a text whose percent escapes are in lower case."""
    return re.sub(r"%[0-9A-F]{2}", lambda found: found[0].lower(), text)


def embedded(before: bytes, after: bytes) -> Callable[[str], str]:
    """Return what encodes a value in base64 with something around it."""
    return lambda value: base64.b64encode(before + value.encode() + after).decode()


FORMS: dict[str, Callable[[str], str]] = {
    "plain": lambda value: value,
    "json": lambda value: json.dumps(value)[1:-1],
    "json in Unicode": lambda value: json.dumps(value, ensure_ascii=False)[1:-1],
    "json with escaped slashes": lambda value: json.dumps(value)[1:-1].replace("/", "\\/"),
    "json, all characters escaped": lambda value: "".join(f"\\u{ord(c):04X}" for c in value if ord(c) < 0x10000),
    "json in json": lambda value: json.dumps(json.dumps({"key": value})),
    "repr": repr,
    "repr of bytes": lambda value: repr(value.encode()),
    "url": lambda value: quote(value, safe=""),
    "url, path": quote,
    "url, query": quote_plus,
    "url, lower case": lambda value: lower_hex(quote(value, safe="")),
    "url, form, lower case": lambda value: lower_hex(quote_plus(value)),
    "url, every byte": lambda value: "".join(f"%{byte:02X}" for byte in value.encode()),
    "url in json": lambda value: json.dumps({"url": f"/?key={quote(value)}&a=%20"}),
    "json in url": lambda value: quote(json.dumps({"key": value})),
    "url twice": lambda value: quote(quote(value)),
    "hex": lambda value: value.encode().hex(),
    "hex, upper case": lambda value: value.encode().hex().upper(),
    "base64": lambda value: base64.b64encode(value.encode()).decode(),
    "base64 without padding": lambda value: base64.b64encode(value.encode()).decode().rstrip("="),
    "base64, urlsafe": lambda value: base64.urlsafe_b64encode(value.encode()).decode(),
    "base64 of a pair": embedded(b"user:", b""),
    "base64, offset 1": embedded(b"x", b"yz"),
    "base64, offset 2": embedded(b"xy", b"z"),
    "base64, offset 3": embedded(b"xyz", b"xyz"),
    "base64 in a url": lambda value: quote_plus(base64.b64encode(b"a:" + value.encode()).decode()),
}

_RUNS = re.compile(rb"[A-Za-z0-9+/_-]{6,}")


def leaks(data: bytes, value: str) -> set[str]:
    """Return the forms in which bytes, of a file or of JSON, show a value."""
    found = set()
    for name, form in FORMS.items():
        shown = form(value)
        once = json.dumps(shown, ensure_ascii=False)[1:-1]
        twice = json.dumps(once, ensure_ascii=False)[1:-1]
        if any(each.encode() in data for each in (shown, once, twice, json.dumps(shown)[1:-1])):
            found.add(name)
    if any(value.encode() in decoded for decoded in _decoded(data)):
        found.add("base64, decoded")
    return found


def _decoded(data: bytes) -> Iterator[bytes]:
    """Return what stands in base64 in the bytes, from every offset."""
    for run in set(_RUNS.findall(data)):
        for offset in range(4):
            code = run[offset:].translate(bytes.maketrans(b"-_", b"+/"))
            try:
                yield base64.b64decode(code + b"=" * (-len(code) % 4))
            except Error:
                yield base64.b64decode(code[: len(code) // 4 * 4])
