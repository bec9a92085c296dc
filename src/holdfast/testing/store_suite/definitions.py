"""The store suite, definitions: what versions of workflows declare is kept for processes without their code."""

import pytest

from holdfast.core.declarations import WorkflowDeclaration
from holdfast.errors import InvalidInput
from holdfast.store.port import Store
from holdfast.testing.store_suite.base import STRANGE_NAMES, SuiteBase

RICH = WorkflowDeclaration(
    plan_id="order",
    plan_version="1",
    signals={"approval": {"type": "object", "properties": {"by": {"type": "string"}}, "required": ["by"]}, "go": {}},
    allows_other_signals=True,
)


class DefinitionSuite(SuiteBase):
    """Publishing and finding definitions."""

    @pytest.mark.contract("SIG-10")
    async def test_what_was_published_last_is_found_by_every_process(self, store: Store, peer: Store) -> None:
        """Each version has its own definition; publishing the same one again is allowed."""
        second = WorkflowDeclaration(plan_id="order", plan_version="2")
        for _ in range(2):
            await store.publish_definitions([RICH, second])
        asked = [("order", "2"), ("order", "1"), ("order", "3"), ("order", "1")]
        assert await peer.find_definitions(asked) == [second, RICH, None, RICH]
        changed = WorkflowDeclaration(plan_id="order", plan_version="1", signals={"stop": {"type": "null"}})
        await peer.publish_definitions([changed])
        assert await store.find_definitions([("order", "1"), ("order", "2")]) == [changed, second]
        assert await store.find_definitions([]) == []
        await store.publish_definitions([])

    @pytest.mark.contract("SIG-10")
    async def test_definitions_of_strange_names_are_kept_apart(self, store: Store) -> None:
        """Names are compared byte for byte."""
        strange = [WorkflowDeclaration(plan_id=name, plan_version=name, signals={name: {}}) for name in STRANGE_NAMES]
        await store.publish_definitions(strange)
        assert await store.find_definitions([(name, name) for name in STRANGE_NAMES]) == strange
        assert await store.find_definitions([("a\x00b", "1"), ("nowhere", "1")]) == [None, None]

    @pytest.mark.contract("SIG-10", "API-4")
    async def test_definitions_that_cannot_be_kept_are_refused(self, store: Store) -> None:
        """Nothing of the call is stored."""
        for wrong in ("order", WorkflowDeclaration(plan_id="", plan_version="1"), None):
            with pytest.raises(InvalidInput):
                await store.publish_definitions([RICH, wrong])  # type: ignore[list-item]
        with pytest.raises(InvalidInput):
            await store.find_definitions(["order"])  # type: ignore[list-item]
        assert await store.find_definitions([("order", "1")]) == [None]
