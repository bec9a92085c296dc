"""What `docs/schedules.md` says: its program runs."""

from pathlib import Path

import pytest

from tests.examples.test_pages import TOP, run

PAGE = (TOP / "docs" / "schedules.md").read_text()

SHOWN = """\
once 1
quarters 5
report 5
short report
the bank is down
PENDING
late report
"""


@pytest.mark.contract("TMR-2")
def test_the_program_on_the_page_does_what_it_says(tmp_path: Path) -> None:
    assert run(PAGE, tmp_path, "shop.py") == SHOWN
