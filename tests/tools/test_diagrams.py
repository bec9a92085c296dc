"""The diagrams of the documentation are up to date, well-formed, and load nothing."""

import re
from xml.etree import ElementTree

import pytest

from holdfast.core.diagram import transitions
from tools import diagrams

DRAWN = {**diagrams.pictures(), "states.svg": diagrams.states()}


def test_the_files_are_those_that_are_drawn() -> None:
    for name, text in diagrams.pictures().items():
        assert (diagrams.FOLDER / name).read_text(encoding="utf-8") == text, "python -m tools.diagrams"


@pytest.mark.parametrize("name", DRAWN)
def test_a_diagram_is_well_formed_and_loads_nothing(name: str) -> None:
    tree = ElementTree.fromstring(DRAWN[name])
    assert tree.find("{http://www.w3.org/2000/svg}title") is not None
    assert re.findall(r"https?://[^\"]+", DRAWN[name]) == ["http://www.w3.org/2000/svg"]


@pytest.mark.contract("WF-7")
def test_every_transition_is_an_arrow_between_its_states() -> None:
    pairs = {(status, following) for status, _, following in transitions()}
    assert DRAWN["states.svg"].count('class="arrow"') == len(pairs) + 1
