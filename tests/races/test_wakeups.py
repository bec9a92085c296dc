"""A bell that is heard in other processes: at once, and without looking again and again."""

from __future__ import annotations

import statistics
from pathlib import Path

import pytest

from holdfast.testing.samples import new_run
from tests.races import contenders
from tests.races.parallel import run_in_parallel
from tests.races.stores import prepare

pytestmark = pytest.mark.slow


@pytest.mark.contract("MSG-4")
@pytest.mark.parametrize("closes", [False, True], ids=["sender stays", "sender closes at once"])
async def test_a_delivery_in_one_process_wakes_a_listener_in_another(tmp_path: Path, closes: bool) -> None:
    path = tmp_path / "store.db"
    await prepare(path, new_run("run-1"))

    heard, rung = run_in_parallel(
        contenders.ring_or_listen, processes=2, path=path, run_id="run-1", times=30, closes=closes
    )

    delays = [then - now for now, then in zip(rung, heard, strict=True)]
    assert statistics.median(delays) < 0.2, delays


@pytest.mark.contract("MSG-4")
async def test_listening_in_silence_is_not_polling(tmp_path: Path) -> None:
    path = tmp_path / "store.db"
    await prepare(path, new_run("run-1"))

    (looks,) = run_in_parallel(contenders.listen_in_silence, processes=1, path=path, seconds=1.0)

    assert looks < 10


@pytest.mark.contract("MSG-4")
async def test_nothing_is_left_of_the_bell_when_everybody_has_closed(tmp_path: Path) -> None:
    path = tmp_path / "store.db"
    await prepare(path, new_run("run-1"))

    run_in_parallel(contenders.ring_or_listen, processes=2, path=path, run_id="run-1", times=2, closes=False)

    assert not (tmp_path / "store.db-wake").exists()
