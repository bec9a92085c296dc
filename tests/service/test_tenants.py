"""What belongs to another tenant is not there, whatever is asked; and what a scope does not grant is refused."""

from collections import Counter
from typing import Any

import pytest
from msgspec.structs import replace

import holdfast as hf
from holdfast.errors import NotPermitted
from holdfast.service.auth.tenancy import TenantView
from holdfast.service.context import Headers, Principal
from holdfast.service.http.openapi import EXAMPLES
from holdfast.service.operations import OPERATIONS
from holdfast.store.port import EventQuery, Refused, RunQuery, Store, TaskQuery, WaitQuery
from holdfast.store.queries import DeadLetterQuery
from holdfast.testing import VirtualClock
from holdfast.testing.samples import SampleNode, signal, task, wait
from holdfast.testing.samples import dead_letter as dead_letter_of
from tests.service.in_process import InProcessServer, serve_in_process
from tests.service.operation_cases import dead_letter


async def by_header(headers: Headers) -> Principal:
    """Return the caller: the name and the tenant are in headers, which a real service would not trust."""
    name = headers.get(b"x-name", b"ann").decode()
    tenant = headers.get(b"x-tenant", b"").decode() or None
    scopes = headers.get(b"x-scopes")
    granted = None if scopes is None else frozenset(scopes.decode().split())
    return Principal(name=name, tenant=tenant, scopes=granted, is_admin=name == "ann", roles=("clerk",))


async def start(server: InProcessServer, tenant: str, workflow: str = "patient", **input: Any) -> str:
    """Start a run for a tenant."""
    status, answer = await server.rest("runs.start", {"workflow": workflow, "input": input}, **{"x-tenant": tenant})
    assert status == 201, answer
    return str(answer["run_id"])


@pytest.mark.contract("API-4")
async def test_runs_of_others_are_not_there() -> None:
    async with serve_in_process(authenticate=by_header) as server:
        mine, theirs = await start(server, "a"), await start(server, "b")
        run = (await server.rest("runs.get", {"run_id": mine}, **{"x-tenant": "a"}))[1]
        assert run["tenant"] == "a"
        for name, operation in OPERATIONS.items():
            if "run_id" not in operation.path_fields:
                continue
            ask = {**EXAMPLES[name], "run_id": theirs, "actor": "ann"} if operation.has_body else {"run_id": theirs}
            ask |= {field: EXAMPLES[name][field] for field in operation.path_fields if field != "run_id"}
            if "actor" not in operation.request_type.__struct_fields__:
                ask.pop("actor", None)
            if "other_run_id" in operation.request_type.__struct_fields__:
                ask["other_run_id"] = mine
            status, problem = await server.rest(name, ask, **{"x-tenant": "a"})
            assert (status, problem.get("code")) == (404, "NotFound"), (name, problem)
        page = (await server.rest("runs.list", {}, **{"x-tenant": "a"}))[1]
        assert [item["run_id"] for item in page["items"]] == [mine]
        assert len((await server.rest("runs.list", {}))[1]["items"]) == 2, "without a tenant all are seen"
        mailbox = (await server.rest("signals.mailbox", {"run_id": theirs}))[1]
        assert mailbox["items"] == [], "nothing came through"


@pytest.mark.contract("API-4")
async def test_waits_and_signals_of_others_are_not_there() -> None:
    async with serve_in_process(authenticate=by_header) as server:
        runs = [await start(server, tenant) for tenant in "bbbabbbab"]
        mine = sorted([runs[3], runs[7]])
        await server.until("signals.waiting", {}, lambda page: len(page["items"]) == 9)
        first = (await server.rest("signals.waiting", {"limit": 1}, **{"x-tenant": "a"}))[1]
        rest = (await server.rest("signals.waiting", {"cursor": first["next"]}, **{"x-tenant": "a"}))[1]
        assert [wait["run_id"] for wait in first["items"] + rest["items"]] == mine
        assert rest["next"] is None
        signals = [{"run_id": run_id, "name": "other"} for run_id in runs]
        sent = (await server.rest("signals.send_many", {"signals": signals}, **{"x-tenant": "a"}))[1]["items"]
        assert [index for index, item in enumerate(sent) if item["result"]] == [3, 7]
        assert {item["problem"]["code"] for item in sent if item["problem"]} == {"NotFound"}
        theirs = [{"run_id": run_id, "name": "other"} for run_id in runs if run_id not in mine]
        await server.rest("signals.send_many", {"signals": theirs})
        first = (await server.rest("signals.unconsumed", {"limit": 1}, **{"x-tenant": "a"}))[1]
        rest = (await server.rest("signals.unconsumed", {"cursor": first["next"]}, **{"x-tenant": "a"}))[1]
        assert [signal["run_id"] for signal in first["items"] + rest["items"]] == mine
        assert rest["next"] is None
        assert len((await server.rest("signals.unconsumed", {}))[1]["items"]) == 9


@pytest.mark.contract("API-4", "TSK-1")
async def test_tasks_of_others_are_not_there() -> None:
    async with serve_in_process(authenticate=by_header) as server:
        for tenant in "ab":
            await start(server, tenant, "asking", who=tenant)
        page = await server.until("tasks.list", {}, lambda page: len(page["items"]) == 2)
        theirs = next(task["task_id"] for task in page["items"] if task["payload"]["who"] == "b")
        mine = (await server.rest("tasks.list", {}, **{"x-tenant": "a"}))[1]["items"]
        assert [task["payload"]["who"] for task in mine] == ["a"]
        for name in ("tasks.get", "tasks.history", "tasks.claim", "tasks.release"):
            status, problem = await server.rest(name, {"task_id": theirs}, **{"x-tenant": "a"})
            assert (status, problem["code"]) == (404, "NotFound"), name
        ask = {"task_id": theirs, "answer": True}
        assert (await server.rest("tasks.complete", ask, **{"x-tenant": "a"}))[0] == 404
        assert (await server.rest("tasks.complete", ask, **{"x-tenant": "b"}))[0] == 200


@pytest.mark.contract("API-4")
async def test_dead_letters_of_others_are_not_there() -> None:
    clock = VirtualClock()
    async with serve_in_process(hf.MemoryStore(clock), authenticate=by_header) as server:
        letter_id = await dead_letter(server, clock)  # of the tenant "default"
        assert (await server.rest("letters.list", {}, **{"x-tenant": "a"}))[1]["items"] == []
        for name in ("letters.get", "letters.requeue", "letters.drop"):
            assert (await server.rest(name, {"letter_id": letter_id}, **{"x-tenant": "a"}))[0] == 404, name
        headers = {"x-tenant": "default"}
        assert (await server.rest("letters.get", {"letter_id": letter_id}, **headers))[0] == 200
        assert (await server.rest("letters.drop", {"letter_id": letter_id}, **headers))[0] == 200


@pytest.mark.contract("API-4")
async def test_a_tenant_does_not_see_the_installation() -> None:
    async with serve_in_process(authenticate=by_header) as server:
        for verb in "stats doctor queues nodes locks samples takeovers".split():
            name = f"system.{verb}"
            status, problem = await server.rest(name, {}, **{"x-tenant": "a"})
            assert (status, problem["code"]) == (403, "NotPermitted")
            assert (await server.rest(name, {}))[0] == 200


@pytest.mark.contract("API-4")
async def test_verbs_that_are_not_for_tenants_are_refused() -> None:
    store: Any = TenantView(hf.MemoryStore(), "a")
    for verb in ("commit", "claim", "purge", "create", "stats", "changes", "migrate", "close", "put_key", "find_locks"):
        with pytest.raises(NotPermitted, match=verb):
            await getattr(store, verb)()
    with pytest.raises(AttributeError):
        _ = store.verb_that_the_port_may_get
    assert await store.find(RunQuery(tenant="b")) == []


class Counting:
    """A store that counts how often each verb is used."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self.verbs: Counter[str] = Counter()

    def __getattr__(self, verb: str) -> Any:
        self.verbs[verb] += 1
        return getattr(self._store, verb)


@pytest.mark.contract("API-4")
async def test_what_others_have_is_not_even_read() -> None:
    store = hf.MemoryStore()
    node = SampleNode(store)
    for tenant in [*"bcdefgh", "a"]:
        await node.start(f"run-{tenant}", wait("go"), task("approve"), tenant=tenant)
        turn = await node.turn(await node.load(f"run-{tenant}"))
        await node.commit(replace(turn, dead=(dead_letter_of(f"run-{tenant}"),)))
    counting: Any = Counting(store)
    mine = TenantView(counting, "a")
    found: list[Any] = [
        *await mine.find(WaitQuery(limit=1)),
        *await mine.find(TaskQuery(limit=1)),
        *await mine.find(DeadLetterQuery(limit=1)),
    ]
    assert [row.run_id for row in found] == ["run-a"] * 3
    assert counting.verbs == {"find": 3}
    part = TenantView(counting, "a", project="other")
    assert await part.find(WaitQuery()) == []


@pytest.mark.contract("API-4")
@pytest.mark.parametrize("name", OPERATIONS)
async def test_every_operation_needs_its_scope(name: str) -> None:
    scope = OPERATIONS[name].scope
    async with serve_in_process(authenticate=by_header) as server:
        ask = EXAMPLES[name] | ({"actor": "ann"} if "actor" in EXAMPLES[name] else {})
        status, problem = await server.rest(name, ask, **{"x-scopes": "nothing:read"})
        if scope is None:
            assert status == (422 if OPERATIONS[name].resource == "activities" else 200)  # the example is no real token
            return
        assert (status, problem["code"], problem["details"]) == (403, "NotPermitted", {"scope": scope})
        both = f"{scope} runs:write"  # what starts a run needs that too
        assert (await server.rest(name, ask, **{"x-scopes": both}))[0] != 403


@pytest.mark.contract("TSK-1", "API-4")
async def test_nobody_acts_for_somebody_else() -> None:
    async with serve_in_process(authenticate=by_header) as server:
        run_id = await start(server, "a", "asking", who="x")
        page = await server.until("tasks.list", {"run_id": run_id}, lambda page: page["items"])
        task_id = page["items"][0]["task_id"]
        for ask in ({"actor": "ann"}, {"actor_roles": ["boss"]}):
            status, problem = await server.rest("tasks.claim", {"task_id": task_id, **ask}, **{"x-name": "bob"})
            assert (status, problem["code"]) == (403, "NotPermitted")
        status, problem = await server.rest("runs.cancel", {"run_id": run_id, "actor": "ann"}, **{"x-name": "bob"})
        assert (status, problem["code"]) == (403, "NotPermitted")
        task = (await server.rest("tasks.claim", {"task_id": task_id}, **{"x-name": "bob"}))[1]
        assert task["assignee"] == "bob", "with the roles of the caller"


@pytest.mark.contract("API-4")
async def test_a_run_of_another_tenant_costs_what_an_unknown_run_costs() -> None:
    """What it holds is not read, so that neither its size nor its existence can be told from the time."""
    store = hf.MemoryStore()
    await SampleNode(store).start("run-b", wait("go"), tenant="b")

    async def cost(run_id: str) -> Counter[str]:
        counting: Any = Counting(store)
        mine = TenantView(counting, "a")
        assert await mine.load([run_id]) == [None]
        assert await mine.read_events(run_id) == []
        assert await mine.find(EventQuery(after=((run_id, 0),))) == []
        [refused] = await mine.deliver([signal(run_id, "go")])
        assert isinstance(refused, Refused)
        verbs: Counter[str] = counting.verbs
        return verbs

    assert await cost("run-b") == await cost("unknown") == {"find": 4, "deliver": 1}


@pytest.mark.contract("API-4", "TSK-1")
async def test_what_a_task_hides_is_hidden_in_the_events_of_its_run_too() -> None:
    """Everybody who may read runs sees that somebody was asked; only those whom it concerns see what."""
    viewer, clerk = {"x-tenant": "a", "x-name": "bob"}, {"x-tenant": "a", "x-name": "ann"}

    async def of_nobody(headers: Headers) -> Principal:
        principal = await by_header(headers)
        return replace(principal, roles=() if principal.name == "bob" else principal.roles)

    async with serve_in_process(authenticate=of_nobody) as server:
        run_id = await start(server, "a", "asking", who="a secret name")
        tasks = await server.until("tasks.list", {"run_id": run_id}, lambda page: page["items"])
        task_id = tasks["items"][0]["task_id"]
        await server.rest("tasks.comment", {"task_id": task_id, "text": "a secret remark"}, **clerk)
        await server.rest("tasks.complete", {"task_id": task_id, "answer": True}, **clerk)
        assert (await server.rest("tasks.get", {"task_id": task_id}, **viewer))[0] == 404
        shown = (await server.rest("runs.events", {"run_id": run_id}, **viewer))[1]["items"]
        redacted = {event["event_type"]: event["data"] for event in shown if event["is_redacted"]}
        assert redacted.keys() == {"TaskCreated", "TaskCommented", "TaskCompleted"}
        assert redacted["TaskCreated"].get("payload") is None
        assert redacted["TaskCompleted"].get("answer") is None
        assert "secret remark" not in str(shown)
        assert "payload" in str((await server.rest("runs.events", {"run_id": run_id}, **clerk))[1])
        async with server.http.stream("GET", f"/v1/runs/{run_id}/stream", headers=viewer) as response:
            streamed = (await response.aread()).decode()
        assert "TaskCommented" in streamed
        assert "secret remark" not in streamed
        async with server.http.stream("GET", f"/v1/runs/{run_id}/stream", headers=clerk) as response:
            assert "secret remark" in (await response.aread()).decode()
