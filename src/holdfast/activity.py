"""`Activity`: what `@app.activity` returns. A call inside a workflow is a durable step; elsewhere, a plain call."""

import inspect
from collections.abc import Callable, Coroutine, Iterable
from functools import update_wrapper
from typing import Any, Generic, ParamSpec, TypeVar

from msgspec.structs import replace

from holdfast.core.keys import require_step_name
from holdfast.core.timing import Retry
from holdfast.errors import InvalidInput
from holdfast.limits import SECRETS
from holdfast.program.coroutine import current_program
from holdfast.program.definitions import (
    PLAIN_CALL,
    ActivityDefinition,
    ActivityOptions,
    CallOptions,
    call_options,
    encode_options,
    failure_policy,
    milliseconds,
)
from holdfast.program.secrets import Secret

P = ParamSpec("P")
R = TypeVar("R")


class Activity(Generic[P, R]):
    """A registered activity. Call it in a workflow."""

    def __init__(
        self,
        definition: ActivityDefinition,
        options: ActivityOptions | None = None,
        call: CallOptions = PLAIN_CALL,
    ) -> None:
        self.definition = definition
        self.call = call
        """The options of the call: the name of the step, its idempotency key, the effect of a cancellation."""
        self.call_options = options or definition.options
        """The options of the calls made through it."""
        self._encoded_options = encode_options(self.call_options)
        update_wrapper(self, definition.function)

    def options(self, **changes: Any) -> "Activity[P, R]":
        """Return the same activity with other options for the calls made through it.

        They are the options of `@app.activity`, and two more for the call: `name` is the name of its step, and
        `idempotency_key`, a text, replaces the computed key. With `cancel="wait"`, a cancellation while the call is
        awaited waits for its outcome: a result is returned, and the code is cancelled at its next wait.
        """
        call = call_options(self.call, changes)
        return Activity(self.definition, activity_options(self.call_options, **changes), call)

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> Coroutine[Any, Any, R]:
        """Run it as a durable step inside a workflow; elsewhere just call the function. Await the result either way."""
        program = current_program()
        if program is None:
            return self._plain(args, kwargs)
        return program.run_activity(
            self.definition, args, kwargs, self.call_options.queue, self._encoded_options, self.call
        )

    async def _plain(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> R:
        result = self.definition.function(*args, **kwargs)
        return await result if inspect.isawaitable(result) else result  # type: ignore[no-any-return]


def activity_options(base: ActivityOptions, **changes: Any) -> ActivityOptions:
    """Return the options with changes; durations are given as timedeltas or seconds."""
    known: dict[str, Callable[[Any], dict[str, Any]]] = {
        "retry": lambda value: {"retry": _retry(value)},
        "queue": lambda value: {"queue": value},
        "timeout": lambda value: {"timeout_ms": milliseconds(value)},
        "schedule_to_close": lambda value: {"schedule_to_close_ms": milliseconds(value)},
        "heartbeat_timeout": lambda value: {"heartbeat_timeout_ms": milliseconds(value)},
        "on_failure": lambda value: {"on_failure": failure_policy(value)},
        "secrets": lambda value: {"secrets": _secrets(value)},
    }
    fields: dict[str, Any] = {}
    for name, value in changes.items():
        if name not in known:
            raise InvalidInput(_unknown_option(name, known), field=name)
        fields |= known[name](value)
    if fields.get("queue", "") != "":  # an empty name means no queue
        require_step_name("queue", fields["queue"])
    return replace(base, **fields)


OF_THE_CALL = ("cancel", "idempotency_key", "name")
"""The options of `Activity.options` and `App.activity` besides those of `ActivityOptions`."""
OF_THE_DEFINITION = ("limit", "raises", "retry_if", "verify", "verify_retry", "verify_timeout")
"""The options of `App.activity` alone."""


def _unknown_option(name: str, known: Iterable[str]) -> str:
    if name in OF_THE_DEFINITION:
        return f"{name} is an option of @app.activity, not of one call"
    if name in Retry.__struct_fields__:
        return f"unknown activity option {name!r}: it belongs to the retry policy, retry=hf.Retry({name}=…)"
    options = ", ".join(sorted((*known, *OF_THE_CALL)))
    return f"unknown activity option {name!r}; known are {options}, and of @app.activity {', '.join(OF_THE_DEFINITION)}"


def _secrets(value: Any) -> tuple[Secret, ...]:
    if not isinstance(value, list | tuple | set | frozenset):
        raise InvalidInput(f'secrets is a list such as ["stripe/key"], not {value!r}', field="secrets")
    found = {each.name: each for each in (one if isinstance(one, Secret) else Secret(one) for one in value)}
    if len(found) > SECRETS:
        raise InvalidInput(f"an activity has {len(found)} secrets; the most is {SECRETS}", field="secrets")
    return tuple(found[name] for name in sorted(found))


def _retry(value: Any) -> Retry:
    if not isinstance(value, Retry):
        raise InvalidInput(f"retry is a Retry, such as Retry(max_attempts=5), not {value!r}", field="retry")
    return value
