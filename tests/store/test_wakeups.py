"""What notifications say, and who is woken by them; what earlier and later releases take them for."""

import asyncio
from typing import get_args

import pytest
from msgspec.structs import replace

from holdfast.store.memory import MemoryStore
from holdfast.store.wakeups import (
    ENDS_A_MESSAGE,
    MOST_ENDS,
    NOTHING,
    Ended,
    Interest,
    LocalWakeups,
    Pending,
    Topic,
    decoded,
    digest_of,
    encoded,
    news_of,
)
from holdfast.testing.samples import SampleNode, complete, message, wait

ONE = frozenset([1])


@pytest.mark.contract("MSG-4", "FMT-1")
@pytest.mark.parametrize("topic", ["runs", "changes"])
@pytest.mark.parametrize("count", [0, 1, ENDS_A_MESSAGE, 2 * ENDS_A_MESSAGE + 1])
def test_what_is_sent_is_what_is_heard(topic: Topic, count: int) -> None:
    ended = frozenset(digest_of(f"run-{number}") for number in range(count))
    messages = encoded(topic, ended)
    heard = Pending()
    for sent in messages:
        assert len(sent) < 8_000, "PostgreSQL takes no longer ones"
        heard.add(*decoded(sent))
    assert heard.take() == (topic, ended)
    assert len(messages) == max(1, -(-len(ended) // ENDS_A_MESSAGE))


@pytest.mark.contract("MSG-4", "FMT-1")
def test_other_releases_are_understood() -> None:
    """Earlier ones send nothing, or `s` about streams, and take all else for news about runs; so do we."""
    assert decoded(b"") == ("runs", None)
    assert decoded(b"s") == ("streams", None)
    assert encoded("streams", NOTHING) == [b"s"]
    assert b"s" not in [message for topic in ("runs", "changes") for message in encoded(topic, NOTHING)]
    for unknown in (b"x", b"later", b"r!!!", b"cAAA=", b"r\xff", b"sx"):
        assert decoded(unknown) == ("runs", None)


HEARD: dict[tuple[Interest, Topic, Ended], bool] = {
    ("runs", "runs", NOTHING): True,
    ("runs", "changes", NOTHING): False,
    ("runs", "changes", ONE): False,
    ("runs", "streams", None): False,
    ("changes", "runs", NOTHING): True,
    ("changes", "changes", NOTHING): True,
    ("changes", "streams", None): False,
    ("ends", "runs", NOTHING): False,
    ("ends", "runs", None): True,
    ("ends", "runs", ONE): True,
    ("ends", "changes", ONE): True,
    ("ends", "streams", None): False,
    ("streams", "runs", NOTHING): True,
    ("streams", "changes", ONE): True,
    ("streams", "streams", None): True,
}


@pytest.mark.contract("MSG-4")
@pytest.mark.parametrize(("interest", "topic", "ended"), HEARD)
async def test_who_is_not_concerned_sleeps_on(interest: Interest, topic: Topic, ended: Ended) -> None:
    wakeups = LocalWakeups()
    listener = wakeups.listen(interest)
    wakeups.notify(topic, ended)
    assert await listener.wait(0) == HEARD[interest, topic, ended]


@pytest.mark.contract("MSG-4")
async def test_ends_are_kept_until_they_are_taken_and_more_than_fit_are_all() -> None:
    wakeups = LocalWakeups()
    listener = wakeups.listen("ends")
    for digest in (3, 5):
        wakeups.notify("changes", frozenset([digest]))
    assert await listener.wait(0)
    assert listener.take_ended() == frozenset([3, 5])
    assert listener.take_ended() == NOTHING
    wakeups.notify("runs", None)
    wakeups.notify("changes", frozenset([3]))
    assert listener.take_ended() is None, "which have ended is not known"
    for first in range(0, 2 * MOST_ENDS, 1_000):
        wakeups.notify("changes", frozenset(range(first, first + 1_000)))
    assert listener.take_ended() is None


@pytest.mark.parametrize("topics", [["streams"], ["streams", "changes"], ["changes", "runs"], ["streams", "runs"]])
def test_several_notifications_are_one_for_all_who_would_have_heard_one(topics: list[Topic]) -> None:
    pending = Pending()
    assert not pending
    for number, topic in enumerate(topics):
        ended: Ended = None if topic == "streams" else frozenset([number])
        pending.add(topic, ended)
    assert pending
    ends = frozenset(number for number, topic in enumerate(topics) if topic != "streams")
    assert pending.take() == (topics[-1], ends)
    assert not pending


@pytest.mark.contract("MSG-4")
async def test_only_what_gives_nodes_something_to_do_wakes_them() -> None:
    store = MemoryStore()
    node = SampleNode(store)
    run = await node.start("run-1", wait("go"))
    parked = await node.turn(run, release=True)
    assert news_of([replace(parked, release=False)]) is None
    assert news_of([parked]) == ("changes", NOTHING), "it waits for a signal: whose sender wakes them"
    due = replace(parked, snapshot=replace(parked.snapshot, waiting_until=5))
    assert news_of([due]) == ("runs", NOTHING), "it is let go, and somebody has to be there in time"
    assert news_of([parked, replace(parked, messages=(message("run-1", "m-1"),))]) == ("runs", NOTHING)
    ended = await node.turn(run, complete())
    digest = digest_of("run-1")
    assert news_of([ended]) == ("changes", frozenset([digest]))
    assert news_of([due, ended, parked]) == ("runs", frozenset([digest]))
    nodes, waiters = store.wakeups.listen("runs"), store.wakeups.listen("ends")
    await store.commit([ended])
    assert not await nodes.wait(0)
    assert await waiters.wait(0)
    assert waiters.take_ended() == frozenset([digest])


@pytest.mark.contract("MSG-4")
async def test_a_closed_store_wakes_whoever_listens_for_whatever() -> None:
    wakeups = LocalWakeups()
    interests: tuple[Interest, ...] = get_args(Interest)
    waiting = [asyncio.create_task(wakeups.listen(interest).wait(60)) for interest in interests]
    await asyncio.sleep(0)
    wakeups.close()
    assert all(await asyncio.gather(*waiting))
