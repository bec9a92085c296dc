"""The context of a run: short named texts from its starter, such as the user and the trace.

It is recorded once, with the start (`RunQueued.context`), and never changes, so it is the same at every replay. It is
passed on to the activities of the run, to its children and the runs that it starts, and to its forks and retries. It
grants no rights: rights come from tokens.

It is stored as a JSON object of texts and sealed like any other payload.
"""

import re
from collections.abc import Mapping
from typing import Any

from msgspec import Raw

from holdfast.core import codec
from holdfast.core.events import NULL
from holdfast.errors import InvalidInput, PayloadTooLarge
from holdfast.limits import CONTEXT_BYTES, CONTEXT_KEYS

TRACE_KEY = "traceparent"
"""The key with the span of the starter, in W3C Trace Context format."""

_KEY = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,63}")
_TRACE = re.compile(r"[0-9a-f]{2}-[0-9a-f]{32}-[0-9a-f]{16}-[0-9a-f]{2}")


def encode_context(texts: Mapping[Any, Any]) -> Raw:
    """Return a context as stored; null for an empty one. Raise `InvalidInput` or `PayloadTooLarge` if it is invalid."""
    if not texts:
        return NULL
    if len(texts) > CONTEXT_KEYS:
        raise InvalidInput(f"a context has at most {CONTEXT_KEYS} keys, not {len(texts)}", field="context")
    for key, text in texts.items():
        if not isinstance(key, str) or _KEY.fullmatch(key) is None:
            problem = "a key of a context has up to 64 letters, digits, dots, hyphens and underscores"
            raise InvalidInput(f"{problem}, unlike {key!r}", field="context")
        if not isinstance(text, str):
            problem = f"a context holds texts, and {key} is {type(text).__qualname__}: give str(...) of it"
            raise InvalidInput(problem, field=f"context.{key}")
    raw = codec.encode({key: texts[key] for key in sorted(texts)})
    if len(raw) > CONTEXT_BYTES:
        problem = f"the context has {len(raw)} bytes, and at most {CONTEXT_BYTES} are carried: carry an id instead"
        raise PayloadTooLarge(problem, size_bytes=len(raw), limit_bytes=CONTEXT_BYTES)
    return raw


def texts_of(context: Raw) -> dict[str, str]:
    """Return the texts of a stored context."""
    return {} if context == NULL else codec.decode(context, dict[str, str])


def is_traceparent(text: str) -> bool:
    """Return whether a text is a `traceparent` as in W3C Trace Context."""
    return _TRACE.fullmatch(text) is not None
