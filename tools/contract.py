"""Which rule of `docs/contract.md` is proved by which test.

The page is the only list of ids. A test names the ids it proves with `@pytest.mark.contract("SIG-4", ...)`;
`tests/conftest.py` refuses ids that the page does not have. `@pytest.mark.contract("BUS-1", open="…")` says what of the
rule is not there yet. `python -m tools.contract` prints the report, and writes into the page which rules hold, which
hold in part, and which do not hold yet, from these markers alone. Tests are collected, never run.
"""

from __future__ import annotations

import io
import re
import sys
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from contextlib import redirect_stdout
from dataclasses import dataclass, field
from pathlib import Path

import pytest

CONTRACT = Path(__file__).parent.parent / "docs" / "contract.md"

BEGIN, END = "<!-- state: made by make contract, from the tests alone -->\n", "<!-- end -->\n"

_RULE = re.compile(r"^- ([A-Z]{2,3}-\d+) ", re.MULTILINE)
_HEADING = re.compile(r"^## \d+\. .*$", re.MULTILINE)
_GROUP = re.compile(r"\b[A-Z]{2,3}\b")


def read_ids(page: str) -> list[str]:
    """The rule ids of the page, in its order; a group without numbered rules is itself an id."""
    ids: list[str] = []
    for heading, body in _sections(page):
        rules = _RULE.findall(body)
        numbered = {group_of(rule) for rule in rules}
        groups = [group for listed in re.findall(r"\(([^)]*)\)", heading) for group in _GROUP.findall(listed)]
        ids += rules + [group for group in groups if group not in numbered]
    repeated = sorted({rule for rule in ids if ids.count(rule) > 1})
    if repeated:
        raise ValueError(f"the contract gives these ids to more than one rule: {', '.join(repeated)}")
    return ids


def group_of(rule_id: str) -> str:
    """The group of an id: `SIG` for `SIG-4`."""
    return rule_id.partition("-")[0]


def contract_ids(item: pytest.Item) -> list[object]:
    """What the contract markers of a test name, inherited markers included, each once."""
    named = [rule for marker in item.iter_markers("contract") for rule in marker.args]
    return list(dict.fromkeys(named))


def marker_problems(item: pytest.Item, known: Container[str]) -> Iterator[str]:
    """What is wrong with the contract markers of a test."""
    for marker in item.iter_markers("contract"):
        if not marker.args:
            yield f"{item.nodeid}: the contract marker names no rule"
        if marker.kwargs and not (marker.kwargs.keys() == {"open"} and marker.kwargs["open"]):
            yield f"{item.nodeid}: beside rules the contract marker takes open='what is not there yet'"
    for rule in contract_ids(item):
        if rule not in known:
            yield f"{item.nodeid}: docs/contract.md has no rule {rule!r}"


@dataclass
class Proofs:
    """The tests that carry each id, and what of a rule is not there yet."""

    tests: dict[str, list[str]] = field(default_factory=dict)
    open: dict[str, list[str]] = field(default_factory=dict)

    def add(self, item: pytest.Item) -> None:
        """Take in a test; one with parameters is listed once."""
        name = item.nodeid.partition("[")[0]
        for rule in contract_ids(item):
            _add(self.tests, str(rule), name)
        for marker in item.iter_markers("contract"):
            if "open" in marker.kwargs:
                for rule in marker.args:
                    _add(self.open, str(rule), str(marker.kwargs["open"]))


def collect(arguments: Sequence[str] = ()) -> Proofs:
    """The tests that carry each id, by collecting the suite."""
    collector = _Collector()
    printed = io.StringIO()
    with redirect_stdout(printed):
        status = pytest.main(["--collect-only", "-q", "-p", "no:cacheprovider", *arguments], plugins=[collector])
    if status not in (pytest.ExitCode.OK, pytest.ExitCode.NO_TESTS_COLLECTED):
        raise SystemExit(f"{printed.getvalue()}\nThe tests could not be collected, so there is no report.")
    return collector.proofs


def report(ids: Sequence[str], tests: Mapping[str, Sequence[str]]) -> str:
    """The printed report: ids with their tests, ids with none, and a count for each group."""
    proved = [rule for rule in ids if tests.get(rule)]
    missing = [rule for rule in ids if not tests.get(rule)]
    return "\n".join(
        [
            "Rules with tests",
            *(line for rule in proved for line in _rule_lines(rule, tests[rule])),
            "",
            "Rules without tests",
            *_wrapped_by_group(missing),
            "",
            "Rules with tests, by group",
            *(_count_line(group, ids, proved) for group in _groups(ids)),
            _total_line(ids, proved),
        ]
    )


def state_table(ids: Sequence[str], proofs: Proofs) -> str:
    """The table of the page: which rules hold, hold in part, or do not hold yet."""
    part = [rule for rule in ids if proofs.open.get(rule) and proofs.tests.get(rule)]
    holds = [rule for rule in ids if proofs.tests.get(rule) and rule not in part]
    missing = [rule for rule in ids if not proofs.tests.get(rule)]
    return "\n".join(
        [
            "| state | rules |",
            "|---|---|",
            f"| holds: tests prove it | {', '.join(holds) or 'none'} |",
            *(f"| holds in part | {rule}: {'; '.join(sorted(proofs.open[rule]))} |" for rule in part),
            f"| not yet: no test proves it | {', '.join(missing) or 'none'} |",
        ]
    )


def page_with_state(page: str, proofs: Proofs) -> str:
    """The page with the table in its place."""
    before, _, rest = page.partition(BEGIN)
    return f"{before}{BEGIN}\n{state_table(read_ids(page), proofs)}\n\n{END}{rest.partition(END)[2]}"


def main() -> None:
    """Print the report for the whole test suite, and write the table of the page."""
    page = CONTRACT.read_text(encoding="utf-8")
    proofs = collect(sys.argv[1:])
    print(report(read_ids(page), proofs.tests))
    if not sys.argv[1:]:
        CONTRACT.write_text(page_with_state(page, proofs), encoding="utf-8")


class _Collector:
    """A pytest plugin that remembers which tests carry which id."""

    def __init__(self) -> None:
        self.proofs = Proofs()

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        for item in session.items:
            self.proofs.add(item)


def _add(lists: dict[str, list[str]], key: str, value: str) -> None:
    values = lists.setdefault(key, [])
    if value not in values:
        values.append(value)


def _sections(page: str) -> Iterator[tuple[str, str]]:
    headings = list(_HEADING.finditer(page))
    ends = [heading.start() for heading in headings[1:]] + [len(page)]
    for heading, end in zip(headings, ends, strict=True):
        yield heading.group(), page[heading.end() : end]


def _groups(ids: Iterable[str]) -> list[str]:
    return list(dict.fromkeys(group_of(rule) for rule in ids))


def _rule_lines(rule: str, names: Sequence[str]) -> Iterator[str]:
    yield f"  {rule}"
    for name in names:
        yield f"    {name}"


def _wrapped_by_group(ids: Sequence[str]) -> Iterator[str]:
    if not ids:
        yield "  none"
    for group in _groups(ids):
        yield "  " + " ".join(rule for rule in ids if group_of(rule) == group)


def _count_line(group: str, ids: Sequence[str], proved: Sequence[str]) -> str:
    have = sum(group_of(rule) == group for rule in proved)
    want = sum(group_of(rule) == group for rule in ids)
    return f"  {group:<3}  {have:>3} of {want:>2}"


def _total_line(ids: Sequence[str], proved: Sequence[str]) -> str:
    return f"  all  {len(proved):>3} of {len(ids):>2}"


if __name__ == "__main__":
    main()
