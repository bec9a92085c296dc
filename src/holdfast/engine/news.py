"""What of a history is worth a line in the log: what went wrong, and what is done about it."""

import logging
from collections.abc import Callable, Iterable

from holdfast.core import events as e
from holdfast.core.dead_letters import DeadLetter
from holdfast.core.events import ErrorInfo, Event
from holdfast.core.instants import format_instant
from holdfast.engine.observe.logs import escaped

logger = logging.getLogger("holdfast.runs")


def tell(events: Iterable[Event]) -> None:
    """Log those of the events, which are durable now, that somebody may be looking for."""
    for event in events:
        teller = _TELLERS.get(type(event.data))
        if teller is not None:
            teller(event)


def mourn(letters: Iterable[DeadLetter]) -> None:
    """Log messages that were given up."""
    for letter in letters:
        logger.error(
            "run %s: letter %s is dead, %s: %s",
            letter.run_id,
            letter.letter_id,
            letter.reason,
            escaped(letter.detail),
            extra={"run_id": letter.run_id},
        )


def _retried(event: Event) -> None:
    body = event.data
    assert isinstance(body, e.StepRetried)
    when = f"again at {format_instant(body.due_at)}" if body.due_at is not None else "again now"
    attempt = (event.engine_attempt_id or 1) - 1
    text = "run %s: attempt %d of step %s: %s; %s"
    logger.info(text, event.run_id, attempt, event.step_id, _why(body), when, extra=_place(event))


def _why(body: e.StepRetried) -> str:
    return body.reason if body.error is None else _brief(body.error)


def _step_failed(event: Event) -> None:
    assert isinstance(event.data, e.StepFailed)
    brief = _brief(event.data.error)
    logger.info("run %s: step %s has failed: %s", event.run_id, event.step_id, brief, extra=_place(event))


def _run_failed(event: Event) -> None:
    assert isinstance(event.data, e.RunFailed)
    logger.info("run %s has failed: %s", event.run_id, _brief(event.data.error), extra=_place(event))


def _place(event: Event) -> dict[str, str]:
    """Return what a log that is read by programs says of where this happened."""
    return {"run_id": event.run_id} | ({} if event.step_id is None else {"step_id": event.step_id})


def _brief(error: ErrorInfo) -> str:
    return escaped(f"{error.code}: {error.message[:200]}")


_TELLERS: dict[type[e.Body], Callable[[Event], None]] = {
    e.StepRetried: _retried,
    e.StepFailed: _step_failed,
    e.RunFailed: _run_failed,
}
