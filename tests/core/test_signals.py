"""Signals and waits: who gets which signal, in which order, and what stays in the mailbox."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import UNSET, Raw
from msgspec.structs import replace

from holdfast.core import commands
from holdfast.core import events as e
from holdfast.core.decide import decide, is_taken, wait_for
from holdfast.core.event_writer import NOTHING, Decision
from holdfast.core.index_rows import runtime_snapshot
from holdfast.core.messages import Signal, with_arrival_times
from tests.core.driver import BY, SECOND, START, Driver, activity, wait


def receivers(run: Driver) -> list[tuple[str, str]]:
    """Return which step received which signal."""
    return [
        (event.step_id or "", event.data.signal_id) for event in run.events if isinstance(event.data, e.SignalReceived)
    ]


@pytest.mark.contract("SIG-4", "EVT-3")
def test_receiving_records_payload_suffix_and_cause_in_one_event() -> None:
    run = Driver().start()
    run.ask(wait("w", "go"))
    signal = run.sent("go", {"n": 1}, signal_id="click-1")
    [event] = run.tell(signal).events
    assert event.data == e.SignalReceived("go", "click-1", signal.suffix, None, Raw(b'{"n":1}'))
    assert (event.step_id, event.caused_by_signal_id) == ("w", signal.id)
    assert run.state.cursors == {"go": signal.suffix}
    assert run.state.last_signal_id == signal.id
    assert runtime_snapshot(run.state).signals == {"go": signal.suffix}


@pytest.mark.contract("SIG-4", "EVT-3")
def test_what_a_handler_made_of_a_signal_is_recorded_with_it() -> None:
    run = Driver().start()
    run.ask(wait("one", "go"))
    failed = e.ErrorInfo("ValueError", "not that one")
    signal = run.sent("go")
    for made, expected in (({"state_after": Raw(b"7")}, (Raw(b"7"), None)), ({"error": failed}, (UNSET, failed))):
        answer = decide(run.state, replace(signal, **made), START, BY)
        assert isinstance(answer, Decision)
        [event] = answer.events
        assert isinstance(event.data, e.SignalReceived)
        assert (event.data.state_after, event.data.error) == expected


@pytest.mark.contract("SIG-4")
def test_the_wait_that_takes_a_signal_can_be_told_beforehand() -> None:
    run = Driver().start()
    run.ask(wait("first", "go"), wait("second", "go"))
    for step_id, taker in ((None, "first"), ("second", "second"), ("nowhere", None)):
        step = wait_for(run.state, run.sent("go", step_id=step_id))
        assert (step.step_id if step is not None else None) == taker


@pytest.mark.contract("SIG-3")
def test_a_signal_that_nobody_waits_for_stays_in_the_mailbox_and_is_taken_later() -> None:
    run = Driver().start()
    signal = run.sent("go")
    assert run.tell(signal) == NOTHING
    run.ask(wait("w", "go"))
    assert run.tell(signal).events


@pytest.mark.contract("SIG-9", "SIG-8")
def test_a_signal_goes_to_the_oldest_wait_for_its_name() -> None:
    run = Driver().start()
    run.ask(activity("a"), wait("other", "stop"), wait("first", "go"), wait("second", "go"))
    run.tell(run.sent("go", signal_id="1"))
    run.tell(run.sent("go", signal_id="2"))
    assert receivers(run) == [("first", "1"), ("second", "2")]
    assert "other" in run.state.open_steps


@pytest.mark.contract("SIG-9")
def test_a_signal_that_is_addressed_to_a_wait_goes_there_and_nowhere_else() -> None:
    run = Driver().start()
    run.ask(wait("first", "go"), wait("second", "go"))
    run.tell(run.sent("go", signal_id="1", step_id="second"))
    assert receivers(run) == [("second", "1")]
    late = run.sent("go", signal_id="2", step_id="second")
    assert run.tell(late) == NOTHING
    assert late in run.mailbox
    assert "first" in run.state.open_steps


@pytest.mark.contract("SIG-9")
@pytest.mark.parametrize("step_id", ["other name", "activity", "nowhere"])
def test_an_address_that_is_no_wait_for_this_name_takes_nothing(step_id: str) -> None:
    run = Driver().start()
    run.ask(wait("other name", "stop"), activity("activity"), wait("w", "go"))
    assert run.tell(run.sent("go", step_id=step_id)) == NOTHING


@pytest.mark.contract("SIG-1")
def test_an_addressed_signal_may_overtake_without_making_the_others_fall_behind() -> None:
    run = Driver().start()
    earlier = run.sent("go", signal_id="earlier")
    run.ask(wait("addressed", "go"))
    run.tell(run.sent("go", signal_id="later", step_id="addressed"))
    assert run.state.cursors == {}
    run.ask(wait("w", "go"))
    run.tell(earlier)
    assert receivers(run) == [("addressed", "later"), ("w", "earlier")]


@pytest.mark.contract("SIG-1", "SIG-4")
def test_a_signal_at_or_behind_the_cursor_is_never_applied() -> None:
    run = Driver().start()
    behind, taken = run.sent("go"), run.sent("go")
    run.ask(wait("a", "go"), wait("b", "go"))
    run.tell(taken)
    assert run.tell(behind) == NOTHING
    assert run.tell(replace(taken, consumed_seq=None)) == NOTHING
    assert run.tell(run.sent("go")).events


@pytest.mark.contract("SIG-1")
def test_each_name_has_a_cursor_of_its_own() -> None:
    run = Driver().start()
    run.ask(wait("a", "go"), wait("b", "stop"))
    early, late = run.sent("stop"), run.sent("go")
    run.tell(late)
    run.tell(early)
    assert run.state.cursors == {"go": late.suffix, "stop": early.suffix}


@pytest.mark.contract("CAN-1", "SIG-1")
def test_the_cursor_and_the_mailbox_survive_a_rotation() -> None:
    run = Driver().start()
    run.ask(wait("a", "go"))
    old, waiting = run.sent("go"), run.sent("go")
    run.tell(old)
    run.ask(commands.ContinueAsNew())
    run.ask(wait("b", "go"))
    assert run.tell(replace(old, consumed_seq=None)) == NOTHING
    assert run.tell(waiting).events


@pytest.mark.contract("SIG-3")
def test_a_paused_run_keeps_its_signals_until_it_goes_on() -> None:
    run = Driver().start()
    run.ask(wait("w", "go"))
    run.control("PAUSE")
    signal = run.sent("go")
    assert run.tell(signal) == NOTHING
    run.control("RESUME")
    assert run.tell(signal).events


@pytest.mark.contract("SIG-8")
def test_a_wait_whose_time_is_over_takes_nothing_that_came_later() -> None:
    run = Driver().start()
    run.ask(wait("timed", "go", until=START + SECOND), wait("patient", "go"))
    in_time = run.sent("go")
    run.now = START + SECOND
    late = run.sent("go")
    assert late.accepted_at > run.now
    takers = [wait_for(run.state, signal) for signal in (in_time, late)]
    assert [step.step_id for step in takers if step is not None] == ["timed", "patient"]
    run.now = START  # a turn whose clock is behind
    run.tell(late)
    assert receivers(run) == [("patient", late.signal_id)]


@pytest.mark.contract("SIG-8", "SIG-1")
def test_after_a_clock_was_set_back_signals_came_when_it_said() -> None:
    run = Driver().start()
    signals = [
        replace(run.sent("go"), accepted_at=START + accepted * SECOND, received_at=START + received * SECOND)
        for accepted, received in ((10, 10), (3_600, 3_600), (3_601, 20), (3_602, 30))
    ]
    came = with_arrival_times(signals)
    assert [(signal.accepted_at - START) // SECOND for signal in came] == [10, 20, 20, 30]
    assert [signal.suffix for signal in came] == [signal.suffix for signal in signals]


@pytest.mark.contract("SIG-8")
def test_signals_of_one_instant_come_one_after_the_other() -> None:
    run = Driver().start()
    signals = [replace(run.sent("go"), received_at=START) for _ in range(3)]
    assert with_arrival_times(signals) is signals


@pytest.mark.contract("SIG-8")
def test_each_wait_is_kept_by_a_signal_of_its_own() -> None:
    run = Driver().start()
    run.ask(wait("patient", "go"), wait("timed", "go", until=START + SECOND), wait("other", "stop", until=START))
    timed = run.state.open_steps["timed"]
    first, second, third = run.sent("go"), run.sent("go"), run.sent("go", step_id="timed")
    run.now += 2 * SECOND
    late = run.sent("go")
    assert not is_taken(run.state, timed, [first])
    assert is_taken(run.state, timed, [first, second])
    assert is_taken(run.state, timed, [third])
    assert not is_taken(run.state, timed, [first, late])
    assert not is_taken(run.state, run.state.open_steps["other"], [first, second, third, late])


@pytest.mark.contract("SIG-8", "TMR-1")
def test_a_run_that_goes_on_is_told_again_of_the_time_of_its_waits() -> None:
    run = Driver().start()
    run.ask(wait("timed", "go", until=START + SECOND), wait("patient", "go"))
    message = run.message("timed")
    run.control("PAUSE")
    run.inbox.clear()
    answer = run.control("RESUME")
    assert isinstance(answer, Decision)
    assert [(again.signal_id, again.waiting_token, again.due_at) for again in answer.messages] == [
        (message.signal_id, message.waiting_token, START + SECOND)
    ]
    run.control("RESUME")
    assert len(run.inbox) == 1


@pytest.mark.contract("SIG-3")
def test_a_run_that_has_not_started_keeps_its_signals() -> None:
    run = Driver()
    signal = run.sent("go")
    assert run.tell(signal) == NOTHING
    run.start().ask(wait("w", "go"))
    assert run.tell(signal).events


@pytest.mark.contract("SIG-8")
@pytest.mark.parametrize("winner", ["signal", "timeout"])
def test_signal_and_timeout_race_and_the_loser_changes_nothing(winner: str) -> None:
    run = Driver().start()
    run.ask(wait("w", "go", until=START + SECOND))
    signal, timeout = run.sent("go"), run.message("w")
    run.now = START + SECOND
    inputs: tuple[Signal, object] = (signal, timeout)
    first, second = inputs if winner == "signal" else reversed(inputs)
    one, two = run.tell(first), run.tell(second)  # type: ignore[arg-type]
    assert len(one.events) == 1
    assert two == NOTHING
    assert (signal in run.mailbox) == (winner == "timeout")


@pytest.mark.contract("SIG-8")
def test_a_wait_without_a_limit_leaves_no_message_and_one_with_a_limit_leaves_one() -> None:
    run = Driver().start()
    assert run.ask(wait("a", "go")).messages == ()
    [message] = run.ask(wait("b", "go", until=START + 5)).messages
    assert (message.type, message.due_at, message.step_id) == ("TimerDue", START + 5, "b")
    assert message.waiting_token == run.state.open_steps["b"].token


@pytest.mark.contract("SIG-1", "INV")
@given(st.lists(st.sampled_from(["go", "stop"]), max_size=12), st.lists(st.sampled_from(["go", "stop"]), max_size=12))
def test_whatever_comes_first_signals_or_waits_each_name_is_taken_in_order(sent: list[str], waits: list[str]) -> None:
    run = Driver().start()
    for number in range(max(len(sent), len(waits))):
        if number < len(sent):
            run.sent(sent[number])
        if number < len(waits):
            run.ask(wait(f"w{number}", waits[number]))
        for signal in [signal for signal in run.mailbox if signal.consumed_seq is None]:
            assert isinstance(run.tell(signal), Decision)
    for name in ("go", "stop"):
        taken = [s for s in run.mailbox if s.name == name and s.consumed_seq is not None]
        assert len(taken) == min(sent.count(name), waits.count(name))
        assert taken == [s for s in run.mailbox if s.name == name][: len(taken)]
        assert [s.consumed_seq for s in taken] == sorted(s.consumed_seq or 0 for s in taken)
