"""The garbage collector rests while it is held back, works while whoever holds it waits, and is then as it was."""

import gc
from collections.abc import Iterator

import pytest

from holdfast.collector import held_back, let_go


@pytest.fixture(autouse=True, params=[True, False], ids=["on", "off"])
def is_on(request: pytest.FixtureRequest) -> Iterator[bool]:
    """Whether the collector is on before."""
    was_on, is_on = gc.isenabled(), bool(request.param)
    (gc.enable if is_on else gc.disable)()
    yield is_on
    (gc.enable if was_on else gc.disable)()


def test_it_rests_until_the_last_holder_lets_go(is_on: bool) -> None:
    with held_back():
        with held_back():
            assert not gc.isenabled()
        assert not gc.isenabled()
    assert gc.isenabled() is is_on


def test_holders_may_let_go_in_any_order(is_on: bool) -> None:
    first, second = held_back(), held_back()
    first.__enter__()
    second.__enter__()
    first.__exit__()
    assert not gc.isenabled()
    second.__exit__()
    assert gc.isenabled() is is_on


def test_it_works_while_the_holder_waits(is_on: bool) -> None:
    with held_back():
        with let_go():
            assert gc.isenabled() is is_on
        assert not gc.isenabled()
    assert gc.isenabled() is is_on


def test_who_waits_when_nobody_holds_changes_nothing(is_on: bool) -> None:
    gc.enable()
    with held_back():
        pass
    (gc.enable if is_on else gc.disable)()
    with let_go():
        assert gc.isenabled() is is_on
    assert gc.isenabled() is is_on


def test_a_failure_lets_go_too(is_on: bool) -> None:
    with pytest.raises(ZeroDivisionError), held_back():
        _ = 1 // 0
    assert gc.isenabled() is is_on
