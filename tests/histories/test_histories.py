"""Every history that was ever written can be read, and means today what it meant then."""

import hashlib
import json
from itertools import groupby

import msgspec
import pytest

from holdfast.core import codec
from holdfast.core.events import BODIES, Event
from holdfast.core.invariants import RunView, check
from holdfast.core.state import state_of
from tests.histories.golden import FOLDER, expected, from_line, make_runs, to_line, versions

# What the files of each version are. Once released they never change: a new format is a new version beside them.
DIGESTS = {
    "v1.jsonl": "869f3b4f28f77bd60625d0e3dcd2905eb711629fa3ac798ab6f4d053054b79db",
    "v1.expected.json": "78530d878444ba0ad5a382b6620cb8f71907ae46b67a9f6a1bd3aa490ab19aec",
    "v2.jsonl": "861d5ebbf55dd7d27159858cb688d891ee588f2801c92a5464a3c44f19caf495",
    "v2.expected.json": "874a4edc9b40d91d4263dc5a5a67ec6910a5fa089b6643de7de16cac8f688b89",
    "v3.jsonl": "b17cfc79dd637331d22a7e257c38e309617154481c1f7e3099e8da448cbb4121",
    "v3.expected.json": "ef92bdc7c1c19dc2bd555ba3348f9dd0a13c7a6e0699ee0e5d753b01d6d66cb1",
    "v4.jsonl": "4332858d7ed221f953abfae8d0cfce9c06783f838981417ac846ad010ba57c48",
    "v4.expected.json": "0bd62cacdaadc6a724a6b583ce181ef4353fbd5bc31ec00fddc729cdac381a38",
    "v5.jsonl": "fcc33ea0cbc6ad4c13a8079cd0c9ce5e10f62fdbefeaae99539cde056e57f360",
    "v5.expected.json": "8e5444e94efcb1390accc08fd829b3277426cf57bd1fd1942120865fc00ceb9c",
    "v6.jsonl": "80cbe8b93fd6ed1e495d18fcf37b465ddcacaaeae580497c66185a647c047daf",
    "v6.expected.json": "3fe58607171f3623876d22ab5fc9f887a1a94d7961ac5317098f579625a56e86",
    "v7.jsonl": "44a6cf67c99c6a076bf19fc7d8ce58861fb54fcf4354b8c0a377e78e86b41799",
    "v7.expected.json": "8587d25bec7107bea1983656ffe5b67496ffd8b2b4161d9dae56d1796219b787",
    "v8.jsonl": "230e206b0fae75a545212161abf5ba7468b9504d10059a92bf7aa3d4e5c8b452",
    "v8.expected.json": "ddb78abf4b073f0b72e62d5f7278affc7dc526b1dfa4a608f79c67168c78ca20",
    "v9.jsonl": "70059f8daa2290722afe66ff6d0d25566dce178ca7abb8547824e8d684002503",
    "v9.expected.json": "71b8533e8e25eb3d6b0d8568f4c3f951137daa520ab2cc7c846b4d54b75fd7e2",
    "v10.jsonl": "3bb28d3a55b0f26f1c9f2e44778aafda062e88fa490d0f3297022fc0bba36fe4",
    "v10.expected.json": "e27b81eefcb39cc2fd60188a97f00c37362e907020582fc1c7f9ddbf5f4594b7",
}


def lines(version: int) -> list[str]:
    """Return the lines of a version's file."""
    return (FOLDER / f"v{version}.jsonl").read_text(encoding="utf-8").split("\n")[:-1]


def runs(version: int) -> dict[str, list[Event]]:
    """Return the runs of a version's file."""
    events = [from_line(line) for line in lines(version)]
    return {run_id: list(group) for run_id, group in groupby(events, lambda event: event.run_id)}


@pytest.mark.contract("FMT-1", "EVT-5")
@pytest.mark.parametrize("version", versions())
def test_a_history_of_every_version_gives_the_snapshots_that_it_gave_then(version: int) -> None:
    stored = json.loads((FOLDER / f"v{version}.expected.json").read_text(encoding="utf-8"))
    found = runs(version)
    assert set(found) == set(stored)
    for run_id, events in found.items():
        # Fields that did not exist then have their defaults now, so only those that did are compared.
        assert _restricted(expected(run_id, events), stored[run_id]) == stored[run_id]


@pytest.mark.contract("FMT-1", "EVT-1", "EVT-4")
@pytest.mark.parametrize("version", versions())
def test_a_history_of_every_version_violates_no_invariant(version: int) -> None:
    about_events = {
        "run_seq_is_gapless",
        "idempotency_keys_are_unique",
        "idempotency_keys_are_exact",
        "step_results_are_recorded_once",
        "history_folds",
        "snapshot_equals_fold",
    }
    found = runs(version)
    assert found
    for run_id, events in found.items():
        state = state_of(run_id, events)
        view = RunView(run_id=run_id, status=state.status, version=len(events), now=0, events=tuple(events))
        assert [violation for violation in check(view) if violation.invariant in about_events] == []


@pytest.mark.contract("FMT-1")
@pytest.mark.parametrize("version", versions())
def test_the_present_version_writes_an_old_event_back_as_it_was_if_its_schema_is_the_same(version: int) -> None:
    same = 0
    for line in lines(version):
        event = from_line(line)
        if event.schema_version == codec.SCHEMA_VERSIONS.get(event.event_type, 1) or event.event_type not in BODIES:
            assert json.loads(to_line(event)) == json.loads(line)
            same += 1
    assert same


@pytest.mark.contract("FMT-1", "EVT-3")
def test_the_latest_version_has_every_event_type_at_its_present_schema() -> None:
    latest = {(event.event_type, event.schema_version) for events in runs(versions()[-1]).values() for event in events}
    missing = {(name, codec.SCHEMA_VERSIONS.get(name, 1)) for name in BODIES} - latest
    assert not missing, "add a version with `python -m tests.histories.golden`"


@pytest.mark.contract("FMT-1")
def test_files_of_a_version_never_change() -> None:
    found = {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in sorted(FOLDER.glob("v*.json*"))}
    assert found == DIGESTS


@pytest.mark.contract("EVT-5")
def test_the_same_doings_give_the_same_history_every_time() -> None:
    first, second = ([to_line(event) for run in make_runs() for event in run.events] for _ in range(2))
    assert first == second
    made = {event.event_type for run in make_runs() for event in run.events}
    assert made == set(BODIES) | {"FromTheFuture"}


@pytest.mark.contract("FMT-1")
def test_an_unknown_event_in_a_history_is_kept_as_it_was() -> None:
    [line] = [line for line in lines(1) if "FromTheFuture" in line]
    event = from_line(line)
    assert codec.encode_body(event.data) == '{"what": [1.50, "we cannot know"] }'
    assert state_of("awkward", runs(1)["awkward"]).unknown_events == 1


def _restricted(value: object, like: object) -> object:
    """Return the value with only those fields of its mappings that the other one has."""
    if isinstance(value, dict) and isinstance(like, dict):
        return {key: _restricted(value[key], like[key]) for key in like if key in value}
    if isinstance(value, (list, tuple)) and isinstance(like, list) and len(value) == len(like):
        return [_restricted(one, other) for one, other in zip(value, like, strict=True)]
    return msgspec.to_builtins(value)
