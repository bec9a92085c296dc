"""Tests of `docs/guarantees.md`: each promise names rules of the contract, and a test that there is."""

import re
from pathlib import Path

DOCS = Path(__file__).parents[2] / "docs"
RULE = re.compile(r"\b[A-Z]{3}-\d+\b|\bWF-\d+\b")


def test_each_promise_names_rules_of_the_contract() -> None:
    page = (DOCS / "guarantees.md").read_text()
    known = set(re.findall(r"^- ([A-Z]+-\d+) ", (DOCS / "contract.md").read_text(), re.MULTILINE))
    rows = [line for line in page.splitlines() if line.startswith("| ") and not line.startswith("| promise")]
    assert len(rows) >= 15
    for row in rows:
        rules, test = row.rsplit("|", 3)[1:3]
        assert RULE.search(rules), row
        path, _, name = test.strip().strip("`").partition("::")
        assert re.search(rf"^(async )?def {name}\(", (DOCS.parent / "tests" / path).read_text(), re.MULTILINE), row
    assert set(RULE.findall(page)) <= known
