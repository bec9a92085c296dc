"""The garbage collector waits for longer while nodes are at work, and is then as it was."""

import asyncio
import gc
from collections.abc import Iterator

import pytest

import holdfast as hf
from holdfast.collector import NEW_OBJECTS, patient
from holdfast.store.memory import MemoryStore

BEFORE = (701, 9, 8)


@pytest.fixture(autouse=True)
def _thresholds() -> Iterator[None]:
    before = gc.get_threshold()
    gc.set_threshold(*BEFORE)
    yield
    gc.set_threshold(*before)


def test_it_is_patient_until_the_last_has_ended() -> None:
    first, second = patient(), patient()
    with first:
        second.__enter__()
        assert gc.get_threshold() == (NEW_OBJECTS, 9, 8)
    assert gc.get_threshold() == (NEW_OBJECTS, 9, 8)
    second.__exit__()
    assert gc.get_threshold() == BEFORE


@pytest.mark.parametrize("young", [0, 2 * NEW_OBJECTS])
def test_what_is_off_stays_off_and_what_is_more_patient_stays_so(young: int) -> None:
    gc.set_threshold(young, 9, 8)
    with patient():
        assert gc.get_threshold() == (young, 9, 8)
    assert gc.get_threshold() == (young, 9, 8)


def test_what_somebody_sets_meanwhile_is_left_as_it_is() -> None:
    with patient():
        gc.set_threshold(5, 5, 5)
    assert gc.get_threshold() == (5, 5, 5)


def test_it_is_as_it_was_after_an_exception() -> None:
    with pytest.raises(ZeroDivisionError), patient():
        _ = 1 / 0
    assert gc.get_threshold() == BEFORE


async def test_it_is_patient_while_a_node_is_at_work() -> None:
    app = hf.App("patient")
    async with app.node(MemoryStore()):
        await asyncio.sleep(0)
        assert gc.get_threshold() == (NEW_OBJECTS, 9, 8)
    assert gc.get_threshold() == BEFORE
