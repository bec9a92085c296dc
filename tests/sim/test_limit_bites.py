"""The simulator bites where limits on activities are broken: each of these faults is found within a few seeds."""

from __future__ import annotations

import logging
from collections.abc import Iterator

import pytest

from holdfast.core.call_limits import CallDecision, CallLimit
from holdfast.core.instants import Instant
from holdfast.store.memory import run
from holdfast.store.memory.call_limits import Call, CallLimits, Id
from tests.sim.planted import SEATED, first_finding
from tests.sim.story import Story

pytestmark = [
    pytest.mark.slow,
    pytest.mark.contract("ACT-7"),
    pytest.mark.filterwarnings("ignore:Exception ignored in:pytest.PytestUnraisableExceptionWarning"),
]


FEW = 10
"""Of so many seeds one finds a fault that bites often."""


@pytest.fixture(autouse=True)
def _silence() -> Iterator[None]:
    """Let nodes fail without a word."""
    logger = logging.getLogger("holdfast")
    level = logger.level
    logger.setLevel(logging.CRITICAL + 1)
    yield
    logger.setLevel(level)


def finding() -> str:
    """Return what one of few seeds finds in runs with calls under a limit."""
    return first_finding(Story(runs=0, payers=0, featured=8), FEW)


def test_it_finds_a_rate_that_forgets(monkeypatch: pytest.MonkeyPatch) -> None:
    begin = CallLimits._begin

    def forget(self: CallLimits, name: str, tenant: str, key: str, limit: CallLimit, now: Instant) -> None:
        begin(self, name, tenant, key, limit, now)
        self._begins[name] = self._begins[name][-1:]

    monkeypatch.setattr(CallLimits, "_begin", forget)
    assert "calls have begun within" in finding()


def test_it_finds_a_place_that_is_never_freed(monkeypatch: pytest.MonkeyPatch) -> None:
    """A lost node keeps its place, so who waits for it waits for ever."""
    decide = CallLimits._decide

    def count_lost(self: CallLimits, name: str, calls: list[Call], limit: CallLimit, now: Instant) -> CallDecision[Id]:
        kept = [call._replace(visible_at=max(call.visible_at, now + 1)) if call.is_taken else call for call in calls]
        return decide(self, name, kept, limit, now)

    monkeypatch.setattr(CallLimits, "_decide", count_lost)
    assert "is stuck: nothing becomes of sit" in finding()


def test_it_finds_a_late_heartbeat_that_keeps_a_place(monkeypatch: pytest.MonkeyPatch) -> None:
    """An overrun after a crash: another call has got the place meanwhile."""
    monkeypatch.setattr(run, "is_limited", lambda queue: False)
    assert "more calls have places than there are" in first_finding(SEATED)
