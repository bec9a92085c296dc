"""One simulation: a seed decides the programs, the clients, the harm and the interleaving."""

from __future__ import annotations

import asyncio
import gc
import shutil
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict
from itertools import chain
from pathlib import Path
from random import Random
from typing import Any, get_args
from unittest.mock import patch

from msgspec import Raw
from msgspec.structs import replace

from holdfast.core import codec
from holdfast.core import events as e
from holdfast.core.index_rows import Task
from holdfast.core.invariants import check_drained
from holdfast.core.keyed_steps import RECONCILE_MARK
from holdfast.core.keys import RESERVED_PREFIX
from holdfast.core.messages import (
    CONTROL_SIGNAL,
    TASK_SIGNAL,
    UPDATE_SIGNAL,
    Actor,
    ControlName,
    TaskAction,
    TaskRequest,
    control_request,
)
from holdfast.core.plans import is_plan
from holdfast.core.reconciliation import TASK_TYPE
from holdfast.core.schedules import Schedule
from holdfast.core.state import PAUSED, TERMINAL, awaits_approval, state_of
from holdfast.engine import dead_processes
from holdfast.engine.plans import load_plan_of
from holdfast.engine.turns.execute import rebuild
from holdfast.errors import HoldfastError, NotFound, RateLimited, RunError, RunTerminal, StoreError
from holdfast.program.definitions import UPDATE_RUN
from holdfast.run import RunHandle
from holdfast.store import port
from holdfast.store.payloads import SealingStore
from holdfast.store.queries import DeadLetterQuery
from holdfast.testing import system_view
from holdfast.testing.faults import FaultyStore
from holdfast.testing.samples import message, read_mailbox, signal
from holdfast.testing.sim_loop import SimLoop
from holdfast.workflow import Flow
from tests.sim.cluster import Cluster, in_process
from tests.sim.features import is_copied, is_cut
from tests.sim.flows import Seen, judge_flow
from tests.sim.plans import judge_plan
from tests.sim.scripts import SIGNALS, draw_script, poked
from tests.sim.sealed_values import codecs_of
from tests.sim.story import Story, cast
from tests.sim.streams import judge_streams
from tests.sim.world import Account, World, decoded

RETRIES = 3
RESTED_WITHIN_S = 40.0
HEALED_WITHIN_S = 400.0
TOLD_WITHIN_S = 200.0
PEOPLE = ("ann", "bob", "eve")
ACTIONS: tuple[TaskAction, ...] = get_args(TaskAction)
CONTROLS: tuple[ControlName, ...] = ("CANCEL", "PAUSE", "PAUSE", "PAUSE", "RESUME", "RESUME")


class Report:
    """What a simulation did, and what it found."""

    def __init__(self, world: World) -> None:
        self.violations = world.violations
        self.trace = list(world.trace)
        self.counts = world.counts
        self.digest = world.digest.hexdigest()


def simulate(seed: int, story: Story = Story()) -> Report:  # noqa: B008, it is frozen
    """Play one seed to its end."""
    loop = SimLoop(seed)
    world: World | None = None

    async def main() -> None:
        nonlocal world
        world = World(loop, seed, has_features=story.has_features)
        simulation = Simulation(world, seed, story)
        scenario = asyncio.ensure_future(simulation.play())
        failed = asyncio.ensure_future(world.failed.wait())
        await asyncio.wait([scenario, failed], return_when=asyncio.FIRST_COMPLETED)
        for member in simulation.cluster.all:
            member.bury()
        if scenario.done():
            scenario.result()

    collects = gc.isenabled()
    gc.disable()  # a story is short, and its loop holds every task anyway
    try:
        with patch.object(dead_processes, "PROC", Path("/nowhere")):  # processes here are not the machine's
            loop.simulate(main())
        assert world is not None
        return Report(world)
    finally:
        if collects:
            gc.enable()
        if world is not None and world.journals is not None:
            shutil.rmtree(world.journals)


class Simulation:
    """The clients' side, and the last judgement."""

    def __init__(self, world: World, seed: int, story: Story) -> None:
        self._world = world
        self._seed = seed
        self._story = story
        self._rng = Random(f"clients {seed}")
        self.cluster = Cluster(world, self._rng.choice(story.nodes), story.pauses_s)
        self._client: port.Store = FaultyStore(world.store, self.cluster.weather, Random(f"client {seed}"))
        if world.is_sealed:
            self._client = SealingStore(self._client, codecs_of(world.objects, self.cluster.weather, f"client {seed}"))
        world.client = self._client
        self._cast = cast(story, seed, self._rng, world.features)
        self._sent = 0
        self._waiting: dict[str, list[tuple[Any, asyncio.Task[Any]]]] = {}

    async def play(self) -> None:
        """Rage, heal, and judge."""
        storm = asyncio.ensure_future(self.cluster.rage(self._story.storm_s))
        clients = [asyncio.ensure_future(self._start(run_id)) for run_id in self._cast.scripts]
        clients += [asyncio.ensure_future(self._disturb(run_id)) for run_id in self._cast.scripts]
        clients += [asyncio.ensure_future(self._start_once(number)) for number in range(self._story.strays)]
        if "rotating" in self._cast.scripts:
            clients.append(asyncio.ensure_future(self._poke("rotating")))
        clients += [asyncio.ensure_future(self._edit(document)) for document in range(self._cast.documents)]
        if self._world.features is not None:
            clients.append(asyncio.ensure_future(self._retry()))
        await storm
        self.cluster.heal()
        await asyncio.gather(*clients)
        await self._rest()
        await self._finish()
        await self._wait_for_results()
        await self._judge()

    # --- clients

    async def _start(self, run_id: str) -> None:
        """Start a run, on whichever node answers, until one has said that it is there."""
        await asyncio.sleep(self._rng.random() * self._story.storm_s / 2)
        while True:
            member = self.cluster.pick(self._rng)
            try:
                if member is None:
                    raise TimeoutError
                workflow = member.workflows[self._cast.gates[run_id]]
                options = self._start_options(run_id)
                arguments = (Seen(),) if isinstance(workflow, Flow) else (self._cast.scripts[run_id], [])
                starting = member.app.start(
                    workflow,
                    *arguments,
                    request_id=f"q-{run_id}",
                    run_id=run_id,
                    priority=len(self._cast.scripts[run_id]),
                    tenant=self._cast.tenants[run_id],
                    **options,
                )
                handle: RunHandle[Any] = await in_process(member, starting, 5.0)
            except (TimeoutError, HoldfastError):
                await asyncio.sleep(0.5)
                continue
            self._world.note(f"started {run_id}")
            waiting = member.process.spawn(handle.result())
            self._waiting.setdefault(run_id, []).append((member, waiting))
            return

    def _start_options(self, run_id: str) -> dict[str, Any]:
        features = self._world.features
        return {} if features is None or not run_id.startswith("m") else features.start_options(run_id)

    async def _use_features(self, run_id: str) -> None:
        """Approve a run, or fork it, now and then."""
        features = self._world.features
        if features is None or not run_id.startswith(("m", "r")):
            return
        if features.rng.random() < 0.3:
            await self._control(run_id, "APPROVE")
        member = self.cluster.pick(features.rng)
        if member is not None and features.rng.random() < 0.2:
            with suppress(HoldfastError, TimeoutError):
                await in_process(member, features.fork(member.app, run_id), 5.0)

    async def _start_once(self, number: int) -> None:
        """Start a run without an id. Who gets no answer never learns of it, and does not ask again."""
        rng = Random(f"stray {number} {self._seed}")
        await asyncio.sleep(rng.random() * self._story.storm_s)
        member = self.cluster.pick(rng)
        if member is not None:
            script = [["work", 0.01, 0, 1, "", False, "raise"], *draw_script(rng)]
            with suppress(TimeoutError, HoldfastError):
                await in_process(member, member.app.start(member.workflows["play"], script, []), 5.0)
                self._world.note("started", "strays")

    async def _edit(self, document: int) -> None:
        """Start debounced runs of one key, on whichever node answers, each until it is accepted."""
        features, rng = self._world.features, Random(f"document {document} {self._seed}")
        assert features is not None
        for number in range(6):
            await asyncio.sleep(
                rng.choice((0.1, 0.8, 3.0)) + (rng.random() * self._story.storm_s / 3 if number % 3 == 0 else 0.0)
            )
            while True:
                member = self.cluster.pick(rng)
                with suppress(TimeoutError, HoldfastError):
                    if member is not None:
                        edit = features.edit(member.app, member.workflows["latest"], document, f"{document}-{number}")
                        await in_process(member, edit, 5.0)
                        break
                await asyncio.sleep(0.5)

    async def _retry(self) -> None:
        """Retry finished runs."""
        features, rng = self._world.features, Random(f"retries {self._seed}")
        assert features is not None
        for number in range(RETRIES):
            await asyncio.sleep((0.5 + rng.random()) * self._story.storm_s / RETRIES)
            heads = await self._world.store.find(port.RunQuery())
            finished = [each.run_id for each in heads if each.status in TERMINAL and each.run_id.startswith(("m", "r"))]
            member = self.cluster.pick(rng)
            if member is not None and finished:
                with suppress(TimeoutError, HoldfastError):
                    await in_process(member, features.retry(member.app, rng.choice(finished), number), 5.0)

    async def _disturb(self, run_id: str) -> None:
        """Send a run signals and operators' commands, at any time."""
        for _ in range(self._rng.randint(0, 8)):
            await asyncio.sleep(self._rng.expovariate(1.0 / (3.0 * self._story.pace)))
            await self._use_features(run_id)
            kinds = ("signal", "signal", "control", "control", "step", "update", "query", "poison", "task", "task")
            match self._rng.choice(kinds):
                case "signal":
                    await self._signal(run_id, self._rng.choice(SIGNALS))
                case "control":
                    await self._control(run_id, self._rng.choice(CONTROLS))
                case "step":
                    await self._settle(run_id, self._rng.choice(("RETRY_STEP", "RETRY_STEP", "SKIP_STEP")))
                case "update":
                    await self._update(run_id, self._rng.choice((0.0, 1.0)))
                case "query":
                    await self._query(run_id)
                case "task":
                    for task in await self._world.opened.find(port.TaskQuery(run_id=run_id)):
                        await self._operate(task, self._rng.choice(ACTIONS), self._rng.choice(PEOPLE))
                case "poison":
                    await self._poison(run_id)

    async def _signal(self, run_id: str, name: str) -> None:
        self._sent += 1
        await self._deliver(signal(run_id, name, f"{name}-{self._sent}", signal_id=f"s{self._sent}"))

    async def _control(self, run_id: str, name: ControlName, step_id: str | None = None) -> None:
        self._sent += 1
        await self._deliver(
            control_request(
                run_id,
                name,
                "ann",
                step_id=step_id,
                signal_id=f"c{self._sent}",
                raise_failure=name == "RESUME",
                may_override=True,
            )
        )

    async def _settle(self, run_id: str, name: ControlName) -> None:
        """Have a step tried again or skipped: a failed one, if there is one, else any that is open."""
        try:
            state = state_of(run_id, self._world.store.events_of(run_id))
        except KeyError:
            return  # it has not been started yet
        steps = list(state.failed_steps) or list(state.open_steps)
        if steps:
            step_id = self._rng.choice(steps)
            self._world.note(f"settle {run_id} {step_id} {name}", "settled steps")
            await self._control(run_id, name, step_id)

    async def _update(self, run_id: str, seconds: float) -> None:
        self._sent += 1
        wish = {"name": "poke", "input": {"seconds": seconds, "token": f"u{self._sent}"}}
        await self._deliver(signal(run_id, UPDATE_SIGNAL, wish, signal_id=f"u{self._sent}"))

    async def _operate(self, task: Task, action: TaskAction, name: str) -> None:
        """Do something to a task, open or not."""
        self._sent += 1
        is_doubt = task.task_type == TASK_TYPE
        request = TaskRequest(
            task_id=task.task_id,
            step_id=task.step_id,
            action=action,
            actor=Actor(name, ("operator",) if is_doubt else ("boss",)),
            assignee=self._rng.choice(PEOPLE),
            answer=self._verdict(task) if is_doubt else codec.encode(name if self._rng.random() < 0.8 else 7),
            text="soon",
        )
        await self._deliver(signal(task.run_id, TASK_SIGNAL, request, signal_id=f"t{self._sent}"))

    def _verdict(self, task: Task) -> Raw:
        """Look into the books, and return an operator's answer about an unresolved step: true, or that it fails."""
        facts = decoded(task.payload)
        assert isinstance(facts, dict)
        account = self._world.accounts.setdefault(facts["idempotency_key"], Account())
        attempt = int(task.step_id.rpartition(RECONCILE_MARK)[2])
        if self._rng.random() < 0.2:
            account.answers.append("")
            return codec.encode({"answer": "fail"})
        receipt = self._world.asked(facts["idempotency_key"], attempt)
        if receipt is None:
            return codec.encode({"answer": "did-not-happen"})
        account.answers.append(receipt)
        return codec.encode({"answer": "happened", "result": receipt})

    async def _poke(self, run_id: str) -> None:
        """Update a run all the time, from when it is there: some updates are under way when it rotates."""
        rng = Random(f"pokes {self._seed}")
        while run_id not in self._waiting:  # noqa: ASYNC110
            await asyncio.sleep(0.1)
        for _ in range(8):
            await self._update(run_id, rng.choice((0.3, 1.0)))
            await asyncio.sleep(rng.expovariate(1.0 / 0.5))

    async def _poison(self, run_id: str) -> None:
        """Send a message that no turn can handle. It may die, and nothing else may come of it."""
        self._sent += 1
        unfit = replace(message(run_id, f"poison{self._sent}"), expected_version=10**6)
        if self._world.features is not None:  # the other type is what starts a run that is held
            unfit = replace(unfit, type="RetryDue", step_id="nothing")
        with suppress(StoreError):
            await self._client.deliver([unfit])

    async def _query(self, run_id: str) -> None:
        """Ask a run, on any node, what it has seen. An answer is not needed; that nothing changes by it is."""
        member = self.cluster.pick(self._rng)
        if member is not None:
            with suppress(HoldfastError, TimeoutError):
                await in_process(member, member.app.run(run_id).query("seen"), 5.0)

    async def _deliver(self, request: Any) -> None:
        """Send until there is an answer."""
        while True:
            try:
                [answer] = await self._client.deliver([request])
            except StoreError:
                await asyncio.sleep(0.2)
                continue
            if not isinstance(answer, port.Refused):
                assert answer.result is not None
                self._world.acknowledged.setdefault(answer.result.workflow_id, []).append(answer.result)
                self._world.note(f"told   {request.run_id} {request.name} {request.signal_id}", "signals")
            elif not isinstance(answer.error, NotFound | RunTerminal | RateLimited):
                self._world.violate(f"a signal was refused: {answer.error!r}")
            return

    # --- the end

    async def _rest(self) -> None:
        """Leave every run alone until it has finished, or waits for somebody outside, and for nothing else.

        A run that nobody cares for would be woken by whatever it is sent later.
        """
        loop, before = self._world.loop, dict[str, int]()
        rested_at, end = loop.time() + RESTED_WITHIN_S, loop.time() + HEALED_WITHIN_S
        while loop.time() < rested_at:
            await asyncio.sleep(RESTED_WITHIN_S / 10)
            if not await self._busy():
                return
        while True:
            busy = await self._busy()
            for run_id, (head, problem) in busy.items():
                is_going_on = is_plan(head.plan_id) and before.get(run_id, 0) != head.version
                if not is_going_on or loop.time() > end:  # a plan of many items, one at a time, takes longer
                    self._world.violate(f"{run_id} is stuck: {problem}: {head}")
                    return
            if not busy:
                return
            before = {run_id: head.version for run_id, (head, _) in busy.items()}
            await asyncio.sleep(RESTED_WITHIN_S / 2)

    async def _busy(self) -> dict[str, tuple[port.RunHead, str]]:
        """Return the runs that have something to do, and do not wait for somebody outside."""
        heads = [head for head in await self._world.store.find(port.RunQuery()) if head.status not in TERMINAL]
        found = {head.run_id: (head, self._to_do(head)) for head in heads if head.status is not PAUSED}
        return {run_id: (head, problem) for run_id, (head, problem) in found.items() if problem is not None}

    def _to_do(self, head: port.RunHead) -> str | None:
        """Return what a run has to do that is neither finished nor paused; None if it waits for somebody outside."""
        state = state_of(head.run_id, self._world.store.events_of(head.run_id))
        for step_id, step in state.open_steps.items():
            asks_a_run = isinstance(step.body, e.StepStarted) and step.body.name == UPDATE_RUN  # perhaps a paused one
            if isinstance(step.body, e.StepStarted | e.TimerStarted) and not (step.is_unresolved or asks_a_run):
                return f"nothing becomes of {step_id}, {step}"
            sent = [each for each in self._world.store.unconsumed(head.run_id) if each.name == step.name]
            if step.kind == "signal" and any(each.step_id in (None, step_id) for each in sent):
                return f"{step_id} is not given what has been sent: {sent}"
        is_held = head.queued_at is not None or awaits_approval(state) or state.awaits_definition
        return None if state.open_steps or is_held else "it waits for nothing, and takes no turn"

    async def _finish(self) -> None:
        """Give every run what it waits for, until all have finished."""
        store, loop = self._world.opened, self._world.loop
        end = loop.time() + HEALED_WITHIN_S
        while True:
            self.cluster.watch()
            heads = [head for head in await store.find(port.RunQuery()) if head.status not in TERMINAL]
            if not heads and not await self._ticks_to_come():
                return
            if loop.time() > end:
                break
            for head in heads:
                if head.status is PAUSED:
                    await self._end_pause(head.run_id)
                elif self._world.features is not None and self._world.features.needs_approval(head.run_id):
                    await self._control(head.run_id, "APPROVE")
            for wait in await store.find(port.WaitQuery()):
                is_of_a_lock = "/lock:" in wait.run_id or wait.name.startswith(
                    RESERVED_PREFIX
                )  # it is left to the engine
                if wait.until is None and not is_of_a_lock:
                    await self._signal(wait.run_id, wait.name)
            for task in await store.find(port.TaskQuery(status="OPEN")):
                for name in PEOPLE:
                    await self._operate(task, "complete", name)
            await asyncio.sleep(2.0)
        for head in heads:
            self._world.violate(f"{head.run_id} does not finish: {head}")
        if not heads:
            self._world.violate(f"these schedules do not end: {await self._ticks_to_come()}")

    async def _ticks_to_come(self) -> list[Schedule]:
        schedules = await self._world.store.find(port.ScheduleQuery())
        return [schedule for schedule in schedules if schedule.queued or schedule.next_due is not None]

    async def _end_pause(self, run_id: str) -> None:
        """Let a paused run go on: most of those that a failed step has paused by settling the step."""
        state = state_of(run_id, self._world.store.events_of(run_id))
        failed = [step_id for step_id, step in state.failed_steps.items() if not step.is_delivered]
        name: ControlName = self._rng.choice(("RETRY_STEP", "SKIP_STEP", "RESUME"))
        if state.is_held and failed and name != "RESUME":
            await self._control(run_id, name, failed[0])
        else:
            await self._control(run_id, "RESUME")

    async def _wait_for_results(self) -> None:
        """Let those who wait for a run's end have it, and let the nodes come to rest."""
        waiting = [task for some in self._waiting.values() for member, task in some if member.is_open]
        if waiting:
            await asyncio.wait(waiting, timeout=TOLD_WITHIN_S)
        await asyncio.sleep(10.0)
        features, end = self._world.features, self._world.loop.time() + TOLD_WITHIN_S
        while features is not None and features.behind():
            if self._world.loop.time() > end:
                self._world.violate(f"the projection does not get these events: {features.behind()}")
                return
            await asyncio.sleep(1.0)

    async def _judge(self) -> None:
        self.cluster.watch()
        self.cluster.watch_names()
        world = self._world
        for violation in check_drained(await system_view(world.opened, chain(*world.acknowledged.values()))):
            world.violate(f"{violation.run_id}: {violation.invariant}: {violation.problem}")
        left = (await world.store.stats()).jobs
        if left:
            world.violate(f"every run has finished, and {left} jobs are left in queues")
        for letter in await world.opened.find(DeadLetterQuery(limit=1_000)):
            if letter.reason == "refused":
                world.note(f"refused {letter.run_id} {letter.detail}", "refused")
                continue
            world.note(f"dead   {letter.run_id}", "dead letters")
            if b'"poison' not in letter.envelope or letter.reason != "retries exhausted":
                world.violate(f"{letter.run_id}: this died, and was no poison: {letter}")
        for head in await world.store.find(port.RunQuery()):
            await self._judge_run(head)
        if world.features is not None:
            world.features.judge_edits()
            heads = await world.store.find(port.RunQuery())
            world.features.judge_ticks([world.store.events_of(head.run_id)[0] for head in heads])
        for run_id, waiting in self._waiting.items():
            for member, task in waiting:
                self._judge_result(run_id, member, task)

    async def _judge_run(self, head: port.RunHead) -> None:
        """Check that a run's history leads a fresh program to the same end, and that nothing sent was lost."""
        world, run_id = self._world, head.run_id
        history = world.store.events_of(run_id)
        registry = self.cluster.all[0].app.registry
        await load_plan_of(registry, world.opened, head, history)
        live, problem = rebuild(run_id, history, registry)
        live.close()
        plan = live.state.plan
        if plan is not None and (definition := registry.plans.get(plan.sha256)) is not None:
            judge_plan(world, definition, run_id, history)
        if problem is not None:
            world.violate(f"{run_id} cannot be replayed: {problem}")
        mailbox = await read_mailbox(world.opened, run_id)
        counts = Counter((sent.name, sent.signal_id) for sent in mailbox)
        for sent_id in [sent_id for sent_id, count in counts.items() if count > 1]:
            world.violate(f"{run_id}: the signal {sent_id} was sent once and is there {counts[sent_id]} times")
        self._judge_updates(run_id, history)
        await judge_streams(world, run_id, history)
        workflow = self.cluster.all[0].workflows.get(head.plan_id)
        if isinstance(workflow, Flow):
            judge_flow(world, workflow, run_id, history)
        answered = {event.step_id for event in history if isinstance(event.data, e.UpdateCompleted)}
        for event in history:
            is_left = isinstance(event.data, e.UpdateAccepted) and event.step_id not in answered
            if is_left and not is_cut(history[-1]):  # then who waits for the answer is told of the end
                world.violate(f"{run_id}: {event.step_id} was accepted and never answered")
            if isinstance(event.data, e.StepCancelled):
                await self._judge_child(run_id, event)
            if isinstance(event.data, e.SignalSent) and not is_copied(event, history):
                await self._judge_sent(head, event.data)

    async def _judge_sent(self, sender: port.RunHead, sent: e.SignalSent) -> None:
        """Check that what a run has sent is where it was for, or the sender has a letter; and that it stayed inside."""
        store = self._world.opened
        [target] = await store.load([sent.run_id])
        arrived = target is not None and sent.signal_id in {s.signal_id for s in await read_mailbox(store, sent.run_id)}
        if arrived and target is not None and target.head.tenant != sender.tenant:
            self._world.violate(f"{sender.run_id} has reached {sent.run_id}, a run of another tenant")
        if sent.name.startswith(RESERVED_PREFIX) and (target is None or target.head.status in TERMINAL):
            return  # the engine's own, which nobody needs any more
        letters = await store.find(DeadLetterQuery(run_id=sender.run_id, reason="refused"))
        if not arrived and not any(sent.signal_id.encode() in letter.envelope for letter in letters):
            self._world.violate(f"{sender.run_id} has sent {sent.name} to {sent.run_id}, and it is nowhere")
        self._world.note(f"sent   {sender.run_id} {sent.run_id}", "sent by runs")

    def _judge_updates(self, run_id: str, history: Sequence[e.Event]) -> None:
        """Check that what an answered update did is in the result, once; and that of one that was refused is not."""
        if not isinstance(history[-1].data, e.RunCompleted):
            return
        seen = decoded(history[-1].data.result)
        if not isinstance(seen, list):  # of a flow or a plan, which takes no updates
            return
        inputs = {event.step_id: event.data.input for event in history if isinstance(event.data, e.UpdateAccepted)}
        answered: dict[str, list[e.UpdateCompleted]] = {}
        for event in history:
            if isinstance(event.data, e.UpdateCompleted):
                wish = decoded(inputs[event.step_id])
                assert isinstance(wish, dict)
                answered.setdefault(wish["token"], []).append(event.data)  # a run and its fork may send the same
        for token, answers in answered.items():
            times = seen.count(poked(token))
            expected = sum(answer.error is None for answer in answers)
            self._world.note(f"answer {run_id} {token} {times}", f"updates with {expected} effects")
            if times != expected:
                self._world.violate(f"{run_id}: update {token} was answered, and its effect is there {times} times")

    async def _judge_child(self, run_id: str, given_up: e.Event) -> None:
        """Check that a child that nobody waits for any more was told so, or had ended."""
        opened = next(
            event for event in self._world.store.events_of(run_id) if event.event_id == given_up.parent_event_id
        )
        if not isinstance(opened.data, e.ChildStarted) or opened.data.close_policy == "abandon":
            return
        child_id = opened.data.child_run_id
        was_told = any(sent.name == CONTROL_SIGNAL for sent in await read_mailbox(self._world.opened, child_id))
        ended_at = self._world.store.events_of(child_id)[-1].persisted_at
        if not was_told and ended_at > given_up.persisted_at:
            self._world.violate(f"{run_id} gave up its child {opened.data.child_run_id}, which was not told")

    def _judge_result(self, run_id: str, member: Any, task: asyncio.Task[Any]) -> None:
        """Check that whoever waited for a run on a node that is still there got its result, and the right one."""
        if not member.is_open:
            return
        if not task.done():
            self._world.violate(f"{run_id} has finished, and who waits for it on {member.process.name} is not told")
            return
        problem = task.exception()
        if problem is not None and not isinstance(problem, RunError | StoreError):
            self._world.violate(f"{run_id}: asking for its result raised {problem!r}")
        last = self._world.store.events_of(run_id)[-1].data
        answer = task.result() if problem is None else None
        answer = asdict(answer) if isinstance(answer, Seen) else answer
        if problem is None and (not isinstance(last, e.RunCompleted) or answer != decoded(last.result)):
            self._world.violate(f"{run_id}: the result {task.result()!r} was answered, and is not the run's")
