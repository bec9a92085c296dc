"""`requirements-dev.lock` fits pyproject.toml, every package in it has hashes, and it names no registry."""

import re
import sys
import tomllib
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest
from packaging.markers import default_environment
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from tools import pythons

ROOT = Path(__file__).parents[2]
LOCK = (ROOT / "requirements-dev.lock").read_text()
PROJECT: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text())
ENTRIES = [entry.replace(" \\\n    ", " ") for entry in re.split(r"\n(?=\S)", LOCK.strip())]
LOCKED = [Requirement(entry.partition(" --hash")[0]) for entry in ENTRIES]


def group(name: str) -> Iterator[Requirement]:
    """Return what a dependency group asks for, with what it includes."""
    for each in PROJECT["dependency-groups"][name]:
        if isinstance(each, dict):
            yield from group(each["include-group"])
        else:
            yield Requirement(each)


def environment(version: str) -> dict[str, Any]:
    """Return the markers of Linux with a version of Python."""
    full = f"{version}.9"
    return {
        **default_environment(),
        "python_version": version,
        "python_full_version": full,
        "platform_machine": "x86_64",
    }


def versions(version: str) -> dict[str, str]:
    """Return the packages that are installed with a version of Python."""
    found: dict[str, str] = {}
    for entry in LOCKED:
        if entry.marker is None or entry.marker.evaluate(environment(version)):
            name = canonicalize_name(entry.name)
            assert name not in found, f"{name} is locked twice for Python {version}"
            found[name] = str(entry.specifier).removeprefix("==")
    return found


def test_every_package_has_one_version_and_hashes() -> None:
    assert len(ENTRIES) > 100
    for entry in ENTRIES:
        assert re.fullmatch(r"[\w.-]+(\[[\w,-]+\])?==\S+( ; [^\\]+?)?( --hash=sha256:[0-9a-f]{64})+", entry), entry


def test_it_names_packages_and_no_registry() -> None:
    assert not re.search(r"://|@|^\s*--(?!hash=)", LOCK, re.MULTILINE)


@pytest.mark.parametrize("version", pythons.supported())
def test_it_has_what_the_package_and_its_tests_ask_for(version: str) -> None:
    locked = versions(version)
    asked = [*map(Requirement, PROJECT["project"]["dependencies"]), *group("dev")]
    assert len(asked) > 40
    for each in asked:
        if each.marker is None or each.marker.evaluate(environment(version)):
            name = canonicalize_name(each.name)
            assert name in locked, f"{name} is not locked: make lock"
            assert each.specifier.contains(locked[name]), f"{each} is locked at {locked[name]}: make lock"


def test_it_has_what_those_ask_for_in_turn() -> None:
    locked = versions("3.11")
    left, seen = (
        [("holdfast", frozenset[str]()), *((each.name, frozenset(each.extras)) for each in group("dev"))],
        set(),
    )
    while left:
        name, extras = left.pop()
        if (name, extras) in seen:
            continue
        seen.add((name, extras))
        assert name == "holdfast" or canonicalize_name(name) in locked, f"{name} is not locked: make lock"
        for each in map(Requirement, metadata.requires(name) or []):
            markers = each.marker
            if markers is None or any(markers.evaluate({"extra": extra}) for extra in extras | {""}):
                left.append((each.name, frozenset(each.extras)))
    assert len(seen) > 100


def test_supported_versions_are_those_that_the_package_declares() -> None:
    assert pythons.supported()[0] == PROJECT["project"]["requires-python"].removeprefix(">=")


@pytest.mark.process
def test_an_interpreter_is_found_only_if_it_is_of_that_version() -> None:
    assert pythons.find("3.1") is None
    running = ".".join(map(str, sys.version_info[:2]))
    assert pythons.find(running) is not None
