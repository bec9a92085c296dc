"""A program and its history, kept in step: pauses, starts that came to nothing, rotations, patches."""

import asyncio

import pytest
from msgspec.structs import replace

import holdfast as hf
from holdfast.core import commands as c
from holdfast.core import events as e
from holdfast.core.decide import apply_commands
from holdfast.core.event_writer import Decision
from holdfast.errors import NondeterminismError
from tests.program.core_run import BY, SECOND, START, CoreRun, start_core_run

app = hf.App("replay")


@app.activity
async def act(number: int) -> int:
    return number


def stuck(run: CoreRun) -> None:
    """Pause a run as an engine does whose program cannot go on."""
    paused = apply_commands(run.state, [c.PauseRun(error=e.ErrorInfo("VersionMismatch", "unknown"))], run.now, BY)
    assert isinstance(paused, Decision)
    run._keep(paused)


async def two_acts() -> int:
    return await act(1) + await act(2)


@pytest.mark.contract("WF-3", "WF-2")
@pytest.mark.parametrize("resumptions_in_vain", [0, 1, 3])
def test_a_start_that_came_to_nothing_is_made_when_the_run_is_resumed(resumptions_in_vain: int) -> None:
    run = start_core_run(two_acts)
    run.events, run.state = run.events[:1], start_core_run(two_acts).replayed(events=run.events[:1]).state
    run._keep(Decision((replace(start_core_run(two_acts).events[1], run_seq=0),)))
    stuck(run)
    for _ in range(resumptions_in_vain):
        run._keep(Decision((_resumed(run),)))
        stuck(run)
    again = run.replayed()
    assert again.replay.program is None
    again.control("RESUME")
    assert again.open == ["act"]
    again.complete("act", 1)
    again.complete("act#2", 2)
    assert again.result == 3
    assert again.replayed().state == again.state


def _resumed(run: CoreRun) -> e.Event:
    probe = run.replayed()
    probe.control("RESUME")
    [event] = [event for event in probe.events[len(run.events) :] if event.event_type == "RunResumed"]
    count = run.state.occurrences.get("RunResumed", 0)
    return replace(event, run_seq=0, idempotency_key=f"{count:064d}")


@pytest.mark.contract("WF-7", "WF-2")
def test_what_ended_during_a_pause_is_handed_on_at_the_time_of_the_resumption() -> None:
    async def timed() -> list[str]:
        await act(1)
        first = hf.now()
        await hf.sleep(10)
        return [first.isoformat(), hf.now().isoformat()]

    run = start_core_run(timed)
    run.control("PAUSE")
    run.complete("act", 1)
    run.now = START + 3_600 * SECOND
    run.control("RESUME")
    step = run.state.open_steps["sleep"]
    assert step.due_at == START + 3_610 * SECOND
    run.fire("sleep")
    assert run.result == ["2026-01-01T01:00:00+00:00", "2026-01-01T01:00:10+00:00"]
    run.replayed()


@pytest.mark.contract("CAN-1", "WF-4")
def test_a_cancellation_is_handed_on_to_every_stretch_and_time_never_goes_back() -> None:
    seen: list[str] = []

    async def rounds(number: int) -> None:
        try:
            await hf.sleep(10)
        except asyncio.CancelledError:
            seen.append(hf.now().isoformat())
            await act(number)
            if number < 2:
                hf.continue_as_new(number + 1)
            raise

    own = hf.App("rounds")
    run = CoreRun(own, own.workflow(rounds), 0).start()
    run.control("CANCEL")
    for prefix in ("", "1/", "2/"):
        run.now += SECOND
        middle = run.events
        since = next(n for n in range(len(middle) - 1, -1, -1) if n == 0 or middle[n].event_type == "ContinuedAsNew")
        assert run.replayed(events=middle).open == run.open == [f"{prefix}act"]
        assert since == 0 or middle[since].event_type == "ContinuedAsNew"
        run.complete(f"{prefix}act", 1)
    assert run.events[-1].event_type == "RunCancelled"
    first = [seen[0], *seen[-3:]]
    assert first == sorted(first)


@pytest.mark.contract("WF-3", "CAN-1")
def test_patches_belong_to_the_stretch_in_which_they_were_taken() -> None:
    async def rounds(number: int) -> bool:
        await act(number)
        if number == 0:
            hf.continue_as_new(1)
        return hf.patched("new")

    async def patched_rounds(number: int) -> bool:
        is_new = hf.patched("new")
        await act(number)
        if number == 0:
            hf.continue_as_new(1)
        return is_new

    old, new = hf.App("old"), hf.App("new")
    run = CoreRun(old, old.workflow(name="rounds")(rounds), 0).start()
    new.workflow(name="rounds")(patched_rounds)
    run.complete("act", 0)
    served = run.replayed(new)
    served.complete("1/act", 1)
    assert served.result is False
    fresh = CoreRun(new, new.workflow(name="other")(patched_rounds), 0).start()
    fresh.complete("act", 0)
    fresh.complete("1/act", 1)
    assert fresh.result is True
    assert fresh.replayed().state == fresh.state


@pytest.mark.contract("WF-2")
def test_a_program_that_is_replayed_knows_the_markers_of_its_history_with_their_values() -> None:
    async def order() -> bool:
        is_new = hf.patched("new")
        await act(1)
        return is_new

    run = start_core_run(order)
    assert not run.program.known_markers
    assert {step: bytes(value) for step, value in run.replayed().program.known_markers.items()} == {
        "patched:new": b'"new"'
    }


@pytest.mark.contract("WF-2")
def test_a_difference_names_event_expectation_finding_and_line() -> None:
    async def other() -> None:
        await hf.wait_signal("go", str)

    first, second = hf.App("first"), hf.App("second")
    run = CoreRun(first, first.workflow(name="order")(two_acts)).start()
    second.workflow(name="order")(other)
    with pytest.raises(NondeterminismError) as caught:
        run.replayed(second)
    assert caught.value.details == {
        "run_seq": 3,
        "expected": "StepStarted of step 'act' (act)",
        "found": "WaitSignal for step 'go' (go)",
        "source": f"{__file__}:{other.__code__.co_firstlineno + 1}",
    }
    assert caught.value.message.endswith(f" at {__file__}:{other.__code__.co_firstlineno + 1}")


@pytest.mark.contract("WF-2")
def test_a_code_that_ends_early_is_shown_where_it_begins() -> None:
    async def nothing() -> None: ...

    first, second = hf.App("first"), hf.App("second")
    run = CoreRun(first, first.workflow(name="order")(two_acts)).start()
    second.workflow(name="order")(nothing)
    with pytest.raises(NondeterminismError, match="asks for CompleteRun") as caught:
        run.replayed(second)
    assert caught.value.message.endswith(f" at {__file__}:{nothing.__code__.co_firstlineno}")
