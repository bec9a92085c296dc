"""What pages with whole programs show: their programs run as they stand."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

DOCS = Path(__file__).parents[2] / "docs"
FOUND = """\
cents>1000 reference.customer=42 [('order', {'cents': 1500})]
region=eu [('ship', {'region': 'eu'})]
"""


@pytest.mark.parametrize(
    ("page", "shown"),
    [
        ("outages.md", "receipt of o-1 True 1\n"),
        ("coming-from.md", "mailed receipt of o-1\nreceipt of o-1\n"),
        (
            "streams.md",
            "1 'It'\n2 ' is'\n3 ' durable'\n4 '.'\nIt is durable.\n['done']\n",
        ),
        ("artifacts.md", "mailed 988890 bytes, True\n"),
        ("secrets.md", "charged 4200 with [redacted: stripe/key]\n"),
        ("search.md", FOUND),
        ("fork.md", "receipt for o-1 ['reserve', 'charge', 'charge']\nreceipt for o-2\n"),
        ("bus.md", "[4200]\n"),
        ("retention.md", ""),
        ("middleware.md", "950 cents, asked for by ann\n950\n"),
    ],
)
def test_the_programs_on_the_page_run(page: str, shown: str, tmp_path: Path) -> None:
    programs = re.findall(r'```python title="\w+\.py"\n(.*?)```', (DOCS / page).read_text(), re.DOTALL)
    (tmp_path / "program.py").write_text("\n".join(programs))
    done = subprocess.run(
        [sys.executable, "-W", "error", "program.py"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert (done.returncode, done.stdout) == (0, shown), done.stderr
