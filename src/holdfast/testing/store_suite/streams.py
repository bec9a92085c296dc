"""The store suite, streams: what runs write for outside readers, in order, exactly once, and only while permitted."""

from typing import Any

import pytest
from msgspec import Raw, json
from msgspec.structs import replace

from holdfast.core import codec
from holdfast.core.streams import Appended, StreamAppend, StreamChunks, StreamPage, StreamRead
from holdfast.errors import CheckpointOwnershipCapabilityError, Conflict, InvalidInput, NotFound, RunTerminal
from holdfast.limits import Limits
from holdfast.store.port import CommitConflict, Committed, PurgePolicy, Refused, Store, StreamQuery
from holdfast.store.types import STREAMS
from holdfast.testing import START, VirtualClock
from holdfast.testing.samples import SampleNode, complete, job, marker, wait
from holdfast.testing.store_suite.base import BAD_NAMES, SuiteBase, check_refused
from holdfast.testing.store_suite.jobs import VISIBLE_MS, acquire, put

STEP = "ask:1"


def chunks(*values: Any, run_id: str = "run-1", **more: Any) -> StreamAppend:
    """Return what attempt 1 of a step, on the node that owns the run, appends to the stream `tokens`."""
    given: dict[str, Any] = {"name": "tokens", "step_id": STEP, "attempt": 1, "node": "node-a", "epoch": 1} | more
    return StreamAppend(run_id=run_id, count=len(values), body=codec.encode(list(values)), **given)


async def append(store: Store, given: StreamAppend) -> Appended:
    """Append chunks that must be accepted."""
    [answer] = await store.append_streams([given])
    assert isinstance(answer, Appended), answer
    return answer


async def refused(store: Store, given: StreamAppend) -> Refused:
    """Append chunks that must be refused, and leave no trace."""
    before = await page(store)
    [answer] = await store.append_streams([given])
    assert isinstance(answer, Refused), answer
    assert await page(store) == before
    return answer


async def page(store: Store, after: int = 0, name: str = "tokens", run_id: str = "run-1", **more: Any) -> StreamPage:
    """Read a part of a stream of a run that exists."""
    [found] = await store.read_streams([StreamRead(run_id=run_id, name=name, after=after, **more)])
    assert found is not None
    return found


def values(found: StreamPage) -> list[Any]:
    """Return the chunks of a page with their numbers."""
    return [
        (segment.first_seq + place, value)
        for segment in found.segments
        for place, value in enumerate(json.decode(segment.body))
    ]


class StreamSuite(SuiteBase):
    """Streams of runs."""

    async def _lacks_streams(self, store: Store) -> bool:
        """Return whether the store does not support streams; if so, check that it declares that."""
        if STREAMS not in store.capabilities.lacking:
            return False
        with pytest.raises(CheckpointOwnershipCapabilityError):
            await store.append_streams([chunks("a")])
        with pytest.raises(CheckpointOwnershipCapabilityError):
            await store.read_streams([StreamRead(run_id="run-1", name="tokens")])
        return True

    @pytest.mark.contract("STR-1")
    async def test_stream_chunks_are_numbered_in_order_and_read_from_any_of_them(
        self, store: Store, peer: Store, node: SampleNode
    ) -> None:
        """Reading can start within a segment; pages consist of whole segments."""
        if await self._lacks_streams(store):
            return
        await node.start("run-1", wait("go"))
        assert await page(store) == StreamPage(run_id="run-1", name="tokens", head=(await page(store)).head)
        first = await append(store, chunks("a", {"b": 1}))
        assert (first.position, first.head.last_seq) == (2, 2)
        await append(peer, chunks("c", position=2))
        await append(store, chunks("d", "e", step_id="other:1"))
        found = await page(peer)
        assert values(found) == [(1, "a"), (2, {"b": 1}), (3, "c"), (4, "d"), (5, "e")]
        assert [(each.step_id, each.attempt, each.at) for each in found.segments] == [
            (STEP, 1, START),
            (STEP, 1, START),
            ("other:1", 1, START),
        ]
        assert values(await page(store, 1)) == values(found)
        assert values(await page(store, 2)) == values(found)[2:]
        assert values(await page(store, 5)) == []
        assert values(await page(store, 99)) == []
        assert values(await page(store, most_bytes=1)) == values(found)[:2]
        assert values(await page(store, name="other")) == []
        assert await store.read_streams([StreamRead(run_id="none", name="tokens")]) == [None]

    @pytest.mark.contract("STR-1")
    async def test_stream_has_what_is_sent_again_once_and_no_gap(self, store: Store, node: SampleNode) -> None:
        """This holds whether or not the first answer arrived."""
        if await self._lacks_streams(store):
            return
        await node.start("run-1", wait("go"))
        first = await append(store, chunks("a", "b"))
        assert await append(store, chunks("a", "b")) == first
        check_refused(await refused(store, chunks("d", position=3)), Conflict, position=2)
        check_refused(await refused(store, chunks("x", position=0)), Conflict, position=2)
        await append(store, chunks("c", position=2, closes=True))
        await append(store, chunks(position=3, closes=True))
        found = await page(store)
        assert [value for _, value in values(found)] == ["a", "b", "c"]
        assert found.head.is_closed

    @pytest.mark.contract("STR-1")
    async def test_stream_of_a_later_attempt_begins_anew_or_is_resumed(self, store: Store, node: SampleNode) -> None:
        """The mark records its start; chunks of other writers stay in between. An earlier attempt writes no more."""
        if await self._lacks_streams(store):
            return
        await node.start("run-1", wait("go"))
        await append(store, chunks("a", "b"))
        await append(store, chunks("other", step_id="other:1"))
        await append(store, chunks("A", attempt=2))
        assert (await append(store, chunks("A", attempt=2))).position == 1
        check_refused(await refused(store, chunks("c", position=2)), Conflict, attempt=2)
        resumed = await append(store, chunks(attempt=3, resumes=True))
        assert resumed.position == 1
        await append(store, chunks("B", attempt=3, position=1))
        found = await page(store)
        assert [value for _, value in values(found)] == ["a", "b", "other", "A", "B"]
        assert [each.restarted_from for each in found.segments] == [None, None, 1, None]
        assert (await append(store, chunks(step_id="new:1", resumes=True))).position == 0

    @pytest.mark.contract("STR-1")
    async def test_stream_that_an_attempt_resumed_before_anything_was_written_is_its_own(
        self, store: Store, peer: Store, node: SampleNode
    ) -> None:
        """A late earlier attempt does not restart it; and the stream does not exist until something is written."""
        if await self._lacks_streams(store):
            return
        await node.start("run-1", wait("go"))
        assert (await append(store, chunks(attempt=2, resumes=True))).position == 0
        assert await store.find(StreamQuery(run_id="run-1")) == []
        check_refused((await peer.append_streams([chunks("late")]))[0], Conflict, attempt=2)
        await append(peer, chunks("a", attempt=2))
        assert values(await page(store)) == [(1, "a")]

    @pytest.mark.contract("STR-1")
    async def test_stream_is_written_by_the_owner_of_the_run_while_it_goes_on(
        self, store: Store, clock: VirtualClock, node: SampleNode
    ) -> None:
        """Writing ends when the lease is lost or the run has finished; the chunks stay."""
        if await self._lacks_streams(store):
            return
        await node.start("run-1", wait("go"))
        await append(store, chunks("a"))
        check_refused(await refused(store, chunks("b", position=1, epoch=2)), Conflict)
        check_refused((await store.append_streams([chunks("b", run_id="none")]))[0], NotFound)
        await node.step("run-1", complete())
        check_refused(await refused(store, chunks("b", position=1)), RunTerminal)
        found = await page(store)
        assert values(found) == [(1, "a")]
        assert found.is_finished

    @pytest.mark.contract("STR-1")
    async def test_stream_is_written_by_who_has_the_job(
        self, store: Store, clock: VirtualClock, node: SampleNode
    ) -> None:
        """As with heartbeats, until another node has acquired it."""
        if await self._lacks_streams(store):
            return
        await put(node, job())
        await acquire(store)
        queued: dict[str, Any] = {"step_id": "charge", "epoch": None, "node": "node-b"}
        await append(store, chunks("a", **queued))
        check_refused(await refused(store, chunks("b", **queued | {"node": "node-c"})), Conflict)
        clock.advance(ms=VISIBLE_MS)
        await acquire(store, "node-c")
        check_refused(await refused(store, chunks("b", position=1, **queued)), Conflict)
        await append(store, chunks("A", attempt=2, **queued | {"node": "node-c"}))
        assert [each.restarted_from for each in (await page(store)).segments] == [None, 1]

    @pytest.mark.contract("STR-1")
    async def test_stream_of_a_turn_is_part_of_its_commit(self, store: Store, node: SampleNode) -> None:
        """A turn that is committed again, or loses, appends nothing."""
        if await self._lacks_streams(store):
            return
        run = await node.start("run-1", wait("go"))
        given = StreamChunks(name="tokens", count=2, body=Raw(b'["a","b"]'), closes=True)
        turn = replace(await node.turn(run, marker()), streams=(given,))
        for _ in range(2):
            [answer] = await store.commit([turn])
            assert isinstance(answer, Committed), answer
        [lost] = await store.commit([replace(turn, expected_version=99)])
        assert isinstance(lost, CommitConflict)
        found = await page(store)
        assert values(found) == [(1, "a"), (2, "b")]
        assert [(each.step_id, each.attempt) for each in found.segments] == [("", 0)]
        assert found.head.is_closed

    @pytest.mark.contract("STR-1")
    async def test_stream_that_is_full_drops_and_counts(self, clock: VirtualClock) -> None:
        """Existing chunks stay, and the writer continues."""
        async with self.opened(clock, Limits(stream_bytes=2_000)) as store:
            if await self._lacks_streams(store):
                return
            await SampleNode(store).start("run-1", wait("go"))
            text = "x" * 1_000  # twice this is too much, whether or not it is encrypted
            await append(store, chunks(text))
            assert (await append(store, chunks(text, "x", position=1))).head.dropped == 2
            await append(store, chunks("y", position=3))
            found = await page(store)
            assert values(found) == [(1, text), (2, "y")]
            assert found.head.dropped == 2

    async def test_streams_of_a_run_are_found_by_their_names(self, store: Store, node: SampleNode) -> None:
        """They are in the order of names, a page at a time, each with its end."""
        if await self._lacks_streams(store):
            return
        await node.start("run-1", wait("go"))
        await node.start("run-2", wait("go"))
        assert await store.find(StreamQuery(run_id="run-1")) == []
        assert await store.find(StreamQuery(run_id="none")) == []
        for name in ("b", "B", "ä", "a"):
            await append(store, chunks(name, name=name, closes=name == "a"))
        await append(store, chunks("c", name="a", run_id="run-2"))
        await append(store, chunks("d", "e", name="b", position=1))
        found = await store.find(StreamQuery(run_id="run-1"))
        assert [(each.run_id, each.name) for each in found] == [("run-1", name) for name in ("B", "a", "b", "ä")]
        assert [(each.head.last_seq, each.head.is_closed) for each in found] == [
            *((1, False), (1, True), (3, False), (1, False))
        ]
        first = await store.find(StreamQuery(run_id="run-1", limit=2))
        assert [*first, *await store.find(StreamQuery(run_id="run-1", after=first[-1].name))] == found

    async def test_stream_goes_with_its_run(self, store: Store, clock: VirtualClock, node: SampleNode) -> None:
        """A new run with the same id begins without it."""
        if await self._lacks_streams(store):
            return
        await node.start("run-1", wait("go"))
        await append(store, chunks("a"))
        await node.step("run-1", complete())
        clock.advance(ms=1_000)
        report = await store.purge(PurgePolicy(finished_run_ms=1))
        assert report.runs == 1
        assert await store.read_streams([StreamRead(run_id="run-1", name="tokens")]) == [None]
        await node.start("run-1", wait("go"))
        assert values(await page(store)) == []

    async def test_stream_refuses_what_is_malformed(self, store: Store, node: SampleNode) -> None:
        """Each item is refused separately."""
        if await self._lacks_streams(store):
            return
        await node.start("run-1", wait("go"))
        for bad in BAD_NAMES:
            [answer, fine] = await store.append_streams([replace(chunks("a"), name=bad), chunks("a")])
            check_refused(answer, InvalidInput)
            assert isinstance(fine, Appended)
        for wrong in (
            {"count": -1},
            {"position": -1},
            {"attempt": None},
            {"epoch": "1"},
            {"body": Raw(b"[")},
            {"resumes": True},
        ):
            check_refused(await refused(store, replace(chunks("a", position=1), **wrong)), InvalidInput)
        for after in (None, "1", 2**70):
            with pytest.raises(InvalidInput):
                await store.read_streams([StreamRead(run_id="run-1", name="tokens", after=after)])  # type: ignore[arg-type]
