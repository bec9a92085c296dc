"""`holdfast init`: a project whose tests pass and whose app the other commands take."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from holdfast.cli.init import FILES, init
from holdfast.errors import Conflict, InvalidInput
from tests.cli.command_process import environment, run


@pytest.mark.process
def test_the_project_has_tests_that_pass_and_an_app_that_is_found(tmp_path: Path) -> None:
    made = run(tmp_path, "init", "my-shop")
    assert (made.returncode, made.stderr) == (0, "")
    folder = tmp_path / "my-shop"
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "no:xdist"],
        cwd=folder,
        env=environment(),
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "3 passed" in done.stdout
    listed = run(folder, "check-histories", "app.py", "--store", "sqlite:///shop.db")
    assert listed.returncode in (0, 6), listed.stderr
    here = ("--store", "sqlite:///shop.db", "--app", "app.py")
    assert run(folder, "store", "migrate", *here[:2]).returncode == 0
    typed = [line.split()[1:] for line in FILES["README.md"].splitlines() if line.startswith("holdfast run ")]
    for words in (each for each in typed if each[1] != "result"):
        done = run(folder, *words, *here)
        assert done.returncode == 0, done.stderr


def test_nothing_is_overwritten(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    init("shop")
    (tmp_path / "shop" / "app.py").write_text("mine")
    with pytest.raises(Conflict, match="exists already"):
        init("shop")
    assert (tmp_path / "shop" / "app.py").read_text() == "mine"
    assert {str(path.relative_to("shop")) for path in Path("shop").rglob("*") if path.is_file()} == set(FILES)


@pytest.mark.parametrize("name", ["", "../shop", "Shop", "a b", os.sep + "tmp", "-x"])
def test_a_name_that_is_no_folder_beside_the_caller_is_refused(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(InvalidInput, match="lower-case letters"):
        init(name)
    assert list(tmp_path.iterdir()) == []
