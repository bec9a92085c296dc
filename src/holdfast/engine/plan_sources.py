"""Sources of plans: files, https addresses and buckets, restricted to an allow-list of prefixes.

Without a list nothing is fetched. An address must begin with one of the prefixes. Redirects are not followed, files
must be inside their folder, and the size and time of each fetch are bounded.
"""

import asyncio
import errno
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

from holdfast.errors import ArtifactMissing, InvalidInput, NotFound, NotPermitted, PayloadTooLarge, StoreUnavailable
from holdfast.limits import PLAN_BYTES

FETCH_S = 30.0
"""How long fetching a plan may take."""

SCHEMES = ("file", "https", "s3", "gs", "az")


class PlanSources:
    """Fetches plans from allowed addresses."""

    def __init__(self, allowed: Sequence[str] = (), *, verify: Any = True, timeout_s: float = FETCH_S) -> None:
        for prefix in allowed:
            parts = _parts(prefix)
            if not parts.path.endswith("/"):
                raise InvalidInput(f"an allowed source ends with /, unlike {prefix!r}", field="plan_sources")
        self._allowed = tuple(allowed)
        self._verify = verify
        self._timeout_s = timeout_s

    async def fetch(self, uri: str) -> bytes:
        """Return the bytes at an address; raise `NotPermitted` if it is not allowed."""
        parts = _parts(uri)
        prefix = next((prefix for prefix in self._allowed if _is_below(uri, prefix)), None)
        if prefix is None:
            raise NotPermitted(f"plans are not fetched from {parts.scheme}://{parts.netloc}: it is not allowed here")
        try:
            async with asyncio.timeout(self._timeout_s):
                if parts.scheme == "file":
                    return await asyncio.to_thread(_read_file, parts.path, _parts(prefix).path)
                if parts.scheme == "https":
                    return await self._get(uri)
                return await _read_object(uri)
        except TimeoutError as problem:
            raise StoreUnavailable(f"the plan at {uri} could not be fetched within {self._timeout_s} s") from problem

    async def _get(self, uri: str) -> bytes:
        httpx: Any = import_module("httpx")  # imported only where it is used: it is slow to import
        try:
            async with (
                httpx.AsyncClient(verify=self._verify, follow_redirects=False, trust_env=False) as client,
                client.stream("GET", uri, timeout=self._timeout_s) as answer,
            ):
                if answer.is_redirect:
                    raise NotPermitted(f"the plan at {uri} is a redirect, which is not followed")
                if answer.status_code == 404:
                    raise NotFound(f"there is no plan at {uri}")
                if answer.status_code != 200:
                    raise StoreUnavailable(f"the plan at {uri} could not be fetched: HTTP {answer.status_code}")
                body = bytearray()
                async for chunk in answer.aiter_bytes():
                    body += chunk
                    _check_size(uri, len(body))
                return bytes(body)
        except httpx.HTTPError as problem:
            raise StoreUnavailable(f"the plan at {uri} could not be fetched: {problem!r}") from problem


def _parts(uri: str) -> Any:
    try:
        parts = urlsplit(uri)
    except ValueError as problem:
        raise InvalidInput(f"{uri[:200]!r} is not an address", field="uri") from problem
    if parts.scheme not in SCHEMES:
        raise InvalidInput(f"a plan is at an address of {', '.join(SCHEMES)}, not {uri[:200]!r}", field="uri")
    if parts.username is not None or parts.password is not None or parts.query or parts.fragment:
        raise InvalidInput("the address of a plan has no user, query or fragment", field="uri")
    if not unquote(uri).isprintable():
        raise InvalidInput("the address of a plan has no control characters", field="uri")
    if "\\" in uri or any(part in (".", "..") for part in unquote(parts.path).split("/")):
        raise InvalidInput("the address of a plan has no . or .. in its path", field="uri")
    return parts


def _is_below(uri: str, prefix: str) -> bool:
    address, allowed = _parts(uri), _parts(prefix)
    is_there = (address.scheme, address.netloc.lower()) == (allowed.scheme, allowed.netloc.lower())
    return is_there and unquote(address.path).startswith(unquote(allowed.path))


def _check_size(uri: str, size: int) -> None:
    if size > PLAN_BYTES:
        raise PayloadTooLarge(f"the plan at {uri} has more than {PLAN_BYTES} bytes", limit_bytes=PLAN_BYTES)


def _read_file(path: str, folder: str) -> bytes:
    try:
        file = Path(unquote(path)).resolve()
        if not file.is_relative_to(Path(unquote(folder)).resolve()):
            raise NotPermitted(f"the file {path} leads out of the folder that is allowed")
        if file.exists() and not file.is_file():  # reading a pipe would never end
            raise InvalidInput(f"{path} is not a regular file", field="uri")
        with file.open("rb") as opened:
            body = opened.read(PLAN_BYTES + 1)
    except (FileNotFoundError, NotADirectoryError) as problem:
        raise NotFound(f"there is no file {path}") from problem
    except (OSError, RuntimeError) as problem:  # RuntimeError: links that form a loop
        if not isinstance(problem, OSError) or problem.errno in (errno.ELOOP, errno.ENAMETOOLONG):
            raise InvalidInput(f"{path} is not a regular file: {problem}", field="uri") from problem
        raise StoreUnavailable(f"the file {path} cannot be read: {problem.strerror}") from problem
    _check_size(path, len(body))
    return body


async def _read_object(uri: str) -> bytes:
    bucket_of = import_module("holdfast.store.object_artifacts").ObjectArtifacts.at  # it needs an extra package
    bucket, _, key = uri.partition("://")[2].partition("/")
    body = bytearray()
    try:
        async for chunk in bucket_of(f"{uri.partition('://')[0]}://{bucket}").read(unquote(key)):
            body += chunk
            _check_size(uri, len(body))
    except ArtifactMissing as problem:
        raise NotFound(f"there is no plan at {uri}") from problem
    return bytes(body)
