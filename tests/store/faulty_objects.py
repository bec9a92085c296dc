"""Objects in memory whose server fails as a test plans it, and processes that are killed between two requests."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import obstore
import pytest
from obstore.exceptions import GenericError

from holdfast.store.s3 import S3Store
from holdfast.store.s3.bucket import Bucket
from holdfast.testing import VirtualClock

Fault = Callable[[str], str | None]


class FaultyObjects:
    """Objects in memory behind a server that fails as its plan says: before a request, after it, or in its answer."""

    def __init__(self, inner: Any, monkeypatch: pytest.MonkeyPatch) -> None:
        self.inner = inner
        self.plan: Fault = lambda kind: None
        self.log: list[str] = []
        put, get = obstore.put_async, obstore.get_async

        async def put_async(store: Any, path: str, data: bytes, **options: Any) -> Any:
            return await self._pass("PUT", path, lambda: put(self.inner, path, data, **options))

        async def get_async(store: Any, path: str, **options: Any) -> Any:
            return await self._pass("GET", path, lambda: get(self.inner, path, **options))

        monkeypatch.setattr(obstore, "put_async", put_async)
        monkeypatch.setattr(obstore, "get_async", get_async)
        monkeypatch.setattr(obstore, "list", lambda store, *a, **o: _list(self.inner, *a, **o))
        monkeypatch.setattr(obstore, "delete_async", lambda store, paths: _delete(self.inner, paths))

    async def _pass(self, kind: str, path: str, send: Callable[[], Any]) -> Any:
        fault = self.plan(f"{kind} {path}")
        self.log.append(f"{kind} {path} {fault}")
        if fault == "before":
            raise GenericError("503 Slow Down")
        answer = await send()
        if fault == "after":
            raise GenericError("the request timed out")
        return answer


_list, _delete = obstore.list, obstore.delete_async


def opened(
    objects: FaultyObjects | Any, clock: VirtualClock | None = None, patience_s: float = 5.0, grace: int = 0
) -> S3Store:
    """Return a process of its own on these objects."""
    return S3Store(Bucket(objects, patience_s=patience_s), clock or VirtualClock(), grace=grace)


class Killed(BaseException):
    """The process is killed here."""


def kill_at(objects: FaultyObjects, request: str, nth: int = 1) -> None:
    """Kill the process before its nth request of this beginning."""
    seen: Counter[str] = Counter()

    def plan(asked: str) -> str | None:
        seen[asked] += 1
        if asked.startswith(request) and seen[asked] == nth:
            raise Killed
        return None

    objects.plan = plan
