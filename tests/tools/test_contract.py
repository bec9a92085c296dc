"""The list of rules, the marker that names them, and the report."""

from __future__ import annotations

from pathlib import Path

import pytest

from tools import contract

PAGE = """
# A contract
## 1. Signals (SIG)
- SIG-1 The first rule, which mentions INV-9 (API) and nothing else.
- SIG-2 The second.
## 2. Messages (MSG, OWN) and stores (STO), from 002
- MSG-1 One.
- OWN-1 Two.
- STO-10 Ten.
## 3. True after any chaos (INV)
No signal lost.
"""

CONFTEST = Path(__file__).parent.parent / "conftest.py"


@pytest.fixture
def suite(pytester: pytest.Pytester) -> pytest.Pytester:
    """A test suite of its own that uses our marker."""
    pytester.makeconftest(CONFTEST.read_text(encoding="utf-8"))
    pytester.makeini("[pytest]\nmarkers = contract(*ids)\nasyncio_default_fixture_loop_scope = function\n")
    return pytester


def test_ids_are_read_in_order_and_a_group_without_rules_is_an_id() -> None:
    assert contract.read_ids(PAGE) == ["SIG-1", "SIG-2", "MSG-1", "OWN-1", "STO-10", "INV"]


def test_an_id_given_twice_is_refused() -> None:
    with pytest.raises(ValueError, match="SIG-2"):
        contract.read_ids(PAGE.replace("SIG-1", "SIG-2"))


def test_every_line_of_the_contract_that_looks_like_a_rule_is_an_id() -> None:
    page = contract.CONTRACT.read_text(encoding="utf-8")
    ids = contract.read_ids(page)
    assert len([line for line in page.splitlines() if line.startswith("- ")]) == len(ids) - 1
    assert ids[0] == "EVT-1"
    assert ids[-1] == "INV"


@pytest.mark.parametrize(
    ("marker", "message"),
    [
        ("contract('SIG-999')", "docs/contract.md has no rule 'SIG-999'"),
        ("contract('SIG')", "docs/contract.md has no rule 'SIG'"),
        ("contract('SIG-1', 4)", "docs/contract.md has no rule 4"),
        ("contract()", "the contract marker names no rule"),
        ("contract('SIG-1', open='')", "beside rules the contract marker takes open='what is not there yet'"),
        ("contract('SIG-1', part='x')", "beside rules the contract marker takes open='what is not there yet'"),
    ],
)
def test_an_unknown_rule_fails_collection(suite: pytest.Pytester, marker: str, message: str) -> None:
    suite.makepyfile(f"import pytest\n@pytest.mark.{marker}\ndef test_planted(): pass")
    result = suite.runpytest_inprocess()
    result.assert_outcomes(errors=1)
    result.stdout.fnmatch_lines([f"*::test_planted: {message}"])


def test_an_unknown_rule_in_a_class_fails_collection(suite: pytest.Pytester) -> None:
    suite.makepyfile(
        "import pytest\nclass TestIt:\n    @pytest.mark.contract('NO-1')\n    def test_planted(self): pass"
    )
    suite.runpytest_inprocess().assert_outcomes(errors=1)


def test_known_rules_are_collected(suite: pytest.Pytester) -> None:
    suite.makepyfile("import pytest\n@pytest.mark.contract('SIG-1', 'INV')\ndef test_it(): pass")
    suite.runpytest_inprocess().assert_outcomes(passed=1)


def test_tests_are_collected_once_and_subclasses_inherit_rules(suite: pytest.Pytester) -> None:
    suite.makepyfile(
        suite_of_stores="""
        import pytest

        @pytest.mark.contract("STO-1")
        class StoreSuite:
            @pytest.mark.contract("EVT-1", "EVT-4")
            def test_append(self): pass
        """,
        test_stores="""
        import pytest
        from suite_of_stores import StoreSuite

        class TestMemory(StoreSuite): pass

        class TestSqlite(StoreSuite): pass

        @pytest.mark.contract("EVT-1")
        @pytest.mark.parametrize("n", [1, 2])
        def test_other(n): pass
        """,
    )
    memory, sqlite = "test_stores.py::TestMemory::test_append", "test_stores.py::TestSqlite::test_append"
    assert contract.collect([str(suite.path)]).tests == {
        "EVT-1": [memory, sqlite, "test_stores.py::test_other"],
        "EVT-4": [memory, sqlite],
        "STO-1": [memory, sqlite],
    }


def test_there_is_no_report_when_the_tests_cannot_be_collected(suite: pytest.Pytester) -> None:
    suite.makepyfile("raise ValueError('planted')")
    with pytest.raises(SystemExit, match="planted"):
        contract.collect([str(suite.path)])


def test_report_lists_proved_rules_missing_rules_and_counts() -> None:
    tests = {"SIG-2": ["a.py::test_a", "b.py::test_b"], "MSG-4": ["c.py::test_c"]}
    report = contract.report(["SIG-1", "SIG-2", "MSG-1", "MSG-4", "INV"], tests)
    assert report.splitlines() == [
        "Rules with tests",
        "  SIG-2",
        "    a.py::test_a",
        "    b.py::test_b",
        "  MSG-4",
        "    c.py::test_c",
        "",
        "Rules without tests",
        "  SIG-1",
        "  MSG-1",
        "  INV",
        "",
        "Rules with tests, by group",
        "  SIG    1 of  2",
        "  MSG    1 of  2",
        "  INV    0 of  1",
        "  all    2 of  5",
    ]


def test_state_is_read_from_the_markers(suite: pytest.Pytester) -> None:
    suite.makepyfile(
        """
        import pytest
        @pytest.mark.contract("SIG-2")
        @pytest.mark.contract("MSG-1", open="only on disks")
        @pytest.mark.parametrize("n", [1, 2])
        def test_it(n): pass
        @pytest.mark.contract("MSG-1")
        def test_other(): pass
        """
    )
    page = contract.page_with_state(
        f"{PAGE}{contract.BEGIN}old{contract.END}after", contract.collect([str(suite.path)])
    )
    assert page.partition(contract.BEGIN)[2].splitlines() == [
        "",
        "| state | rules |",
        "|---|---|",
        "| holds: tests prove it | SIG-2 |",
        "| holds in part | MSG-1: only on disks |",
        "| not yet: no test proves it | SIG-1, OWN-1, STO-10, INV |",
        "",
        contract.END.strip(),
        "after",
    ]


def test_the_page_has_the_state_of_this_suite(request: pytest.FixtureRequest) -> None:
    files = {item.path for item in request.session.items}
    if files != set(Path(__file__).parents[1].rglob("test_*.py")) or request.config.option.markexpr:
        pytest.skip("only the whole suite says which rules hold")
    proofs = contract.Proofs()
    for item in request.session.items:
        proofs.add(item)
    page = contract.CONTRACT.read_text(encoding="utf-8")
    assert contract.page_with_state(page, proofs) == page, "run make contract"
