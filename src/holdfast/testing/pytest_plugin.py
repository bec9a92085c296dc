"""The pytest plugin: it comes with the package, and pytest loads it automatically.

The fixture `holdfast_node` creates nodes for tests: ``async with holdfast_node(app) as node``. If the test fails, its
report gets a section with the histories of their runs. Any plugin for async tests works with it.
"""

import asyncio
from collections.abc import Callable, Generator
from typing import Any

import pytest

NODES = pytest.StashKey[list[Any]]()


@pytest.fixture
def holdfast_node(request: pytest.FixtureRequest) -> Callable[..., Any]:
    """Create a `TestNode` for an app, with its arguments."""
    from holdfast.testing.test_node import TestNode  # imported here: pytest loads this plugin for every project

    def make(*args: Any, **kwargs: Any) -> TestNode:
        node = TestNode(*args, **kwargs)
        request.node.stash.setdefault(NODES, []).append(node)
        return node

    return make


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Add the histories of a failed test's runs to its report."""
    report = yield
    if report.failed:
        for node in item.stash.get(NODES, []):
            report.sections.append(("holdfast runs", asyncio.run(node.describe())))
    return report
