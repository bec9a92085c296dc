"""Events: the fields of the envelope, the canonical types, and how each is keyed."""

import msgspec
import pytest

from holdfast.core import events as e
from holdfast.core.events import Event

CANONICAL = """
    RunQueued RunApproved RunStarted StepStarted StepCompleted StepFailed StepSkipped SignalAccepted SignalRejected
    RunPaused RunResumed RunCompleted RunFailed RunCancelled SignalWaiting SignalReceived SignalTimedOut
""".split()

ENVELOPE = """
    run_id run_seq event_id event_type step_id engine_attempt_id logical_attempt_id data idempotency_key emitted_at
    persisted_at adapter_version engine_run_ref caused_by_signal_id parent_event_id schema_version
""".split()


@pytest.mark.contract("EVT-3")
@pytest.mark.parametrize("name", CANONICAL)
def test_every_canonical_type_exists(name: str) -> None:
    assert e.BODIES[name].__name__ == name


@pytest.mark.contract("EVT-2")
def test_an_event_carries_the_fields_of_the_contract_and_no_others() -> None:
    assert sorted(Event.__struct_fields__) == sorted(ENVELOPE)


@pytest.mark.contract("EVT-1")
@pytest.mark.parametrize("kind", [Event, *e.BODIES.values(), e.UnknownBody], ids=lambda kind: kind.__name__)
def test_events_and_bodies_cannot_be_edited(kind: type[msgspec.Struct]) -> None:
    assert kind.__struct_config__.frozen


@pytest.mark.contract("EVT-4")
def test_events_that_may_recur_within_an_attempt_are_keyed_like_events_of_the_run() -> None:
    keyed_by_run = {name for name, body in e.BODIES.items() if body.KEYED_BY == "run"}
    of_the_run = {name for name in e.BODIES if name.startswith("Run")} | {"ContinuedAsNew", "InputReplaced"}
    decisions = {"SignalAccepted", "SignalRejected"}
    of_tasks = {"TaskAssigned", "TaskReminded", "TaskCommented", "TaskAnswered", "TaskRefused"}
    of_steps = {"StepRetried", "StepDetached", "StepUnresolved", "StepSucceededLate"}
    assert keyed_by_run == of_the_run | decisions | of_steps | {"SignalDeadLettered"} | of_tasks
    assert {body.KEYED_BY for body in e.BODIES.values()} == {"run", "step"}


def test_what_is_not_an_event_is_not_in_the_list_of_bodies() -> None:
    assert not {"Body", "RunBody", "UnknownBody"} & set(e.BODIES)


@pytest.mark.contract("SEC-2")
def test_an_artifact_is_a_reference_and_holds_no_bytes() -> None:
    assert e.ArtifactRef.__struct_fields__ == ("uri", "kind", "sha256", "size_bytes", "expires_at")
