"""Operators answer over the service what the engine cannot know: by role, in their tenant, with a result that fits."""

import asyncio
from typing import Any

import pytest

import holdfast as hf
from tests.service.in_process import InProcessServer
from tests.service.token_callers import bearer_header, call_operation, code_in, serve_with_tokens, token_for


def make_app() -> hf.App:
    """Return an app whose payments are never known to have happened."""
    app = hf.App("bank")

    async def find(order: str) -> hf.Indeterminate:
        return hf.Indeterminate("the bank is closed")

    soon = hf.Retry(initial_ms=1)

    @app.activity(idempotency_key=lambda order: f"order-{order}", verify=find, verify_retry=soon, retry=soon)
    async def charge(order: str) -> int:
        raise ConnectionError("the line is dead")

    @app.workflow
    async def pay(order: str) -> int:
        return await charge(order)

    return app


async def asked(server: InProcessServer, headers: dict[str, str], order: str) -> tuple[str, dict[str, Any]]:
    """Start a payment, and return its run and the task in which an operator is asked."""
    started = await call_operation(
        server, "rest", "runs.start", {"workflow": "pay", "input": {"order": order}}, headers
    )
    run_id = str(started.json()["run_id"])
    while not (found := await tasks(server, headers, run_id)):  # noqa: ASYNC110
        await asyncio.sleep(0.002)
    return run_id, found[0]


async def tasks(server: InProcessServer, headers: dict[str, str], run_id: str) -> list[dict[str, Any]]:
    """Return the open tasks of a run, as a caller sees them."""
    answer = await call_operation(server, "rest", "tasks.list", {"run_id": run_id, "status": "OPEN"}, headers)
    assert answer.status_code == 200, answer.text
    return list(answer.json()["items"])


@pytest.mark.contract("ACT-4", "API-4", "TSK-2")
async def test_only_operators_of_the_tenant_answer_and_what_does_not_fit_is_refused() -> None:
    async with serve_with_tokens(app=make_app()) as server:
        engineer = bearer_header(await token_for(server, "engineer", name="eve", tenant="acme"))
        operator = bearer_header(await token_for(server, "operator", name="olga", tenant="acme"))
        viewer = bearer_header(await token_for(server, "viewer", name="vic", tenant="acme"))
        stranger = bearer_header(await token_for(server, "operator", name="bob", tenant="other"))
        run_id, task = await asked(server, engineer, "1")
        assert (task["task_type"], task["payload"]["idempotency_key"]) == ("reconciliation", "order-1")
        assert "the bank is closed" in task["payload"]["problem"]

        async def answer(headers: dict[str, str], **given: Any) -> Any:
            ask = {"task_id": task["task_id"], "answer": given}
            return await call_operation(server, "rest", "tasks.complete", ask, headers)

        assert await tasks(server, stranger, run_id) == []
        refused = await answer(stranger, answer="happened", result=7)
        assert (refused.status_code, code_in(refused)) == (404, "NotFound")
        assert code_in(await answer(viewer, answer="happened", result=7)) == "NotPermitted"
        for wrong in (
            {"answer": "perhaps"},
            {"answer": "fail", "result": 7},
            {"answer": "happened", "result": "seven"},
        ):
            problem = await answer(operator, **wrong)
            assert problem.status_code == 422, (wrong, problem.text)
        assert [each["task_id"] for each in await tasks(server, operator, run_id)] == [task["task_id"]]
        assert (await answer(operator, answer="happened", result=7)).status_code == 200
        assert await server.app.run(run_id).result() == 7
        assert await tasks(server, operator, run_id) == []
        events = await server.app.run(run_id).events()
        [done] = [event.data for event in events if event.event_type == "StepCompleted"]
        assert getattr(done, "confirmed_by", None) == "operator"


@pytest.mark.contract("ACT-4", "API-4")
async def test_the_snapshot_shows_what_is_unresolved_and_an_answer_that_it_fails_is_shown_with_its_reason() -> None:
    async with serve_with_tokens(app=make_app()) as server:
        headers = bearer_header(await token_for(server, "engineer", name="eve", tenant="acme"))
        run_id, task = await asked(server, headers, "2")
        shown = await call_operation(server, "rest", "runs.snapshot", {"run_id": run_id}, headers)
        [step] = [each for each in shown.json()["steps"] if each["step_id"] == "charge"]
        assert step["status"] not in ("COMPLETED", "FAILED"), step
        ask = {"task_id": task["task_id"], "answer": {"answer": "fail", "reason": "too old"}}
        assert (await call_operation(server, "rest", "tasks.complete", ask, headers)).status_code == 200
        with pytest.raises(hf.errors.RunFailed, match="too old"):
            await server.app.run(run_id).result()
