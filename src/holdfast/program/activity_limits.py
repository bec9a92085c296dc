"""`ActivityLimit`: how many calls of activities may run concurrently, and how many may start, across all nodes.

The limit is declared with the activity, and its numbers stay in code. A call records only the name of the limit and the
key computed from its arguments. The store decides which call gets the next place (`core/call_limits.py`).
"""

from collections.abc import Callable
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from msgspec import Raw
from msgspec.structs import replace

from holdfast.core.call_limits import CallLimit, LimitedBy, check_call_limit, limited_queue
from holdfast.core.keys import check_name, require_step_name
from holdfast.errors import InvalidInput
from holdfast.program.definitions import ActivityDefinition, ActivityOptions, milliseconds, parameters_of
from holdfast.program.secrets import without_secrets

if TYPE_CHECKING:
    from holdfast.program.values import Signature

Rate = tuple[int, timedelta | float]


class ActivityLimit:
    """A limit on the calls of one activity, or of several that share its name, across all nodes.

    - `at_once`: the most concurrent attempts. `per_key`: the same for each key.
    - `rate` and `rate_per_key`: how many attempts may start within a period, as a tuple of the number and the period.
    - `key`: computes the key from arguments of the activity, by their names.
    - `name`: activities with the same name share the limit, even across apps on one store. Default: the
      activity's.

    See docs/activity-limits.md.
    """

    def __init__(
        self,
        name: str | None = None,
        *,
        at_once: int | None = None,
        per_key: int | None = None,
        rate: Rate | None = None,
        rate_per_key: Rate | None = None,
        key: Callable[..., Any] | None = None,
    ) -> None:
        if name is not None:
            require_step_name("the name of a limit", name)
        calls, period_ms = _rate("rate", rate)
        key_calls, key_period_ms = _rate("rate_per_key", rate_per_key)
        self.name = name
        self.key = key
        self.numbers = CallLimit(
            at_once=at_once,
            per_key=per_key,
            calls=calls,
            period_ms=period_ms,
            key_calls=key_calls,
            key_period_ms=key_period_ms,
        )
        problem = check_call_limit(self.numbers)
        if problem is not None:
            raise problem
        if (at_once, per_key, rate, rate_per_key) == (None, None, None, None):
            raise InvalidInput("a limit needs at_once, per_key, rate or rate_per_key; a key alone sets none")
        if (key is None) != (per_key is None and rate_per_key is None):
            raise InvalidInput("key belongs with per_key or rate_per_key: set both or neither", field="key")


class LimitedCalls:
    """What the calls of one activity record about its limit."""

    def __init__(self, limit: ActivityLimit, activity: str, signature: "Signature") -> None:
        self.name = limit.name or activity
        self.numbers = limit.numbers
        self._key = limit.key
        self._signature = signature
        self._names = parameters_of("key", limit.key, signature) if limit.key is not None else []

    def applied(self, options: ActivityOptions, input: Raw) -> ActivityOptions:
        """Return the options of a call with this input: the queue in which it waits for a place, and its limit."""
        return replace(options, queue=limited_queue(options.queue), limit=LimitedBy(self.name, self._key_of(input)))

    def _key_of(self, input: Raw) -> str:
        if self._key is None:
            return ""
        arguments = self._signature.unpack(input)
        try:
            with without_secrets():
                key = str(self._key(**{name: arguments[name] for name in self._names}))
        except Exception as problem:
            raise InvalidInput(f"the key of limit {self.name!r} could not be computed: {problem!r}") from problem
        refusal = check_name("the key of a limit", key) if key != "" else None
        if refusal is not None:
            raise refusal
        return key


def limited_calls(limit: Any, definition: ActivityDefinition) -> LimitedCalls | None:
    """Return what calls of this activity record about its limit, or None if it has none."""
    if limit is not None and not isinstance(limit, ActivityLimit):
        problem = f"limit is an ActivityLimit, such as hf.ActivityLimit(at_once=5), not {limit!r}"
        raise InvalidInput(problem, field="limit")
    return None if limit is None else LimitedCalls(limit, definition.name, definition.signature)


def _rate(field: str, rate: Any) -> tuple[int | None, int]:
    if rate is None:
        return None, 1_000
    if not isinstance(rate, tuple) or len(rate) != 2:
        problem = f"{field} is a number of calls and a period, such as (100, timedelta(minutes=1)), not {rate!r}"
        raise InvalidInput(problem, field=field)
    return rate[0], milliseconds(rate[1]) or 0
