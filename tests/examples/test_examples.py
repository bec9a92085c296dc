"""What the README and the examples say is run, as a user would run it."""

import asyncio
import re
import runpy
import subprocess
import sys
import time
from pathlib import Path

import pytest
from obstore.store import MemoryStore as ObjectsInMemory

from holdfast.store.s3 import S3Store
from holdfast.store.s3.bucket import Bucket
from tests.machine_load import slowdown

TOP = Path(__file__).parents[2]
EXAMPLES = sorted((TOP / "examples").glob("*.py"))
IN_A_BUCKET = [script for script in EXAMPLES if "async def main(store" in script.read_text()]
ORDERS = TOP / "examples" / "orders.py"
MOST_LINES = 60
LONGER = {"orders"}

SHOWN = {
    "agent": ["May I delete /logs/today?", "deleted /logs/old; was not allowed to delete /logs/today"],
    "agent_inbox": ["done: book a hotel in Lisbon\ndone: rent a car in Venice"],
    "approval": ["ann: 42.00 paid to ann, approved by carol", "bob: nobody answered in time"],
    "crash_explorer": ["deposit ran twice, and without a crash once", "the check gives 50", "findings: 0"],
    "durable_agent": ["4200 cents?", '{"refund":"gave back 4200 cents to ann"}', "approve refund, refund, model#2"],
    "etl": ["{'day': '2026-01-28', 'rows': 48}"],
    "fan_out": ["100 pictures", "100 results recorded; 1 attempt was repeated"],
    "flow": ["20.00 paid", "gave back what was taken: 4000.00 paid\nnot delivered: step ship: NonRetryable: a piano"],
    "hello": ["HELLO, DR ANN SMITH!", "9 RunCompleted"],
    "money_transfer": ["60 from ann to ben", "ann has 40, and 60 are needed", "{'ann': 40, 'ben': 60}"],
    "openai_agent": ["4200 cents?", "Done: 4200 cents.", "desk.model, billing.model, approve refund, billing.refund"],
    "orders": ["killed with SIGKILL", "100 of 100 orders completed", "200 results recorded, each once"],
    "payment": ["receipt for 500 cents"],
    "planner": ["to approve: {", "notes about price; notes about reviews"],
    "poller": ["parcel-7 arrived on day 9", "rotated at [16, 30, 44]"],
    "race": ["slow.example: cancelled", "the winner: the file, from fast.example"],
    "subscription": [
        "ann reads Tide, Rope",
        "ben: Vapour takes no subscribers\n['ann: Rope', 'ann: Tide', 'payment of ann",
    ],
    "saga": ["gave back hotel-Venice\n  gave back flight-Venice", "there are no cars in Venice"],
}

TAKEOVER = (
    r"(node shop-\S+ takes over at once from shop-\S+, whose process has ended without stopping: see why it did\n)?"
    r"(node shop-\S+ has taken over [1-9]\d? runs? of shop-\S+\n)?"
)
"""What an example writes that kills its worker: the first line unless its successor came after the lease, the second if
that works for longer than a moment."""


def run(script: Path, folder: Path) -> str:
    done = subprocess.run(
        [sys.executable, "-W", "error", str(script)],
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=60 * slowdown(),
        check=False,
    )
    assert done.returncode == 0, done.stderr
    errors = re.sub(r"(?m)^run .* has failed: .*\n", "", done.stderr)  # as it should, where an example shows a failure
    assert re.fullmatch(TAKEOVER if script.stem == "orders" else "", errors), errors
    return done.stdout


def check(script: Path, folder: Path) -> str:
    """Run an example; check that it shows what it should, and leaves nothing behind. Return what it shows."""
    shown = run(script, folder)
    for text in SHOWN[script.stem]:
        assert text in shown
    assert list(folder.iterdir()) == [], "an example leaves nothing behind"
    return shown


@pytest.mark.contract("WF-1")
@pytest.mark.parametrize("script", [each for each in EXAMPLES if each != ORDERS], ids=lambda script: script.stem)
def test_example_does_what_it_says(script: Path, tmp_path: Path) -> None:
    check(script, tmp_path)


@pytest.mark.contract("STO-1")
@pytest.mark.parametrize("script", IN_A_BUCKET, ids=lambda script: script.stem)
def test_example_does_the_same_in_a_bucket(script: Path, capsys: pytest.CaptureFixture[str]) -> None:
    main = runpy.run_path(str(script))["main"]

    async def play() -> None:
        await main(S3Store(Bucket(ObjectsInMemory())))

    asyncio.run(play())
    shown = capsys.readouterr().out
    for text in SHOWN[script.stem]:
        assert text in shown


@pytest.mark.parametrize("script", EXAMPLES, ids=lambda script: script.stem)
def test_example_is_short(script: Path) -> None:
    assert script.stem in LONGER or len(script.read_text().splitlines()) < MOST_LINES


@pytest.mark.contract("OWN-3", "INV", "WF-1")
def test_demo_shows_a_rescued_order_within_seconds(tmp_path: Path) -> None:
    began = time.monotonic()
    shown = check(ORDERS, tmp_path)
    assert time.monotonic() - began < 20 * slowdown()
    assert "lost with its worker, done again" in shown
    [effects] = re.findall(r"^(\d+) effects executed", shown, re.MULTILINE)
    assert int(effects) >= 200


def test_code_in_the_readme_does_what_it_says(tmp_path: Path) -> None:
    [code] = re.findall(r"```python\n(.*?)```", (TOP / "README.md").read_text(), re.DOTALL)
    script = tmp_path / "readme.py"
    script.write_text(code)
    assert run(script, tmp_path) == "receipt for o-1\n"
    assert run(script, tmp_path) == "receipt for o-1\n", "started again, it answers as before"
