"""The page with the life of a run is what the transition table says."""

import subprocess
import sys
from pathlib import Path

import pytest

from holdfast.core.diagram import states_page, transitions
from holdfast.core.state import TERMINAL, TRANSITIONS

PAGE = Path(__file__).parent.parent.parent / "docs" / "states.md"


@pytest.mark.contract("WF-7")
def test_the_page_in_the_docs_is_the_generated_one() -> None:
    assert PAGE.read_text(encoding="utf-8") == states_page(), "run `make diagram`"


def test_every_transition_is_an_arrow_and_a_row() -> None:
    lines = states_page().splitlines()
    for status, row in TRANSITIONS.items():
        for body, following in row.items():
            assert f"    {status} --> {following}: {body.__name__}" in lines
            assert f"| {status} | {body.__name__} | {following} |" in lines
    arrows = [line for line in lines if "-->" in line]
    assert len(arrows) == 1 + sum(map(len, TRANSITIONS.values())) + len(TERMINAL)
    assert len(list(transitions())) == sum(map(len, TRANSITIONS.values()))


@pytest.mark.process
def test_the_module_prints_the_page() -> None:
    printed = subprocess.run(
        [sys.executable, "-m", "holdfast.core.diagram"], check=True, capture_output=True, text=True, encoding="utf-8"
    )
    assert printed.stdout == states_page()
