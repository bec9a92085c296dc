"""When a failed attempt is retried, and how long all attempts of a step may take.

Attempts are counted from 1. The delay before attempt n + 1 is `initial_ms * factor ** (n - 1)`, at most `most_ms`;
jitter reduces it by up to that share, by a random fraction that the engine passes.

`schedule_to_close` limits the time of all attempts of an activity together, from when its step was opened. A message
that is due at the end of that time enforces it, whichever node executes the activity, and even if none does.
"""

from math import inf
from typing import Any

from msgspec import Struct
from msgspec.structs import force_setattr

from holdfast.core import codec
from holdfast.core.events import NULL, ErrorInfo
from holdfast.core.instants import Instant
from holdfast.core.state import OpenStep
from holdfast.errors import InvalidInput
from holdfast.limits import DURATION_MS, ERROR_TEXT_CHARS


class Retry(Struct, frozen=True, kw_only=True):
    """A retry policy. `max_attempts=0` sets no limit.

    `non_retryable` names exceptions that are not retried, by class or class name; their subclasses are not retried
    either. An exception with a `retry_after`, in seconds or as a timedelta, sets the delay itself: see `RetryAfter`. An
    attempt that is lost with its node counts toward the limit, unless `count_lost` is False.
    """

    max_attempts: int = 10
    initial_ms: int = 1_000
    """The delay before the second attempt."""
    factor: float = 2.0
    """How much longer each delay is than the one before."""
    most_ms: int = 100_000
    """The longest delay."""
    jitter: float = 0.2
    """The share by which a delay is randomly reduced: 0.2 is up to a fifth."""
    non_retryable: tuple[str, ...] = ()
    count_lost: bool = True

    def __post_init__(self) -> None:
        for field in ("max_attempts", "initial_ms", "most_ms"):
            if type(getattr(self, field)) is not int:
                raise InvalidInput(f"{field} is a whole number, not {getattr(self, field)!r}", field=field)
        for field in ("factor", "jitter"):
            if type(getattr(self, field)) not in (int, float):
                raise InvalidInput(f"{field} is a number, not {getattr(self, field)!r}", field=field)
        if type(self.count_lost) is not bool:
            raise InvalidInput(f"count_lost is True or False, not {self.count_lost!r}", field="count_lost")
        force_setattr(self, "non_retryable", _names(self.non_retryable))
        if self.max_attempts < 0 or self.initial_ms < 0 or self.most_ms < 0:
            raise InvalidInput("max_attempts, initial_ms and most_ms may not be negative")
        if self.max_attempts >= 2**31 or max(self.initial_ms, self.most_ms) > DURATION_MS:
            raise InvalidInput("max_attempts is less than 2^31, and initial_ms and most_ms at most a thousand years")
        if not 1.0 <= self.factor < inf or not 0.0 <= self.jitter <= 1.0:
            raise InvalidInput("factor is a finite number of at least 1, and jitter from 0 to 1")


def _names(exceptions: object) -> tuple[str, ...]:
    """Return the names under which exceptions are recorded."""
    if isinstance(exceptions, tuple | list | set | frozenset):
        names = [each.__name__ if isinstance(each, type) else each for each in exceptions]
        if all(isinstance(name, str) for name in names):
            return tuple(sorted(names) if isinstance(exceptions, set | frozenset) else names)
    problem = f"non_retryable is a tuple of exceptions or their names, not {exceptions!r}"
    raise InvalidInput(problem, field="non_retryable")


NO_RETRY = Retry(max_attempts=1)


def retry_delay_ms(policy: Retry, attempt: int, error: ErrorInfo, fraction: float) -> int | None:
    """Return the delay between `attempt` and the next one, or None if there is no next one."""
    if not error.retryable or error.code in policy.non_retryable:
        return None
    if error.bases and any(name in policy.non_retryable for name in error.bases):
        return None
    if policy.max_attempts and attempt >= policy.max_attempts:
        return None
    if error.retry_after_ms is not None:
        return min(error.retry_after_ms, DURATION_MS)
    return int(full_delay_ms(policy, attempt) * (1.0 - policy.jitter * fraction))


def full_delay_ms(policy: Retry, attempt: int) -> float:
    """Return the delay after `attempt` before jitter. It does not overflow, however many attempts there were."""
    delay = float(policy.initial_ms)
    for _ in range(attempt - 1):
        if delay >= policy.most_ms or policy.factor == 1.0 or delay == 0.0:
            break
        delay *= policy.factor
    return min(delay, float(policy.most_ms))


# --- the time of a step as a whole


class StepOptions(Struct, frozen=True):
    """The recorded options of a step that matter to its run."""

    retry: Retry = Retry()
    schedule_to_close_ms: int | None = None
    on_failure: str = "raise"
    plan_retry: Retry | None = None
    """How often a plan starts the step again, as the next logical attempt, before it pauses the run."""

    def deadline_of(self, step: OpenStep) -> Instant | None:
        """Return the deadline of the step, or None if it has none."""
        return None if self.schedule_to_close_ms is None else step.opened_at + self.schedule_to_close_ms * 1_000


def step_options(options: Any) -> StepOptions:
    """Return the options that are recorded with a step."""
    try:
        return codec.decode(options, StepOptions) if bytes(options) != b"null" else StepOptions()
    except InvalidInput:  # the node that executes it finds that too, and the step fails there
        return StepOptions()


def pauses(step: OpenStep, error: ErrorInfo) -> bool:
    """Return whether the run is paused when this attempt of a step fails permanently."""
    options = step_options(getattr(step.body, "options", NULL))
    if options.on_failure != "pause":
        return False
    again = options.plan_retry
    return again is None or retry_delay_ms(again, step.logical_attempt_id, error, 0.0) is None


DEADLINE_MARK = "!close"
"""Separates the step id from the attempt in the token of a deadline message."""


def deadline_token(step_id: str, logical_attempt_id: int) -> str:
    """Return the token of a step's deadline message. A retry by an operator has another one."""
    return f"{step_id}{DEADLINE_MARK}{logical_attempt_id}"


def overdue_text(step: OpenStep, limit_ms: int | None) -> str:
    """Return the error text of a step that missed its deadline, with the error of its last failed attempt, if any."""
    problem = f"activity {step.name!r} was not done within {limit_ms} ms of being scheduled"
    if step.error is not None:
        problem = f"{problem}; its last error was {step.error}"
    return problem[:ERROR_TEXT_CHARS]
