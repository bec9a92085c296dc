"""An incident, by the page alone: from the first look at Health to a board that is clean."""

from __future__ import annotations

from pathlib import Path

import pytest
from playwright.async_api import Browser, Locator, Page, expect

from tests.incident import MAILS, PARCELS, PAYMENTS, REVIEWS, Incident, incident
from tests.web.browser import open_page

pytestmark = [pytest.mark.process, pytest.mark.slow]


def finding(page: Page, words: str) -> Locator:
    """Return one line of what is wrong."""
    return page.locator("ul.verdict li", has_text=words)


async def look_at(page: Page, words: str) -> None:
    """Go from a finding to what it is about."""
    await page.get_by_role("link", name="Health").click()
    await finding(page, words).get_by_role("link", name="Look").click()


async def command_all(page: Page, words: str, count: int, command: str) -> None:
    """Go from a finding to its runs, and give all of them a command."""
    await look_at(page, words)
    await expect(page.locator(".list-note")).to_have_text(f"{count} shown")
    await page.get_by_label("Select all that are loaded").check()
    await page.get_by_role("button", name=f"{command}…").click()
    dialog = page.get_by_role("dialog")
    await dialog.get_by_label("Reason").fill("it is back")
    await dialog.get_by_role("button", name=f"{command}: {count} runs").click()
    await expect(dialog).to_have_count(0)
    await expect(page.get_by_label("Select all that are loaded")).not_to_be_checked()


@pytest.mark.contract("SIG-13", "OWN-3", "TSK-1")
async def test_an_incident_ends_with_a_clean_board(browser: Browser, tmp_path: Path) -> None:
    async with incident(tmp_path) as here, open_page(browser, here.address) as page:
        await page.goto("/")
        await page.get_by_label("Token").fill(here.token)
        await page.keyboard.press("Enter")
        await play(page, here)


async def play(page: Page, here: Incident) -> None:
    """Be the operator."""
    await page.get_by_role("link", name="Health").click()
    await expect(finding(page, "30 runs were paused by UnhandledError")).to_contain_text("KeyError: 'shelf'")
    await expect(finding(page, "taken over")).to_be_visible()
    levels = [await each.get_attribute("data-status") for each in await page.locator("ul.verdict li").all()]
    assert levels == ["FAILED"] * 3 + ["PAUSED"] * 4, "what is worst is first"
    await here.mend_outside()
    await command_all(page, "are tried again", MAILS, "Try now")
    await command_all(page, "a failed step: charge", PAYMENTS, "Retry step")
    await command_all(page, "have failed with ActivityFailed", PARCELS, "Retry from the failed step")
    await look_at(page, "PoisonTurn")
    await page.get_by_role("link", name="thumbnail").first.click()
    await page.get_by_role("button", name="Resume", exact=True).click()
    await expect(page.get_by_role("dialog")).to_contain_text("If that ends the process again")
    await page.get_by_role("dialog").get_by_role("button", name="Resume", exact=True).click()
    await expect(page.locator(".view .status").first).to_have_text("Completed")
    await look_at(page, "are overdue")
    await page.get_by_role("button", name=f"Answer or assign all {REVIEWS}…").click()
    dialog = page.get_by_role("dialog")
    await dialog.get_by_role("button", name=f"Assign {REVIEWS}").click()
    await expect(dialog.get_by_label("To whom")).to_be_focused()  # nothing is done without a name
    await dialog.get_by_label("What to do").select_option("complete")
    await dialog.get_by_label("Yes").check()
    await dialog.get_by_role("button", name=f"Complete {REVIEWS}").click()
    await expect(page.get_by_text("No task fits")).to_be_visible()
    await page.get_by_role("link", name="Health").click()
    left = page.locator("ul.verdict li").filter(has_not_text="taken over")
    await expect(left).to_have_text([])
    await expect(page.locator(".charts")).to_be_visible()
