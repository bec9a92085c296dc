"""Logging: the app's logger, which adds the run and the step, and what a node logs about its runs.

`App.logger` is silent while a history is replayed, so a line is written when the turn is taken and not again when the
run is rebuilt, on this node or on another. A turn that is not committed may have logged lines too: logs are not a
history.
"""

import json
import logging
import re
from collections.abc import Callable, Iterable
from copy import copy
from datetime import UTC, datetime
from typing import Any

from holdfast.core import events as e
from holdfast.core.codec import format_instant
from holdfast.core.dead_letters import DeadLetter
from holdfast.core.events import ErrorInfo, Event
from holdfast.core.redaction import Redactor
from holdfast.engine.activities.context import current_activity
from holdfast.engine.options import NodeOptions
from holdfast.program.coroutine import current_program
from holdfast.program.secrets import current_redactor
from holdfast.settings import without_password
from holdfast.store.open import is_new
from holdfast.store.port import Store

_runs = logging.getLogger("holdfast.runs")

# Characters that move a cursor, end a line, reverse text, or are not characters at all: C0, DEL, C1, the marks and
# overrides of writing direction, the separators of lines and paragraphs, and halves of surrogate pairs.
_UNSEEN = "\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ufeff\ud800-\udfff"
_CONTROL = re.compile(f"[\x00-\x1f{_UNSEEN}]")
_IN_JSON = re.compile(f"[{_UNSEEN}]")
_SHORT = {"\n": "\\n", "\r": "\\r", "\t": "\\t"}

_OWN = frozenset(vars(logging.LogRecord("", 0, "", 0, "", (), None))) | {"message", "asctime", "taskName"}


def place() -> dict[str, Any]:
    """Return the run and step of the caller, as far as it is in one."""
    program = current_program()
    if program is not None:
        return {"run_id": program.run_id, "workflow": program.definition.name}
    activity = current_activity()
    if activity is None:
        return {}
    return {"run_id": activity.run_id, "step_id": activity.step_id, "attempt": activity.attempt}


class SecretFilter(logging.Filter):
    """Redacts records that are logged inside an activity: the values of its secrets. For handlers and loggers.

    `App.logger` and the formatters of Holdfast redact on their own.
    """

    def filter(self, record: logging.LogRecord) -> bool:
        """Redact a record, and keep it."""
        redact_record(record)
        return True


def redact_record(record: logging.LogRecord) -> None:
    """Redact a record if it is made inside an activity that has secrets."""
    redactor = current_redactor()
    if redactor is None:
        return
    try:
        text = record.getMessage()
    except Exception:  # otherwise the handler would write the message and arguments unredacted to the standard error
        text = f"{record.msg!r} with arguments that do not fit: {record.args!r}"
    record.msg, record.args = redactor.text(text), None
    if record.exc_info and record.exc_info[0] is not None:
        error = record.exc_text or _FORMATTER.formatException(record.exc_info)
        redacted = redactor.text(error)
        if redacted != error:
            record.exc_text, record.exc_info = redacted, None  # formatting it again would show the values
    elif record.exc_text:
        record.exc_text = redactor.text(record.exc_text)
    if record.stack_info:
        record.stack_info = redactor.text(record.stack_info)
    for name, value in list(vars(record).items()):
        if name not in _OWN:
            setattr(record, name, _redacted_field(redactor, value))


def _redacted_field(redactor: Redactor, value: Any) -> Any:
    """Return a value that was given as `extra`, redacted if necessary."""
    if value is None or isinstance(value, bool | int | float):
        return value
    if isinstance(value, str):
        return redactor.text(value)
    if isinstance(value, dict):
        return {redactor.text(str(key)): _redacted_field(redactor, inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_redacted_field(redactor, inner) for inner in value]
    for text in (str(value), repr(value)):
        redacted = redactor.text(text)
        if redacted != text:
            return redacted
    return value


_FORMATTER = logging.Formatter()


class _InPlace(logging.Filter):
    """Adds its run and step to each record, and drops records that are made while a history is replayed."""

    def filter(self, record: logging.LogRecord) -> bool:
        program = current_program()
        if program is not None and (program.is_replaying or program.loop.is_closed()):
            return False
        redact_record(record)
        for name, value in place().items():
            setattr(record, name, value)
        return True


_IN_PLACE = _InPlace()


def logger_of(app: str) -> logging.Logger:
    """Return the logger of an app: `holdfast.app.` and its name."""
    logger = logging.getLogger(f"holdfast.app.{app}")
    if _IN_PLACE not in logger.filters:
        logger.addFilter(_IN_PLACE)
    return logger


def escaped(text: str) -> str:
    """Return a text as one line in which control characters are visible and have no effect."""
    return _CONTROL.sub(_seen, text)


def escaped_json(text: str) -> str:
    """Return JSON in which the control characters that it would allow are escaped."""
    return _IN_JSON.sub(lambda found: f"\\u{ord(found[0]):04x}", text)


def _seen(found: re.Match[str]) -> str:
    number = ord(found[0])
    return _SHORT.get(found[0]) or (f"\\x{number:02x}" if number < 0x100 else f"\\u{number:04x}")


class PlainFormatter(logging.Formatter):
    """Writes each record as one line that its message cannot break, with the traceback indented below it."""

    def __init__(self) -> None:
        super().__init__("%(asctime)s %(levelname)s %(name)s: %(message)s")

    def format(self, record: logging.LogRecord) -> str:
        """Return a record as text, redacted."""
        redact_record(record)
        if record.exc_text and not record.exc_info:
            record = copy(record)
            record.exc_text = _indented(record.exc_text or "")
        return super().format(record)

    def formatMessage(self, record: logging.LogRecord) -> str:  # noqa: N802
        """Return the line of a record."""
        return escaped(super().formatMessage(record))

    def formatException(self, ei: Any) -> str:  # noqa: N802
        """Return a traceback, indented, so that no text of an error looks like a record."""
        return _indented(super().formatException(ei))

    def formatStack(self, stack_info: str) -> str:  # noqa: N802
        """Return a stack, indented."""
        return _indented(stack_info)


def _indented(text: str) -> str:
    return "\n".join(f"    {escaped(line)}" for line in text.split("\n"))


class JsonFormatter(logging.Formatter):
    """Writes each record as one line of JSON: time, level, logger, message, run, step, and the `extra` fields.

    Run and step are included if a record is logged inside a workflow or an activity, by any logger.
    """

    def format(self, record: logging.LogRecord) -> str:
        """Return a record as one line of JSON, redacted."""
        redact_record(record)
        fields: dict[str, Any] = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="microseconds"),
            "level": record.levelname,
            "logger": record.name,
            "message": record.getMessage(),
            **place(),
        }
        fields |= {name: value for name, value in vars(record).items() if name not in _OWN}
        if record.exc_info:
            fields["error"] = self.formatException(record.exc_info)
        elif record.exc_text:
            fields["error"] = record.exc_text
        return escaped_json(json.dumps(fields, default=str, ensure_ascii=False))


# --- what a node logs about its runs and itself


def log_events(events: Iterable[Event]) -> None:
    """Log the failures and retries among events that are now durable."""
    for event in events:
        log = _LOGGED.get(type(event.data))
        if log is not None:
            log(event)


def log_dead_letters(letters: Iterable[DeadLetter]) -> None:
    """Log messages that became dead letters."""
    for letter in letters:
        _runs.error(
            "run %s: dead letter %s, %s: %s",
            letter.run_id,
            letter.letter_id,
            letter.reason,
            escaped(letter.detail),
            extra={"run_id": letter.run_id},
        )


def _retried(event: Event) -> None:
    body = event.data
    assert isinstance(body, e.StepRetried)
    if body.reason == e.NOT_BEGUN:  # no attempt has failed: a node stopped before it began, or someone requested it now
        return
    when = f"again at {format_instant(body.due_at)}" if body.due_at is not None else "again now"
    attempt = (event.engine_attempt_id or 1) - 1
    text = "run %s: attempt %d of step %s: %s; %s"
    _runs.info(text, event.run_id, attempt, event.step_id, _why(body), when, extra=_fields(event))


def _why(body: e.StepRetried) -> str:
    return body.reason if body.error is None else _brief(body.error)


def _step_failed(event: Event) -> None:
    assert isinstance(event.data, e.StepFailed)
    brief = _brief(event.data.error)
    _runs.info("run %s: step %s has failed: %s", event.run_id, event.step_id, brief, extra=_fields(event))


def _run_failed(event: Event) -> None:
    assert isinstance(event.data, e.RunFailed)
    _runs.warning("run %s has failed: %s", event.run_id, _brief(event.data.error), extra=_fields(event))


def _run_paused(event: Event) -> None:
    assert isinstance(event.data, e.RunPaused)
    error = event.data.error
    why = escaped(event.data.reason) if error is None else _brief(error)
    level = logging.ERROR if error is not None else logging.WARNING if event.data.failed_step_id else logging.INFO
    _runs.log(level, "run %s is paused: %s", event.run_id, why or "an operator has paused it", extra=_fields(event))


def _fields(event: Event) -> dict[str, str]:
    """Return the run and the step of an event, as fields of a log record."""
    return {"run_id": event.run_id} | ({} if event.step_id is None else {"step_id": event.step_id})


def _brief(error: ErrorInfo) -> str:
    return escaped(f"{error.code}: {error.message[:200]}")


def _unresolved(event: Event) -> None:
    body = event.data
    assert isinstance(body, e.StepUnresolved)
    text = "run %s: step %s is unresolved, and an operator is asked: %s"
    _runs.error(text, event.run_id, event.step_id, _brief(body.error), extra=_fields(event))


def _succeeded_late(event: Event) -> None:
    text = "run %s: attempt %d of step %s has succeeded after it was given up"
    _runs.warning(text, event.run_id, event.engine_attempt_id or 1, event.step_id, extra=_fields(event))


_LOGGED: dict[type[e.Body], Callable[[Event], None]] = {
    e.StepUnresolved: _unresolved,
    e.StepSucceededLate: _succeeded_late,
    e.StepRetried: _retried,
    e.StepFailed: _step_failed,
    e.RunFailed: _run_failed,
    e.RunPaused: _run_paused,
}
LOGGED = frozenset(_LOGGED)
"""The types of event bodies that are logged."""


def describe_work(workflows: list[str], options: NodeOptions) -> str:
    """Return the workflows and queues that a node works on, as text."""
    runs = [", ".join(workflows) or "no workflow at all"] if options.takes_runs else []
    queues = [f"queue {', '.join(options.queues)}"] if options.queues else []
    return " and ".join(runs + queues) or "nothing: it takes no runs and has no queues"


def describe_store(store: str | Store) -> str:
    """Return a store as text for a log: without its password, and marked if it does not exist yet."""
    if not isinstance(store, str):
        return type(store).__name__
    return f"{without_password(store)} (new)" if is_new(store) else without_password(store)
