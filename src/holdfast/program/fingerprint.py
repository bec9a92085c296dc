"""A digest of the code of a definition, including what it refers to, as far as that can be followed.

It covers the function's own code and what it refers to: functions, classes, activities and workflows by their names,
plain values in globals, closures and defaults. Line numbers and comments do not count. The digest may differ although
the code is the same (another version of Python compiles it differently), which costs one replay. It covers neither
libraries nor files that the code reads.
"""

from collections.abc import Iterator
from hashlib import sha256
from types import CodeType, FunctionType, MethodType
from typing import Any

CHARS = 16
MOST_OBJECTS = 2_000
_PLAIN = (bool, int, float, complex, str, bytes, type(None), type(...))


def fingerprint(function: Any) -> str:
    """Return the digest of a function's code."""
    digest = sha256()
    waiting, seen = [function], {id(function): function}
    while waiting and len(seen) < MOST_OBJECTS:
        for part in _parts(waiting.pop()):
            if isinstance(part, str):
                digest.update(part.encode(errors="replace") + b"\0")
            elif id(part) not in seen:
                seen[id(part)] = part
                waiting.append(part)
    return digest.hexdigest()[:CHARS]


def _parts(of: Any) -> Iterator[Any]:
    """Yield the parts of an object: text that enters the digest, and objects to follow."""
    if isinstance(of, MethodType):
        yield of.__func__
    elif isinstance(of, FunctionType):
        yield of.__qualname__
        yield from _code_parts(of.__code__)
        yield from _values(of.__defaults__ or ())
        yield from _values(tuple((of.__kwdefaults__ or {}).values()))
        yield from _values(tuple(cell.cell_contents for cell in of.__closure__ or () if _is_filled(cell)))
        yield from _values(tuple(of.__globals__[name] for name in _names(of.__code__) if name in of.__globals__))
    elif isinstance(of, type):
        yield of.__qualname__
        yield from _values(tuple(value for _, value in sorted(vars(of).items()) if isinstance(value, FunctionType)))


def _values(values: tuple[Any, ...]) -> Iterator[Any]:
    for value in values:
        definition = getattr(value, "definition", None)
        if isinstance(value, _PLAIN):
            yield repr(value)
        elif isinstance(value, tuple | frozenset):
            yield type(value).__name__
            yield from _values(tuple(sorted(value, key=repr)) if isinstance(value, frozenset) else value)
        elif isinstance(getattr(definition, "name", None), str):  # an activity or another workflow: not its own code
            yield f"{type(value).__name__} {definition.name}"  # type: ignore[union-attr]
        elif isinstance(value, FunctionType | MethodType | type) and not _is_foreign(value):
            yield value
        else:
            yield type(value).__qualname__


def _is_foreign(value: Any) -> bool:
    """Return whether it belongs to this package or is built in: it changes only with another version of those."""
    return str(getattr(value, "__module__", "")).partition(".")[0] in ("holdfast", "builtins", "asyncio", "typing")


def _code_parts(code: CodeType) -> Iterator[str]:
    yield code.co_code.hex()
    yield from (*code.co_names, *code.co_varnames, *code.co_freevars)
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _code_parts(constant)
        else:
            yield from _values((constant,))


def _names(code: CodeType) -> list[str]:
    inner = [name for constant in code.co_consts if isinstance(constant, CodeType) for name in _names(constant)]
    return [*code.co_names, *inner]


def _is_filled(cell: Any) -> bool:
    try:
        cell.cell_contents  # noqa: B018
    except ValueError:  # the cell is assigned later
        return False
    return True
