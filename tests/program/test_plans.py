"""Plans, run on the core alone: which steps run when, with which input, and what follows when one fails."""

from typing import Any

import pytest
from msgspec import Raw

from holdfast.app import App
from holdfast.core import codec
from holdfast.core import events as e
from holdfast.core.messages import ActivitySucceeded
from holdfast.errors import NondeterminismError
from holdfast.limits import Limits
from holdfast.program.plan.program import PlanProgram
from tests.program.core_run import BROKEN, SECOND
from tests.program.plan_run import PlanRun, plan_of

pytestmark = pytest.mark.contract("WF-1")

ONE: dict[str, Any] = {"id": "a", "activity": "x"}


def after(*others: str, id: str = "b", **fields: Any) -> dict[str, Any]:
    return {"id": id, "activity": "x", "depends_on": list(others), **fields}


def test_steps_run_when_what_they_depend_on_has_ended() -> None:
    run = PlanRun(plan_of(after("b", "c", id="d"), after("a"), after("a", id="c"), ONE))
    assert run.open == ["a"]
    run.complete("a", 1)
    assert run.open == ["b", "c"], "in the order of the plan"
    run.complete("c", 3)
    assert run.open == ["b"]
    run.complete("b", 2)
    run.complete("d", 4)
    assert run.result == {"d": 4}
    run.again()


def test_inputs_are_filled_and_keep_their_type() -> None:
    body = plan_of(
        {**ONE, "input": {"day": "${inputs.day}", "n": "${inputs.n}", "s": "at ${inputs.n}", "lit": [1, {"a": None}]}},
        {"id": "b", "activity": "x", "input": {"v": "${steps.a.output.list[1]}", "s": "${steps.a.status}"}},
        inputs={"day": {"type": "string"}, "n": {"type": "integer", "default": 7}},
        output={"of_b": "${steps.b.output}", "status": "${steps.b.status}"},
    )
    run = PlanRun(body, {"day": "mo"})
    assert run.input_of("a") == {"day": "mo", "n": 7, "s": "at 7", "lit": [1, {"a": None}]}
    run.complete("a", {"list": [1, {"x": True}]})
    assert run.input_of("b") == {"v": {"x": True}, "s": "SUCCESS"}
    run.complete("b", "done")
    assert run.result == {"of_b": "done", "status": "SUCCESS"}


def test_inputs_that_do_not_fit_fail_the_run() -> None:
    run = PlanRun(plan_of(ONE, inputs={"n": {"type": "integer"}}), {"n": "x"})
    assert run.status == "FAILED"
    assert run.error.code == "InvalidInput"


@pytest.mark.contract("WF-5")
def test_a_condition_is_evaluated_once_and_recorded() -> None:
    run = PlanRun(plan_of(ONE, {"id": "b", "activity": "x", "when": "${steps.a.output > `3`}"}, after("b", id="c")))
    run.complete("a", 5)
    assert run.markers() == {"b:when": True}
    assert run.again().open == ["b"]
    other = PlanRun(plan_of(ONE, {"id": "b", "activity": "x", "when": "${steps.a.output > `3`}"}, after("b", id="c")))
    other.complete("a", 1)
    assert other.markers() == {"b:when": False}
    assert other.open == ["c"], "what only comes after it runs"


@pytest.mark.contract("WF-5")
def test_replay_reads_the_recorded_condition() -> None:
    """The document is another one here, which cannot be in practice: its condition would have another value."""
    run = PlanRun(plan_of(ONE, {"id": "b", "activity": "x", "when": "${steps.a.output > `3`}"}))
    run.complete("a", 5)
    copy = PlanRun.__new__(PlanRun)
    copy.__dict__.update(run.__dict__)
    copy.plan = type(run.plan)(plan_of(ONE, {"id": "b", "activity": "x", "when": "${steps.a.output > `9`}"}))
    assert copy.again().open == ["b"]


def test_a_changed_document_is_a_divergence_that_names_the_step() -> None:
    run = PlanRun(plan_of(ONE, after("a")))
    run.complete("a", 5)
    run.plan = type(run.plan)(plan_of(ONE, after("a", id="c")))
    with pytest.raises(NondeterminismError, match=r"StepStarted of step 'b'.*RunActivity for step 'c'.*plan p 1"):
        run.again()


def test_a_step_that_needs_the_output_of_a_skipped_one_is_skipped() -> None:
    run = PlanRun(
        plan_of(
            {**ONE, "when": False},
            {"id": "b", "activity": "x", "input": {"v": "${steps.a.output}"}},
            {"id": "c", "activity": "x", "when": "${steps.a.status == 'SKIPPED'}", "input": {"v": "${steps.a.output}"}},
            after("b", id="d"),
        )
    )
    assert run.open == ["c", "d"]
    assert run.input_of("c") == {"v": None}
    assert run.markers()["b:skipped"] == "step 'a' was skipped, and its output is needed"


def test_a_condition_that_cannot_be_evaluated_fails_the_step() -> None:
    run = PlanRun(plan_of(ONE, {"id": "b", "activity": "x", "when": "${length(steps.a.output)}"}))
    run.complete("a", 5)
    assert run.status == "FAILED"
    assert "length" in run.error.message
    run.again()


# --- for_each


def test_items_run_within_the_bound_and_keep_their_order() -> None:
    each = {"id": "b", "activity": "x", "for_each": "${steps.a.output}", "max_concurrency": 2}
    run = PlanRun(plan_of(ONE, {**each, "input": {"v": "${item.n}", "i": "${index}"}}, after("b", id="c")))
    run.complete("a", [{"n": 10}, {"n": 11}, {"n": 12}])
    assert run.open == ["b[0]", "b[1]"]
    assert run.input_of("b[1]") == {"v": 11, "i": 1}
    run.complete("b[1]", "one")
    assert run.open == ["b[0]", "b[2]"]
    run.complete("b[2]", "two")
    assert run.again().open == ["b[0]"]
    run.complete("b[0]", "zero")
    assert run.open == ["c"]
    assert run.markers()["b:items"] == [{"n": 10}, {"n": 11}, {"n": 12}]


def test_no_items_are_no_work() -> None:
    run = PlanRun(plan_of({**ONE, "for_each": []}, output="${steps.a.output}"))
    assert run.result == []


@pytest.mark.parametrize("given", [5, None, {"a": 1}, "text"])
def test_what_is_no_list_fails_the_step(given: Any) -> None:
    run = PlanRun(plan_of({**ONE, "for_each": "${inputs.v}"}, inputs={"v": {"required": False}}), {"v": given})
    assert run.status == "FAILED"
    run.again()


def test_an_item_that_fails_fails_the_run_and_the_others_are_given_up() -> None:
    run = PlanRun(plan_of({**ONE, "for_each": [1, 2, 3]}))
    run.complete("a[0]")
    run.fail("a[1]")
    assert run.status == "FAILED"
    assert "step a[1]: Broken: it broke" in run.error.message
    assert [event.step_id for event in run.events if isinstance(event.data, e.StepCancelled)] == ["a[2]"]
    run.again()


def test_with_continue_all_items_run_and_the_step_has_failed() -> None:
    each = {**ONE, "for_each": [1, 2, 3], "max_concurrency": 1, "on_failure": "continue"}
    out = {"output": "${steps.a.output}", "status": "${steps.a.status}", "code": "${steps.a.error.code}"}
    run = PlanRun(plan_of(each, after("a"), output=out))
    run.fail("a[0]")
    run.complete("a[1]", "one")
    run.fail("a[2]")
    assert run.result == {"output": [None, "one", None], "status": "FAILED", "code": "Broken"}
    assert run.markers()["b:skipped"] == "step 'a' has failed"


def test_ten_thousand_items_that_fail_before_they_begin_do_not_recurse() -> None:
    each = {**ONE, "for_each": "${inputs.v}", "input": "${item}", "on_failure": "continue"}
    run = PlanRun(plan_of(each, output="${steps.a.status}", inputs={"v": {}}), {"v": [1] * 5_000})
    assert run.result == "FAILED"


# --- failures


def test_fail_gives_up_what_is_open() -> None:
    run = PlanRun(plan_of(ONE, {"id": "b", "activity": "x"}, {"id": "w", "signal": "s"}, after("a", id="c")))
    run.fail("a")
    assert run.status == "FAILED"
    assert (run.error.code, run.error.message) == ("ActivityFailed", "step a: Broken: it broke")
    assert not run.open
    run.again()


def test_continue_skips_what_depends_on_it_and_the_rest_goes_on() -> None:
    run = PlanRun(
        plan_of(
            {**ONE, "on_failure": "continue"},
            after("a"),
            after("b", id="c"),
            {"id": "d", "activity": "x"},
            {"id": "h", "activity": "x", "when": "${steps.a.status == 'FAILED'}", "input": {"e": "${steps.a.error}"}},
        )
    )
    run.fail("a")
    assert run.open == ["d", "h"]
    assert run.input_of("h")["e"] == {"category": "", "code": "Broken", "message": "it broke", "retryable": False}
    run.complete("d", 1)
    run.complete("h", 2)
    assert run.result == {"c": None, "d": 1, "h": 2}
    assert set(run.markers()) == {"b:skipped", "c:skipped", "h:when"}


@pytest.mark.contract("WF-4")
def test_compensation_runs_in_reverse_order_of_completion() -> None:
    undo = {"activity": "undo", "input": {"out": "${output}", "own": "${steps.a.output}"}}
    run = PlanRun(
        plan_of(
            {**ONE, "compensate": undo},
            {"id": "b", "activity": "x", "compensate": {"activity": "undo", "input": {"i": "${inputs.n}"}}},
            {
                "id": "c",
                "activity": "x",
                "for_each": [1, 2],
                "compensate": {"activity": "u", "input": {"v": "${item}"}},
            },
            {"id": "d", "activity": "x", "on_failure": "compensate"},
            {"id": "e", "activity": "x", "compensate": {"activity": "never"}},
            inputs={"n": {"default": 4}},
        )
    )
    for step, value in (("c[1]", 1), ("b", 2), ("a", 3)):
        run.complete(step, value)
    run.fail("d")
    assert run.open == ["a:compensate"]
    assert run.input_of("a:compensate") == {"out": 3, "own": 3}
    run.complete("a:compensate")
    assert run.input_of("b:compensate") == {"i": 4}
    run.fail("b:compensate", e.ErrorInfo("Stuck", "cannot undo"))
    assert run.input_of("c[1]:compensate") == {"v": 2}
    assert run.again().open == ["c[1]:compensate"]
    run.complete("c[1]:compensate")
    assert run.status == "FAILED"
    assert "it broke" in run.error.message
    assert "Stuck: cannot undo" in run.error.message, "both errors are reported"


def test_fail_does_not_compensate() -> None:
    run = PlanRun(plan_of({**ONE, "compensate": {"activity": "undo"}}, {"id": "b", "activity": "x"}))
    run.complete("a")
    run.fail("b")
    assert run.status == "FAILED"


@pytest.mark.contract("WF-4")
def test_a_cancelled_run_compensates_and_is_not_cancelled_twice() -> None:
    run = PlanRun(plan_of({**ONE, "compensate": {"activity": "undo"}}, {"id": "b", "activity": "x"}))
    run.complete("a")
    run.control("CANCEL")
    assert run.open == ["a:compensate"]
    run.control("CANCEL")
    assert run.open == ["a:compensate"]
    run.complete("a:compensate")
    assert run.status == "CANCELLED"
    run.again()


@pytest.mark.contract("SIG-13")
def test_pause_waits_for_an_operator_who_retries_or_skips() -> None:
    run = PlanRun(
        plan_of({**ONE, "on_failure": "pause"}, {"id": "b", "activity": "x", "input": {"v": "${steps.a.output}"}})
    )
    run.fail("a")
    assert run.status == "PAUSED"
    run.ask("RETRY_STEP", "a")
    assert (run.status, run.attempt_of("a")) == ("RUNNING", 2)
    run.fail("a")
    run.again()
    run.ask("SKIP_STEP", "a")
    assert run.open == ["b"], "an operator has skipped it, so what depends on it runs"
    assert run.input_of("b") == {"v": None}
    run.complete("b")
    assert run.status == "COMPLETED"


@pytest.mark.contract("ATT-2")
def test_the_retry_policy_of_the_plan_raises_the_logical_attempt() -> None:
    body = plan_of(ONE, retry={"max_attempts": 3, "initial_ms": 1_000, "factor": 3})
    run = PlanRun(body)
    broken = e.ErrorInfo("Broken", "it broke", retryable=True)
    run.fail("a", broken)
    assert run.open == ["a:retry2"]
    assert run.state.open_steps["a:retry2"].due_at == run.now + SECOND
    run.fire("a:retry2")
    assert run.attempt_of("a") == 2
    assert run.state.open_steps["a"].engine_attempt_id == 2
    run.again()
    run.fail("a", broken)
    run.fire("a:retry3")
    assert run.attempt_of("a") == 3
    run.fail("a", broken)
    assert run.status == "FAILED"
    run.again()
    other = PlanRun(body)
    other.fail("a", BROKEN)
    assert other.status == "FAILED", "an error that no retry can mend is not retried"


@pytest.mark.contract("ATT-2", "SIG-13")
def test_a_run_is_paused_only_after_the_retry_policy_of_the_plan_is_used_up() -> None:
    """`on_failure` decides after both policies: the step's own, and the plan's."""
    run = PlanRun(plan_of({**ONE, "on_failure": "pause"}, after("a"), retry={"max_attempts": 2}))
    broken = e.ErrorInfo("Broken", "it broke", retryable=True)
    run.fail("a", broken)
    assert (run.status, run.open) == ("RUNNING", ["a:retry2"])
    run.fire("a:retry2")
    run.again().fail("a", broken)
    run.fail("a", broken)
    assert run.status == "PAUSED"
    run.ask("RESUME")
    assert run.status == "PAUSED", "the failure waits for an operator"
    run.ask("RETRY_STEP", "a")
    assert (run.status, run.attempt_of("a")) == ("RUNNING", 3)
    run.complete("a")
    run.complete("b")
    assert run.status == "COMPLETED"
    hopeless = PlanRun(plan_of({**ONE, "on_failure": "pause"}, retry={"max_attempts": 9}))
    hopeless.fail("a", BROKEN)
    assert hopeless.status == "PAUSED", "an error that no retry can mend pauses at once"


@pytest.mark.contract("SIG-13")
@pytest.mark.parametrize(("on_failure", "status"), [("continue", "COMPLETED"), ("fail", "FAILED"), ("pause", "PAUSED")])
def test_the_plan_decides_what_a_failure_does_and_not_the_activity(on_failure: str, status: str) -> None:
    app = App("pausing")

    @app.activity(on_failure="pause")
    async def x() -> None:
        """Pause the run of code that calls it and does not say otherwise."""

    run = PlanRun(plan_of({**ONE, "on_failure": on_failure}, output=1), app=app)
    run.fail("a")
    assert run.status == status


@pytest.mark.contract("ATT-2", "SIG-13")
def test_a_failure_that_the_plan_retries_does_not_keep_a_run_from_being_resumed() -> None:
    run = PlanRun(plan_of({**ONE, "on_failure": "pause"}, retry={"max_attempts": 2}))
    run.ask("PAUSE")
    run.fail("a", e.ErrorInfo("Broken", "it broke", retryable=True))
    run.ask("RESUME")
    assert (run.status, run.open) == ("RUNNING", ["a:retry2"])


# --- other kinds of steps


@pytest.mark.contract("SIG-8")
def test_a_signal_is_waited_for_until_its_timeout() -> None:
    body = plan_of({"id": "w", "signal": "go", "timeout": 60, "on_failure": "continue"}, output="${steps.w}")
    run = PlanRun(body)
    run.send("go", {"x": 1})
    assert run.result["output"] == {"x": 1}
    late = PlanRun(body)
    late.fire("w")
    assert late.result["status"] == "FAILED"
    assert late.result["error"]["code"] == "TimeoutError"


def test_a_sleep_takes_seconds_or_a_reference() -> None:
    run = PlanRun(
        plan_of({"id": "s", "sleep": 2.5}, {"id": "t", "sleep": "${inputs.n}", "depends_on": ["s"]}, inputs={"n": {}}),
        {"n": 0},
    )
    assert run.state.open_steps["s"].due_at == run.now + 2_500_000
    run.fire("s")
    assert run.status == "COMPLETED"
    assert PlanRun(plan_of({"id": "t", "sleep": "${inputs.n}"}, inputs={"n": {}}), {"n": "x"}).status == "FAILED"


@pytest.mark.contract("TSK-1")
def test_a_task_asks_people_and_its_timeout_is_a_failure() -> None:
    task = {"id": "t", "task": "check", "input": {"v": "${inputs.n}"}, "roles": ["ops"], "timeout": 60}
    run = PlanRun(plan_of(task, inputs={"n": {"default": 1}}))
    assert run.open == ["t", "t:timeout"]
    assert run.input_of("t") == {"v": 1}
    run.answer("t", "fine")
    assert run.result == {"t": "fine"}
    late = PlanRun(plan_of(task, inputs={"n": {"default": 1}}))
    late.fire("t:timeout")
    assert late.error.message == "step t: TimeoutError: step 't' took too long"
    late.again()


@pytest.mark.contract("SIG-13")
def test_a_step_that_requires_approval_waits_for_it() -> None:
    step = {**ONE, "requires_approval": {"roles": ["boss"]}}
    run = PlanRun(plan_of(step))
    assert run.open == ["a:approval"]
    run.answer("a:approval", {"approved": True})
    assert run.open == ["a"]
    refused = PlanRun(plan_of(step))
    refused.answer("a:approval", {"approved": False})
    assert refused.error.message == "step a: NotApproved: ann has not approved the step"


@pytest.mark.contract("SIG-13")
def test_a_run_that_requires_approval_begins_nothing_before() -> None:
    run = PlanRun(plan_of(ONE, {"id": "b", "sleep": 1}, requires_approval=True))
    assert run.open == [":approval"]
    assert run.input_of(":approval")["plan"]["sha256"] == run.plan.sha256
    run.answer(":approval", {"approved": True})
    assert run.open == ["a", "b"]
    refused = PlanRun(plan_of(ONE, requires_approval=True))
    refused.answer(":approval", {"approved": False})
    assert refused.error.code == "NotApproved"


@pytest.mark.contract("EVT-4", "SIG-13")
def test_a_step_named_run_is_approved_apart_from_the_run() -> None:
    """Their approvals are two tasks, whose events have keys of their own."""
    run = PlanRun(plan_of({**ONE, "id": "run", "requires_approval": True}, requires_approval=True))
    run.ask("APPROVE", "run")
    assert run.open == [":approval"], "the step awaits no approval yet"
    run.ask("APPROVE")
    assert run.open == ["run:approval"]
    run.ask("APPROVE", "run")
    run.complete("run")
    assert run.status == "COMPLETED"
    keys = [event.idempotency_key for event in run.events]
    assert len(set(keys)) == len(keys)


def test_a_query_counts_the_steps() -> None:
    run = PlanRun(plan_of(ONE, after("a"), {"id": "c", "activity": "x", "when": False}))
    from msgspec import Raw, json

    assert run.replay.program is not None
    assert json.decode(run.replay.program.query("plan", Raw(b"{}")))["steps"] == {
        "PENDING": 1,
        "RUNNING": 1,
        "SUCCESS": 0,
        "FAILED": 0,
        "SKIPPED": 1,
    }


# --- rotation


@pytest.mark.contract("CAN-1")
def test_a_long_plan_rotates_and_goes_on_with_what_is_open() -> None:
    chain: list[dict[str, Any]] = [{"id": "s0", "activity": "x"}]
    chain += [{"id": f"s{n}", "activity": "x", "input": {"v": f"${{steps.s{n - 1}.output}}"}} for n in range(1, 30)]
    body = plan_of({"id": "wait", "signal": "go"}, *chain, output=["${steps.wait.output}", "${steps.s29.output}"])
    run = PlanRun(body, limits=Limits(rotation_steps=5))
    for n in range(30):
        assert run.open[0] == "wait"
        assert run.input_of(f"s{n}").get("v") == (n - 1 if n else None)
        run.complete(f"s{n}", n)
        assert run.again().open == run.open
    assert run.rotations >= 4
    run.again(since_rotation=False)
    run.send("go", "now")
    assert run.result == ["now", 29]


@pytest.mark.contract("CAN-1")
def test_a_rotation_keeps_items_conditions_errors_and_compensations() -> None:
    body = plan_of(
        {
            **ONE,
            "for_each": "${inputs.v}",
            "max_concurrency": 2,
            "compensate": {"activity": "u", "input": {"v": "${item}"}},
        },
        {"id": "f", "activity": "x", "on_failure": "continue"},
        {"id": "g", "activity": "x", "when": "${steps.f.error.code == 'Broken'}", "depends_on": ["a"]},
        {"id": "k", "activity": "x", "depends_on": ["f"]},
        {"id": "z", "activity": "x", "depends_on": ["g"], "on_failure": "compensate"},
        inputs={"v": {}},
    )
    run = PlanRun(body, {"v": list(range(8))}, limits=Limits(rotation_steps=1))
    run.fail("f")
    for n in range(8):
        run.complete(f"a[{n}]", n)
        assert run.again().open == run.open
    assert run.rotations > 0
    assert run.open == ["g"]
    run.complete("g")
    run.fail("z")
    for n in reversed(range(8)):
        assert run.open == [f"a[{n}]:compensate"]
        assert run.input_of(f"a[{n}]:compensate") == {"v": n}
        run.complete(f"a[{n}]:compensate")
    assert run.status == "FAILED"
    run.again()


@pytest.mark.contract("SEC-2")
def test_the_output_of_a_step_has_status_artifacts_and_error() -> None:
    """Artifacts are references; the error has category, code, message and whether a retry may help."""
    out = {"a": "${steps.a}", "b": "${steps.b}", "c": "${steps.c.status}"}
    steps = [{**ONE, "on_failure": "continue"}, {"id": "b", "activity": "x", "on_failure": "continue"}]
    run = PlanRun(plan_of(*steps, {"id": "c", "activity": "x", "when": False}, output=out))
    file = e.ArtifactRef("holdfast-artifact:a/b", "csv", "0" * 64, 12)
    run.handle(ActivitySucceeded("a", 1, codec.encode({"rows": 3}), artifacts=(file,)))
    run.fail("b", e.ErrorInfo("Broken", "it broke", retryable=True, category="remote"))
    shown = {"uri": "holdfast-artifact:a/b", "kind": "csv", "sha256": "0" * 64, "size_bytes": 12}
    assert run.result == {
        "a": {"status": "SUCCESS", "output": {"rows": 3}, "artifact_refs": [shown], "error": None},
        "b": {
            "status": "FAILED",
            "output": None,
            "artifact_refs": [],
            "error": {"category": "remote", "code": "Broken", "message": "it broke", "retryable": True},
        },
        "c": "SKIPPED",
    }


# --- inputs that cannot be made

LARGE = "x" * 1_500_000


@pytest.mark.contract("WF-7", "WF-1")
@pytest.mark.parametrize("on_failure", ["fail", "continue"])
def test_an_input_of_a_plan_that_is_too_large_fails_its_step(on_failure: str) -> None:
    """It is known only when the text of the plan is in the store; the run is not paused for it."""
    twice = {"a": "${steps.a.output}", "b": "${steps.a.output}"}
    run = PlanRun(plan_of(ONE, {"id": "p", "plan": "other", "input": twice, "on_failure": on_failure}, output="done"))
    run.complete("a", LARGE)
    run.complete("p:plan", {"plan_id": "other", "plan_version": "1", "sha256": "0" * 64})
    assert run.status == ("FAILED" if on_failure == "fail" else "COMPLETED")
    assert "Limits.value_bytes" in run.markers()["p:plan:failed"]
    run.again()


@pytest.mark.contract("WF-4", "WF-7")
@pytest.mark.parametrize("for_each", [None, [1]])
def test_a_compensation_whose_input_is_too_large_fails_its_step(for_each: Any) -> None:
    """A step that could not be undone later has not succeeded; replay reads why, whatever the limits are then."""
    undo = {"activity": "undo", "input": {"a": "${output}", "b": "${output}"}}
    step = {**ONE, "compensate": undo, "on_failure": "continue", **({"for_each": for_each} if for_each else {})}
    run = PlanRun(plan_of(step, output="${steps.a.error.message}"))
    path = "a" if for_each is None else "a[0]"
    run.complete(path, LARGE)
    assert run.status == "COMPLETED"
    assert "the input of the compensation cannot be made" in run.result
    assert "Limits.value_bytes" in run.markers()[f"{path}:compensate:failed"]
    run.limits = Limits(value_bytes=10_000_000)
    run.again()


@pytest.mark.contract("ACT-2")
@pytest.mark.parametrize(("given", "key"), [("k", "k"), (7, "7"), ({"a": 1}, '{"a":1}')])
def test_a_key_is_the_text_of_what_it_refers_to(given: Any, key: str) -> None:
    run = PlanRun(plan_of({**ONE, "idempotency_key": "${inputs.key}"}, inputs={"key": {}}), {"key": given})
    body: Any = run.state.open_steps["a"].body
    assert body.idempotency_key == key


@pytest.mark.contract("ACT-2")
@pytest.mark.parametrize("given", [None, "", "x" * 300])
def test_a_step_whose_key_is_none_fails(given: Any) -> None:
    """No key and no long text claims that the step could be reconciled."""
    run = PlanRun(plan_of({**ONE, "idempotency_key": "${inputs.key}"}, inputs={"key": {}}), {"key": given})
    assert run.status == "FAILED"
    assert "idempotency_key" in run.markers()["a:failed"]


# --- what items cost


@pytest.mark.contract("CAN-1")
def test_a_rotation_that_is_too_large_is_not_tried_again_with_every_item(monkeypatch: pytest.MonkeyPatch) -> None:
    """Items and their outputs may be more than a rotation can carry; then trying costs little."""
    tried: list[int] = []
    plain = PlanProgram._cursor

    def counted(self: PlanProgram) -> Raw:
        tried.append(1)
        return plain(self)

    monkeypatch.setattr(PlanProgram, "_cursor", counted)
    limits = Limits(value_bytes=3_500, rotation_bytes=1_000)
    step = {**ONE, "for_each": list(range(600)), "max_concurrency": 1}
    run = PlanRun(plan_of(step), limits=limits)
    for number in range(300):
        run.complete(f"a[{number}]", "x" * 10)
    assert run.rotations == 0
    assert len(tried) < 12


@pytest.mark.contract("CAN-1")
def test_a_list_is_not_kept_beside_the_items_that_were_made_of_it() -> None:
    """Unless they refer to it themselves."""
    items = [f"item-{number}" for number in range(200)]
    for value, is_kept in (("${item}", False), ("${steps.l.output[0]}", True)):
        step = {"id": "e", "activity": "x", "for_each": "${steps.l.output}", "max_concurrency": 1}
        run = PlanRun(
            plan_of({"id": "l", "activity": "x"}, {**step, "input": {"v": value}}, output="${steps.e.status}")
        )
        run.complete("l", items)
        for number in range(150):
            run.complete(f"e[{number}]")
            run = run.again() if number % 40 == 0 else run
        assert run.rotations
        [last] = [event for event in run.events if isinstance(event.data, e.ContinuedAsNew)][-1:]
        assert ("0" in codec.decode(last.data.input, dict[str, Any]).get("results", {})) is is_kept  # type: ignore[attr-defined]
        assert run.input_of("e[150]") == {"v": "item-150" if value == "${item}" else "item-0"}
        for number in range(150, 200):
            run.complete(f"e[{number}]")
        assert run.result == "SUCCESS"
