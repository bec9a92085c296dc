"""Orders: the worker of a shop is killed with SIGKILL in the middle, started again, and finishes everything.

Each order waits for an approval, charges, and ships. The worker knows nothing of crashes: both times it runs the same
lines, which start every order and send every approval. What was asked for before is recognised by its `request_id`
and its `signal_id`, and what was done before is in the file.
"""

import asyncio
import sys
import tempfile
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import holdfast as hf

ORDERS, KILL_AFTER, WIDTH = 100, 30, 64

app = hf.App("shop")


@dataclass
class Approval:
    """Who let the order through."""

    by: str


FOR_EVER = hf.Retry(max_attempts=0)
"""An attempt that is lost with its worker counts as an attempt, and this worker is killed as often as one likes."""


@app.activity(retry=FOR_EVER)
async def charge(ledger: str, order_id: str, cents: int) -> str:
    """Take the money. The line in the ledger is the effect in the world, which no database can take back."""
    await asyncio.sleep(0.05)
    write(ledger, f"charged {order_id} {cents}")
    await asyncio.sleep(0.05)
    return f"receipt for {order_id}"


@app.activity(retry=FOR_EVER)
async def ship(ledger: str, order_id: str) -> None:
    """Send the parcel."""
    await asyncio.sleep(0.05)
    write(ledger, f"shipped {order_id}")
    await asyncio.sleep(0.05)


def write(ledger: str, line: str) -> None:
    """Write a line into the ledger."""
    with Path(ledger).open("a") as lines:
        lines.write(f"{line}\n")


@app.workflow
async def order(order_id: str, cents: int, ledger: str) -> str:
    """Take one order from its approval to the parcel."""
    approval = await hf.wait_signal("approval", Approval, timeout=3600)
    receipt = await charge(ledger, order_id, cents)
    await hf.sleep(0.2)  # the parcel is packed
    await ship(ledger, order_id)
    return f"{receipt}, approved by {approval.by}"


async def work(folder: Path) -> None:
    """Be the worker: ask for every order, approve it, and say when it is done."""

    async def serve(number: int) -> None:
        order_id = f"order-{number:03}"
        request_id = f"cart-{number}"
        run = await app.start(order, order_id, 1_000 + number, ledger, run_id=order_id, request_id=request_id)
        await run.signal("approval", Approval("ann"), signal_id="click-1")
        await run.result()
        print(order_id, flush=True)

    ledger = str(folder / "ledger")
    options = hf.NodeOptions(activities_at_once=20)
    async with app.node(f"sqlite:///{folder}/orders.db", options=options):
        await asyncio.gather(*(serve(number) for number in range(ORDERS)))


async def main(folder: Path) -> None:
    """Run a worker, kill it, run it again, and look at what is in the file."""
    command = [sys.executable, __file__, str(folder)]
    worker = await asyncio.create_subprocess_exec(*command, stdout=asyncio.subprocess.PIPE)
    assert worker.stdout is not None
    acknowledged = [(await worker.stdout.readline()).decode().strip() for _ in range(KILL_AFTER)]
    worker.kill()
    await worker.wait()
    print(f"{ORDERS} orders; their worker was killed with SIGKILL when it had finished {len(acknowledged)} of them.")

    worker = await asyncio.create_subprocess_exec(*command, stdout=asyncio.subprocess.DEVNULL)
    assert await worker.wait() == 0
    print("The same command again: it finished the others.")

    store = await hf.open_store(hf.Settings(store=f"sqlite:///{folder}/orders.db"))
    histories = {f"order-{number:03}": await store.read_events(f"order-{number:03}") for number in range(ORDERS)}
    await store.close()
    show(histories, (folder / "ledger").read_text().splitlines())
    assert all(histories[order_id][-1].event_type == "RunCompleted" for order_id in acknowledged)


def show(histories: dict[str, list[hf.Event]], ledger: list[str]) -> None:
    """Print the timeline of a rescued order, and the sums."""
    rescued = [run_id for run_id, events in histories.items() if len({e.engine_run_ref.node for e in events}) > 1]
    lost = [run_id for run_id in rescued if any(e.event_type == "StepRetried" for e in histories[run_id])]
    shown = (lost or rescued or list(histories))[0]
    print(f"\n{shown}, as its history tells it:\n{timeline(histories[shown])}")

    types = Counter(event.event_type for events in histories.values() for event in events)
    print(f"\n{types['RunCompleted']} of {ORDERS} orders completed; {len(rescued)} of them were taken over.")
    print(f"{types['StepStarted']} activities: {types['StepCompleted']} results recorded, each once;")
    print(f"{len(ledger)} effects executed (at least once: a crash between effect and record repeats it).")
    print(f"{types['SignalReceived']} approvals received, each once, though all were sent by both workers.")
    assert types["RunCompleted"] == types["SignalReceived"] == ORDERS
    assert types["StepCompleted"] == 2 * ORDERS == len(set(ledger))


def timeline(events: list[hf.Event]) -> str:
    """Draw the steps of a run to scale, from the times at which the store recorded them."""
    began, ended = events[0].persisted_at, events[-1].persisted_at

    def column(instant: int) -> int:
        return (instant - began) * (WIDTH - 1) // (ended - began)

    steps: dict[str, list[hf.Event]] = {}
    for event in events:
        if event.step_id:
            steps.setdefault(event.step_id, []).append(event)
    lines = []
    for step_id, of_step in steps.items():
        first, last = column(of_step[0].persisted_at), column(of_step[-1].persisted_at)
        bar = list("█" * (last - first + 1))
        for retried in of_step[1:-1]:  # what its first worker did is not known: it took that along
            until = column(retried.persisted_at) - first
            bar[:until] = "░" * until
        took_ms = (of_step[-1].persisted_at - of_step[0].persisted_at) // 1_000
        note = "  ░ lost with its worker, done again" if len(of_step) > 2 else ""
        lines.append(f"  {step_id:9} {took_ms:5} ms {' ' * first}{''.join(bar)}{' ' * (WIDTH - last - 1)}▏{note}")
    seconds = (ended - began) / 1_000_000
    return "\n".join([*lines, f"  {'':18} 0 s{'─' * (WIDTH - 9)}{seconds:4.1f} s"])


if __name__ == "__main__":
    if len(sys.argv) == 2:
        asyncio.run(work(Path(sys.argv[1])))
    elif sys.argv[1:2] == ["--keep"]:
        asyncio.run(main(Path(sys.argv[2])))
    else:
        with tempfile.TemporaryDirectory() as temporary:
            asyncio.run(main(Path(temporary)))
