"""Flows are crashed before and after each of their commits, on every store, and come to the same end all the same."""

from __future__ import annotations

from collections import Counter
from contextlib import suppress
from pathlib import Path
from random import Random
from typing import Any

import pytest

import holdfast as hf
from holdfast import errors
from holdfast.core import events as e
from holdfast.testing.samples import read_history
from tests.crash.interrupted_nodes import (
    OPTIONS,
    Edge,
    InterruptedMemoryNodes,
    InterruptedNodes,
    InterruptedPostgresNodes,
    InterruptedStore,
)
from tests.flows.random_flows import Calls, Counts, Outcome, Shape, build, draw, expected, leaves_of

pytestmark = [pytest.mark.slow, pytest.mark.contract("WF-1", "WF-2", "ACT-1", "OWN-3", "CAN-1")]

RUN_ID = "run-1"
SEEDS = {"memory": range(12), "sqlite": range(100, 106), "postgres": range(201, 204)}


class Story:
    """A random flow, and clients that do what it waits for. It may be told again in every life."""

    def __init__(self, seed: int) -> None:
        rng = Random(f"crash/{seed}")
        self.shape: Shape = draw(rng, is_rough=seed % 3 == 2)
        self.app = hf.App("random", limits=hf.Limits(rotation_steps=rng.choice((4, 1_000))))
        self.flow = build(self.app, self.shape, Calls())
        self.expected: Outcome = expected(self.shape, Counts())

    async def __call__(self, app: hf.App) -> Any:
        run = await app.start(self.flow, Counts(), run_id=RUN_ID)
        for leaf in leaves_of(self.shape).values():
            if leaf.kind == "signal":
                with suppress(errors.RunTerminal):  # it ended in the life before
                    await run.signal(f"go-{leaf.name}", 1, signal_id=leaf.name)
        try:
            return await run.result()
        except errors.RunFailed as failure:
            return failure.info.message


def without_tasks(seed: int) -> Story:
    """Return a story in which no person has to answer. Each third flow fails."""
    for attempt in range(1_000):
        story = Story(seed + 1_000 * attempt)
        leaves = leaves_of(story.shape)
        is_wanted = 5 <= len(leaves) <= 12 and bool(story.expected.failed) is (seed % 3 == 2)
        if is_wanted and not any(leaf.kind == "task" for leaf in leaves.values()):
            return story
    raise AssertionError("every random flow has a task")


def check(story: Story, result: Any, where: str) -> None:
    """Compare what came of a flow with what the naive interpreter says."""
    if story.expected.failed:
        assert isinstance(result, str), where
        assert any(f"<{name}>" in result or f"{name}'" in result for name in story.expected.failed), where
    else:
        assert result == story.expected.state, where


async def check_history(store: Any, where: str) -> None:
    """No result is recorded twice, and all that was completed in a failed flow is undone."""
    history = await read_history(store, RUN_ID)
    ended = Counter(event.step_id for event in history if type(event.data) in e.CLOSING)
    assert max(ended.values(), default=1) == 1, f"{where}: a step ended twice"


@pytest.fixture(params=["memory", "sqlite", "postgres"])
def kind(request: pytest.FixtureRequest) -> str:
    """Return the kind of store."""
    return str(request.param)


@pytest.mark.parametrize("edge", ["before", "after"])
async def test_random_flow_finishes_after_a_crash_at_any_commit(
    kind: str, edge: Edge, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    crashes = 0
    for seed in SEEDS[kind]:
        dies_at = 1
        while True:
            story = without_tasks(seed)
            nodes: InterruptedNodes
            if kind == "memory":
                nodes = InterruptedMemoryNodes(story.app, OPTIONS)
            elif kind == "sqlite":
                nodes = InterruptedNodes(story.app, tmp_path / f"{seed}-{dies_at}.db", OPTIONS)
            else:
                databases = request.getfixturevalue("databases")
                with databases.store() as url:
                    if not await crash_once(InterruptedPostgresNodes(story.app, url), story, dies_at, edge, seed):
                        break
                dies_at += 1
                continue
            if not await crash_once(nodes, story, dies_at, edge, seed):
                break
            dies_at += 1
        crashes += dies_at - 1
    assert crashes > 2 * len(SEEDS[kind]), "the crashes miss what they are aimed at"


async def crash_once(nodes: InterruptedNodes, story: Story, dies_at: int, edge: Edge, seed: int) -> bool:
    """Live until the n-th commit, and then to the end. Return whether it died there."""
    where = f"seed {seed}, {edge} commit {dies_at}"
    first = await nodes.live(story, dies_at, edge, ["commit"])
    result = await nodes.live(story) if isinstance(first, InterruptedStore) else first
    check(story, result, where)
    store = await nodes.open()
    try:
        await check_history(store, where)
    finally:
        await nodes.close(store)
    return isinstance(first, InterruptedStore)
