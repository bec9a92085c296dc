"""The run queue: admits queued runs of workflows with limits, and starts them.

`dequeue_and_start` keeps nothing in memory, and any node may call it at any time: the store counts and admits in one
transaction. A node calls it when a run of a workflow with limits has finished here, when a rate allows another start,
and periodically, in case the node that should have called it was lost.
"""

import asyncio
import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Literal

from msgspec import Struct
from msgspec.structs import replace

from holdfast.core.admission import NO_LIMIT, AdmissionRequest
from holdfast.core.event_writer import is_about_to_start, starts_run
from holdfast.core.events import ChildStarted, Event, RunQueued, RunStarted
from holdfast.core.instants import Instant
from holdfast.core.messages import INPUT_STEP
from holdfast.core.plans import is_plan
from holdfast.core.state import RunState, was_held
from holdfast.engine.definition_filter import DefinitionFilter
from holdfast.engine.options import NodeOptions
from holdfast.engine.turns.draft import held_for_approval
from holdfast.errors import InvalidInput, LeaseExpired, StoreError
from holdfast.registry import Registry
from holdfast.store.port import LoadedRun, NewRun, Store, Turn

RETRY_S = 1.0

logger = logging.getLogger("holdfast.node")


class Dequeued(Struct, frozen=True):
    """What happened to an admitted run.

    STARTED: it starts here, or is ready for the node that claims it. SKIPPED: another node owns it, and starts it.
    FAILED: it cannot be read, and is retried later.
    """

    run_id: str
    status: Literal["STARTED", "FAILED", "SKIPPED"]


class RunQueue:
    """Admits runs for one node. `owner` returns the node that claims them, and `hold` receives each claimed run."""

    def __init__(
        self,
        store: Store,
        registry: Registry,
        known: DefinitionFilter,
        owner: Callable[[], str | None],
        hold: Callable[[LoadedRun], None],
        options: NodeOptions,
    ) -> None:
        self._store = store
        self._registry = registry
        self._definition_filter = known
        self._limited = registry.workflow_limits
        self._owner = owner
        self._hold = hold
        self._most = options.claim_runs
        self._poll_s = options.safety_poll_s
        self._next_at: Instant | None = None
        self._orphaned: list[str] = []  # admitted here for other nodes; kept until they are released
        self._something = asyncio.Event()

    # --- called by the node

    def with_admission(self, new: NewRun, priority: int = 0) -> NewRun:
        """Return a run with its admission request if its workflow has limits, or held if it requires approval."""
        limited, queued = self._limited.get(new.plan_id), new.events[0].data
        # A fork of a run that is held until its start time is held, too. The due times of time-outs do not matter here.
        is_later = any(starts_run(message) and message.due_at is not None for message in new.messages)
        if limited is not None and isinstance(queued, RunQueued) and not is_later:
            new = replace(new, admission=limited.admission_request(queued.input, priority))
        if (new.plan_id, new.plan_version) in self._registry.approvals:
            return held_for_approval(new)
        return new

    async def request_of(self, run: LoadedRun, state: RunState) -> AdmissionRequest | None:
        """Return the admission request of a run that was held, if it is about to start and is not queued yet.

        The limits are the current ones of its workflow, as for a start at this moment.
        """
        limited = self._limited.get(state.plan_id)
        if limited is None or not was_held(state) or not is_about_to_start(run.messages):
            return None
        if any(signal.step_id == INPUT_STEP for signal in run.signals):  # the turn postpones its start
            return None
        [queued] = [event.data for event in await self._store.read_events(state.run_id, 0, 1)]
        assert isinstance(queued, RunQueued)
        try:
            input = queued.input if state.replaced_input is None else state.replaced_input
            return limited.admission_request(input, queued.priority)
        except InvalidInput as problem:
            return self._without_key(state.run_id, state.plan_id, queued.priority, problem)

    def notice_start(self, new: NewRun | Turn) -> None:
        """Note a run that was created or queued: if it waits for a rate, `work` has to watch the time."""
        if new.admission is not None and new.admission.limit.starts is not None:
            self._something.set()

    def notice_starts_of(self, plan_id: str, events: Sequence[Event]) -> None:
        """Note the start here of a run of a workflow with a rate, if it has started: the time of the next start is now
        known.
        """
        limited = self._limited.get(plan_id)
        if limited is None or limited.limit.starts is None:
            return
        if any(type(event.data) is RunStarted for event in events):
            self._something.set()

    def notice_end(self, plan_id: str) -> None:
        """Note that a run has finished here: there may be room for another."""
        if plan_id in self._limited:
            self._something.set()

    def with_admissions(self, turns: list[Turn]) -> list[Turn]:
        """Return the turns with admission requests for the children that they start."""
        if not self._limited and not self._registry.approvals:
            return turns
        return [self._with_admissions_of_children(turn) if turn.starts else turn for turn in turns]

    def _with_admissions_of_children(self, turn: Turn) -> Turn:
        started = [event.data for event in turn.events if isinstance(event.data, ChildStarted)]
        priorities = {body.child_run_id: body.priority for body in started}
        starts = [self._child_with_admission(new, priorities.get(new.run_id, 0)) for new in turn.starts]
        return replace(turn, starts=tuple(starts))

    def _is_external(self, new: NewRun) -> bool:
        """Return whether only other apps have the workflow of a run."""
        return (new.plan_id, new.plan_version) not in self._registry.workflows and not is_plan(new.plan_id)

    async def with_external_admissions(self, turns: list[Turn]) -> list[Turn]:
        """Return the turns with children of other apps' workflows admitted as those declare.

        The programs have continued already, so the declarations are looked up until they are known.
        """
        found = {id(new) for turn in turns for new in turn.starts if self._is_external(new)}
        if not found:
            return turns
        external = [new for turn in turns for new in turn.starts if id(new) in found]
        bodies = [event.data for turn in turns for event in turn.events if isinstance(event.data, ChildStarted)]
        priorities = {body.child_run_id: body.priority for body in bodies}
        declared = None
        while declared is None:
            try:
                declared = await self.as_declared(external, priorities)
            except StoreError:
                logger.exception("the declarations of other apps' workflows could not be read; retrying")
                await asyncio.sleep(RETRY_S)
        admitted = dict(zip(map(id, external), declared, strict=True))
        return [
            replace(turn, starts=tuple(admitted.get(id(new), new) for new in turn.starts)) if turn.starts else turn
            for turn in turns
        ]

    async def as_declared(self, runs: Sequence[NewRun], priorities: Mapping[str, int]) -> list[NewRun]:
        """Return runs of other apps' workflows, held for approval or with an admission request, as those workflows
        publish.

        Only the code of a workflow can compute a key: these runs share one.
        """
        plans = list(dict.fromkeys((new.plan_id, new.plan_version) for new in runs))
        declared = dict(zip(plans, await self._store.find_definitions(plans), strict=True))
        answer: list[NewRun] = []
        for new in runs:
            found = declared[new.plan_id, new.plan_version]
            if found is not None and found.limit is not None:
                request = AdmissionRequest(limit=found.limit, priority=priorities.get(new.run_id, 0))
                new = replace(new, admission=request)
            answer.append(held_for_approval(new) if found is not None and found.requires_approval else new)
        return answer

    def notice_starts(self, turns: list[Turn]) -> None:
        """Note the children that turns have started."""
        if self._limited:
            for turn in turns:
                self.notice_start(turn)
                for new in turn.starts:
                    self.notice_start(new)

    def _child_with_admission(self, new: NewRun, priority: int) -> NewRun:
        try:
            return self.with_admission(new, priority)
        except InvalidInput as problem:  # its parent has continued: there is no caller to refuse
            new = replace(new, admission=self._without_key(new.run_id, new.plan_id, priority, problem))
            is_held = (new.plan_id, new.plan_version) in self._registry.approvals
            return held_for_approval(new) if is_held else new

    def _without_key(self, run_id: str, plan_id: str, priority: int, problem: InvalidInput) -> AdmissionRequest:
        text = "run %s is queued without a key, because the key could not be computed"
        logger.error(text, run_id, exc_info=problem)
        return AdmissionRequest(limit=self._limited[plan_id].limit, priority=priority)

    # --- admitting

    async def dequeue_and_start(self) -> list[Dequeued]:
        """Admit queued runs, claim them if this node takes runs, and return what happened to each."""
        limits = dict.fromkeys(self._registry.workflow_names(), NO_LIMIT)
        limits |= {name: limited.limit for name, limited in self._limited.items()}
        owner = self._owner()
        admitted, self._next_at = await self._store.admit(limits, self._most, owner)
        for each in admitted:
            if each.run is not None and self._definition_filter.understands(each.run.head):
                self._hold(each.run)
            elif each.run is not None:  # limits apply to the workflow, whatever the version
                self._orphaned.append(each.run_id)
        if self._orphaned and owner is not None:
            await self._store.release(owner, self._orphaned)
            self._orphaned = []
        return [Dequeued(each.run_id, each.status) for each in admitted]

    async def work(self) -> None:
        """Admit runs for as long as the node runs."""
        while True:
            try:
                await self.dequeue_and_start()
                wait_s = self._poll_s
                if self._next_at is not None:
                    wait_s = min(wait_s, max(0.0, (self._next_at - await self._store.now()) / 1_000_000))
            except (StoreError, LeaseExpired):
                logger.warning("queued runs could not be admitted; retrying", exc_info=True)
                wait_s = min(RETRY_S, self._poll_s)
            try:
                async with asyncio.timeout(wait_s):
                    await self._something.wait()
            except TimeoutError:
                pass
            self._something.clear()
