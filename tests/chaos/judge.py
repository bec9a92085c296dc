"""The judgement: what the store has in the end, against what was promised, done and suffered."""

from __future__ import annotations

from collections import Counter
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from holdfast.core import codec
from holdfast.core import events as e
from holdfast.core.events import Event
from holdfast.core.invariants import RunView, SystemView, check_drained
from holdfast.core.state import CANCELLED, COMPLETED, state_of
from holdfast.store.port import RunHead, RunQuery, Store
from holdfast.testing import view_of
from tests.chaos.clients import Clients, Promise
from tests.chaos.fleet import Chronicle
from tests.chaos.programs import books, charges_in, leaves_of, read_effects

PAGE = 500
CLOSES = (e.StepCompleted, e.StepFailed, e.StepSkipped, e.StepCancelled)


class Recovery(NamedTuple):
    """A run that another node went on with after its owner was lost."""

    run_id: str
    of: str
    kind: str
    by: str
    epoch: int
    lost_at: int
    gone_on_at: int
    seconds: float


@dataclass
class Judge:
    """Looks at every run once, and keeps what is wrong and how long recoveries took."""

    chronicle: Chronicle
    lease_s: float
    wrong: list[str] = field(default_factory=list)
    counts: Counter[str] = field(default_factory=Counter)
    recoveries: list[Recovery] = field(default_factory=list)
    heads: dict[str, RunHead] = field(default_factory=dict)
    _answers: dict[str, str] = field(default_factory=dict)

    async def judge(self, store: Store, clients: Clients, ledger: Path) -> None:
        """Judge all runs of a store in which nothing goes on any more."""
        effects = self._read_ledger(ledger)
        self._answers = clients.tasks
        open_promises = {promise.run_id: promise for promise in clients.promises}
        async for family in _families(store, self.heads):
            promise = open_promises.pop(family[0].run_id, None)
            if promise is None:
                self.wrong.append(f"{family[0].run_id}: nobody has started this run")
            else:
                self._judge_family(family, promise, effects)
        for promise in open_promises.values():
            if promise.is_started:
                self.wrong.append(f"{promise.run_id}: its start was acknowledged, and it is not there")
        left = await store.stats()
        for what, count in (("messages", left.messages), ("jobs", left.jobs), ("dead letters", left.dead_letters)):
            if count:
                self.wrong.append(f"{count} {what} are left")

    def _read_ledger(self, path: Path) -> _Effects:
        """Return the effects of all steps, and check that no key was charged twice."""
        effects: _Effects = {}
        if path.exists():
            for effect in read_effects(str(path)):
                effects.setdefault(effect.run_id, {}).setdefault(effect.step_id, set()).add(effect.value)
        keyed = Path(books(str(path)))
        for book in keyed.iterdir() if keyed.exists() else ():
            charged = charges_in(str(book))
            self.counts["charges"] += len(charged)
            if len(charged) > 1:
                self.wrong.append(f"{charged[0].run_id}: {charged[0].step_id} was charged {len(charged)} times")
            for effect in charged:
                effects.setdefault(effect.run_id, {}).setdefault(effect.step_id, set()).add(effect.value)
        return effects

    def _judge_family(self, family: list[RunView], promise: Promise, effects: _Effects) -> None:
        for violation in check_drained(SystemView(tuple(family))):
            self.wrong.append(f"{violation.run_id}: {violation.invariant}: {violation.problem}")
        results: dict[str, Any] = {}
        for view in reversed(family):  # children come after their parents
            self.counts["runs"] += 1
            self.counts["events"] += len(view.events)
            self.counts["turns"] += len({event.persisted_at for event in view.events})
            self._judge_owners(view)
            self._judge_effects(view, effects)
            self._judge_answers(view)
            if view.status is CANCELLED and promise.cancels_after is not None:
                self.counts["cancelled"] += 1
            elif view.status is not COMPLETED:
                self.wrong.append(f"{view.run_id} is {view.status}: {self._stands_at(view)}")
            else:
                results[view.run_id] = self._judge_result(view)
        self._judge_promise(family[0], promise, results)

    def _stands_at(self, view: RunView) -> str:
        """Return what an unfinished run waits for, to be read by who looks for the cause."""
        head, last = self.heads[view.run_id], view.events[-1]
        return (
            f"its last event is {last.event_type} at {last.persisted_at}; ready at {head.ready_at}, owned by "
            f"{head.lease_owner} at epoch {head.lease_epoch} after {head.losses} losses, inbox at {head.inbox_seq}, "
            f"open steps {sorted(state_of(view.run_id, view.events).open_steps)}"
        )

    def _judge_promise(self, view: RunView, promise: Promise, results: dict[str, Any]) -> None:
        """Check that what was acknowledged is there: the start with its input, each signal once, the result."""
        queued = view.events[0].data
        if not isinstance(queued, e.RunQueued) or codec.decode(queued.input, dict) != {
            "script": promise.script,
            "told": [],
            "updates": [],
        }:
            self.wrong.append(f"{view.run_id}: it was started with something else")
        received = Counter(
            (event.data.signal_id, codec.decode(event.data.payload, str))
            for event in view.events
            if isinstance(event.data, e.SignalReceived)
        )
        for told in promise.signals:
            if received[told.signal_id, f"signal {told.signal_id}"] != 1 and view.status is COMPLETED:
                self.wrong.append(f"{view.run_id}: signal {told.signal_id} was acknowledged, and not received once")
        answered = Counter(
            codec.decode(event.data.result, str)
            for event in view.events
            if isinstance(event.data, e.UpdateCompleted) and event.data.error is None
        )
        for update_id in promise.updates:
            if answered[update_id] != 1:
                self.wrong.append(f"{view.run_id}: update {update_id} was answered {answered[update_id]} times")
        self.counts["updates"] += len(promise.updates)
        if promise.was_cancelled:
            if view.status is not CANCELLED:
                self.wrong.append(f"{view.run_id} is {view.status}, and its client was told that it is cancelled")
        elif promise.result is None:
            self.wrong.append(f"{view.run_id} is {view.status}, and its client was answered no end")
        elif promise.result != results.get(view.run_id):
            self.wrong.append(f"{view.run_id}: a client was told another result than the history has")
        self.counts["signals"] += len(promise.signals)

    def _judge_result(self, view: RunView) -> Any:
        """Check that the run was told exactly what its history says, and return what it returned."""
        last = view.events[-1].data
        result = codec.decode(last.result, list) if isinstance(last, e.RunCompleted) else None
        told = Counter(leaves_of(result))
        recorded: Counter[str] = Counter()
        for event in view.events:
            match event.data:
                case e.StepCompleted(result=raw) | e.ChildCompleted(result=raw):
                    recorded.update(leaves_of(codec.decode(raw, Any)))
                case e.SignalReceived(payload=raw) | e.TaskCompleted(answer=raw):
                    recorded.update(leaves_of(codec.decode(raw, Any)))
                case e.UpdateCompleted(result=raw, error=None):
                    recorded.update(leaves_of(codec.decode(raw, Any)))
        if told != recorded:
            self.wrong.append(f"{view.run_id}: it returned {told - recorded} too much, {recorded - told} too little")
        return result

    def _judge_answers(self, view: RunView) -> None:
        """Check that the answer to a task that was acknowledged is the one that is recorded."""
        for event in view.events:
            if isinstance(event.data, e.ContinuedAsNew):
                self.counts["rotations"] += 1
            elif isinstance(event.data, e.TaskCompleted):
                self.counts["tasks"] += 1
        tasks = {event.step_id: event.data for event in view.events if isinstance(event.data, e.TaskCreated)}
        done = {event.step_id: event.data for event in view.events if isinstance(event.data, e.TaskCompleted)}
        for step_id, task in tasks.items():
            answer = self._answers.get(task.task_id)
            if answer is not None and (step_id not in done or codec.decode(done[step_id].answer, str) != answer):
                self.wrong.append(
                    f"{view.run_id}: the answer to task {task.task_id} was acknowledged, and is not there"
                )

    def _judge_effects(self, view: RunView, effects: _Effects) -> None:
        """Check that each recorded result is that of an effect, that of each step once, and effects have a step."""
        begun: set[str] = set()
        done: set[str] = set()
        for event in view.events:
            step_id = event.step_id or ""
            if isinstance(event.data, e.StepStarted):
                begun.add(step_id)
            elif isinstance(event.data, e.StepCompleted):
                if step_id in done:
                    self.wrong.append(f"{view.run_id}: the result of {step_id} is recorded twice")
                done.add(step_id)
                if codec.decode(event.data.result, str) not in effects.get(view.run_id, {}).get(step_id, ()):
                    self.wrong.append(f"{view.run_id}: {step_id} has a result, and no effect that gave it")
        for step_id, values in effects.get(view.run_id, {}).items():
            self.counts["effects"] += len(values)
            self.counts["effects repeated"] += len(values) - 1
            if step_id not in begun:
                self.wrong.append(f"{view.run_id}: {step_id} has an effect, and was never begun")

    def _judge_owners(self, view: RunView) -> None:
        """Check that no owner wrote after another one had taken over, and measure how long that took."""
        epochs: dict[int, str] = {}
        working: set[str] = set()
        last: Event | None = None
        for event in view.events:
            by = event.engine_run_ref
            if epochs.setdefault(by.epoch, by.node) != by.node or by.epoch < max(epochs):
                self.wrong.append(f"{view.run_id}: event {event.run_seq} is by {by.node}, who was fenced off")
            if last is not None and working and last.engine_run_ref.node != by.node:
                self._measure(view.run_id, last, event)
            if isinstance(event.data, e.StepStarted) and not event.data.queue:  # a job is not lost with the run's owner
                working.add(event.step_id or "")
            elif isinstance(event.data, CLOSES):
                working.discard(event.step_id or "")
            last = event

    def _measure(self, run_id: str, before: Event, after: Event) -> None:
        """Take the time of a takeover, unless somebody who was lost as well came in between."""
        loss = self.chronicle.loss_after(before.engine_run_ref.node.partition("#")[0], before.persisted_at)
        if loss is None or loss.at > after.persisted_at:
            return
        self.counts[f"taken over from {loss.kind}"] += 1
        if after.engine_run_ref.epoch != before.engine_run_ref.epoch + 1:
            self.counts["taken over in several steps"] += 1
            return
        excused_us = self.chronicle.excused_us(loss.at, after.persisted_at)
        seconds = (after.persisted_at - loss.at - excused_us) / 1e6
        by = after.engine_run_ref
        of = before.engine_run_ref.node
        self.recoveries.append(Recovery(run_id, of, loss.kind, by.node, by.epoch, loss.at, after.persisted_at, seconds))


_Effects = dict[str, dict[str, set[str]]]


async def _families(store: Store, seen: dict[str, RunHead]) -> AsyncIterator[list[RunView]]:
    """Yield each run with its children: they follow it in order, because a slash comes before digits."""
    family: list[RunView] = []
    after = ""
    while heads := await store.find(RunQuery(after=after, limit=PAGE)):
        for head in heads:
            view = await view_of(store, head.run_id)
            assert view is not None
            seen[head.run_id] = head
            if family and head.parent_run_id is None:
                yield family
                family = []
            family.append(view)
        after = heads[-1].run_id
    if family:
        yield family
