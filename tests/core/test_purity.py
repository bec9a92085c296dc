"""The core is made of values: nothing in it can be edited, and importing it does nothing."""

import importlib
import pkgutil
import subprocess
import sys

import pytest
from msgspec import Struct

import holdfast.core

MODULES = [f"holdfast.core.{module.name}" for module in pkgutil.iter_modules(holdfast.core.__path__)]


def structs(module: str) -> list[type[Struct]]:
    """Return the data types that a module defines."""
    found = vars(importlib.import_module(module)).values()
    return [kind for kind in found if isinstance(kind, type) and issubclass(kind, Struct) and kind.__module__ == module]


@pytest.mark.contract("EVT-1", "EVT-5", "PRJ-1")
@pytest.mark.parametrize("module", MODULES)
def test_every_value_of_the_core_is_frozen(module: str) -> None:
    changing = [kind.__name__ for kind in structs(module) if not kind.__struct_config__.frozen]
    assert changing == (["EventWriter"] if module == "holdfast.core.event_writer" else [])  # it collects, for one turn


@pytest.mark.process
def test_importing_the_core_prints_nothing() -> None:
    code = "".join(f"import {module}\n" for module in MODULES)
    printed = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    assert (printed.stdout, printed.stderr) == ("", "")
