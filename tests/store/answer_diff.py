"""Answers of two stores side by side: whether they are the same, and where they begin to differ."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

import msgspec

from holdfast.errors import HoldfastError
from holdfast.store.port import Created, Existing, Refused


async def answer_of(verb: Callable[..., Awaitable[Any]], arguments: tuple[Any, ...]) -> Any:
    """Return the answer of a verb, or the error that it raised."""
    try:
        return await verb(*arguments)
    except HoldfastError as error:
        return error


def plain(answer: Any) -> Any:
    """Return the answer so that equal answers of two stores are equal: errors compare by what they say."""
    if isinstance(answer, HoldfastError):
        return _without_place(answer)
    if isinstance(answer, Refused):
        return "refused", _without_place(answer.error)
    if isinstance(answer, (list, tuple)):
        return [plain(item) for item in answer]
    if isinstance(answer, (Created, Existing)):
        return type(answer).__name__, {**msgspec.structs.asdict(answer), "signals": plain(answer.signals)}
    return answer


def _without_place(error: HoldfastError) -> dict[str, Any]:
    """Return what an error says. Faults of the store itself may name its own file, so only their code counts."""
    return {"code": error.code} if error.code.startswith("Store") else error.as_dict()


def narrowed(expected: Any, found: Any) -> tuple[str, Any, Any]:
    """Return the path to the first difference, and what stands there on either side."""
    if isinstance(expected, msgspec.Struct) and type(expected) is type(found):
        expected, found = msgspec.structs.asdict(expected), msgspec.structs.asdict(found)
    if isinstance(expected, dict) and isinstance(found, dict) and expected.keys() == found.keys():
        keys: Any = expected.keys()
    elif isinstance(expected, (list, tuple)) and isinstance(found, (list, tuple)) and len(expected) == len(found):
        keys = range(len(expected))
    else:
        return "", expected, found
    for key in keys:
        if expected[key] != found[key]:
            where, inner_expected, inner_found = narrowed(expected[key], found[key])
            return f"[{key!r}]{where}", inner_expected, inner_found
    return "", expected, found


def show(value: Any) -> str:
    """Return a value as a person can read it, not too long."""
    try:
        text = msgspec.json.encode(value, enc_hook=lambda other: getattr(other, "as_dict", other.__repr__)()).decode()
    except (TypeError, ValueError, msgspec.MsgspecError):  # not everything that is sent can be written down
        text = repr(value)
    return text if len(text) < 4_000 else f"{text[:4_000]}…"
