"""Search attributes and the text of a query: what is a value, what is refused, and what a condition means."""

from datetime import UTC, datetime, timedelta, timezone
from typing import Any

import pytest

from holdfast.core.attributes import (
    At,
    changed,
    declared_types,
    parts_of,
    plain,
    rows_of,
    to_parts,
    to_value,
    to_values,
)
from holdfast.core.search import Condition, Order, after_prefix, matches, parse_conditions, parse_order, parse_query
from holdfast.errors import InvalidInput

DAY = 86_400_000_000
TYPES = declared_types({"cents": int, "score": float, "region": str, "vip": bool, "due": datetime, "parts": list[str]})


@pytest.mark.contract("QUE-4")
@pytest.mark.parametrize(
    ("name", "given", "kept"),
    [
        ("cents", 5, 5),
        ("score", 5, 5.0),
        ("score", 0.1, 0.1),
        ("region", "", ""),
        ("region", "é" * 128, "é" * 128),
        ("vip", False, False),
        ("due", datetime(1970, 1, 1, 0, 0, 1, tzinfo=UTC), At(1_000_000)),
        ("due", datetime(1970, 1, 1, 2, 0, 1, tzinfo=timezone(timedelta(hours=2))), At(1_000_000)),
        ("due", "1970-01-01T00:00:01Z", At(1_000_000)),
        ("due", "1970-01-02", At(86_400_000_000)),
        ("parts", ["a", "b"], ("a", "b")),
        ("parts", [], ()),
    ],
)
def test_a_value_of_its_type_is_kept(name: str, given: Any, kept: Any) -> None:
    value = to_value(name, given, TYPES)
    assert (type(value), value) == (type(kept), kept)


@pytest.mark.contract("QUE-4")
@pytest.mark.parametrize(
    ("name", "given"),
    [
        ("cents", "5"),
        ("cents", 5.0),
        ("cents", True),
        ("cents", 2**53),
        ("score", float("nan")),
        ("score", "1"),
        ("region", 5),
        ("region", None),
        ("region", "é" * 129),
        ("region", "a\0b"),
        ("region", "\ud800"),
        ("vip", 1),
        ("due", 5),
        ("due", "tomorrow"),
        ("parts", "a"),
        ("parts", ["a", 5]),
        ("parts", ["a"] * 21),
        ("other", 1),
    ],
)
def test_a_misfit_is_refused(name: str, given: Any) -> None:
    with pytest.raises(InvalidInput) as refused:
        to_values({name: given}, TYPES)
    assert name in refused.value.message


@pytest.mark.parametrize(
    "types",
    [
        *({"Cents": int}, {"a.b": int}, {"status": str}, {"": str}, {"x": dict}, {"x": list[int]}, {5: int}),
        {f"a{number}": int for number in range(51)},
    ],
)
def test_what_cannot_be_declared_is_refused(types: Any) -> None:
    with pytest.raises(InvalidInput):
        declared_types(types)


def test_the_parts_of_a_reference_are_attributes() -> None:
    parts = to_parts({"customer": "42", "Order": "7"})
    assert parts == {"reference.customer": "42", "reference.Order": "7"}
    assert parts_of({**parts, "cents": 5}) == {"customer": "42", "Order": "7"}
    wrong: Any
    for wrong in ({"a b": "1"}, {"a": 1}, {"a": "x" * 300}, ["a"]):
        with pytest.raises(InvalidInput):
            to_parts(wrong)


def test_values_have_rows_of_the_kinds_in_which_they_are_compared() -> None:
    values = to_values({"cents": 5, "region": "eu", "vip": True, "due": "1970-01-01", "parts": ["a", "b", "a"]}, TYPES)
    assert rows_of(values) == [
        ("cents", "n", 5.0),
        ("region", "s", "eu"),
        ("vip", "b", 1.0),
        ("due", "t", 0.0),
        ("parts", "s", "a"),
        ("parts", "s", "b"),
    ]
    assert plain(values["due"]) == datetime(1970, 1, 1, tzinfo=UTC)
    assert plain(values["parts"]) == ["a", "b", "a"]
    assert changed(values, {"cents": None, "region": "us", "vip": None, "due": None, "parts": None}) == {"region": "us"}


@pytest.mark.contract("QUE-4")
@pytest.mark.parametrize(
    ("text", "conditions"),
    [
        ("", ()),
        ("cents>1000", (Condition("cents", ">", "n", 1000.0),)),
        ("cents >= 10  region = eu", (Condition("cents", ">=", "n", 10.0), Condition("region", "=", "s", "eu"))),
        ('region="New \\"York\\""', (Condition("region", "=", "s", 'New "York"'),)),
        ("region=123", (Condition("region", "=", "s", "123"),)),
        ("parts=x", (Condition("parts", "=", "s", "x"),)),
        ("vip!=true", (Condition("vip", "!=", "b", 1.0),)),
        ("due<1970-01-02", (Condition("due", "<", "t", 86_400_000_000.0),)),
        ("score=*", (Condition("score", "exists", "n"),)),
        ("score!=*", (Condition("score", "missing", "n"),)),
        ("reference.customer=42", (Condition("reference.customer", "=", "s", "42"),)),
        ("x=1.5e2", (Condition("x", "=", "n", 150.0),)),
        ("x=007", (Condition("x", "=", "s", "007"),)),
        ('x="7"', (Condition("x", "=", "s", "7"),)),
        ("x=2026-13-99", (Condition("x", "=", "s", "2026-13-99"),)),
        ("x=a=b", (Condition("x", "=", "s", "a=b"),)),
        ("x=*", (Condition("x", "exists"),)),
        ("region=New*", (Condition("region", "prefix", "s", "New"),)),
        ("parts=a*", (Condition("parts", "prefix", "s", "a"),)),
        ('region="New*"', (Condition("region", "=", "s", "New*"),)),
        ("reference.customer=4*", (Condition("reference.customer", "prefix", "s", "4"),)),
    ],
)
def test_the_text_of_a_query_is_read(text: str, conditions: tuple[Condition, ...]) -> None:
    assert parse_conditions(text, TYPES) == conditions


@pytest.mark.parametrize(
    "text",
    [
        "cents",
        "cents>",
        ">5",
        "cents=abc",
        "cents=5*",
        "vip=1",
        "due>soon",
        "a=1 b",
        'a="x',
        'a="\\q"',
        "a=1 " * 11,
        "5=5",
        "a==1x(",
    ],
)
def test_a_query_that_cannot_be_read_is_refused(text: str) -> None:
    if text == "a==1x(":
        assert parse_conditions(text, TYPES) == (Condition("a", "=", "s", "=1x("),)
        return
    with pytest.raises(InvalidInput) as refused:
        parse_conditions(text, TYPES)
    assert refused.value.details["field"] in ("where", "attributes")


@pytest.mark.parametrize(
    ("prefix", "end"),
    [("eu", "ev"), ("", None), ("a\U0010ffff", "b"), ("\U0010ffff", None), ("\ud7ff", "\ue000"), ("é", "ê")],
)
def test_texts_that_begin_so_are_a_range(prefix: str, end: str | None) -> None:
    assert after_prefix(prefix) == end
    assert matches({"x": f"{prefix}z"}, Condition("x", "prefix", "s", prefix))
    assert not matches({"x": 5}, Condition("x", "prefix", "s", prefix))
    assert end is None or not matches({"x": end}, Condition("x", "prefix", "s", prefix))


@pytest.mark.contract("QUE-4")
@pytest.mark.parametrize(
    ("text", "fields", "conditions"),
    [
        ("status:failed workflow:order", {"status": "FAILED", "workflow": "order"}, ()),
        ("cents>5 tag:web", {"tag": "web"}, (Condition("cents", ">", "n", 5.0),)),
        ('reference:"o 7" parent:a/b', {"reference_key": "o 7", "parent_run_id": "a/b"}, ()),
        ("created_at>=1970-01-02 created_at<=1970-01-03", {"created_from": DAY, "created_until": 2 * DAY + 1}, ()),
        ("finished_at>1970-01-02 finished_at<1970-01-03", {"finished_from": DAY + 1, "finished_until": 2 * DAY}, ()),
        ("region=a:b", {}, (Condition("region", "=", "s", "a:b"),)),
    ],
)
def test_one_text_asks_for_everything(text: str, fields: Any, conditions: Any) -> None:
    parsed = parse_query(text, TYPES)
    assert (parsed.fields, parsed.conditions) == (fields, conditions)


@pytest.mark.parametrize(
    ("text", "at"),
    [
        ("cents>5  colour:red", 10),
        ("status:failed status:paused", 15),
        ("created_at=1970-01-01", 1),
        ("finished_at>soon", 1),
        ("cents>5 cents", 9),
        ("region=eu cents=many", 11),
        ('tag:"x', 1),
    ],
)
def test_an_error_names_the_character(text: str, at: int) -> None:
    with pytest.raises(InvalidInput) as refused:
        parse_query(text, TYPES)
    assert refused.value.details["at"] == at
    assert f"character {at}:" in refused.value.message


def test_where_only_attributes_can_be_asked_for_nothing_else_is() -> None:
    with pytest.raises(InvalidInput, match="status"):
        parse_conditions("status:failed", TYPES)


def test_an_order_is_read() -> None:
    assert parse_order("cents", TYPES) == Order("cents", "n", False)
    assert parse_order("-region", TYPES) == parse_order("region desc", TYPES) == Order("region", "s", True)
    assert parse_order("-finished_at", TYPES) == Order("finished_at", None, True)
    assert parse_order("reference.customer", TYPES) == Order("reference.customer", "s", False)
    for wrong in ("parts", "other", "", "-", "status"):
        with pytest.raises(InvalidInput):
            parse_order(wrong, TYPES)


def test_values_of_different_kinds_are_never_compared() -> None:
    assert not matches({"x": "5"}, Condition("x", "=", "n", 5.0))
    assert not matches({"x": "5"}, Condition("x", "!=", "n", 6.0))
    assert matches({"x": 5}, Condition("x", "!=", "n", 6.0))
    assert matches({"x": 5}, Condition("x", "exists"))
    assert not matches({"x": ()}, Condition("x", "exists"))
