"""What the README and the examples say is run, as a user would run it."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

TOP = Path(__file__).parents[2]
EXAMPLES = sorted((TOP / "examples").glob("*.py"))


def run(script: Path, folder: Path) -> str:
    done = subprocess.run(
        [sys.executable, str(script)], cwd=folder, capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize("script", EXAMPLES, ids=lambda script: script.stem)
def test_example_runs(script: Path, tmp_path: Path) -> None:
    assert run(script, tmp_path)


@pytest.mark.contract("OWN-3", "INV")
def test_demo_finishes_every_order_after_the_kill(tmp_path: Path) -> None:
    shown = run(TOP / "examples" / "first_history.py", tmp_path)
    assert "killed with SIGKILL" in shown
    assert "200 of 200 orders completed; 600 results recorded" in shown


def test_code_in_the_readme_does_what_it_says(tmp_path: Path) -> None:
    [code] = re.findall(r"```python\n(.*?)```", (TOP / "README.md").read_text(), re.DOTALL)
    script = tmp_path / "readme.py"
    script.write_text(code)
    accepted, committed, history = run(script, tmp_path).splitlines()
    assert accepted.startswith("[Accepted(")
    assert "Duplicate(" in accepted
    assert committed.startswith("[Committed(version=5")
    assert history == "['RunQueued', 'RunStarted', 'SignalWaiting', 'SignalReceived', 'RunCompleted']"
