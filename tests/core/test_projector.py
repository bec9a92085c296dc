"""A reader that keeps up: it resumes from its watermark, halts at gaps, and raises alerts."""

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from holdfast.core.commands import CompleteRun, RunActivity
from holdfast.core.events import Event
from holdfast.core.messages import ActivitySucceeded
from holdfast.core.snapshot import Alert, Projection, RunSnapshot, catch_up, project_run
from tests.core.driver import Driver

SECOND = 1_000_000
NOTHING = Projection(RunSnapshot(run_id="run-1"))


def make_history() -> list[Event]:
    """Three steps, one event a second."""
    driver = Driver().start()
    for name in ("reserve", "charge", "ship"):
        driver.ask(RunActivity(step_id=name, name=name))
        driver.tell(ActivitySucceeded(name, 1))
    driver.ask(CompleteRun())
    return [replace(event, persisted_at=event.run_seq * SECOND) for event in driver.events]


HISTORY = make_history()
END = len(HISTORY) * SECOND


@pytest.mark.contract("PRJ-3", "PRJ-2")
@given(cuts=st.sets(st.integers(0, len(HISTORY))), overlap=st.integers(0, 3))
def test_a_projector_that_crashed_resumes_from_its_watermark(cuts: set[int], overlap: int) -> None:
    projection = NOTHING
    for start, end in pairwise([0, *sorted(cuts), len(HISTORY)]):
        projection = Projection(projection.snapshot)  # all that survives the crash
        projection, alerts = catch_up(projection, HISTORY[max(0, start - overlap) : end], HISTORY[0].persisted_at)
        assert alerts == ()
    assert projection == Projection(project_run("run-1", HISTORY))


@pytest.mark.contract("EVT-6", "PRJ-3", "PRJ-2")
def test_a_gap_halts_marks_stale_and_raises_an_alert_until_it_closes() -> None:
    with_gap = HISTORY[:3] + HISTORY[5:]
    halted, alerts = catch_up(NOTHING, with_gap, END)
    assert halted == Projection(project_run("run-1", HISTORY[:3]), is_stale=True)
    assert alerts[-1] == Alert("PROJECTOR_GAP_DETECTED", 1, "run-1", "event 6 follows event 3")
    still, _ = catch_up(halted, HISTORY[5:], END)
    assert still == halted
    resumed, alerts = catch_up(halted, HISTORY[3:], HISTORY[-1].persisted_at)
    assert resumed == Projection(project_run("run-1", HISTORY))
    assert all(alert.code != "PROJECTOR_GAP_DETECTED" for alert in alerts)


@pytest.mark.contract("PRJ-3")
@pytest.mark.parametrize(("lag_ms", "is_high"), [(0, False), (4_999, False), (5_000, False), (5_001, True)])
def test_a_lag_over_five_seconds_raises_an_alert(lag_ms: int, is_high: bool) -> None:
    first = HISTORY[:1]
    _, alerts = catch_up(NOTHING, first, first[0].persisted_at + lag_ms * 1_000)
    assert [alert.code for alert in alerts] == ["PROJECTOR_LAG_HIGH"] * is_high
    assert all(alert.priority == 2 for alert in alerts)


@pytest.mark.contract("PRJ-3")
def test_nothing_new_raises_nothing() -> None:
    current, _ = catch_up(NOTHING, HISTORY, END)
    assert catch_up(current, HISTORY, END + 3_600 * SECOND) == (current, ())
