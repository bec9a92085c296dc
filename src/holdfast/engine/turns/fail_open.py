"""Failing open: activities begin although the commit that starts them exceeds the latency budget (off by default).

This is a special path, and `FailOpen.commit` is its only entry (LAT-1). Of the turns that are being committed it
selects those that only start steps: their events are `StepStarted`, and `RunStarted` if the run begins. If such a turn
is taken again from the store, it starts the same steps, so an activity that begins early is executed at most once more.
A step with an idempotency key never begins early: its record is durable before its first attempt.

An activity begins early only while the lease is certainly held, and after the local journal on disk names it. Its
outcome is recorded by a later turn, so never before its start. A node that restarts under the same name reads in the
journal what it began before. If the store does not have the start, the turn that records the start also records that
the attempt was lost.

Results are never reported early. If the commit of a result fails beyond the budget, the step fails, and a step with a
key is verified. If the commit succeeded after all, which is checked first, it counts.
"""

import asyncio
import logging
import os
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import msgspec
from msgspec import Struct

from holdfast.core import events as e
from holdfast.core.events import ErrorInfo
from holdfast.core.instants import Instant
from holdfast.core.messages import ActivityErrored, ActivitySucceeded, NodeLost
from holdfast.core.state import RUNNING, RunState
from holdfast.core.timing import Retry
from holdfast.engine.leases import LeaseTimer
from holdfast.engine.turns.draft import TurnDraft
from holdfast.engine.turns.execute import CachedRun
from holdfast.engine.turns.owned_runs import OwnedRun, OwnedRuns
from holdfast.errors import InvalidInput, StoreCorrupt, StoreError
from holdfast.store.decisions import LIFE, name_of
from holdfast.store.port import CommitConflict, Committed, Store, Turn

RETRY_S = 0.2
OVER_BUDGET = "WriteLatencyExceeded"
"""The error code of a step that fails because its result could not be recorded within the budget."""

logger = logging.getLogger("holdfast.node")

Drafts = Sequence[tuple[OwnedRun, CachedRun, TurnDraft]]
Answer = Committed | CommitConflict


class Begun(Struct, frozen=True):
    """Steps that were begun before their start was durable, in the run's turn at this version."""

    run_id: str
    version: int
    step_ids: tuple[str, ...]


class Journal:
    """The steps that one process of a node has begun early, in a file of its own: one line of JSON for each turn."""

    def __init__(self, folder: Path, node: str) -> None:
        self._folder = folder
        self._stem = f"{_file_name(name_of(node))}{LIFE}"
        self.path = folder / f"{self._stem}{_file_name(node.rpartition(LIFE)[2])}.journal"

    def append(self, entries: Iterable[Begun]) -> None:
        """Write entries. They are on the disk when this returns."""
        self._folder.mkdir(parents=True, exist_ok=True)
        is_new = not self.path.exists()
        with self.path.open("ab") as file:
            file.write(b"".join(msgspec.json.encode(entry) + b"\n" for entry in entries))
            file.flush()
            os.fsync(file.fileno())
        if is_new:
            _sync_folder(self._folder)

    def clear(self) -> None:
        """Remove what this process has written: the store has it."""
        self.path.unlink(missing_ok=True)

    def left_behind(self) -> dict[Path, list[Begun]]:
        """Return what earlier processes of the node have left, by file."""
        if not self._folder.is_dir():
            return {}
        found = [path for path in self._folder.iterdir() if path.name.startswith(self._stem) and path != self.path]
        return {path: _entries(path) for path in sorted(found) if path.suffix == ".journal"}


def _entries(path: Path) -> list[Begun]:
    """Return the entries of a file. A torn line was never relied on: nothing was begun after it."""
    found: list[Begun] = []
    for line in path.read_bytes().split(b"\n"):
        try:
            found.append(msgspec.json.decode(line, type=Begun))
        except (msgspec.MsgspecError, UnicodeError):
            if line:
                logger.warning("the journal %s has an unreadable line, which is skipped", path)
    return found


def _file_name(name: str) -> str:
    """Return a name as part of a file's name."""
    return "".join(char if char.isalnum() or char in "-_." else f"%{ord(char):x}" for char in name)


def _sync_folder(folder: Path) -> None:
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


class FailOpen:
    """Commits the turns of one node within a latency budget."""

    def __init__(
        self, node: str, store: Store, owned_runs: OwnedRuns, lease: LeaseTimer, budget_ms: int, folder: str
    ) -> None:
        self._node = node
        self._store = store
        self._owned_runs = owned_runs
        self._lease = lease
        self._budget_s = budget_ms / 1_000
        self.journal = Journal(Path(folder), node)
        self._unordered: dict[str, Begun] = {}
        self._files: list[Path] = []
        """How many steps were begun before their start was durable."""

    # --- steps that earlier processes have begun

    async def reconcile(self) -> None:
        """Compare the journals of earlier processes with the store; keep what the store does not have."""
        try:
            left = await asyncio.to_thread(self.journal.left_behind)
        except OSError as problem:
            text = f"the journal beside {self.journal.path} cannot be read: {problem}"
            raise InvalidInput(text, field="fail_open") from problem
        entries = {entry.run_id: entry for found in left.values() for entry in found}
        for run_id, entry in entries.items():
            try:
                [loaded] = await self._store.load([run_id])
            except StoreCorrupt:  # claiming it makes dead letters of what cannot be read
                continue
            if loaded is not None and loaded.head.version == entry.version:
                self._unordered[run_id] = entry
                logger.warning("run %s: steps were started but not recorded: %s", run_id, ", ".join(entry.step_ids))
        self._files = list(left)
        self._forget_files()

    def begun_before(self, run_id: str) -> tuple[str, ...]:
        """Return the steps of a run that an earlier process has begun: the turn that starts them records the loss."""
        entry = self._unordered.get(run_id)
        return () if entry is None else entry.step_ids

    def _settle(self, run_id: str) -> None:
        if self._unordered.pop(run_id, None) is not None:
            self._forget_files()

    def _forget_files(self) -> None:
        if not self._unordered:
            for path in self._files:
                path.unlink(missing_ok=True)
            self._files = []

    # --- commits

    async def commit(self, drafts: Drafts, turns: Sequence[Turn], now: Instant) -> list[Answer]:
        """Commit, and retry until there is an answer, as long as the budget allows."""
        began = asyncio.get_running_loop().time()
        answers: dict[int, Answer] = {}
        pending = list(range(len(turns)))
        early: set[int] | None = None
        while pending:
            committing = asyncio.ensure_future(self._store.commit([turns[place] for place in pending]))
            try:
                if early is None and not await self._is_answered(committing, began):
                    early = await self._begin(committing, drafts, turns, now)
                answers |= zip(pending, await committing, strict=True)
                pending = []
            except StoreError:
                logger.exception("node %s: the store failed to commit; retrying", self._node)
                if self._is_over_budget(began):
                    late = [place for place in pending if place not in (early or ()) and _has_result(drafts[place][0])]
                    answers |= await self._give_up(late, drafts, turns)
                    pending = [place for place in pending if place not in answers]
                await asyncio.sleep(RETRY_S)
            finally:
                if not committing.done():
                    committing.cancel()
        if early:
            await asyncio.to_thread(self.journal.clear)
        for turn in turns:
            self._settle(turn.run_id)
        return [answers[place] for place in range(len(turns))]

    def _is_over_budget(self, began: float) -> bool:
        return asyncio.get_running_loop().time() - began >= self._budget_s

    async def _is_answered(self, committing: "asyncio.Future[Any]", began: float) -> bool:
        """Return whether the commit is answered within the budget, or has failed."""
        left_s = began + self._budget_s - asyncio.get_running_loop().time()
        done, _ = await asyncio.wait({committing}, timeout=max(left_s, 0.0))
        return bool(done)

    async def _begin(
        self, committing: "asyncio.Future[Any]", drafts: Drafts, turns: Sequence[Turn], now: Instant
    ) -> set[int]:
        """Begin the steps of turns that only start steps; return the indexes of those turns."""
        chosen = [place for place, turn in enumerate(turns) if drafts[place][2].dispatch and starts_steps_only(turn)]
        if not chosen or not self._may_begin():
            return set()
        entries = [
            Begun(turns[place].run_id, turns[place].expected_version, tuple(drafts[place][2].dispatch))
            for place in chosen
        ]
        try:
            await asyncio.to_thread(self.journal.append, entries)
        except OSError:
            logger.exception("node %s: the journal %s cannot be written", self._node, self.journal.path)
            return set()
        if committing.done() or not self._may_begin():
            await asyncio.to_thread(self.journal.clear)
            return set()
        for place in chosen:
            owned, _, draft = drafts[place]
            self._owned_runs.begin_steps(owned, draft, now)
        logger.warning("node %s: the steps of %d runs begin before their start is durable", self._node, len(chosen))
        return set(chosen)

    def _may_begin(self) -> bool:
        return self._lease.is_certain and not self._owned_runs.is_stopping

    async def _give_up(self, late: Sequence[int], drafts: Drafts, turns: Sequence[Turn]) -> dict[int, Answer]:
        """Withdraw results whose commit has failed beyond the budget; if the commit succeeded after all, it counts."""
        answers: dict[int, Answer] = {}
        for place in late:
            owned, cached, _ = drafts[place]
            turn, head = turns[place], owned.loaded.head
            try:
                [loaded] = await self._store.load([turn.run_id])
            except StoreError:
                return answers  # which is retried, like the commit
            if loaded is None or loaded.head.lease_epoch != head.lease_epoch:
                continue
            if loaded.head.version == turn.expected_version:
                owned.taken = [_without_result(given, cached.state) for given in owned.taken]
                answers[place] = CommitConflict("unseen", loaded.head.version, loaded.head.lease_epoch)
        return answers


def starts_steps_only(turn: Turn) -> bool:
    """Return whether a turn only starts steps that its node executes and that have no key."""
    if turn.snapshot.status is not RUNNING or turn.release or turn.losses or turn.received:
        return False
    if turn.waits_opened or turn.waits_closed or turn.tasks or turn.records or turn.dead:
        return False
    if turn.starts or turn.sends or turn.jobs or turn.jobs_closed:
        return False
    started = [event.data for event in turn.events if not isinstance(event.data, e.RunStarted)]
    return bool(started) and all(
        isinstance(body, e.StepStarted) and not body.queue and not has_key(body) for body in started
    )


def has_key(body: e.StepStarted) -> bool:
    """Return whether a step is reconciled by an idempotency key."""
    return body.idempotency_key is not None


def _has_result(owned: OwnedRun) -> bool:
    return any(isinstance(given, ActivitySucceeded) for given in owned.taken)


def _without_result(given: Any, state: RunState) -> Any:
    """Return the input that replaces a result that was not recorded within the budget."""
    step = state.open_steps.get(given.step_id) if isinstance(given, ActivitySucceeded) else None
    if step is None:
        return given
    if isinstance(step.body, e.StepStarted) and has_key(step.body):
        return NodeLost(step.step_id)  # its outcome is not known, so the next attempt is verified
    text = f"the result of activity {step.name!r} could not be recorded within the write latency budget"
    error = ErrorInfo(OVER_BUDGET, text, retryable=False)
    return ActivityErrored(step.step_id, given.logical_attempt_id, step.engine_attempt_id, error, Retry())
