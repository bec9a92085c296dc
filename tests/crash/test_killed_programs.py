"""Programs survive SIGKILL before and after each of their writes, in real processes."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from holdfast.core.invariants import check, check_drained
from holdfast.testing import system_view
from tests.crash.killed_programs import open_store
from tests.machine_load import slowdown

TIDE, ROPE = "ann: Tide", "ann: Rope"
ENDINGS: dict[str, tuple[str, Any]] = {
    "transfer": ("60 from ann to ben", {"ann": 40, "ben": 60}),
    "refund": ("failed: there is no account 'bob'", {"ann": 100, "ben": 0}),
    "agent": ("done: book a hotel in Lisbon", None),
    "subscription": ("ann reads Tide, Rope", sorted([TIDE, ROPE, "payment of ann in play"])),
    "cancelled subscription": ("failed: Vapour takes no subscribers", []),
    "callback": ("7", 1),
    "lock": ("0 by u0, 1 by u1, 2 by u2", ["0 by u0", "1 by u1", "2 by u2"]),
    "replaced run": ("bob: done", [["c", "CANCELLED"], ["c~000002", "COMPLETED"]]),
    "restarted run": (
        "e~000002",
        [
            ["check out for e", "check out for e~000002", "milk for e", "rice for e~000002"],
            [["e", "COMPLETED", ["ann", "milk"]], ["e~000002", "COMPLETED", ["ann", "rice"]]],
        ],
    ),
    "debounced run": ("draft 2", ["COMPLETED"]),
    "retried run": ("paid what was reserved", [["p", "FAILED"], ["p/retry", "COMPLETED"]]),
}


OF_PEERS = ("transfer", "refund", "agent", "subscription", "cancelled subscription")

pytestmark = [pytest.mark.process, pytest.mark.slow]


@pytest.mark.contract("INV", "OWN-3", "WF-2", "MSG-2", "ACT-6", "WF-9", "QUE-5", "QUE-6", "CTX-1")
@pytest.mark.parametrize("scenario", ENDINGS)
async def test_a_program_survives_being_killed_at_every_write(scenario: str, tmp_path: Path) -> None:
    await kill_everywhere(scenario, tmp_path)


@pytest.mark.contract("INV", "OWN-3", "WF-2", "MSG-2")
@pytest.mark.parametrize("scenario", OF_PEERS)
async def test_a_program_on_postgresql_survives_being_killed_at_every_write(
    scenario: str, tmp_path: Path, postgres_url: str
) -> None:
    await kill_everywhere(scenario, tmp_path, postgres_url)


async def kill_everywhere(scenario: str, folder: Path, *address: str) -> None:
    """Play a scenario with a kill at each edge of each write, and check how it ends and what is stored."""
    played = subprocess.run(
        [sys.executable, "-m", "tests.crash.killed_programs", scenario, str(folder), *address],
        capture_output=True,
        text=True,
        timeout=120 * slowdown(),
        check=False,
    )
    assert played.returncode == 0, played.stdout + played.stderr
    plays = [json.loads(line) for line in played.stdout.splitlines()]
    for edge, number, was_killed, result, world in plays:
        assert (result, world) == ENDINGS[scenario], (edge, number, was_killed)
    kills = {edge: sum(play[2] for play in plays if play[0] == edge) for edge in ("before", "after")}
    assert min(kills.values()) >= 3, f"the kills miss what they are aimed at: {kills}"
    for place in folder.iterdir():
        store = await open_store(place, *(address or [""]))
        try:
            view = await system_view(store)
            assert check(view) == []
            assert check_drained(view) == []
        finally:
            await store.close()
