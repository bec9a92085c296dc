"""`map` and `parallel`: the same call for many items, concurrently, with a bound on the number of calls.

They are plain asyncio, a `TaskGroup` of workers, and record nothing themselves: what they call does.
"""

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Iterator
from typing import Any, Literal, TypeVar, overload

from holdfast.errors import InvalidInput
from holdfast.program.coroutine import current_program
from holdfast.program.outcomes import is_failure

T = TypeVar("T")
R = TypeVar("R")

EndReason = Literal["all done", "enough succeeded"]


class MapResult(list[R]):
    """The results in the order of the items. The result is None for an item that failed or was not needed."""

    def __init__(self, count: int) -> None:
        nothing: Any = None
        super().__init__([nothing] * count)
        self.failures: dict[int, Exception] = {}
        """The failures that were tolerated, by the positions of their items."""
        self.succeeded = 0
        self.reason: EndReason = "all done"
        """Why the call ended."""


class _Enough(Exception):
    """As many calls have succeeded as are needed."""


class _TooMany(Exception):
    """More calls have failed than are tolerated."""


@overload
async def map(
    function: Callable[[T], Awaitable[R]], items: Iterable[T], *, at_once: int | None = None
) -> MapResult[R]: ...
@overload
async def map(
    function: Callable[[T], Awaitable[R]],
    items: Iterable[T],
    *,
    at_once: int | None = None,
    min_successful: int | None = None,
    tolerated_failures: int | None = None,
) -> MapResult[R | None]: ...


async def map(
    function: Callable[[T], Awaitable[R]],
    items: Iterable[T],
    *,
    at_once: int | None = None,
    min_successful: int | None = None,
    tolerated_failures: int | None = None,
) -> MapResult[Any]:
    """Call an activity, a child or an async function for each item, concurrently, and return the results in order.

    `at_once` limits concurrent calls. The first failure cancels the other calls and is raised, unless
    `tolerated_failures` allows more. Tolerated failures are in `failures` of the result; one too many raises an
    `ExceptionGroup` of all of them. With `min_successful` the call ends after that many successes and cancels the rest;
    if `tolerated_failures` is not given, it tolerates failures as long as enough items are left. `reason` is why it
    ended. Only failures that would fail the run count. A mistake in the code is raised immediately.
    """
    if isinstance(items, set | frozenset):
        raise InvalidInput("map: the order of a set differs between processes; give it sorted(items)", field="items")
    given = list(items)
    most = _bound("at_once", at_once, 1, len(given))
    needed = _bound("min_successful", min_successful, 0, len(given))
    if needed > len(given):
        raise InvalidInput(f"map: {needed} are to succeed, and there are {len(given)} items", field="min_successful")
    spare = 0 if min_successful is None else len(given) - needed
    tolerated = _bound("tolerated_failures", tolerated_failures, 0, spare)
    found: MapResult[R] = MapResult(len(given))

    async def work(places: Iterator[int]) -> None:
        for place in places:
            try:
                found[place] = await awaitable("map", function(given[place]))
            except Exception as problem:
                if not _is_failure(problem):
                    raise
                found.failures[place] = problem
                if len(found.failures) > tolerated:
                    raise _TooMany from None
            else:
                found.succeeded += 1
                if min_successful is not None and found.succeeded >= needed:
                    raise _Enough

    if min_successful == 0:
        found.reason = "enough succeeded"
        return found
    places = iter(range(len(given)))
    try:
        async with asyncio.TaskGroup() as workers:
            for _ in range(min(most, len(given))):
                workers.create_task(work(places))
    except BaseExceptionGroup as group:
        others = [problem for problem in group.exceptions if not isinstance(problem, _Enough | _TooMany)]
        if others:
            raise (others[0] if len(others) == 1 else group.derive(others)) from None
        if not any(isinstance(problem, _TooMany) for problem in group.exceptions):
            found.reason = "enough succeeded"
            return found
        raise _failed(found, tolerated, len(given)) from None
    return found


def awaitable(caller: str, result: Awaitable[T]) -> Awaitable[T]:
    """Return the awaitable that the given function returned; raise `InvalidInput` if it cannot be awaited."""
    if not hasattr(result, "__await__"):
        kind = type(result).__qualname__
        raise InvalidInput(f"{caller} calls an activity, a workflow or an async function; this one returned a {kind}")
    return result


def _failed(found: MapResult[Any], tolerated: int, count: int) -> Exception:
    failures = [found.failures[place] for place in sorted(found.failures)]
    if tolerated == 0:
        return failures[0]
    return ExceptionGroup(f"{len(failures)} of {count} items failed, and {tolerated} are tolerated", failures)


async def parallel(
    *branches: Callable[[], Awaitable[Any]],
    at_once: int | None = None,
    min_successful: int | None = None,
    tolerated_failures: int | None = None,
) -> MapResult[Any]:
    """Call async functions without arguments concurrently, and return their results in order: see `map`."""
    given: tuple[Any, ...] = branches
    for branch in given:
        if not callable(branch):
            kind = type(branch).__qualname__
            raise InvalidInput(f"parallel: a branch is a function, such as lambda: charge(order), not a {kind}")
    bounds = {"at_once": at_once, "min_successful": min_successful, "tolerated_failures": tolerated_failures}
    return await map(_call, branches, **bounds)


async def _call(branch: Callable[[], Awaitable[Any]]) -> Any:
    return await branch()


def _bound(field: str, value: Any, least: int, default: int) -> int:
    if value is None:
        return default
    if type(value) is not int or value < least:
        raise InvalidInput(f"map: {field} is a whole number from {least}, not {value!r}", field=field)
    return value


def _is_failure(problem: Exception) -> bool:
    program = current_program()
    return program is None or is_failure(problem, program.definition)
