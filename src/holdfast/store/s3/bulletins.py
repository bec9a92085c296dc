"""Bulletins in the bucket: one object for each kind and hour, `bulletins/KIND/HOUR.json`.

An object is read again only if it has changed, and is deleted when everything in it has expired. A process looks for
such objects when it puts the first bulletin of an hour. The server's clock is assumed not to be set back by hours:
bulletins that were put after the new time and had expired would reappear.
"""

import asyncio
from collections.abc import Callable, Mapping, Sequence

from msgspec import Raw, Struct

from holdfast.clock import Secrets
from holdfast.core.instants import Instant
from holdfast.core.keys import storage_key
from holdfast.store.memory.bulletins import find_among
from holdfast.store.queries import BulletinQuery
from holdfast.store.s3.bucket import Bucket
from holdfast.store.s3.documents import Document
from holdfast.store.types import Bulletin

PREFIX = "bulletins"
HOUR = 3_600_000_000


class BulletinsDocument(Struct, frozen=True):
    """The bulletins of a kind that were put within an hour."""

    bulletins: tuple[Bulletin, ...] = ()
    mark: str = ""


class StoredBulletins:
    """The bulletins of a bucket."""

    def __init__(self, bucket: Bucket, secrets: Secrets) -> None:
        self._bucket = bucket
        self._secrets = secrets
        self._documents: dict[str, Document[BulletinsDocument]] = {}
        self._swept_hour = -1
        self._kept: dict[str, tuple[int, tuple[Bulletin, ...]]] = {}

    async def put(self, kind: str, bodies: Mapping[str, Raw], keep_ms: int, now: Instant) -> list[bool]:
        """Put bulletins, except under ids that have one from this hour or the last; delete what has expired."""
        if self._swept_hour != now // HOUR:
            await self._sweep(now)
            self._swept_hour = now // HOUR
        before = await self._document(kind, now - HOUR).read()
        known = {each.bulletin_id for each in before.bulletins if each.expires_at > now}
        return await self._document(kind, now).change(_adding(kind, bodies, now, keep_ms, known))

    async def find(self, query: BulletinQuery, now: Instant) -> list[Bulletin]:
        """Return the bulletins that match the query."""
        return _found(await self._all(query.kind), query, now)

    async def find_announced(self, query: BulletinQuery, announced: int, now: Instant) -> list[Bulletin]:
        """Return the bulletins that match the query; read nothing if none was announced since the last read."""
        count, kept = self._kept.get(query.kind, (-1, ()))
        if count != announced:
            kept = await self._all(query.kind)
            self._kept[query.kind] = announced, kept
        return _found(kept, query, now)

    async def _all(self, kind: str) -> tuple[Bulletin, ...]:
        found = await self._read(storage_key(PREFIX, kind))
        return tuple(sorted((each for some in found.values() for each in some), key=lambda each: each.at))

    def _document(self, kind: str, now: Instant) -> Document[BulletinsDocument]:
        return self._at(storage_key(PREFIX, kind, f"{now // HOUR:012d}.json"))

    def _at(self, key: str) -> Document[BulletinsDocument]:
        if key not in self._documents:
            self._documents[key] = Document(self._bucket, self._secrets, key, BulletinsDocument())
        return self._documents[key]

    async def _read(self, prefix: str) -> dict[str, tuple[Bulletin, ...]]:
        listed = await self._bucket.list(prefix)
        found = await asyncio.gather(*(self._at(each.key).read_listed(each.etag) for each in listed))
        return {each.key: document.bulletins for each, document in zip(listed, found, strict=True)}

    async def _sweep(self, now: Instant) -> None:
        found = await self._read(PREFIX)
        own_hour = f"{now // HOUR:012d}.json"
        gone = [
            key
            for key, bulletins in found.items()
            if not key.endswith(own_hour) and all(each.expires_at <= now for each in bulletins)
        ]
        await self._bucket.delete(gone)
        self._documents = {key: self._documents[key] for key in found if key not in gone}


def _found(bulletins: Sequence[Bulletin], query: BulletinQuery, now: Instant) -> list[Bulletin]:
    """Return those that match the query. Of two that were put under one id concurrently, the first."""
    first: dict[str, Bulletin] = {}
    for each in bulletins:
        if each.expires_at > now:
            first.setdefault(each.bulletin_id, each)
    return find_among(first.values(), query, now)


def _adding(
    kind: str, bodies: Mapping[str, Raw], now: Instant, keep_ms: int, known: set[str]
) -> Callable[[BulletinsDocument, str], tuple[BulletinsDocument, list[bool]]]:
    """Return the function that adds bulletins to a document, and reports which of them are new."""

    def decide(document: BulletinsDocument, mark: str) -> tuple[BulletinsDocument, list[bool]]:
        left: Sequence[Bulletin] = [each for each in document.bulletins if each.expires_at > now]
        taken = known | {each.bulletin_id for each in left}
        new = [
            Bulletin(kind=kind, bulletin_id=each, at=now, expires_at=now + keep_ms * 1_000, body=body)
            for each, body in bodies.items()
            if each not in taken
        ]
        answers = [each not in taken for each in bodies]
        return (BulletinsDocument((*left, *new), mark), answers) if new else (document, answers)

    return decide
