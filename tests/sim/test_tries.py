"""Whom the simulation takes for blamed: see `tests/sim/tries.py`."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from msgspec.structs import replace

from holdfast.engine.turns.poison import counting_turn
from holdfast.limits import SUSPECT_LOSSES
from holdfast.store import port
from holdfast.store.types import created_run
from holdfast.testing.samples import new_run
from holdfast.testing.sim_loop import SimLoop, SimProcess
from tests.sim.tries import Tries

HEAD = created_run(new_run("tried"), "n0#1", now=0).head
SUSPECT = replace(HEAD, lease_epoch=3, losses=SUSPECT_LOSSES)


def tried_alone(head: port.RunHead) -> tuple[Tries, list[str]]:
    """Return the judge after a run was tried alone, which is like this now, by a process that is called n0."""
    violations: list[str] = []
    store = SimpleNamespace(head_of=lambda run_id: head)
    world: Any = SimpleNamespace(store=store, note=lambda *given: None, violate=violations.append)
    loop, tries = SimLoop(0), Tries(world)
    turn = counting_turn(SUSPECT, SUSPECT.losses + 1)

    async def note() -> None:
        tries.note([turn], [SUSPECT])

    async def main() -> None:
        await SimProcess(loop, "n0").spawn(note())

    loop.simulate(main())
    return tries, violations


@pytest.mark.contract("MSG-3")
def test_a_run_that_ends_the_process_while_another_is_tried_there_is_a_finding() -> None:
    tries, violations = tried_alone(SUSPECT)
    tries.blame("other", "n1")
    assert violations == []
    tries.blame("other", "n0")
    assert violations == ["other ends the process while tried is tried, which is blamed for it"]


@pytest.mark.contract("MSG-3")
def test_a_try_is_over_when_its_node_has_lost_the_run_also_if_the_process_has_it_again() -> None:
    """A process whose node was superseded comes back with another life, and has not begun to try it again."""
    tries, violations = tried_alone(replace(SUSPECT, lease_owner="n0#2", lease_epoch=SUSPECT.lease_epoch + 1))
    tries.blame("other", "n0")
    assert violations == []
