"""One command to many runs: what becomes of a run that ends between the search and the command."""

import pytest

from holdfast.errors import RunTerminal
from holdfast.service.context import RequestContext
from holdfast.service.operations import bulk
from holdfast.service.operations.bulk import CommandRuns
from holdfast.store.port import RunHead
from tests.service.in_process import serve_in_process


@pytest.mark.contract("SIG-13")
async def test_a_run_that_has_finished_meanwhile_is_left_alone_and_no_refusal(monkeypatch: pytest.MonkeyPatch) -> None:
    async def too_late(context: RequestContext, request: CommandRuns, head: RunHead) -> str | None:
        raise RunTerminal(f"run {head.run_id} is COMPLETED")

    monkeypatch.setattr(bulk, "_carry_out", too_late)
    async with serve_in_process() as server:
        run_id = await server.start("order", order_id="o-1")
        ask = {"command": "cancel", "request_id": "r"}
        answer = (await server.http.post("/v1/run-commands", json=ask)).json()
        assert answer["items"] == [{"run_id": run_id, "not_concerned": "it has finished meanwhile"}]
