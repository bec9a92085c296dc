"""What `docs/starting.md` says: its program runs."""

from pathlib import Path

import pytest

from tests.examples.test_pages import TOP, run

PAGE = (TOP / "docs" / "starting.md").read_text()

SHOWN = """\
cart-ann True ['pear']
cart-ann has that click already
cart-ann~000002 False
cart-ann~000003
replaced by run cart-ann~000003
"""


@pytest.mark.contract("QUE-5")
def test_the_program_on_the_page_does_what_it_says(tmp_path: Path) -> None:
    assert run(PAGE, tmp_path, "shop.py") == SHOWN
