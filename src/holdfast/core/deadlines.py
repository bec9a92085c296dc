"""How long all attempts of an activity together may take, from when its step was opened: `schedule_to_close`.

A message that is due when that time is over keeps it, whoever carries the activity out and whether anybody does.
"""

from typing import Any

from msgspec import Raw, Struct

from holdfast.core import codec
from holdfast.core.event_writer import Pen
from holdfast.core.instants import Instant
from holdfast.core.messages import Message
from holdfast.core.steps import OpenStep
from holdfast.core.timing import Retry
from holdfast.errors import InvalidInput
from holdfast.limits import ERROR_TEXT_CHARS


class StepOptions(Struct, frozen=True):
    """What of a step's recorded options matters to its run."""

    retry: Retry = Retry()
    schedule_to_close_ms: int | None = None
    on_failure: str = "raise"

    def deadline_of(self, step: OpenStep) -> Instant | None:
        """Return when the step's time is over, or None if it has no end."""
        return None if self.schedule_to_close_ms is None else step.opened_at + self.schedule_to_close_ms * 1_000


def step_options(options: Any) -> StepOptions:
    """Return the options that are recorded with a step."""
    try:
        return codec.decode(options, StepOptions) if bytes(options) != b"null" else StepOptions()
    except InvalidInput:  # whoever is to carry it out finds that too, and the step fails there
        return StepOptions()


def schedule_deadline(step_id: str, logical_attempt_id: int, options: Raw, pen: Pen) -> None:
    """Leave the message that ends a step which is opened now, if its time is bounded."""
    if b'"schedule_to_close_ms"' not in bytes(options):  # without reading them: most have none
        return
    limit_ms = step_options(options).schedule_to_close_ms
    if limit_ms is not None:
        token = deadline_token(step_id, logical_attempt_id)
        pen.schedule("TimerDue", step_id, token, pen.now + limit_ms * 1_000)


def deadline_token(step_id: str, logical_attempt_id: int) -> str:
    """Return the token of the message that ends a step: it is another one when an operator has the step tried again."""
    return f"{step_id}!close{logical_attempt_id}"


def is_deadline(message: Message) -> bool:
    """Say whether a message is the one that ends a step."""
    return message.type == "TimerDue" and (message.waiting_token or "").startswith(f"{message.step_id}!close")


def too_late(step: OpenStep, limit_ms: int | None) -> str:
    """Say that the step's time is over, and how the last attempt failed, if one has."""
    problem = f"activity {step.name!r} was not done within {limit_ms} ms of being scheduled"
    if step.error is not None:
        problem = f"{problem}; its last error was {step.error.code}: {step.error.message}"
    return problem[:ERROR_TEXT_CHARS]
