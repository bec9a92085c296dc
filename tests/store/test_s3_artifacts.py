"""Artifacts in a real S3 server: what only a server shows. What all artifact stores share is in `test_artifacts.py`."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import aclosing
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

import holdfast as hf
from holdfast.errors import ArtifactCorrupt, StoreUnavailable
from holdfast.store.artifacts import Artifacts, key_of, open_artifacts
from holdfast.store.object_artifacts import PART_BYTES, ObjectArtifacts
from tests.s3_server import S3Server

MIB = 1024 * 1024
LARGE = "x" * (300 * 1024)
PLACE = "0a1b"


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4_096


async def once(data: bytes) -> AsyncIterator[bytes]:
    yield data


@pytest.mark.slow
@pytest.mark.contract("SEC-2")
async def test_an_artifact_of_100_mb_passes_with_flat_memory(s3_server: S3Server) -> None:
    """The server is another process, so what this one has resident is what passes through it."""
    artifacts = Artifacts(ObjectArtifacts(s3_server.store(s3_server.make_bucket())))
    size, samples = 100 * MIB, [0]
    before = resident_bytes()

    async def film() -> AsyncIterator[bytes]:
        for number in range(size // MIB):
            samples.append(resident_bytes() - before)
            yield bytes([number % 251]) * MIB

    artifact = await artifacts.put(PLACE, "run-1", film(), "film", 0)
    seen = 0
    async for chunk in artifacts.open(artifact):
        seen += len(chunk)
        samples.append(resident_bytes() - before)
    assert seen == size == artifact.size_bytes
    assert max(samples) < 8 * PART_BYTES, f"{max(samples) // MIB} MiB"


@pytest.mark.contract("SEC-2")
async def test_a_download_that_is_given_up_or_slow_harms_nothing(s3_server: S3Server) -> None:
    store = s3_server.store(
        s3_server.make_bucket(), client_options={"allow_http": True, "timeout": timedelta(seconds=1)}
    )
    artifacts = Artifacts(ObjectArtifacts(store))
    artifact = await artifacts.put(PLACE, "run-1", b"y" * (48 * MIB), "film", 0)
    async with aclosing(artifacts.open(artifact)) as chunks:  # type: ignore[type-var]
        await anext(chunks)
    seen = 0
    async for chunk in artifacts.open(artifact):  # it takes longer than a request may
        seen += len(chunk)
        await asyncio.sleep(0.04)
    assert seen == 48 * MIB


@pytest.mark.contract("SEC-2", "API-2")
@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"secret_access_key": "not-the-secret"}, "refuses the credentials"),
        ({"access_key_id": "AKIANOBODY"}, "refuses the credentials"),
        ({"bucket": "there-is-none"}, "no such bucket"),
    ],
    ids=["wrong secret", "unknown key", "no bucket"],
)
async def test_a_bucket_that_refuses_is_a_typed_error(s3_server: S3Server, changed: dict[str, Any], words: str) -> None:
    given = {"bucket": s3_server.make_bucket()} | changed
    store = ObjectArtifacts(s3_server.store(**given))

    async def read() -> None:
        _ = [chunk async for chunk in store.read("a/b")]

    async def look() -> None:
        _ = [found async for found in store.list("a")]

    verbs: list[Callable[[], Any]] = [
        lambda: store.put("a/b", once(b"small")),
        lambda: store.put("a/b", once(b"x" * (PART_BYTES + 1))),
        read,
        look,
    ]
    if "bucket" not in changed:  # HEAD has no body, and to delete what is not there is no error
        verbs += [lambda: store.stat("a/b"), lambda: store.delete("a/b")]
    for verb in verbs:
        with pytest.raises(StoreUnavailable, match=words) as caught:
            await verb()
        assert s3_server.secret not in str(caught.value)


@pytest.mark.contract("SEC-2")
async def test_the_address_names_bucket_and_prefix_and_the_environment_the_rest(
    s3_server: S3Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in s3_server.environment().items():
        monkeypatch.setenv(name, value)
    bucket = s3_server.make_bucket()
    one, two = (open_artifacts(f"s3://{bucket}/{prefix}") for prefix in ("one", "two"))
    await one.put("a/=run %2F é/b", once(b"1"))
    await two.put("a/c", once(b"22"))
    assert [found.key async for found in one.list()] == ["a/=run %2F é/b"]
    assert [found.size_bytes async for found in two.list()] == [2]
    assert b"".join([chunk async for chunk in one.read("a/=run %2F é/b")]) == b"1"


@pytest.mark.contract("SEC-2")
async def test_an_engine_works_with_a_bucket(s3_server: S3Server, tmp_path: Path) -> None:
    bucket = ObjectArtifacts(s3_server.store(s3_server.make_bucket()))
    app = hf.App("shop", artifacts=hf.Artifacts(bucket))

    @app.activity
    async def render(text: str) -> hf.Artifact:
        return await hf.put_artifact([b"report on ", text[:10].encode()], kind="report")

    @app.workflow
    async def report(text: str) -> hf.Artifact:
        return await render(text)

    async with asyncio.timeout(60), app.node(f"sqlite:///{tmp_path}/shop.db"):
        run = await app.start(report, LARGE)
        artifact = await run.result()
        assert b"".join([chunk async for chunk in app.open_artifact(artifact)]) == b"report on xxxxxxxxxx"
        assert len([found async for found in bucket.list()]) == 2, "the artifact, and the input"
        await bucket.put(key_of(artifact), once(b"report on yyyyyyyyyy"))
        with pytest.raises(ArtifactCorrupt):
            _ = [chunk async for chunk in app.open_artifact(artifact)]


@pytest.mark.slow
@pytest.mark.process
@pytest.mark.contract("SEC-2", "OWN-3")
async def test_while_the_bucket_is_away_starts_with_large_values_are_refused_and_turns_wait(tmp_path: Path) -> None:
    server = S3Server()
    server.start()
    try:
        app = hf.App("shop", artifacts=hf.Artifacts(ObjectArtifacts(server.store(server.make_bucket()))))
        may_go, has_gone = asyncio.Event(), asyncio.Event()

        @app.activity
        async def grow() -> str:
            await may_go.wait()
            has_gone.set()
            return LARGE

        @app.workflow
        async def small(text: str) -> int:
            return len(await grow())

        async with asyncio.timeout(120), app.node(f"sqlite:///{tmp_path}/shop.db"):
            run = await app.start(small, "")
            server.freeze()
            may_go.set()
            await has_gone.wait()
            events = await run.events()
            server.thaw()
            assert "StepCompleted" not in {event.event_type for event in events}
            assert await run.result() == len(LARGE)
            server.kill()
            with pytest.raises(StoreUnavailable):
                await app.start(small, LARGE)
    finally:
        if server.is_running:
            server.kill()
