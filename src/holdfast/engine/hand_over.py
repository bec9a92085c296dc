"""Hands runs over to nodes that have what this node lacks: other code for a workflow, or an activity."""

import logging
from collections.abc import Awaitable, Callable

from holdfast.engine.definition_filter import DefinitionFilter
from holdfast.engine.turns.owned_runs import OwnedRun, OwnedRuns
from holdfast.errors import RunError, StoreError
from holdfast.store.port import Store

HAND_OVER = 500
"""How many runs are handed over to another node in one call."""

logger = logging.getLogger("holdfast.node")


class HandOver:
    """Hands over runs of one node. `renew` publishes what the node lacks."""

    def __init__(
        self,
        store: Store,
        owned_runs: OwnedRuns,
        definition_filter: DefinitionFilter,
        renew: Callable[[], Awaitable[None]],
    ) -> None:
        self._store = store
        self._owned_runs = owned_runs
        self._definition_filter = definition_filter
        self._renew = renew

    async def offer(self) -> None:
        """Hand runs that wait for activities that this node does not have over to nodes that do.

        Work that is running here for such a run is finished first.
        """
        self._owned_runs.should_offer = False  # before the calls: a notification may arrive during them
        try:
            given: dict[str, list[str]] = {}
            for run_id, to in await self._definition_filter.takers():
                if (owned := self._owned_runs.by_id.get(run_id)) is not None and self._is_at_rest(owned):
                    given.setdefault(to, []).append(run_id)
            for to, run_ids in given.items():
                for start in range(0, len(run_ids), HAND_OVER):
                    for run_id in await self._store.hand_over(
                        self._owned_runs.name, run_ids[start : start + HAND_OVER], to
                    ):
                        logger.info("run %s is handed over to %s, which has its activity", run_id, to)
                        self._owned_runs.let_go(run_id)
            if self._owned_runs.has_news:
                self._owned_runs.has_news = False
                await self._renew()
        except StoreError:
            self._owned_runs.should_offer = self._owned_runs.has_news = True
            raise

    async def for_other_code(self, owned: OwnedRun, problem: RunError) -> bool:
        """Give a run to a node that has other code for it, unless work of the run is in progress here.

        In that case `is_offered` stays False: the run is offered again when that work has ended.
        """
        run_id = owned.loaded.head.run_id
        owned.is_offered = not (owned.inputs or self._owned_runs.executor.attempts.get(run_id))
        if not owned.is_offered or not await self._definition_filter.hand_over(owned.loaded.head):
            return False
        logger.info("run %s is handed over to a node with other code: %s", run_id, problem)
        self._owned_runs.let_go(run_id)
        return True

    def _is_at_rest(self, owned: OwnedRun) -> bool:
        """Return whether the run has no work in progress here that is not in the store."""
        run_id = owned.loaded.head.run_id
        has_reports = any(run_id == reported for reported, _ in self._owned_runs.reports)
        return not (owned.inputs or has_reports or self._owned_runs.executor.attempts.get(run_id))
