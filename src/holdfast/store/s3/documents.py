"""Data that is not part of a run: tokens, keys, plans, declarations, and audit entries without a run.

All tokens are in one object, and so are the registered versions of plans: a document that is read again if it has
changed, and replaced on condition that it has not. The others are separate objects, by name.
"""

import asyncio
from collections.abc import Callable, Iterable, Sequence
from typing import Generic, TypeVar
from urllib.parse import unquote

import msgspec
from msgspec import Struct

from holdfast.clock import Secrets
from holdfast.core.access import AccessToken
from holdfast.core.audit import AuditEntry
from holdfast.core.declarations import WorkflowDeclaration
from holdfast.core.instants import Instant
from holdfast.core.keys import storage_key
from holdfast.core.plans import RegisteredPlan
from holdfast.errors import StoreCorrupt
from holdfast.store import port
from holdfast.store.memory.host_locks import HostLocks
from holdfast.store.memory.plans import Body
from holdfast.store.s3.bucket import Bucket, Unchanged, for_each

T = TypeVar("T")
D = TypeVar("D", bound=Struct)

AUDIT = "audit"
BODIES = "plans"


class TokensDocument(Struct, frozen=True):
    """All access tokens."""

    tokens: dict[str, AccessToken] = {}
    mark: str = ""


class PlansDocument(Struct, frozen=True):
    """All registered versions of plans."""

    plans: tuple[RegisteredPlan, ...] = ()
    mark: str = ""


class LocksDocument(Struct, frozen=True):
    """All host locks: the last holder of each, and which are released."""

    locks: tuple[port.HostLock, ...] = ()
    released: tuple[str, ...] = ()
    mark: str = ""


def locks_of(document: LocksDocument) -> HostLocks:
    """Return the locks in a document."""
    locks = HostLocks()
    locks._locks = {lock.name: lock for lock in document.locks}
    locks._released = set(document.released)
    return locks


def locks_document(locks: HostLocks, mark: str) -> LocksDocument:
    """Return locks in their stored form."""
    return LocksDocument(tuple(locks._locks.values()), tuple(sorted(locks._released)), mark)


class Document(Generic[D]):
    """One object that is changed by many processes."""

    def __init__(self, bucket: Bucket, secrets: Secrets, key: str, empty: D) -> None:
        self._bucket = bucket
        self._secrets = secrets
        self._key = key
        self._empty = empty
        self._content = empty
        self._etag: str | None = None

    async def read(self) -> D:
        """Return the document as this request reads it, whatever concurrent requests read."""
        content, etag = self._content, self._etag
        found = await self._bucket.get_newer(self._key, etag)
        if found is None:
            content, etag = self._empty, None
        elif not isinstance(found, Unchanged):
            content, etag = _decode(found.data, type(self._empty), self._key), found.etag
        self._content, self._etag = content, etag
        return content

    async def read_listed(self, etag: str) -> D:
        """Return the document as shown in a listing; it is not read again if it has not changed since."""
        return self._content if etag == self._etag else await self.read()

    async def change(self, decide: Callable[[D, str], tuple[D, T]]) -> T:
        """Replace the document by the result of `decide`, deciding again if it has changed meanwhile.

        A decision that returns the document itself changes nothing.
        """
        while True:
            before = await self.read()
            mark = self._secrets.new_secret()[:16]
            content, answer = decide(before, mark)
            if content is before:
                return answer
            data = msgspec.json.encode(content)
            if self._etag is None:
                written = await self._bucket.create(self._key, data, mark.encode())
            else:
                written = await self._bucket.replace(self._key, data, self._etag, mark.encode())
            if written is not None:
                self._content, self._etag = _decode(written.data, type(self._empty), self._key), written.etag
                return answer


class Objects:
    """Objects that are found by name."""

    def __init__(self, bucket: Bucket) -> None:
        self._bucket = bucket
        self._entries: dict[str, AuditEntry] = {}

    # --- keys and declarations

    async def put_key(self, name: str, key: str) -> str:
        """Store a key unless there is one; return the stored one."""
        place = storage_key("keys", name)
        stored = await self._bucket.get(place)  # it exists, except for the first process
        if stored is None and await self._bucket.create(place, key.encode(), key.encode()) is None:
            stored = await self._bucket.get(place)
        return key if stored is None else stored.data.decode()

    async def get_key(self, name: str) -> str | None:
        """Return a key, or None."""
        found = await self._bucket.get(storage_key("keys", name))
        return None if found is None else found.data.decode()

    async def put_definitions(self, definitions: Sequence[WorkflowDeclaration]) -> None:
        """Store what versions of workflows declare."""
        await asyncio.gather(
            *(
                self._bucket.put(_definition_key((one.plan_id, one.plan_version)), msgspec.json.encode(one))
                for one in definitions
            )
        )

    async def get_definition(self, plan: port.Plan) -> WorkflowDeclaration | None:
        """Return what a version declares, or None."""
        found = await self._bucket.get(_definition_key(plan))
        return None if found is None else _decode(found.data, WorkflowDeclaration, _definition_key(plan))

    # --- the bodies of plans

    async def put_body(self, tenant: str, sha256: str, body: bytes, now: Instant) -> None:
        """Store a body with the time at which it was put; if the body is known, only the time changes."""
        key = storage_key(BODIES, tenant, sha256)
        known = await self._bucket.get(key)
        kept = body if known is None else known.data.partition(b"\n")[2]
        await self._bucket.put(key, b"%d\n%b" % (now, kept))

    async def get_body(self, tenant: str, sha256: str) -> bytes | None:
        """Return a body, or None."""
        found = await self._bucket.get(storage_key(BODIES, tenant, sha256))
        return None if found is None else found.data.partition(b"\n")[2]

    async def bodies(self) -> dict[Body, Instant]:
        """Return all bodies, with the times at which they were last put."""
        listed = await self._bucket.list(BODIES)
        found = await for_each(self._bucket.get, [each.key for each in listed])
        known: dict[Body, Instant] = {}
        for each, stored in zip(listed, found, strict=True):
            if stored is not None:
                tenant, sha256 = names_in(each.key)[1:]
                known[tenant, sha256] = int(stored.data.partition(b"\n")[0])
        return known

    async def delete_bodies(self, bodies: Iterable[Body]) -> None:
        """Delete bodies."""
        await self._bucket.delete([storage_key(BODIES, *body) for body in bodies])

    # --- the audit log, without the entries in heads

    async def append_audit(self, entries: Iterable[AuditEntry]) -> None:
        """Append entries that already have their time."""
        await asyncio.gather(
            *(self._bucket.put(_audit_key(entry.at, entry.entry_id), msgspec.json.encode(entry)) for entry in entries)
        )

    async def audit(self) -> list[AuditEntry]:
        """Return all entries. Each is read once, because entries do not change."""
        keys = [each.key for each in await self._bucket.list(AUDIT)]
        new = [key for key in keys if key not in self._entries]
        found = await for_each(self._bucket.get, new)
        read = {
            key: _decode(stored.data, AuditEntry, key)
            for key, stored in zip(new, found, strict=True)
            if stored is not None
        }
        self._entries = {key: entry for key, entry in (self._entries | read).items() if key in set(keys)}
        return list(self._entries.values())

    async def delete_audit(self, places: Iterable[tuple[Instant, str]]) -> None:
        """Delete entries; the entries in heads are not here."""
        known = set(self._entries)
        await self._bucket.delete([key for place in places if (key := _audit_key(*place)) in known])


def names_in(key: str) -> list[str]:
    """Return the parts from which a key was made."""
    return ["" if part == "%" else unquote(part) for part in key.split("/")]


def _definition_key(plan: port.Plan) -> str:
    return storage_key("definitions", *plan)


def _audit_key(at: Instant, entry_id: str) -> str:
    return storage_key(AUDIT, f"{at:020d}_{entry_id}")


def _decode(data: bytes, kind: type[T], key: str) -> T:
    try:
        return msgspec.json.decode(data, type=kind)
    except (msgspec.MsgspecError, UnicodeError) as problem:
        raise StoreCorrupt(f"the object {key} cannot be read", key=key) from problem
