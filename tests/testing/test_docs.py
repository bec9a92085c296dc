"""The tests on `docs/testing.md` are run, as a reader would run them."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

PAGE = (Path(__file__).parents[2] / "docs" / "testing.md").read_text()


@pytest.mark.process
def test_the_tests_on_the_page_pass_and_the_table_is_as_shown(tmp_path: Path) -> None:
    (tmp_path / "test_page.py").write_text("\n".join(re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)))
    command = [sys.executable, "-m", "pytest", "-q", "-s", "-o", "asyncio_mode=auto", "test_page.py"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "5 passed" in done.stdout
    [table] = re.findall(r"```text\n(.*?)```", PAGE, re.DOTALL)
    assert table in done.stdout


@pytest.mark.process
@pytest.mark.parametrize(("name", "passed"), [("test_purchase.py", 2), ("test_expense.py", 4)])
def test_the_tests_of_tasks_on_their_page_pass(name: str, passed: int, tmp_path: Path) -> None:
    page = (Path(__file__).parents[2] / "docs" / "tasks.md").read_text()
    [text] = re.findall(rf'```python title="{name}"\n(.*?)```', page, re.DOTALL)
    (tmp_path / name).write_text(text)
    command = [sys.executable, "-m", "pytest", "-q", "-o", "asyncio_mode=auto", name]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"{passed} passed" in done.stdout
