"""The limits of a workflow as its author writes them, and the admission request of each of its runs."""

import inspect
from collections.abc import Callable
from datetime import timedelta
from typing import Any, TypedDict

from holdfast.core.admission import AdmissionRequest, Overload, RunLimit, check_admission_request, check_limit
from holdfast.errors import InvalidInput
from holdfast.program.definitions import Signature, milliseconds


class LimitOptions(TypedDict, total=False):
    """What `@app.workflow(...)` takes to bound the runs of a workflow. See docs/limits.md."""

    at_once: int
    """How many runs may be under way at the same time."""

    per_key: int
    """How many of them of one key; `key` says which it is."""

    key: Callable[..., Any]
    """From the arguments that it names like the workflow does, such as `lambda customer: customer`, to the key."""

    rate: tuple[int, timedelta | float]
    """How many runs may start within any period: their number, and the period."""

    overload: Overload
    """What becomes of a start beyond that: `queue` (the default), `delay`, or `reject`."""


class WorkflowLimit:
    """The limits of one workflow."""

    def __init__(self, options: LimitOptions, signature: Signature) -> None:
        unknown = sorted(set(options) - set(LimitOptions.__annotations__))
        if unknown:
            raise InvalidInput(f"unknown workflow option {unknown[0]!r}")
        starts, period_ms = _rate(options.get("rate"))
        self.limit = RunLimit(
            at_once=options.get("at_once"),
            per_key=options.get("per_key"),
            starts=starts,
            period_ms=period_ms,
            overload=options.get("overload", "queue"),
        )
        self._key = options.get("key")
        self._signature = signature
        problem = check_limit(self.limit)
        if problem is not None:
            raise problem
        if (self.limit.at_once, self.limit.per_key, starts) == (None, None, None):
            raise InvalidInput("a workflow's limit is at_once, per_key or rate; key and overload only say how")
        if (self._key is None) != (self.limit.per_key is None):
            raise InvalidInput("per_key and key belong together: how many runs, and of what")
        self._names = _names(self._key, signature) if self._key is not None else []

    def admission_request(self, input: Any, priority: int = 0) -> AdmissionRequest:
        """Return the admission request of a run with this input."""
        request = AdmissionRequest(limit=self.limit, key=self._key_of(input), priority=priority)
        problem = check_admission_request(request)
        if problem is not None:
            raise problem
        return request

    def _key_of(self, input: Any) -> str:
        if self._key is None:
            return ""
        arguments = self._signature.unpack(input)
        try:
            return str(self._key(**{name: arguments[name] for name in self._names}))
        except Exception as problem:
            raise InvalidInput(f"the key could not be computed: {problem!r}", field="key") from problem


def _rate(rate: Any) -> tuple[int | None, int]:
    if rate is None:
        return None, 1_000
    if not isinstance(rate, tuple) or len(rate) != 2:
        raise InvalidInput(
            f"rate is a number of starts and a period, such as (100, timedelta(minutes=1)), not {rate!r}"
        )
    return rate[0], milliseconds(rate[1]) or 0


def _names(key: Callable[..., Any], signature: Signature) -> list[str]:
    """Return the arguments that a key is computed from."""
    if not callable(key):
        raise InvalidInput(f"key is a function of the workflow's arguments, not {key!r}", field="key")
    names = list(inspect.signature(key).parameters)
    for name in names:
        if name not in signature.names:
            raise InvalidInput(
                f"key looks at {name!r}, and the workflow takes {', '.join(signature.names)}", field="key"
            )
    return names
