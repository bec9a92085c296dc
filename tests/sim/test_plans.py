"""The simulator plays plans, and bites: a planted bug in the interpreter is found within a few seeds."""

from __future__ import annotations

import heapq
import logging
from collections.abc import Iterator
from typing import Any

import pytest

from holdfast.program.plan.program import PlanProgram
from tests.sim.simulation import simulate
from tests.sim.story import Story

pytestmark = pytest.mark.slow

SEEDS = 8
FOUND = (2_000_095,)
"""Seeds that have found a mistake: a step waited for an outcome of a start of it that was never committed."""
BITES = 20


@pytest.fixture(autouse=True)
def _silence() -> Iterator[None]:
    """Let nodes fail without a word."""
    logger = logging.getLogger("holdfast")
    level = logger.level
    logger.setLevel(logging.CRITICAL + 1)
    yield
    logger.setLevel(level)


@pytest.mark.contract("WF-1", "WF-2", "WF-4", "CAN-1", "INV")
@pytest.mark.parametrize("seed", [*range(SEEDS), *FOUND])
def test_whatever_goes_wrong_plans_keep_their_order_and_their_results(seed: int) -> None:
    report = simulate(seed, Story(runs=0, payers=0, plans=8))
    assert report.violations == [], "\n".join(report.trace[-60:])
    assert any(name.startswith("plans: ") for name in report.counts)


@pytest.mark.contract("WF-1")
def test_it_finds_steps_that_begin_before_what_they_depend_on(monkeypatch: pytest.MonkeyPatch) -> None:
    settle = PlanProgram._settle

    def hasty(self: PlanProgram, position: int, status: int, result: Any = None) -> None:
        settle(self, position, status, result)
        for other in self.definition.steps[position].dependents:
            if self._left[other] == 1:
                self._left[other] = 0
                heapq.heappush(self._ready, other)

    monkeypatch.setattr(PlanProgram, "_settle", hasty)
    assert any(simulate(seed, Story(runs=0, payers=0, plans=8)).violations for seed in range(BITES))
