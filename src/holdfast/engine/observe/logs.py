"""Logs: one that knows in which run and step it is written, and says nothing while a history is replayed.

`App.logger` is such a log. Whatever is logged during a turn is said when the turn is taken and not again when the run
is replayed, on this node or on another. A turn that is lost may have said something all the same: logs are no history.
"""

import json
import logging
import re
from datetime import UTC, datetime
from typing import Any

from holdfast.engine.activities.context import current_activity
from holdfast.program.coroutine import current_program

# What moves a cursor, ends a line, turns text around, or is no character at all: C0, DEL, C1, the marks and overrides
# of writing direction, the separators of lines and paragraphs, and halves of surrogate pairs.
_UNSEEN = "\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ufeff\ud800-\udfff"
_CONTROL = re.compile(f"[\x00-\x1f{_UNSEEN}]")
_IN_JSON = re.compile(f"[{_UNSEEN}]")
_SHORT = {"\n": "\\n", "\r": "\\r", "\t": "\\t"}

_OWN = frozenset(vars(logging.LogRecord("", 0, "", 0, "", (), None))) | {"message", "asctime", "taskName"}


def place() -> dict[str, Any]:
    """Return where in which run the caller is, as far as it is in one."""
    program = current_program()
    if program is not None:
        return {"run_id": program.run_id, "workflow": program.definition.name}
    activity = current_activity()
    if activity is None:
        return {}
    return {"run_id": activity.run_id, "step_id": activity.step_id, "attempt": activity.attempt}


class _InPlace(logging.Filter):
    """Adds to each record where it was made, and drops those that are made while a history is replayed."""

    def filter(self, record: logging.LogRecord) -> bool:
        program = current_program()
        if program is not None and (program.is_replaying or program.loop.is_closed()):
            return False
        for name, value in place().items():
            setattr(record, name, value)
        return True


_IN_PLACE = _InPlace()


def logger_of(app: str) -> logging.Logger:
    """Return the log of an app: `holdfast.app.` and its name."""
    logger = logging.getLogger(f"holdfast.app.{app}")
    if _IN_PLACE not in logger.filters:
        logger.addFilter(_IN_PLACE)
    return logger


def escaped(text: str) -> str:
    """Return a text as one line whose control characters can be seen, and do nothing."""
    return _CONTROL.sub(_seen, text)


def escaped_json(text: str) -> str:
    """Return JSON in which the control characters that it would let through are written as escapes."""
    return _IN_JSON.sub(lambda found: f"\\u{ord(found[0]):04x}", text)


def _seen(found: re.Match[str]) -> str:
    number = ord(found[0])
    return _SHORT.get(found[0]) or (f"\\x{number:02x}" if number < 0x100 else f"\\u{number:04x}")


class PlainFormatter(logging.Formatter):
    """Writes each record as one line that its message cannot break, and a traceback below it, indented."""

    def __init__(self) -> None:
        super().__init__("%(asctime)s %(levelname)s %(name)s: %(message)s")

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
    """Writes each record as one line of JSON: time, level, logger, message, run, step, and what was given as `extra`.

    Run and step are known wherever a record is made inside a workflow or an activity, by whatever logger.
    """

    def format(self, record: logging.LogRecord) -> str:
        """Return a record as one line of JSON."""
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
        return escaped_json(json.dumps(fields, default=str, ensure_ascii=False))
