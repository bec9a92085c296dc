"""What `docs/outages.md` and `docs/coming-from.md` show: their programs run as they stand."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

DOCS = Path(__file__).parents[2] / "docs"


@pytest.mark.parametrize(
    ("page", "shown"),
    [
        ("outages.md", "receipt of o-1 True 1\n"),
        ("coming-from.md", "mailed receipt of o-1\nreceipt of o-1\n"),
    ],
)
def test_the_program_on_the_page_runs(page: str, shown: str, tmp_path: Path) -> None:
    (program,) = re.findall(r'```python title="\w+\.py"\n(.*?)```', (DOCS / page).read_text(), re.DOTALL)
    (tmp_path / "program.py").write_text(program)
    done = subprocess.run(
        [sys.executable, "-W", "error", "program.py"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert (done.returncode, done.stdout) == (0, shown), done.stderr
