"""Artifacts on the page, and values that cannot be opened."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from playwright.async_api import Browser, expect

import holdfast as hf
from holdfast.service.context import make_service, open_access
from holdfast.service.http.server import listening
from holdfast.service.options import ServiceOptions
from tests.web.browser import open_page
from tests.web.site import MOST_SECONDS


def make_app(folder: Path, *, has_keys: bool = True) -> hf.App:
    codecs = [hf.Encryption({"k1": b"1" * 32})] if has_keys else []
    app = hf.App("films", artifacts=hf.Artifacts(folder) if has_keys else None, codecs=codecs)

    @app.activity
    async def film(title: str) -> hf.Artifact:
        return await hf.put_artifact(title.encode() * 1_000, kind="film")

    @app.workflow
    async def make(title: str) -> hf.Artifact:
        return await film(title)

    return app


@asynccontextmanager
async def served(app: hf.App, store: str, *, takes_runs: bool = True) -> AsyncIterator[str]:
    """Give the address of a service."""
    async with asyncio.timeout(MOST_SECONDS), app.node(store, options=hf.NodeOptions(takes_runs=takes_runs)):
        service = make_service(app, ServiceOptions(port=0, is_open=True), open_access)
        async with listening(service) as port:
            yield f"http://127.0.0.1:{port}"


@pytest.mark.contract("SEC-2")
async def test_a_step_links_to_its_artifacts_and_hides_what_it_cannot_open(browser: Browser, tmp_path: Path) -> None:
    store = f"sqlite:///{tmp_path}/films.db"
    app = make_app(tmp_path / "artifacts")
    async with served(app, store) as address, open_page(browser, address) as page:
        run = await app.start(hf.Workflow[[str], hf.Artifact](app.registry.workflow("make")), "Solaris ")
        await run.result()
        await page.goto(f"/runs/{run.run_id}")
        await page.get_by_role("button", name="film, Activity").click()
        await expect(page.locator(".detail-body")).to_contain_text("Solaris")
        async with page.expect_download() as started:
            await page.get_by_role("link", name="film", exact=True).click()
        path = await (await started.value).path()
        assert path.read_bytes() == b"Solaris " * 1_000
    without = make_app(tmp_path / "artifacts", has_keys=False)
    async with served(without, store, takes_runs=False) as address, open_page(browser, address) as page:
        await page.goto(f"/runs/{run.run_id}")
        await page.get_by_role("button", name="film, Activity").click()
        await expect(page.locator(".detail-body")).to_contain_text("encrypted")
        await expect(page.locator(".detail-body")).not_to_contain_text("Solaris")
        await expect(page.locator(".detail-body")).not_to_contain_text("aes-gcm")
