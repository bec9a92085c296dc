"""The plain format of the log, and lines of JSON: text of others cannot break a line, nor steer a terminal."""

import json
import logging
import sys

import pytest

from holdfast.engine.observe.logs import JsonFormatter, PlainFormatter, escaped, escaped_json

NASTY = "a\nb\rc\td\x00\x1b[2J\x7f\x85\x9b31m\u2028\u2029\u202e\u2066\u200f\u061c\ufeff\ud800é😀"
SEEN = (
    r"a\nb\rc\td\x00\x1b[2J\x7f\x85\x9b31m\u2028\u2029\u202e\u2066\u200f\u061c\ufeff\ud800"
    "é😀"
)


def record(message: str, *args: object) -> logging.LogRecord:
    return logging.LogRecord("holdfast.test", logging.INFO, __file__, 1, message, args, None)


@pytest.mark.contract("API-2")
def test_control_characters_are_seen_and_do_nothing() -> None:
    assert escaped(NASTY) == SEEN
    line = PlainFormatter().format(record("run %s", NASTY))
    assert line.endswith(f"INFO holdfast.test: run {SEEN}")
    assert len(line.splitlines()) == 1


@pytest.mark.contract("API-2")
def test_a_traceback_cannot_look_like_a_record() -> None:
    try:
        raise ValueError("x\n2026-01-01 00:00:00,000 ERROR holdfast: forged\x1b[2J\u202e")
    except ValueError:
        failed = logging.LogRecord("holdfast.test", logging.ERROR, __file__, 1, "failed", (), sys.exc_info())
    first, *rest = PlainFormatter().format(failed).splitlines()
    assert first.endswith("ERROR holdfast.test: failed")
    assert rest
    assert all(line.startswith("    ") for line in rest)
    assert "\x1b" not in "".join(rest)
    assert "\u202e" not in "".join(rest)


@pytest.mark.contract("API-2")
def test_lines_of_json_stay_json_and_hold_no_control_characters() -> None:
    text = NASTY.replace("\ud800", "")
    line = JsonFormatter().format(record("%s", text))
    assert json.loads(line)["message"] == text
    assert all(character.isprintable() for character in line)
    assert json.loads(escaped_json(json.dumps({"a": text}, ensure_ascii=False))) == {"a": text}
