"""Every operation in every way there is to ask for it, from one table; and the catalogue itself."""

from pathlib import Path

import msgspec
import pytest

import holdfast as hf
from holdfast.cli.commands import spec_of
from holdfast.cli.main import all_commands
from holdfast.client import resources
from holdfast.errors import RateLimited
from holdfast.service.http.openapi import EXAMPLES
from holdfast.service.http.rest import OperationRouter
from holdfast.service.operations import DOWNLOADS, OPERATIONS, STREAMS
from holdfast.service.registry import RequestBinder
from holdfast.service.views import EventView
from holdfast.testing import VirtualClock
from tests.service.callers import CALLERS, caller_by_name
from tests.service.in_process import serve_in_process
from tests.service.operation_cases import CASES

NEED_A_CLOCK = {"letters.list", "letters.get", "letters.requeue", "letters.drop"}


@pytest.mark.contract("API-1", "API-2", "SIG-7")
@pytest.mark.parametrize("how", CALLERS)
@pytest.mark.parametrize("name", sorted(CASES))
async def test_every_operation_in_every_way(name: str, how: str, tmp_path: Path) -> None:
    store: hf.MemoryStore | str = hf.MemoryStore(VirtualClock()) if name in NEED_A_CLOCK else hf.MemoryStore()
    if how == "REST" and name not in NEED_A_CLOCK:  # that stores behave alike is proved elsewhere
        store = f"sqlite:///{tmp_path}/service.db"
    async with serve_in_process(store) as server:
        await CASES[name](server, caller_by_name(server, how))


@pytest.mark.contract("EVT-2")
def test_callers_see_every_field_of_an_event() -> None:
    assert set(hf.Event.__struct_fields__) <= set(EventView.__struct_fields__)


@pytest.mark.contract("API-1")
def test_no_operation_is_without_a_scene_and_an_example() -> None:
    assert set(CASES) == set(OPERATIONS)
    assert set(EXAMPLES) == set(OPERATIONS)


@pytest.mark.contract("API-1")
async def test_no_way_has_an_operation_that_another_lacks() -> None:
    everything = {**OPERATIONS, **STREAMS, **DOWNLOADS}
    asked = {f"{resource}.{verb}" for resource in resources.RESOURCES for verb in _public(resource.title())}
    assert asked == {
        f"{resource}.{verb}" for resource in resources.RESOURCES for verb in _public(f"Sync{resource.title()}")
    }
    assert asked == set(everything)
    said = {
        f"{resource} {verb}" for resource in _command_groups() for verb in all_commands()[resource] if verb[0] != "-"
    }
    derived = {spec_of(operation).words: name for name, operation in OPERATIONS.items()}
    assert len(derived) == len(OPERATIONS)
    bulk = {"run bulk", "task bulk", "dead-letter bulk", "bus bulk"}
    more = {"run show", "run tail", "run stream", "audit export", "archive export"}
    assert said == {*derived, *bulk, *more}, "which show a run whole, follow it, and write the audit log as lines"
    async with serve_in_process() as server:
        description = (await server.http.get("/openapi.json")).json()
        described = {
            (verb.upper(), path): operation["operationId"]
            for path, verbs in description["paths"].items()
            for verb, operation in verbs.items()
        }
        assert described == {(operation.verb, operation.path): name for name, operation in everything.items()}
        router = OperationRouter(OPERATIONS)
        for name, operation in OPERATIONS.items():
            endpoints, _ = router.match(operation.path.encode())
            assert endpoints[operation.verb].operation is operation
            call = {"jsonrpc": "2.0", "id": 1, "method": name, "params": [7]}
            answer = (await server.http.post("/rpc", json=call)).json()
            assert answer["error"]["code"] == -32_602, "the method is there, and takes no list"


def _public(kind: str) -> list[str]:
    return [name for name in vars(getattr(resources, kind)) if name[0] != "_"]


def _command_groups() -> set[str]:
    return {spec_of(operation).words.split()[0] for operation in OPERATIONS.values()}


@pytest.mark.parametrize("name", OPERATIONS)
def test_examples_are_what_can_be_asked(name: str) -> None:
    assert isinstance(
        RequestBinder(OPERATIONS[name]).from_json(msgspec.json.encode(EXAMPLES[name])), OPERATIONS[name].request_type
    )


@pytest.mark.contract("API-2")
async def test_operations_whose_refusals_are_counted_say_that_there_may_be_too_many() -> None:
    async with serve_in_process() as server:
        paths = (await server.http.get("/openapi.json")).json()["paths"]
    counted = [operation for operation in OPERATIONS.values() if operation.is_counted]
    assert counted
    for operation in counted:
        assert RateLimited in operation.all_errors, operation.name
        description = paths[operation.path][operation.verb.lower()]
        assert "Retry-After" in description["responses"]["429"]["headers"], operation.name


@pytest.mark.parametrize("name", OPERATIONS)
def test_operations_say_what_they_do(name: str) -> None:
    operation = OPERATIONS[name]
    assert operation.summary
    assert operation.request_type.__doc__
    assert operation.response_type.__doc__
    assert operation.verb in {"GET", "POST"}
    assert operation.scope is not None or name == "system.health" or name.startswith("activities.")
