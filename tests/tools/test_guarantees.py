"""Tests of `docs/guarantees.md`: each promise names rules of the contract, and a test that proves one of them."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

TESTS = Path(__file__).parents[1]
DOCS = TESTS.parent / "docs"
PAGE = (DOCS / "guarantees.md").read_text()
RULE = re.compile(r"\b[A-Z]{2,3}-\d+\b")


def promises() -> list[tuple[str, set[str], str]]:
    """Return each promise of the page with its rules and the test that it names."""
    tables = PAGE.partition("\n## Nothing acknowledged is lost\n")[2]
    rows = [line for line in tables.splitlines() if line.startswith("| ") and not line.startswith("| promise")]
    return [
        (row.split("|")[1].strip(), set(RULE.findall(row.rsplit("|", 3)[1])), row.rsplit("|", 3)[2].strip(" `"))
        for row in rows
    ]


def rules_of(test: str) -> Iterator[str]:
    """Return the rules that a test says it proves: by its own markers, and by those of its module."""
    path, _, name = test.partition("::")
    body = ast.parse((TESTS / path).read_text(encoding="utf-8")).body
    tests = [node for node in body if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.name == name]
    assert tests, f"there is no test {test}"
    marks = [decorator for node in tests for decorator in node.decorator_list]
    marks += [node.value for node in body if isinstance(node, ast.Assign) and "pytestmark" in ast.unparse(node)]
    for mark in marks:
        if "mark.contract(" in ast.unparse(mark):
            yield from RULE.findall(ast.unparse(mark))


def test_every_promise_is_found() -> None:
    assert len(promises()) >= 20


@pytest.mark.parametrize("promise", promises(), ids=lambda promise: promise[0])
def test_each_promise_names_rules_of_the_contract_and_a_test_of_one_of_them(promise: tuple[str, set[str], str]) -> None:
    _, rules, test = promise
    known = set(re.findall(r"^- ([A-Z]+-\d+) ", (DOCS / "contract.md").read_text(), re.MULTILINE))
    assert rules
    assert rules <= known
    assert rules & set(rules_of(test)), f"{test} proves none of {sorted(rules)}"


def test_every_rule_on_the_page_exists() -> None:
    known = set(re.findall(r"^- ([A-Z]+-\d+) ", (DOCS / "contract.md").read_text(), re.MULTILINE))
    assert set(RULE.findall(PAGE)) <= known
