"""Objects with conditional writes: the little of S3 that the store needs, and what servers make of it.

Three things happen to a request that a database would hide, and all are dealt with here:

* **Throttled or failed** (503 SlowDown, 500, a reset connection): it is sent again after a growing pause.
* **Timed out**: the outcome is unknown. A write is sent again under the same condition; if the first one had arrived,
  the second is refused, and the object is looked up.
* **Refused** (412, 409, or 404 for a replacement): someone else was faster, or it was this very writer, whose first
  try arrived though its answer was lost. Every conditional write carries a *mark* that no other writer has; if the
  object holds it, the write has happened.

`check_conditions` proves at start-up, under the prefix itself, that the server honours the conditions. A server that
ignores them would let two owners of a run write two histories.
"""

import asyncio
import os
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from datetime import timedelta
from typing import Any, NamedTuple, TypeVar

from holdfast.clock import Rng, SystemRng, SystemSecrets
from holdfast.core.instants import Instant
from holdfast.errors import (
    CheckpointOwnershipCapabilityError,
    EngineError,
    InvalidInput,
    StoreUnavailable,
)

try:
    import obstore
    from obstore.exceptions import (
        AlreadyExistsError,
        BaseError,
        NotModifiedError,
        NotSupportedError,
        PermissionDeniedError,
        PreconditionError,
        UnauthenticatedError,
    )
    from obstore.store import from_url
except ImportError as absent:
    raise StoreUnavailable("a store in a bucket needs a package: pip install 'holdfast[s3]'", missing="obstore") from (
        absent
    )

T = TypeVar("T")

OPEN_REQUESTS = 32
"""How many requests a process has open at once."""

REQUEST_S = 6
"""How long a request may take before its outcome is unknown. A lease (10 s) survives an answer that is lost."""

FIRST_PAUSE_S = 0.05
MOST_PAUSE_S = 3.0

PROBES = 3
"""How often each condition is tried at start-up."""

_LOST = (AlreadyExistsError, PreconditionError)
_MISSING = (FileNotFoundError,)  # which obstore's NotFoundError is
_HOPELESS = (PermissionDeniedError, UnauthenticatedError, NotSupportedError)
_REFUSING = ("401 Unauthorized", "403 Forbidden", "NoSuchBucket", "501 Not Implemented", "builder error")
_RACED = ("409 Conflict", "ConditionalRequestConflict")
"""What a server answers if another conditional write to the same object is under way: neither has been decided."""


class Stored(NamedTuple):
    """An object as it was read."""

    data: bytes
    etag: str
    modified_at: Instant


class Listed(NamedTuple):
    """An object as a listing shows it."""

    key: str
    etag: str
    size: int


class Unchanged:
    """The object is still the one that the caller has."""


UNCHANGED = Unchanged()


class Bucket:
    """The objects under one prefix of a bucket: any store of `obstore` that has conditional writes."""

    def __init__(self, objects: Any, *, patience_s: float = 30.0, rng: Rng | None = None) -> None:
        self._objects = objects
        self._patience_s = patience_s
        self._rng = rng or SystemRng()
        self._slots = asyncio.Semaphore(OPEN_REQUESTS)
        self.requests: Counter[str] = Counter()
        """How many requests were sent, by kind."""

    @classmethod
    def at(cls, address: str, *, patience_s: float = 30.0) -> "Bucket":
        """Return the bucket at an address. Credentials, region and endpoint come from the environment."""
        try:
            is_plain = os.environ.get("AWS_ALLOW_HTTP", "").lower() in ("1", "true")  # options hide the variable
            objects = from_url(
                address,
                client_options={"timeout": timedelta(seconds=REQUEST_S), "allow_http": is_plain},
                retry_config={"max_retries": 0},  # a retry that hides its first try hides what became of it
            )
        except (BaseError, ValueError) as problem:
            raise InvalidInput(f"the address of the store cannot be used: {problem}", field="store") from problem
        return cls(objects, patience_s=patience_s)

    # --- reading

    async def get(self, key: str) -> Stored | None:
        """Return an object, or None."""
        found = await self.get_newer(key, None)
        assert not isinstance(found, Unchanged)
        return found

    async def get_newer(self, key: str, etag: str | None) -> Stored | Unchanged | None:
        """Return an object, unless it is the one that the caller has; None if there is none."""
        options: Any = None if etag is None else {"if_none_match": etag}

        async def ask() -> Stored | Unchanged | None:
            try:
                answer = await obstore.get_async(self._objects, key, options=options)
                data = bytes(await answer.bytes_async())
            except NotModifiedError:
                return UNCHANGED
            except _MISSING as problem:
                if "NoSuchBucket" in str(problem):
                    raise
                return None
            meta = answer.meta
            return Stored(data, meta["e_tag"] or "", round(meta["last_modified"].timestamp() * 1_000_000))

        return await self._patiently("GET", ask)

    async def list(self, prefix: str, after: str = "") -> list[Listed]:
        """Return the objects under a prefix, in order; with `after` only those whose keys come later."""

        async def ask() -> list[Listed]:
            found = []
            async for page in obstore.list(self._objects, prefix, offset=after or None, chunk_size=1_000):
                found += [Listed(meta["path"], meta["e_tag"] or "", meta["size"]) for meta in page]
                if len(page) == 1_000:
                    self.requests["LIST"] += 1
            return found

        return sorted(await self._patiently("LIST", ask))

    # --- writing

    async def put(self, key: str, data: bytes) -> str:
        """Write an object whatever there was; return its etag."""

        async def ask() -> str:
            return str((await obstore.put_async(self._objects, key, data))["e_tag"])

        return await self._patiently("PUT", ask)

    async def create(self, key: str, data: bytes, mark: bytes) -> Stored | None:
        """Write an object if there is none. None: there is another. `mark` is in `data`, and in no other's."""
        return await self._write(key, data, mark, "create")

    async def replace(self, key: str, data: bytes, etag: str, mark: bytes) -> Stored | None:
        """Write an object if it is still the one with this etag. None: it is not."""
        return await self._write(key, data, mark, {"e_tag": etag})

    async def _write(self, key: str, data: bytes, mark: bytes, mode: Any) -> Stored | None:
        async def ask() -> Stored | None:
            try:
                answer = await obstore.put_async(self._objects, key, data, mode=mode)
            except (*_LOST, *_MISSING) as problem:
                if any(word in str(problem) for word in ("NoSuchBucket", *_RACED)):
                    raise  # it is sent again, or reported
                return None
            return Stored(data, answer["e_tag"] or "", 0)

        written = await self._patiently("PUT", ask)
        if written is None:
            found = await self.get(key)
            if found is not None and mark in found.data:
                return found
        return written

    async def delete(self, keys: Sequence[str]) -> None:
        """Delete objects; those that are missing are no error."""

        async def ask() -> None:
            try:
                await obstore.delete_async(self._objects, list(keys))
            except _MISSING as problem:
                if "NoSuchBucket" in str(problem):
                    raise

        if keys:
            await self._patiently("DELETE", ask)

    # --- sending, and sending again

    async def _patiently(self, kind: str, ask: Callable[[], Awaitable[T]]) -> T:
        """Send a request, again after a pause if the server cannot answer now, until the patience ends."""
        pause = FIRST_PAUSE_S
        last: Exception = TimeoutError()
        try:
            async with asyncio.timeout(self._patience_s):
                while True:
                    try:
                        async with self._slots:
                            self.requests[kind] += 1
                            return await ask()
                    except (BaseError, OSError) as problem:
                        if _is_hopeless(problem):
                            raise unavailable(problem) from problem
                        last = problem
                    self.requests["again"] += 1
                    await asyncio.sleep(pause * (1.0 - self._rng.fraction() / 2))
                    pause = min(2 * pause, MOST_PAUSE_S)
        except TimeoutError:
            raise unavailable(last) from last

    # --- the self-test

    async def check_conditions(self) -> None:
        """Prove that the server honours the conditions of writes, or raise with what it did instead."""
        for number in range(PROBES):
            await self._probe(f"probe/{SystemSecrets().new_secret()[:16]}-{number}")

    async def _probe(self, key: str) -> None:
        try:
            first = await self._tried(key, b"first", "create")
            if first is None:
                raise unsafe("it refused to create an object that was not there", "If-None-Match")
            if await self._tried(key, b"second", "create") is not None:
                raise unsafe("it created an object over one that was there", "If-None-Match")
            second = await self._tried(key, b"third", {"e_tag": first})
            if second is None:
                raise unsafe("it refused to replace an object that had not changed", "If-Match")
            if await self._tried(key, b"fourth", {"e_tag": first}) is not None:
                raise unsafe("it replaced an object that had changed", "If-Match")
            rivals = [self._tried(key, b"rival %d" % each, {"e_tag": second}) for each in range(4)]
            won = [etag for etag in await asyncio.gather(*rivals) if etag is not None]
            if len(won) != 1:
                raise unsafe(f"of four replacements at the same time it accepted {len(won)}", "If-Match")
            found = await self.get(key)
            if found is None or found.etag != won[0]:
                raise unsafe("it did not return what was written last", "read after write")
        finally:
            await self.delete([key])

    async def _tried(self, key: str, data: bytes, mode: Any) -> str | None:
        """Write an object under a condition; return its etag, or None if the write was refused."""
        try:
            written = await self._write(key, data, data, mode)
        except (NotImplementedError, NotSupportedError, StoreUnavailable) as problem:
            if isinstance(problem, StoreUnavailable) and "501 Not Implemented" not in str(problem.__cause__):
                raise
            raise unsafe("it does not know the condition", "If-Match") from problem
        return None if written is None else written.etag


def unsafe(what: str, header: str) -> CheckpointOwnershipCapabilityError:
    """Return the error of a server that does not honour a condition."""
    return CheckpointOwnershipCapabilityError(
        f"checkpoint_ownership='cas-required' needs the store capability conditional_batch, and this object storage "
        f"does not have it ({header}): {what}",
        capability="conditional_batch",
        feature="checkpoint_ownership='cas-required'",
        store="S3Store",
        header=header,
        found=what,
    )


def _is_hopeless(problem: Exception) -> bool:
    return isinstance(problem, _HOPELESS) or any(word in str(problem) for word in _REFUSING)


def unavailable(problem: Exception) -> EngineError:
    """Return the error of a bucket that did not answer as it should. The text of the other side is not repeated."""
    text = str(problem)
    if isinstance(problem, PermissionDeniedError | UnauthenticatedError) or "401 Un" in text or "403 For" in text:
        words = "it refuses the credentials of this process, or does not permit this to them"
    elif "NoSuchBucket" in text:
        words = "there is no such bucket"
    else:
        words = type(problem).__name__
    return StoreUnavailable(f"the bucket of the store: {words}")
