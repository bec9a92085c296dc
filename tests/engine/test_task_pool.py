"""Activities in a pool of tasks: side by side where they wait, else one after the other, and none notices another."""

import asyncio
from contextvars import ContextVar

import pytest

from holdfast.engine.activities.task_pool import FEW, IN_A_ROW, TaskPool

_seen: ContextVar[str] = ContextVar("seen", default="nothing")


class Piece:
    """Something to be carried out."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.is_given_up = False
        self.task: asyncio.Task[None] | None = None


class Journal:
    """Carries out works as a test wants it, and notes in which task."""

    def __init__(self) -> None:
        self.tasks: dict[str, asyncio.Task[None] | None] = {}
        self.may_go = asyncio.Event()
        self.pool = TaskPool(self.carry_out)

    async def carry_out(self, work: Piece) -> None:
        """Do what the name says."""
        assert asyncio.current_task() is work.task
        self.tasks[work.name] = work.task
        kind = work.name.partition(" ")[0]
        if kind == "waits":
            await self.may_go.wait()
        elif kind == "sets":
            _seen.set(work.name)
        elif kind == "adds":
            _seen.set(work.name)
            self.add(*(f"looks {number}" for number in range(3 * FEW)))
        elif kind == "looks":
            self.tasks[_seen.get()] = None
        elif kind == "cancels" and work.task is not None:
            work.task.cancel()

    def add(self, *names: str) -> list[Piece]:
        """Add works of these names."""
        works = [Piece(name) for name in names]
        for work in works:
            self.pool.add(work)
        return works


async def _settle() -> None:
    for _ in range(50):
        await asyncio.sleep(0)


async def test_what_need_not_wait_shares_a_task() -> None:
    journal = Journal()
    journal.add(*(f"works {number}" for number in range(5 * IN_A_ROW)))
    assert not journal.tasks  # nothing runs before the loop does
    await _settle()
    assert len(journal.tasks) == 5 * IN_A_ROW
    assert 5 <= len(set(journal.tasks.values())) <= 2 * FEW


@pytest.mark.parametrize("number", [1, FEW, FEW + 1, 300])
async def test_what_waits_holds_nobody_up(number: int) -> None:
    journal = Journal()
    journal.add(*(f"waits {each}" for each in range(number)), "works last")
    await _settle()
    assert len(journal.tasks) == number + 1
    assert len({journal.tasks[f"waits {each}"] for each in range(number)}) == number
    journal.may_go.set()
    await _settle()
    journal.add("works later")
    await _settle()
    assert "works later" in journal.tasks


async def test_nobody_sees_what_another_has_set_who_made_room_for_it() -> None:
    journal = Journal()
    journal.add("adds others")
    await _settle()
    assert set(journal.tasks) == {"adds others", "nothing", *(f"looks {number}" for number in range(3 * FEW))}


async def test_nobody_sees_what_another_has_set() -> None:
    journal = Journal()
    journal.add("sets one", "looks around", "works on")
    await _settle()
    assert journal.tasks["sets one"] is not None
    assert "nothing" in journal.tasks  # what was seen
    assert journal.tasks["looks around"] is not journal.tasks["sets one"]


async def test_a_cancellation_that_was_not_heeded_hits_nobody_else() -> None:
    journal = Journal()
    journal.may_go.set()
    journal.add("cancels itself", "waits here", "works on")
    await _settle()
    assert set(journal.tasks) == {"cancels itself", "waits here", "works on"}
    assert journal.tasks["waits here"] is not journal.tasks["cancels itself"]


async def test_what_was_given_up_before_it_began_is_passed_over() -> None:
    journal = Journal()
    [first, second] = journal.add("works first", "works second")
    first.is_given_up = True
    await _settle()
    assert list(journal.tasks) == ["works second"]
    assert second.task is None  # nobody can cancel the task for something that is over


async def test_whoever_is_cancelled_leaves_those_behind_to_another_task() -> None:
    journal = Journal()
    [waiting] = journal.add("waits for ever")
    await _settle()
    assert waiting.task is not None
    waiting.task.cancel()
    journal.add("works on")
    await _settle()
    assert "works on" in journal.tasks
    assert waiting.task is None
