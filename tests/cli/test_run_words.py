"""What a run does, in the words of a list."""

from datetime import UTC, datetime, timedelta

from holdfast.cli.run_words import now_of


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
