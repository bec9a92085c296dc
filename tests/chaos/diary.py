"""What the nodes of a chaos note while they live, so that a slow recovery can be explained: machine, or product.

A line each: which run a node took and when, which call of its store took long, and for how long its loop was ready to
go on and got no processor (the scheduler counts that for each thread).
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from functools import wraps
from pathlib import Path
from typing import Any

from holdfast.engine.turns.owned_runs import OwnedRuns
from holdfast.store.port import LoadedRun
from holdfast.store.s3 import S3Store

DIARY = "CHAOS_DIARY"
EVERY_S = 0.25
LONG_S = 1.0
VERBS = ("claim", "commit", "create", "deliver", "load", "next_due", "now", "read_events", "release", "renew")


def note(*words: object) -> None:
    """Write a line that is there whole or not at all, also if this process is killed at once."""
    diary = os.open(os.environ[DIARY], os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
    try:
        os.write(diary, f"{time.time_ns() // 1_000} {os.getpid()} {' '.join(map(str, words))}\n".encode())
    finally:
        os.close(diary)


def keep() -> None:
    """Keep the diary of this node, from before it opens its store."""
    _note_runs()
    for verb in VERBS:
        setattr(S3Store, verb, _timed(verb, getattr(S3Store, verb)))
    threading.Thread(target=_note_waits, name="diary", daemon=True).start()


def _note_runs() -> None:
    add = OwnedRuns.add

    def noted(self: OwnedRuns, loaded: LoadedRun) -> None:
        head = loaded.head
        if head.run_id not in self.by_id:
            note("took", head.run_id, head.lease_epoch, self.name)
        add(self, loaded)

    OwnedRuns.add = noted  # type: ignore[method-assign]


def _timed(verb: str, call: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(call)
    async def timed(*args: Any, **kwargs: Any) -> Any:
        began = time.monotonic()
        try:
            return await call(*args, **kwargs)
        finally:
            if (took_s := time.monotonic() - began) > LONG_S:
                note("called", verb, round(took_s, 2))

    return timed


def _note_waits() -> None:
    """Note how long the main thread has waited for a processor since the last line."""
    before, never = _waited_us(), threading.Event()
    while not never.wait(EVERY_S):
        waited = _waited_us()
        note("waited", waited - before)
        before = waited


def _waited_us() -> int:
    with open(f"/proc/{os.getpid()}/schedstat") as counters:
        return int(counters.read().split()[1]) // 1_000


class Diary:
    """What the nodes have noted, to be read once they have ended."""

    def __init__(self, path: Path) -> None:
        lines = path.read_text().splitlines() if path.exists() else []
        self._notes = [(int(at), int(pid), words) for at, pid, *words in (line.split() for line in lines)]
        self._took = {(words[1], int(words[2])): (at, pid) for at, pid, words in self._notes if words[0] == "took"}

    def explain(self, run_id: str, epoch: int, lost_at: int, gone_on_at: int) -> str:
        """Return how a run was recovered: when a node took it, and what that node waited for until it went on."""
        taken_at, pid = self._took.get((run_id, epoch), (None, None))
        if taken_at is None:
            return "no node has noted that it took it"
        calls = [
            f"{words[1]} {words[2]} s"
            for at, of, words in self._notes
            if of == pid and words[0] == "called" and taken_at <= at <= gone_on_at + round(float(words[2]) * 1e6)
        ]
        before_s, after_s = self._waited_s(lost_at, taken_at), self._waited_s(taken_at, gone_on_at, pid)
        return (
            f"taken after {(taken_at - lost_at) / 1e6:.1f} s, in which all nodes together were kept from a processor "
            f"for {before_s:.1f} s, and gone on with after {(gone_on_at - taken_at) / 1e6:.1f} s more, in which its "
            f"node was for {after_s:.1f} s; long calls of this node: {', '.join(calls) or 'none'}"
        )

    def _waited_s(self, begin: int, end: int, of: int | None = None) -> float:
        """Return for how long main threads of nodes, or of one, were ready to go on in a time and had no processor."""
        noted = [
            int(words[1])
            for at, pid, words in self._notes
            if words[0] == "waited" and begin < at <= end and of in (None, pid)
        ]
        return sum(noted) / 1e6
