"""How fast the core is, with a floor far below what a quiet machine does. `make bench` measures in earnest."""

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from holdfast.core.commands import RunActivity
from holdfast.core.decide import apply_commands, decide
from holdfast.core.event_writer import Decision
from holdfast.core.messages import ActivitySucceeded
from holdfast.core.state import fold
from tests.core.driver import BY, START, Driver

STEPS = 5_000
ROUNDS = 5
FLOOR = 60_000
"""Events a second. A quiet machine does several times as many; tests run in parallel on busy ones."""


@contextmanager
def nobody_watching() -> Iterator[None]:
    """Leave out the measurement of coverage, which would be most of what is measured here."""
    watcher = sys.gettrace()
    sys.settrace(None)
    try:
        yield
    finally:
        sys.settrace(watcher)


def events_per_second() -> float:
    """Ask for a step, fold, tell its result, fold, one step after the other."""
    state = Driver().start().state
    began = time.process_time()
    for number in range(STEPS):
        step_id = f"charge#{number}"
        asked = apply_commands(state, (RunActivity(step_id=step_id, name="charge"),), START, BY)
        assert isinstance(asked, Decision)
        state = fold(state, asked.events)
        told = decide(state, ActivitySucceeded(step_id, 1), START, BY)
        assert isinstance(told, Decision)
        state = fold(state, told.events)
    return 2 * STEPS / (time.process_time() - began)


def test_the_core_decides_and_folds_fast_enough(capsys: pytest.CaptureFixture[str]) -> None:
    with nobody_watching():
        best = max(events_per_second() for _ in range(ROUNDS))
    with capsys.disabled():
        print(f"\ncore: {best:,.0f} events/s, one step at a time")
    assert best > FLOOR


def test_folding_a_long_history_costs_no_more_for_each_event() -> None:
    run = Driver().start()
    for number in range(2_000):
        run.ask(RunActivity(step_id=f"s{number}", name="charge"))  # all of them stay open

    def cost(events: int) -> float:
        begun = Driver().state
        began = time.process_time()
        fold(begun, run.events[1:events])
        return (time.process_time() - began) / events

    with nobody_watching():
        short, long = min(cost(200) for _ in range(9)), min(cost(2_000) for _ in range(9))
    assert long < 4 * short + 2e-6
