"""Activities in tests: a record of calls, and fakes in their place.

During a test the function of each activity is replaced by one that records the call, and then calls the fake or the
original function. The options, retries, keys and verifiers of the activity stay the same.
"""

import asyncio
import inspect
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

from msgspec import Struct

from holdfast.activity import Activity
from holdfast.engine.activities.context import activity_context
from holdfast.errors import InvalidInput, NotDurable
from holdfast.registry import Registry

MISSING: Any = object()

AroundCall = Callable[["Call"], Awaitable[None]]


class Call(Struct, frozen=True):
    """One call of an activity's function."""

    activity: str
    """The name of the activity."""
    arguments: dict[str, Any]
    """The arguments, by parameter name."""

    attempt: int
    """The number of the dispatch of the step, from 1."""

    run_id: str
    """The run that called it."""


class Fake(Struct):
    """What replaces an activity's function: return, raise, or call something else."""

    returns: Any = MISSING
    raises: BaseException | type[BaseException] | None = None
    side_effect: Any = None
    """A function with the activity's parameters; or a list with one entry for each call, which is returned, or raised
    if it is an exception. The last entry stands for all later calls.
    """

    calls: int = 0

    def check(self, name: str) -> None:
        """Raise `InvalidInput` unless exactly one action is set."""
        given = [self.returns is not MISSING, self.raises is not None, self.side_effect is not None]
        if sum(given) > 1:
            raise InvalidInput(f"a fake of {name!r} returns, raises, or has a side_effect: one of them")
        effect = self.side_effect
        if effect is not None and not callable(effect) and (not isinstance(effect, Sequence) or not effect):
            raise InvalidInput(f"the side_effect of {name!r} is a function, or a list of results and exceptions")

    def __call__(self, arguments: dict[str, Any]) -> Any:
        """Perform it. The caller awaits the result if it is awaitable."""
        self.calls += 1
        if self.raises is not None:
            raise self.raises
        if callable(self.side_effect):
            return self.side_effect(**arguments)
        if self.side_effect is not None:
            entry = self.side_effect[min(self.calls, len(self.side_effect)) - 1]
            if isinstance(entry, BaseException) or (isinstance(entry, type) and issubclass(entry, BaseException)):
                raise entry
            return entry
        return None if self.returns is MISSING else self.returns


class ActivityCalls:
    """The calls of an app's activities while this is installed, and the fakes in their place."""

    def __init__(self, registry: Registry) -> None:
        self._registry = registry
        self._fakes: dict[str, Fake] = {}
        self._originals: dict[str, tuple[Callable[..., Any], bool]] = {}
        self._verifiers: dict[str, Callable[..., Any]] = {}
        self.made: list[Call] = []
        """Every call, in order."""

    def install(self, before: AroundCall | None = None, after: AroundCall | None = None) -> None:
        """Record the calls of every registered activity that is not watched yet.

        With `before` and `after`, which are awaited around each call, functions that are not async are called on the
        loop instead of in threads, and so are verifiers.
        """
        for name, definition in self._registry.activities.items():
            if name not in self._originals:
                self._originals[name] = definition.function, definition.is_async
                if definition.is_async or before is not None or after is not None:
                    definition.function = self._noting(name, definition.function, before, after)
                    definition.is_async = True
                else:
                    definition.function = self._noting_in_thread(name, definition.function)
                verifier = definition.verifier
                if verifier is not None and not verifier.is_async and (before is not None or after is not None):
                    self._verifiers[name] = verifier.function
                    verifier.function, verifier.is_async = _on_the_loop(verifier.function), True

    def remove(self) -> None:
        """Restore every activity's own function."""
        for name, (function, is_async) in self._originals.items():
            definition = self._registry.activities[name]
            definition.function, definition.is_async = function, is_async
        for name, function in self._verifiers.items():
            verifier = self._registry.activities[name].verifier
            assert verifier is not None
            verifier.function, verifier.is_async = function, False
        self._originals.clear()
        self._verifiers.clear()

    def fake(self, activity: "Activity[..., Any] | str", fake: Fake) -> None:
        """Replace an activity by a fake from now on."""
        name = name_of(activity)
        if name not in self._registry.activities:
            raise InvalidInput(f"there is no activity {name!r} to fake; there are {self._registry.activity_names()}")
        fake.check(name)
        self._fakes[name] = fake

    def of(self, activity: "Activity[..., Any] | str") -> list[Call]:
        """Return the calls of one activity, in order."""
        name = name_of(activity)
        return [call for call in self.made if call.activity == name]

    def _noting(
        self, name: str, function: Callable[..., Any], before: AroundCall | None, after: AroundCall | None
    ) -> Callable[..., Any]:
        async def noted(**arguments: Any) -> Any:
            call = _call_of(name, arguments)
            if before is not None:
                await before(call)
            result = self._do(call, function)
            if inspect.isawaitable(result):
                result = await result
            if after is not None:
                await after(call)
            return result

        return noted

    def _noting_in_thread(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def noted(**arguments: Any) -> Any:
            result = self._do(_call_of(name, arguments), function)
            return asyncio.run(_awaited(result)) if inspect.isawaitable(result) else result

        return noted

    def _do(self, call: Call, function: Callable[..., Any]) -> Any:
        self.made.append(call)
        fake = self._fakes.get(call.activity)
        return function(**call.arguments) if fake is None else fake(call.arguments)


def _call_of(name: str, arguments: dict[str, Any]) -> Call:
    """Return the call that is about to be made. If the function is called outside of a run, it has no run."""
    try:
        context = activity_context()
    except NotDurable:
        return Call(name, arguments, 1, "")
    return Call(name, arguments, context.engine_attempt_id, context.run_id)


def _on_the_loop(function: Callable[..., Any]) -> Callable[..., Any]:
    async def called(**arguments: Any) -> Any:
        return function(**arguments)

    return called


async def _awaited(result: Awaitable[Any]) -> Any:
    return await result


def name_of(activity: "Activity[..., Any] | str") -> str:
    """Return the name of an activity."""
    given: Any = activity
    if isinstance(given, str):
        return given
    if not isinstance(given, Activity):
        what = getattr(given, "__qualname__", repr(given))
        raise InvalidInput(f"{what} is not an activity: register it with @app.activity, or give its name")
    return given.definition.name
