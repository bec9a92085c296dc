"""Places for activities: given in order, given back once, and told of when they are free."""

import asyncio
import threading

import pytest

from holdfast.engine.activities.slots import Slots


class Asking:
    """Somebody who wants a place."""

    def __init__(self, name: str, began: list[str]) -> None:
        self.name = name
        self.is_given_up = False
        self._began = began

    def begin(self) -> None:
        """Take note."""
        self._began.append(self.name)


def test_places_are_given_in_order_and_not_to_those_who_have_given_up() -> None:
    began: list[str] = []
    freed: list[int] = []
    slots = Slots(2)
    slots.on_free = lambda: freed.append(slots.free)
    people = {name: Asking(name, began) for name in "abcde"}
    for asking in people.values():
        slots.ask(asking)
    assert (began, slots.free) == (["a", "b"], 0)

    people["c"].is_given_up = True
    slots.give_back()
    assert (began, slots.free, freed) == (["a", "b", "d"], 0, [])
    for _ in range(3):
        slots.give_back()
    assert (began, slots.free, freed) == (["a", "b", "d", "e"], 2, [1, 2])


def test_nobody_gets_a_place_after_the_end() -> None:
    began: list[str] = []
    slots = Slots(1)
    for name in "ab":
        slots.ask(Asking(name, began))
    slots.close()
    slots.give_back()
    assert began == ["a"]


async def test_a_thread_keeps_its_place_until_it_has_ended() -> None:
    slots = Slots(1)
    loop, free, began, may_end = asyncio.get_running_loop(), asyncio.Event(), asyncio.Event(), asyncio.Event()
    slots.on_free = free.set
    slots.ask(Asking("a", []))

    def work() -> None:
        loop.call_soon_threadsafe(began.set)
        asyncio.run_coroutine_threadsafe(may_end.wait(), loop).result(5)

    async with asyncio.timeout(60):
        thread = slots.run(work)
        await began.wait()
        slots.leave(thread, "work")
        assert slots.free == 0
        may_end.set()
        await free.wait()
        assert slots.free == 1
        slots.ask(Asking("b", []))
        slots.leave(thread, "work")  # which is done by now
        assert slots.free == 1
    slots.close()


async def test_a_thread_that_has_ended_its_work_is_used_again() -> None:
    slots = Slots(3)
    meeting = threading.Barrier(2)

    def name() -> str:
        return threading.current_thread().name

    def meet() -> str:
        meeting.wait(5)
        return name()

    async with asyncio.timeout(60):
        both = {await asyncio.wrap_future(met) for met in [slots.run(meet), slots.run(meet)]}
        names = {await asyncio.wrap_future(slots.run(name)) for _ in range(50)}
        assert len(both) == 2
        assert len(names | both) <= 3
    threads = [thread for thread in threading.enumerate() if thread.name in names | both]
    assert threads
    assert all(thread.daemon for thread in threads)
    slots.close()
    slots.close()
    for thread in threads:
        thread.join(5)
        assert not thread.is_alive()


async def test_closing_waits_for_no_thread_and_begins_nothing_more() -> None:
    slots = Slots(1)
    loop, began, may_end = asyncio.get_running_loop(), asyncio.Event(), threading.Event()

    def work() -> None:
        loop.call_soon_threadsafe(began.set)
        may_end.wait(5)

    async with asyncio.timeout(60):
        first, second = slots.run(work), slots.run(work)
        await began.wait()
        slots.close()
        assert not first.done()
        assert second.cancelled()
        may_end.set()
        await asyncio.wrap_future(first)
        with pytest.raises(RuntimeError):
            slots.run(work)
