"""A step whose activity has a limit names it on the page, and not the queue in which the engine keeps its calls."""

import asyncio

import pytest
from playwright.async_api import Browser, expect

import holdfast as hf
from holdfast.service.context import make_service, open_access
from holdfast.service.http.server import listening
from holdfast.service.options import ServiceOptions
from tests.engine.harness import wait_for_event
from tests.web.browser import open_page
from tests.web.site import MOST_SECONDS


@pytest.mark.contract("ACT-7")
async def test_step_names_its_limit_and_its_key(browser: Browser) -> None:
    app, limit = hf.App("shop"), hf.ActivityLimit("bank API", per_key=1, key=lambda user: user)

    @app.activity(limit=limit)
    async def ask(user: str) -> str:
        return user

    @app.workflow
    async def order() -> str:
        return await ask("ann")

    async with asyncio.timeout(MOST_SECONDS), app.node("memory://"):
        service = make_service(app, ServiceOptions(port=0, is_open=True), open_access)
        async with listening(service) as port, open_page(browser, f"http://127.0.0.1:{port}") as page:
            run = await app.start(order)
            await run.result()
            await page.goto(f"/runs/{run.run_id}")
            await page.get_by_role("button", name=", Activity").first.click()
            detail = page.locator(".detail-body")
            await expect(detail).to_contain_text("bank API, key ann")
            await expect(detail).not_to_contain_text("limited:")


@pytest.mark.contract("ACT-7")
async def test_run_that_waits_for_a_place_says_how_far_it_has_come(browser: Browser) -> None:
    """On its page, and in the list."""
    app, door = hf.App("shop"), asyncio.Event()

    @app.activity(limit=hf.ActivityLimit("bank API", at_once=1))
    async def ask(user: str) -> str:
        await door.wait()
        return user

    @app.workflow
    async def order(user: str) -> str:
        return await ask(user)

    async with asyncio.timeout(MOST_SECONDS), app.node("memory://"):
        service = make_service(app, ServiceOptions(port=0, is_open=True), open_access)
        async with listening(service) as port, open_page(browser, f"http://127.0.0.1:{port}") as page:
            runs = []
            for user in ("ann", "bob", "eve"):
                runs.append(await app.start(order, user))
                await wait_for_event(runs[-1], "StepStarted")
            words = "Waits for a place of bank API: 1 of 1 taken, 2nd in line"
            await page.goto(f"/runs/{runs[2].run_id}")
            await expect(page.locator("main")).to_contain_text(words)
            await page.goto("/runs")
            await expect(page.locator("main")).to_contain_text(words)
            await expect(page.locator("main")).to_contain_text("1st in line")
            door.set()
            for run in runs:
                await run.result()
