"""Tenants and keyed steps: the same key of two tenants is two keys, and neither sees what the other is asked."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

import holdfast as hf
from holdfast.core.index_rows import ActivityRecord
from tests.service.token_callers import bearer_header, call_operation, code_in, serve_with_tokens, token_for

KEY = "order-1"


def make_app() -> tuple[hf.App, list[tuple[str, str | None]]]:
    """Return an app whose keyed activity fails, and whose verifier cannot say; and who has called it."""
    app = hf.App("bank")
    calls: list[tuple[str, str | None]] = []

    async def find(order: str) -> hf.Indeterminate:
        return hf.Indeterminate(f"not known to {hf.activity_context().tenant}")

    @app.activity(idempotency_key=lambda order: order, verify=find, retry=hf.Retry(initial_ms=1))
    async def charge(order: str) -> str:
        context = hf.activity_context()
        calls.append((context.tenant, context.idempotency_key))
        if len([tenant for tenant, _ in calls if tenant == context.tenant]) == 1:
            raise ConnectionError("the line is dead")
        return f"charged for {context.tenant}"

    @app.workflow
    async def pay(order: str) -> str:
        return await charge(order)

    return app, calls


@pytest.mark.contract("ACT-2", "ACT-3", "API-4")
async def test_two_tenants_with_the_same_key_have_two_records_and_two_questions(tmp_path: Path) -> None:
    app, calls = make_app()
    async with serve_with_tokens(f"sqlite:///{tmp_path}/bank.db", app=app) as server:

        async def ask(tenant: str, name: str, **fields: Any) -> Any:
            return await call_operation(server, "rest", name, fields, headers[tenant])

        async def question(tenant: str) -> dict[str, Any]:
            while not (items := (await ask(tenant, "tasks.list")).json()["items"]):  # noqa: ASYNC110
                await asyncio.sleep(0.01)
            [task] = items
            return dict(task)

        headers = {
            tenant: bearer_header(await token_for(server, name=f"ann of {tenant}", tenant=tenant, roles=("operator",)))
            for tenant in ("acme", "other")
        }
        start = {"workflow": "pay", "input": {"order": KEY}, "request_id": "r-1"}
        runs = {tenant: (await ask(tenant, "runs.start", **start)).json()["run_id"] for tenant in headers}
        assert runs["acme"] != runs["other"]
        questions = {tenant: await question(tenant) for tenant in headers}
        for tenant, task in questions.items():
            assert task["run_id"] == runs[tenant]
            assert f"not known to {tenant}" in str(task["payload"])
        records: list[ActivityRecord] = []
        for loaded in await app.runtime().store.load(list(runs.values())):
            assert loaded is not None
            records += loaded.records
        assert [(each.run_id, each.idempotency_key) for each in records] == [(run, KEY) for run in runs.values()]

        answer = {"task_id": questions["acme"]["task_id"], "answer": {"answer": "happened", "result": "stolen"}}
        for name, fields in (
            ("tasks.get", {"task_id": questions["acme"]["task_id"]}),
            ("tasks.complete", answer),
            ("runs.retry_step", {"run_id": runs["acme"], "step_id": "charge"}),
            ("runs.skip_step", {"run_id": runs["acme"], "step_id": "charge"}),
            ("runs.events", {"run_id": runs["acme"]}),
        ):
            assert code_in(await ask("other", name, **fields)) == "NotFound", name

        said = {"answer": "did-not-happen"}
        done = await ask("acme", "tasks.complete", task_id=questions["acme"]["task_id"], answer=said)
        assert done.is_success, done.text
        assert await app.run(runs["acme"]).result() == "charged for acme"
        assert (await question("other"))["task_id"] == questions["other"]["task_id"], "it is still asked"
        said = {"answer": "happened", "result": "by hand"}
        await ask("other", "tasks.complete", task_id=questions["other"]["task_id"], answer=said)
        assert await app.run(runs["other"]).result() == "by hand"
    assert calls == [("acme", KEY), ("other", KEY), ("acme", KEY)]
