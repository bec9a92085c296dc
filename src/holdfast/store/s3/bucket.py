"""Objects with conditional writes: the part of S3 that the store needs, and how it deals with the behaviour of servers.

Three things can happen to a request that a database would hide, and all are handled here:

* **Throttled or failed** (503 SlowDown, 500, a reset connection): the request is retried after a growing pause.
* **Timed out**: the outcome is unknown. A write is retried under the same condition; if the first one had arrived, the
  second is refused, and the object is looked up. The time-out follows from how long answers have taken (`AnswerTime`):
  a lost answer holds up a whole batch of runs, and the lease of their node.
* **Refused** (412, 409, or 404 for a replacement): another writer was faster, or this very writer, whose first try
  arrived although its answer was lost. Every conditional write carries a *mark* that no other writer has; if the
  object contains it, the write has happened.

`check_conditions` proves at start-up, under the prefix itself, that the server honours the conditions. With a server
that ignores them, two owners of a run could write two histories.
"""

import asyncio
import os
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Sequence
from datetime import timedelta
from typing import Any, NamedTuple, TypeVar

from holdfast.clock import Rng, SystemRng, SystemSecrets, elapsed_us
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
except ImportError as absent:
    raise StoreUnavailable("a store in a bucket needs a package: pip install 'holdfast[s3]'", missing="obstore") from (
        absent
    )

from holdfast.store.object_storage import open_objects  # which needs the package

T = TypeVar("T")
U = TypeVar("U")

OPEN_REQUESTS = 32
"""How many requests a process has open at the same time."""

REQUEST_S = 6
"""The maximum time of a request, after which its outcome is unknown. A lease (10 s) survives a lost answer."""

FIRST_REQUEST_S = 1.0
"""The time-out of a request before anything is known about its server."""

LEAST_REQUEST_S = 0.5
"""The minimum time-out of a request, however fast the others were."""

BYTES_PER_S = 1_000_000
"""The minimum speed at which the body of a request is sent."""

PAGE = 1_000
"""How many objects one listing returns."""

FIRST_PAUSE_S = 0.05
MOST_PAUSE_S = 3.0

KEY_BYTES = 1_024
"""The maximum length of a key with its prefix, as in S3."""

PART_BYTES = 255
"""The length of a key part that every server accepts. Some use each part as a file name."""

LONG_PART_TRIES = 6
"""How often to try whether a server accepts longer parts, before concluding that it does not."""

PROBES = 3
"""How often each condition is tried at start-up."""

_LOST = (AlreadyExistsError, PreconditionError)
_MISSING = (FileNotFoundError,)  # the base class of obstore's NotFoundError
_HOPELESS = (PermissionDeniedError, UnauthenticatedError, NotSupportedError)
_REFUSING = ("401 Unauthorized", "403 Forbidden", "NoSuchBucket", "501 Not Implemented", "builder error")
_RACED = ("409 Conflict", "ConditionalRequestConflict")
"""A server's answer while another conditional write to the same object is in progress: neither has been decided."""


AT_ONCE = 1_000
"""How many objects are requested concurrently, at most: each pending one takes memory."""


async def for_each(work: Callable[[U], Awaitable[T]], items: Iterable[U]) -> list[T]:
    """Do the same for many items, many of them concurrently, and return the answers in order."""
    wanted, answers = list(items), list[T]()
    for first in range(0, len(wanted), AT_ONCE):
        answers += await asyncio.gather(*map(work, wanted[first : first + AT_ONCE]))
    return answers


class Stored(NamedTuple):
    """An object as it was read."""

    data: bytes
    etag: str
    modified_at: Instant


class Listed(NamedTuple):
    """An object as shown in a listing."""

    key: str
    etag: str
    size: int


class Unchanged:
    """The object is still the version that the caller has."""


UNCHANGED = Unchanged()


class AnswerTime:
    """How long to wait for an answer, based on recent answers: their mean plus four times their deviation.

    TCP decides in the same way when to retransmit a segment, including the first second. The time-out grows when a
    server slows down as a whole.
    """

    def __init__(self) -> None:
        self._mean_s = FIRST_REQUEST_S / 4
        self._deviation_s = 3 * FIRST_REQUEST_S / 16

    def note(self, took_s: float) -> None:
        """Note how long an answer took."""
        self._deviation_s += (abs(took_s - self._mean_s) - self._deviation_s) / 4
        self._mean_s += (took_s - self._mean_s) / 8

    def bound_s(self, tries: int, size: int) -> float:
        """Return how long to wait for the answer to a request with a body of this size, after this many tries."""
        least = max(LEAST_REQUEST_S, self._mean_s + 4 * self._deviation_s) + size / BYTES_PER_S
        return min(float(REQUEST_S), least * 2.0**tries)


class Bucket:
    """The objects under one prefix of a bucket: any store of `obstore` that has conditional writes."""

    def __init__(self, objects: Any, *, patience_s: float = 30.0, rng: Rng | None = None) -> None:
        self._objects = objects
        self.patience_s = patience_s
        """For how long a request is retried while the server cannot answer."""
        self._rng = rng or SystemRng()
        self._slots = asyncio.Semaphore(OPEN_REQUESTS)
        self._answer_time = AnswerTime()
        prefix = getattr(objects, "prefix", None)
        self._prefix_bytes = len(prefix.encode()) + 1 if isinstance(prefix, str) else 0
        self._takes_long_parts: bool | None = None
        self.requests: Counter[str] = Counter()
        """How many requests were sent, by kind."""

    @classmethod
    def at(cls, address: str, *, patience_s: float = 30.0) -> "Bucket":
        """Return the bucket at an address. Credentials, region and endpoint come from the environment."""
        try:
            is_plain = os.environ.get("AWS_ALLOW_HTTP", "").lower() in ("1", "true")  # options hide the variable
            objects = open_objects(
                address,
                "store",
                client_options={"timeout": timedelta(seconds=REQUEST_S), "allow_http": is_plain},
                retry_config={"max_retries": 0},  # a retry that hides its first try hides the outcome of that try
            )
        except (BaseError, ValueError) as problem:
            raise InvalidInput(f"the address of the store cannot be used: {problem}", field="store") from problem
        return cls(objects, patience_s=patience_s)

    # --- keys

    async def unfit(self, key: str) -> InvalidInput | None:
        """Return why nothing can be stored under a key, or None. Keys are ASCII."""
        size = self._prefix_bytes + len(key)
        if size > KEY_BYTES:
            words = f"its key in the bucket would have {size} bytes, and a bucket takes {KEY_BYTES}"
            return InvalidInput(f"the name is too long: {words}: {key[:80]!r}…", field="key", most=KEY_BYTES)
        if max(map(len, key.split("/"))) > PART_BYTES and not await self._long_parts():
            words = f"this server takes at most {PART_BYTES} bytes for each part of a key, as it is percent-encoded"
            return InvalidInput(f"the name is too long: {words}: {key[:80]!r}…", field="key", most=PART_BYTES)
        return None

    async def _check_key(self, key: str) -> None:
        problem = await self.unfit(key)
        if problem is not None:
            raise problem

    async def _long_parts(self) -> bool:
        """Return whether the server accepts keys with long parts: this is tried once per process."""
        key = f"probe/{'x' * (3 * PART_BYTES)}"
        for _ in range(LONG_PART_TRIES):
            if self._takes_long_parts is not None:
                break
            try:
                self.requests["PUT"] += 1
                await self._answered(lambda: obstore.put_async(self._objects, key, b""), REQUEST_S)
            except (BaseError, OSError):
                await asyncio.sleep(FIRST_PAUSE_S)
            else:
                self._takes_long_parts = True
                await self.delete([key])
        if self._takes_long_parts is None:
            await self.put("probe/short", b"")  # fails if the server is away, in which case nothing is known
            self._takes_long_parts = False
        return self._takes_long_parts

    # --- reading

    async def get(self, key: str) -> Stored | None:
        """Return an object, or None."""
        found = await self.get_newer(key, None)
        assert not isinstance(found, Unchanged)
        return found

    async def get_newer(self, key: str, etag: str | None) -> Stored | Unchanged | None:
        """Return an object, unless the caller has that version; None if it does not or cannot exist."""
        if await self.unfit(key) is not None:
            return None
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

    async def list(self, prefix: str, after: str = "", until: str | None = None) -> list[Listed]:
        """Return the objects under a prefix, in order; only those whose keys are greater than `after`.

        With `until` it ends after the page that reaches it. A prefix consists of whole parts of keys.
        """

        found: list[Listed] = []
        pages: AsyncIterator[Any] | None = None

        async def ask() -> Any:
            nonlocal pages
            if pages is None:  # a retry continues where the last try stopped
                offset = max(found).key if found else after
                pages = aiter(obstore.list(self._objects, prefix, offset=offset or None, chunk_size=PAGE))
            try:
                return await anext(pages, None) or ()
            except BaseException:
                pages = None
                raise

        while True:
            page = await self._patiently("LIST", ask, slower=1)
            found.extend(Listed(meta["path"], meta["e_tag"] or "", meta["size"]) for meta in page)
            if len(page) < PAGE or (until is not None and page[-1]["path"] >= until):
                return sorted(found)

    # --- writing

    async def put(self, key: str, data: bytes) -> str:
        """Write an object, replacing any existing one; return its etag."""
        await self._check_key(key)

        async def ask() -> str:
            return str((await obstore.put_async(self._objects, key, data))["e_tag"])

        return await self._patiently("PUT", ask, len(data))

    async def create(self, key: str, data: bytes, mark: bytes) -> Stored | None:
        """Write an object if there is none. None: there is one. `mark` is in `data`, and in that of no other writer."""
        return await self._write(key, data, mark, "create")

    async def replace(self, key: str, data: bytes, etag: str, mark: bytes) -> Stored | None:
        """Write an object if it still has this etag. None: it does not."""
        return await self._write(key, data, mark, {"e_tag": etag})

    async def _write(self, key: str, data: bytes, mark: bytes, mode: Any) -> Stored | None:
        await self._check_key(key)

        async def ask() -> Stored | None:
            try:
                answer = await obstore.put_async(self._objects, key, data, mode=mode)
            except (*_LOST, *_MISSING) as problem:
                if any(word in str(problem) for word in ("NoSuchBucket", *_RACED)):
                    raise  # it is retried, or reported
                return None
            return Stored(data, answer["e_tag"] or "", 0)

        written = await self._patiently("PUT", ask, len(data))
        if written is None:
            found = await self.get(key)
            if found is not None and mark in found.data:
                return found
        return written

    async def delete(self, keys: Sequence[str]) -> None:
        """Delete objects; missing ones are no error."""

        async def ask() -> None:
            try:
                await obstore.delete_async(self._objects, list(keys))
            except _MISSING as problem:
                if "NoSuchBucket" in str(problem):
                    raise

        if keys:
            await self._patiently("DELETE", ask)

    # --- sending and retrying

    async def _patiently(self, kind: str, ask: Callable[[], Awaitable[T]], size: int = 0, *, slower: int = 0) -> T:
        """Send a request, and retry it after a pause while the server cannot answer, until the patience ends.

        The time-out of an answer follows from recent answers, doubled `slower` times. The time in which a request waits
        for others of this process does not count.
        """
        pause, left_s, tries = FIRST_PAUSE_S, self.patience_s, 0
        while True:
            async with self._slots:
                self.requests[kind] += 1
                began = elapsed_us()
                try:
                    bound_s = min(self._answer_time.bound_s(tries + slower, size), left_s)
                    return await self._answered(ask, bound_s)
                except (BaseError, OSError) as problem:  # includes TimeoutError
                    if _is_hopeless(problem):
                        raise unavailable(problem) from problem
                    last = problem
                left_s -= (elapsed_us() - began) / 1e6
            pause_s = pause * (1.0 - self._rng.fraction() / 2)
            left_s -= pause_s
            if left_s <= 0:
                raise unavailable(last) from last
            tries += 1
            self.requests["again"] += 1
            await asyncio.sleep(pause_s)
            pause = min(2 * pause, MOST_PAUSE_S)

    async def _answered(self, ask: Callable[[], Awaitable[T]], bound_s: float) -> T:
        """Return the answer to a request, if it arrives in time."""
        began = elapsed_us()
        async with asyncio.timeout(bound_s):
            answer = await ask()
        self._answer_time.note((elapsed_us() - began) / 1e6)
        return answer

    # --- the self-test

    async def check_conditions(self) -> None:
        """Prove that the server honours the conditions of writes, or raise an error with what it did instead."""
        mine = SystemSecrets().new_secret()[:16]
        probes = (self._probe_creation, self._probe_replacement, self._probe_race)
        keys = {f"probe/{mine}-{place}": probes[place % len(probes)] for place in range(PROBES * len(probes))}
        try:
            found = await asyncio.gather(*(probe(key) for key, probe in keys.items()), return_exceptions=True)
        finally:
            await self.delete(list(keys))
        for problem in found:
            if problem is not None:
                raise problem

    async def _probe_creation(self, key: str) -> None:
        await self._probe_created(key)
        if await self._tried(key, b"second", "create") is not None:
            raise unsafe("it created an object over one that was there", "If-None-Match")

    async def _probe_replacement(self, key: str) -> None:
        first = await self._probe_created(key)
        if await self._tried(key, b"second", {"e_tag": first}) is None:
            raise unsafe("it refused to replace an object that had not changed", "If-Match")
        if await self._tried(key, b"third", {"e_tag": first}) is not None:
            raise unsafe("it replaced an object that had changed", "If-Match")

    async def _probe_race(self, key: str) -> None:
        first = await self._probe_created(key)
        rivals = [self._tried(key, b"rival %d" % each, {"e_tag": first}) for each in range(4)]
        won = [etag for etag in await asyncio.gather(*rivals) if etag is not None]
        if len(won) != 1:
            raise unsafe(f"of four replacements at the same time it accepted {len(won)}", "If-Match")
        found = await self.get(key)
        if found is None or found.etag != won[0]:
            raise unsafe("it did not return what was written last", "read after write")

    async def _probe_created(self, key: str) -> str:
        etag = await self._tried(key, b"first", "create")
        if etag is None:
            raise unsafe("it refused to create an object that was not there", "If-None-Match")
        return etag

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
    """Return the error of a bucket that did not answer as expected. The text of the response is not repeated."""
    text = str(problem)
    if isinstance(problem, PermissionDeniedError | UnauthenticatedError) or "401 Un" in text or "403 For" in text:
        words = "it refuses the credentials of this process, or does not permit this to them"
    elif "NoSuchBucket" in text:
        words = "there is no such bucket"
    else:
        words = type(problem).__name__
    return StoreUnavailable(f"the bucket of the store: {words}")
