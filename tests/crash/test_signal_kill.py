"""A process is killed at every point from the acceptance of a signal to the end of its run."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow


@pytest.mark.contract("SIG-4", "SIG-5", "SIG-9", "MSG-2")
@pytest.mark.parametrize("story", ["signal", "start"])
def test_a_signal_is_applied_once_wherever_its_process_is_killed(story: str, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "tests.crash.kill_at_statement", story, str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) > 20, "the kills miss what they are aimed at"
