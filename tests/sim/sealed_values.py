"""Encryption and an artifact store for simulated nodes, and the view of someone who has both.

Nodes encrypt values and keep large ones in a bucket that fails like the store does. The world looks at what was
committed, at once: nothing may happen meanwhile, so its reader never waits.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from random import Random
from typing import Any, TypeVar

import msgspec
from msgspec.structs import replace

import holdfast as hf
from holdfast.core.events import Event
from holdfast.core.index_rows import RuntimeSnapshot
from holdfast.core.messages import Signal
from holdfast.errors import StoreUnavailable
from holdfast.store.artifacts import run_path
from holdfast.store.memory.run import Run
from holdfast.store.payloads import Payload, SealingStore
from holdfast.store.port import MailboxQuery, Store
from holdfast.testing.faults import Weather

T = TypeVar("T")

KEYS = {"k2": b"2" * 32, "k1": b"1" * 32}
OFFLOAD_BYTES = 100
SHARE = 0.25
"""How many of the seeds encrypt and offload."""


class SeededSecrets:
    """Secrets from a seed."""

    def __init__(self, rng: Random) -> None:
        self._rng = rng

    def new_secret(self) -> str:
        """Return 256 bits as hex digits."""
        return f"{self._rng.getrandbits(256):064x}"


class Bucket:
    """An artifact store in the memory of the world, as one node sees it through the weather."""

    def __init__(self, objects: dict[str, tuple[int, bytes]], weather: Weather, rng: Random) -> None:
        self._objects = objects
        self._weather = weather
        self._rng = rng

    async def _travel(self) -> None:
        await asyncio.sleep(self._rng.choice((0.0, self._weather.faults.latency_s)))
        if self._weather.is_down or self._rng.random() < self._weather.faults.refused:
            raise StoreUnavailable("the bucket could not be reached")

    async def put(self, key: str, chunks: AsyncIterator[bytes]) -> None:
        """Store an object."""
        content = b"".join([chunk async for chunk in chunks])
        await self._travel()
        self._objects[key] = 0, content
        await self._travel()

    async def read(self, key: str) -> AsyncIterator[bytes]:
        """Yield an object."""
        await self._travel()
        if key not in self._objects:
            raise hf.errors.ArtifactMissing(f"there is no {key}")
        yield self._objects[key][1]

    async def read_part(self, key: str, offset: int, size_bytes: int) -> bytes:
        """Return a part of an object."""
        return b"".join([chunk async for chunk in self.read(key)])[offset : offset + size_bytes]

    async def stat(self, key: str) -> hf.StoredObject | None:
        """Return what is known of an object."""
        found = self._objects.get(key)
        return None if found is None else hf.StoredObject(key, len(found[1]), found[0])

    async def delete(self, key: str) -> None:
        """Delete an object."""
        self._objects.pop(key, None)

    async def list(self, prefix: str = "") -> AsyncIterator[hf.StoredObject]:
        """Yield the objects."""
        for key, (modified_at, content) in list(self._objects.items()):
            if key.startswith(prefix):
                yield hf.StoredObject(key, len(content), modified_at)


def sealing(objects: dict[str, tuple[int, bytes]], weather: Weather, seed: str) -> dict[str, Any]:
    """Return what an app is given that encrypts values and keeps large ones elsewhere."""
    bucket = Bucket(objects, weather, Random(f"bucket {seed}"))
    return {
        "codecs": [hf.Encryption(KEYS, secrets=SeededSecrets(Random(f"secrets {seed}")))],
        "artifacts": hf.Artifacts(bucket, offload_bytes=OFFLOAD_BYTES),
    }


def codecs_of(objects: dict[str, tuple[int, bytes]], weather: Weather, seed: str) -> list[hf.PayloadCodec]:
    """Return what a client of a store has that is none of the nodes."""
    given = sealing(objects, weather, seed)
    return [*given["codecs"], *given["artifacts"].codecs]


class _Reader:
    """Reads offloaded values without waiting."""

    name = "offload"

    def __init__(self, objects: dict[str, tuple[int, bytes]], on_missing: Callable[[str], None]) -> None:
        self._objects = objects
        self._on_missing = on_missing

    async def open(self, store: Store) -> None:
        """Do nothing."""

    async def encode(self, payloads: Sequence[Payload]) -> list[bytes | None]:
        """Refuse: it only reads."""
        raise NotImplementedError

    async def decode(self, payloads: Sequence[Payload]) -> list[bytes | str]:
        """Return each value; what is missing is reported."""
        return [self._find(*payload) for payload in payloads]

    def _find(self, scope: str, data: bytes) -> bytes | str:
        reference: dict[str, Any] = msgspec.json.decode(data)
        key = f"{reference['place']}/values/{run_path(scope)}/{reference['sha256']}"
        if key not in self._objects:
            self._on_missing(f"{scope}: a value is referred to, and is not there: {key}")
            return "it is not there"
        return self._objects[key][1]

    def fingerprint(self, scope: str, sha256: str) -> str:
        """Return the digest."""
        return sha256


class SealedView:
    """What someone sees who has the keys and the bucket."""

    def __init__(self, store: Store, objects: dict[str, tuple[int, bytes]], on_missing: Callable[[str], None]) -> None:
        self.store = SealingStore(store, [hf.Encryption(KEYS), _Reader(objects, on_missing)])
        self._histories: dict[str, list[Event]] = {}
        self._mailboxes: dict[str, list[Signal]] = {}

    def events_of(self, run_id: str, count: int) -> list[Event]:
        """Return the history of a run, which has so many events."""
        known = self._histories.setdefault(run_id, [])
        while len(known) < count:
            known += at_once(self.store.read_events(run_id, len(known)))
        return known[:count]

    def mailbox_of(self, run: Run) -> list[Signal]:
        """Return the signals of a run. Each is opened once; that it is consumed changes nothing else of it."""
        run_id = run.head.run_id
        known = self._mailboxes.setdefault(run_id, [])
        while len(known) < len(run.signals):
            after = known[-1].inbox_seq if known else 0
            known += at_once(self.store.find(MailboxQuery(run_id=run_id, consumed=True, after=after)))
        return [
            opened if opened.consumed_seq == stored.consumed_seq else replace(opened, consumed_seq=stored.consumed_seq)
            for opened, stored in zip(known, run.signals, strict=True)
        ]

    def snapshot_of(self, run_id: str) -> RuntimeSnapshot | None:
        """Return the snapshot of a run."""
        [loaded] = at_once(self.store.load([run_id]))
        return None if loaded is None else loaded.head.snapshot


def at_once(work: Coroutine[Any, Any, T]) -> T:
    """Return the result of a coroutine that does not wait."""
    try:
        work.send(None)
    except StopIteration as done:
        result: T = done.value
        return result
    raise AssertionError("the world may not wait")
