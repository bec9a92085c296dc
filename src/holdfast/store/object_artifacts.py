"""Artifacts in an object store: S3 and similar services, Google Cloud Storage, Azure. This needs the package `obstore`.

An upload in parts becomes visible when it is completed, so an object exists completely or not at all. Parts of an
interrupted upload are invisible here: use a lifecycle rule of the bucket to delete them.
"""

from collections.abc import AsyncIterator
from typing import Any

from holdfast.errors import EngineError, InvalidInput, StoreUnavailable
from holdfast.store.artifacts import CHUNK_BYTES, StoredObject, check_key, cut, missing

try:
    import obstore
    from obstore.exceptions import BaseError, NotFoundError, PermissionDeniedError, UnauthenticatedError
except ImportError as absent:
    raise InvalidInput(
        "artifacts in a bucket need a package: pip install 'holdfast[s3]'", field="artifacts"
    ) from absent

from holdfast.store.object_storage import open_objects  # which needs the package

PART_BYTES = 8 * 1024 * 1024
"""The size of the parts of an upload."""

PARTS_AT_ONCE = 2
"""How many parts of an upload are in progress at once, and so how much of an artifact is in memory."""


class ObjectArtifacts:
    """An `ArtifactStore` in a bucket: any store of `obstore`."""

    def __init__(self, store: Any) -> None:
        self._store = store

    @classmethod
    def at(cls, address: str) -> "ObjectArtifacts":
        """Return the bucket at an address. Credentials and region come from the environment, as usual for S3."""
        try:
            return cls(open_objects(address, "artifacts"))
        except (BaseError, ValueError) as problem:
            raise InvalidInput(f"the address of artifacts cannot be used: {problem}", field="artifacts") from problem

    async def put(self, key: str, chunks: AsyncIterator[bytes]) -> None:
        """Upload the object in parts, and complete it at the end."""
        try:
            first = bytearray()
            async for chunk in chunks:
                first += chunk
                if len(first) >= PART_BYTES:
                    break
            else:  # it is small
                await obstore.put_async(self._store, check_key(key), bytes(first))
                return
            writer = obstore.open_writer_async(
                self._store, check_key(key), buffer_size=PART_BYTES, max_concurrency=PARTS_AT_ONCE
            )
            await writer.write(bytes(first))
            first.clear()
            async for chunk in chunks:  # after an error the upload is not closed, and so never completed
                await writer.write(chunk)
            await writer.close()
        except (BaseError, FileNotFoundError) as problem:
            raise _unavailable(problem) from problem

    async def read(self, key: str) -> AsyncIterator[bytes]:
        """Yield the bytes of the object."""
        try:
            found = await obstore.get_async(self._store, check_key(key))
            async for chunk in found.stream(min_chunk_size=CHUNK_BYTES):
                for part in cut(chunk):
                    yield part
        except (NotFoundError, FileNotFoundError) as problem:
            raise _unavailable(problem) if _is_bucket_missing(problem) else missing(key) from problem
        except BaseError as problem:
            raise _unavailable(problem) from problem

    async def read_part(self, key: str, offset: int, size_bytes: int) -> bytes:
        """Return some bytes of the object with a range request."""
        try:
            found = await obstore.get_range_async(self._store, check_key(key), start=offset, length=size_bytes)
        except (NotFoundError, FileNotFoundError) as problem:
            raise _unavailable(problem) if _is_bucket_missing(problem) else missing(key) from problem
        except BaseError as problem:
            raise _unavailable(problem) from problem
        return bytes(found)

    async def stat(self, key: str) -> StoredObject | None:
        """Return the size and modification time of the object."""
        try:
            return _object(await obstore.head_async(self._store, check_key(key)))
        except (NotFoundError, FileNotFoundError) as problem:  # HEAD answers the same for a missing bucket
            if _is_bucket_missing(problem):
                raise _unavailable(problem) from problem
            return None
        except BaseError as problem:
            raise _unavailable(problem) from problem

    async def delete(self, key: str) -> None:
        """Delete the object."""
        try:
            await obstore.delete_async(self._store, check_key(key))
        except (NotFoundError, FileNotFoundError) as problem:
            if _is_bucket_missing(problem):
                raise _unavailable(problem) from problem
        except BaseError as problem:
            raise _unavailable(problem) from problem

    async def list(self, prefix: str = "") -> AsyncIterator[StoredObject]:
        """Yield the objects, some thousand at a time."""
        try:
            async for page in obstore.list(self._store, prefix or None):
                for meta in page:
                    yield _object(meta)
        except (BaseError, FileNotFoundError) as problem:
            raise _unavailable(problem) from problem


def _object(meta: Any) -> StoredObject:
    return StoredObject(meta["path"], meta["size"], round(meta["last_modified"].timestamp() * 1_000_000))


def _is_bucket_missing(problem: Exception) -> bool:
    return "NoSuchBucket" in str(problem)


def _unavailable(problem: Exception) -> EngineError:
    """Return the error of a bucket that did not answer as expected. The text of the response is not repeated."""
    is_refused = isinstance(problem, PermissionDeniedError | UnauthenticatedError)
    if is_refused or any(status in str(problem) for status in ("401 Unauthorized", "403 Forbidden")):
        words = "it refuses the credentials of this process, or does not permit this to them"
    elif isinstance(problem, NotFoundError | FileNotFoundError) or _is_bucket_missing(problem):
        words = "there is no such bucket"
    else:
        words = type(problem).__name__
    return StoreUnavailable(f"the bucket of artifacts: {words}")
