"""Plans on a node: started, registered, fetched, resumed after a crash, and as children of code."""

import hashlib
import json
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

import holdfast as hf
from bench.plans import SHAPES, play
from holdfast.core.events import RunPaused, SignalWaiting, TaskCreated
from holdfast.core.run_graph import GraphFold
from holdfast.core.snapshot import project_run
from holdfast.core.state import PENDING
from holdfast.engine.history import wait_for_event
from holdfast.errors import Conflict, InvalidInput, NotFound, PlanInvalid, RunFailed
from holdfast.program.plan.definition import PlanDefinition
from holdfast.store.memory.store import MemoryStore
from holdfast.store.port import RunQuery
from holdfast.testing import VirtualClock

pytestmark = pytest.mark.contract("WF-1")

ETL = """
plan: etl
version: "1"
inputs:
  day: {type: string}
steps:
  - id: extract
    activity: extract
    input: {day: "${inputs.day}"}
  - id: load
    for_each: ${steps.extract.output}
    max_concurrency: 2
    activity: load
    input: {row: "${item}"}
  - id: report
    workflow: report
    input: {loaded: "${steps.load.output}"}
output: ${steps.report.output}
"""


def make_app() -> hf.App:
    app = hf.App("plans")

    @app.activity
    async def extract(day: str) -> list[int]:
        return [1, 2, 3]

    @app.activity
    async def load(row: int) -> int:
        return row * 10

    @app.activity(retry=hf.Retry(max_attempts=1))
    async def broken() -> None:
        raise ValueError("no")

    @app.workflow
    async def report(loaded: list[int]) -> str:
        return f"loaded {sum(loaded)}"

    @app.workflow
    async def outer(document: dict[str, Any]) -> Any:
        return await hf.plan(document, {"day": "mo"})

    app.outer = outer  # type: ignore[attr-defined]
    return app


async def test_a_plan_is_started_from_its_text() -> None:
    app = make_app()
    async with app.node(MemoryStore()):
        run = await app.plans.start(ETL, {"day": "mo"})
        assert await run.result() == "loaded 60"
        head = await app.runtime().head(run.run_id)
        assert (head.plan_id, head.plan_version) == ("plan:etl", "1")


@pytest.mark.contract("TMR-1", "WF-1")
async def test_a_plan_starts_later_as_a_workflow_does() -> None:
    app, clock = make_app(), VirtualClock()
    async with app.node(MemoryStore(clock)):
        later = timedelta(seconds=5)
        at = datetime.fromtimestamp(clock.now() / 1e6, UTC) + later
        runs = [await app.plans.start(ETL, {"day": "mo"}, **when) for when in ({"at": at}, {"after": later})]
        assert [await run.status() for run in runs] == [PENDING, PENDING]
        clock.advance(ms=5_000)
        app.runtime().store.wakeups.notify()
        assert [await run.result() for run in runs] == ["loaded 60", "loaded 60"]
        with pytest.raises(InvalidInput, match="not both"):
            await app.plans.start(ETL, {"day": "mo"}, at=at, after=later)


async def test_a_registered_plan_is_started_by_its_id() -> None:
    app = make_app()
    async with app.node(MemoryStore()):
        registered = await app.plans.register(ETL)
        assert await app.plans.register(ETL) == registered, "the same bytes again are the same registration"
        newer = ETL.replace('version: "1"', 'version: "2"')
        await app.plans.register(newer.encode())
        assert [each.plan_version for each in await app.plans.list("etl")] == ["1", "2"]
        assert (await app.plans.show("etl")).version == "2"
        run = await app.plans.start("etl", {"day": "mo"})
        assert await run.result() == "loaded 60"
        ref = hf.PlanRef(plan_id="etl", plan_version="1", sha256=registered.sha256)
        assert await (await app.plans.start(ref, {"day": "mo"})).result() == "loaded 60"
        with pytest.raises(Conflict):
            await app.plans.register(ETL + "# other bytes\n")
        with pytest.raises(Conflict):
            await app.plans.start(hf.PlanRef(plan_id="other", sha256=registered.sha256))
        with pytest.raises(NotFound):
            await app.plans.start("nope")
        with pytest.raises(NotFound):
            await app.plans.start(hf.PlanRef(sha256="0" * 64))


async def test_what_is_wrong_is_refused_before_anything_is_stored() -> None:
    app = make_app()
    async with app.node(MemoryStore()):
        with pytest.raises(PlanInvalid) as refused:
            await app.plans.register(ETL.replace("activity: load", "activity: unknown"))
        assert refused.value.details["problems"][0]["line"] == 13
        assert not await app.plans.list()
        with pytest.raises(InvalidInput, match="needs the input 'day'"):
            await app.plans.start(ETL)
    assert [problem.place for problem in app.plans.validate(ETL.replace("row:", "rows:"))] == [
        "/steps/1/input",
        "/steps/1/input/rows",
    ]


async def test_code_runs_a_plan_as_a_child() -> None:
    app = make_app()
    async with app.node(MemoryStore()):
        step = {"id": "extract", "activity": "extract", "input": {"day": "${inputs.day}"}}
        document = {"plan": "made", "version": "1", "inputs": {"day": {}}, "steps": [step]}
        run = await app.start(app.outer, document)  # type: ignore[attr-defined]
        assert await run.result() == {"extract": [1, 2, 3]}
        bad = await app.start(app.outer, {**document, "steps": [{"id": "x", "activity": "nope"}]})  # type: ignore[attr-defined]
        with pytest.raises(RunFailed, match="PlanInvalid"):
            await bad.result()


async def test_a_plan_runs_plans_registered_or_made_by_a_step() -> None:
    app = make_app()

    @app.activity
    async def make() -> dict[str, Any]:
        return {"plan": "made", "version": "1", "steps": [{"id": "x", "activity": "load", "input": {"row": 7}}]}

    steps = [
        {"id": "make", "activity": "make"},
        {"id": "run", "plan": "${steps.make.output}"},
        {"id": "etl", "plan": "etl", "version": "1", "input": {"day": "mo"}},
        {"id": "gone", "plan": "nope", "on_failure": "continue"},
    ]
    out = {"made": "${steps.run.output}", "etl": "${steps.etl.output}", "gone": "${steps.gone.error.code}"}
    document = {"plan": "outer", "version": "1", "steps": steps, "output": out}
    async with app.node(MemoryStore()):
        await app.plans.register(ETL)
        run = await app.plans.start(document)
        assert await run.result() == {"made": {"x": 70}, "etl": "loaded 60", "gone": "NotFound"}


async def test_a_failed_step_fails_the_run() -> None:
    app = make_app()
    async with app.node(MemoryStore()):
        run = await app.plans.start({"plan": "p", "version": "1", "steps": [{"id": "a", "activity": "broken"}]})
        with pytest.raises(RunFailed, match="step a: ValueError: no"):
            await run.result()


async def test_another_node_goes_on_with_a_plan_from_the_store_alone() -> None:
    store = MemoryStore()
    steps = [{"id": "a", "activity": "load", "input": {"row": 1}}, {"id": "w", "signal": "go", "depends_on": ["a"]}]
    document = json.dumps({"plan": "p", "version": "1", "steps": steps, "output": "${steps.w.output}"})
    first = make_app()
    async with first.node(store):
        run = await first.plans.start(document.encode(), run_id="r")
        await wait_for_event(store, "r", 1, lambda event: isinstance(event.data, SignalWaiting))
    second = make_app()  # which has never seen the plan
    async with second.node(store):
        await second.run("r").signal("go", 5)
        assert await second.run("r").result() == 5
    assert run.run_id == "r"


async def test_starting_twice_with_one_request_is_one_run() -> None:
    app = make_app()
    async with app.node(MemoryStore()):
        one = await app.plans.start(ETL, {"day": "mo"}, request_id="q")
        two = await app.plans.start(ETL, {"day": "mo"}, request_id="q")
        assert one.run_id == two.run_id
        with pytest.raises(Conflict):
            await app.plans.start(ETL, {"day": "tu"}, request_id="q")


@pytest.mark.contract("WF-1", "WF-4")
@pytest.mark.parametrize("version", ["1", None])
async def test_a_plan_starts_workflows_that_only_other_nodes_have(version: str | None) -> None:
    """With a version any node starts it; without one, the run waits for a node that knows the last one."""
    store, here, there = MemoryStore(), hf.App("plans"), make_app()
    child: dict[str, Any] = {"id": "r", "workflow": "report", "input": {"loaded": [1]}, "depends_on": ["go"]}
    steps = [{"id": "go", "signal": "go"}, child if version is None else {**child, "version": version}]
    document = {"plan": "p", "version": "1", "steps": steps}
    async with here.node(store):
        with pytest.raises(PlanInvalid, match="no workflow 'report'"):
            await here.plans.start(document)
        async with there.node(store):
            run = await here.plans.start(document)
        await run.signal("go")
        async with there.node(store):
            assert await run.result() == {"r": "loaded 1"}


@pytest.mark.contract("SIG-13")
async def test_a_failed_run_is_done_again_from_the_steps_that_have_failed() -> None:
    app, calls, is_broken = make_app(), list[str](), [True]

    @app.activity(retry=hf.Retry(max_attempts=1))
    async def note(name: str) -> str:
        calls.append(name)
        if name == "b1" and is_broken[0]:
            raise ValueError("not yet")
        return name.upper()

    steps: list[dict[str, Any]] = [
        {"id": "a", "activity": "note", "input": {"name": "a"}, "requires_approval": True},
        {"id": "b", "activity": "note", "for_each": ["b0", "b1"], "max_concurrency": 1, "input": {"name": "${item}"}},
        {"id": "c", "activity": "note", "input": {"name": "c-${steps.a.output}"}, "depends_on": ["b"]},
    ]
    steps[1]["depends_on"] = ["a"]
    async with app.node(MemoryStore()) as node:
        run = await app.plans.start({"plan": "p", "version": "1", "steps": steps}, run_id="r")
        await wait_for_event(app.runtime().store, "r", 1, lambda event: isinstance(event.data, TaskCreated))
        [task] = await app.tasks.list(run_id="r")
        await app.tasks.complete(task.task_id, {"approved": True}, actor=hf.Actor("ann"))
        with pytest.raises(RunFailed):
            await run.result()
        assert calls == ["a", "b0", "b1"]
        is_broken[0] = False
        again = await run.retry_run("the source is back")
        assert await again.result() == {"c": "C-A"}
        assert calls == ["a", "b0", "b1", "b1", "c-A"], "what has succeeded is not done again"
        graph = PlanDefinition(json.dumps({"plan": "p", "version": "1", "steps": steps}).encode()).graph()
        drawn = GraphFold(graph).of_run(project_run(again.run_id, await again.events()), ["b"])
        assert {str(node.status) for node in drawn.nodes} == {"SUCCESS"}, "they are not shown as skipped"
        assert node is not None


@pytest.mark.contract("SIG-13", "SEC-2")
async def test_a_run_that_is_done_again_has_the_artifacts_of_what_it_does_not_do(tmp_path: Path) -> None:
    app, is_broken = hf.App("artifacts", artifacts=hf.Artifacts(f"file://{tmp_path}")), [True]

    @app.activity
    async def export() -> str:
        await hf.put_artifact(b"1,2,3", kind="csv")
        return "exported"

    @app.activity(retry=hf.Retry(max_attempts=1))
    async def publish(files: list[Any]) -> str:
        if is_broken[0]:
            raise ValueError("not yet")
        return str(files[0]["kind"])

    steps = [
        {"id": "export", "activity": "export"},
        {"id": "publish", "activity": "publish", "input": {"files": "${steps.export.artifact_refs}"}},
    ]
    async with app.node(MemoryStore()):
        run = await app.plans.start({"plan": "p", "version": "1", "steps": steps})
        with pytest.raises(RunFailed):
            await run.result()
        is_broken[0] = False
        assert await (await run.retry_run()).result() == {"publish": "csv"}


@pytest.mark.contract("SIG-13")
async def test_a_run_is_done_again_however_much_its_steps_have_given_each_other() -> None:
    """Only what is still needed is carried over, so what has succeeded may be larger than any input."""
    app, is_broken, seen = make_app(), [True], list[int]()

    @app.activity
    async def much(after: str = "") -> str:
        seen.append(len(after))
        return "x" * 1_200_000

    @app.activity(retry=hf.Retry(max_attempts=1))
    async def finish(text: str) -> int:
        if is_broken[0]:
            raise ValueError("not yet")
        return len(text)

    steps: list[dict[str, Any]] = [
        {"id": "a", "activity": "much"},
        {"id": "b", "activity": "much", "input": {"after": "${steps.a.output}"}},
        {"id": "c", "activity": "much", "input": {"after": "${steps.b.output}"}},
        {"id": "d", "activity": "finish", "input": {"text": "${steps.c.output}"}},
    ]
    async with app.node(MemoryStore()):
        run = await app.plans.start({"plan": "p", "version": "1", "steps": steps})
        with pytest.raises(RunFailed):
            await run.result()
        is_broken[0] = False
        assert await (await run.retry_run()).result() == {"d": 1_200_000}
        assert seen == [0, 1_200_000, 1_200_000]


async def test_a_plan_is_found_by_its_last_version_among_any_number() -> None:
    app = make_app()
    async with app.node(MemoryStore()):
        for number in (*range(1_001), 5_000):
            version = f"z{number}" if number == 5_000 else f"{number:05}"
            steps = [{"id": "a", "activity": "broken"}]
            await app.plans.register({"plan": "p", "version": version, "steps": steps})
        assert (await app.plans.show("p")).version == "z5000"


async def test_json_of_one_line_is_a_document() -> None:
    app = make_app()
    async with app.node(MemoryStore()):
        step = {"id": "l", "activity": "load", "input": {"row": 1}}
        run = await app.plans.start(json.dumps({"plan": "p", "version": "1", "steps": [step]}))
        assert await run.result() == {"l": 10}


async def test_a_plan_in_a_plan_is_compared_with_what_is_registered() -> None:
    app = make_app()
    inner = {"plan": "q", "version": "1", "steps": [{"id": "b", "activity": "unknown"}]}
    [problem] = app.plans.validate({"plan": "p", "version": "1", "steps": [{"id": "a", "plan": inner}]})
    assert problem.place == "/steps/0/plan/steps/0/activity"


async def test_inputs_cannot_pretend_that_steps_were_done() -> None:
    app = make_app()
    async with app.node(MemoryStore()):
        with pytest.raises(InvalidInput):
            await app.plans.start(ETL, {"day": "mo", "$done": {"extract": []}})
        step = {"id": "etl", "plan": "etl", "input": {"day": "mo", "$done": {"extract": []}}}
        await app.plans.register(ETL)
        run = await app.plans.start({"plan": "p", "version": "1", "steps": [step]})
        with pytest.raises(RunFailed, match="an object of arguments"):
            await run.result()


@pytest.mark.contract("CAN-1")
@pytest.mark.parametrize("shape", SHAPES)
async def test_a_plan_of_many_steps_costs_the_same_all_the_way(shape: str, tmp_path: Path) -> None:
    played = await play(SHAPES[shape](900), f"sqlite:///{tmp_path}/{shape}.db", 3)
    assert played.cpu_ms[2] < 3 * played.cpu_ms[1] + 2, f"CPU ms for a step, by thirds: {played.cpu_ms}"
    assert played.grown_mb < 200


@pytest.mark.contract("WF-1", "WF-3", "CAN-1")
async def test_a_run_whose_body_is_missing_is_paused_and_goes_on_when_it_is_there() -> None:
    store = MemoryStore()
    await store.migrate()
    body = json.dumps(
        {
            "plan": "wait",
            "version": "1",
            "steps": [{"id": "go", "signal": "go"}, {"id": "x", "activity": "extract", "input": {"day": "mo"}}],
        }
    ).encode()
    first = make_app()
    async with first.node(store):
        run = await first.plans.start(body)
        await wait_for_event(store, run.run_id, 0, lambda event: isinstance(event.data, SignalWaiting))
    [head] = await store.find(RunQuery())
    sha256 = hashlib.sha256(body).hexdigest()
    store._plans.forget([("default", sha256)], None)  # as if it had been lost
    second = make_app()
    async with second.node(store):
        await second.run(head.run_id).signal("go", 1)
        paused = await wait_for_event(store, head.run_id, 0, lambda event: isinstance(event.data, RunPaused))
        assert isinstance(paused.data, RunPaused)
        assert paused.data.error is not None
        assert "body" in paused.data.error.message
        await store.put_plan("default", sha256, body)
        assert await second.run(head.run_id).result() is not None


@pytest.mark.contract("API-4")
async def test_a_plan_that_only_the_memory_of_a_node_has_is_not_started() -> None:
    app = make_app()
    async with app.node(MemoryStore()):
        definition, problems = await app.runtime().plans.check(ETL.encode())
        assert definition is not None
        assert not problems
        ref = hf.PlanRef(sha256=definition.sha256)
        with pytest.raises(NotFound):
            await app.plans.start(ref, {"day": "mo"})
        await app.runtime().plans.put("other", ETL.encode())
        with pytest.raises(NotFound):
            await app.plans.start(ref, {"day": "mo"})
        await app.runtime().plans.put("default", ETL.encode())
        assert await (await app.plans.start(ref, {"day": "mo"})).result() == "loaded 60"
