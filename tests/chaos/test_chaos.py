"""Many node processes over one store, killed and frozen: nothing acknowledged is lost, nothing recorded twice.

`python -m tests.chaos` plays the same for longer. Each kind of fault that it is there to find is planted here.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, cast

import pytest

from holdfast.cli.exit_codes import INTERNAL_ERROR
from holdfast.core.messages import AcceptedSignalResult, Message, SignalRequest
from holdfast.store import port
from holdfast.store.sqlite import SqliteStore
from tests.chaos.harness import Order, Report, play_out
from tests.chaos.stores import HarmedStore, store_named
from tests.fault_proxy import FAULTS

pytestmark = pytest.mark.slow

PLAYS = 4


async def played(folder: Path, **changes: Any) -> Report:
    """Play a short chaos, and show what came of it if the test fails."""
    report = await play_out(Order(folder, **changes))
    print(*report.lines(), sep="\n")
    return report


@pytest.mark.contract("OWN-1", "OWN-3", "STO-3", "INV")
async def test_nothing_is_lost_or_doubled_while_nodes_are_killed_and_frozen(tmp_path: Path) -> None:
    report = await played(tmp_path, nodes=4, runs=600, seconds=24.0, lease_s=3.0)
    assert not report.wrong
    assert report.counts["killed"] > 2
    assert report.counts["frozen"] > 0
    assert report.counts["taken over from killed"] > 2
    assert report.counts["taken over from frozen"] > 0, "others went on with runs of a frozen node"
    assert report.counts["effects repeated"] > 0, "somebody was killed between an effect and its commit"


@pytest.mark.contract("OWN-1", "OWN-3", "STO-1", "MSG-2", "INV")
@pytest.mark.parametrize(
    ("store", "seconds", "harms"),
    [("postgres", 20.0, ["killed", "restarted", "stopped at once", "frozen"]), ("failover", 14.0, ["failed over"])],
)
async def test_nothing_is_lost_or_doubled_while_the_server_is_harmed_as_well(
    tmp_path: Path, store: str, seconds: float, harms: list[str]
) -> None:
    """Nodes are killed, and frozen for longer than their lease, in the same time; again if none of them had a run."""
    for play in range(PLAYS):
        own = tmp_path / str(play)
        own.mkdir()
        report = await played(own, store=store, nodes=3, runs=250, seconds=seconds, lease_s=2.0, peace_s=2.0)
        assert not report.wrong
        if report.recoveries_s:
            break
    for harm in harms:
        assert report.counts[f"server {harm}"] >= 1
    assert report.counts["killed"] > 1
    assert report.counts["frozen"] > 0
    assert report.counts["taken over from killed"] + report.counts["taken over from frozen"] > 0
    assert report.recoveries_s


@pytest.mark.contract("OWN-1", "OWN-3", "STO-1", "EVT-1", "INV")
async def test_nothing_is_lost_or_doubled_in_a_bucket_that_fails_one_request_in_five(tmp_path: Path) -> None:
    """The long form is in `make soak`: eight nodes, one of them killed in every second."""
    report = await played(
        tmp_path, store="s3", nodes=3, runs=8, works=4, seconds=6.0, lease_s=6.0, killed_every_s=1.5, patience_s=90.0
    )
    assert not report.wrong
    assert report.counts["killed"] > 2
    failed = sum(
        count for what, count in report.counts.items() if what.startswith("requests ") and "passed" not in what
    )
    assert failed > report.counts["requests passed"] / 10
    for fault in FAULTS[:-1]:
        assert report.counts[f"requests {fault}"] > 0, fault


# --- It bites

WITHOUT_KILLS = {
    "effect-free": "has a result, and no effect that gave it",
    "dropped-commit": r"^r\d*7 is RUNNING: its last event is (?!SignalWaiting)",
    "lost signals": "is RUNNING: its last event is SignalWaiting",
    "lost starts": "its start was acknowledged, and it is not there",
}
"""Faults of a node and of this process' store, all planted into one play, and the words in which each is found."""


async def test_it_finds_every_fault_that_needs_no_kill(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(SqliteStore, "deliver", _deliver_most(SqliteStore.deliver))
    monkeypatch.setattr(SqliteStore, "create", _create_most(SqliteStore.create))
    in_nodes = "effect-free dropped-commit"
    report = await played(tmp_path, nodes=1, runs=150, seconds=1.0, patience_s=4.0, plant=in_nodes)
    for name, words in WITHOUT_KILLS.items():
        assert any(re.search(words, wrong) for wrong in report.wrong), name


async def test_it_finds_activities_that_died_with_their_node(tmp_path: Path) -> None:
    """Again if no node was killed where it matters."""
    for play in range(PLAYS):
        own = tmp_path / str(play)
        own.mkdir()
        changes = {"nodes": 3, "runs": 300, "seconds": 5.0, "lease_s": 1.5, "patience_s": 5.0}
        report = await played(own, **changes, plant="forgotten-activities")
        if report.wrong:
            break
    assert "is RUNNING: its last event is StepStarted" in "\n".join(report.wrong)


async def test_nothing_is_found_where_no_fault_is_planted(tmp_path: Path) -> None:
    report = await played(tmp_path, nodes=1, runs=10, seconds=0.5)
    assert not report.wrong


async def test_it_finds_nodes_that_end_by_themselves(tmp_path: Path) -> None:
    report = await played(tmp_path, nodes=1, runs=10, seconds=0.5, patience_s=2.0, plant="falls-over")
    assert f"ended by itself with {INTERNAL_ERROR}" in "\n".join(report.wrong)


def _deliver_most(deliver: Callable[..., Any]) -> Callable[..., Any]:
    numbers = itertools.count(1)

    async def deliver_most(
        self: SqliteStore, items: Sequence[Message | SignalRequest]
    ) -> list[port.Accepted | port.Duplicate | port.Refused]:
        if next(numbers) % 10:
            return cast("list[port.Accepted | port.Duplicate | port.Refused]", await deliver(self, items))
        return [port.Accepted(_acknowledged(item)) for item in items if isinstance(item, SignalRequest)]

    return deliver_most


def _acknowledged(request: SignalRequest) -> AcceptedSignalResult:
    return AcceptedSignalResult(
        workflow_id=request.run_id,
        signal_name=request.name,
        signal_id=request.signal_id or "",
        accepted_at=1,
        signal_storage_key="nowhere",
    )


def _create_most(create: Callable[..., Any]) -> Callable[..., Any]:
    numbers = itertools.count(1)

    async def create_most(
        self: SqliteStore, runs: Sequence[port.NewRun], claim_for: str | None = None
    ) -> list[port.Created | port.Existing | port.Refused]:
        if next(numbers) % 10:
            return cast("list[port.Created | port.Existing | port.Refused]", await create(self, runs, claim_for))
        return [port.Created(new.run_id) for new in runs]

    return create_most


async def test_it_explains_each_recovery_that_took_too_long(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Here each did, because a store is promised on which others go on before the lease has ended."""

    def impatient(name: str, folder: Path) -> HarmedStore:
        store = store_named(name, folder)
        store.slack_s = -100.0
        return store

    monkeypatch.setattr("tests.chaos.harness.store_named", impatient)
    for play in range(PLAYS):
        own = tmp_path / str(play)
        own.mkdir()
        report = await played(own, nodes=3, runs=300, seconds=5.0, lease_s=1.5)
        if report.recoveries_s:
            break
    first, *explained = report.wrong
    assert first.startswith(f"{len(report.recoveries_s)} recoveries took longer than -98.5 s")
    assert len(explained) == len(report.recoveries_s) > 0
    taken = r"(taken after \S+ s, in which|no node has noted that it took it)"  # it may be killed before it notes it
    for each in explained:
        assert re.search(rf"went on \S+ s after \S+ was (killed|frozen) at \d+: {taken}", each)
