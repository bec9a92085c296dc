"""The site for the tests of the page: an app whose runs do everything that a page can show, behind a socket."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from itertools import pairwise
from typing import Any, Literal

import httpx
from msgspec import Struct
from msgspec.structs import replace

import holdfast as hf
from holdfast.app import App
from holdfast.core.graph import Graph, GraphNode, NodeKind
from holdfast.service.context import Authenticate, make_service, open_access
from holdfast.service.http.server import bind, listening
from holdfast.service.options import ServiceOptions
from tests.service.in_process import DrawnWorkflow

MOST_SECONDS = 90.0
HOSTILE = "<img src=x onerror=\"window.hit='img'\"><script>window.hit='script'</script>"


class Approval(Struct, frozen=True):
    """Who let the order through."""

    approved: bool
    by: str
    channel: Literal["desk", "phone"] = "desk"


class Purchase(Struct, frozen=True):
    """The state of a flow."""

    customer: str
    cents: int
    approved_by: str = ""
    receipt: str = ""
    shelf: str = ""


def _node(id: str, *depends_on: str, kind: NodeKind = "activity", **more: str) -> GraphNode:
    return GraphNode(id=id, label=more.pop("label", id), kind=kind, depends_on=depends_on, **more)


DRAWN = Graph(
    kind="plan",
    nodes=(
        _node("check_stock", detail="at both shelves"),
        _node("over", "check_stock", kind="cue", label="over 100.00"),
        _node("approval", kind="signal", parent="over", branch="then"),
        _node("remind", kind="timer", parent="over", branch="else", detail="2 days"),
        _node("checks", "over", kind="chorus"),
        _node("check_fraud", parent="checks"),
        _node("check_address", parent="checks"),
        _node("charge", "checks", detail="refund as compensation"),
        _node("papers", "charge", kind="chorus"),
        _node("label", parent="papers"),
        _node("invoice", parent="papers"),
        _node("hostile", "check_stock", label=HOSTILE),
        _node("book_courier", "papers"),
        _node("ship", "book_courier", "hostile", kind="child"),
    ),
)


def _vast() -> dict[str, Graph]:
    """Return graphs of 10,000 steps: a chain, a fan, and layers."""
    first, last = _node("check_stock"), "check_fraud"
    chain = [f"s{number}" for number in range(9_998)]
    layers = [[f"{layer}.{place}" for place in range(100)] for layer in range(100)]
    nodes = {
        "chain": [*map(_node, chain, ["check_stock", *chain]), _node(last, chain[-1])],
        "fan": [*(_node(each, "check_stock") for each in chain), _node(last, *chain)],
        "layers": [
            *(_node(each, "check_stock") for each in layers[0]),
            *(
                _node(each, *{before[place], before[place // 2]})
                for before, layer in pairwise(layers)
                for place, each in enumerate(layer)
            ),
            _node(last, *layers[-1]),
        ],
    }
    return {name: Graph(kind="plan", nodes=(first, *found)) for name, found in nodes.items()}


VAST = _vast()


def document(version: str) -> dict[str, Any]:
    """Return a plan whose second version has a step more, one less, and one that differs."""
    rest: list[dict[str, Any]] = [
        {"id": "report", "activity": "reserve", "input": {"order_id": HOSTILE}, "depends_on": ["load"]}
    ]
    if version == "2":
        rest = [
            {"id": "check", "activity": "reserve", "input": {"order_id": "${inputs.order}"}, "depends_on": ["load"]}
        ]
    return {
        "plan": "etl",
        "version": version,
        "description": "Move rows from there to here.",
        "inputs": {
            "order": {"type": "string", "description": "Which order it is for."},
            "rows": {"type": "integer", "default": 3},
        },
        "steps": [
            {"id": "fetch", "activity": "reserve", "input": {"order_id": "${inputs.order}"}},
            {
                "id": "load",
                "activity": "reserve",
                "input": {"order_id": f"v{version}"},
                "depends_on": ["fetch"],
            },
            *rest,
        ],
    }


class Orchard:
    """The app, and what its activities do: `is_zoned` is whether a courier can be booked."""

    def __init__(self) -> None:
        self.is_zoned = False
        self.calls = 0
        self.app = _make_app(self)


def _make_app(orchard: Orchard) -> App:
    app = App("orchard", attributes={"cents": int})

    @app.activity
    async def reserve(order_id: str) -> dict[str, Any]:
        return {"shelf": "B-17", "order": order_id}

    @app.activity(retry=hf.Retry(max_attempts=3, initial_ms=250))
    async def charge(order_id: str) -> str:
        orchard.calls += 1
        if orchard.calls % 2:
            raise ConnectionError("the bank hung up")
        return f"receipt for {order_id}"

    @app.activity(on_failure="pause", retry=hf.Retry(max_attempts=1))
    async def book_courier(order_id: str) -> str:
        if orchard.is_zoned:
            return "booked"
        try:
            raise KeyError("zone 9")
        except KeyError as cause:
            raise ValueError("no courier serves this zone") from cause

    @app.workflow(signals={"approval": Approval}, allow_other_signals=True)
    async def order(order_id: str, cents: int = 4200) -> str:
        """Take one order from its approval to the parcel."""
        await reserve(order_id)
        approval = await hf.wait_signal("approval", Approval, timeout=3600)
        receipt = await charge(order_id)
        await hf.sleep(0.05)
        return f"{receipt}, approved by {approval.by}"

    def work(name: str, ms: int) -> Any:
        async def done(order_id: str) -> str:
            await asyncio.sleep(ms / 1_000)
            return f"{name} of {order_id}"

        done.__name__ = done.__qualname__ = name
        return app.activity(done)

    steps = {"check_stock": 160, "check_fraud": 420, "check_address": 240, "label": 300, "invoice": 180, "ship": 260}
    do = {name: work(name, ms) for name, ms in steps.items()}

    @app.workflow(signals={"approval": Approval}, allow_other_signals=True)
    async def story(order_id: str) -> str:
        """Take an order through everything that can happen to one."""
        await asyncio.gather(*(do[name](order_id) for name in ("check_stock", "check_fraud", "check_address")))
        parcels = await asyncio.gather(*(wide(2) for _ in range(2)))
        await hf.wait_signal("approval", Approval, timeout=3600)
        orchard.calls = 0
        receipt = await charge(order_id)
        await asyncio.gather(do["label"](order_id), do["invoice"](order_id))
        await hf.sleep(0.4)
        await do["ship"](order_id)
        return f"{receipt}, in {len(parcels)} parcels"

    @app.activity(retry=hf.Retry(max_attempts=5, initial_ms=3_600_000))
    async def transfer(order_id: str) -> str:
        if orchard.is_zoned:
            return "transferred"
        raise ConnectionError("no answer from the bank")

    @app.workflow
    async def payment(order_id: str) -> str:
        """Pay, at a bank that may not answer."""
        return await transfer(order_id)

    @app.workflow
    async def paying(order_id: str) -> str:
        """Pay in a child, beside a step that fails."""
        child = asyncio.ensure_future(sturdy(order_id))
        try:
            await book_badly(order_id)
        finally:
            await child
        return "paid"

    @app.activity(retry=hf.Retry(max_attempts=1))
    async def book_badly(order_id: str) -> str:
        raise ValueError("no van is free")

    @app.workflow
    async def sturdy(order_id: str) -> str:
        """Take its time."""
        await hf.wait_signal("go")
        return "done"

    @app.workflow
    async def courier(order_id: str) -> str:
        """Book a courier, which may need a hand."""
        await reserve(order_id)
        return await book_courier(order_id)

    @app.workflow(failures=ValueError)
    async def hostile(text: str) -> str:
        """Return what it was given, wherever a page could show it."""
        await reserve(text)
        raise ValueError(text)

    @app.workflow
    async def mistaken(shelf: str) -> str:
        """Look for what is not there."""
        held: dict[str, str] = {}
        return held[shelf]

    @app.activity(retry=hf.Retry(max_attempts=2, initial_ms=1))
    async def speak(sentences: list[str]) -> int:
        out = hf.stream("answer")
        for sentence in sentences:
            for word in sentence.split(" "):
                await out.write(word + " ")
            await out.write("\n")
            if hf.activity_context().attempt == 1:
                raise ConnectionError("the model went away")
        return len(sentences)

    @app.workflow
    async def agent(sentences: list[str]) -> int:
        progress = hf.stream("progress")
        await progress.write({"asked": len(sentences), "hostile": HOSTILE})
        count = await speak(sentences)
        await progress.write({"answered": count})
        await hf.wait_signal("more")
        await hf.stream("answer").write("One more thing.")
        await hf.wait_signal("end")
        return count

    @app.workflow
    async def lengthy(count: int) -> None:
        out = hf.stream("numbers")
        for number in range(count):
            await out.write(number)

    @app.workflow
    async def wide(steps: int = 10) -> int:
        """Do many steps at once."""
        await asyncio.gather(*(reserve(str(number)) for number in range(steps)))
        return steps

    @app.workflow(requires_approval=True)
    async def weighty(cents: int = 0) -> int:
        """Start when somebody has approved it."""
        return cents

    @app.workflow(at_once=1)
    async def narrow(customer: str) -> Any:
        """Wait, one at a time."""
        return await hf.wait_signal("go")

    @app.workflow
    async def packing(items: int = 5) -> int:
        """Pack items, one for each signal, and publish how far it has come."""
        for number in range(items):
            hf.publish(stage=f"item {number + 1}", done=number / items)
            await hf.wait_signal("packed")
        return items

    @app.workflow
    async def basket(limit: int = 3) -> list[str]:
        """Be filled by updates until it is full, and say what is in it."""
        items: list[str] = []

        async def add(item: str, count: int = 1) -> int:
            items.extend([(await reserve(item))["order"]] * count)
            return len(items)

        def check(item: str, count: int = 1) -> None:
            if item == "nothing":
                raise ValueError("nothing cannot be added")

        hf.on_query("items", lambda: items)
        hf.on_query("matching", lambda part: [item for item in items if part in item])
        hf.on_update("add", add, validator=check)
        await hf.wait_until(lambda: len(items) >= limit)
        return items

    @app.workflow
    async def rounds(left: int) -> int:
        """Begin again, round after round, each with a step and a pause."""
        await reserve(str(left))
        await hf.sleep(0.1)
        if left > 1:
            hf.continue_as_new(left - 1)
        return left

    async def drawn(order_id: str) -> str:
        """Take an order through a graph with groups, a choice and a detour."""
        await do["check_stock"](order_id)
        approval = await hf.wait_signal("approval", Approval, timeout=3600)
        await asyncio.gather(do["check_fraud"](order_id), do["check_address"](order_id))
        await charge(order_id)
        await asyncio.gather(do["label"](order_id), do["invoice"](order_id))
        if not approval.approved:
            await book_courier(order_id)
        await do["ship"](order_id)
        return "shipped"

    app.registry.add_workflow(DrawnWorkflow(drawn, DRAWN))
    _add_flow(app)
    for name, graph in VAST.items():

        async def vast(order_id: str) -> str:
            """Do the first steps of a vast graph, and wait."""
            await do["check_stock"](order_id)
            await hf.wait_signal("approval", Approval)
            await do["check_fraud"](order_id)
            return "done"

        vast.__name__ = vast.__qualname__ = name
        app.registry.add_workflow(DrawnWorkflow(vast, graph))

    @app.workflow
    async def patient() -> list[Any]:
        """Wait for one signal after another."""
        return [await hf.wait_signal("go") for _ in range(1_000)]

    return app


def _add_flow(app: App) -> None:
    """Add a flow in which a customer of the name `Mallory` cannot pay."""

    @app.activity
    async def check(purchase: Purchase) -> None:
        await asyncio.sleep(0.1)

    @app.activity(retry=hf.Retry(max_attempts=2, initial_ms=100))
    async def pay(purchase: Purchase) -> Purchase:
        await asyncio.sleep(0.2)
        if purchase.customer == "Mallory":
            raise ValueError("the card was stolen")
        return replace(purchase, receipt=f"R-{purchase.cents}")

    @app.activity
    async def reserve_shelf(purchase: Purchase) -> Purchase:
        await asyncio.sleep(0.05)
        return replace(purchase, shelf="B-17")

    @app.activity
    async def release(purchase: Purchase) -> None:
        await asyncio.sleep(0.05)

    @app.activity
    async def dispatch(purchase: Purchase) -> None:
        await asyncio.sleep(0.3)

    app.flow(
        "fulfil",
        Purchase,
        hf.Scene(
            hf.Act(check),
            hf.Cue(
                lambda purchase: purchase.cents > 100_00,
                then=hf.Signal(
                    "approval", Approval, on_receive=lambda purchase, given: replace(purchase, approved_by=given.by)
                ),
                otherwise=hf.Sleep(0.01, step="wait a little"),
                step="over 100.00",
            ),
            hf.Chorus(hf.Act(pay), hf.Act(reserve_shelf, compensate=release), step="both", on_failure="fail-after-all"),
            hf.Act(dispatch),
            hf.Act(check, step="gift card", condition=lambda purchase: purchase.cents > 1000_00),
        ),
        doc="Take a purchase from its check to the parcel.",
    )


class Site:
    """A service behind a socket, whose address stays when it goes away for a while."""

    def __init__(self, orchard: Orchard, options: ServiceOptions, authenticate: Authenticate) -> None:
        self.orchard = orchard
        self.address = f"http://127.0.0.1:{options.port}"
        self.http = httpx.AsyncClient(base_url=self.address, timeout=30)
        self._options = options
        self._authenticate = authenticate

    @asynccontextmanager
    async def up(self) -> AsyncIterator[None]:
        """Answer, while the context is open. The app's node runs on when it is not."""
        async with listening(make_service(self.orchard.app, self._options, self._authenticate)):
            yield

    async def start(self, workflow: str, *, reference: str | None = None, **input: Any) -> str:
        """Start a run, and return its id."""
        asked = {"workflow": workflow, "input": input} | ({"reference_key": reference} if reference else {})
        response = await self.http.post("/v1/runs", json=asked)
        assert response.status_code == 201, response.text
        return str(response.json()["run_id"])

    async def schedule(self, schedule_id: str, workflow: str, **asked: Any) -> None:
        """Create a schedule."""
        response = await self.http.post(
            "/v1/schedules", json={"schedule_id": schedule_id, "workflow": workflow, **asked}
        )
        assert response.status_code == 201, response.text

    async def send(self, run_id: str, name: str, payload: Any = None) -> None:
        """Send a signal, past the service."""
        await self.orchard.app.run(run_id).signal(name, payload)

    async def events(self, run_id: str) -> list[dict[str, Any]]:
        """Return a run's history."""
        items: list[dict[str, Any]] = []
        while page := (await self.http.get(f"/v1/runs/{run_id}/events?after={len(items)}&limit=500")).json()["items"]:
            items += page
        return items


@asynccontextmanager
async def serve_site(
    store: str = "memory://", *, orchard: Orchard | None = None, authenticate: Authenticate | None = None
) -> AsyncIterator[Site]:
    """Run the app, without a service: whoever needs one says when it is up."""
    orchard = orchard or Orchard()
    with bind(ServiceOptions(port=0)) as found:
        port = found.getsockname()[1]
    options = ServiceOptions(
        port=port, is_open=authenticate is None, watch_poll_s=0.05, list_rest_s=0.02, drain_s=1.0, tokens_s=0.0
    )
    async with asyncio.timeout(MOST_SECONDS), orchard.app.node(store):
        site = Site(orchard, options, authenticate or open_access)
        try:
            yield site
        finally:
            await site.http.aclose()
