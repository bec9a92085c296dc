"""The deterministic loop: plain asyncio works, what cannot be replayed is refused, and nothing depends on addresses."""

import asyncio
import gc
import math
import socket
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable, Generator
from contextvars import ContextVar, copy_context
from typing import Any

import pytest

from holdfast.app import App
from holdfast.core.events import ErrorInfo
from holdfast.errors import NondeterminismError, RunawayWorkflow
from holdfast.program.api import on_update
from holdfast.program.loop import DeterministicLoop, Timer, outside_loop, running
from tests.process_state import no_collections
from tests.program.core_run import CoreRun, start_core_run

app = App("loop")


@app.activity
async def act(value: int) -> int:
    return value


@app.activity
async def undo(value: int) -> int:
    raise AssertionError("an activity was carried out outside its run")


# --- plain asyncio


async def gathers() -> list[int]:
    return list(await asyncio.gather(act(1), act(2), act(3)))


async def waits_for_first() -> int:
    tasks = [asyncio.create_task(act(n)) for n in range(3)]
    done, pending = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    for task in pending:
        task.cancel()
    return min(task.result() for task in done)


async def groups() -> int:
    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(act(n)) for n in range(3)]
    return sum(task.result() for task in tasks)


async def locks() -> list[int]:
    lock, seen = asyncio.Lock(), []

    async def one(n: int) -> None:
        async with lock:
            seen.append(await act(n))

    await asyncio.gather(one(1), one(2))
    return seen


async def queues() -> list[int]:
    queue: asyncio.Queue[int] = asyncio.Queue(maxsize=1)

    async def produce() -> None:
        for n in range(3):
            await queue.put(await act(n))

    task = asyncio.create_task(produce())
    found = [await queue.get() for _ in range(3)]
    await task
    return found


async def shields() -> int:
    inner = asyncio.ensure_future(act(5))
    outer = asyncio.shield(inner)
    outer.cancel()
    return await inner


async def as_completed() -> list[int]:
    tasks = [asyncio.create_task(act(n)) for n in range(3)]
    return [await next_one for next_one in asyncio.as_completed(tasks)]


async def events() -> str:
    event = asyncio.Event()
    asyncio.get_running_loop().call_later(5, event.set)
    await event.wait()
    return "set"


async def semaphores() -> int:
    semaphore = asyncio.Semaphore(2)

    async def one(n: int) -> int:
        async with semaphore:
            return await act(n)

    return sum(await asyncio.gather(*(one(n) for n in range(4))))


async def waits_for() -> int:
    return await asyncio.wait_for(act(4), timeout=60)


def all_acts(run: CoreRun) -> None:
    """Complete every open activity until none is left, the first one first."""
    while acts := [step for step in run.state.open_steps.values() if step.kind == "activity"]:
        run.complete(acts[0].step_id, int(bytes(acts[0].body.input).split(b":")[1].rstrip(b"}")))  # type: ignore[attr-defined]


@pytest.mark.contract("WF-1", "WF-2")
@pytest.mark.parametrize(
    ("function", "expected"),
    [
        (gathers, [1, 2, 3]),
        (waits_for_first, 0),
        (groups, 3),
        (locks, [1, 2]),
        (queues, [0, 1, 2]),
        (shields, 5),
        (as_completed, [0, 1, 2]),
        (semaphores, 6),
        (waits_for, 4),
    ],
)
def test_asyncio_works_as_it_does_elsewhere_and_replays(function: Callable[..., Any], expected: Any) -> None:
    run = start_core_run(function)
    all_acts(run)
    assert run.result == expected
    for length in range(1, len(run.events) + 1):
        problem = difference(run, length)
        # Only a history that was cut in the middle of a turn does not replay.
        assert problem is None or "no such step before" in problem.message
    assert difference(run, len(run.events)) is None


def difference(run: CoreRun, length: int) -> NondeterminismError | None:
    """Return how the first events of a history and the code differ, or None."""
    try:
        run.replayed(events=run.events[:length])
    except NondeterminismError as problem:
        return problem
    return None


def test_a_callback_for_later_is_a_durable_timer() -> None:
    run = start_core_run(events)
    assert run.open == ["timer"]
    run.fire("timer")
    assert run.result == "set"


@pytest.mark.contract("WF-1")
def test_infinity_is_never_and_no_timer() -> None:
    async def patient() -> int:
        value = await asyncio.wait_for(act(1), math.inf)
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(asyncio.sleep(math.inf), 10)
        return value

    run = start_core_run(patient)
    assert run.open == ["act"]
    run.complete("act", 1)
    assert run.open == ["timer"]
    run.fire("timer")
    assert run.result == 1
    assert difference(run, len(run.events)) is None


@pytest.mark.contract("WF-1")
def test_a_timer_for_what_is_no_number_is_refused() -> None:
    async def vague() -> None:
        asyncio.get_running_loop().call_later(math.nan, print)

    error = start_core_run(vague).error
    assert (error.code, "NaN" in error.message) == ("InvalidInput", True)


@pytest.mark.contract("WF-1")
def test_a_timeout_cancels_what_it_surrounds() -> None:
    async def impatient() -> str:
        try:
            async with asyncio.timeout(10):
                await act(1)
        except TimeoutError:
            return "late"
        return "in time"

    run = start_core_run(impatient)
    assert run.open == ["timer", "act"]
    run.fire("timer")
    assert run.result == "late"
    assert "StepCancelled" in [event.event_type for event in run.events]
    in_time = start_core_run(impatient)
    in_time.complete("act", 1)
    assert in_time.result == "in time"


def test_a_task_group_cancels_its_other_tasks_when_one_fails() -> None:
    async def group() -> str:
        try:
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(act(1))
                tasks.create_task(act(2))
        except ExceptionGroup as problems:
            return type(problems.exceptions[0]).__name__
        return "fine"

    run = start_core_run(group)
    run.fail("act#2")
    assert run.result == "ActivityFailed"
    cancelled = [event.step_id for event in run.events if event.event_type == "StepCancelled"]
    assert cancelled == ["act"]


def test_what_is_begun_and_given_up_in_one_breath_leaves_no_trace() -> None:
    async def hasty() -> str:
        async with asyncio.timeout(10):
            await asyncio.sleep(0)
        return "done"

    run = start_core_run(hasty)
    assert [event.event_type for event in run.events] == ["RunQueued", "RunStarted", "RunCompleted"]


def test_time_stands_still_while_the_program_runs() -> None:
    async def clock() -> bool:
        before = asyncio.get_running_loop().time()
        for _ in range(1_000):
            await asyncio.sleep(0)
        return asyncio.get_running_loop().time() == before

    assert start_core_run(clock).result is True


# --- what is refused

KEPT = set("call_at call_exception_handler call_later call_soon create_future create_task get_debug".split()) | set(
    "get_exception_handler get_task_factory is_closed is_running shutdown_asyncgens time".split()
)
REFUSED = sorted(
    name
    for name in vars(asyncio.AbstractEventLoop)
    if not name.startswith("_") and callable(getattr(asyncio.AbstractEventLoop, name)) and name not in KEPT
)


@pytest.mark.contract("WF-1")
@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_replayed_is_refused_and_the_alternative_is_named(name: str) -> None:
    async def naughty() -> str:
        getattr(asyncio.get_running_loop(), name)(None)
        return "let through"

    error = start_core_run(naughty).error
    assert error.code == "NotDurable"
    assert error.message.startswith(f"{name}: ")
    assert any(word in error.message for word in ("activity", "signal", "await")), error.message


async def in_a_thread() -> None:
    await asyncio.to_thread(print)


async def over_the_network() -> None:
    await asyncio.open_connection("localhost", 1)


async def as_a_server() -> None:
    await asyncio.start_server(lambda reader, writer: None, "localhost", 0)


async def as_a_process() -> None:
    await asyncio.create_subprocess_exec(sys.executable, stdout=subprocess.PIPE)


async def on_a_socket() -> None:
    with socket.socket() as plain:
        await asyncio.get_running_loop().sock_connect(plain, ("localhost", 1))


async def as_completed_with_coroutines() -> None:
    for next_one in asyncio.as_completed({act(1), act(2)}):
        await next_one


@pytest.mark.contract("WF-1", "WF-2")
@pytest.mark.parametrize(
    ("function", "instead"),
    [
        (in_a_thread, "activity"),
        (over_the_network, "activity"),
        (as_a_server, "signal"),
        (as_a_process, "activity"),
        (on_a_socket, "activity"),
        (as_completed_with_coroutines, "create_task"),
    ],
)
@pytest.mark.filterwarnings("ignore:coroutine .* was never awaited:RuntimeWarning")
def test_the_usual_ways_to_the_outside_are_refused(function: Callable[..., Any], instead: str) -> None:
    error = start_core_run(function).error
    assert error.code == "NotDurable"
    assert instead in error.message
    gc.collect()  # what was never awaited is not to trouble another test


def new_loop() -> DeterministicLoop:
    class Host:
        def start_timer(self, timer: Timer, due_at: int) -> None: ...
        def cancel_timer(self, timer: Timer) -> None: ...

    return DeterministicLoop(Host(), 1_000, 1)  # type: ignore[abstract]


def test_a_workflow_that_does_not_come_to_rest_is_stopped() -> None:
    async def spins() -> None:
        while True:  # noqa: ASYNC110
            await asyncio.sleep(0)

    loop = new_loop()
    loop.create_task(spins())
    with pytest.raises(RunawayWorkflow, match="1000 callbacks"):
        loop.run_until_idle()
    loop.dispose()


@pytest.mark.parametrize("code", [3, "bye"])
def test_a_workflow_that_wants_to_end_the_process_only_ends_itself(code: int | str) -> None:
    async def exits() -> None:
        sys.exit(code)

    error = start_core_run(exits).error
    assert (error.code, error.message) == ("SystemExit", str(code))


@pytest.mark.contract("API-2")
def test_the_cause_of_a_group_is_its_own_or_its_first_member() -> None:
    async def fails() -> None:
        raise KeyError("gone") from OSError("lost")

    async def grouped() -> None:
        async with asyncio.TaskGroup() as group:
            group.create_task(fails())
            group.create_task(act(1))

    async def explained() -> None:
        raise ExceptionGroup("both", [KeyError("gone")]) from OSError("lost")

    assert _codes(start_core_run(grouped).error) == ["ExceptionGroup", "KeyError", "OSError"]
    assert _codes(start_core_run(explained).error) == ["ExceptionGroup", "OSError"]


def _codes(error: ErrorInfo | None) -> list[str]:
    return [] if error is None else [error.code, *_codes(error.cause)]


# --- nothing depends on addresses


async def races() -> list[str]:
    log = []
    tasks = {asyncio.create_task(act(n), name=f"t{n}") for n in range(8)}
    while tasks:
        done, tasks = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        for task in done:
            log.append(f"{task.get_name()}={task.result()}")
            if len(log) <= 8:
                extra = asyncio.create_task(act(len(log) + 10), name=f"x{len(log)}")
                tasks.add(extra)
    return log


@pytest.mark.contract("WF-2")
def test_sixty_replays_of_one_history_with_sets_of_tasks_give_one_outcome() -> None:
    own = App("races")
    run = start_core_run(races, app=own)
    run.control("PAUSE")
    for step_id in run.open[::-1]:  # all of them arrive at once, when the run is resumed
        run.complete(step_id, len(step_id))
    run.control("RESUME")
    all_acts(run)
    outcomes, ballast = {tuple(run.result)}, []
    for number in range(60):
        ballast.append([object() for _ in range(number * 7)])  # so that addresses differ
        program = run.replayed().program
        assert program._main is not None
        outcomes.add(tuple(program._main.result()))
    assert len(outcomes) == 1


# --- the loop around it


async def test_the_loop_and_the_task_around_are_the_same_afterwards() -> None:
    outer, task = asyncio.get_running_loop(), asyncio.current_task()
    hooks = sys.get_asyncgen_hooks()
    run = start_core_run(gathers)
    assert asyncio.get_running_loop() is outer
    assert asyncio.current_task() is task
    run.close()
    assert asyncio.get_running_loop() is outer
    assert asyncio.current_task() is task
    assert sys.get_asyncgen_hooks() == hooks
    await asyncio.sleep(0)


async def test_the_loop_around_is_the_same_after_a_failure() -> None:
    async def broken() -> None:
        raise ValueError("no")

    outer, task = asyncio.get_running_loop(), asyncio.current_task()
    assert start_core_run(broken).error.code == "ValueError"
    assert (asyncio.get_running_loop(), asyncio.current_task()) == (outer, task)


# --- letting go half-way

touched: list[str] = []


async def cleans_up() -> None:
    try:
        await act(1)
    finally:
        await undo(1)
        touched.append("after undo")


async def catches_everything() -> None:
    for _ in range(3):
        try:
            await act(1)
        except BaseException:
            await asyncio.sleep(1)
            touched.append("after sleep")


async def has_helpers() -> None:
    async with asyncio.TaskGroup() as group:
        group.create_task(cleans_up())
        group.create_task(cleans_up())
        await undo(2)


async def starts_in_finally() -> None:
    try:
        await asyncio.sleep(100)
    finally:
        asyncio.create_task(undo(1))  # noqa: RUF006
        touched.append("after create_task")


async def numbers() -> AsyncIterator[int]:
    try:
        for n in range(10):
            yield n
            await act(n)
    finally:
        await undo(7)
        touched.append("after the generator")


async def generates() -> None:
    async for _ in numbers():
        await act(100)


async def holds_a_generator() -> None:
    generator = numbers()
    await anext(generator)
    await act(100)


@pytest.mark.contract("WF-2")
@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize(
    "function", [cleans_up, catches_everything, has_helpers, starts_in_finally, generates, holds_a_generator]
)
@pytest.mark.parametrize("is_closed", [True, False], ids=["closed", "closed and dropped later"])
async def test_a_program_that_is_let_go_gets_no_further(
    function: Callable[..., Any], is_closed: bool, recwarn: pytest.WarningsRecorder
) -> None:
    touched.clear()
    run = start_core_run(function)
    history = list(run.events)
    program = run.program
    program.close()
    if is_closed:
        del program, run.replay
        gc.collect()
    await asyncio.sleep(0)
    gc.collect()
    assert touched == []
    assert run.events == history
    assert [str(warning.message) for warning in recwarn] == []


async def waits_for_a_step() -> None:
    await act(1)


async def waits_for_a_task() -> None:
    await asyncio.create_task(act(1))


async def waits_with_a_bound() -> None:
    async with asyncio.timeout(10):
        await act(1)


@pytest.mark.parametrize(
    "function", [waits_for_a_step, waits_for_a_task, waits_with_a_bound, gathers, waits_for_first, groups, locks]
)
def test_a_program_that_is_let_go_leaves_nothing_to_the_garbage_collector(function: Callable[..., Any]) -> None:
    """Runs that are parked are let go by the thousand, and the collector is patient while nodes are at work."""
    run = start_core_run(function)
    while gc.collect():  # what other tests have left; finalizers may leave more
        pass
    with no_collections():
        run.close()
        del run.replay
        assert gc.collect() == 0


class Promise:
    """A future of somebody else's, as far as asyncio wants one."""

    def __init__(self) -> None:
        self._asyncio_future_blocking = False

    def __await__(self) -> Generator[Any, None, None]:
        self._asyncio_future_blocking = True
        yield self

    def get_loop(self) -> asyncio.AbstractEventLoop:
        return asyncio.get_running_loop()

    def add_done_callback(self, callback: Any, *, context: Any = None) -> None:
        pass


def takes_updates() -> None:
    """Let something be able to wake the run, so that it is not paused."""
    on_update("wake", lambda: None)


async def waits_for_a_promise() -> None:
    takes_updates()
    await Promise()


async def all_wait_for_one() -> None:
    takes_updates()
    never = asyncio.get_running_loop().create_future()

    async def wait() -> None:
        await never

    tasks = [asyncio.create_task(wait()) for _ in range(20_000)]
    await tasks[0]


@pytest.mark.contract("MSG-3")
@pytest.mark.parametrize("function", [waits_for_a_promise, all_wait_for_one])
def test_whatever_a_program_waits_for_it_is_let_go_at_once(function: Callable[..., Any]) -> None:
    run = start_core_run(function)
    began = time.process_time()
    run.close()
    assert time.process_time() - began < 1.5


marked: ContextVar[str] = ContextVar("marked", default="unmarked")


@pytest.mark.filterwarnings("error")
def test_a_program_that_is_let_go_ends_each_task_as_the_current_one_in_its_context() -> None:
    left: list[tuple[str, str, bool]] = []

    async def leaves(name: str) -> None:
        task, token = asyncio.current_task(), marked.set(name)
        try:
            await act(1)
        finally:
            left.append((name, marked.get(), asyncio.current_task() is task))
            marked.reset(token)  # raises in any other context
            left.append((name, marked.get(), asyncio.current_task() is task))

    async def has_others() -> None:
        own = copy_context()
        own.run(marked.set, "given")
        asyncio.create_task(leaves("helper"))  # noqa: RUF006
        asyncio.create_task(leaves("of its own"), context=own)  # noqa: RUF006
        await leaves("main")

    run = start_core_run(has_others)
    loop, outside = run.program.loop, marked.set("outside")
    run.close()
    assert left == [
        *(("of its own", "of its own", True), ("of its own", "given", True)),
        *(("helper", "helper", True), ("helper", "unmarked", True)),
        *(("main", "main", True), ("main", "unmarked", True)),
    ]
    assert marked.get() == "outside"
    assert asyncio.current_task(loop) is None
    marked.reset(outside)


@pytest.mark.filterwarnings("error")
def test_what_waits_again_when_its_program_is_let_go_is_ended_there_and_not_by_the_garbage_collector() -> None:
    left: list[tuple[str, bool]] = []

    async def waits_again(task: "asyncio.Task[Any] | None") -> None:
        try:
            await act(1)
        except BaseException:
            try:
                await asyncio.sleep(0)
            finally:
                left.append((marked.get(), asyncio.current_task() is task))

    async def awaits_it() -> None:
        marked.set("main")
        await waits_again(asyncio.current_task())

    run = start_core_run(awaits_it)
    with no_collections():
        run.close()
        assert left == [("main", True)]
    gc.collect()
    assert left == [("main", True)]


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_a_program_that_refuses_to_be_let_go_is_told_again_but_not_for_ever() -> None:
    caught: list[str] = []
    has_given_in = False

    async def insists() -> None:
        while not has_given_in:
            try:
                await act(1)
            except BaseException as problem:
                caught.append(type(problem).__name__)

    run = start_core_run(insists)
    run.close()
    assert set(caught) == {"ProgramClosed"}
    has_given_in = True  # it is closed once more when the interpreter ends


def test_a_generator_that_is_left_half_way_is_closed_within_the_run() -> None:
    async def leaves() -> str:
        async for number in cleaning():
            if number == 1:
                break
        await act(5)
        return "done"

    async def cleaning() -> AsyncIterator[int]:
        try:
            yield 0
            yield 1
        finally:
            await act(9)

    run = start_core_run(leaves)
    assert run.open == ["act", "act#2"]
    all_acts(run)
    assert run.result == "done"
    run.replayed()


def test_loops_run_inside_each_other_and_each_finds_its_own_afterwards() -> None:
    hooks = sys.get_asyncgen_hooks()
    outer, inner = new_loop(), new_loop()
    with outside_loop():
        for _ in range(2):
            with running(outer):
                mine = sys.get_asyncgen_hooks()
                assert asyncio._get_running_loop() is outer
                with running(inner):
                    assert asyncio._get_running_loop() is inner
                    assert sys.get_asyncgen_hooks() != mine
                assert asyncio._get_running_loop() is outer
                assert sys.get_asyncgen_hooks() == mine
            assert asyncio._get_running_loop() is None
    assert sys.get_asyncgen_hooks() == hooks
    with running(outer):
        assert asyncio._get_running_loop() is outer
    assert asyncio._get_running_loop() is None
    assert sys.get_asyncgen_hooks() == hooks
