"""`docs/getting-started.md` is run as it stands: each line behind a `$`, and what it shows must be what comes."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from tests.examples.page_session import PageSession, is_like

TOP = Path(__file__).parents[2]
PAGE = (TOP / "docs" / "getting-started.md").read_text()


def test_the_comparison_can_fail() -> None:
    assert is_like(["a  …  b", "…"], ["a x y b", "more", "and more"])
    assert not is_like(["a  …  b"], ["a x y c"])
    assert not is_like(["a"], ["a", "b"])
    assert not is_like(["a", "b", "…"], ["a"])


@pytest.mark.slow
def test_every_line_of_the_page_does_what_it_shows(tmp_path: Path) -> None:
    assert shutil.which("curl"), "the page uses curl: make commands"
    shutil.copytree(TOP / "examples", tmp_path / "examples", ignore=shutil.ignore_patterns("__pycache__"))
    session = PageSession(tmp_path)
    try:
        assert session.play(PAGE) >= 11
    finally:
        session.close()
