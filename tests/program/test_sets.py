"""Futures are kept in sets, by asyncio and by authors: they iterate in the same order on every replay."""

import asyncio
import gc
from collections.abc import Callable
from typing import Any

import pytest

from holdfast.app import App
from tests.program.core_run import CoreRun, start_core_run

app = App("sets")
KINDS = 8


@app.activity
async def act(value: int) -> int:
    return value


def several_gathers() -> dict[Any, int]:
    """Return gathers with their numbers, made at addresses that differ from call to call."""
    ballast = [bytearray(64) for _ in range(2_000)]
    made = {asyncio.gather(act(number), act(number)): number for number in range(KINDS)}
    del ballast[:]
    return made


async def waits_for_gathers() -> list[int]:
    numbers = several_gathers()
    done, _ = await asyncio.wait(numbers)
    return [numbers[future] for future in done]


async def completes_gathers() -> list[int]:
    return [(await future)[0] for future in asyncio.as_completed(several_gathers())]


async def keeps_gathers_in_a_set() -> list[int]:
    return [(await future)[0] for future in set(several_gathers())]


async def shields_gathers() -> list[int]:
    futures = {asyncio.shield(future): number for future, number in several_gathers().items()}
    done, _ = await asyncio.wait(futures)
    return [futures[future] for future in done]


def finish(run: CoreRun) -> CoreRun:
    """Let everything that was begun return, all of it at once."""
    run.control("PAUSE")
    for step in list(run.state.open_steps.values()):
        run.complete(step.step_id, int(bytes(step.body.input).split(b":")[1].rstrip(b"}")))  # type: ignore[attr-defined]
    run.control("RESUME")
    return run


@pytest.mark.contract("WF-2")
@pytest.mark.parametrize(
    "function",
    [waits_for_gathers, completes_gathers, keeps_gathers_in_a_set, shields_gathers],
)
def test_sixty_replays_with_sets_of_gathers_give_one_outcome(function: Callable[..., Any]) -> None:
    run = finish(start_core_run(function))
    outcomes, ballast = {tuple(run.result)}, []
    for number in range(60):
        ballast.append([asyncio.Event() for _ in range(number * 7)])  # so that addresses differ
        program = run.replayed().program
        assert program._main is not None
        outcomes.add(tuple(program._main.result()))
    assert len(outcomes) == 1
    assert sorted(outcomes.pop()) == list(range(KINDS))


def test_a_gather_is_what_it_is_elsewhere() -> None:
    async def gathers() -> list[Any]:
        one: Any = asyncio.gather(act(1), act(2))
        other = asyncio.gather(act(3))
        one.cancel()
        found = await asyncio.gather(one, return_exceptions=True)
        return [type(found[0]).__name__, one == one, one != other, await other]

    run = start_core_run(gathers)
    assert run.open == ["act"]
    run.complete("act", 3)
    assert run.result == ["CancelledError", True, True, [3]]


# --- coroutines hash by their address, and that cannot be helped


async def completes_coroutines() -> None:
    for future in asyncio.as_completed(iter([act(1), act(2)])):
        await future


async def completes_coroutines_in_time() -> None:
    for future in asyncio.as_completed({act(1), act(2)}, timeout=5):
        await future


async def completes_awaitables() -> None:
    class Awaitable:
        def __await__(self) -> Any:
            return act(1).__await__()

    for future in asyncio.as_completed([Awaitable(), Awaitable()]):
        await future


@pytest.mark.contract("WF-1", "WF-2")
def test_as_completed_of_a_list_of_coroutines_makes_their_tasks_in_order() -> None:
    async def completes_a_list() -> list[int]:
        first = asyncio.create_task(act(0))
        return [await future for future in asyncio.as_completed([act(1), first, *(act(n) for n in range(2, 40))])]

    run = start_core_run(completes_a_list)
    names = ["act", *(f"act#{number}" for number in range(2, 41))]
    assert run.open == names
    for number, name in enumerate(names):
        run.complete(name, number)
    assert run.result == list(range(40))


@pytest.mark.contract("WF-1", "WF-2")
@pytest.mark.parametrize("function", [completes_coroutines, completes_coroutines_in_time, completes_awaitables])
@pytest.mark.filterwarnings("ignore:coroutine .* was never awaited:RuntimeWarning")
def test_as_completed_refuses_what_it_would_go_through_by_address(function: Callable[..., Any]) -> None:
    error = start_core_run(function).error
    assert error.code == "NotDurable"
    assert "create_task" in error.message
    gc.collect()  # what was never awaited is not to trouble another test
