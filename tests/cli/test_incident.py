"""An incident, by commands alone: from the first look of an operator to a clean board."""

from __future__ import annotations

import asyncio
import json
import shlex
from pathlib import Path

import pytest

from tests.cli.forked_commands import ForkedCommands
from tests.incident import ALL, MAILS, PARCELS, incident

pytestmark = [pytest.mark.process, pytest.mark.slow]

TROUBLE = ("paused runs", "retries", "tasks", "failed runs", "dead letters", "stuck runs")


@pytest.mark.contract("SIG-13", "OWN-3", "TSK-1")
async def test_an_incident_ends_with_a_clean_board(forks: ForkedCommands, tmp_path: Path) -> None:
    async with incident(tmp_path) as here:

        async def typed(*words: str, code: int = 0) -> str:
            done = await asyncio.to_thread(forks.run, here.folder, here.environment, *words)
            assert done.returncode == code, done.stderr
            return done.stdout

        async def found(code: int) -> dict[str, str]:
            items = json.loads(await typed("doctor", "--json", code=code))["findings"]
            return {
                one["sentence"]: one["advice"] for one in items if one["level"] != "fine" and one["subject"] in TROUBLE
            }

        seen = await found(code=1)
        place = next(each for each in seen if "UnhandledError" in each)
        assert place.startswith("30 runs were paused by UnhandledError: the workflow raised KeyError: 'shelf' at ")
        overdue = next(each for each in seen if "overdue" in each)
        assert overdue.startswith("5 tasks are overdue")
        payments = "4 runs were paused by a failed step: charge with TimeoutError"
        poison = "1 run was paused by PoisonTurn"
        mails = "activities of 50 runs are tried again, and have failed once: send with ConnectionError (50)"
        parcels = "3 runs have failed with ActivityFailed within the last hour"
        assert seen.keys() == {place, overdue, payments, poison, mails, parcels}
        assert "mail-49" in await typed("run", "list", "--retrying")

        await here.mend_outside()
        await _as_advised(typed, seen[mails], "try_now", f"{MAILS} done")
        await _as_advised(typed, seen[payments], "retry_step", "4 done")
        await _as_advised(typed, seen[parcels], "retry", f"{PARCELS} done")
        assert "`holdfast run resume thumbnail`" in seen[poison]
        await typed("run", "resume", "thumbnail", "--reason", "mended")
        assert "task bulk reassign --overdue" in seen[overdue]
        assert "5 done" in await typed("task", "bulk", "complete", "true", "--overdue", "--yes")

        async with asyncio.timeout(60):
            while await found(code=0) != {}:  # the orders go on by themselves
                pass
        counted = json.loads(await typed("run", "count", "--json"))
        assert counted["by_status"] == {"COMPLETED": ALL, "FAILED": PARCELS}, "and what had failed was gone on with"


async def _as_advised(typed, advice: str, command: str, outcome: str) -> None:  # type: ignore[no-untyped-def]
    """Type what the doctor advises, as it stands, first as a preview."""
    words = shlex.split(next(part for part in advice.split("`") if part.startswith(f"holdfast run bulk {command}")))
    assert f"{command} concerns" in await typed(*words[1:], "--preview")
    assert outcome in await typed(*words[1:], "--yes", "--reason", "it is back")
