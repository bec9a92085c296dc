"""Dispatches steps of a node's runs to the executor, if their activities are registered here."""

import logging
from collections.abc import Callable

from msgspec import Raw

from holdfast.core import events as e
from holdfast.core.instants import Instant
from holdfast.core.messages import ActivityReturned
from holdfast.core.state import OpenStep, RunState
from holdfast.engine.activities.context import Outcome, Work
from holdfast.engine.activities.executor import ActivityExecutor, unfit_options
from holdfast.engine.turns.draft import TurnDraft
from holdfast.errors import InvalidInput
from holdfast.program.definitions import ActivityOptions, decode_options
from holdfast.registry import Registry
from holdfast.store.port import RunHead

NONE: frozenset[str] = frozenset()

logger = logging.getLogger("holdfast.node")


class Dispatcher:
    """Starts activities. If one cannot be started, `report` is called with its outcome."""

    def __init__(self, registry: Registry, executor: ActivityExecutor, report: Callable[[Work, Outcome], None]) -> None:
        self._activities = registry.activities
        self._built_in = registry.built_in
        self._executor = executor
        self._report = report
        self.unknown: set[str] = set()
        """The activities that steps here need and that this node does not have."""

    def dispatch(self, head: RunHead, step: OpenStep, details: Raw, now: Instant, context: Raw) -> None:
        """Start the step's activity, with the progress that an earlier attempt has reported."""
        body = step.body
        assert type(body) is e.StepStarted
        definition = self._activities.get(body.name) or self._built_in.get(body.name)
        assert definition is not None  # steps with an unknown activity were left out of the turn
        try:
            options = decode_options(body.options)
        except InvalidInput as problem:
            self._report(Work(head.run_id, step, definition, ActivityOptions()), unfit_options(step, problem))
            return
        work = Work(head.run_id, step, definition, options, details, head.tenant, head.environment, context)
        self._executor.start(work, now)

    def is_known(self, run_id: str, step: OpenStep) -> bool:
        """Return whether an activity is known here. If not, log that once; its steps wait for a node that has it."""
        if step.name in self._activities or step.name in self._built_in:
            return True
        if step.name not in self.unknown:
            self.unknown.add(step.name)
            logger.error("run %s: activity %r is not registered here; its steps wait", run_id, step.name)
        return False

    def leave_unknown(self, draft: TurnDraft) -> None:
        """Record with the turn that it starts no attempt of activities that are not known here."""
        activities, open_steps = self._activities, draft.state.open_steps
        for step_id in draft.dispatch:
            step = open_steps.get(step_id)
            if step is None or (type(step.body) is e.StepStarted and step.body.name in activities):
                continue
            if not self.is_known(draft.state.run_id, step):
                draft.handle(
                    ActivityReturned(step_id, step.logical_attempt_id, step.engine_attempt_id, is_lacking=True)
                )
                draft.dispatch = [each for each in draft.dispatch if each != step_id]

    def waits_for_unknown(self, state: RunState) -> bool:
        """Return whether the run has a step, due or not, whose activity is not known here."""
        return any(self._is_unknown(step) for step in state.open_steps.values())

    def lacking(self, state: RunState, now: Instant) -> frozenset[str]:
        """Return the activities that steps of the run need now and that are not known here."""
        if not self.unknown:
            return NONE
        return frozenset(
            step.name
            for step in state.open_steps.values()
            if self._is_unknown(step) and (step.due_at is None or step.due_at <= now)
        )

    def _is_unknown(self, step: OpenStep) -> bool:
        return step.name in self.unknown and is_local(step)


def is_local(step: OpenStep) -> bool:
    """Return whether a step's activity is executed by the node that owns the run."""
    return isinstance(step.body, e.StepStarted) and step.body.queue == "" and not step.is_detached
