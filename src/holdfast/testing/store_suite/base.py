"""What the parts of the store suite share: the hooks that a store's author implements, fixtures, and short checks."""

from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import ClassVar, TypeVar

import pytest

from holdfast.core.messages import AcceptedSignalResult, Message, SignalRequest
from holdfast.errors import CallerError
from holdfast.limits import Limits
from holdfast.store.port import Accepted, Duplicate, Existing, Refused, Store
from holdfast.testing import VirtualClock
from holdfast.testing.samples import SampleNode, read_picture

E = TypeVar("E", bound=CallerError)

LIMITS = Limits(
    signal_payload_bytes=1_024,
    signals_per_run_per_minute=5,
    acceptance_retention_ms=3_600_000,
    batch_items=60,
    page_items=20,
)
"""Small limits, so that reaching them is cheap."""

MINUTE_MS = 60_000

BAD_NAMES: tuple[object, ...] = ("", "x" * 256, "é" * 128, "a\nb", "a\x00b", "\x7f", "\ud800", None, 7, b"name")
"""Invalid names: empty, over 255 UTF-8 bytes, with control characters, not Unicode, not a string."""

STRANGE_NAMES = (
    "a:b",
    "a/b",
    "a%2Fb",
    "a%b",
    "..",
    ".",
    " a ",
    "a",
    "A",
    "'; drop table runs; --",
    "\u00e9",
    "e\u0301",
    "\u212b",
    "\u00c5",
    "日本語",
    "😀",
    "_",
    "a_b",
)
"""Different names that careless escaping, matching or normalising would make the same."""

STRANGE_IDS = (*STRANGE_NAMES, "a|b", "a||b", "a\tb", "a\nb", " ", "a ", '"a"', "x" * 128, "é" * 64)
"""The same for signal ids, which may contain any character but NUL, up to 128 UTF-8 bytes."""


class SuiteBase(ABC):
    """The hooks that a store's author implements, and the fixtures."""

    limits: ClassVar[Limits] = LIMITS

    @abstractmethod
    async def make_store(self, clock: VirtualClock, limits: Limits) -> Store:
        """Return a new and empty store that takes its time from `clock`. The suite migrates and closes it."""

    @abstractmethod
    async def lose_acceptance_record(self, store: Store, run_id: str, name: str, signal_id: str) -> None:
        """Delete the acceptance record of a signal behind the store's back, and keep its payload."""

    async def make_peer(self, store: Store, clock: VirtualClock, limits: Limits) -> Store:
        """Return what another process would open: a second connection to the same data; by default `store` itself."""
        return store

    @asynccontextmanager
    async def opened(self, clock: VirtualClock, limits: Limits) -> AsyncIterator[Store]:
        """Create a store with these limits, for one test."""
        store = await self.make_store(clock, limits)
        try:
            await store.migrate()
            yield store
        finally:
            await store.close()

    @pytest.fixture
    def clock(self) -> VirtualClock:
        """The store's clock."""
        return VirtualClock()

    @pytest.fixture
    async def store(self, clock: VirtualClock) -> AsyncIterator[Store]:
        """An empty store with small limits."""
        async with self.opened(clock, self.limits) as store:
            yield store

    @pytest.fixture
    async def peer(self, store: Store, clock: VirtualClock) -> AsyncIterator[Store]:
        """Another process's connection to the same store."""
        peer = await self.make_peer(store, clock, self.limits)
        yield peer
        if peer is not store:
            await peer.close()

    @pytest.fixture
    def node(self, store: Store) -> SampleNode:
        """A node on the store."""
        return SampleNode(store)


@asynccontextmanager
async def unchanged(store: Store) -> AsyncIterator[None]:
    """Check that the code inside leaves no trace in the store."""
    before = await read_picture(store, ("node-a", "node-b"))
    yield
    assert await read_picture(store, ("node-a", "node-b")) == before


async def deliver_one(store: Store, item: SignalRequest | Message) -> Accepted | Duplicate | Refused:
    """Deliver one item and return its answer."""
    [answer] = await store.deliver([item])
    return answer


async def accept(store: Store, request: SignalRequest) -> AcceptedSignalResult:
    """Deliver a signal that must be accepted, and return the sender's receipt."""
    answer = await deliver_one(store, request)
    assert isinstance(answer, Accepted), answer
    assert answer.result is not None
    return answer.result


def check_refused(answer: object, error: type[E], **details: object) -> E:
    """Check that nothing was stored, for this reason, and return the error."""
    assert isinstance(answer, Refused), answer
    assert type(answer.error) is error, answer.error
    assert {key: answer.error.details.get(key) for key in details} == details
    return answer.error


async def check_deliver_refused(store: Store, item: SignalRequest | Message, error: type[E], **details: object) -> E:
    """Check that an item is refused for this reason and leaves no trace, and return the error."""
    async with unchanged(store):
        answer = await deliver_one(store, item)
    return check_refused(answer, error, **details)


def kinds(answers: Sequence[object]) -> list[str]:
    """Return the names of the answers' types; for a refusal, that of its error."""
    return [type(answer.error if isinstance(answer, Refused) else answer).__name__ for answer in answers]


def existing_ids(answers: Sequence[object]) -> set[str]:
    """Return the runs that the `Existing` answers name."""
    return {answer.run_id for answer in answers if isinstance(answer, Existing)}
