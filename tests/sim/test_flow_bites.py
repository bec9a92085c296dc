"""The simulator bites in flows too: each of these faults is found within a few seeds."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from typing import Any

import pytest

from holdfast.program.flow import program as flow_program
from holdfast.program.flow.cursor import Position, saved
from holdfast.program.flow.program import FlowProgram
from tests.sim.planted import first_finding
from tests.sim.story import Story

pytestmark = pytest.mark.slow


@pytest.fixture(autouse=True)
def _silence() -> Iterator[None]:
    """Let nodes fail without a word."""
    logger = logging.getLogger("holdfast")
    level = logger.level
    logger.setLevel(logging.CRITICAL + 1)
    yield
    logger.setLevel(level)


@pytest.mark.contract("WF-2", "WF-5")
def test_it_finds_choices_of_a_flow_that_are_made_again_at_replay(monkeypatch: pytest.MonkeyPatch) -> None:
    recorded = FlowProgram._recorded

    def made_again(self: FlowProgram, path: str, what: str, make: Any) -> Any:
        is_replaying, self.is_replaying = self.is_replaying, self.is_replaying and what != "choice"
        try:
            return recorded(self, path, what, make)
        finally:
            self.is_replaying = is_replaying

    monkeypatch.setattr(FlowProgram, "_recorded", made_again)
    assert first_finding(Story(runs=0, payers=0, flows=8)) != "nothing"


@pytest.mark.contract("WF-4", "CAN-1")
def test_it_finds_a_rotation_that_forgets_what_has_to_be_undone(monkeypatch: pytest.MonkeyPatch) -> None:
    save = saved

    def forget(position: Position) -> Any:
        undo, position.undo = position.undo, []
        try:
            return save(position)
        finally:
            position.undo = undo

    monkeypatch.setattr(flow_program, "saved", forget)
    assert "is not undone" in first_finding(Story(runs=0, payers=0, flows=8))
