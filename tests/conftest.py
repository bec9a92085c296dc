"""What every test shares: the contract marker, and settings of the test libraries."""

from __future__ import annotations

from collections.abc import Generator

import hypothesis
import pytest

from tools import contract

# The conformance suites live in the package, so pytest would not explain their failed assertions.
pytest.register_assert_rewrite("holdfast.testing")

# No deadline: a busy machine is not a failure. The blob reproduces a failure that was found by chance.
hypothesis.settings.register_profile("holdfast", deadline=None, print_blob=True)
hypothesis.settings.load_profile("holdfast")

KNOWN_IDS = frozenset(contract.read_ids(contract.CONTRACT.read_text(encoding="utf-8")))


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report(
    collector: pytest.Collector,
) -> Generator[None, pytest.CollectReport, pytest.CollectReport]:
    """Refuse a test that claims to prove a rule which the contract does not have."""
    report = yield
    tests = [node for node in report.result or () if isinstance(node, pytest.Item)]
    problems = [problem for test in tests for problem in contract.marker_problems(test, KNOWN_IDS)]
    if problems:
        report.outcome = "failed"
        report.longrepr = "\n".join(problems)
        report.result = []
    return report
