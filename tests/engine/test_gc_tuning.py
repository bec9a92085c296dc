"""The library leaves the process that it runs in as it is; a node that is told to tunes the garbage collector."""

import asyncio
import gc
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import holdfast as hf
from holdfast.engine.gc_tuning import NEW_OBJECTS, tuned_gc
from holdfast.store.memory import MemoryStore

BEFORE = (701, 9, 8)


@pytest.fixture(autouse=True)
def _thresholds() -> Iterator[None]:
    before = gc.get_threshold()
    gc.set_threshold(*BEFORE)
    yield
    gc.set_threshold(*before)


def test_the_thresholds_stay_until_the_last_has_ended() -> None:
    first, second = tuned_gc(), tuned_gc()
    with first:
        second.__enter__()
        assert gc.get_threshold() == (NEW_OBJECTS, 9, 8)
    assert gc.get_threshold() == (NEW_OBJECTS, 9, 8)
    second.__exit__()
    assert gc.get_threshold() == BEFORE


@pytest.mark.parametrize("young", [0, 2 * NEW_OBJECTS])
def test_what_is_off_stays_off_and_what_is_higher_stays_so(young: int) -> None:
    gc.set_threshold(young, 9, 8)
    with tuned_gc():
        assert gc.get_threshold() == (young, 9, 8)
    assert gc.get_threshold() == (young, 9, 8)


def test_what_the_host_sets_meanwhile_is_left_as_it_is() -> None:
    with tuned_gc():
        gc.set_threshold(5, 5, 5)
    assert gc.get_threshold() == (5, 5, 5)


def test_it_is_as_it_was_after_an_exception() -> None:
    with pytest.raises(ZeroDivisionError), tuned_gc():
        _ = 1 / 0
    assert gc.get_threshold() == BEFORE


async def test_the_thresholds_are_higher_while_a_node_works_that_tunes_them() -> None:
    app = hf.App("tuned")
    async with app.node(MemoryStore(), options=hf.NodeOptions(tune_gc=True)):
        await asyncio.sleep(0)
        assert gc.get_threshold() == (NEW_OBJECTS, 9, 8)
    assert gc.get_threshold() == BEFORE


async def test_a_node_changes_no_thresholds_unless_it_is_told_to() -> None:
    app = hf.App("embedded")
    async with app.node(MemoryStore()):
        await asyncio.sleep(0)
        assert gc.get_threshold() == BEFORE


EMBEDDING = """
import asyncio, gc, logging, signal, sys

def host():
    handlers = [signal.getsignal(number) for number in signal.valid_signals()]
    root = logging.getLogger()
    collector = gc.get_threshold(), gc.isenabled(), list(gc.callbacks)
    return collector, handlers, root.level, list(root.handlers), list(root.filters)

before = host()
import holdfast as hf
from holdfast.service.options import ServiceOptions
assert host() == before, "by the import"
app = hf.App("embedded")

@app.activity
async def double(number: int) -> int:
    assert host() == in_loop, "while an activity runs"
    return 2 * number

@app.workflow
async def doubled(number: int) -> int:
    return await double(number)

async def main():
    global in_loop
    in_loop = host()  # asyncio.run has taken SIGINT over
    async with app.node(sys.argv[1]):
        assert host() == in_loop, "by a node"
        assert await (await app.start(doubled, 21)).result() == 42
        assert host() == in_loop, "by a run"

asyncio.run(main())
assert host() == before, "afterwards"
"""


@pytest.mark.process
def test_importing_the_library_and_running_a_node_leaves_the_process_as_it_is(tmp_path: Path) -> None:
    command = [sys.executable, "-c", EMBEDDING, f"sqlite:///{tmp_path}/runs.db"]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert ended.returncode == 0, ended.stderr
