"""Hands steps of a node's runs to those who carry them out, as far as their activities are known here."""

import logging
from collections.abc import Callable

from msgspec import Raw

from holdfast.core import events as e
from holdfast.core.instants import Instant
from holdfast.core.state import OpenStep, RunState
from holdfast.engine.activities import Outcome, Work, Workers, unfit_options
from holdfast.engine.held import is_local
from holdfast.engine.queues import ActivityDefinitions
from holdfast.errors import InvalidInput
from holdfast.program.definitions import ActivityOptions, decode_options

logger = logging.getLogger("holdfast.node")


class Dispatcher:
    """Starts activities. `report` is called with what comes of one that cannot be started."""

    def __init__(
        self, definitions: ActivityDefinitions, workers: Workers, report: Callable[[Work, Outcome], None]
    ) -> None:
        self._definitions = definitions
        self._workers = workers
        self._report = report
        self._unknown: set[str] = set()

    def dispatch(self, run_id: str, step: OpenStep, details: Raw, now: Instant) -> None:
        """Let the step's activity be carried out; with what an earlier attempt has said of its progress."""
        body = step.body
        assert isinstance(body, e.StepStarted)
        definition = self._definitions.activity_named(body.name)
        if definition is None:
            self.is_known(run_id, step)
            return
        try:
            options = decode_options(bytes(body.options))
        except InvalidInput as problem:
            self._report(Work(run_id, step, definition, ActivityOptions()), unfit_options(step, problem))
            return
        self._workers.start(Work(run_id, step, definition, options, details), now)

    def is_known(self, run_id: str, step: OpenStep) -> bool:
        """Say whether an activity is known here; if not its steps wait for who knows it, which is said once."""
        if self._definitions.activity_named(step.name) is not None:
            return True
        if step.name not in self._unknown:
            self._unknown.add(step.name)
            logger.error("run %s: no activity %r is known here; its steps wait", run_id, step.name)
        return False

    def waits_for_unknown(self, state: RunState) -> bool:
        """Say whether the run has a step that waits for who knows its activity."""
        if not self._unknown:
            return False
        return any(step.name in self._unknown and is_local(step) for step in state.open_steps.values())
