"""What no store may take: it is refused with a typed error, and harms nothing else in its batch."""

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from msgspec import Raw
from msgspec.structs import replace

from holdfast.core import codec
from holdfast.core.events import ErrorInfo, RunQueued
from holdfast.core.messages import ActivityErrored, Message, SignalRequest
from holdfast.core.search import Order
from holdfast.core.timing import NO_RETRY
from holdfast.engine.turns.draft import prepare_run
from holdfast.errors import InvalidInput
from holdfast.limits import JSON_DEPTH
from holdfast.store import port
from holdfast.store.memory import MemoryStore
from holdfast.store.port import Accepted, Committed, Created, Refused, Store
from holdfast.store.queries import DeadLetterQuery
from holdfast.store.sqlite import SqliteStore
from holdfast.testing import START, VirtualClock
from holdfast.testing.samples import SampleNode, activity, complete, marker, message, new_run, signal, wait

SURROGATE = "\ud800"
HUGE = 2**63


@pytest.fixture(params=["memory", "sqlite"])
async def store(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[Store]:
    made: Store = MemoryStore(VirtualClock())
    if request.param == "sqlite":
        made = await SqliteStore.open(tmp_path / "store.db", clock=VirtualClock())
    await made.migrate()
    yield made
    await made.close()


@pytest.mark.contract("API-2")
@pytest.mark.parametrize(
    ("verb", "arguments"),
    [
        ("load", [[SURROGATE]]),
        ("load", [[7]]),
        ("read_events", [SURROGATE]),
        ("read_events", ["run-1", HUGE]),
        ("read_events", ["run-1", 0, HUGE]),
        ("read_events", ["run-1", 0, 1.5]),
        ("claim", [SURROGATE, 1]),
        ("claim", ["node", 1.5]),
        ("claim", ["node", HUGE]),
        ("renew", ["node", float("nan")]),
        ("renew", ["node", HUGE]),
        ("renew", ["node", 1.5]),
        ("release", [SURROGATE]),
        ("release", ["node", [SURROGATE]]),
        ("next_due", [SURROGATE]),
        ("find", [port.RunQuery(after=SURROGATE)]),
        ("find", [port.RunQuery(tag=SURROGATE)]),
        ("find", [port.RunQuery(created_from=HUGE)]),
        ("find", [port.RunQuery(tenant=object())]),  # type: ignore[arg-type]
        ("find", [port.RunQuery(limit="5")]),  # type: ignore[arg-type]
        ("find", [port.WaitQuery(after=(SURROGATE, ""))]),
        ("find", [port.MailboxQuery(run_id="run-1", after=HUGE)]),
        ("find", [port.TaskQuery(role=SURROGATE)]),
        ("find", [DeadLetterQuery(after=(0, SURROGATE))]),
        ("find", [DeadLetterQuery(reason=SURROGATE)]),  # type: ignore[arg-type]
        ("purge", [port.PurgePolicy(finished_run_ms=HUGE)]),
        ("purge", [port.PurgePolicy(limit=HUGE)]),
    ],
)
async def test_a_verb_refuses_what_it_cannot_look_up(store: Store, verb: str, arguments: list[Any]) -> None:
    await store.renew("node", 1_000)
    with pytest.raises(InvalidInput):
        await getattr(store, verb)(*arguments)
    assert (await store.stats()).nodes == 1


@pytest.mark.contract("API-2", "SIG-5")
@pytest.mark.parametrize(
    "bad",
    [
        None,
        replace(signal("run-1"), payload={"a": 1}),
        replace(signal("run-1"), payload=b'{"a":1}'),
        replace(signal("run-1"), payload=Raw(b"{oops")),
        replace(message("run-1"), due_at=HUGE),
        replace(message("run-1"), due_at=1.5),
        replace(message("run-1"), waiting_token=7),
        replace(message("run-1"), waiting_token=SURROGATE),
        replace(message("run-1"), payload=b"{}"),
        Message(signal_id="m", run_id="run-1", type="TaskCompleted", occurred_at=START, payload=Raw(b'{"who":1}')),
    ],
)
async def test_a_bad_item_is_refused_alone(store: Store, bad: Any) -> None:
    await store.create([new_run("run-1")])
    answers = await store.deliver([signal("run-1"), bad, message("run-1", "m-2")])
    assert [type(answer) for answer in answers] == [Accepted, Refused, Accepted]
    assert isinstance(answers[1].error, InvalidInput)  # type: ignore[union-attr]
    [claimed] = await SampleNode(store).claim()
    assert [known.signal_id for known in claimed.messages] == ["m-2", "start"]


@pytest.mark.contract("API-2")
@pytest.mark.parametrize(
    "changes",
    [{"tags": None}, {"tags": [1]}, {"request_key": None}, {"messages": (replace(message("r"), due_at=1.5),)}],
)
async def test_a_bad_run_is_refused_alone(store: Store, changes: dict[str, Any]) -> None:
    answers = await store.create([new_run("a"), replace(new_run("b"), **changes), new_run("c")])
    assert [type(answer) for answer in answers] == [Created, Refused, Created]


@pytest.mark.contract("API-2")
@pytest.mark.parametrize(
    ("order", "value"),
    [
        (Order("finished_at"), HUGE),
        (Order("finished_at"), 1e300),
        (Order("finished_at"), "1"),
        (Order("created_at"), "1"),
        (Order("cents", "n"), "1"),
        (Order("cents", "n"), float("nan")),
        (Order("cents", "n"), True),
        (Order("region", "s"), 1.5),
        (Order("region", "s"), SURROGATE),
        (None, "1"),
    ],
)
async def test_a_place_in_an_order_is_of_what_runs_are_ordered_by(
    store: Store, order: Order | None, value: str | float
) -> None:
    """It comes back from a caller, who may have changed it."""
    await store.create([new_run("run-1")])
    with pytest.raises(InvalidInput):
        await store.find(port.RunQuery(order=order, behind=(value, START, "run-1")))


@pytest.mark.contract("EVT-5", "MSG-3", "API-2")
async def test_nothing_is_nested_deeper_than_every_reader_can_follow(store: Store) -> None:
    """A reader may stand on a stack of any depth, so the limit is far below what a decoder can do."""

    def nested(depth: int) -> Raw:
        return Raw(b"[" * depth + b"]" * depth)

    await SampleNode(store).start("run-1", wait("go"))
    at_limit, beyond = (replace(signal("run-1"), payload=nested(depth)) for depth in (JSON_DEPTH, JSON_DEPTH + 1))
    accepted, refused = await store.deliver([at_limit, beyond])
    assert isinstance(accepted, Accepted)
    assert isinstance(refused, Refused)
    value: Any = []
    for _ in range(JSON_DEPTH):
        value = [value]
    with pytest.raises(InvalidInput, match="nested"):
        codec.encode(value)
    with pytest.raises(InvalidInput, match="nested"):
        prepare_run("run-2", RunQueued("p", "1", input=nested(JSON_DEPTH + 1)), START, "node")
    many = codec.encode([["]" * 3, "{" * 500, '"'] for _ in range(500)])
    assert codec.check(many, "payload") is None


@pytest.mark.contract("EVT-5", "API-2")
@pytest.mark.parametrize("text", [b"{oops", b"", b'"\xff"', b'1,"plan_id":"evil"'])
def test_an_input_that_is_not_json_begins_no_run(text: bytes) -> None:
    with pytest.raises(InvalidInput):
        prepare_run("run-1", RunQueued("p", "1", input=Raw(text)), START, "node")


@pytest.mark.contract("SIG-5")
async def test_a_payload_is_the_same_however_it_is_written(store: Store) -> None:
    await store.create([new_run("run-1")])
    first = SignalRequest(run_id="run-1", name="go", signal_id="s", payload=Raw(b'{"a": 1, "b":2}'))
    answers = await store.deliver([first, replace(first, payload=Raw(b'{"b":2,"a":1}'))])
    assert [type(answer).__name__ for answer in answers] == ["Accepted", "Duplicate"]


@pytest.mark.contract("WF-7", "EVT-1")
async def test_a_finished_run_takes_no_turn(store: Store) -> None:
    node = SampleNode(store)
    run = await node.start("run-1", complete())
    turn = replace(await node.turn(replace(run, head=replace(run.head, version=2)), marker("late")), expected_version=3)
    [answer] = await store.commit([turn])
    assert answer == port.CommitConflict("finished", 3, 1)
    assert len(await store.read_events("run-1")) == 3


@pytest.mark.contract("MSG-3")
async def test_a_message_that_is_refused_is_kept_and_not_handed_out_at_once(store: Store) -> None:
    node = SampleNode(store)
    await node.start("run-1", wait("go"))
    await store.deliver([replace(message("run-1", "future"), expected_version=99)])
    run = await node.step("run-1")
    assert run.messages == ()
    assert run.head.ready_at == await store.now() + 1_000_000


@pytest.mark.contract("INV")
async def test_a_turn_that_cannot_be_stored_harms_no_other(tmp_path: Path) -> None:
    """An error text that is not Unicode, as the name of a file may give it."""
    store = await SqliteStore.open(tmp_path / "store.db", clock=VirtualClock())
    await store.migrate()
    node = SampleNode(store)
    good = await node.start("good", activity("charge"))
    bad = await node.start("bad", activity("charge"))
    error = ErrorInfo("FileNotFoundError", "/nowhere/\udcff")
    turns = [
        await node.turn(good, marker("mark")),
        await node.turn(bad, inputs=[ActivityErrored("charge", 1, 1, error, NO_RETRY)]),
    ]
    answers = await store.commit(turns)
    assert isinstance(answers[0], Committed)
    assert answers[1] == port.CommitConflict("cannot be stored", 3, 1)
    await store.close()
