"""Programs, those of the peers' documentation among them, in processes that are killed by SIGKILL at each write.

`python -m tests.crash.killed_programs SCENARIO FOLDER [ADDRESS]` plays a scenario once for each write and each of its
edges: a life that is killed there, and one that finishes on the same store: a file in the folder, or a schema of the
PostgreSQL database at the address. It prints one JSON line for each play. The lives are forks of this process, which
has imported everything and opened nothing. What activities do to the world is in files.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any

from examples import agent_inbox, money_transfer, subscription
from holdfast import App, NodeOptions
from holdfast.errors import RunFailed
from holdfast.store import port
from holdfast.store.postgres import PostgresStore
from holdfast.store.proxy import StoreProxy
from holdfast.store.sqlite import SqliteStore
from tests.crash import border_programs

RUN_ID = "play"
OPTIONS = NodeOptions(drain_s=0.001)
EDGES = ("before", "after")


class Things(set[str]):
    """What there is outside of the engine."""

    def __init__(self, path: Path) -> None:
        self._path = path
        super().__init__(json.loads(path.read_text()) if path.exists() else ())

    def add(self, item: str) -> None:
        """Make something."""
        super().add(item)
        keep(self._path, sorted(self))

    def discard(self, item: object) -> None:
        """Take something away."""
        super().discard(item)
        keep(self._path, sorted(self))


class Balances(dict[str, int]):
    """The accounts of a bank."""

    def __init__(self, path: Path, first: dict[str, int]) -> None:
        self._path = path
        super().__init__(json.loads(path.read_text()) if path.exists() else first)

    def __setitem__(self, account: str, amount: int) -> None:
        super().__setitem__(account, amount)
        keep(self._path, self)


def keep(path: Path, value: Any) -> None:
    """Write a value to a file that outlives the process."""
    path.with_suffix(".new").write_text(json.dumps(value))
    path.with_suffix(".new").rename(path)


class DeadlyStore(StoreProxy):
    """Kills its process before or after the n-th write."""

    def __init__(self, inner: port.Store, last: int, edge: str) -> None:
        super().__init__(inner)
        self._left = last
        self._edge = edge

    async def _deadly(self, work: Awaitable[Any]) -> Any:
        self._left -= 1
        is_last = self._left == 0  # others may be under way at the same time
        if is_last and self._edge == "before":
            os.kill(os.getpid(), signal.SIGKILL)
        answer = await work
        if is_last:
            os.kill(os.getpid(), signal.SIGKILL)
        return answer

    async def create(
        self, runs: Sequence[port.NewRun], claim_for: str | None = None
    ) -> list[port.Created | port.Existing | port.Refused]:
        created: list[port.Created | port.Existing | port.Refused] = await self._deadly(
            self._store.create(runs, claim_for)
        )
        return created

    async def deliver(self, items: Sequence[Any]) -> list[port.Accepted | port.Duplicate | port.Refused]:
        delivered: list[port.Accepted | port.Duplicate | port.Refused] = await self._deadly(self._store.deliver(items))
        return delivered

    async def commit(self, turns: Sequence[port.Turn]) -> list[port.Committed | port.CommitConflict]:
        committed: list[port.Committed | port.CommitConflict] = await self._deadly(self._store.commit(turns))
        return committed


def transfer(target: str) -> Callable[[App, Path], Awaitable[tuple[str, Any]]]:
    """Return the scenario of a transfer."""

    async def play(app: App, world: Path) -> tuple[str, Any]:
        money_transfer.booked = Things(world / "booked.json")
        money_transfer.balances = Balances(world / "balances.json", money_transfer.balances)
        run = await app.start(money_transfer.transfer, "ann", target, 60, run_id=RUN_ID)
        return await ending(run), money_transfer.balances

    return play


async def approve(app: App, world: Path) -> tuple[str, Any]:
    """Let an agent propose; reject once, and approve twice."""
    run = await app.start(agent_inbox.agent, "book a hotel", run_id=RUN_ID)
    for number, is_approved in enumerate((False, True, True)):
        answer = agent_inbox.Answer(is_approved, "" if is_approved else "too wet")
        await run.signal("answer", answer, signal_id=f"click-{min(number, 1)}")
    return await ending(run), None


def sign_up(*magazines: str) -> Callable[[App, Path], Awaitable[tuple[str, Any]]]:
    """Return the scenario of a subscription."""

    async def play(app: App, world: Path) -> tuple[str, Any]:
        subscription.active = Things(world / "active.json")
        run = await app.start(subscription.sign_up, "ann", "card-1", list(magazines), run_id=RUN_ID)
        return await ending(run), sorted(subscription.active)

    return play


async def ending(run: Any) -> str:
    """Return how a run ends, in words."""
    try:
        return str(await run.result())
    except RunFailed as failure:
        cause = failure.info.cause
        return f"failed: {failure.info.message if cause is None else cause.message}"


SCENARIOS: dict[str, tuple[App, Callable[[App, Path], Awaitable[tuple[str, Any]]]]] = {
    "transfer": (money_transfer.app, transfer("ben")),
    "refund": (money_transfer.app, transfer("bob")),
    "agent": (agent_inbox.app, approve),
    "subscription": (subscription.app, sign_up("Tide", "Rope")),
    "cancelled subscription": (subscription.app, sign_up("Tide", "Vapour")),
    "callback": (border_programs.app, border_programs.answer),
    "lock": (border_programs.app, border_programs.pass_through),
    "replaced run": (border_programs.app, border_programs.replace_run),
    "restarted run": (border_programs.app, border_programs.restart_run),
    "debounced run": (border_programs.app, border_programs.debounce),
    "retried run": (border_programs.app, border_programs.retry),
}


async def open_store(folder: Path, address: str) -> SqliteStore | PostgresStore:
    """Open the store of the play in this folder."""
    if not address:
        return await SqliteStore.open(folder / "store.db")
    schema = folder.name.replace("-", "_")
    return await PostgresStore.open(f"{address}{'&' if '?' in address else '?'}schema={schema}")


async def live(scenario: str, folder: Path, address: str, last: int, edge: str) -> None:
    """Live until the n-th write, or to the end, and note how it ended."""
    app, play = SCENARIOS[scenario]
    store = await open_store(folder, address)
    await store.migrate()
    async with app.node(DeadlyStore(store, last, edge), name="peer", options=OPTIONS):
        found = await play(app, folder)
    (folder / "ending.json").write_text(json.dumps(found))
    await store.close()


def life(scenario: str, folder: Path, address: str, last: int, edge: str) -> bool:
    """Live in a process of its own; return whether it was killed."""
    child = os.fork()
    if child == 0:
        try:
            asyncio.run(live(scenario, folder, address, last, edge))
        except BaseException as problem:
            print(repr(problem), file=sys.stderr, flush=True)
            os._exit(1)
        os._exit(0)
    _, status = os.waitpid(child, 0)
    if os.WIFSIGNALED(status):
        return os.WTERMSIG(status) == signal.SIGKILL
    if os.WEXITSTATUS(status) != 0:
        raise SystemExit(f"a life of {scenario!r} ended with {os.WEXITSTATUS(status)}")
    return False


def main(scenario: str, folder: Path, address: str = "") -> None:
    """Play a scenario with a kill at each edge of each write."""
    for edge in EDGES:
        for last in range(1, 100):
            place = folder / f"{edge}-{last}"
            place.mkdir()
            was_killed = life(scenario, place, address, last, edge)
            if was_killed:
                assert not life(scenario, place, address, 0, edge)
            found = json.loads((place / "ending.json").read_text())
            print(json.dumps([edge, last, was_killed, *found]), flush=True)
            if not was_killed:
                break


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), *sys.argv[3:])
