"""Every operation on every transport, from one table; and the catalogue itself."""

from pathlib import Path

import msgspec
import pytest

import holdfast as hf
from holdfast.service.asking import Reader
from holdfast.service.examples import ASKS
from holdfast.service.operations import CATALOGUE
from holdfast.service.rest import Addresses
from holdfast.service.stream import STREAMS
from holdfast.testing.clock import VirtualClock
from tests.service.scenes import SCENES
from tests.service.stage import on_stage

NEED_A_CLOCK = {"letters.list", "letters.get", "letters.requeue", "letters.drop"}


@pytest.mark.contract("API-1", "API-2")
@pytest.mark.parametrize("transport", ["rest", "rpc"])
@pytest.mark.parametrize("name", sorted(SCENES))
async def test_every_operation_on_every_transport(name: str, transport: str, tmp_path: Path) -> None:
    store = hf.MemoryStore(VirtualClock()) if name in NEED_A_CLOCK else f"sqlite:///{tmp_path}/service.db"
    async with on_stage(store) as stage:
        await SCENES[name](stage, stage.callers()[transport])


@pytest.mark.contract("API-1")
def test_no_operation_is_without_a_scene_and_an_example() -> None:
    assert set(SCENES) == set(CATALOGUE)
    assert set(ASKS) == set(CATALOGUE)


@pytest.mark.contract("API-1")
async def test_no_transport_has_an_operation_that_another_lacks() -> None:
    async with on_stage() as stage:
        description = (await stage.http.get("/openapi.json")).json()
        described = {
            (verb.upper(), path): operation["operationId"]
            for path, verbs in description["paths"].items()
            for verb, operation in verbs.items()
        }
        everything = {**CATALOGUE, **STREAMS}
        assert described == {(operation.verb, operation.path): name for name, operation in everything.items()}
        addresses = Addresses(CATALOGUE)
        for name, operation in CATALOGUE.items():
            endpoints, _ = addresses.find(operation.path.encode())
            assert endpoints[operation.verb].operation is operation
            call = {"jsonrpc": "2.0", "id": 1, "method": name, "params": [7]}
            answer = (await stage.http.post("/rpc", json=call)).json()
            assert answer["error"]["code"] == -32_602, "the method is there, and takes no list"


@pytest.mark.parametrize("name", CATALOGUE)
def test_examples_are_what_can_be_asked(name: str) -> None:
    Reader(CATALOGUE[name]).from_json(msgspec.json.encode(ASKS[name]))


@pytest.mark.parametrize("name", CATALOGUE)
def test_operations_say_what_they_do(name: str) -> None:
    operation = CATALOGUE[name]
    assert operation.summary
    assert operation.ask.__doc__
    assert operation.answer.__doc__
    assert operation.verb in {"GET", "POST"}
    assert operation.scope is not None or name == "system.health"
