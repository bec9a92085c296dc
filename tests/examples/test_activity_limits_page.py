"""What `docs/activity-limits.md` says: its program runs."""

from pathlib import Path

import pytest

from tests.examples.test_pages import TOP, run

PAGE = (TOP / "docs" / "activity-limits.md").read_text()


@pytest.mark.contract("ACT-7")
def test_the_program_on_the_page_does_what_it_says(tmp_path: Path) -> None:
    assert run(PAGE, tmp_path, "shop.py") == "9\n"
