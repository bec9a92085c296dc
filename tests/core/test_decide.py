"""What follows when the world tells a run something: every input in every status, and the fine print of each."""

import pytest
from msgspec import Raw
from msgspec.structs import replace

from holdfast.core import codec, commands
from holdfast.core import events as e
from holdfast.core.decide import Input, decide, queue_run
from holdfast.core.event_writer import NOTHING, Decision, Refusal
from holdfast.core.events import EngineRunRef, ErrorInfo, RunQueued
from holdfast.core.keys import event_id
from holdfast.core.messages import (
    ActivityDetached,
    ActivityErrored,
    ActivitySucceeded,
    Control,
    Message,
    NodeLost,
    Signal,
)
from holdfast.core.state import APPROVED, PAUSED, PENDING, RUNNING, TERMINAL, RunStatus, state_of
from holdfast.core.timing import Retry
from holdfast.errors import Conflict, InvalidInput, RunTerminal
from tests.core.driver import (
    BROKEN,
    BY,
    FATAL,
    SECOND,
    START,
    Driver,
    activity,
    answered,
    done,
    failed,
    task,
    timer,
    wait,
)
from tests.core.event_bodies import run_in

THREE = Retry(max_attempts=3, initial_ms=1_000, factor=2.0, jitter=0.0)


def types(answer: Decision | Refusal) -> list[str]:
    """Return the event types of a decision."""
    assert isinstance(answer, Decision), answer
    return [event.event_type for event in answer.events]


# --- every input in every status


def every_input(run: Driver) -> dict[str, Input]:
    """Return one of each thing that a run can be told, fit for the steps of `run_in` where it has them."""

    def message(kind: str, step_id: str, payload: bytes = b"null") -> Message:
        step = run.state.open_steps.get(step_id)
        token = step.token if step else "t"
        return Message(
            signal_id="m",
            run_id=run.run_id,
            type=kind,  # type: ignore[arg-type]
            occurred_at=START,
            waiting_token=token,
            step_id=step_id,
            payload=Raw(payload),
        )

    run.now = START + 60 * SECOND
    return {
        "continue": message("InternalContinue", ""),
        "timer": message("TimerDue", "timer"),
        "retry": message("RetryDue", "activity"),
        "answer": message("TaskCompleted", "task", b'{"actor":"ann"}'),
        "child": message("SubWorkflowCompleted", "child", b'{"result":1}'),
        "external": message("ExternalSignal", "signal"),
        "signal": run.sent("go"),
        "outcome": message("ActivityCompleted", "activity", b'{"logical_attempt_id":1,"engine_attempt_id":1}'),
        "success": done("activity"),
        "error": failed("activity"),
        "detached": ActivityDetached("activity", 1, 1),
        "lost": NodeLost("activity"),
        "control": Control(id="c", name="APPROVE", signal_id="s", actor="ann"),
    }


# What is appended, or the error of the refusal. In a finished run everything is refused with RunTerminal.
BEFORE_START = dict.fromkeys(
    ["timer", "retry", "answer", "child", "signal", "outcome", "success", "error", "detached", "lost"], ""
)
BEFORE_START |= {"continue": "RunStarted", "external": "InvalidInput"}
AFTER_START = {
    "continue": "",
    "timer": "TimerFired",
    "retry": "",  # no attempt has failed, so no message can be due
    "answer": "TaskCompleted",
    "child": "ChildCompleted",
    "external": "InvalidInput",
    "signal": "SignalReceived",
    "outcome": "StepCompleted",
    "success": "StepCompleted",
    "detached": "StepDetached",
    "error": "StepFailed",
    "lost": "StepRetried",
    "control": "SignalRejected",
}
EXPECTED = {
    PENDING: BEFORE_START | {"control": "SignalAccepted RunApproved"},
    APPROVED: BEFORE_START | {"control": "SignalAccepted"},
    RUNNING: AFTER_START,
    PAUSED: AFTER_START | {"signal": ""},
}


@pytest.mark.contract("WF-7")
@pytest.mark.parametrize("name", AFTER_START)
@pytest.mark.parametrize("status", list(RunStatus))
def test_every_input_in_every_status_has_a_typed_answer(status: RunStatus, name: str) -> None:
    run = run_in(status)
    version = run.state.version
    answer = run.try_tell(every_input(run)[name])
    if status in TERMINAL:
        assert isinstance(answer, Refusal)
        assert isinstance(answer.error, RunTerminal)
        assert answer.error.details == {"run_id": "run-1", "status": str(status)}
    elif EXPECTED[status][name] == "InvalidInput":
        assert isinstance(answer, Refusal)
        assert isinstance(answer.error, InvalidInput)
    else:
        assert " ".join(types(answer)) == EXPECTED[status][name]
        assert run.state.version == version + len(types(answer))


@pytest.mark.contract("EVT-2")
@pytest.mark.parametrize("name", AFTER_START)
def test_every_event_of_a_decision_has_a_complete_envelope(name: str) -> None:
    run = run_in(RUNNING)
    answer = run.try_tell(every_input(run)[name])
    events = answer.events if isinstance(answer, Decision) else ()
    assert len(events) == len(EXPECTED[RUNNING][name].replace("InvalidInput", "").split())
    for event in events:
        assert (event.run_id, event.run_seq, event.persisted_at) == ("run-1", 0, 0)
        assert (event.engine_run_ref, event.emitted_at) == (BY, run.now)
        assert event.event_id == event_id(event.idempotency_key)
        assert (event.adapter_version, event.schema_version) == ("holdfast/1", 1)
        if event.step_id is not None:
            opened = next(other for other in run.events if other.step_id == event.step_id)
            assert event.parent_event_id == opened.event_id


@pytest.mark.contract("EVT-5")
@pytest.mark.parametrize("name", AFTER_START)
def test_deciding_twice_gives_the_same_answer_and_changes_nothing(name: str) -> None:
    run = run_in(RUNNING)
    message, before = every_input(run)[name], state_of(run.run_id, run.events)
    first, second = (decide(run.state, message, run.now, BY) for _ in range(2))
    if isinstance(first, Decision):
        assert first == second
    assert run.state == before


# --- the beginning


@pytest.mark.contract("QUE-4", "EVT-3")
def test_a_queued_run_has_its_first_event_and_the_message_that_will_start_it() -> None:
    queued = RunQueued("order", "7", "acme", input=Raw(b"[1]"))
    decision = queue_run("run-1", queued, START, EngineRunRef("node-b"))
    [event] = decision.events
    assert (event.event_type, event.data, event.step_id) == ("RunQueued", queued, None)
    [message] = decision.messages
    assert (message.type, message.expected_version, message.due_at) == ("InternalContinue", 1, None)


def test_a_run_is_started_once_however_often_it_is_told_to_go_on() -> None:
    run = Driver()
    start = run.inbox["start"]
    assert types(run.tell(start)) == ["RunStarted"]
    assert run.tell(start) == NOTHING


@pytest.mark.contract("EVT-4")
@pytest.mark.parametrize("plan_version", ["1|2", "\ud800"])
def test_a_plan_version_that_cannot_be_part_of_a_key_is_refused_at_the_start(plan_version: str) -> None:
    with pytest.raises(InvalidInput):
        queue_run("run-1", RunQueued("order", plan_version), START, BY)


# --- messages: versions and tokens


@pytest.mark.contract("MSG-1")
def test_a_message_from_a_later_version_is_a_conflict() -> None:
    run = run_in(RUNNING)
    message = replace(run.message("timer"), expected_version=run.state.version + 1)
    answer = run.try_tell(message)
    assert isinstance(answer, Refusal)
    assert isinstance(answer.error, Conflict)
    assert types(run.tell(replace(message, expected_version=run.state.version - 1))) == []


@pytest.mark.contract("TMR-1", "MSG-1", "MSG-2")
@pytest.mark.parametrize("kind", ["timer", "task", "child"])
@pytest.mark.parametrize("token", [None, "", "timer@1", "other"])
def test_a_message_with_another_token_changes_nothing(kind: str, token: str | None) -> None:
    run = run_in(RUNNING)
    fit = {"timer": "timer", "task": "answer", "child": "child"}[kind]
    message = every_input(run)[fit]
    assert isinstance(message, Message)
    assert run.tell(replace(message, waiting_token=token)) == NOTHING
    assert types(run.tell(message))


@pytest.mark.contract("TMR-1")
@pytest.mark.parametrize("kind", ["TimerDue", "RetryDue", "TaskCompleted", "SubWorkflowCompleted"])
@pytest.mark.parametrize("step_id", ["activity", "timer", "signal", "task", "child", "update", "nowhere", None])
def test_a_message_for_a_step_of_another_kind_changes_nothing(kind: str, step_id: str | None) -> None:
    run = run_in(RUNNING)
    run.now = START + 60 * SECOND
    run.tell(failed("activity", retry=THREE))
    run.now += 60 * SECOND
    step = run.state.open_steps.get(step_id or "")
    fits = {
        "TimerDue": {"timer"},  # the wait of `run_in` has no time limit
        "RetryDue": {"activity"},
        "TaskCompleted": {"task"},
        "SubWorkflowCompleted": {"child"},
    }
    message = Message(
        signal_id="m",
        run_id="run-1",
        type=kind,  # type: ignore[arg-type]
        occurred_at=START,
        waiting_token=step.token if step else "t",
        step_id=step_id,
        payload=Raw(b'{"actor":"ann"}'),
    )
    assert (run.tell(message) == NOTHING) == (step_id not in fits[kind])


@pytest.mark.contract("MSG-3", "API-2")
def test_a_message_of_an_unknown_type_is_refused() -> None:
    run = run_in(RUNNING)
    answer = run.try_tell(replace(run.message("timer"), type="Nonsense"))
    assert isinstance(answer, Refusal)
    assert isinstance(answer.error, InvalidInput)


@pytest.mark.contract("MSG-3")
@pytest.mark.parametrize("name", ["answer", "child"])
@pytest.mark.parametrize("payload", [b"", b"nonsense", b"[]", b'{"actor":1}', b'{"error":{"code":1}}', b'"\xff"'])
def test_a_message_with_an_unreadable_payload_is_refused(name: str, payload: bytes) -> None:
    run = run_in(RUNNING)
    message = every_input(run)[name]
    assert isinstance(message, Message)
    if payload == b'{"actor":1}' and name == "child":
        return  # to a child's outcome an actor is an unknown field, which newer writers may add
    answer = run.try_tell(replace(message, payload=Raw(payload)))
    assert isinstance(answer, Refusal)
    assert isinstance(answer.error, InvalidInput)


# --- timers


@pytest.mark.contract("TMR-1")
@pytest.mark.parametrize(("now", "fires"), [(-1, False), (0, True), (1, True)])
def test_a_timer_fires_at_its_instant_and_never_before(now: int, fires: bool) -> None:
    run = Driver().start()
    run.ask(timer("sleep", START + SECOND))
    message = run.message("sleep")
    assert (message.type, message.due_at) == ("TimerDue", START + SECOND)
    run.now = START + SECOND + now
    answer = run.tell(message)
    assert types(answer) == (["TimerFired"] if fires else [])
    assert ("sleep" in run.state.open_steps) is not fires


@pytest.mark.contract("TMR-1", "MSG-2")
@pytest.mark.parametrize("kind", ["timer", "wait", "retry"])
def test_a_message_that_was_handed_out_early_is_left_for_its_instant_and_not_lost(kind: str) -> None:
    run = Driver().start()
    run.ask(timer("timer", START + SECOND), wait("wait", until=START + SECOND), activity("retry"))
    run.tell(failed("retry", retry=THREE))
    message = run.message(kind)
    assert run.tell(message) == Decision(messages=(message,))
    assert run.message(kind) == message
    run.now = START + SECOND
    assert run.tell(message) != NOTHING


@pytest.mark.contract("TMR-1")
def test_a_timer_fires_once_however_often_its_message_comes() -> None:
    run = Driver().start()
    run.ask(timer("sleep", START))
    message = run.message("sleep")
    assert types(run.tell(message)) == ["TimerFired"]
    assert run.tell(message) == NOTHING


@pytest.mark.contract("TMR-1")
def test_a_cancelled_timer_is_a_no_op_when_it_comes() -> None:
    run = Driver().start()
    run.ask(timer("sleep", START))
    message = run.message("sleep")
    run.ask(commands.CancelStep(step_id="sleep"))
    assert run.tell(message) == NOTHING


@pytest.mark.contract("TMR-1", "MSG-1")
def test_no_two_waits_of_a_run_have_the_same_token() -> None:
    run = Driver().start()
    run.ask(timer("a"), wait("b", until=START), task("c"))
    run.ask(timer("d"), wait("e", until=START))
    tokens = [step.token for step in run.state.open_steps.values()]
    assert None not in tokens
    assert len(set(tokens)) == len(tokens) == 5
    assert len({message.signal_id for message in run.inbox.values()}) == 4


@pytest.mark.contract("SIG-8")
def test_a_wait_times_out_at_its_instant() -> None:
    run = Driver().start()
    run.ask(wait("w", "go", until=START + SECOND))
    message = run.message("w")
    run.now = START + SECOND
    assert types(run.tell(message)) == ["SignalTimedOut"]
    assert run.tell(message) == NOTHING
    assert run.tell(run.sent("go")) == NOTHING


# --- results


@pytest.mark.contract("INV", "ATT-2")
def test_a_result_of_an_old_logical_attempt_comes_too_late() -> None:
    run = Driver().start()
    run.ask(activity(on_failure="pause"))
    run.tell(failed())
    run.control("RETRY_STEP", "charge")
    assert run.tell(done(attempt=1)) == NOTHING
    assert run.tell(failed(attempt=1, engine_attempt=2)) == NOTHING
    assert types(run.tell(done(attempt=2))) == ["StepCompleted"]
    assert run.tell(done(attempt=2)) == NOTHING


@pytest.mark.contract("INV")
@pytest.mark.parametrize("kind", ["timer", "signal", "task", "child", "update"])
def test_an_activity_outcome_never_closes_a_step_of_another_kind(kind: str) -> None:
    run = run_in(RUNNING)
    assert run.tell(done(kind)) == NOTHING
    assert run.tell(failed(kind)) == NOTHING
    assert run.tell(NodeLost(kind)) == NOTHING


@pytest.mark.contract("ATT-1")
def test_a_success_counts_whichever_dispatch_it_is_of() -> None:
    run = Driver().start()
    run.ask(activity())
    run.tell(NodeLost("charge"))
    assert types(run.tell(done())) == ["StepCompleted"]


@pytest.mark.contract("ATT-1")
def test_an_error_of_an_earlier_dispatch_is_ignored() -> None:
    run = Driver().start()
    run.ask(activity())
    run.tell(NodeLost("charge"))
    assert run.tell(failed(engine_attempt=1, retry=THREE)) == NOTHING
    assert types(run.tell(failed(engine_attempt=2, retry=THREE))) == ["StepRetried"]


# --- retries


@pytest.mark.contract("ACT-1", "ATT-1")
def test_a_failed_attempt_is_tried_again_after_the_delay_until_there_are_no_more() -> None:
    run = Driver().start()
    run.ask(activity())
    for attempt, delay in ((1, 1), (2, 2)):
        answer = run.tell(failed(engine_attempt=attempt, retry=THREE))
        [event] = answer.events
        assert event.data == e.StepRetried("failed", run.now + delay * SECOND, BROKEN)
        assert (event.logical_attempt_id, event.engine_attempt_id) == (1, attempt + 1)
        assert answer.dispatch == ()
        message = run.message("charge")
        assert (message.type, message.due_at) == ("RetryDue", run.now + delay * SECOND)
        run.now += delay * SECOND
        assert run.tell(message) == Decision(dispatch=("charge",))
    assert types(run.tell(failed(engine_attempt=3, retry=THREE))) == ["StepFailed"]
    assert run.state.failed_steps["charge"].error == BROKEN


@pytest.mark.contract("ACT-1")
@pytest.mark.parametrize(
    ("error", "retry"),
    [
        (FATAL, THREE),
        (BROKEN, Retry(max_attempts=1)),
        (BROKEN, Retry(max_attempts=9, non_retryable=("Broken",))),
    ],
    ids=["not retryable", "no attempts left", "excluded by the policy"],
)
def test_an_error_that_is_not_tried_again_fails_the_step(error: ErrorInfo, retry: Retry) -> None:
    run = Driver().start()
    run.ask(activity())
    answer = run.tell(ActivityErrored("charge", 1, 1, error, retry))
    assert [event.data for event in answer.events] == [e.StepFailed(error)]
    assert (answer.messages, answer.dispatch) == ((), ())


@pytest.mark.contract("ACT-1")
def test_jitter_shortens_the_delay_by_the_fraction_that_was_drawn() -> None:
    run = Driver().start()
    run.ask(activity())
    policy = Retry(initial_ms=1_000, jitter=0.5)
    run.tell(ActivityErrored("charge", 1, 1, BROKEN, policy, fraction=0.5))
    assert run.message("charge").due_at == START + 750_000


@pytest.mark.contract("ACT-1", "ATT-2")
def test_an_operators_retry_has_all_attempts_of_the_policy_again() -> None:
    run = Driver().start()
    run.ask(activity(on_failure="pause"))
    for engine_attempt in (1, 2, 3):
        run.tell(failed(engine_attempt=engine_attempt, retry=THREE))
    run.control("RETRY_STEP", "charge")
    for engine_attempt, delay in ((4, 1), (5, 2)):
        [event] = run.tell(failed(attempt=2, engine_attempt=engine_attempt, retry=THREE)).events
        assert event.data == e.StepRetried("failed", START + delay * SECOND, BROKEN)
    assert types(run.tell(failed(attempt=2, engine_attempt=6, retry=THREE))) == ["RunPaused", "StepFailed"]


@pytest.mark.contract("OWN-3", "ATT-1")
def test_a_lost_node_means_another_dispatch_of_the_same_logical_attempt() -> None:
    run = Driver().start()
    options = codec.encode({"retry": {"max_attempts": 0}})
    run.ask(commands.RunActivity(step_id="charge", name="charge", options=options))
    for engine_attempt in range(2, 13):
        answer = run.tell(NodeLost("charge"))
        [event] = answer.events
        assert (event.logical_attempt_id, event.engine_attempt_id) == (1, engine_attempt)
        assert answer.dispatch == ("charge",)
    keys = [event.idempotency_key for event in run.events]
    assert len(set(keys)) == len(keys)


@pytest.mark.contract("OWN-3", "ACT-1")
def test_a_node_that_is_lost_while_a_step_waits_for_its_next_attempt_does_not_cut_the_wait_short() -> None:
    run = Driver().start()
    run.ask(activity())
    run.tell(failed(retry=THREE))
    message = run.message("charge")
    assert run.tell(NodeLost("charge")) == NOTHING
    run.now += SECOND
    assert types(run.tell(NodeLost("charge"))) == ["StepRetried"]
    assert run.tell(message) == NOTHING  # its attempt was overtaken


@pytest.mark.contract("ATT-1")
@pytest.mark.parametrize("outcome", [ActivitySucceeded("gone", 1), failed("gone"), NodeLost("gone")])
def test_news_of_a_step_that_is_not_open_change_nothing(outcome: Input) -> None:
    assert run_in(RUNNING).tell(outcome) == NOTHING


# --- humans and children


@pytest.mark.contract("TSK-2")
def test_the_first_answer_stands() -> None:
    run = Driver().start()
    run.ask(task("approve"))
    first = answered(run, "approve", "TaskCompleted", {"actor": "ann", "answer": {"ok": True}})
    second = answered(run, "approve", "TaskCompleted", {"actor": "bob", "answer": {"ok": False}})
    [event] = run.tell(first).events
    assert event.data == e.TaskCompleted("ann", Raw(b'{"ok":true}'))
    assert run.tell(second) == NOTHING


@pytest.mark.contract("WF-4")
@pytest.mark.parametrize(
    ("payload", "expected"),
    [
        ({"result": 7}, e.ChildCompleted(Raw(b"7"))),
        ({}, e.ChildCompleted()),
        ({"error": {"code": "Broken", "message": "no"}}, e.ChildFailed(ErrorInfo("Broken", "no"))),
    ],
)
def test_a_child_comes_back_with_a_result_or_an_error(payload: object, expected: e.Body) -> None:
    run = run_in(RUNNING)
    [event] = run.tell(answered(run, "child", "SubWorkflowCompleted", payload)).events
    assert event.data == expected
    assert run.state.last_error == getattr(expected, "error", None)


def test_a_signal_is_not_decided_as_a_message() -> None:
    run = run_in(RUNNING)
    signal = run.sent("go")
    assert isinstance(signal, Signal)
    answer = run.try_tell(replace(run.message("timer"), type="ExternalSignal"))
    assert isinstance(answer, Refusal)
    assert "decided as a Signal" in answer.error.message
