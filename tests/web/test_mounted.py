"""The page below a prefix of another application, in a real browser."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest
import uvicorn
from fastapi import FastAPI
from playwright.async_api import Browser, expect

import holdfast as hf
from holdfast.client import Client
from holdfast.service import make_token
from holdfast.service.http.server import bind
from tests.service.in_process import make_app
from tests.service.stream_readers import settled
from tests.web.browser import open_page

PREFIX = "/team/ops"


@asynccontextmanager
async def hosted(app: hf.App, store: hf.MemoryStore) -> AsyncIterator[str]:
    """Serve an application of FastAPI that mounts the service; give its address."""
    service = hf.asgi(app, store)
    host = FastAPI(lifespan=service.lifespan)
    host.mount(PREFIX, service)
    listener = bind(hf.ServiceOptions(port=0))
    server = uvicorn.Server(uvicorn.Config(host, log_level="error", timeout_graceful_shutdown=1))
    serving = asyncio.create_task(server._serve([listener]))  # which leaves the signals of the process alone
    try:
        await settled(lambda: server.started)
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"
    finally:
        server.should_exit = True
        await serving


@pytest.mark.contract("API-3", "API-4")
async def test_the_page_works_below_a_prefix(browser: Browser) -> None:
    app, store = make_app(), hf.MemoryStore()
    text, _ = await make_token(store, "ann", role="admin")
    async with hosted(app, store) as address, open_page(browser, address) as page:
        asked: list[str] = []
        page.on("request", lambda request: asked.append(request.url))
        await page.goto(f"{PREFIX}/")
        await page.get_by_label("Token").fill(text)
        await page.get_by_role("button", name="Sign in", exact=True).click()
        await page.get_by_role("button", name="Start the first").click()
        dialog = page.get_by_role("dialog")
        await dialog.get_by_label("Workflow").select_option("order")
        await dialog.get_by_label("Order id").fill("o-1")
        await dialog.get_by_label("Reference").fill("ORD-1")
        await dialog.get_by_role("button", name="Start", exact=True).click()
        await expect(page.get_by_role("heading", name="ORD-1", level=1)).to_be_visible()
        run_id = page.url.partition("/runs/")[2]
        assert page.url == f"{address}{PREFIX}/runs/{run_id}"
        await app.run(run_id).signal("approval", {"approved": True})
        await expect(page.locator(".head-marks")).to_contain_text("Completed")  # by the event stream
        await page.get_by_role("link", name="All runs").click()
        await expect(page).to_have_url(f"{address}{PREFIX}/runs")
        await page.go_back()
        await expect(page.get_by_role("heading", name="ORD-1", level=1)).to_be_visible()
        await page.reload()
        await expect(page.get_by_role("heading", name="ORD-1", level=1)).to_be_visible()
        for place in ("Inbox", "Plans", "Schedules", "Health", "Audit"):
            link = page.get_by_role("navigation", name="Places").get_by_role("link", name=place)
            await link.click()
            await expect(link).to_have_attribute("aria-current", "page")
            await expect(page).to_have_url(f"{address}{PREFIX}/{place.lower()}")
        async with Client(f"{address}{PREFIX}", token=text) as client:
            asking = await client.runs.start("asking", input={"who": "bob"})
            await page.get_by_role("navigation", name="Places").get_by_role("link", name="Inbox").click()
            await page.locator(".task-row").click()
            [task] = (await client.tasks.list(run_id=asking.run_id)).items
        await expect(page).to_have_url(f"{address}{PREFIX}/inbox/{task.task_id}")
        outside = [url for url in asked if not url.startswith(f"{address}{PREFIX}/")]
        assert outside == []
