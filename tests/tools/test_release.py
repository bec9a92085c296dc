"""A release is refused where something is missing."""

import hashlib
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any
from zipfile import ZipFile

import pytest

from tools import release

ROOT = Path(__file__).parents[2]


def wheel_of(folder: Path, name: str, version: str, leave_out: str = "", add: str = "") -> Path:
    """Write a wheel with the files of the package."""
    wheel = folder / name
    with ZipFile(wheel, "w") as archive:
        for path in (ROOT / "src").rglob("*"):
            relative = path.relative_to(ROOT / "src").as_posix()
            if path.is_file() and "__pycache__" not in path.parts and relative != leave_out:
                archive.writestr(relative, "")
        archive.writestr("holdfast.dist-info/METADATA", f"Name: holdfast\nVersion: {version}\n")
        if add:
            archive.writestr(add, "")
    return wheel


def test_a_wheel_with_all_files_is_fine(tmp_path: Path) -> None:
    wheel = wheel_of(tmp_path, "holdfast-1.0-py3-none-any.whl", "1.0")
    assert list(release.problems_of_wheel(wheel, "1.0")) == []


@pytest.mark.parametrize(
    ("name", "version", "leave_out", "add", "problem"),
    [
        ("holdfast-1.0-cp311-cp311-linux_x86_64.whl", "1.0", "", "", "is not a pure wheel of 1.0"),
        ("holdfast-1.0-py3-none-any.whl", "0.9", "", "", "says that it is version 0.9"),
        ("holdfast-1.0-py3-none-any.whl", "1.0", "holdfast/py.typed", "", "misses holdfast/py.typed"),
        ("holdfast-1.0-py3-none-any.whl", "1.0", "", "tests/x.py", "has tests/x.py"),
    ],
)
def test_a_wheel_is_refused(name: str, version: str, leave_out: str, add: str, problem: str, tmp_path: Path) -> None:
    wheel = wheel_of(tmp_path, name, version, leave_out, add)
    (found,) = release.problems_of_wheel(wheel, "1.0")
    assert problem in found


def test_a_version_without_an_entry_in_the_changelog_is_refused() -> None:
    assert list(release.problems_of_changelog("## [1.0] - 2026-01-01", "1.0")) == []
    assert list(release.problems_of_changelog("## [Unreleased]", "1.0")) == ["CHANGELOG.md has no entry [1.0]"]


def test_a_second_build_must_give_the_same_bytes(tmp_path: Path) -> None:
    first, second = tmp_path / "first", tmp_path / "second"
    for folder, text in ((first, "a"), (second, "b")):
        folder.mkdir()
        (folder / "same").write_text("same")
        (folder / "other").write_text(text)
    (second / "more").touch()
    assert list(release.problems_of_second_build(first, second)) == [
        "a second build gives another more",
        "a second build gives another other",
    ]


@pytest.mark.process
def test_the_package_is_built_the_same_from_copies_of_other_times(tmp_path: Path) -> None:
    built = []
    for number in range(2):
        copy = tmp_path / f"copy{number}"
        shutil.copytree(ROOT / "src", copy / "src", ignore=shutil.ignore_patterns("__pycache__"))
        for name in ("pyproject.toml", "README.md", "LICENSE"):
            shutil.copy(ROOT / name, copy / name)
        for path in copy.rglob("*"):
            os.utime(path, (1_000_000_000 + number, 1_000_000_000 + number))
        command = [sys.executable, "-m", "hatchling", "build", "-d", str(tmp_path / f"dist{number}")]
        done = subprocess.run(command, cwd=copy, capture_output=True, text=True, timeout=120, check=False)
        assert done.returncode == 0, done.stderr
        built.append(tmp_path / f"dist{number}")
    assert {file.suffix for file in built[0].iterdir()} == {".whl", ".gz"}
    assert list(release.problems_of_second_build(*built)) == []


@pytest.mark.process
def test_an_sbom_names_what_is_installed() -> None:
    components = release.sbom(Path(sys.executable))["components"]
    assert isinstance(components, list)
    assert {"msgspec", "starlette", "holdfast"} <= {each["name"] for each in components}


def git(folder: Path, *words: str) -> None:
    """Run git in a folder."""
    who = ["-c", "user.name=a", "-c", "user.email=a@example.com"]
    subprocess.run(["git", "-C", str(folder), *who, *words], check=True, capture_output=True)


@pytest.mark.process
def test_files_that_differ_from_their_commit_are_refused(tmp_path: Path) -> None:
    assert release.commit_of(tmp_path)[1] == ["this is no checkout: the release would not say which commit it is"]
    git(tmp_path, "init", "-q")
    (tmp_path / "a.py").write_text("1")
    git(tmp_path, "add", "a.py")
    git(tmp_path, "commit", "-q", "-m", "a")
    commit, problems = release.commit_of(tmp_path)
    assert (len(commit), problems) == (40, [])
    (tmp_path / "a.py").write_text("2")
    assert release.commit_of(tmp_path) == (commit, ["a.py differs from its commit"])


def test_the_statement_names_the_files_their_commit_and_what_was_locked(tmp_path: Path) -> None:
    file = tmp_path / "holdfast-1.0.tar.gz"
    file.write_text("a")
    said: Any = release.provenance([file], "c" * 40, "1.6")
    assert said["subject"] == [{"name": file.name, "digest": {"sha256": hashlib.sha256(b"a").hexdigest()}}]
    materials = said["predicate"]["buildDefinition"]["resolvedDependencies"]
    assert materials[0]["digest"] == {"gitCommit": "c" * 40}
    assert materials[1]["digest"]["sha256"] == release.hash_of(ROOT / "requirements-dev.lock")


@pytest.mark.process
def test_the_hashes_are_signed_by_a_key_and_the_signature_can_be_checked(tmp_path: Path) -> None:
    assert shutil.which("ssh-keygen"), "it signs: make commands"
    key, hashes = tmp_path / "key", tmp_path / "SHA256SUMS"
    subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(key)], check=True)
    hashes.write_text("a  b\n")
    release.sign(hashes, key)
    (tmp_path / "allowed").write_text(f"releaser {(tmp_path / 'key.pub').read_text()}")
    command = ["ssh-keygen", "-Y", "verify", "-f", "allowed", "-I", "releaser", "-n", "holdfast-release"]
    command += ["-s", "SHA256SUMS.sig"]
    for text, is_good in (("a  b\n", True), ("a  c\n", False)):
        done = subprocess.run(command, cwd=tmp_path, input=text, capture_output=True, text=True, check=False)
        assert (done.returncode == 0) is is_good
