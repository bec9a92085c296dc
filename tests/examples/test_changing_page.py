"""`docs/changing-code.md` is played: a careless release is found, a careful one serves old and new runs."""

from pathlib import Path

import pytest

from tests.examples.page_session import PageSession

PAGE = (Path(__file__).parents[2] / "docs" / "changing-code.md").read_text()


@pytest.mark.process
def test_every_line_of_the_page_does_what_it_shows(tmp_path: Path) -> None:
    session = PageSession(tmp_path)
    session.write_files(PAGE)
    try:
        assert session.play(PAGE) == 12
    finally:
        session.close()
