"""The methods of a client, derived from the operations. `resources.pyi` shows them to people and to type checkers.

Required fields of an operation may be positional, in the order of the fields; all others are keyword-only.
"""

from collections.abc import AsyncGenerator, Callable, Coroutine, Iterator
from typing import Any

import msgspec

from holdfast.client.calls import Calls
from holdfast.errors import HoldfastError, InvalidInput
from holdfast.service.operations import DOWNLOADS, OPERATIONS
from holdfast.service.operations.streams import follow_run, follow_stream, watch_lists
from holdfast.service.registry import Operation

STREAMED: dict[str, Operation] = {operation.name: operation for operation in (follow_run, follow_stream, watch_lists)}

Run = Callable[[Coroutine[Any, Any, Any]], Any]


def needed(operation: Operation) -> tuple[str, ...]:
    """Return the required fields of an operation."""
    fields = msgspec.structs.fields(operation.request_type)
    return tuple(field.name for field in fields if field.required)


def _fields(operation: Operation, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    names = needed(operation)
    if len(args) > len(names) or any(name in kwargs for name in names[: len(args)]):
        raise InvalidInput(
            f"{operation.name} takes {', '.join(names) or 'nothing'} by place, the rest by name, once each"
        )
    return {**dict(zip(names, args, strict=False)), **kwargs}


def method_of(operation: Operation) -> Callable[..., Any]:
    """Return the method that calls an operation."""
    names = frozenset(operation.request_type.__struct_fields__)

    def method(self: Any, *args: Any, **kwargs: Any) -> Any:
        fields = _fields(operation, args, kwargs)
        unknown = sorted(fields.keys() - names)
        if unknown:
            raise InvalidInput(f"{operation.name} has no {', '.join(unknown)}", field=unknown[0])
        calls: Calls = self._calls
        if operation.name in DOWNLOADS:
            return calls.download(operation, fields)
        return calls.stream(operation, fields) if operation.name in STREAMED else calls.call(operation, fields)

    method.__name__ = method.__qualname__ = operation.name.partition(".")[2]
    method.__doc__ = operation.doc
    return method


def sync_method_of(operation: Operation) -> Callable[..., Any]:
    """Return the method that calls an operation and blocks until it is answered."""
    name = operation.name.partition(".")[2]

    def method(self: Any, *args: Any, **kwargs: Any) -> Any:
        called = getattr(self._resource, name)(*args, **kwargs)
        is_iterated = operation.name in STREAMED or operation.name in DOWNLOADS
        return iterate(called, self._run) if is_iterated else self._run(called)

    method.__name__ = method.__qualname__ = name
    method.__doc__ = operation.doc
    return method


def iterate(stream: AsyncGenerator[Any, None], run: Run) -> Iterator[Any]:
    """Return an iterator for code without an event loop, which requests each item when it is needed."""
    try:
        while True:
            try:
                yield run(anext(stream))  # type: ignore[arg-type]
            except StopAsyncIteration:
                return
    finally:  # a caller that breaks off the loop has read enough, and the server can drop the stream
        closing = stream.aclose()
        try:
            run(closing)
        except (RuntimeError, HoldfastError):  # the client was closed before, along with its connections
            closing.close()


class _Resource:
    def __init__(self, calls: Calls) -> None:
        self._calls = calls


class _SyncResource:
    def __init__(self, resource: Any, run: Run) -> None:
        self._resource = resource
        self._run = run


def _methods(resource: str, make: Callable[[Operation], Callable[..., Any]]) -> dict[str, Any]:
    operations = {**OPERATIONS, **STREAMED, **DOWNLOADS}
    return {name.partition(".")[2]: make(each) for name, each in operations.items() if each.resource == resource}


RESOURCES = tuple(dict.fromkeys(each.resource for each in {**OPERATIONS, **STREAMED, **DOWNLOADS}.values()))
"""The subjects of operations, in the order of declaration."""

for _resource in RESOURCES:
    globals()[_resource.title()] = type(_resource.title(), (_Resource,), _methods(_resource, method_of))
    globals()[f"Sync{_resource.title()}"] = type(
        f"Sync{_resource.title()}", (_SyncResource,), _methods(_resource, sync_method_of)
    )
