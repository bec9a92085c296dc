"""What is checked before a signal or a message is accepted, whatever the state of its run."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import Raw
from msgspec.structs import replace

from holdfast.core.keys import check_name, check_signal_id
from holdfast.core.messages import (
    AcceptanceRecord,
    AcceptedSignalResult,
    Message,
    SignalRequest,
    check_signal,
)
from holdfast.errors import CallerError, InvalidInput, PayloadTooLarge
from holdfast.limits import Limits
from holdfast.store.validation import check_message

LIMITS = Limits()
REQUEST = SignalRequest(run_id="run-1", name="go")
MESSAGE = Message(signal_id="m-1", run_id="run-1", type="InternalContinue", occurred_at=1)

E_ACUTE = "\u00e9"  # two bytes in UTF-8


# --- signal ids


@pytest.mark.contract("SIG-5")
@pytest.mark.parametrize(
    "signal_id",
    [
        "a",
        "x" * 128,
        E_ACUTE * 64,
        "\U0001f680" * 32,
        " ",
        "A",
        "e\u0301",
        E_ACUTE,
        "|/:%",
        "\n\t",
        "\x7f",
    ],
    ids=repr,
)
def test_any_text_of_1_to_128_bytes_is_a_signal_id(signal_id: str) -> None:
    assert check_signal_id(signal_id) is None
    assert check_signal(replace(REQUEST, signal_id=signal_id), LIMITS) is None


@pytest.mark.contract("SIG-5")
@pytest.mark.parametrize(
    "signal_id",
    [
        "",
        "x" * 129,
        E_ACUTE * 64 + "x",
        E_ACUTE * 65,
        "\U0001f680" * 33,
        "\ud800",
        "a\udfff",
        "a\x00b",
        7,
        b"a",
        True,
        ["a"],
    ],
    ids=repr,
)
def test_empty_oversize_and_other_things_are_no_signal_ids(signal_id: Any) -> None:
    problem = check_signal_id(signal_id)
    assert isinstance(problem, InvalidInput)
    assert problem.details["field"] == "signal_id"
    assert check_signal(replace(REQUEST, signal_id=signal_id), LIMITS) is not None


@pytest.mark.contract("SIG-5")
def test_a_signal_may_have_no_id_at_all() -> None:
    assert check_signal(REQUEST, LIMITS) is None


@pytest.mark.contract("SIG-5", "API-2")
@given(st.text() | st.text(alphabet=st.characters()) | st.integers() | st.binary() | st.none())
def test_whatever_is_sent_as_an_id_is_answered_and_never_raises(value: object) -> None:
    is_fit = isinstance(value, str) and _is_unicode(value) and 1 <= len(value.encode()) <= 128 and "\x00" not in value
    assert (check_signal_id(value) is None) == is_fit


def _is_unicode(text: str) -> bool:
    return not any("\ud800" <= character <= "\udfff" for character in text)


# --- names


@pytest.mark.parametrize("name", ["a", "x" * 255, E_ACUTE * 127, "order/7:charge|x", "Ünïcode name", "."])
def test_a_name_may_hold_any_printable_text_up_to_255_bytes(name: str) -> None:
    assert check_name("field", name) is None


@pytest.mark.contract("API-2")
@pytest.mark.parametrize(
    "name", ["", "x" * 256, E_ACUTE * 128, "a\nb", "\x00", "\x1f", "\x7f", "\udc80", None, 1, b"a"], ids=repr
)
def test_an_unfit_name_is_named_with_its_field(name: Any) -> None:
    problem = check_name("step_id", name)
    assert isinstance(problem, InvalidInput)
    assert problem.details["field"] == "step_id"
    assert "step_id" in problem.message


@pytest.mark.contract("SIG-5", "API-2")
@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"run_id": ""}, "run_id"),
        ({"name": ""}, "signal_name"),
        ({"name": "a\x00"}, "signal_name"),
        ({"step_id": ""}, "step_id"),
        ({"signal_id": ""}, "signal_id"),
        ({"payload": Raw(b"{")}, "payload"),
        ({"payload": Raw(b"")}, "payload"),
        ({"payload": Raw(b'"\xff"')}, "payload"),
        ({"payload": Raw(b"[" * 60_000)}, "payload"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_malformed_signal_is_refused_with_the_field_that_is_wrong(changes: dict[str, Any], field: str) -> None:
    problem = check_signal(replace(REQUEST, **changes), LIMITS)
    assert isinstance(problem, InvalidInput)
    assert problem.details["field"] == field


# --- sizes


@pytest.mark.contract("SIG-11")
@pytest.mark.parametrize(("size", "is_fit"), [(64 * 1024, True), (64 * 1024 + 1, False)])
def test_a_payload_has_at_most_64_kilobytes(size: int, is_fit: bool) -> None:
    problem = check_signal(replace(REQUEST, payload=Raw(b'"' + b"x" * (size - 2) + b'"')), LIMITS)
    assert (problem is None) == is_fit
    if problem is not None:
        assert isinstance(problem, PayloadTooLarge)
        assert problem.details == {"size_bytes": size, "limit_bytes": 64 * 1024}


@pytest.mark.contract("SIG-11")
def test_the_limit_counts_bytes_and_can_be_changed() -> None:
    limits = Limits(signal_payload_bytes=10)
    fit, unfit = f'"{E_ACUTE * 4}"', f'"{E_ACUTE * 4}x"'
    assert check_signal(replace(REQUEST, payload=Raw(fit.encode())), limits) is None
    assert isinstance(check_signal(replace(REQUEST, payload=Raw(unfit.encode())), limits), PayloadTooLarge)


@pytest.mark.contract("SIG-6")
def test_a_refusal_never_repeats_the_payload() -> None:
    secret = b"hunter2" * 10
    for limits, payload in ((Limits(signal_payload_bytes=5), b'"' + secret + b'"'), (LIMITS, secret)):
        problem = check_signal(replace(REQUEST, payload=Raw(payload)), limits)
        assert isinstance(problem, CallerError)
        assert "hunter2" not in str(problem.as_dict())


# --- messages


@pytest.mark.contract("MSG-1")
@pytest.mark.parametrize("kind", ["TimerDue", "RetryDue", "InternalContinue"])
def test_every_type_of_envelope_is_known(kind: Any) -> None:
    assert check_message(replace(MESSAGE, type=kind)) is None


@pytest.mark.contract("MSG-1", "MSG-3")
@pytest.mark.parametrize(
    ("kind", "payload"),
    [
        ("TaskCompleted", b'{"actor":"ann"}'),
        ("SubWorkflowCompleted", b'{"result":1}'),
        ("ActivityCompleted", b'{"logical_attempt_id":1,"engine_attempt_id":1}'),
    ],
)
def test_envelopes_with_a_payload_of_their_own_are_looked_into(kind: Any, payload: bytes) -> None:
    """What no turn could read is refused at the door, not accepted and lost."""
    assert check_message(replace(MESSAGE, type=kind, payload=Raw(payload))) is None
    assert isinstance(check_message(replace(MESSAGE, type=kind, payload=Raw(b"[]"))), InvalidInput)


def test_a_signal_does_not_come_as_a_message() -> None:
    assert isinstance(check_message(replace(MESSAGE, type="ExternalSignal")), InvalidInput)


@pytest.mark.contract("API-2")
@pytest.mark.parametrize("field", ["occurred_at", "due_at", "expected_version"])
@pytest.mark.parametrize("value", [1.5, "soon", 2**62, -(2**62), True])
def test_what_is_not_a_whole_number_is_refused(field: str, value: Any) -> None:
    assert isinstance(check_message(replace(MESSAGE, **{field: value})), InvalidInput)


@pytest.mark.contract("MSG-1", "MSG-3")
@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"type": "Nonsense"}, "type"),
        ({"type": ""}, "type"),
        ({"run_id": ""}, "run_id"),
        ({"signal_id": ""}, "signal_id"),
        ({"signal_id": "\ud800"}, "signal_id"),
        ({"payload": Raw(b"{")}, "payload"),
    ],
)
def test_a_malformed_message_is_refused(changes: dict[str, Any], field: str) -> None:
    problem = check_message(replace(MESSAGE, **changes))
    assert isinstance(problem, InvalidInput)
    assert problem.details["field"] == field


@pytest.mark.contract("MSG-1")
def test_an_envelope_has_the_fields_of_the_contract() -> None:
    fields = {
        "signal_id",
        "run_id",
        "runtime_provider",
        "type",
        "expected_version",
        "waiting_token",
        "occurred_at",
        "due_at",
        "payload",
    }
    assert fields <= set(Message.__struct_fields__)


@pytest.mark.contract("SIG-5", "SIG-6")
def test_answers_and_records_of_acceptance_have_the_fields_of_the_contract() -> None:
    assert set(AcceptedSignalResult.__struct_fields__) == {
        "accepted",
        "workflow_id",
        "signal_name",
        "signal_id",
        "accepted_at",
        "signal_storage_key",
        "warning",  # beyond the contract, and only there for a name that was not declared
    }
    assert {"version", "response", "accepted_at", "expires_at"} <= set(AcceptanceRecord.__struct_fields__)
