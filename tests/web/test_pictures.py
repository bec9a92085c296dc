"""The pictures in the documentation are made of the page as it is: all of them, and no others.

`TEST_SCHEMES=light,dark` makes them in both colours, as `make soak` does.
"""

import os
import re
from pathlib import Path

import pytest
from playwright.async_api import Browser

from tests.web.inbox_pictures import photograph_inbox
from tests.web.pictures import FOLDER, photograph_runs

DOCS = FOLDER.parent
SCHEMES = os.environ.get("TEST_SCHEMES", "dark").split(",")
INBOX = re.compile("(phone-)?(inbox|task|signals|letters|health)-")


@pytest.mark.slow
@pytest.mark.process
async def test_every_picture_of_runs_can_be_made_again(browser: Browser, tmp_path: Path) -> None:
    """`make pictures` puts them into the documentation; somebody looks at them then."""
    await photograph_runs(browser, tmp_path, SCHEMES, settle_ms=0)
    check(tmp_path, of_inbox=False)


@pytest.mark.slow
@pytest.mark.process
async def test_every_picture_of_the_inbox_can_be_made_again(browser: Browser, tmp_path: Path) -> None:
    await photograph_inbox(browser, tmp_path, SCHEMES, settle_ms=0, samples=5)
    check(tmp_path, of_inbox=True)


def check(folder: Path, *, of_inbox: bool) -> None:
    """Compare the pictures in a folder with those in the documentation that are of the inbox, or that are not."""
    made = {path.name for path in folder.iterdir()}
    kept = {path.name for path in FOLDER.glob("*.png") if bool(INBOX.match(path.name)) is of_inbox}
    assert made == {name for name in kept if name.removesuffix(".png").rpartition("-")[2] in SCHEMES}
    assert all(path.stat().st_size > 10_000 for path in folder.iterdir()), "none is empty"


def test_every_picture_is_there_in_light_and_in_dark() -> None:
    names = [path.stem.rpartition("-") for path in FOLDER.glob("*.png")]
    assert {name for name, _, scheme in names if scheme == "light"} == {
        name for name, _, scheme in names if scheme == "dark"
    }


def test_every_picture_that_is_shown_is_there() -> None:
    shown = {name for page in DOCS.glob("*.md") for name in re.findall(r"\(pictures/([^)]+)\)", page.read_text())}
    assert len(shown) >= 4
    assert shown <= {path.name for path in FOLDER.iterdir()}
