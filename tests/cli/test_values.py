"""Values and times as words on the command line."""

from __future__ import annotations

import io
import json
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

from holdfast.cli import output
from holdfast.cli.exit_codes import run_command
from holdfast.cli.values import parse_moment, parse_value
from holdfast.errors import InvalidInput, NotFound


@pytest.mark.parametrize(
    ("words", "value"),
    [
        ([], {}),
        (["name=ann", "city="], {"name": "ann", "city": ""}),
        (["cents:=4200", "note=a=b:=c", "paid:=true"], {"cents": 4200, "note": "a=b:=c", "paid": True}),
        (['{"a": "b=c"}'], {"a": "b=c"}),
        (["true"], True),
        (['"x=1"'], "x=1"),
        (["-5"], -5),
        (["text=line\nbreak"], {"text": "line\nbreak"}),
    ],
)
def test_words_stand_for_a_value(words: list[str], value: Any) -> None:
    assert parse_value(words, "payload") == value


def test_a_value_may_come_from_a_file_or_from_stdin(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "a.json").write_text('{"a": 1}')
    assert parse_value([f"@{tmp_path}/a.json"], "input") == {"a": 1}
    monkeypatch.setattr("sys.stdin", io.StringIO("[2]"))
    assert parse_value(["-"], "input") == [2]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["hello"], """input: this is not JSON (a text is written as '"text"')"""),
        (["a:=one"], "input: a: this is not JSON"),
        (["a=1", "2"], "input: '2' is neither name=text nor name:=json"),
        (["a=1", "a=2"], "input: a is given twice"),
        (["@nowhere.json"], "input: @nowhere.json cannot be read"),
        (["[" * 2_000], "input: this is not JSON"),
    ],
)
def test_words_that_stand_for_nothing_are_refused(words: list[str], said: str) -> None:
    with pytest.raises(InvalidInput) as refused:
        parse_value(words, "input")
    assert refused.value.message.startswith(said)


def test_times_are_absolute_or_ago() -> None:
    assert parse_moment("2026-01-28T12:00:00+02:00", "--from") == "2026-01-28T10:00:00+00:00"
    here = datetime(2026, 1, 28, 12).astimezone(UTC).isoformat()
    assert parse_moment("2026-01-28T12:00", "--from") == here
    then = datetime.fromisoformat(parse_moment("2h", "--from"))
    assert timedelta(hours=2) <= datetime.now(UTC) - then < timedelta(hours=2, minutes=1)
    for wrong in ("yesterday", "2026-13-01", "99999999999999d"):
        with pytest.raises(InvalidInput, match="--from"):
            parse_moment(wrong, "--from")


def test_times_are_shown_with_their_distance(monkeypatch: pytest.MonkeyPatch) -> None:
    class Clock:
        def now(self) -> int:
            return int(datetime(2026, 1, 28, 12, tzinfo=UTC).timestamp() * 1_000_000)

    monkeypatch.setattr(output, "SystemClock", Clock)
    for text, distance in [
        ("2026-01-28T11:59:30Z", "30 s ago"),
        ("2026-01-28T12:05:00Z", "in 5 min"),
        ("2026-01-27T12:00:00.5Z", "23 h ago"),
        ("2026-02-07T12:00:00Z", "in 10 d"),
        ("9999-12-31T00:00:00Z", " d)"),
    ]:
        assert distance in output.moment(text)


NASTY = "a\x1b[2J\x07b\x9b\nstatus  COMPLETED\r\u2028\u202e\u2066\x7fü"
SEEN = "a\\x1b[2J\\x07b\\x9b\\nstatus  COMPLETED\\r\\u2028\\u202e\\u2066\\x7fü"


def test_what_somebody_else_wrote_does_nothing_to_a_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    assert output.clean(NASTY) == SEEN
    output.show_fields({"run_id": NASTY, NASTY: 1, "tags": [NASTY], "error": {"message": NASTY}})
    output.show_items([{"run_id": NASTY, "tags": [NASTY]}], ["run_id", "tags", NASTY])
    output.show_line(NASTY)
    output.note(NASTY)
    shown, told = capsys.readouterr()
    assert len(shown.splitlines()) == 4 + 2 + 1
    assert len(told.splitlines()) == 1
    for text in (shown, told):
        assert SEEN in text
        assert all(character.isprintable() or character == "\n" for character in text)


def test_json_for_programs_stays_json_and_does_nothing_to_a_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    output.show_json({"run_id": NASTY, NASTY: [NASTY]})
    [line] = capsys.readouterr().out.splitlines()
    assert json.loads(line) == {"run_id": NASTY, NASTY: [NASTY]}
    assert all(character.isprintable() for character in line)


@pytest.mark.parametrize("as_json", [False, True])
def test_errors_do_nothing_to_a_terminal(capsys: pytest.CaptureFixture[str], as_json: bool) -> None:
    def fails() -> int:
        raise NotFound(f"there is no run {NASTY}", run_id=NASTY)

    def breaks() -> int:
        raise ValueError(NASTY)

    assert run_command(fails, as_json=as_json) == 3
    [line] = capsys.readouterr().err.splitlines()
    assert all(character.isprintable() for character in line)
    assert not as_json or json.loads(line)["run_id" if "run_id" in json.loads(line) else "details"]
    with pytest.raises(SystemExit):
        run_command(breaks, as_json=as_json)
    told = capsys.readouterr().err
    assert all(character.isprintable() or character == "\n" for character in told)
