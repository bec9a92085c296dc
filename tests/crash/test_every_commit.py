"""Every workflow of the examples is crashed before and after each of its writes, and finishes all the same.

The n-th write of each kind (a run created, a signal delivered, runs claimed, turns committed) is a node's last, for
n = 1, 2, 3 … until the scenario ends before it gets there. Another node finishes the run. Each kind is counted by
itself: how often a node claims depends on how busy the machine is, how often it commits does not.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from functools import partial
from pathlib import Path
from types import ModuleType

import pytest
from msgspec.structs import replace

from examples import orders
from holdfast.core import events as e
from holdfast.core.invariants import check, check_drained
from holdfast.core.messages import AcceptedSignalResult
from holdfast.engine.options import NodeOptions
from holdfast.store.sqlite import SqliteStore
from holdfast.testing import system_view
from holdfast.testing.samples import read_history
from tests.crash import rotating_updates
from tests.crash.interrupted_nodes import (
    OPTIONS,
    WRITES,
    Edge,
    InterruptedNodes,
    InterruptedStore,
    Scenario,
    counted_effects,
)
from tests.crash.scenarios import RUN_ID, SCENARIOS, buy

pytestmark = [pytest.mark.slow, pytest.mark.contract("WF-2", "ACT-1", "OWN-3", "MSG-2", "SIG-4", "INV")]

ENDED = (e.StepCompleted, e.StepFailed)
MOST_LIVES = 100


async def recorded_steps(path: Path) -> Counter[str]:
    """Return the steps whose activity has ended for good, with how often that was recorded."""
    store = await SqliteStore.open(path)
    try:
        history = await read_history(store, RUN_ID)
    finally:
        await store.close()
    ended = (event.step_id or "" for event in history if isinstance(event.data, ENDED))
    return Counter(step_id for step_id in ended if not step_id.endswith(":store"))  # which is the engine's own


async def check_file(path: Path, acknowledged: Iterable[AcceptedSignalResult]) -> None:
    """Check everything that must hold when all is done."""
    store = await SqliteStore.open(path)
    try:
        view = await system_view(store, acknowledged)
        assert check(view) == []
        assert check_drained(view) == []
    finally:
        await store.close()


async def crash_at(
    example: ModuleType,
    scenario: Scenario,
    path: Path,
    verb: str,
    dies_at: int,
    edge: Edge,
    expected: object,
    options: NodeOptions,
) -> bool:
    """Live until the n-th call of a verb, and then to the end. Return whether it died there."""
    nodes = InterruptedNodes(example.app, path, options)
    with counted_effects(example) as effects:
        first = await nodes.live(scenario, dies_at, edge, [verb])
        if not isinstance(first, InterruptedStore):
            assert first == expected
            return False
        recorded_then = await recorded_steps(path)
        effects_then = {step_id: effects[RUN_ID, step_id] for step_id in recorded_then}
        result = await nodes.live(scenario)
    where = f"{edge} {verb} {dies_at}"
    assert result == expected, where
    recorded = await recorded_steps(path)
    assert set(recorded.values()) <= {1}, f"{where}: a result was recorded twice"
    assert {step_id for run_id, step_id in effects} >= set(recorded), f"{where}: a result without an effect"
    assert effects_then == {step_id: effects[RUN_ID, step_id] for step_id in recorded_then}, (
        f"{where}: an effect was repeated though its result was recorded"
    )
    await check_file(path, nodes.acknowledged)
    return True


async def crash_everywhere(
    example: ModuleType, scenario: Scenario, folder: Path, edge: Edge, options: NodeOptions = OPTIONS
) -> Counter[str]:
    """Crash at each write in turn; return how often each verb was died in."""
    expected = await InterruptedNodes(example.app, folder / "whole.db").live(scenario)
    deaths: Counter[str] = Counter()
    for verb in WRITES:
        while await crash_at(
            example, scenario, folder / f"{verb}-{deaths[verb]}.db", verb, deaths[verb] + 1, edge, expected, options
        ):
            deaths[verb] += 1
    return deaths


@pytest.mark.parametrize("edge", ["before", "after"])
@pytest.mark.parametrize("name", SCENARIOS)
async def test_run_finishes_after_a_crash_at_any_write(name: str, edge: Edge, tmp_path: Path) -> None:
    example, scenario = SCENARIOS[name]
    deaths = await crash_everywhere(example, scenario, tmp_path, edge)
    print(dict(deaths))
    assert deaths["create"] == 1  # with the first turn, if the story begins with an activity
    assert deaths["commit"] >= (1 if name == "race" else 2), "the crashes miss what they are aimed at"


@pytest.mark.parametrize("edge", ["before", pytest.param("after", marks=pytest.mark.soak)])
@pytest.mark.parametrize("name", SCENARIOS)
async def test_run_that_is_created_before_its_first_turn_finishes_after_a_crash_at_any_write(
    name: str, edge: Edge, tmp_path: Path
) -> None:
    example, scenario = SCENARIOS[name]
    options = replace(OPTIONS, cached_runs=0)
    deaths = await crash_everywhere(example, scenario, tmp_path, edge, options)
    assert deaths["create"] == 1
    assert deaths["commit"] >= 2, "the crashes miss what they are aimed at"


@pytest.mark.parametrize("edge", ["before", "after"])
async def test_order_finishes_after_a_crash_at_any_write(edge: Edge, tmp_path: Path) -> None:
    deaths = await crash_everywhere(orders, partial(buy, ledger=tmp_path / "ledger"), tmp_path, edge)
    assert deaths["deliver"] == 1
    assert deaths["commit"] >= 4


@pytest.mark.parametrize("cached_runs", [OPTIONS.cached_runs, 0])
@pytest.mark.parametrize("name", SCENARIOS)
async def test_run_finishes_though_life_after_life_is_cut_short(name: str, cached_runs: int, tmp_path: Path) -> None:
    example, scenario = SCENARIOS[name]
    expected = await InterruptedNodes(example.app, tmp_path / "whole.db").live(scenario)
    path = tmp_path / "store.db"
    nodes = InterruptedNodes(example.app, path, replace(OPTIONS, cached_runs=cached_runs))
    outcomes: list[object] = []
    while len(outcomes) < MOST_LIVES and (not outcomes or isinstance(outcomes[-1], InterruptedStore)):
        outcomes.append(await nodes.live(scenario, 2, "after", counted=["commit"]))
    assert outcomes[-1] == expected
    if cached_runs == 0 or name != "race":  # which is created at work, and commits but once more
        assert len(outcomes) > 1, "no life was cut short"
    assert set((await recorded_steps(path)).values()) <= {1}
    await check_file(path, nodes.acknowledged)


@pytest.mark.contract("WF-6", "CAN-1")
@pytest.mark.parametrize("edge", ["before", "after"])
@pytest.mark.parametrize("cached_runs", [OPTIONS.cached_runs, 0])
async def test_an_update_that_is_answered_at_a_rotation_is_kept_after_a_crash_at_any_write(
    cached_runs: int, edge: Edge, tmp_path: Path
) -> None:
    scenario = partial(rotating_updates.rotate_while_answering, run_id=RUN_ID)
    assert await InterruptedNodes(rotating_updates.app, tmp_path / "first.db").live(scenario) == [10, 1]
    options = replace(OPTIONS, cached_runs=cached_runs)
    deaths = await crash_everywhere(rotating_updates, scenario, tmp_path, edge, options)
    assert deaths["commit"] >= 4
