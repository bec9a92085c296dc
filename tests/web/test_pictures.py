"""The pictures in the documentation are made of the page as it is: all of them, and no others."""

import re
from pathlib import Path

import pytest

from tests.web.pictures import FOLDER, main

DOCS = FOLDER.parent


@pytest.mark.slow
@pytest.mark.browser
@pytest.mark.process
async def test_every_picture_can_be_made_again(tmp_path: Path) -> None:
    """`make pictures` puts them into the documentation; somebody looks at them then."""
    await main(tmp_path, samples=5, settle_ms=0)
    made = {path.name for path in tmp_path.iterdir()}
    assert made == {path.name for path in FOLDER.iterdir()}
    assert {name.removesuffix("-light.png") for name in made if name.endswith("-light.png")} == {
        name.removesuffix("-dark.png") for name in made if name.endswith("-dark.png")
    }
    assert all(path.stat().st_size > 10_000 for path in tmp_path.iterdir()), "none is empty"


def test_every_picture_that_is_shown_is_there() -> None:
    shown = {name for page in DOCS.glob("*.md") for name in re.findall(r"\(pictures/([^)]+)\)", page.read_text())}
    assert len(shown) >= 4
    assert shown <= {path.name for path in FOLDER.iterdir()}
