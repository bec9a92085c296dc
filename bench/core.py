"""The core alone, without any store: how many events a second it decides and folds."""

import statistics
import time

from bench.effort import Effort
from bench.report import Rows, progress
from holdfast.core.commands import RunActivity
from holdfast.core.decide import apply_commands, decide, queue_run
from holdfast.core.event_writer import Decision
from holdfast.core.events import EngineRunRef, Event, RunQueued
from holdfast.core.messages import ActivitySucceeded
from holdfast.core.state import RunState, fold, state_of

BY = EngineRunRef("bench", 1)
RUN_ID = "0198c5a0-0000-7000-8000-000000000000"


def measure(effort: Effort) -> Rows:
    """Measure the core."""
    progress("core: one step at a time")
    decided: list[float] = []
    folded: list[float] = []
    history: list[Event] = []
    for _ in range(effort.rounds):
        began = time.perf_counter()
        history = _history(effort.core_events)
        decided.append(len(history) / (time.perf_counter() - began))
    progress("core: fold")
    for _ in range(effort.rounds):
        began = time.perf_counter()
        state = state_of(RUN_ID, history)
        folded.append(len(history) / (time.perf_counter() - began))
        assert state.version == len(history)
    return {
        "decide, apply commands and fold, one step at a time": _row(decided),
        f"fold of {len(history):,} events": _row(folded),
    }


def _row(rates: list[float]) -> dict[str, float | list[float]]:
    return {"events/s": statistics.median(rates), "lowest": min(rates), "highest": max(rates)}


def _history(length: int) -> list[Event]:
    """Run a program that does one activity after the other: a result comes in, the next activity goes out."""
    queued = queue_run(RUN_ID, RunQueued("bench", "1"), 1, BY)
    history = list(queued.events)
    state = fold(RunState(run_id=RUN_ID), queued.events)
    answer = decide(state, queued.messages[0], 1, BY)
    now = 1
    while len(history) < length:
        now += 1
        assert isinstance(answer, Decision)
        state = fold(state, answer.events)
        history += answer.events
        step_id = f"charge#{now}"
        asked = apply_commands(state, [RunActivity(step_id=step_id, name="charge")], now, BY)
        assert isinstance(asked, Decision)
        state = fold(state, asked.events)
        history += asked.events
        answer = decide(state, ActivitySucceeded(step_id, 1), now, BY)
    return history
