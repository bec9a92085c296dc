"""The tools for tests keep their own promises."""

from __future__ import annotations

import subprocess
import sys
from abc import ABC
from collections import Counter

import pytest

from holdfast.testing import START, VirtualClock
from holdfast.testing.store_suite import StoreSuite


@pytest.mark.process
def test_testing_can_be_imported_without_pytest() -> None:
    code = "import sys; sys.modules['pytest'] = None; import holdfast.testing, holdfast.testing.samples"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_no_test_or_helper_of_the_suite_hides_another() -> None:
    """A helper that answers for another part of the suite could end that part's tests before they begin."""
    parts = [part for part in StoreSuite.__mro__ if part not in (object, ABC)]
    names = Counter(name for part in parts for name in vars(part) if not name.startswith(("__", "_abc_")))
    assert [name for name, count in names.items() if count > 1] == []


def test_virtual_clock_moves_only_when_told() -> None:
    clock = VirtualClock()
    assert (clock.now(), clock.now()) == (START, START)
    assert clock.advance(ms=2, us=3) == clock.now() == START + 2_003
    assert clock.set_back(ms=5) == clock.now() == START - 2_997


@pytest.mark.parametrize(
    ("verb", "amount"), [("advance", {"ms": -1}), ("advance", {"us": -1}), ("set_back", {"ms": -1})]
)
def test_virtual_clock_refuses_to_move_the_other_way(verb: str, amount: dict[str, int]) -> None:
    with pytest.raises(ValueError, match="use"):
        getattr(VirtualClock(), verb)(**amount)
