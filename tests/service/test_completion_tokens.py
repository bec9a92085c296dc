"""Outcomes reported over HTTP by who has nothing but a completion token."""

import pytest
from msgspec import Raw

from holdfast.service.options import ServiceOptions
from holdfast.store.port import RunQuery
from holdfast.store.queries import AuditQuery
from tests.service.token_callers import call_operation, code_in, serve_with_tokens, store_of

NOTHING = Raw(b"{}")


@pytest.mark.contract("API-4", "ACT-1")
async def test_a_completion_token_is_all_that_its_bearer_needs_and_it_is_good_for_nothing_else() -> None:
    async with serve_with_tokens() as server:
        run_id = (await server.app.runtime().start(server.app.registry.workflow("signing"), NOTHING)).run_id
        token = await server.completion_token(run_id)
        as_bearer = {"authorization": f"Bearer {token}"}
        assert (await call_operation(server, "rest", "runs.get", {"run_id": run_id}, as_bearer)).status_code == 401
        assert (await call_operation(server, "rest", "runs.list", {}, None)).status_code == 401
        accepted = await call_operation(
            server, "rest", "activities.complete", {"completion_token": token, "result": "ann"}, None
        )
        assert (accepted.status_code, accepted.json()) == (202, {"accepted": True})
        assert await server.app.run(run_id).result() == "ann"
        [entry] = await store_of(server).find(AuditQuery(operation="activities.complete"))
        assert (entry.actor, entry.run_id, entry.subject) == ("bearer of a completion token", run_id, "sign")


@pytest.mark.contract("API-4")
async def test_what_is_refused_says_nothing_about_the_run_and_not_for_ever() -> None:
    async with serve_with_tokens(options=ServiceOptions(refusals_per_minute=3)) as server:
        run_id = (await server.app.runtime().start(server.app.registry.workflow("signing"), NOTHING)).run_id
        token = await server.completion_token(run_id)
        await call_operation(server, "rest", "activities.complete", {"completion_token": token, "result": "ann"}, None)
        await server.app.run(run_id).result()
        codes = []
        for number in range(5):
            fields = {"completion_token": token, "result": number}
            answer = await call_operation(server, "rest", "activities.complete", fields, None)
            assert "COMPLETED" not in answer.text
            codes.append(code_in(answer))
        assert codes == ["Conflict"] * 3 + ["RateLimited"] * 2
        for forged in ("x", f"{token}A", token.partition(".")[0], token.swapcase()):
            answer = await call_operation(server, "rest", "activities.fail", {"completion_token": forged}, None)
            assert (answer.status_code, code_in(answer)) == (422, "InvalidInput")
        assert len(await store_of(server).find(RunQuery())) == 1
