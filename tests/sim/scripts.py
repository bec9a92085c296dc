"""Random workflows: a script is data, drawn from a seed, and one workflow plays any script.

A script is a list of operations, each a list that begins with its name. Playing one returns what was seen on the way,
so that the result of a run depends on everything that it was told.
"""

from __future__ import annotations

import asyncio
from collections.abc import Container
from copy import copy
from datetime import timedelta
from random import Random
from typing import Any

import holdfast as hf
from holdfast.app import App
from holdfast.program.flow.definition import FlowDefinition
from holdfast.program.tasks import Escalation
from holdfast.workflow import Flow, Workflow
from tests.sim.flows import register_flows
from tests.sim.world import AT_ONCE, PER_KEY, RATE, World, key_of

Script = list[Any]

SIGNALS = ("go", "stop")

ROTATING: Script = [["sleep", 1.0], ["again", [["sleep", 1.0], ["again", [["sleep", 1.0], ["again", []]]]]]]
"""A script that rotates while it is updated."""


def poked(token: str) -> list[str]:
    """Return what a run has seen when it has answered an update."""
    return ["poked", token]


def draw_script(rng: Random, depth: int = 0, length: int | None = None) -> Script:
    """Return a random script."""
    return [_draw(rng, depth) for _ in range(length or rng.randint(1, 4 if depth == 0 else 2))]


def _draw(rng: Random, depth: int) -> list[Any]:
    simple = ["work", "work", "work", "sleep", "wait", "wait", "ask", "send"]
    nested = ["all", "race", "child", "narrow", "limit", "cleanup", "attempt", "again", "saga", "die"]
    kind = rng.choice(simple if depth >= 3 else simple + nested)
    match kind:
        case "work":
            where = [rng.choice(("", "", "far")), rng.random() < 0.2, rng.choice(("raise", "raise", "pause"))]
            return ["work", _duration(rng), rng.choice((0, 0, 0, 1, 2, 5)), rng.choice((1, 3, 3, 4)), *where]
        case "die":
            return ["die", f"{rng.getrandbits(32):x}", rng.choice((1, 2, 9))]
        case "sleep":
            return ["sleep", rng.choice((0.01, 0.5, 2.0, 7.0))]
        case "wait":
            return ["wait", rng.choice(SIGNALS), rng.choice((None, 0.05, 1.0, 6.0))]
        case "ask":
            return ["ask", rng.choice((1, 1, 2)), rng.choice((None, 0.7, 4.0)), rng.choice((None, 1.5))]
        case "send":
            return ["send", f"r{rng.randint(0, 9)}", rng.choice(SIGNALS)]
        case "all" | "race":
            return [kind, [draw_script(rng, depth + 1) for _ in range(rng.randint(2, 3))]]
        case "child":
            return ["child", draw_script(rng, depth + 1), rng.choice(("await", "await", "abandon", "cancel"))]
        case "limit":
            return ["limit", rng.choice((0.2, 1.5)), draw_script(rng, depth + 1)]
        case _:
            return [kind, draw_script(rng, depth + 1)]


def _duration(rng: Random) -> float:
    return rng.choice((0.0, 0.0, 0.0, 0.01, 0.3, 0.3, 2.0, 9.0))


MOODS = ("", "", "", "", "denies", "invents", "doubts", "babbles", "forgets", "raises")
"""How verifiers answer: truly, or in some other way."""


def draw_payments(rng: Random, number: int) -> Script:
    """Return a script of payments, each under a key of its own."""
    return [
        [
            f"pay{number}-{place}",
            rng.choice((0.0, 0.3, 0.3, 2.0, 6.0)),
            rng.choice((0, 0, 1, 2)),
            rng.choice((0, 1, 3, 3)),
            rng.choice(("", "", "far")),
            rng.choice(MOODS),
            rng.choice((None, None, None, 3.0)),
        ]
        for place in range(rng.randint(1, 4))
    ]


class Definitions:
    """The workflows and activities of one story, made once: hundreds of its nodes have the same code."""

    def __init__(self, world: World) -> None:
        self._app = App("sim")
        register(self._app, world)
        self._registry = self._app.registry
        for name, version in self._registry.workflows:  # which every copy has then; all nodes have the same code
            vars(self._registry.workflows[name, version])["fingerprint"] = f"{name} {version}"

    def given_to(self, app: App, versions: Container[str], newest: str) -> dict[str, Any]:
        """Register them with the app of one process, those of these versions alone. Return the workflows.

        What a process learns of its workflows, their queries and updates, it has to learn by itself.
        """
        registry = self._registry
        for activity in registry.activities.values():
            app.registry.add_activity(activity)
        for name, sink in registry.sinks.items():
            app.registry.add_sink(sink, registry.projections.get(name))
        app.registry.schedules.update(registry.schedules)
        given: dict[str, Any] = {}
        dated = {name for name, version in registry.workflows if version != "1"}
        for (name, version), shared in registry.workflows.items():
            if name in dated and version not in versions:
                continue
            own = copy(shared)
            own.queries, own.updates = dict(shared.queries), dict(shared.updates)
            app.registry.add_workflow(own, registry.workflow_limits.get(name))
            if name not in given or version == newest:
                given[name] = Flow(own) if isinstance(own, FlowDefinition) else Workflow(own)
        return given


def register(app: App, world: World) -> None:
    """Register the workflows that play scripts, and their activity, with an app.

    Only few runs of `narrow` are admitted at once. It starts no children: they could wait for their parent's place.
    """

    @app.activity(retry=hf.Retry(max_attempts=3, initial_ms=200, most_ms=2_000))
    async def work(seconds: float, failures: int, is_later: bool = False) -> str:
        return await world.effect(seconds, failures, is_later)

    @app.workflow
    async def play(script: list[Any], seen: list[Any]) -> list[Any]:
        async def poke(seconds: float, token: str) -> str:
            answer = await work(seconds, 0)
            seen.append(poked(token))
            return answer

        hf.on_query("seen", lambda: seen)
        hf.on_update("poke", poke)
        return await Player(app, world, work, {"play": play, "narrow": narrow}, seen, is_top=True).run(script)

    @app.workflow(at_once=AT_ONCE, per_key=PER_KEY, key=key_of, rate=RATE)
    async def narrow(script: list[Any], seen: list[Any]) -> list[Any]:
        hf.on_query("seen", lambda: seen)
        return await Player(app, world, work, {}, seen, is_top=True).run(script)

    @app.activity(idempotency_key=lambda key: key, verify=world.find_charge, verify_timeout=3)
    async def charge(key: str, seconds: float, failures: int, mood: str) -> str:
        return await world.charge(key, seconds, failures, mood)

    @app.workflow
    async def pay(script: list[Any], seen: list[Any]) -> list[Any]:
        hf.on_query("seen", lambda: seen)
        for position, (key, seconds, failures, attempts, queue, mood, limit) in enumerate(script):
            policy = hf.Retry(max_attempts=attempts, initial_ms=200, most_ms=2_000, count_lost=position % 2 == 0)
            try:
                async with asyncio.timeout(limit):
                    seen.append(await charge.options(retry=policy, queue=queue)(key, seconds, failures, mood))
            except (hf.errors.ActivityFailed, TimeoutError) as problem:
                seen.append(["unpaid", type(problem).__name__])
            if position == 1:
                hf.continue_as_new(script[2:], seen)
        return seen

    @app.workflow
    async def planned(script: list[Any], seen: list[Any]) -> list[Any]:
        hf.on_query("seen", lambda: seen)
        try:
            seen.append(await hf.plan(script[0]))
        except hf.errors.ChildFailed:
            seen.append("failed")
        return seen

    async def plain(script: list[Any], seen: list[Any]) -> list[Any]:
        hf.on_query("seen", lambda: seen)
        return await Player(app, world, work, {}, seen, is_top=True).run(script)

    async def inside(script: list[Any], seen: list[Any]) -> list[Any]:
        return await Player(app, world, work, {}, seen, is_top=False).run(script)

    register_flows(app, world, work)
    if world.features is not None:
        world.features.register(app, plain, inside)


class Player:
    """Plays one script inside a workflow."""

    def __init__(
        self, app: App, world: World, activity: Any, workflows: dict[str, Any], seen: list[Any], *, is_top: bool
    ) -> None:
        self._app = app
        self._world = world
        self._activity = activity
        self._workflows = workflows
        self._seen = seen
        self._is_top = is_top

    async def run(self, script: Script) -> list[Any]:
        """Play the operations one after another, and return what was seen."""
        for position, (kind, *rest) in enumerate(script):
            if kind == "again":
                inner = [*rest[0], *script[position + 1 :]]
                if self._is_top:
                    hf.continue_as_new(inner, [*self._seen, "again"])
                return await self.run(inner)
            self._seen.append(await getattr(self, f"_{kind}")(*rest))
            if self._is_top:
                hf.continue_as_new_if_long(script[position + 1 :], self._seen)
        return self._seen

    def _inner(self) -> Player:
        return Player(self._app, self._world, self._activity, self._workflows, [], is_top=False)

    async def _work(
        self, seconds: float, failures: int, attempts: int, queue: str, is_later: bool, on_failure: str
    ) -> Any:
        policy = hf.Retry(max_attempts=attempts, initial_ms=200, most_ms=2_000)
        limit = 1.5 if failures == 5 else 6.0 if seconds > 8 else None
        work = self._activity.options(retry=policy, queue=queue, on_failure=on_failure, schedule_to_close=limit)
        return await work(seconds, failures, is_later)

    async def _die(self, bomb: str, times: int) -> Any:
        self._world.die(bomb, times)
        return "lived"

    async def _sleep(self, seconds: float) -> Any:
        await (hf.sleep(seconds) if self._is_top else asyncio.sleep(seconds))
        return "slept"

    async def _wait(self, name: str, timeout: float | None) -> Any:
        try:
            return ["signal", await hf.wait_signal(name, str, timeout=timeout)]
        except TimeoutError:
            return ["no signal", name]

    async def _send(self, run_id: str, name: str) -> Any:
        await self._app.run(run_id).signal(name, "from a run")
        return "sent"

    async def _ask(self, approvals: int, remind: float | None, escalate: float | None) -> Any:
        again = None if remind is None else timedelta(seconds=remind)
        later = None if escalate is None else Escalation(after=timedelta(seconds=escalate), roles=["boss"])
        return await hf.task("ask", str, approvals=approvals, of=approvals, remind=again, escalate=later)

    async def _all(self, scripts: list[Script]) -> Any:
        return await asyncio.gather(*(self._inner().run(script) for script in scripts))

    async def _race(self, scripts: list[Script]) -> Any:
        tasks = [asyncio.ensure_future(self._inner().run(script)) for script in scripts]
        done, late = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        for task in late:
            task.cancel()
        await asyncio.gather(*late, return_exceptions=True)
        return [tasks.index(task) for task in tasks if task in done]

    async def _child(self, script: Script, policy: str) -> Any:
        if not self._workflows:
            return await self._inner().run(script)
        return await self._workflows["play"].options(close_policy=policy)(script, [])

    async def _narrow(self, script: Script) -> Any:
        return await (self._workflows["narrow"](script, []) if self._workflows else self._inner().run(script))

    async def _limit(self, seconds: float, script: Script) -> Any:
        try:
            async with asyncio.timeout(seconds):
                return await self._inner().run(script)
        except TimeoutError:
            return "too late"

    async def _cleanup(self, script: Script) -> Any:
        try:
            return await self._inner().run(script)
        finally:
            await self._activity(0.0, 0)

    async def _saga(self, script: Script) -> Any:
        async with hf.Saga() as saga:
            saga.undo(self._activity, 0.0, 0)
            return await self._inner().run(script)

    async def _attempt(self, script: Script) -> Any:
        try:
            return await self._inner().run(script)
        except (hf.errors.ActivityFailed, hf.errors.ChildFailed) as problem:
            return ["failed", problem.code]
