"""Descriptions of what a run is doing: sentences with advice, and a short form for lists."""

from collections.abc import Callable, Iterator
from datetime import datetime
from typing import Any

from holdfast.cli.output import distance, moment
from holdfast.clock import SystemClock

SHORT_CHARS = 70
"""How much of an error a list shows."""

_WAITS = {
    "signal": "waits for the signal",
    "task": "waits for a person:",
    "child": "waits for the child",
    "timer": "sleeps",
    "activity": "carries out",
    "update": "answers the update",
    "approval": "waits to be approved",
    "start": "starts",
}


def error_of(error: dict[str, Any] | None) -> str | None:
    """Return an error as one text."""
    return None if error is None else f"{error['code']}: {error['message']}"


def sentences_of(run: dict[str, Any]) -> Iterator[str]:
    """Yield sentences about what a run does, and what helps."""
    again, pause, error = run.get("retrying"), run.get("pause"), run.get("last_error")
    run_id = run["run_id"]
    if again:
        what = f" {error['message']}" if error and error["code"] == again["error_code"] else ""
        yield f"{_retried(again)}{what}, {_next(again, lambda at: f'at {moment(at)}')}"
        yield f"-> `holdfast run retry-step {run_id} {again['step_id']}` tries it now"
    if pause:
        who = f" by {pause['actor']}" if pause["actor"] else ""
        yield f"paused{who} since {moment(pause['since'])}{': ' + pause['reason'] if pause['reason'] else ''}"
    for step_id in run.get("failed_step_ids", ()):
        yield f"-> `holdfast run retry-step {run_id} {step_id}` tries the failed step again"
    if error and not again and run["status"] in ("FAILED", "PAUSED"):
        yield f"{error['code']}: {error['message']}"
    if pause and error and error["code"] == "PoisonTurn":
        yield f"-> `holdfast run resume {run_id}` tries it once more, alone, when that is fixed"
    if run.get("done_again_by"):
        yield f"-> it was done again already: `holdfast run show {run['done_again_by']}` shows how that went"
    elif run["status"] == "FAILED":
        yield f"-> `holdfast run retry {run_id}` goes on from where it failed"
    if run.get("queued_at") or run.get("place"):
        yield _place(run)
    if run.get("active_task_id") and run["status"] == "RUNNING":
        yield f"-> `holdfast task show {run['active_task_id']}` shows what is asked"


def now_of(run: dict[str, Any]) -> str:
    """Return what a run does now, as a short text."""
    again, pause, error, status = run.get("retrying"), run.get("pause"), run.get("last_error"), run.get("status")
    if status in ("COMPLETED", "CANCELLED"):
        return ""
    is_by_error = error is not None and (run.get("failed_step_ids") or (pause and pause["reason"] == error["code"]))
    if status == "PAUSED" and pause and (pause["actor"] or not is_by_error):
        return _short(f"by {pause['actor'] or 'an operator'}{': ' + pause['reason'] if pause['reason'] else ''}")
    if status in ("FAILED", "PAUSED"):
        failed = [f"{step_id} failed: " for step_id in run.get("failed_step_ids", ())[:1]]
        return _short("".join(failed) + (error_of(error) or ""))
    if again:
        return _short(f"{_retried(again)}, {_next(again, distance)}")
    if run.get("queued_at") or run.get("place"):
        return _short(_place(run))
    kind = run.get("waiting_kind")
    return _short(f"{_WAITS.get(kind, kind)} {run.get('waiting_for') or ''}".rstrip() + _until(run)) if kind else ""


def _until(run: dict[str, Any]) -> str:
    """Return until when a run waits. A task stays open when its time is over."""
    until, kind = run.get("waiting_until"), run["waiting_kind"]
    if not until:
        return ""
    is_overdue = kind == "task" and _is_past(until)
    return (
        f", overdue since {moment(until)}" if is_overdue else f" {'at' if kind == 'start' else 'until'} {moment(until)}"
    )


def _retried(again: dict[str, Any]) -> str:
    times = "once" if again["failures"] == 1 else f"{again['failures']} times"
    return f"{again['activity']} failed {times}, {again['error_code']}"


def _next(again: dict[str, Any], words: Callable[[str], str]) -> str:
    at = again.get("next_at")
    return f"again {words(at)}" if at and not _is_past(at) else "again now"


def _is_past(text: str) -> bool:
    return datetime.fromisoformat(text).timestamp() * 1_000_000 < SystemClock().now()


def _place(run: dict[str, Any]) -> str:
    """Return which place a run waits for, and its position in the queue."""
    place = run.get("place")
    queued = f", queued {moment(run['queued_at'])}" if run.get("queued_at") else ""
    if not place:
        return f"waits for a place{queued}"
    of = f" of {place['limit']}" if place["step_id"] else ""
    return f"waits for a place{of}: {', '.join(_taken(place))}{queued}"


def _taken(place: dict[str, Any]) -> Iterator[str]:
    if place["taken"] is not None:
        yield f"{place['taken']} of {place['at_once']}" if place["at_once"] else f"{place['taken']} taken"
    if place["key"]:
        most = f" of {place['per_key']}" if place["per_key"] else " taken"
        yield f"{place['taken_of_key']}{most} for {place['key']}"
    yield f"{ordinal(place['in_line'])} in line"
    if place["waiting"] > 1:
        yield f"{place['waiting']} calls"


def ordinal(number: int) -> str:
    """Return a number as an ordinal: 1st, 2nd, 11th."""
    is_teen = 10 < number % 100 < 14
    return f"{number}{'th' if is_teen else {1: 'st', 2: 'nd', 3: 'rd'}.get(number % 10, 'th')}"


def _short(text: str) -> str:
    return text if len(text) <= SHORT_CHARS else f"{text[: SHORT_CHARS - 1]}…"
