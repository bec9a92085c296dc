"""The simulated world itself: time that jumps, an order that a seed decides, processes that stop and die."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any

import pytest

from holdfast.testing import START, sim_loop
from holdfast.testing.sim_loop import Deadlock, LoopClock, SimLoop, SimProcess, current_process


def play(main: Coroutine[Any, Any, Any], seed: int = 1, loop: SimLoop | None = None) -> Any:
    """Run a coroutine in a simulated world."""
    return (loop or SimLoop(seed)).simulate(main)


def test_time_jumps_and_nobody_waits_for_it() -> None:
    async def main() -> float:
        loop = asyncio.get_running_loop()
        clock = LoopClock(loop)
        await asyncio.gather(asyncio.sleep(3_600), asyncio.sleep(86_400))
        assert clock.now() >= START + 86_400_000_000
        return loop.time()

    assert play(main()) == pytest.approx(86_400, abs=0.1)


def test_timers_fire_in_their_order_and_never_early() -> None:
    async def main() -> list[float]:
        loop, fired = asyncio.get_running_loop(), []

        async def sleep(seconds: float) -> None:
            await asyncio.sleep(seconds)
            assert loop.time() >= seconds
            fired.append(seconds)

        await asyncio.gather(*(sleep(seconds) for seconds in (5.0, 1.0, 3.0)))
        return fired

    assert play(main()) == [1.0, 3.0, 5.0]


def order(seed: int) -> list[int]:
    """Return in which order ten tasks run that are ready at once."""

    async def main() -> list[int]:
        ran: list[int] = []

        async def run(number: int) -> None:
            await asyncio.sleep(0)
            ran.append(number)

        await asyncio.gather(*(run(number) for number in range(10)))
        return ran

    found: list[int] = play(main(), seed)
    return found


def test_the_seed_decides_the_order_of_what_is_ready() -> None:
    assert order(1) == order(1)
    assert len({tuple(order(seed)) for seed in range(10)}) > 5


def test_a_wait_that_nothing_can_end_is_a_deadlock() -> None:
    async def main() -> None:
        await asyncio.Event().wait()

    with pytest.raises(Deadlock):
        play(main())


def test_a_stopped_process_is_late_and_then_goes_on() -> None:
    loop = SimLoop(1)

    async def main() -> list[tuple[str, int]]:
        process, beats = SimProcess(loop, "p"), []

        async def beat() -> None:
            while True:
                await asyncio.sleep(1.0)
                beats.append((current_process().name, int(loop.time())))  # type: ignore[union-attr]

        process.spawn(beat())
        await asyncio.sleep(2.5)
        process.stop()
        await asyncio.sleep(5.0)
        process.go_on()
        await asyncio.sleep(1.1)
        assert current_process() is None
        return beats

    assert play(main(), loop=loop) == [("p", 1), ("p", 2), ("p", 7), ("p", 8)]


def test_a_killed_process_does_not_clean_up() -> None:
    loop = SimLoop(1)

    async def main() -> list[str]:
        process, traces = SimProcess(loop, "p"), []

        async def work() -> None:
            try:
                await asyncio.sleep(1.0)
            finally:
                traces.append("cleaned up")

        process.spawn(work())
        await asyncio.sleep(0.5)
        process.kill()
        await asyncio.wait([process.death])
        await asyncio.sleep(5.0)
        return list(traces)

    assert play(main(), loop=loop) == []


def test_a_fuse_kills_at_an_await() -> None:
    def steps(fuse: int) -> int:
        loop = SimLoop(1)

        async def main() -> int:
            process, taken = SimProcess(loop, "p"), 0

            async def work() -> None:
                nonlocal taken
                for _ in range(10):
                    taken += 1
                    await asyncio.sleep(0)

            process.fuse = fuse
            process.spawn(work())
            await asyncio.wait([process.death], timeout=1.0)
            return taken

        return int(play(main(), loop=loop))

    assert [steps(fuse) for fuse in (0, 1, 4, 50)] == [0, 1, 4, 10]


def test_looking_again_and_again_is_a_livelock(monkeypatch: pytest.MonkeyPatch) -> None:
    async def main() -> None:
        while True:  # noqa: ASYNC110 - the very thing that is to be found
            await asyncio.sleep(0)

    monkeypatch.setattr(sim_loop, "MOST_ROUNDS", 1_000)
    with pytest.raises(sim_loop.Livelock):
        play(main())


def test_what_is_given_to_a_thread_is_done_by_the_loop_unless_its_process_is_killed() -> None:
    loop = SimLoop(1)
    done: list[str] = []

    def work() -> int:
        done.append("first")
        return 7

    def fail() -> None:
        raise ValueError("in a thread")

    async def main() -> None:
        assert await asyncio.to_thread(work) == 7
        with pytest.raises(ValueError, match="in a thread"):
            await asyncio.to_thread(fail)
        process = SimProcess(loop, "p")
        process.spawn(asyncio.to_thread(done.append, "never"))
        process.kill()
        await asyncio.sleep(1)

    loop.simulate(main())
    assert done == ["first"]
