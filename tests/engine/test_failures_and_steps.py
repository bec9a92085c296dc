"""What a failure of an activity says to its policy, and to the workflow that catches it; any function as a step."""

from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import pytest

import holdfast as hf
from holdfast.errors import ActivityFailed, InvalidInput, RunFailed
from holdfast.testing import TestNode, explore
from tests.engine.harness import EngineVariant

pytestmark = pytest.mark.contract("ACT-1")


class SoldOut(Exception):
    """There is none left."""


class SeatTaken(SoldOut):
    """Somebody else has it."""


class Busy(Exception):
    """Come back later."""

    def __init__(self, retry_after: Any) -> None:
        super().__init__("busy")
        self.retry_after = retry_after


def fetch(page: int) -> str:
    """Fetch a page."""
    fetched.append(page)
    return f"page {page}"


async def fetch_later(page: int) -> str:
    """Fetch a page, without blocking."""
    return fetch(page)


fetched: list[int] = []


def says_again(problem: Exception) -> bool:
    """Return whether the words of an exception ask for another attempt."""
    return "again" in str(problem)


@pytest.mark.parametrize("problem", [SoldOut("none left"), SeatTaken("12a"), KeyError("seat"), OSError(5, "disk")])
async def test_a_declared_exception_is_caught_by_its_own_class(variant: EngineVariant, problem: Exception) -> None:
    app = hf.App("shop")
    declared: Any = {KeyError: LookupError, SeatTaken: SoldOut}.get(type(problem), type(problem))

    @app.activity(raises=(SoldOut, LookupError, OSError), retry=hf.Retry(max_attempts=1))
    async def book() -> None:
        raise problem

    @app.workflow
    async def order() -> list[str]:
        caught: Any = None
        try:
            await book()
        except declared as found:
            caught = found
        return [caught.info.code, caught.info.message, caught.code, str(isinstance(caught, ActivityFailed))]

    async with variant.node(app):
        found = await (await app.start(order)).result()
    assert found == [type(problem).__name__, str(problem), "ActivityFailed", "True"]


async def test_what_is_not_declared_is_an_activity_failed(variant: EngineVariant) -> None:
    app = hf.App("shop")

    @app.activity(raises=SoldOut, retry=hf.Retry(max_attempts=1))
    async def book(kind: str) -> None:
        raise ValueError("bad") if kind == "value" else SeatTaken("12a")

    @app.workflow
    async def order(kind: str) -> None:
        try:
            await book(kind)
        except ValueError:
            return

    async with variant.node(app):
        for kind, code in (("value", "ValueError"), ("seat", "SeatTaken")):
            with pytest.raises(RunFailed) as failed:
                await (await app.start(order, kind)).result()
            assert (failed.value.info.code, failed.value.info.cause.code) == ("ActivityFailed", code)


async def test_what_is_not_declared_is_known_by_its_name_and_its_bases(variant: EngineVariant) -> None:
    app = hf.App("shop")

    @app.activity(retry=hf.Retry(max_attempts=1))
    async def book() -> None:
        raise SeatTaken("12a")

    @app.workflow
    async def order() -> list[Any]:
        try:
            await book()
        except ActivityFailed as problem:
            return [problem.info.code, list(problem.info.bases)]
        return []

    async with variant.node(app):
        assert await (await app.start(order)).result() == ["SeatTaken", ["SoldOut"]]


@pytest.mark.parametrize(
    ("options", "problem", "attempts"),
    [
        ({"retry": hf.Retry(max_attempts=3, initial_ms=1)}, SeatTaken("x"), 3),
        ({"retry": hf.Retry(max_attempts=3, initial_ms=1, non_retryable=("SoldOut",))}, SeatTaken("x"), 1),
        ({"retry_if": says_again}, ValueError("never"), 1),
        (
            {"retry": hf.Retry(max_attempts=2), "retry_if": says_again},
            ValueError("again"),
            2,
        ),
        ({"retry_if": lambda problem: 1 / 0}, ValueError("x"), 1),
    ],
)
async def test_policies_know_subclasses_and_predicates(options: dict[str, Any], problem: Any, attempts: int) -> None:
    app = hf.App("shop")
    calls: list[int] = []

    @app.activity(**options)
    async def book() -> None:
        calls.append(1)
        raise problem

    @app.workflow
    async def order() -> None:
        await book()

    async with TestNode(app):
        with pytest.raises(RunFailed):
            await (await app.start(order)).result()
    assert len(calls) == attempts


@pytest.mark.parametrize("asked", [90, timedelta(seconds=90), "90", "soon"])
async def test_an_error_chooses_when_it_is_tried_again(asked: Any) -> None:
    app = hf.App("shop")

    @app.activity(retry=hf.Retry(max_attempts=3, initial_ms=1_000, jitter=0))
    async def book() -> int:
        attempt = hf.activity_context().attempt
        if attempt == 1:
            raise Busy(asked)
        if attempt == 2:
            raise hf.RetryAfter(timedelta(hours=1))
        return attempt

    @app.workflow
    async def order() -> int:
        return await book()

    async with TestNode(app) as node:
        begun = node.now
        assert await (await app.start(order)).result() == 3
        waited = (node.now - begun).total_seconds()
    assert waited == pytest.approx(3_600 + (1 if asked == "soon" else 90), abs=0.5)


@pytest.mark.parametrize(("minutes", "survives"), [(4, True), (6, False)])
async def test_the_default_policy_outlives_a_short_outage(minutes: int, survives: bool) -> None:
    app = hf.App("shop")

    @app.activity
    async def book() -> str:
        if (node.now - begun).total_seconds() < 60 * minutes:
            raise ConnectionError("nobody answers")
        return "booked"

    @app.workflow
    async def order() -> str:
        return await book()

    async with TestNode(app) as node:
        begun = node.now
        run = await app.start(order)
        if survives:
            assert await run.result() == "booked"
        else:
            with pytest.raises(RunFailed, match="nobody answers"):
                await run.result()


def new_app() -> tuple[hf.App, Any]:
    app = hf.App("pages")

    @app.workflow
    async def collect() -> list[str]:
        found = [await hf.step(fetch, 1), await hf.step(fetch_later, page=2)]
        await hf.sleep(1)
        return [*found, await hf.step(fetch, 3)]

    return app, collect


async def test_any_function_of_a_module_is_a_step(variant: EngineVariant) -> None:
    app, collect = new_app()
    async with variant.node(app):
        run = await app.start(collect)
        assert await run.result() == ["page 1", "page 2", "page 3"]
        steps = [(event.step_id, getattr(event.data, "name", "")) for event in await run.events()]
    assert ("fetch", f"{__name__}.fetch") in steps
    assert {step_id for step_id, _ in steps if step_id} == {"fetch", "fetch_later", "sleep", "fetch#2"}


def test_a_step_is_found_again_after_a_crash() -> None:
    app = hf.App("pages")

    @app.workflow
    async def collect() -> list[str]:
        return [await hf.step(fetch_later, page) for page in range(3)]

    found = explore(app, collect)
    found.assert_clean()
    assert len(found.plays) > 8


async def test_what_cannot_be_found_again_is_no_step() -> None:
    app = hf.App("pages")

    @app.workflow
    async def collect() -> None:
        def inner() -> None: ...

        bad: list[Any] = [lambda: 1, inner, 5]
        for each in bad:
            with pytest.raises(InvalidInput, match="a function of a module"):
                await hf.step(each)

    async with TestNode(app):
        await (await app.start(collect)).result()


@pytest.mark.contract("API-2")
def test_mistakes_in_the_declaration_are_refused() -> None:
    app = hf.App("shop")

    async def book() -> None: ...

    async def later(problem: Exception) -> bool:
        return True

    for options in ({"raises": ("ValueError",)}, {"raises": 5}, {"retry_if": later}):
        with pytest.raises(InvalidInput):
            app.activity(**options)(book)


class Refused(Exception):
    """Its constructor takes more than a text, as that of many libraries does."""

    def __init__(self, reason: str, *, status: int) -> None:
        super().__init__(reason)
        self.status = status


@dataclass
class Taken(Exception):
    seat: str
    row: int


@dataclass(frozen=True)
class Gone(Exception):
    seat: str


class Told(Exception):
    """It has a text of its own."""

    @property
    def message(self) -> str:
        return "told"


@pytest.mark.parametrize(
    "problem", [Refused("no", status=403), Taken("12a", 3), Gone("12a"), Told("x"), OSError(5, "disk")]
)
async def test_an_exception_is_caught_by_its_class_whatever_its_constructor_takes(
    variant: EngineVariant, problem: Any
) -> None:
    app = hf.App("shop")

    @app.activity(raises=type(problem), retry=hf.Retry(max_attempts=1))
    async def book() -> None:
        raise problem

    @app.workflow
    async def order() -> list[str]:
        try:
            await book()
        except type(problem) as found:
            known: Any = found
            return [type(found).__name__, str(found), repr(found), known.info.code, known.message]
        return []

    async with variant.node(app):
        found = await (await app.start(order)).result()
    name, text = type(problem).__name__, f"step book: {type(problem).__name__}: {problem}"
    assert found == [name, text, f"{name}({text!r})", name, text]


@pytest.mark.parametrize("kind", [ExceptionGroup, ActivityFailed, hf.errors.StartRefused])
def test_an_exception_that_cannot_be_made_again_is_refused_when_it_is_declared(kind: Any) -> None:
    with pytest.raises(InvalidInput, match=f"raises: {kind.__name__} cannot be raised again in a workflow"):
        hf.App("shop").activity(raises=kind)(fetch)
