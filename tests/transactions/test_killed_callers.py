"""Callers that are killed, or roll back, while they start runs beside their rows: never one without the other."""

import os
import random
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest

import holdfast as hf
from holdfast.client import Client
from tests.transactions.callers import SQLITE, drop_table, make_table, rows_of
from tests.transactions.killed_caller import app

KILLS = int(os.environ.get("TEST_CALLER_KILLS", "5"))
"""How many callers are killed for each driver. Each has committed a transaction by then."""

LOOKED_AT = 20
"""Of how many runs the results are awaited."""

ON_POSTGRES = ("asyncpg", "psycopg", "SQLAlchemy's Session", "SQLAlchemy's AsyncSession")
DRIVERS = ["sqlite3", "Session on SQLite", *(pytest.param(each, marks=pytest.mark.postgres) for each in ON_POSTGRES)]


def kill_callers(url: str, driver: str, seed: int) -> None:
    """Let callers make transactions, one after the other, and kill each after a while."""
    chance, never = random.Random(seed), threading.Event()
    command = [sys.executable, "-m", "tests.transactions.killed_caller", url, driver]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1) as callers:
        assert callers.stdin is not None
        assert callers.stdout is not None
        for number in range(KILLS):
            callers.stdin.write(f"{seed + number}\n")
            process = int(callers.stdout.readline())
            never.wait(chance.uniform(0.0, 0.3))
            os.kill(process, signal.SIGKILL)
            assert callers.stdout.readline() == "gone\n"
        callers.stdin.close()
        assert callers.wait(60) == 0


@pytest.mark.contract("QUE-4", "MSG-2")
@pytest.mark.process
@pytest.mark.parametrize("driver", DRIVERS)
async def test_no_run_without_its_row_and_no_row_without_its_run(
    driver: str, request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    seed = int(os.environ.get("TEST_SEED", random.randrange(10**6)))
    print(f"TEST_SEED={seed}")
    url = f"sqlite:///{tmp_path}/shop.db" if driver in SQLITE else request.getfixturevalue("postgres_url")
    async with app.connect(url):
        await make_table(url)
    kill_callers(url, driver, seed)
    rows = await rows_of(url)
    print(f"{driver}: {KILLS} callers were killed, {len(rows)} rows are there")
    async with app.node(url, options=hf.NodeOptions(safety_poll_s=0.2)):
        client = Client(app)
        runs: dict[str, str] = {}
        count, cursor = 0, None
        while cursor != "":
            page = await client.runs.list(limit=100, cursor=cursor or "")
            runs |= {str(run.reference_key): run.run_id for run in page.items}
            count, cursor = count + len(page.items), page.next or ""
        assert count >= KILLS
        assert count == len(runs), "a request has started two runs"
        assert runs.keys() == rows, "there are runs without rows, or rows without runs"
        for order_id, run_id in random.Random(seed).sample(sorted(runs.items()), min(LOOKED_AT, len(runs))):
            assert await client.result(run_id) == order_id
    await drop_table(url)
