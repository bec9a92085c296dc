"""Artifacts over the API: streamed, with the caller's rights, and complete only if they are what was stored."""

import asyncio
from pathlib import Path
from typing import Any

import httpx
import pytest

import holdfast as hf
from holdfast.service.context import make_service, open_access
from holdfast.service.http.server import listening
from holdfast.service.operations import DOWNLOADS
from holdfast.service.options import ServiceOptions
from tests.service.in_process import MOST_SECONDS, InProcessServer
from tests.service.token_callers import bearer_header, call_operation, code_in, serve_with_tokens, token_for

MIB = 1024 * 1024


KEYS = {"k1": b"1" * 32}


def make_app(folder: Path, **options: Any) -> hf.App:
    app = hf.App("films", artifacts=hf.Artifacts(folder), **options)

    @app.activity
    async def film(megabytes: int) -> hf.Artifact:
        return await hf.put_artifact((bytes([number]) * MIB for number in range(megabytes)), kind="film")

    @app.workflow
    async def make(megabytes: int) -> hf.Artifact:
        return await film(megabytes)

    return app


async def made(server: InProcessServer, headers: dict[str, str], megabytes: int = 3) -> tuple[str, dict[str, Any]]:
    """Start a run that makes an artifact; return its id and the artifact, as its snapshot has it."""
    response = await call_operation(
        server, "rest", "runs.start", {"workflow": "make", "input": {"megabytes": megabytes}}, headers
    )
    run_id = str(response.json()["run_id"])
    await server.app.run(run_id).result()
    snapshot = await call_operation(server, "rest", "runs.snapshot", {"run_id": run_id}, headers)
    [artifact] = snapshot.json()["artifacts"]
    assert snapshot.json()["steps"][0]["artifacts"] == [artifact]
    return run_id, dict(artifact)


def address_of(run_id: str, artifact: dict[str, Any]) -> str:
    kind, artifact_id = artifact["uri"].split("/")[-2:]
    return f"/v1/runs/{run_id}/artifacts/{kind}/{artifact_id}"


@pytest.mark.contract("SEC-2", "API-4")
async def test_an_artifact_is_downloaded_by_callers_who_may_read_its_run(tmp_path: Path) -> None:
    async with serve_with_tokens(app=make_app(tmp_path)) as server:
        acme = bearer_header(await token_for(server, name="ann", tenant="acme"))
        other = bearer_header(await token_for(server, name="bob", tenant="other"))
        run_id, artifact = await made(server, acme)
        address = address_of(run_id, artifact)
        found = await server.http.get(address, headers=acme)
        assert found.status_code == 200
        assert found.content == b"".join(bytes([number]) * MIB for number in range(3))
        assert found.headers["content-length"] == str(3 * MIB) == str(artifact["size_bytes"])
        assert found.headers["content-type"] == "application/octet-stream"
        assert found.headers["content-disposition"].startswith("attachment;")
        assert found.headers["x-content-type-options"] == "nosniff"
        for headers, status, code in ((other, 404, "NotFound"), ({}, 401, "NotAuthenticated")):
            refused = await server.http.get(address, headers=headers)
            assert (refused.status_code, code_in(refused)) == (status, code)
        own_run, _ = await made(server, other, 1)
        stolen = await server.http.get(address.replace(run_id, own_run), headers=other)
        assert code_in(stolen) == "NotFound"
        for wrong in (f"/v1/runs/{run_id}/artifacts/film/unheard-of", f"/v1/runs/{run_id}/artifacts/film/%2e%2e"):
            assert (await server.http.get(wrong, headers=acme)).status_code in (404, 422)
        assert (await server.http.head(address, headers=acme)).status_code == 405


@pytest.mark.contract("SEC-2")
async def test_a_download_that_is_not_what_was_stored_is_not_completed(tmp_path: Path) -> None:
    """Over a real socket: the caller sees that bytes are missing."""
    app = make_app(tmp_path)
    async with asyncio.timeout(MOST_SECONDS), app.node("memory://"):
        service = make_service(app, ServiceOptions(port=0, is_open=True), open_access)
        async with (
            listening(service) as port,
            httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", timeout=60) as http,
        ):
            run_id = (await http.post("/v1/runs", json={"workflow": "make", "input": {"megabytes": 3}})).json()[
                "run_id"
            ]
            artifact = await app.run(run_id).result()
            address = address_of(run_id, artifact)
            assert len((await http.get(address)).content) == 3 * MIB
            [path] = [path for path in tmp_path.rglob("*") if path.is_file()]
            path.write_bytes(b"x" * 3 * MIB)
            with pytest.raises(httpx.RemoteProtocolError):
                await http.get(address)
            path.unlink()
            missing = await http.get(address)
            assert (missing.status_code, code_in(missing)) == (404, "ArtifactMissing")


@pytest.mark.contract("SEC-2", "API-2")
async def test_an_encrypted_artifact_is_downloaded_as_it_was_and_not_without_the_key(tmp_path: Path) -> None:
    folder, address = tmp_path / "artifacts", f"sqlite:///{tmp_path}/films.db"
    options = ServiceOptions(port=0, is_open=True)
    paths: list[str] = []
    for keys, expected in ((KEYS, 200), ({"k2": b"2" * 32}, 409)):
        app = make_app(folder, codecs=[hf.Encryption(keys)])
        async with asyncio.timeout(MOST_SECONDS), app.node(address):
            service = make_service(app, options, open_access)
            async with (
                listening(service) as port,
                httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", timeout=60) as http,
            ):
                if not paths:
                    asked = await http.post("/v1/runs", json={"workflow": "make", "input": {"megabytes": 3}})
                    run_id = asked.json()["run_id"]
                    paths.append(address_of(run_id, await app.run(run_id).result()))
                    stored = [path.read_bytes() for path in folder.rglob("*") if path.is_file()]
                    assert not any(bytes([2]) * 100 in content for content in stored)
                found = await http.get(paths[0])
                assert found.status_code == expected
                if expected == 200:
                    assert found.content == b"".join(bytes([number]) * MIB for number in range(3))
                    assert "aes" not in found.headers["content-disposition"]
                else:
                    assert code_in(found) == "PayloadUnreadable"


@pytest.mark.contract("SEC-2", "API-4")
async def test_a_deleted_run_leaves_no_artifact_and_downloads_are_bounded(tmp_path: Path) -> None:
    options = ServiceOptions(streams_per_token=1)
    async with serve_with_tokens(app=make_app(tmp_path), options=options) as server:
        ann = bearer_header(await token_for(server, name="ann"))
        run_id, artifact = await made(server, ann)
        for _ in range(3):  # each gives its place back
            assert (await server.http.get(address_of(run_id, artifact), headers=ann)).status_code == 200
        dry = await call_operation(server, "rest", "runs.delete", {"run_id": run_id, "dry_run": True}, ann)
        assert dry.status_code == 200
        assert [path for path in tmp_path.rglob("*") if path.is_file()]
        await call_operation(server, "rest", "runs.delete", {"run_id": run_id}, ann)
        assert not [path for path in tmp_path.rglob("*") if path.is_file()]
        assert code_in(await server.http.get(address_of(run_id, artifact), headers=ann)) == "NotFound"


def test_a_download_is_described_as_bytes() -> None:
    assert set(DOWNLOADS) == {"artifacts.download"}
