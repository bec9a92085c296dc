"""What `docs/workflows.md` says: its program runs, and its tables name every option, limit and setting."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

import holdfast as hf

TOP = Path(__file__).parents[2]
PAGE = (TOP / "docs" / "workflows.md").read_text()

SHOWN = """\
gave back hotel-1
gave back flight-1
ValueError: there are no cars
1 ['lamp-1']
1
which item?
['lamp-1', 'desk-1']
gave back bike-1
the rental was cancelled
"""


def rows(heading: str) -> dict[str, str]:
    """Return the first and the last column of the table in this part of the page."""
    part = PAGE.partition(f"## {heading}\n")[2].partition("\n## ")[0]
    cells = [
        [cell.strip() for cell in line.strip("|").split("|")] for line in part.splitlines() if line.startswith("|")
    ]
    return {row[0]: row[-1] for row in cells[2:]}


def run(page: str, folder: Path, *arguments: str) -> str:
    """Write the page's program to `shop.py`, run Python on it, and return what it prints."""
    (folder / "shop.py").write_text("\n".join(re.findall(r"```python\n(.*?)```", page, re.DOTALL)))
    done = subprocess.run(
        [sys.executable, "-W", "error", *arguments], cwd=folder, capture_output=True, text=True, timeout=60, check=False
    )
    assert (done.returncode, done.stderr) == (0, "")
    return done.stdout


def test_the_program_on_the_page_does_what_it_says(tmp_path: Path) -> None:
    assert run(PAGE, tmp_path, "shop.py") == SHOWN


@pytest.mark.parametrize("page", ["README.md", "docs/workflows.md"])
def test_a_program_that_is_only_imported_does_nothing(page: str, tmp_path: Path) -> None:
    assert run((TOP / page).read_text(), tmp_path, "-c", "import shop") == ""
    assert {file.name for file in tmp_path.iterdir()} <= {"shop.py", "__pycache__"}


def test_every_option_of_a_node_is_on_the_page_with_its_default() -> None:
    told = {
        name.strip("`"): value.replace(" ", "").replace("none", "()")
        for name, value in rows("A node's options").items()
    }
    options = hf.NodeOptions()
    assert told == {name: str(getattr(options, name)) for name in options.__struct_fields__}


def test_every_limit_is_on_the_page() -> None:
    named = [name for cell in rows("Settings and limits") for name in re.findall(r"`(\w+)`", cell)]
    assert sorted(named) == sorted(hf.Limits.__struct_fields__)


@pytest.mark.parametrize("name", [field for field in hf.Settings.__struct_fields__ if field not in ("limits", "node")])
def test_every_setting_is_on_the_page(name: str) -> None:
    assert f"`HOLDFAST_{name.upper()}`" in PAGE


def test_how_options_of_nodes_are_set_is_on_the_page() -> None:
    assert "`HOLDFAST_NODE__" in PAGE
