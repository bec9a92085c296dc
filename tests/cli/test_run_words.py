"""What a run does, in the words of a list."""

from datetime import UTC, datetime, timedelta

import pytest

from holdfast.cli.output import show_fields
from holdfast.cli.run_words import now_of, sentences_of


def test_a_task_after_its_time_is_overdue_and_other_waits_end() -> None:
    late = (datetime.now(UTC) - timedelta(hours=2)).isoformat()
    task = {"status": "RUNNING", "waiting_kind": "task", "waiting_for": "review", "waiting_until": late}
    assert now_of(task).startswith("waits for a person: review, overdue since ")
    assert now_of({**task, "waiting_kind": "signal"}).startswith("waits for the signal review until ")
    soon = (datetime.now(UTC) + timedelta(hours=2)).isoformat()
    assert now_of({**task, "waiting_until": soon}).startswith("waits for a person: review until ")


def test_a_run_that_a_failed_step_has_paused_names_the_step() -> None:
    run = {
        "status": "PAUSED",
        "pause": {"actor": None, "reason": "step 'charge' failed", "since": "2026-01-01T00:00:00Z"},
        "failed_step_ids": ["charge"],
        "last_error": {"code": "TimeoutError", "message": "no answer"},
    }
    assert now_of(run) == "charge failed: TimeoutError: no answer"


def test_a_run_that_is_retried_says_when_again() -> None:
    def retried(seconds: int) -> str:
        again = {
            "activity": "send",
            "step_id": "send",
            "failures": 9,
            "error_code": "ConnectionError",
            "next_at": (datetime.now(UTC) + timedelta(seconds=seconds)).isoformat(),
        }
        return now_of({"status": "RUNNING", "retrying": again})

    assert retried(3_600) == "send failed 9 times, ConnectionError, again in 60 min"
    assert retried(-5) == "send failed 9 times, ConnectionError, again now"


def test_a_run_that_has_ended_its_nodes_says_how_it_is_tried_once_more() -> None:
    run = {
        "run_id": "cover-1",
        "status": "PAUSED",
        "pause": {"actor": None, "reason": "PoisonTurn", "since": "2026-01-01T00:00:00Z"},
        "last_error": {"code": "PoisonTurn", "message": "5 nodes in a row went away"},
    }
    said = list(sentences_of(run))
    assert said[1:] == [
        "PoisonTurn: 5 nodes in a row went away",
        "-> `holdfast run resume cover-1` tries it once more, alone, when that is fixed",
    ]


def test_only_what_has_failed_steps_is_said_to_have_one() -> None:
    run = {"run_id": "o-1", "status": "FAILED", "last_error": {"code": "WorkflowFailed", "message": "no stock"}}
    assert list(sentences_of(run))[-1] == "-> `holdfast run retry o-1` goes on from where it failed"


def test_counts_are_words(capsys: pytest.CaptureFixture[str]) -> None:
    show_fields({"total": 3, "by_status": {"COMPLETED": 1, "PAUSED": 2}, "labels": {"a": "b"}})
    assert capsys.readouterr().out.splitlines() == [
        "total      3",
        "by status  COMPLETED 1, PAUSED 2",
        'labels     {"a":"b"}',
    ]
