"""References to secrets that callers send: checked like everything else that they send."""

from typing import Any

import pytest

import holdfast as hf
from tests.service.in_process import serve_in_process

pytestmark = pytest.mark.contract("SEC-1", "API-2")


def make_app() -> hf.App:
    """Return an app whose workflow takes a secret, as an argument and by a signal."""
    app = hf.App("shop", secrets=hf.EnvironmentSecrets(environ={"SECRET_KEY": "the-value"}))

    @app.activity
    async def length(key: hf.Secret) -> int:
        return len(key.reveal())

    @app.workflow(signals={"key": hf.Secret})
    async def work(key: hf.Secret) -> list[int]:
        return [await length(key), await length(await hf.wait_signal("key", hf.Secret))]

    return app


@pytest.mark.parametrize(
    "reference",
    [{"$secret": "../key"}, {"$secret": ""}, {"$secret": 7}, {"$secret": "key", "x": 1}, "key", {}, None],
)
async def test_a_wrong_reference_is_refused_and_nothing_is_stored(reference: Any) -> None:
    async with serve_in_process(app=make_app()) as server:
        status, answer = await server.rest("runs.start", {"workflow": "work", "input": {"key": reference}})
        assert (status, answer["code"]) == (422, "InvalidInput"), answer
        assert (await server.rest("runs.list", {}))[1]["items"] == []
        run_id = await server.start("work", key={"$secret": "key"})
        asked = {"run_id": run_id, "name": "key", "payload": reference}
        status, answer = await server.rest("signals.send", asked)
        assert (status, answer["code"]) == (422, "InvalidInput"), answer
        status, answer = await server.rest("signals.send", {**asked, "payload": {"$secret": "key"}})
        assert status < 300, answer
        found = await server.until("runs.get", {"run_id": run_id}, lambda run: run["status"] == "COMPLETED")
        assert "the-value" not in str(found)
