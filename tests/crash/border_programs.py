"""Programs with callbacks, locks, contexts, replaced and retried runs, for processes that are killed.

A play may be repeated.
"""

from __future__ import annotations

import asyncio
import json
from contextlib import suppress
from pathlib import Path
from typing import Any
from uuid import uuid4

import holdfast as hf
from holdfast.core.events import StepCompleted
from holdfast.errors import Conflict, RunCancelled, RunFailed
from holdfast.store.port import RunQuery

app = hf.App("borders")
account = app.lock("account")
world: dict[str, Any] = {}
"""Of this process: where the files are, and what wakes the play."""


def keep(name: str, value: str) -> list[str]:
    """Add a value to a file that outlives the process, and return all."""
    path = world["folder"] / name
    values = sorted({*(json.loads(path.read_text()) if path.exists() else ()), value})
    path.with_suffix(".new").write_text(json.dumps(values))
    path.with_suffix(".new").rename(path)
    return values


@app.activity
async def submit(ref: hf.CallbackRef) -> None:
    """Give the token away."""
    keep("tokens.json", hf.activity_context().callback_token(ref))
    world["submitted"].set()


@app.workflow
async def order() -> int:
    """Wait for the answer of a bank."""
    answer = hf.callback(int, heartbeat_timeout=3_600)
    await submit(answer.ref)
    return await answer


@app.activity
async def enter(number: int) -> None:
    """Note who is in, and whether another one is."""
    (world["folder"] / f"in-{number}").touch()
    if len(list(world["folder"].glob("in-*"))) > 1:
        keep("seen.json", "two met")


@app.activity
async def leave(number: int) -> None:
    """Note who has been in, with the context of the run."""
    user = hf.activity_context().run_context.get("user")
    keep("seen.json", f"{number} by {user}")
    (world["folder"] / f"in-{number}").unlink(missing_ok=True)


@app.workflow
async def transfer(number: int) -> str:
    """Be in for a while."""
    async with account("17"):
        await enter(number)
        await leave(number)
    return f"{number} by {hf.context().get('user')}"


@app.workflow
async def cart(user: str) -> str:
    """Hold a lock until it is checked out, or replaced."""
    async with account("cart"):
        return f"{user}: {await hf.wait_signal('check out', str)}"


def begin(folder: Path) -> None:
    """Begin a life."""
    world.update(folder=folder, submitted=asyncio.Event())


async def freed(app: hf.App, *run_ids: str) -> None:
    """Wait until the lock that these runs had is free: they have ended, and the lock's own runs end after them."""
    locks = [app.run(f"{run_id}/lock:account").result() for run_id in run_ids]
    await asyncio.gather(*locks, return_exceptions=True)  # one that was ended early may not have asked for it


async def answer(app: hf.App, folder: Path) -> tuple[str, Any]:
    """Answer twice by token, as a caller does who has lost the first reply; another answer is refused."""
    begin(folder)
    run = await app.start(order, run_id="play")
    if not (folder / "tokens.json").exists():
        await world["submitted"].wait()
    tokens = json.loads((folder / "tokens.json").read_text())
    with suppress(Conflict):  # where it has the answer already
        await app.heartbeat_activity(tokens[0])
    for _ in range(2):
        await app.complete_activity(tokens[0], 7)
    return str(await run.result()), len(tokens)


async def pass_through(app: hf.App, folder: Path) -> tuple[str, Any]:
    """Let three runs go through a lock."""
    begin(folder)
    runs = [
        await app.start(transfer, number, run_id=f"t-{number}", context={"user": f"u{number}"}) for number in range(3)
    ]
    results = [await run.result() for run in runs]
    await freed(app, *(run.run_id for run in runs))
    return ", ".join(results), json.loads((folder / "seen.json").read_text())


async def replace_run(app: hf.App, folder: Path) -> tuple[str, Any]:
    """Replace a run that holds a lock by one that wants it; each request gets the run that it started."""
    begin(folder)
    starts = [
        await app.start(cart, user, run_id="c", reuse="terminate-and-restart", request_id=user)
        for user in ("ann", "bob")
    ]
    await starts[1].signal("check out", "done", signal_id="click")
    result = await starts[1].result()
    with suppress(RunCancelled):
        await starts[0].result()
    await freed(app, *(run.run_id for run in starts))
    found = await app.runtime().store.find(RunQuery(workflow="cart", limit=10))
    return result, sorted([head.run_id, str(head.status)] for head in found)


@app.workflow
async def entity(user: str) -> list[str]:
    """Get items until it is checked out."""
    items = [user]
    while (item := await hf.wait_signal("add", str)) != "check out":
        items.append(item)
    return items


async def restart_run(app: hf.App, folder: Path) -> tuple[str, Any]:
    """Send to a run that is started when there is none; send again what was not answered, and what was just answered.

    Each item is in one run and once. `return` gets the last run, which has ended.
    """
    begin(folder)
    for number, item in enumerate(("milk", "check out", "rice", "check out")):
        if (folder / f"answered-{number}").exists():
            continue
        options: Any = {"run_id": "e", "reuse": "restart-if-finished", "request_id": f"add-{number}"}
        sent: Any = {"name": "add", "payload": item, "signal_id": f"add-{number}"}
        runs = [await app.start(entity, "ann", with_signal=sent, **options) for _ in range(2)]
        if item == "check out":
            await runs[0].result()
            runs.append(await app.start(entity, "ann", with_signal=sent, **options))
        keep("runs.json", f"{item} for {', '.join(sorted({run.run_id for run in runs}))}")
        (folder / f"answered-{number}").touch()
    last = await app.start(entity, "eve", run_id="e", reuse="return", request_id="look")
    found = await app.runtime().store.find(RunQuery(workflow="entity", limit=10))
    ended = [[head.run_id, str(head.status), await app.run(head.run_id).result()] for head in found]
    return last.run_id, [json.loads((folder / "runs.json").read_text()), sorted(ended)]


@app.workflow
async def index(text: str) -> str:
    """Index the last draft of a document."""
    return text


async def debounce(app: hf.App, folder: Path) -> tuple[str, Any]:
    """Start several times within a second: the last input is carried out, and each run of the key ends."""
    begin(folder)
    key = hf.Debounce("doc", 0.4, 60)
    runs = [await app.start(index, f"draft {n}", debounce=key, request_id=f"save-{n}") for n in range(3)]
    results = {run.run_id: await run.result() for run in runs}
    found = await app.runtime().store.find(RunQuery(workflow="index", limit=10))
    return results[runs[-1].run_id], sorted({str(head.status) for head in found})


@app.activity
async def reserve() -> str:
    """Return another number at each call."""
    return uuid4().hex


@app.activity(retry=hf.Retry(max_attempts=4, initial_ms=1))
async def pay(number: str) -> str:
    """Fail until the bank is back."""
    if not (world["folder"] / "back").exists():
        raise ConnectionError("the bank is away")
    return f"paid {number}"


@app.workflow
async def purchase() -> str:
    """Pay for what is reserved."""
    return await pay(await reserve())


async def retry(app: hf.App, folder: Path) -> tuple[str, Any]:
    """Retry a failed run twice by the same command: one run goes on, with the number that the failed one reserved."""
    begin(folder)
    run = await app.start(purchase, run_id="p")
    with suppress(RunFailed):
        await run.result()
    (folder / "back").touch()
    retries = [await run.retry_run("the bank is back", signal_id="click") for _ in range(2)]
    [reserved] = [event.data for event in await run.events() if isinstance(event.data, StepCompleted)]
    paid = await retries[1].result() == f"paid {json.loads(bytes(reserved.result))}"
    found = await app.runtime().store.find(RunQuery(workflow="purchase", limit=10))
    statuses = sorted([head.run_id.partition("-")[0], str(head.status)] for head in found)
    return "paid what was reserved" if paid else "reserved again", statuses
