"""The bytes of a secret are not on the page: neither in what it shows nor in what it was sent."""

import asyncio
import html

import pytest
from playwright.async_api import Browser, Response

from holdfast.core.redaction import Redactor
from holdfast.service.context import make_service, open_access
from holdfast.service.http.server import listening
from holdfast.service.options import ServiceOptions
from tests.leaky_app import VALUE, LeakyApp
from tests.secret_forms import leaks
from tests.web.browser import open_page
from tests.web.site import MOST_SECONDS


@pytest.mark.contract("SEC-1")
@pytest.mark.parametrize("redacts", [True, False], ids=["redacted", "switched off"])
async def test_no_page_shows_the_bytes_of_a_secret(
    browser: Browser, redacts: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not redacts:
        monkeypatch.setattr(Redactor, "text", lambda self, text: text)
        monkeypatch.setattr(Redactor, "json", lambda self, raw: raw)
    leaky, received, shown = LeakyApp(), list[bytes](), list[str]()

    async def keep(response: Response) -> None:
        if "/stream" not in response.url:
            received.append(await response.body())

    async with asyncio.timeout(MOST_SECONDS), leaky.app.node("memory://"):
        service = make_service(leaky.app, ServiceOptions(port=0, is_open=True), open_access)
        async with listening(service) as port, open_page(browser, f"http://127.0.0.1:{port}") as page:
            run, _ = await leaky.leak()
            answering: list[asyncio.Task[None]] = []
            page.on("response", lambda response: answering.append(asyncio.ensure_future(keep(response))))
            for path in (f"/runs/{run.run_id}", "/", "/inbox", "/health", "/audit"):
                await page.goto(path)
                await page.wait_for_load_state("load")
                if path.startswith("/runs/"):
                    await page.get_by_role("button", name=", Activity").first.wait_for()
                for step in await page.get_by_role("button", name=", Activity").all():
                    await step.click()
                    await page.locator(".detail-body").wait_for()
                    shown.append(html.unescape(await page.content()))
                    shown.append(await page.locator("body").inner_text())
                shown.append(await page.content())
            await asyncio.gather(*answering, return_exceptions=True)
    texts = {"page": "\n".join(shown).encode(), "answers": b"\n".join(received)}
    found = {place: leaks(text, VALUE) for place, text in texts.items()}
    if redacts:
        assert not any(found.values()), found
        assert b"[redacted: stripe/key]" in texts["page"]
    else:
        assert "plain" in found["page"]
        assert "base64" in found["page"]
