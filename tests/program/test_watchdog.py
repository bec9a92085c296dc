"""A program that blocks its thread is stopped where it is, and nothing is ever raised outside it."""

import asyncio
import logging
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial
from itertools import count
from threading import Event, Lock, Thread, get_ident
from time import monotonic
from types import FunctionType
from typing import Any

import pytest

from holdfast.errors import RunawayWorkflow
from holdfast.program import watchdog as module
from holdfast.program.loop import DeterministicLoop, Timer, Watch
from holdfast.program.watchdog import Overdue, Watchdog

pytestmark = pytest.mark.untraced  # a strike may leave a lock of coverage held: see the watchdog

TICK_S = 0.01
BOUND_S = 0.03
MOST_SECONDS = 60.0


@pytest.fixture
def watchdog() -> Watchdog:
    """Return one that looks often."""
    return Watchdog(TICK_S)


@pytest.fixture
def watch(watchdog: Watchdog) -> Watch:
    """Return a watch with a short bound."""
    return Watch(BOUND_S, "run-1", "order", watchdog)


def spin() -> None:
    while True:
        pass


def line_of(function: Callable[..., Any]) -> str:
    return f"{__file__}:{function.__code__.co_firstlineno}"


def line_named(problem: RunawayWorkflow) -> int:
    """Return the line at which the error says that the code was."""
    named = re.search(r":(\d+); move what blocks", problem.message)
    assert named is not None, problem.message
    return int(named[1])


def logged(caplog: pytest.LogCaptureFixture) -> list[logging.LogRecord]:
    """Return what was logged, once there is something: the watchdog strikes first."""
    deadline = monotonic() + MOST_SECONDS
    while not caplog.records and monotonic() < deadline:
        Event().wait(TICK_S)
    return caplog.records


# --- what is stopped


def test_what_comes_to_rest_is_left_alone(watch: Watch, caplog: pytest.LogCaptureFixture) -> None:
    assert [watch.run(partial(pow, 2, n)) for n in range(3)] == [1, 2, 4]
    with pytest.raises(ZeroDivisionError):
        watch.run(lambda: 1 // 0)
    assert caplog.records == []


@pytest.mark.contract("MSG-3")
def test_an_endless_loop_is_stopped_and_the_line_is_named(watch: Watch, caplog: pytest.LogCaptureFixture) -> None:
    with pytest.raises(RunawayWorkflow) as caught:
        watch.run(spin)
    first = spin.__code__.co_firstlineno
    assert f"within {BOUND_S} s at {__file__}:" in caught.value.message
    assert line_named(caught.value) in (first + 1, first + 2)
    [record] = logged(caplog)
    assert record.levelno == logging.ERROR
    assert "run run-1: order blocks its node" in record.getMessage()
    assert f"{__file__}:" in record.getMessage()
    assert ", in spin" in record.getMessage()


def test_code_that_catches_every_exception_does_not_catch_it(watch: Watch) -> None:
    def careless() -> None:
        while True:
            try:
                spin()
            except Exception:
                caught.append("an exception")

    caught: list[str] = []
    with pytest.raises(RunawayWorkflow):
        watch.run(careless)
    assert caught == []


@pytest.mark.parametrize("ending", [None, ValueError("its own")], ids=["returns", "raises"])
def test_code_that_catches_it_is_struck_again_and_has_run_away_however_it_ends(
    ending: Exception | None, watch: Watch, caplog: pytest.LogCaptureFixture
) -> None:
    def stubborn() -> str:
        for _ in range(3):
            try:
                spin()
            except BaseException as problem:
                caught.append(problem)
        if ending is not None:
            raise ending
        return "done"

    caught: list[BaseException] = []
    with pytest.raises(RunawayWorkflow):
        watch.run(stubborn)
    assert [type(problem) for problem in caught] == [Overdue] * 3
    assert len(logged(caplog)) == 1


def test_a_call_of_c_code_is_logged_at_once_and_stopped_when_it_returns(watch: Watch) -> None:
    blocked = Lock()
    blocked.acquire()

    class Releasing(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            blocked.release()

    def blocks() -> None:
        came.append(blocked.acquire(True, MOST_SECONDS))
        came.append(True)

    came: list[bool] = []
    handler = Releasing()
    module.logger.addHandler(handler)
    try:
        with pytest.raises(RunawayWorkflow, match=r"test_watchdog\.py"):
            watch.run(blocks)
    finally:
        module.logger.removeHandler(handler)
    assert blocked.locked()  # it was released by the log, and taken by the call, before anything was raised
    assert came == []


def test_code_that_is_stopped_leaves_no_lock_locked() -> None:
    def locks() -> None:
        while True:
            with lock:
                pass

    watch, lock = Watch(0.002, "run-1", "order", Watchdog(0.001)), Lock()
    for _ in range(20):
        with pytest.raises(RunawayWorkflow):
            watch.run(locks)
        assert not lock.locked()


@pytest.mark.parametrize("turn_s", [None, 0])
def test_without_a_bound_nothing_is_watched(turn_s: float | None, watchdog: Watchdog) -> None:
    assert Watch(turn_s, "run-1", "order", watchdog).run(lambda: 5) == 5
    assert watchdog.thread is None


@pytest.mark.contract("MSG-3")
def test_each_thread_is_watched_by_itself(watchdog: Watchdog) -> None:
    def spinning(number: int) -> None:
        try:
            Watch(BOUND_S, f"run-{number}", "order", watchdog).run(spin)
        except RunawayWorkflow:
            stopped.append(number)

    def working() -> None:
        watch = Watch(MOST_SECONDS, "run-9", "order", watchdog)
        while len(stopped) < 2:
            watch.run(lambda: None)  # again and again: each one could wake the watchdog
        worked.append("undisturbed")

    stopped: list[int] = []
    worked: list[str] = []
    threads = [Thread(target=spinning, args=(1,)), Thread(target=spinning, args=(2,)), Thread(target=working)]
    join(threads)
    assert (sorted(stopped), worked) == ([1, 2], ["undisturbed"])


def join(threads: list[Thread]) -> None:
    for thread in threads:
        thread.daemon = True  # one that hangs fails its test, and no more
        thread.start()
    for thread in threads:
        thread.join(MOST_SECONDS * 5)
        assert not thread.is_alive(), "a thread hangs"


def test_the_watchdog_sleeps_while_nothing_runs_and_wakes_up_for_the_next(watchdog: Watchdog, watch: Watch) -> None:
    class Bell(Event):
        def wait(self, timeout: float | None = None) -> bool:
            if timeout is None:
                asleep.set()
            return super().wait(timeout)

    asleep = Event()
    watchdog.bell = Bell()
    for _ in range(3):
        watch.run(lambda: None)
        assert asleep.wait(MOST_SECONDS), "it goes on ticking"
        asleep.clear()
        with pytest.raises(RunawayWorkflow):
            watch.run(spin)
        assert asleep.wait(MOST_SECONDS), "it goes on ticking"
        asleep.clear()


def test_a_watchdog_that_is_awake_is_not_woken() -> None:
    """Waking it is no tick: were it woken by every turn of one thread, it would never strike another."""

    class Bell(Event):
        def set(self) -> None:
            woken.append(get_ident())
            super().set()

    def while_awake() -> None:
        while watchdog.is_asleep:
            pass
        join([Thread(target=others)])

    def others() -> None:
        other = Watch(MOST_SECONDS, "run-2", "order", watchdog)
        ran.extend(other.run(lambda: True) for _ in range(50))

    woken: list[int] = []
    ran: list[bool] = []
    watchdog = Watchdog(TICK_S)
    watchdog.bell = Bell()
    Watch(MOST_SECONDS, "run-1", "order", watchdog).run(while_awake)
    assert ran == [True] * 50
    assert woken == [get_ident()]


@pytest.mark.process
@pytest.mark.skipif(not hasattr(os, "fork"), reason="there is nothing to fork")
@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_a_forked_process_has_a_watchdog_of_its_own() -> None:
    watch = Watch(0.2, "run-1", "order")
    watch.run(lambda: None)  # so that the thread runs here, and does not there
    child = os.fork()
    if child == 0:
        logging.disable()
        try:
            watch.run(spin)
        except RunawayWorkflow:
            os._exit(7)
        os._exit(8)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7


TRACED_AFTER_A_STRIKE = """
import sys
from holdfast.errors import RunawayWorkflow
from holdfast.program.loop import Watch
from holdfast.program.watchdog import Watchdog

def spin():
    while True:
        pass

try:
    Watch(0.02, "run-1", "order", Watchdog(0.01)).run(spin)
except RunawayWorkflow:
    calls = []
    getattr(sys, sys.argv[1])(lambda frame, event, arg: calls.append(event))
    (lambda: None)()
    getattr(sys, sys.argv[1])(None)
    print(calls.count("call"))
"""


@pytest.mark.process
@pytest.mark.parametrize("tracer", ["setprofile", "settrace"])
def test_a_process_can_be_traced_after_a_strike(tracer: str) -> None:
    """A strike that is withdrawn, not raised, leaves a flag set with which Python 3.11 hangs under any tracer."""
    command = [sys.executable, "-c", TRACED_AFTER_A_STRIKE, tracer]
    done = subprocess.run(command, capture_output=True, text=True, timeout=MOST_SECONDS, check=True)
    assert done.stdout.split() == ["1"]


# --- locks


def within(module_name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """Return the function as if a module had it."""
    return FunctionType(function.__code__, {"__name__": module_name})


def linger(watch: Watch, ticks: int) -> None:
    while watch.ticks < ticks:
        pass


@pytest.mark.parametrize("name", ["logging", "logging.handlers", "threading", "coverage.collector"])
def test_a_thread_is_not_struck_while_it_may_be_taking_a_lock(name: str, watch: Watch) -> None:
    def piece() -> None:
        within(name, linger)(watch, watch.most_ticks + 5)
        left.append(watch.where)
        spin()

    left: list[str] = []
    with pytest.raises(RunawayWorkflow, match=r"test_watchdog\.py") as caught:
        watch.run(piece)
    assert left == [""]
    first = spin.__code__.co_firstlineno
    assert line_named(caught.value) in (first + 1, first + 2)


def test_what_blocks_there_is_struck_all_the_same_some_time_later(watch: Watch) -> None:
    with pytest.raises(RunawayWorkflow):
        watch.run(within("logging", spin))
    assert watch.ticks > watch.most_ticks + module.MOST_DELICATE_TICKS


def test_modules_that_only_sound_alike_are_not_spared(watch: Watch) -> None:
    with pytest.raises(RunawayWorkflow):
        watch.run(within("logging_shop", spin))
    assert watch.ticks <= watch.most_ticks + module.MOST_DELICATE_TICKS


# --- nothing is raised outside


@pytest.mark.parametrize("late", range(3))
@pytest.mark.parametrize("piece", [spin, lambda: "done"], ids=["spins", "ends in time"])
def test_strikes_that_come_while_the_watch_is_leaving_do_not_get_out(late: int, piece: Callable[[], Any]) -> None:
    class Late(Watch):
        """Is struck in the worst of places: while it makes sure that it is not."""

        def settle(self, thread_id: int) -> None:
            if next(strikes) < late:
                self.where = self.where or " at the last moment"
                module._set_async_exc(thread_id, module._OVERDUE)
            super().settle(thread_id)
            settled.append(thread_id)

    strikes = count()
    settled: list[int] = []
    watch = Late(BOUND_S, "run-1", "order", Watchdog(TICK_S))
    if late or piece is spin:
        with pytest.raises(RunawayWorkflow):
            watch.run(piece)
    else:
        assert watch.run(piece) == "done"
    assert settled, "it never came to the end of leaving"
    assert bystander() == 5_000


def bystander() -> int:
    """Do what the engine does after a turn: enough for anything that is pending to be raised."""
    return sum(1 for _ in map(str, range(5_000)))


@pytest.fixture
def quick_switches() -> Iterator[None]:
    """Let threads interrupt each other as often as they can."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(before)


def ends_when_struck() -> None:
    with suppress(Overdue):
        spin()


HELD = Lock()
HELD.acquire()
PIECES: list[Callable[[], Any]] = [spin, ends_when_struck, *[partial(HELD.acquire, timeout=1e-5)] * 6]


@pytest.mark.slow
@pytest.mark.usefixtures("quick_switches")
def test_thousands_of_turns_that_end_just_as_they_are_struck(monkeypatch: pytest.MonkeyPatch) -> None:
    """The watchdog dawdles between looking and striking, so that turns end in between."""
    strike = module._set_async_exc

    def dawdle(thread_id: int, what: Any) -> None:
        if get_ident() != thread_id:
            HELD.acquire(timeout=1e-6)
        strike(thread_id, what)

    def work(number: int) -> None:
        watch = Watch(watchdog.tick_s, f"run-{number}", "order", watchdog)
        for turn in range(1_000):
            try:
                watch.run(PIECES[turn % len(PIECES)])
            except RunawayWorkflow:
                stopped.append(number)
            try:
                assert sum(map(len, ["turn"] * 50)) == 200
                HELD.acquire(timeout=1e-6)
            except BaseException as problem:
                leaked.append(problem)
                raise
        finished.append(number)

    monkeypatch.setattr(module, "_set_async_exc", dawdle)
    monkeypatch.setattr(module.logger, "disabled", True)
    stopped: list[int] = []
    leaked: list[BaseException] = []
    finished: list[int] = []
    watchdog = Watchdog(1e-5)
    join([Thread(target=work, args=(number,)) for number in range(3)])
    assert leaked == []
    assert sorted(finished) == [0, 1, 2]
    assert len(stopped) >= 3 * 1_000 * 2 // 8  # these end in no other way
    assert watchdog.watched == {}


# --- the loop


class Host:
    def start_timer(self, timer: Timer, due_at: int) -> None: ...
    def cancel_timer(self, timer: Timer) -> None: ...


@pytest.mark.contract("MSG-3")
@pytest.mark.parametrize("is_task", [True, False], ids=["task", "callback"])
async def test_a_turn_that_never_awaits_is_stopped_and_the_loop_around_is_the_same(watch: Watch, is_task: bool) -> None:
    async def spins() -> None:
        try:
            spin()
        finally:
            await asyncio.sleep(1)  # it even waits on its way out

    loop = DeterministicLoop(Host(), 1_000, 1, watch)  # type: ignore[abstract]
    outer, task = asyncio.get_running_loop(), asyncio.current_task()
    if is_task:
        loop.create_task(spins())
    else:
        loop.call_soon(spin)
    with pytest.raises(RunawayWorkflow, match=line_of(spin).rpartition(":")[0]):
        loop.run_until_idle()
    assert (asyncio.get_running_loop(), asyncio.current_task()) == (outer, task)
    loop.dispose()
    await asyncio.sleep(0)


@pytest.mark.contract("MSG-3")
def test_a_program_that_spins_while_it_is_let_go_is_stopped_and_the_others_are_let_go_too(watch: Watch) -> None:
    async def spins() -> None:
        try:
            await asyncio.sleep(1)
        finally:
            spin()

    async def closes(name: str) -> None:
        try:
            await asyncio.sleep(1)
        finally:
            closed.append(name)

    closed: list[str] = []
    loop = DeterministicLoop(Host(), 1_000, 1, watch)  # type: ignore[abstract]
    for coro in (closes("before"), spins(), closes("after")):
        loop.create_task(coro)
    loop.run_until_idle()
    loop.dispose()
    assert sorted(closed) == ["after", "before"]
