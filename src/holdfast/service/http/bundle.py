"""Joins the modules of the page into one script, and its style sheets into one: two requests instead of a hundred.

The files stay as a contributor writes them: there is no build; the service joins them when it starts. A module becomes
a function that is called once and returns its exports. Lines stay lines, so a source map with one entry per line maps
the script to the files, which are served too. This module must not read files, or parse more of the language than the
imports and exports that the page's style allows.
"""

import re
from collections.abc import Mapping, Sequence
from posixpath import dirname, join, normpath

import msgspec

from holdfast.errors import InternalError

_IMPORT = re.compile(r'^import (?:\{([^{}]*)\} from )?"([^"]+)";$', re.MULTILINE)
_EXPORT = re.compile(r"^export (?=(?:async )?(?:function\*? |class |const )(\w+))", re.MULTILINE)
_FOREIGN = re.compile(r"^(?:import|export)\b", re.MULTILINE)
_DIGITS = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/"


def join_modules(files: Mapping[str, str], entries: Sequence[str]) -> tuple[str, str]:
    """Return one script that is equivalent to these modules, and its source map."""
    order: list[str] = []
    for entry in entries:
        _visit(entry, files, order, ())
    parts = [_linked(name, files[name], order) for name in order]
    lengths = [part.count("\n") + 1 for part in parts]
    described = {"version": 3, "names": [], "sources": order, "mappings": _mappings(lengths)}
    return "\n".join(parts), msgspec.json.encode(described).decode()


def _visit(name: str, files: Mapping[str, str], order: list[str], above: tuple[str, ...]) -> None:
    """Append a module to the order, after the modules that it imports."""
    if name in order:
        return
    if name in above:
        raise InternalError(f"modules of the page import each other in a circle: {' → '.join([*above, name])}")
    if name not in files:
        raise InternalError(f"{above[-1] if above else 'the document'} names {name}, which is not there")
    for _, address in _IMPORT.findall(files[name]):
        _visit(_resolved(name, address), files, order, (*above, name))
    order.append(name)


def _resolved(importer: str, address: str) -> str:
    return normpath(join(dirname(importer), address))


def _linked(name: str, text: str, order: list[str]) -> str:
    """Return a module as a constant that holds its exports, with the same number of lines."""

    def taken(found: re.Match[str]) -> str:
        wanted = found[1]
        if wanted is None:
            return ""
        names = " ".join(wanted.split()).replace(" as ", ": ")
        return f"const {{ {names} }} = {_variable(_resolved(name, found[2]), order)};" + "\n" * wanted.count("\n")

    body = _IMPORT.sub(taken, text.rstrip("\n"))
    exported = _EXPORT.findall(body)
    body = _EXPORT.sub("", body)
    strange = _FOREIGN.search(body)
    if strange is not None:
        line = body[strange.start() :].partition("\n")[0]
        raise InternalError(f"{name} of the page imports or exports in a way that is not known here: {line}")
    return f"const {_variable(name, order)} = (() => {{ {body}\nreturn {{ {', '.join(exported)} }}; }})();"


def _variable(name: str, order: list[str]) -> str:
    return f"$module{order.index(name)}"


def _mappings(lengths: Sequence[int]) -> str:
    """Return the mappings of a source map with one position per line, for consecutive files."""
    first = ["AAAA", *(f"AC{_vlq(1 - before)}A" for before in lengths)]
    return ";".join(";".join([begin, *["AACA"] * (length - 1)]) for begin, length in zip(first, lengths, strict=False))


def _vlq(number: int) -> str:
    rest = (-number << 1) | 1 if number < 0 else number << 1
    digits = ""
    while True:
        digit, rest = rest & 31, rest >> 5
        digits += _DIGITS[digit | (32 if rest else 0)]
        if not rest:
            return digits
