"""Many do the same at the same moment: one is first, and everybody is told what it did."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest

from holdfast.core import codec
from holdfast.core.events import MarkerRecorded
from holdfast.errors import Conflict
from holdfast.store import port
from holdfast.testing.samples import new_run, read_history, read_mailbox
from tests.races import contenders
from tests.races.parallel import run_in_parallel
from tests.races.stores import opened, prepare

pytestmark = pytest.mark.slow


@pytest.mark.contract("SIG-5")
async def test_of_simultaneous_senders_of_one_signal_exactly_one_is_accepted(tmp_path: Path) -> None:
    path = tmp_path / "store.db"
    await prepare(path, new_run("run-1"))

    played = run_in_parallel(contenders.send_signal, processes=4, threads=10, path=path, run_id="run-1", times=25)

    answers = [answer for answers in played for _, answer in answers]
    assert Counter(type(answer) for answer in answers) == {port.Accepted: 1, port.Duplicate: 999}
    (result,) = {answer.result for answer in answers}
    async with opened(path) as store:
        (signal,) = await read_mailbox(store, "run-1")
    assert result.accepted
    assert (signal.signal_id, signal.accepted_at, signal.inbox_seq) == ("click", result.accepted_at, 1)
    assert signal.suffix in result.signal_storage_key


@pytest.mark.contract("SIG-5")
async def test_of_simultaneous_payloads_under_one_id_one_stands_and_the_others_conflict(tmp_path: Path) -> None:
    path = tmp_path / "store.db"
    await prepare(path, new_run("run-1"))

    played = run_in_parallel(
        contenders.send_signal, processes=2, threads=6, path=path, run_id="run-1", times=10, payloads=3
    )

    async with opened(path) as store:
        (signal,) = await read_mailbox(store, "run-1")
    winner = codec.decode(signal.payload, int)
    by_payload = {payload: [a for answers in played for p, a in answers if p == payload] for payload in range(3)}
    assert Counter(type(answer) for answer in by_payload.pop(winner)) == {port.Accepted: 1, port.Duplicate: 39}
    losers = [answer for answers in by_payload.values() for answer in answers]
    assert len(losers) == 80
    assert all(isinstance(answer, port.Refused) and isinstance(answer.error, Conflict) for answer in losers)


@pytest.mark.contract("ACT-1")
async def test_of_simultaneous_outcomes_of_one_step_exactly_one_is_accepted(tmp_path: Path) -> None:
    path = tmp_path / "store.db"
    await prepare(path, new_run("run-1"))

    played = run_in_parallel(contenders.report_outcome, processes=4, threads=3, path=path, run_id="run-1", steps=20)

    for answers in zip(*played, strict=True):
        assert sum(isinstance(answer, port.Accepted) for answer in answers) == 1
        refused = [answer.error for answer in answers if isinstance(answer, port.Refused)]
        assert len(refused) == 11
        assert all(isinstance(error, Conflict) for error in refused)
    async with opened(path) as store:
        assert len(await read_mailbox(store, "run-1")) == 20


@pytest.mark.contract("QUE-1")
async def test_of_simultaneous_requests_with_one_id_exactly_one_creates_a_run(tmp_path: Path) -> None:
    path = tmp_path / "store.db"
    await prepare(path)

    played = run_in_parallel(contenders.start_same_request, processes=2, threads=8, path=path, times=10)

    answers = [answer for answers in played for answer in answers]
    assert Counter(type(answer) for answer in answers) == {port.Created: 1, port.Existing: 159}
    (run_id,) = {answer.run_id for answer in answers}
    async with opened(path) as store:
        (head,) = await store.find(port.RunQuery())
        assert len(await read_history(store, run_id)) == 1
    assert (head.run_id, head.run_request_id) == (run_id, "request-1")


@pytest.mark.contract("OWN-1")
async def test_of_owners_that_commit_the_same_version_exactly_one_wins_each_time(tmp_path: Path) -> None:
    path = tmp_path / "store.db"
    await prepare(path, new_run("run-1"), claim_for="node-0")
    versions = 25

    played = run_in_parallel(
        contenders.commit_same_version, processes=2, threads=4, path=path, run_id="run-1", versions=versions
    )

    winners: list[int] = []
    for answers in zip(*played, strict=True):
        assert Counter(type(answer) for answer in answers) == {port.Committed: 1, port.CommitConflict: 7}
        assert {answer.reason for answer in answers if isinstance(answer, port.CommitConflict)} == {"version"}
        assert len({answer.version for answer in answers}) == 1, "the losers are told the winner's version"
        winners += [contender for contender, answer in enumerate(answers) if isinstance(answer, port.Committed)]
    async with opened(path) as store:
        events = await read_history(store, "run-1")
    recorded = [codec.decode(event.data.value, int) for event in events if isinstance(event.data, MarkerRecorded)]
    assert recorded == winners
    assert [event.run_seq for event in events] == list(range(1, versions + 3)), "queued, started, and the markers"
