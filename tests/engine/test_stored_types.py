"""Types of arguments, results, signals, updates, forms and states: what is stored comes back as it was, or is refused.

What cannot be stored is refused when the function is registered, before anything was done with it.
"""

import asyncio
import io
import pathlib
import subprocess
import sys
import types
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, date, datetime, time, timedelta
from decimal import Decimal
from enum import Enum, Flag, IntEnum
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Generic, Literal, NamedTuple, NoReturn, TextIO, TypedDict, TypeVar
from uuid import UUID

import msgspec
import pydantic
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import BaseModel, ConfigDict, Field, computed_field, field_validator
from pydantic.dataclasses import dataclass as pydantic_dataclass

import holdfast as hf
from holdfast.client import Client
from holdfast.core import events as e
from holdfast.core.messages import Actor
from holdfast.errors import InvalidInput, PayloadUnreadable, RunFailed
from tests.engine.harness import EngineVariant, wait_for_event

T = TypeVar("T")


class Colour(Enum):
    RED = "red"
    BLUE = "blue"


class Size(IntEnum):
    SMALL = 1
    LARGE = 2


class Access(Flag):
    READ = 1
    WRITE = 2


@dataclass
class Point:
    x: int
    y: float = 0.0


class Place3D(NamedTuple):
    x: int
    y: int


class Labels(TypedDict):
    name: str


class Circle(msgspec.Struct, tag=True):
    radius: int


class Square(msgspec.Struct, tag=True):
    side: int


@dataclass
class Tree:
    name: str
    children: "list[Tree]" = field(default_factory=list)


@dataclass
class Crate(Generic[T]):
    inside: T


class Item(BaseModel):
    sku: str
    price: Decimal
    tags: set[str] = set()


class Order(BaseModel):
    """A model with all that makes one more than a dict: an alias, a validator, a computed field, sets inside."""

    order_id: str = Field(alias="orderId")
    items: list[Item] = []
    note: bytes = b""
    anything: Any = None
    model_config = ConfigDict(ser_json_bytes="base64", val_json_bytes="base64", populate_by_name=True)

    @field_validator("order_id")
    @classmethod
    def refuse_none(cls, value: str) -> str:
        if value == "none":
            raise ValueError(f"{value} is no order")
        return value

    @computed_field  # type: ignore[prop-decorator]
    @property
    def count(self) -> int:
        """How many items there are."""
        return len(self.items)


class Cat(BaseModel):
    kind: Literal["cat"] = "cat"
    lives: int


class Dog(BaseModel):
    kind: Literal["dog"] = "dog"
    name: str


class Folder(BaseModel):
    name: str
    folders: "list[Folder]" = []


@dataclass
class Parcel:
    order: Order
    former: Order | None = None


class Shelf(msgspec.Struct):
    orders: list[Order]
    by_name: dict[str, Order] = {}


class Money:
    """A class that only a converter can store."""

    def __init__(self, cents: int) -> None:
        self.cents = cents

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Money) and other.cents == self.cents

    def __hash__(self) -> int:
        return hash(self.cents)


def money_of(plain: Any) -> Money:
    """Read an amount."""
    if plain["cents"] < 0:
        raise KeyError("no such amount")
    return Money(plain["cents"])


def plain_money(money: Money) -> dict[str, int]:
    """Write an amount."""
    if money.cents > 1_000_000:
        raise RuntimeError("too much")
    return {"cents": money.cents}


MONEY = hf.Converter(Money, plain_money, money_of, schema={"type": "object", "title": "Money"})

texts = st.text(st.characters(exclude_categories=["Cs"]), max_size=8)
models = st.builds(
    lambda name, items, note, anything: Order(orderId=name, items=items, note=note, anything=anything),
    texts.filter(lambda text: text != "none"),
    st.lists(
        st.builds(Item, sku=texts, price=st.decimals(0, 10, places=2), tags=st.sets(texts, max_size=3)), max_size=2
    ),
    st.binary(max_size=8),
    st.none() | texts | st.lists(st.integers(-9, 9), max_size=2),
)
aware = st.datetimes(timezones=st.just(UTC))
STORED: dict[str, tuple[Any, st.SearchStrategy[Any]]] = {
    "int": (int, st.integers(-(2**70), 2**70)),
    "float": (float, st.floats(allow_nan=False, allow_infinity=False)),
    "bytes": (bytes, st.binary()),
    "set": (set[int], st.sets(st.integers(-99, 99))),
    "frozenset": (frozenset[str], st.frozensets(texts)),
    "tuple": (tuple[int, str], st.tuples(st.integers(0, 9), texts)),
    "tuple of any length": (tuple[bool, ...], st.lists(st.booleans()).map(tuple)),
    "Decimal": (Decimal, st.decimals(allow_nan=False, allow_infinity=False)),
    "aware datetime": (datetime, aware),
    "naive datetime": (datetime, st.datetimes()),
    "date": (date, st.dates()),
    "time": (time, st.times()),
    "timedelta": (timedelta, st.timedeltas(timedelta(days=-9_999), timedelta(days=9_999))),
    "UUID": (UUID, st.uuids()),
    "enum": (Colour, st.sampled_from(Colour)),
    "int enum": (Size, st.sampled_from(Size)),
    "flag": (Access, st.sampled_from([Access.READ, Access.WRITE, Access.READ | Access.WRITE])),
    "Literal": (Literal["a", 1], st.sampled_from(["a", 1])),
    "dataclass": (Point, st.builds(Point, st.integers(0, 9), st.floats(0, 9))),
    "recursive": (Tree, st.recursive(texts.map(Tree), lambda kids: st.builds(Tree, texts, st.lists(kids, max_size=2)))),
    "generic": (Crate[date], st.builds(Crate, st.dates())),
    "named tuple": (Place3D, st.builds(Place3D, st.integers(0, 9), st.integers(0, 9))),
    "typed dict": (Labels, st.fixed_dictionaries({"name": texts})),
    "tagged union": (Circle | Square, st.builds(Circle, st.integers(0, 9)) | st.builds(Square, st.integers(0, 9))),
    "optional": (Point | None, st.none() | st.builds(Point, st.integers(0, 9))),
    "dict": (dict[str, list[date]], st.dictionaries(texts, st.lists(st.dates(), max_size=2), max_size=3)),
    "abstract": (Mapping[str, Sequence[int]], st.dictionaries(texts, st.lists(st.integers(0, 9)), max_size=2)),
    "Any": (Any, st.none() | texts | st.lists(st.integers(-9, 9))),
    "object": (object, st.none() | texts),
    "constrained": (Annotated[int, msgspec.Meta(gt=0)], st.integers(1, 99)),
    "model": (Order, models),
    "recursive model": (
        Folder,
        st.recursive(
            texts.map(lambda name: Folder(name=name)),
            lambda inner: st.builds(Folder, name=texts, folders=st.lists(inner, max_size=2)),
        ),
    ),
    "optional model": (Order | None, st.none() | models),
    "list of models": (list[Order], st.lists(models, max_size=2)),
    "model in a dataclass": (Parcel, st.builds(Parcel, models, st.none() | models)),
    "model in a Struct": (
        Shelf,
        st.builds(Shelf, st.lists(models, max_size=2), st.dictionaries(texts, models, max_size=1)),
    ),
    "union of models": (Cat | Dog, st.builds(Cat, lives=st.integers(0, 9)) | st.builds(Dog, name=texts)),
    "model or text": (Cat | str | None, st.none() | texts | st.builds(Cat, lives=st.integers(0, 9))),
    "told by a field": (
        dict[str, Annotated[Cat | Dog, Field(discriminator="kind")]],
        st.dictionaries(texts, st.builds(Dog, name=texts), max_size=2),
    ),
    "converter": (Money, st.builds(Money, st.integers(0, 99))),
    "converter in a list": (list[Money | None], st.lists(st.none() | st.builds(Money, st.integers(0, 99)), max_size=3)),
    "converter in a dataclass": (Crate[Money], st.builds(Crate, st.builds(Money, st.integers(0, 99)))),
}


def typed(kind: Any) -> tuple[hf.App, Any]:
    """Return the app with the type as the annotation of every function."""
    app = hf.App("types", converters=[MONEY])

    async def same(value: Any) -> Any:
        assert hf.activity_context().attempt == 1
        hf.activity_context().heartbeat({"progress": value})
        return value

    same.__annotations__ = {"value": kind, "return": kind}
    activity = app.activity(same)

    async def carries(value: Any, rounds: int = 1) -> Any:
        def answer(value: Any) -> Any:
            return value

        answer.__annotations__ = {"value": kind, "return": kind}
        hf.on_query("now", lambda: value)
        hf.on_update("change", answer)
        value = await activity(value)
        value = await hf.wait_signal("given", handler=answer)
        if rounds:
            hf.continue_as_new(value, rounds - 1)
        return await hf.task("look", kind, payload=value)

    carries.__annotations__ = {"value": kind, "rounds": int, "return": kind}
    return app, app.workflow(signals={"given": kind})(carries)


async def carried(app: hf.App, workflow: Any, value: Any) -> Any:
    """Return a value that went through a run: input, activity, signal, update, rotation, task and result."""
    run = await app.start(workflow, value)
    for number in range(2):
        await run.signal("given", value, signal_id=f"s{number}")
    plain = msgspec.json.decode(await first_input(run))["value"]
    created = await wait_for_event(run, "TaskCreated")
    assert await run.update("change", value=value) == plain
    assert await run.query("now") == plain
    assert isinstance(created.data, e.TaskCreated)
    await app.tasks.complete(created.data.task_id, value, actor=Actor("ann"))
    return await run.result()


async def first_input(run: hf.RunHandle[Any]) -> bytes:
    """Return what is stored of the input of a run."""
    return bytes((await run.events())[0].data.input)  # type: ignore[attr-defined]


@pytest.mark.contract("WF-1", "API-2")
@pytest.mark.parametrize("name", STORED)
@pytest.mark.parametrize("store", ["memory", "sqlite"])
def test_a_value_comes_back_as_it_was_from_everything_that_stores_it(name: str, store: str, tmp_path: Path) -> None:
    kind, values = STORED[name]
    examples: list[Any] = []

    @settings(max_examples=8, deadline=None, database=None)
    @given(values)
    def collect(value: Any) -> None:
        examples.append(value)

    collect()

    async def play() -> None:
        app, workflow = typed(kind)
        address = "memory://" if store == "memory" else f"sqlite:///{tmp_path}/types.db"
        async with asyncio.timeout(60), app.node(address):
            found = await asyncio.gather(*(carried(app, workflow, value) for value in examples))
        for value, back in zip(examples, found, strict=True):
            assert back == value
            assert type(back) is type(value) or kind in (Any, object) or name == "abstract"

    asyncio.run(play())


# --- models of pydantic


@pytest.mark.contract("API-2")
async def test_a_model_is_stored_by_alias_without_computed_fields_and_with_sets_in_order(
    variant: EngineVariant,
) -> None:
    app = hf.App("types")

    @app.workflow
    async def takes(order: Order) -> Order:
        return order

    order = Order(orderId="o-1", items=[Item(sku="a", price=Decimal("1.50"), tags={"z", "b", "a"})], note=b"\xff")
    async with variant.node(app):
        run = await app.start(takes, order)
        assert await run.result() == order
        stored = msgspec.json.decode(await first_input(run))
    assert stored == {
        "order": {
            "orderId": "o-1",
            "items": [{"sku": "a", "price": "1.50", "tags": ["a", "b", "z"]}],
            "note": "_w==",
            "anything": None,
        }
    }


@pytest.mark.contract("API-2")
async def test_validators_run_and_the_error_names_the_field_but_not_the_value() -> None:
    app = hf.App("types")

    @app.workflow(signals={"order": Order})
    async def takes(order: Order) -> str:
        return (await hf.wait_signal("order", Order)).order_id

    async with asyncio.timeout(60), app.node("memory://"):
        with pytest.raises(InvalidInput, match=r"orderId: Value error, none is no order - at `\$\.order`"):
            await app.start(takes, {"orderId": "none"})
        run = await app.start(takes, {"order_id": "o-1"})
        with pytest.raises(InvalidInput, match=r"payload\.orderId: Its validator refuses it") as refused:
            await run.signal("order", {"orderId": "none"})
        assert "is no order" not in str(refused.value)
        with pytest.raises(InvalidInput, match=r"payload.items\[0\].price: Field required"):
            await run.signal("order", {"orderId": "o-2", "items": [{"sku": "x"}]})
        await run.signal("order", Order(orderId="o-2"))
        assert await run.result() == "o-2"


class Bare:
    """A class without a stored form."""


class Wild(BaseModel):
    number: float = 0
    any_number: Any = None

    @field_validator("number")
    @classmethod
    def break_down(cls, value: float) -> float:
        if value == 13:
            raise KeyError("thirteen")
        return value


@pytest.mark.contract("API-2")
@pytest.mark.parametrize(
    ("given", "said"),
    [
        (Wild(number=float("nan")), "nan has no JSON"),
        (Wild(any_number=float("inf")), "inf has no JSON"),
        (Wild(any_number=Bare()), "Unable to serialize unknown type"),
        ({"number": 13}, "a validator of Wild raised KeyError: 'thirteen'"),
        ({"number": "x"}, "number: Input should be a valid number"),
    ],
)
async def test_a_model_that_cannot_be_stored_is_refused_where_it_is_given(given: Any, said: str) -> None:
    app = hf.App("types")

    @app.workflow
    async def takes(value: Wild) -> None: ...

    async with asyncio.timeout(60), app.node("memory://"):
        with pytest.raises(InvalidInput, match=said):
            await app.start(takes, given)


@pytest.mark.contract("API-2")
async def test_the_json_schemas_of_models_are_published(variant: EngineVariant) -> None:
    app = hf.App("types", converters=[MONEY])

    @app.workflow(signals={"parcel": Parcel, "pet": Cat | Dog, "paid": Money})
    async def takes(order: Order, shelf: Shelf | None = None) -> Money:
        await hf.task("look", Order)
        return Money(1)

    async with variant.node(app):
        run = await app.start(takes, Order(orderId="o-1"))
        created = (await wait_for_event(run, "TaskCreated")).data
        view = await Client(app).workflows.get("takes")
    assert isinstance(created, e.TaskCreated)
    form = msgspec.json.decode(created.form)
    assert list(form["$defs"]["Order"]["properties"]) == ["orderId", "items", "note", "anything"]
    assert view.input["$defs"].keys() >= {"Order", "Item", "Shelf"}
    assert view.signals["parcel"]["$defs"]["Parcel"]["properties"]["order"] == {"$ref": "#/$defs/Order"}
    assert view.signals["pet"]["anyOf"] == [{"$ref": "#/$defs/Cat"}, {"$ref": "#/$defs/Dog"}]
    assert view.result == view.signals["paid"] == {"type": "object", "title": "Money"}


def test_a_model_and_a_struct_of_one_name_keep_schemas_of_their_own() -> None:
    app = hf.App("types")
    other = msgspec.defstruct("Item", [("weight", int)])

    async def takes(one: Item, two: Any) -> None: ...

    takes.__annotations__["two"] = other
    input = app.workflow(takes).definition.signature.schemas()[0]
    [top] = [each for name, each in input["$defs"].items() if name.endswith("_arguments")]
    assert [list(input["$defs"][top["properties"][name]["$ref"][8:]]["properties"]) for name in ("one", "two")] == [
        ["sku", "price", "tags"],
        ["weight"],
    ]


@pytest.mark.process
def test_pydantic_is_not_imported_by_the_package() -> None:
    code = "import sys, holdfast, holdfast.client; sys.exit('pydantic' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


class Receipt(BaseModel):
    """A model that takes anything."""

    number: str = ""


@pytest.mark.contract("API-2")
async def test_an_encrypted_result_is_not_read_as_an_empty_model(tmp_path: Path) -> None:
    async def pays() -> Receipt:
        return Receipt(number="r-1")

    async def result_with(key: str, run_id: str | None = None) -> tuple[str, Receipt]:
        app = hf.App("types", codecs=[hf.Encryption({key: key.encode() * 16})])
        workflow = app.workflow(pays)
        async with asyncio.timeout(60), app.node(f"sqlite:///{tmp_path}/sealed.db"):
            run = (await app.start(workflow)) if run_id is None else None
            run = run or hf.RunHandle(app.runtime(), run_id or "", workflow.definition)
            return run.run_id, await run.result()

    run_id, receipt = await result_with("k1")
    assert receipt == Receipt(number="r-1")
    with pytest.raises(PayloadUnreadable):
        await result_with("k2", run_id)


# --- converters


@pytest.mark.contract("API-2")
async def test_a_converter_that_fails_is_named_with_the_argument() -> None:
    app = hf.App("types", converters=[MONEY])

    @app.activity
    async def pays(price: Money) -> Money:
        return Money(2_000_000)

    @app.workflow
    async def buys(price: Money) -> Money:
        return await pays.options(retry=hf.Retry(max_attempts=1))(price)

    async with asyncio.timeout(60), app.node("memory://"):
        with pytest.raises(InvalidInput, match=r"argument 'price' of workflow 'buys': .* Money raised RuntimeError"):
            await app.start(buys, Money(9_999_999))
        with pytest.raises(InvalidInput, match=r"the converter of Money raised KeyError: .* - at `\$\.price`"):
            await app.start(buys, {"cents": -1})
        run = await app.start(buys, Money(1))
        with pytest.raises(RunFailed, match=r"the result of activity 'pays': .*the converter of Money raised"):
            await run.result()


@pytest.mark.contract("API-2")
@pytest.mark.parametrize(
    ("converters", "said"),
    [
        ([MONEY, MONEY], "two converters of Money"),
        ([hf.Converter(datetime, str, datetime.fromisoformat)], "datetime has a stored form of its own"),
        ([hf.Converter(Point, str, lambda _: Point(1))], "Point has a stored form of its own"),
        (["Money"], "a list of Converter"),
    ],
)
def test_converters_that_would_not_be_called_are_refused(converters: Any, said: str) -> None:
    with pytest.raises(InvalidInput, match=said):
        hf.App("types", converters=converters)


@pytest.mark.parametrize("given", [(3, str, str), (Money, 3, str), (Money, str, None), (Money, str, str, "schema")])
def test_a_converter_is_a_class_and_two_functions(given: Any) -> None:
    with pytest.raises(InvalidInput):
        hf.Converter(*given)


async def test_a_path_is_converted_whatever_its_real_class_is() -> None:
    app = hf.App("types", converters=[hf.Converter(pathlib.Path, str, pathlib.Path)])

    @app.workflow
    async def takes(path: pathlib.Path) -> pathlib.Path:
        return path / "b"

    async with asyncio.timeout(60), app.node("memory://"):
        assert await (await app.start(takes, pathlib.Path("a"))).result() == pathlib.Path("a/b")


async def test_converters_of_one_app_are_not_those_of_another() -> None:
    async def takes(money: Money) -> None: ...

    hf.App("one", converters=[MONEY]).workflow(takes)
    with pytest.raises(InvalidInput, match="values of Money cannot be stored"):
        hf.App("other").workflow(takes)


async def test_the_client_takes_and_gives_models_and_converted_values() -> None:
    app = hf.App("types", converters=[MONEY])

    @app.workflow
    async def takes(order: Order, money: Money) -> Money:
        await hf.wait_signal("more", Order)
        return money

    async with asyncio.timeout(60), app.node("memory://"), Client(app) as client:
        run = await client.runs.start("takes", input={"order": Order(orderId="o-1"), "money": Money(5)})
        await client.signals.send(run.run_id, "more", payload=Order(orderId="o-2"))
        assert await client.result(run.run_id, Money) == Money(5)
        with pytest.raises(InvalidInput):
            await client.result(run.run_id, Order)


# --- what cannot be stored


@dataclass
class Holder:
    bare: Bare


class Hidden(BaseModel):
    secret: pydantic.SecretStr


class Bytes(BaseModel):
    parts: list[bytes]


class Renamed(BaseModel):
    a: int = Field(validation_alias="x", serialization_alias="y")


class Left(BaseModel):
    a: int = Field(exclude=True)


class Calls(BaseModel):
    function: Callable[[int], int]


class Unfinished(BaseModel):
    later: "NotThere"  # type: ignore[name-defined] # noqa: F821


@dataclass
class Unresolved:
    later: "NotThere"  # type: ignore[name-defined] # noqa: F821


@pydantic_dataclass
class Checked:
    a: int


class One(msgspec.Struct):
    a: int


class Two(msgspec.Struct):
    b: int


class Pairs(Enum):
    A = (1, 2)


@dataclass
class Pets:
    pets: list[Cat | Dog]


REFUSED: dict[str, tuple[Any, str]] = {
    "class": (Bare, r"values of Bare cannot be stored; use a dataclass.*Converter\(Bare"),
    "class in a dataclass": (list[Holder], r"Holder.bare: values of Bare cannot"),
    "Callable": (Callable[[int], str], "exists in one process only"),
    "open file": (TextIO, "exists in one process only"),
    "open text file": (io.TextIOWrapper, "exists in one process only"),
    "Path": (pathlib.Path, "use str, or App"),
    "iterable": (Iterable[int], r"use list\["),
    "complex": (complex, "values of complex cannot"),
    "type variable": (types.GenericAlias(list, (T,)), "type variable ~T; name a type, or Any"),
    "union of Structs": (One | Two, "must be tagged"),
    "union of texts": (str | datetime, "more than one str-like type"),
    "converter's type in a union": (Bare | int, "custom type"),
    "enum of pairs": (Pairs, "Enums must contain"),
    "keys that are no text": (dict[int, str], "the keys of a JSON object are text"),
    "keys in a dict": (dict[str, dict[UUID, str]], "the keys of a JSON object are text"),
    "unresolved": ("NotThere", "an annotation cannot be resolved: name 'NotThere' is not defined"),
    "unresolved field": (Unresolved, "cannot be resolved: name 'NotThere'"),
    "model with a secret": (Hidden, "Hidden.secret: a SecretStr is written as asterisks"),
    "model with bytes": (Bytes, "Bytes.parts: bytes that are not UTF-8"),
    "model with two aliases": (list[Renamed], "Renamed.a: it is written as 'y', and read as 'x'"),
    "model that leaves out": (Left | None, "Left.a: it is required, and excluded"),
    "model with a function": (Calls, "Calls: Cannot generate"),
    "unfinished model": (Unfinished, "Unfinished: .* is not fully defined"),
    "dataclass of pydantic": (list[Checked], "Checked is a dataclass of pydantic"),
    "models and Structs": (Cat | One, "One cannot be in one union with a pydantic model"),
    "models in a dataclass's union": (Pets, "a pydantic model that holds the union"),
}


def annotated(kind: Any, *, is_result: bool = False) -> Any:
    """Return an async function with a type as the annotation of its parameter or result."""

    async def function(given: Any) -> Any:
        return given

    function.__annotations__ = {"return" if is_result else "given": kind}
    return function


@pytest.mark.contract("API-2")
@pytest.mark.parametrize("name", REFUSED)
def test_a_type_that_cannot_be_stored_is_refused_when_the_function_is_registered(name: str) -> None:
    kind, said = REFUSED[name]
    app = hf.App("types")
    is_resolved = not isinstance(kind, str)
    for what, register in (("activity", app.activity), ("workflow", app.workflow)):
        where = f"parameter 'given' of {what} 'function': .*" if is_resolved else f"{what} 'function': "
        with pytest.raises(InvalidInput, match=where + said):
            register(annotated(kind))
        where = f"the result of {what} 'function': .*" if is_resolved else f"{what} 'function': "
        with pytest.raises(InvalidInput, match=where + said):
            register(annotated(kind, is_result=True))
    if is_resolved:
        with pytest.raises(InvalidInput, match=f"signal 'go' of workflow 'function': .*{said}"):
            app.workflow(signals={"go": kind})(annotated(int))
    assert not app.registry.workflows
    assert not app.registry.activities


@pytest.mark.contract("API-2")
async def test_inside_a_workflow_a_type_is_refused_before_anything_is_done_with_it() -> None:
    app = hf.App("types")

    def answers() -> Bare:
        return Bare()

    def takes(bare: Bare) -> None: ...

    words: dict[str, Callable[[], Any]] = {
        "parameter 'bare' of query 'q'": lambda: hf.on_query("q", takes),
        "the result of query 'r'": lambda: hf.on_query("r", answers),
        "parameter 'bare' of update 'u'": lambda: hf.on_update("u", takes),
        "signal 's'": lambda: hf.wait_signal("s", Bare),
        "signal 't'": lambda: hf.signals("t", Bare),
        "the result of the handler of signal 'h'": lambda: hf.wait_signal("h", int, handler=lambda_of(Bare)),
        "the form of task 'k'": lambda: hf.task("k", Bare),
    }

    @app.workflow
    async def asks() -> list[str]:
        found = []
        for word in words.values():
            try:
                waiting = word()
                if asyncio.iscoroutine(waiting):
                    await waiting
            except InvalidInput as problem:
                found.append(problem.message)
        return found

    async with asyncio.timeout(60), app.node("memory://"):
        run = await app.start(asks)
        found = await run.result()
        assert [text.split(":")[0] for text in found] == list(words)
        assert [event.event_type for event in await run.events()] == ["RunQueued", "RunStarted", "RunCompleted"]


def lambda_of(result: Any) -> Any:
    """Return a function with an annotated result."""

    def function(payload: Any) -> Any:
        return payload

    function.__annotations__ = {"return": result}
    return function


def test_functions_without_annotations_and_those_that_never_return_are_registered() -> None:
    app = hf.App("types")

    async def nothing(given, other=None):  # type: ignore[no-untyped-def]
        return given

    async def forever() -> NoReturn:
        hf.continue_as_new()

    assert app.workflow(nothing).definition.signature.result_type is Any
    assert app.workflow(forever).definition.signature.result_type is Any
    assert app.activity(name="part")(partial(nothing, other=1)).definition.name == "part"


@pytest.mark.contract("API-2")
async def test_constraints_of_annotations_are_checked() -> None:
    app = hf.App("types")

    @app.workflow
    async def takes(count: Annotated[int, msgspec.Meta(gt=0)]) -> int:
        return count

    async with asyncio.timeout(60), app.node("memory://"):
        with pytest.raises(InvalidInput, match="Expected `int` >= 1"):
            await app.start(takes, 0)
        assert await (await app.start(takes, 1)).result() == 1
