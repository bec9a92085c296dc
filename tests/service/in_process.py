"""A service in process for tests: an app with everything in it, and callers on every transport, in process."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from datetime import datetime
from typing import Any
from urllib.parse import quote

import httpx
from msgspec import Struct

import holdfast as hf
from holdfast.app import App
from holdfast.core.graph import Graph, GraphNode
from holdfast.engine.options import NodeOptions
from holdfast.program.definitions import WorkflowDefinition
from holdfast.service.context import Authenticate, Service, make_service, open_access
from holdfast.service.http.front import Front
from holdfast.service.operations import OPERATIONS
from holdfast.service.options import ServiceOptions
from holdfast.store.port import Store

MOST_SECONDS = 60.0
"""A test that takes longer hangs."""


class Approval(Struct, frozen=True):
    """What is sent to an order."""

    approved: bool
    by: str = ""


GIVEN_AWAY: dict[str, str] = {}
"""The completion tokens that activities have given away, by their runs."""


class DrawnWorkflow(WorkflowDefinition):
    """A workflow in code that has a graph, as flows and plans do."""

    def __init__(self, function: Callable[..., Any], drawn: Graph) -> None:
        super().__init__(function, function.__name__, "1")
        self._drawn = drawn

    def graph(self) -> Graph:
        """Return the graph that it was given."""
        return self._drawn


DRAWN = Graph(
    kind="flow",
    nodes=(
        GraphNode(id="charge", label="charge", kind="activity", detail="of the card"),
        GraphNode(id="after", label="after", kind="scene", depends_on=("charge",)),
        GraphNode(id="after/ship", label="ship", kind="activity", parent="after"),
    ),
)


def make_app(limits: hf.Limits | None = None) -> App:
    """Return an app whose workflows wait, answer, ask humans and fail."""
    app = App("shop", limits=limits, attributes={"cents": int, "region": str, "due": datetime})

    @app.activity(on_failure="pause", retry=hf.Retry(max_attempts=1))
    async def charge(order_id: str) -> str:
        raise ValueError("the card was refused")

    @app.workflow(signals={"approval": Approval, "note": Any, "other": Any})
    async def order(order_id: str, cents: int = 0) -> str:
        """Wait for an approval."""
        hf.on_query("progress", lambda: {"order_id": order_id})
        addresses: list[str] = []

        def change(city: str) -> int:
            addresses.append(city)
            return len(addresses)

        hf.on_update("change_address", change)
        approval = await hf.wait_signal("approval", Approval)
        return f"{order_id}: {approval.approved}"

    @app.workflow
    async def echo(value: Any = None) -> Any:
        return value

    @app.workflow(failures=ValueError)
    async def failing() -> None:
        raise ValueError("by design")

    @app.workflow
    async def paying(order_id: str) -> str:
        return await charge(order_id)

    async def drawn(order_id: str) -> str:
        return await charge(order_id)

    app.registry.add_workflow(DrawnWorkflow(drawn, DRAWN))

    @app.workflow
    async def asking(who: str) -> bool:
        return await hf.task("approve", bool, payload={"who": who}, roles=["clerk"])

    @app.activity(retry=hf.Retry(max_attempts=2, initial_ms=1))
    async def sign() -> str:
        context = hf.activity_context()
        GIVEN_AWAY[context.run_id] = context.token
        context.complete_later()

    @app.workflow
    async def signing() -> str:
        return await sign()

    @app.activity(queue="gpu")
    async def render() -> None:
        """Wait for a node that nobody starts."""

    @app.workflow
    async def far() -> None:
        await render()

    @app.activity
    async def talk(words: list[Any]) -> int:
        out = hf.stream("words")
        for word in words:
            await out.write(word)
        return len(words)

    @app.workflow
    async def talking(words: list[Any], waits: bool = False) -> int:
        """Write to streams, and wait for a signal before and after the last word."""
        count = await talk(words)
        last = hf.stream("words")
        if waits:
            await hf.wait_signal("go")
            await last.write("last")
            await hf.wait_signal("go")
        return count

    @app.workflow
    async def patient() -> Any:
        return [await hf.wait_signal("go") for _ in range(100)]

    return app


Answer = tuple[int, Any]
Caller = Callable[[str, dict[str, Any]], Awaitable[Answer]]


class InProcessServer:
    """A service that answers in this process."""

    def __init__(self, app: App, service: Service, http: httpx.AsyncClient) -> None:
        self.app = app
        self.service = service
        self.http = http
        self._calls = 0

    async def rest(self, name: str, ask: dict[str, Any], **headers: str) -> Answer:
        """Ask for an operation over REST; return the status, and what was answered."""
        operation = OPERATIONS[name]
        fields = dict(ask)
        path = operation.path
        for field in operation.path_fields:
            path = path.replace(f"{{{field}}}", quote(str(fields.pop(field)), safe=""))
        given = {"json": fields} if operation.has_body else {"params": _texts(fields)}
        response = await self.http.request(operation.verb, path, headers=headers, **given)  # type: ignore[arg-type]
        return response.status_code, response.json()

    async def rpc(self, name: str, ask: dict[str, Any]) -> Answer:
        """Ask for an operation over JSON-RPC; return the status that REST would have, and what was answered."""
        self._calls += 1
        number = self._calls
        request = {"jsonrpc": "2.0", "id": number, "method": name, "params": ask}
        response = (await self.http.post("/rpc", json=request)).json()
        assert response["id"] == number
        assert response["jsonrpc"] == "2.0"
        if "error" in response:
            return response["error"]["data"]["status"], response["error"]["data"]
        return OPERATIONS[name].status, response["result"]

    async def start(self, workflow: str, **input: Any) -> str:
        """Start a run, and return its id."""
        status, answer = await self.rest("runs.start", {"workflow": workflow, "input": input})
        assert status == 201, answer
        return str(answer["run_id"])

    async def completion_token(self, run_id: str, other_than: str = "") -> str:
        """Wait for the completion token that a run's activity gives away."""
        while GIVEN_AWAY.get(run_id, other_than) == other_than:  # noqa: ASYNC110
            await asyncio.sleep(0.002)
        return GIVEN_AWAY[run_id]

    async def until(self, name: str, ask: dict[str, Any], is_it: Callable[[Any], bool]) -> Any:
        """Ask until the answer is as it should be, and return it."""
        while not is_it(answer := (await self.rest(name, ask))[1]):  # noqa: ASYNC110
            await asyncio.sleep(0.002)
        return answer


def _texts(fields: dict[str, Any]) -> dict[str, Any]:
    return {field: value if isinstance(value, list) else _text(value) for field, value in fields.items()}


def _text(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


@asynccontextmanager
async def serve_in_process(
    store: str | Store = "memory://",
    *,
    app: App | None = None,
    options: ServiceOptions | None = None,
    authenticate: Authenticate = open_access,
    node: NodeOptions | None = None,
    most_seconds: float | None = MOST_SECONDS,
) -> AsyncIterator[InProcessServer]:
    """Serve an app in this process."""
    app = app or make_app()
    async with asyncio.timeout(most_seconds), app.node(store, options=node):
        service = make_service(app, options, authenticate)
        transport = httpx.ASGITransport(Front(service))
        async with httpx.AsyncClient(transport=transport, base_url="http://shop") as http:
            yield InProcessServer(app, service, http)
