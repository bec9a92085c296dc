"""The five pages of the tutorial are run as they stand."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from tests.examples.page_session import PageSession

PAGES = sorted((Path(__file__).parents[2] / "docs" / "tutorial").glob("*.md"))

pytestmark = [pytest.mark.process, pytest.mark.slow]


def test_there_are_five() -> None:
    assert [page.name[0] for page in PAGES] == ["1", "2", "3", "4", "5"]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_every_line_of_the_page_does_what_it_shows(page: Path, tmp_path: Path) -> None:
    assert shutil.which("curl"), "the pages use curl: make commands"
    text = page.read_text()
    session = PageSession(tmp_path)
    session.write_files(text)
    try:
        assert session.play(text) > 0
    finally:
        session.close()
