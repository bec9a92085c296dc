"""Random runs that fail somewhere, retried until they succeed: what has succeeded is never executed again."""

import asyncio
import os
from collections import Counter
from random import Random
from typing import Any

import pytest

import holdfast as hf
from holdfast.core import events as e
from holdfast.core.invariants import check
from holdfast.errors import RunFailed
from holdfast.testing import view_of
from tests.engine.harness import EngineVariant

pytestmark = pytest.mark.contract("SIG-13", "WF-7")

SEEDS = int(os.environ.get("TEST_EXAMPLES", "6"))
ONCE = hf.Retry(max_attempts=1)


def tree(rng: Random, depth: int, names: list[str], *, sends: bool) -> list[Any]:
    """Return a random tree of steps: activities, sequences, and groups that wait for each other in several ways."""
    kinds = (
        ["act", "act", "sleep", *(["send"] if sends else [])]
        if depth == 0
        else ["act", "sleep", "signal", "sequence", "gather", "whole", "group", "timeout"]
    )
    kind = rng.choice(kinds)
    if kind in ("act", "sleep", "signal", "send"):
        names.append(f"{kind}-{len(names)}")
        return [kind, names[-1]]
    return [kind, *(tree(rng, depth - 1, names, sends=sends) for _ in range(rng.randint(2, 3)))]


class Story:
    """A workflow that carries a tree out, whose activities fail as often as they are to, and what was carried out."""

    def __init__(self, seed: int) -> None:
        rng = self.rng = Random(seed)
        self.names: list[str] = []
        self.tree = ["sequence", *(tree(rng, 2, self.names, sends=seed % 2 == 0) for _ in range(3))]
        acts = [name for name in self.names if name.startswith("act")]
        self.failures = Counter(rng.choices(acts, k=rng.randint(1, 4))) if acts else Counter[str]()
        self.done: Counter[str] = Counter()
        self.app = app = hf.App("random")

        @app.activity(retry=ONCE)
        async def act(name: str, run_id: str) -> str:
            await asyncio.sleep(rng.choice((0.0, 0.0, 0.005)))
            if self.failures[name] > 0:
                self.failures[name] -= 1
                raise ValueError(name)
            self.done[name] += 1
            return name

        async def play(node: list[Any]) -> list[str]:
            kind, *parts = node
            if kind == "act":
                return [await act.options(name=parts[0])(parts[0], hf.run_info().run_id)]
            if kind == "sleep":
                await hf.sleep(0.002)
                return parts
            if kind == "send":
                await app.run("office").signal(parts[0], parts[0])
                return parts
            if kind == "signal":
                return [await hf.wait_signal(parts[0], str)]
            if kind == "sequence":
                return [name for part in parts for name in await play(part)]
            if kind == "timeout":
                async with asyncio.timeout(3600):
                    return [name for part in parts for name in await play(part)]
            if kind == "group":
                async with asyncio.TaskGroup() as group:
                    tasks = [group.create_task(play(part)) for part in parts]
                return [name for task in tasks for name in task.result()]
            found = await asyncio.gather(*map(play, parts), return_exceptions=kind == "whole")
            for each in found:
                if isinstance(each, BaseException):
                    raise each
            return [name for part in found for name in part]

        @app.workflow(entity=True)
        async def office() -> None:
            await hf.wait_signal("close")

        @app.workflow
        async def story() -> list[str]:
            return await play(self.tree)

        self.workflow, self.office = story, office

    async def attend(self, run: hf.RunHandle[Any]) -> Any:
        """Send a run the signals that it has not got yet, and wait for its end."""
        known = {event.data.name for event in await run.events() if event.event_type == "SignalReceived"}  # type: ignore[attr-defined]
        for name in self.names:
            if name.startswith("signal") and name not in known:
                await run.signal(name, name, signal_id=name)
        return await run.result()


@pytest.mark.parametrize("seed", [*range(SEEDS), 37])  # in 37 a failure cancels a time-out beside others
async def test_a_random_run_is_retried_to_its_end(seed: int, variant: EngineVariant) -> None:
    base = int(os.environ.get("TEST_SEED", "0"))
    story = Story(base + seed)
    async with variant.node(story.app):
        await story.app.start(story.office, run_id="office")
        run, recorded = await story.app.start(story.workflow), dict[str, int]()
        for attempt in range(1, 12):
            try:
                result = await story.attend(run)
                break
            except (RunFailed, hf.errors.RunTerminal):
                events = await run.events()
                recorded |= {event.step_id or "": 0 for event in events if isinstance(event.data, e.StepCompleted)}
                recorded = {name: story.done[name] for name in recorded}
                view = await view_of(story.app.runtime().store, run.run_id)
                assert view is not None
                assert check(view) == [], (base + seed, attempt)
                run = await run.retry_run(signal_id=f"retry {attempt}")
                redone = {name for name, count in recorded.items() if story.done[name] != count}
                assert not redone, (base + seed, attempt, redone, story.tree)
        else:
            pytest.fail(f"seed {base + seed} has not ended: {story.tree}")
        assert result == story.names, base + seed
        assert story.failures.total() == 0
        redone = {name for name, count in recorded.items() if story.done[name] != count}
        assert not redone, (base + seed, redone, story.tree)
        view = await view_of(story.app.runtime().store, run.run_id)
        assert view is not None
        assert check(view) == [], base + seed
