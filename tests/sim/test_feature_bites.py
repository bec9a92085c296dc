"""The simulator bites in streams and debounced starts too: each of these faults is found within a few seeds."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from typing import Any

import pytest
from msgspec.structs import replace

from holdfast.core.schedules import TickDecision, decide_ticks
from holdfast.core.streams import Decided, decide_append
from holdfast.engine import schedules
from holdfast.engine.start.forks import Forks
from holdfast.engine.turns.execute import _Beginning
from holdfast.store import streams
from tests.sim.planted import first_finding
from tests.sim.story import SMALL, Story

pytestmark = pytest.mark.slow


@pytest.fixture(autouse=True)
def _silence() -> Iterator[None]:
    """Let nodes fail without a word."""
    logger = logging.getLogger("holdfast")
    level = logger.level
    logger.setLevel(logging.CRITICAL + 1)
    yield
    logger.setLevel(level)


def finding() -> str:
    """Return what the first seed finds that finds anything in runs with features."""
    return first_finding(Story(runs=0, payers=0, featured=8))


@pytest.mark.contract("QUE-6")
def test_it_finds_debounced_runs_that_begin_with_their_first_input(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_Beginning, "replace_input", lambda self, event: None)
    assert "was its last input" in finding()


@pytest.mark.contract("STR-1")
def test_it_finds_streams_that_do_not_know_what_a_step_has_written(monkeypatch: pytest.MonkeyPatch) -> None:
    def append(head: Any, writer: Any, given: Any, most_bytes: int, now: int) -> Any:
        known = None if given.resumes else writer
        return decide_append(head, known, given, most_bytes, now)

    monkeypatch.setattr(streams, "decide_append", append)
    assert "it has written" in finding()


@pytest.mark.contract("STR-1")
def test_it_finds_chunks_of_a_turn_that_are_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(streams, "decide_chunks", lambda head, *given: Decided(head=head))
    assert "its code has written" in finding()


@pytest.mark.contract("WF-7")
def test_it_finds_retries_that_are_made_twice_for_one_request(monkeypatch: pytest.MonkeyPatch) -> None:
    named = Forks._named_retry

    def with_another_id(self: Forks, run_id: str, command: Any) -> tuple[str, str]:
        _, number = named(self, run_id, command)
        return self._ids.new_id(), number + self._ids.new_id()

    monkeypatch.setattr(Forks, "_named_retry", with_another_id)
    assert "has made" in finding()


@pytest.mark.contract("TMR-2")
def test_it_finds_ticks_that_are_passed_over(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the ticks that are due together, as after an outage, the last one alone starts a run."""

    def last_alone(*given: Any, **more: Any) -> TickDecision:
        decided = decide_ticks(*given, **more)
        return replace(decided, starts=decided.starts[-1:])

    monkeypatch.setattr(schedules, "decide_ticks", last_alone)
    assert "these ticks were missed" in first_finding(SMALL)
