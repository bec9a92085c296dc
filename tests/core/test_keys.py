"""Keys: exactly what the contract says, and never the same for two different things."""

import hashlib
import uuid

import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast.core.event_writer import Decision
from holdfast.core.keys import (
    event_id,
    event_key,
    inbox_uuid,
    request_key,
    signal_storage_key,
    signal_suffix,
    signal_uuid,
    storage_key,
)
from holdfast.errors import InvalidInput
from tests.core.driver import Driver

COMPOSED, DECOMPOSED = "caf\u00e9", "cafe\u0301"

# Made with `printf '%s' 'run-1|charge|1|StepStarted|1' | sha256sum`, not with the code under test.
EVENT_KEYS = [
    (("run-1", "charge", 1, "StepStarted", "1"), "4dd9ba410350f5aaba0018053c06a011a602d9369b89a824b2372c8b6a7fe37c"),
    (("run-1", "charge", 1, "StepCompleted", "1"), "216babb14f6d949303d66a65c5896888030ea86d4c2005b08169f1bbc78ddab1"),
    (("run-1", "charge", 9, "StepStarted", "1"), "d98e4a508c5aa306980e8876ed35b04e6c3413ce2b0aaf490298acfb46f63b24"),
    (("run-1", "charge", 10, "StepStarted", "1"), "b096b53d0d43e922d309dca974925084ae67e428930bfe66161903aafebd4e75"),
    (("run-1", "charge", 11, "StepStarted", "1"), "763c681784637304f243ac2bdf0d5377c82d219d4bd3a4b1211785e07c6eef37"),
    (("run-1", "charge", 100, "StepStarted", "1"), "72f4864735bed070ba0faf2e33e1f5c6b6fa8bb398eb2b03aa43fd5a0ce00491"),
    (("run-1", "a|b", 1, "StepStarted", "1"), "e79c5188136c884a467a781adc7dff01eabd50dcba9fbe72fb4c618b4b7443c4"),
    (("run-1", "||", 1, "StepStarted", "1"), "d923c1e10ac917d26a21dc757aab11bdaecfe4ed5ba5370aa9deb43e6bd0a5c3"),
    (("run-1", "", 1, "StepStarted", "1"), "430e20d105f74de33bf2285eec73a38a45fd48402e288504e21b3d22eb0bf74f"),
    (("run-1", COMPOSED, 1, "StepStarted", "1"), "e5b8cf5404ec2836f50c59f2b9d7eefe935542417f65bed5cf510a22742eeeeb"),
    (("run-1", DECOMPOSED, 1, "StepStarted", "1"), "d303c0e43b6365e594f26555eee8353131bceff499d52f3771416b22e21054fd"),
    (
        ("run-1", "\U0001f680/x", 1, "StepStarted", "2026-01"),
        "7849759d3319bc80c1e4d3095fb79ddee708a4784432ef2dcd036fb1d715d344",
    ),
    (("run-1", "1", 0, "RunPaused", "1"), "20c008ca478973db23d716525bd5062f17a655f79dd755685d954464348a3b57"),
    (("run-1", "2", 0, "RunPaused", "1"), "f64b58d25df2421d5bf40b355ad52809fd2faf58bdc4db6e7c5e36e0cc483669"),
    (
        ("run-1", "0198c5a0-0000-7000-8000-000000000000", 0, "RunPaused", "1"),
        "8f78e30ea202885b930bf0b4175dcab15fde8feda7bd920a0ddf54bd3afc53c4",
    ),
]

REQUEST_KEYS = [
    (
        ("acme", "shop", "prod", "order", "1", "req-77"),
        "5ebe84f8666a6204aef72f9fa4ebadfccd3124fc5f107d0e355616c79190c876",
    ),
    (
        ("acme", "shop", "prod", "order", "1", "req|77"),
        "edf8bff212e30843bc1a39305dd090f855ba7bc7ae53596be748779f150a34a7",
    ),
    (
        ("default", "default", "default", "order", "1", "run-1"),
        "74f817ab5d6667a86b26eda3135d106d4e38bd30f123ad16b16c9d360423a032",
    ),
    (
        ("acme", "shop", "prod", "order", "1", "\u00e9"),
        "20e4f0cf48d63fe602a419900e3cc17597540052ff8056b2841dd95486126d19",
    ),
]

text = st.text(alphabet=st.characters(exclude_categories=["Cs"]), max_size=6)
awkward = st.text(alphabet="ab|1", max_size=5)
plain = st.text(alphabet="ab1", max_size=3)
event_parts = st.tuples(plain, awkward, st.integers(0, 120), st.sampled_from(["A", "B", "1"]), plain)
request_parts = st.tuples(plain, plain, plain, plain, plain, awkward)


# --- events


@pytest.mark.contract("EVT-4", "ATT-2")
@pytest.mark.parametrize(("parts", "expected"), EVENT_KEYS, ids=[str(parts) for parts, _ in EVENT_KEYS])
def test_event_key_is_the_digest_that_was_published(parts: tuple[str, str, int, str, str], expected: str) -> None:
    assert event_key(*parts) == expected


@pytest.mark.contract("EVT-4")
@given(text, text, st.integers(0, 1_000), text, text)
def test_event_key_is_the_sha256_of_the_five_parts_joined(
    run_id: str, step_id: str, attempt: int, event_type: str, plan_version: str
) -> None:
    parts = (run_id, step_id, str(attempt), event_type, plan_version)
    if any("|" in part for part in (run_id, event_type, plan_version)):
        with pytest.raises(InvalidInput):
            event_key(run_id, step_id, attempt, event_type, plan_version)
        return
    expected = hashlib.sha256("|".join(parts).encode("utf-8")).hexdigest()
    assert event_key(run_id, step_id, attempt, event_type, plan_version) == expected


@pytest.mark.contract("EVT-4")
@pytest.mark.parametrize(
    ("parts", "field"),
    [
        (("run|1", "s", 1, "T", "1"), "run_id"),
        (("run", "s", 1, "T|", "1"), "event_type"),
        (("run", "s", 1, "T", "|1"), "plan_version"),
    ],
)
def test_event_key_refuses_the_separator_where_it_would_be_ambiguous(
    parts: tuple[str, str, int, str, str], field: str
) -> None:
    with pytest.raises(InvalidInput, match=field) as refused:
        event_key(*parts)
    assert refused.value.details["field"] == field


@pytest.mark.contract("EVT-4")
@given(event_parts, event_parts)
def test_two_different_events_never_share_a_key(
    one: tuple[str, str, int, str, str], other: tuple[str, str, int, str, str]
) -> None:
    assert (event_key(*one) == event_key(*other)) == (one == other)


@pytest.mark.contract("EVT-4")
def test_a_step_id_that_imitates_the_other_parts_has_a_key_of_its_own() -> None:
    honest = event_key("run", "s", 1, "A", "1")
    assert event_key("run", "s|1|A|1|s", 1, "A", "1") != honest
    assert event_key("run", "s|1|A|1", 1, "A", "1") != honest
    assert event_key("run", "1|0|RunPaused|1", 1, "A", "1") != event_key("run", "1", 0, "RunPaused", "1")


@pytest.mark.contract("EVT-4", "API-2")
@pytest.mark.parametrize("lone", ["\ud800", "a\udfffb"])
def test_text_that_is_not_unicode_is_invalid_input_and_nothing_else(lone: str) -> None:
    with pytest.raises(InvalidInput, match="Unicode"):
        event_key("run", lone, 1, "A", "1")
    with pytest.raises(InvalidInput, match="Unicode"):
        request_key("t", "p", "e", "plan", "1", lone)
    with pytest.raises(InvalidInput, match="Unicode"):
        storage_key("workflow", lone)


# --- events of the run, which may recur


@pytest.mark.contract("EVT-4", "SIG-13")
def test_pausing_twice_gives_two_keys() -> None:
    run = Driver().start()
    for name in ("PAUSE", "RESUME", "PAUSE", "RESUME"):
        assert isinstance(run.control(name), Decision)
    pauses = [event.idempotency_key for event in run.events if event.event_type == "RunPaused"]
    assert len(pauses) == len(set(pauses)) == 2


@pytest.mark.contract("EVT-4")
@given(st.integers(1), st.integers(1), st.text("ab-1", min_size=1, max_size=8))
def test_an_event_caused_by_a_signal_never_has_the_key_of_a_counted_one(count: int, seq: int, run_id: str) -> None:
    # The signal's id there is the store's: a UUID, which no decimal number can be.
    cause = inbox_uuid(run_id, seq)
    assert str(uuid.UUID(cause)) == cause
    assert not cause.isdecimal()
    assert event_key(run_id, cause, 0, "RunPaused", "1") != event_key(run_id, str(count), 0, "RunPaused", "1")


@pytest.mark.contract("EVT-4")
@given(st.integers(1, 10**9), st.integers(1, 10**9))
def test_two_items_of_an_inbox_have_different_ids(one: int, other: int) -> None:
    assert (inbox_uuid("run-1", one) == inbox_uuid("run-1", other)) == (one == other)
    assert inbox_uuid("run-1", one) != inbox_uuid("run-2", one)


# --- event ids


@pytest.mark.contract("EVT-2")
@given(st.binary(max_size=20))
def test_event_id_is_a_valid_uuid_of_version_8_and_depends_on_the_key_alone(seed: bytes) -> None:
    key = hashlib.sha256(seed).hexdigest()
    identity = uuid.UUID(event_id(key))
    assert str(identity) == event_id(key)
    assert (identity.version, identity.variant) == (8, uuid.RFC_4122)
    assert event_id(key) == event_id(str(key))


@pytest.mark.contract("EVT-2")
def test_event_id_is_made_of_the_first_128_bits_of_the_key() -> None:
    key = "4dd9ba410350f5aaba0018053c06a011a602d9369b89a824b2372c8b6a7fe37c"
    assert event_id(key) == "4dd9ba41-0350-85aa-ba00-18053c06a011"


@pytest.mark.parametrize("digit", "0123456789abcdef")
def test_event_id_has_the_right_variant_for_every_digit(digit: str) -> None:
    assert uuid.UUID(event_id("0" * 16 + digit + "0" * 47)).variant == uuid.RFC_4122


# --- requests


@pytest.mark.contract("QUE-1")
@pytest.mark.parametrize(("parts", "expected"), REQUEST_KEYS, ids=[str(parts) for parts, _ in REQUEST_KEYS])
def test_request_key_is_the_digest_that_was_published(
    parts: tuple[str, str, str, str, str, str], expected: str
) -> None:
    assert request_key(*parts) == expected


@pytest.mark.contract("QUE-1")
@given(request_parts, request_parts)
def test_two_different_requests_never_share_a_key(
    one: tuple[str, str, str, str, str, str], other: tuple[str, str, str, str, str, str]
) -> None:
    assert (request_key(*one) == request_key(*other)) == (one == other)


@pytest.mark.contract("QUE-1")
@pytest.mark.parametrize("place", range(5))
def test_request_key_refuses_the_separator_in_all_parts_but_the_last(place: int) -> None:
    parts = ["t", "p", "e", "plan", "1", "req|1"]
    parts[place] = "a|b"
    with pytest.raises(InvalidInput):
        request_key(*parts)


# --- storage keys

AWKWARD_PARTS = ["", ".", "..", "...", "%", "%2E", "%25", ":", "/", "|", "a/b", "a%2Fb", " ", COMPOSED, DECOMPOSED]


@pytest.mark.contract("ACT-3")
@given(
    st.lists(st.sampled_from(AWKWARD_PARTS) | text, max_size=4), st.lists(st.sampled_from(AWKWARD_PARTS), max_size=4)
)
def test_two_different_lists_of_parts_never_share_a_storage_key(one: list[str], other: list[str]) -> None:
    assert (storage_key(*one) == storage_key(*other)) == (one == other)


@pytest.mark.contract("ACT-3")
@pytest.mark.parametrize("part", AWKWARD_PARTS)
def test_a_part_of_a_storage_key_is_one_component_that_no_store_resolves(part: str) -> None:
    component = storage_key(part)
    assert component not in ("", ".", "..")
    assert "/" not in component
    assert component.isascii()


@pytest.mark.contract("ACT-3")
def test_parts_cannot_move_over_the_border_between_them() -> None:
    assert storage_key("r", "a/b", "c", "k") != storage_key("r", "a", "b/c", "k")
    assert storage_key("r", "a", "", "k") != storage_key("r", "a", "k", "")
    assert storage_key("workflow", "r", "activities", "charge") == "workflow/r/activities/charge"


# --- signals


@pytest.mark.contract("SIG-1")
def test_signal_storage_key_has_the_published_form() -> None:
    suffix = signal_suffix(1_767_225_600_000_000, "0198c5a0-0000-7000-8000-000000000000")
    assert suffix == "2026-01-01T00:00:00.000000Z_0198c5a0-0000-7000-8000-000000000000"
    expected = "workflow/run-1/signals/go/2026-01-01T00:00:00.000000Z_0198c5a0-0000-7000-8000-000000000000.json"
    assert signal_storage_key("run-1", "go", suffix) == expected


@pytest.mark.contract("SIG-1")
@given(st.integers(0, 253_402_300_799_999_999), st.integers(0, 253_402_300_799_999_999), st.uuids(), st.uuids())
def test_signal_suffixes_sort_like_the_times_of_acceptance(
    earlier: int, later: int, one: uuid.UUID, other: uuid.UUID
) -> None:
    earlier, later = sorted((earlier, later))
    if earlier == later:
        return
    assert signal_suffix(earlier, str(one)) < signal_suffix(later, str(other))


@pytest.mark.contract("SIG-1")
@given(st.integers(0, 10**15), st.uuids(), st.uuids())
def test_of_two_signals_at_the_same_instant_no_suffix_is_a_prefix_of_the_other(
    instant: int, one: uuid.UUID, other: uuid.UUID
) -> None:
    first, second = signal_suffix(instant, str(one)), signal_suffix(instant, str(other))
    assert (first == second) == (one == other)
    assert len(first) == len(second)


def test_a_signals_storage_key_leads_back_to_its_id() -> None:
    identity = inbox_uuid("run_1", 7)
    assert signal_uuid(signal_storage_key("run_1", "a_b.json", signal_suffix(1, identity))) == identity
