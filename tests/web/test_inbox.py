"""Inbox: tasks that people answer, signals that they send, and messages that nobody could handle."""

from collections.abc import AsyncIterator

import pytest
import pytest_asyncio
from playwright.async_api import Browser, Locator, Page, Route, expect

from tests.web.browser import open_page
from tests.web.inbox_site import InboxSite, overflow_of, serve_inbox, sign_in
from tests.web.site import HOSTILE
from tests.web.test_access import barriers

NARROW = {"width": 375, "height": 740}


@pytest_asyncio.fixture(loop_scope="session")
async def inbox() -> AsyncIterator[InboxSite]:
    """Return a desk that is open to everybody."""
    async with serve_inbox() as inbox:
        yield inbox


@pytest_asyncio.fixture(loop_scope="session")
async def screen(browser: Browser, inbox: InboxSite) -> AsyncIterator[Page]:
    """Return a page at that desk."""
    async with open_page(browser, inbox.address) as page:
        yield page


def pane_of(page: Page) -> Locator:
    """Return the part that shows one task."""
    return page.get_by_role("region", name="The task")


def rows_of(page: Page) -> Locator:
    """Return the tasks in the list."""
    return page.locator(".task-row")


async def fill_refund(pane: Locator) -> None:
    """Answer the form of a refund, as far as is needed."""
    await pane.get_by_role("group", name="Approved").get_by_text("Yes").click()
    await pane.get_by_text("late", exact=True).click()


@pytest.mark.contract("TSK-1", "API-3")
async def test_a_task_appears_by_itself_and_is_claimed_discussed_and_answered(screen: Page, inbox: InboxSite) -> None:
    await screen.goto("/inbox")
    await expect(screen.get_by_text("Nothing waits for you")).to_be_visible()
    task = await inbox.task("refund", order="o-1", customer="Ada")
    await rows_of(screen).click()
    assert screen.url.endswith(f"/inbox/{task['task_id']}")
    pane = pane_of(screen)
    await expect(pane.locator(".asked")).to_contain_text("Ada")
    await pane.get_by_label("Acting as").fill("ann")
    await pane.get_by_role("button", name="Claim").click()
    await expect(pane.locator(".task-marks")).to_contain_text("ann")
    await pane.get_by_label("Comment", exact=True).fill("I call her first.")
    await pane.get_by_role("button", name="Comment").click()
    await expect(pane.locator("blockquote")).to_have_text("I call her first.")
    await pane.get_by_role("button", name="Release").click()
    await expect(pane.get_by_role("button", name="Claim")).to_be_visible()
    await fill_refund(pane)
    await pane.get_by_role("button", name="Complete").click()
    await expect(pane.locator(".outcome")).to_contain_text("Completed by ann")
    await expect(pane.locator(".outcome .given")).to_contain_text("late")
    await expect(pane.locator(".happenings li")).to_have_count(5)
    said = await pane.locator(".happenings li").all_inner_texts()
    words = ["opened", "ann took it", "ann said", "ann gave it back", "ann completed it"]
    assert [word in text for word, text in zip(words, said, strict=True)] == [True] * 5, said
    await expect(rows_of(screen)).to_have_count(0)
    await expect(screen.locator(".inbox-tabs [aria-current] .count")).to_be_hidden()
    answered = [e["data"] for e in await inbox.events(task["run_id"]) if e["event_type"] == "TaskCompleted"]
    assert [(each["actor"], each["answer"]["reason"]) for each in answered] == [("ann", "late")]


async def test_what_the_service_does_not_take_is_said_beside_its_field(screen: Page, inbox: InboxSite) -> None:
    task = await inbox.task("refund", order="o-1", customer="Ada")
    await screen.goto(f"/inbox/{task['task_id']}")
    pane = pane_of(screen)
    await pane.get_by_role("button", name="Complete").click()
    await expect(pane.get_by_text("Please choose.")).to_have_count(2)
    await fill_refund(pane)
    await pane.get_by_label("Voucher").fill("not a voucher")
    await pane.get_by_role("button", name="Complete").click()
    field = pane.locator("[data-name=voucher]")
    await expect(field.locator(".error")).to_have_text("Invalid UUID")
    await expect(pane.get_by_label("Voucher")).to_be_focused()
    assert (await inbox.ask("GET", f"/v1/tasks/{task['task_id']}"))["status"] == "OPEN"
    await pane.get_by_label("Voucher").fill("")
    await pane.get_by_role("button", name="Complete").click()
    await expect(pane.locator(".outcome")).to_contain_text("Completed by anonymous")


@pytest.mark.contract("TSK-2")
async def test_who_comes_second_is_told_who_was_first_and_when(screen: Page, inbox: InboxSite) -> None:
    async def silence(route: Route) -> None:
        await route.abort()

    task = await inbox.task("refund", order="o-1", customer="Ada")
    await screen.route("**/v1/stream**", silence)  # the page is not notified of the other's answer
    await screen.goto(f"/inbox/{task['task_id']}")
    pane = pane_of(screen)
    await fill_refund(pane)
    who = {"actor": "bob", "actor_roles": ["clerk"]}
    answer = {"approved": False, "reason": "goodwill"}
    await inbox.ask("POST", f"/v1/tasks/{task['task_id']}/complete", answer=answer, **who)
    await pane.get_by_role("button", name="Complete").click()
    outcome = pane.locator(".outcome")
    await expect(outcome).to_contain_text("Completed by bob")
    stands = await inbox.ask("GET", f"/v1/tasks/{task['task_id']}")
    await expect(outcome.locator("time")).to_have_attribute("datetime", stands["completed_at"])
    await expect(outcome).to_contain_text("What you were filling in was not sent.")
    await expect(outcome.locator(".given")).to_contain_text("goodwill")


@pytest.mark.contract("TSK-2")
async def test_an_answer_of_somebody_else_is_seen_while_one_fills_in_the_form(screen: Page, inbox: InboxSite) -> None:
    task = await inbox.task("refund", order="o-1", customer="Ada")
    await screen.goto(f"/inbox/{task['task_id']}")
    pane = pane_of(screen)
    await pane.get_by_label("Note").fill("a long story")
    path = f"/v1/tasks/{task['task_id']}"
    await inbox.ask("POST", f"{path}/comments", text="careful", actor="bob", actor_roles=["clerk"])
    await expect(pane.locator("blockquote")).to_have_text("careful")
    await expect(pane.get_by_label("Note")).to_have_value("a long story")
    await inbox.ask("POST", f"{path}/claim", actor="bob", actor_roles=["clerk"])
    refused = await inbox.http.post(f"{path}/claim", json={"actor": "cid", "actor_roles": ["clerk"]})
    assert refused.status_code == 409
    await expect(pane.locator(".happenings .refused")).to_contain_text("cid could not claim")
    answer = {"approved": True, "reason": "late"}
    await inbox.ask("POST", f"{path}/complete", answer=answer, actor="bob", actor_roles=["clerk"])
    await expect(pane.locator(".outcome")).to_contain_text("Completed by bob")


@pytest.mark.contract("TSK-1")
async def test_several_people_approve_and_the_page_shows_how_far_they_are(screen: Page, inbox: InboxSite) -> None:
    task = await inbox.task("contract", supplier="Nordwind")
    await screen.goto(f"/inbox/{task['task_id']}")
    pane = pane_of(screen)
    await expect(pane.locator(".approvals")).to_have_text("0 of 2 answers, 3 asked")
    for name, said in (("ann", "1 of 2 answers, 3 asked"), ("bob", None)):
        await pane.get_by_label("Acting as").fill(name)
        await pane.get_by_label("Acting as").blur()
        await pane.get_by_text("Yes", exact=True).click()
        await pane.get_by_role("button", name="Complete").click()
        if said:
            await expect(pane.locator(".approvals")).to_have_text(said)
            await expect(pane.get_by_text("You have answered.")).to_be_visible()
    await expect(pane.locator(".outcome")).to_contain_text("Completed by bob")
    await expect(pane.locator(".happenings")).to_contain_text("ann answered true")


@pytest.mark.contract("TSK-1")
async def test_the_filter_is_in_the_address_and_what_is_late_or_escalated_is_marked(
    screen: Page, inbox: InboxSite
) -> None:
    await inbox.task("refund", order="o-1", customer="Ada", due_s=0.01, escalate_s=0.01)
    await inbox.task("refund", order="o-2", customer="Grace")
    await inbox.task("contract", supplier="Nordwind")
    await screen.goto("/inbox")
    await expect(rows_of(screen)).to_have_count(3)
    first = rows_of(screen).first
    await expect(first).to_contain_text("Overdue")
    await expect(first).to_contain_text("Escalated")
    await screen.get_by_label("Workflow").select_option("refund")
    await expect(rows_of(screen)).to_have_count(2)
    await screen.get_by_label("Search names and contents").fill("grace")
    await expect(rows_of(screen)).to_have_count(1)
    assert "workflow=refund" in screen.url
    assert "q=grace" in screen.url
    await inbox.task("refund", order="o-3", customer="Grace Murray")
    await inbox.task("refund", order="o-4", customer="Edsger")
    await expect(rows_of(screen)).to_have_count(2)
    await screen.reload()
    await expect(rows_of(screen)).to_have_count(2)
    await screen.goto("/inbox?due=overdue")
    await expect(rows_of(screen)).to_have_count(1)
    await screen.goto("/inbox?role=lead")
    await expect(rows_of(screen)).to_have_count(1)
    await screen.goto("/inbox?q=nobody")
    await screen.get_by_role("button", name="Clear the filter").click()
    await expect(rows_of(screen)).to_have_count(5)


@pytest.mark.contract("TSK-1", "API-4")
async def test_people_see_what_concerns_them_and_only_what_they_may_do(browser: Browser) -> None:
    async with serve_inbox(is_guarded=True) as inbox, open_page(browser, inbox.address) as page:
        refund = await inbox.task("refund", order="o-1", customer="Ada")
        await inbox.task("contract", supplier="Nordwind")
        await sign_in(page, await inbox.token("ann", roles=["clerk"]), "/inbox")
        await expect(rows_of(page)).to_have_count(1)
        await page.get_by_label("Search names and contents").fill("nothing of the kind")
        await expect(page.get_by_text("tasks of other roles are seen by those who have them")).to_be_visible()
        await expect(page.get_by_text("You have the roles clerk, operator")).to_be_visible()
        await expect(pane_of(page)).to_be_hidden()  # there is no task to choose
        await page.get_by_role("button", name="Clear the filter").click()
        await rows_of(page).click()
        pane = pane_of(page)
        await pane.get_by_role("button", name="Assign…").click()
        await page.get_by_role("dialog").get_by_label("To whom").fill("bob")
        await page.get_by_role("dialog").get_by_role("button", name="Assign").click()
        await expect(pane.get_by_text("bob has this task.")).to_be_visible()
        await expect(pane.get_by_role("button", name="Complete")).to_have_count(0)
        await pane.get_by_role("button", name="Take over").click()
        await expect(pane.get_by_role("button", name="Complete")).to_be_visible()
        async with open_page(browser, inbox.address) as other:
            viewer = await inbox.token("vic", "viewer", roles=["clerk"])
            await sign_in(other, viewer, f"/inbox/{refund['task_id']}")
            await expect(pane_of(other).get_by_text("may look at tasks, and not answer them")).to_be_visible()
            await expect(pane_of(other).get_by_role("button")).to_have_count(0)
        async with open_page(browser, inbox.address) as other:
            narrow = await inbox.token("sue", "", scopes=["signals:read"])
            await sign_in(other, narrow, "/inbox")
            await expect(other.get_by_text("tasks:read")).to_be_visible()
            await expect(other.get_by_role("link", name="Dead letters")).to_have_count(0)


@pytest.mark.contract("API-3", "API-4")
async def test_who_may_only_answer_tasks_begins_in_the_inbox_and_sees_no_other_place(browser: Browser) -> None:
    async with serve_inbox(is_guarded=True) as inbox, open_page(browser, inbox.address) as page:
        await inbox.task("refund", order="o-1", customer="Ada")
        token = await inbox.token("carol", "", scopes=["tasks:read", "tasks:write"], roles=["clerk"])
        await sign_in(page, token, "/")
        await expect(rows_of(page)).to_have_count(1)
        await expect(page).to_have_url(f"{inbox.address}/inbox")
        await expect(page).to_have_title("Inbox · Holdfast")
        places = page.get_by_role("navigation", name="Places").get_by_role("link")
        await expect(places).to_have_text(["Inbox"])
        await rows_of(page).click()
        await fill_refund(pane_of(page))
        await pane_of(page).get_by_role("button", name="Complete").click()
        await expect(pane_of(page).locator(".outcome")).to_contain_text("Completed by carol")
        await page.get_by_role("link", name="Holdfast,").click()
        await expect(page).to_have_url(f"{inbox.address}/inbox")


@pytest.mark.contract("SIG-9", "SIG-10", "SIG-12")
async def test_who_waits_for_a_signal_is_found_and_sent_one_by_form(screen: Page, inbox: InboxSite) -> None:
    run_id = await inbox.waiting("order", order_id="o-1")
    await screen.goto("/inbox/signals")
    await expect(screen.locator(".wait")).to_have_count(1)
    await inbox.waiting("sync", customer="c")
    await expect(screen.locator(".wait")).to_have_count(2)
    await screen.locator(".wait", has_text=run_id).get_by_role("button", name="Send…").click()
    dialog = screen.get_by_role("dialog")
    await dialog.get_by_text("Yes", exact=True).click()
    await dialog.get_by_label("By").fill("ann")
    await dialog.get_by_role("button", name="Send").click()
    await expect(screen.get_by_text("The run took the signal (event")).to_be_visible()
    await expect(screen.locator(".wait")).to_have_count(1)
    received = [e["data"] for e in await inbox.events(run_id) if e["event_type"] == "SignalReceived"]
    assert received[0]["payload"]["by"] == "ann"
    await screen.get_by_label("Signal", exact=True).fill("nothing")
    await screen.get_by_label("Signal", exact=True).press("Enter")
    await expect(screen.get_by_text("No run waits for “nothing”")).to_be_visible()


@pytest.mark.contract("SIG-9")
async def test_the_mailbox_shows_what_nobody_has_taken_and_since_when(screen: Page, inbox: InboxSite) -> None:
    run_id = await inbox.waiting("order", order_id="o-1")
    await inbox.send(run_id, "unknown", {"text": HOSTILE})
    await screen.goto("/inbox/signals")
    await screen.get_by_role("button", name="Mailbox").click()
    mail = screen.get_by_role("region", name="Mailbox")
    await expect(mail).to_contain_text("unknown")
    await expect(mail).to_contain_text("<script>window.hit='script'</script>")
    await expect(mail.locator("time")).to_have_count(1)
    assert f"run={run_id}" in screen.url
    await mail.get_by_role("textbox", name="Run").fill("nobody")
    await mail.get_by_role("button", name="Look").click()
    await expect(mail.get_by_text("There is nothing here")).to_be_visible()
    assert await screen.evaluate("window.hit") is None


@pytest.mark.contract("SIG-9")
async def test_signals_that_nobody_has_taken_are_found_over_all_runs(screen: Page, inbox: InboxSite) -> None:
    order = await inbox.start("order", reference="ORD-7", order_id="o-1")
    await inbox.until(f"/v1/runs/{order}/waits", lambda items: len(items) == 1)
    sync = await inbox.waiting("sync", customer="c")
    await inbox.send(order, "hurry", 1)
    await inbox.send(sync, "other", 2)
    await screen.clock.install()
    await screen.goto("/inbox/signals")
    wait = screen.locator(".wait", has=screen.get_by_role("link", name="ORD-7"))
    await expect(wait).to_contain_text("order · began to wait")
    mail = screen.get_by_role("region", name="Mailbox")
    await expect(mail.locator(".letters > li")).to_have_count(2)
    await expect(mail.locator(".letters > li").first).to_contain_text("hurryORD-7orderhere since")
    await expect(mail.locator(".letters > li").last).to_contain_text("sync")
    await inbox.send(sync, "third", 3)
    await screen.clock.run_for(10_000)  # what is only kept changes no run, so it is looked for now and then
    await expect(mail.locator(".letters > li")).to_have_count(3)
    await inbox.send(order, "approval", {"approved": True, "by": "ann"})
    await expect(mail.locator(".letters > li")).to_have_count(2)
    await mail.get_by_label("Of finished runs too").check()
    await expect(mail.locator(".letters > li").first).to_contain_text("Completedno wait will take it")
    assert screen.url.endswith("finished=1")
    await mail.get_by_role("link", name="ORD-7").click()
    await expect(screen.get_by_role("heading", name="ORD-7")).to_be_visible()


@pytest.mark.contract("MSG-3", "API-3")
async def test_a_letter_that_somebody_else_settles_leaves_the_list(screen: Page, inbox: InboxSite) -> None:
    await inbox.dead_letter()
    await screen.goto("/inbox/letters")
    await expect(screen.locator(".dead-letter")).to_have_count(1)
    [letter] = (await inbox.ask("GET", "/v1/dead-letters"))["items"]
    await inbox.ask("POST", f"/v1/dead-letters/{letter['letter_id']}/drop", actor="bob")
    await expect(screen.get_by_text("No dead letters")).to_be_visible()
    await expect(screen.locator(".inbox-tabs [aria-current] .count")).to_be_hidden()
    await screen.get_by_label("Settled ones too").check()
    await expect(screen.get_by_text("Dropped by bob")).to_be_visible()


@pytest.mark.contract("MSG-3")
async def test_dead_letters_are_read_and_settled_after_a_question(screen: Page, inbox: InboxSite) -> None:
    await screen.goto("/inbox/letters")
    await expect(screen.get_by_text("No dead letters")).to_be_visible()
    run_id = await inbox.dead_letter()
    letter = screen.locator(".dead-letter")
    await expect(letter).to_contain_text("Retries exhausted")
    await expect(letter.get_by_role("link", name=run_id)).to_be_visible()
    await letter.get_by_text("The message", exact=True).click()
    await expect(letter.locator(".json")).to_contain_text("poison")
    await letter.get_by_role("button", name="Drop…").click()
    dialog = screen.get_by_role("dialog")
    await dialog.get_by_role("button", name="Back").click()
    await expect(letter).to_have_count(1)
    await letter.get_by_role("button", name="Requeue").click()
    await dialog.get_by_role("button", name="Requeue").click()
    await expect(screen.get_by_text("Put back.")).to_be_visible()
    settled = await inbox.until("/v1/dead-letters", lambda items: len(items) == 2, settled="true")
    assert [each["settled"] for each in settled] == ["requeue", None]
    await letter.get_by_role("button", name="Drop…").click()
    await dialog.get_by_role("button", name="Drop", exact=True).click()
    await expect(screen.get_by_text("No dead letters")).to_be_visible()
    await screen.get_by_label("Settled ones too").check()
    await expect(screen.get_by_text("Dropped by")).to_be_visible()
    await expect(screen.get_by_text("Put back by")).to_be_visible()


@pytest.mark.contract("MSG-3")
async def test_all_dead_letters_that_the_filter_finds_are_settled_at_once(screen: Page, inbox: InboxSite) -> None:
    for _ in range(3):
        await inbox.dead_letter()
    await screen.goto("/inbox/letters")
    await expect(screen.locator(".dead-letter")).to_have_count(3)
    await screen.get_by_role("button", name="Requeue or drop all of these…").click()
    dialog = screen.get_by_role("dialog")
    await dialog.get_by_role("button", name="Requeue 3").click()
    await expect(screen.get_by_text("3 put back.")).to_be_visible()
    count = "/v1/dead-letters"
    await inbox.until(count, lambda items: len(items) == 6, settled="true")  # they still do not fit
    await screen.get_by_label("Reason").select_option("retries exhausted")
    await expect(screen.locator(".dead-letter")).to_have_count(3)
    await screen.get_by_role("button", name="Requeue or drop all of these…").click()
    await dialog.get_by_label("What to do").select_option("drop")
    await expect(dialog).to_contain_text("cannot be undone")
    await dialog.get_by_role("button", name="Drop 3").click()
    await expect(screen.get_by_text("None for this reason")).to_be_visible()
    await expect(screen.locator(".inbox-tabs [aria-current] .count")).to_be_hidden()  # though the list shows a part
    assert (await inbox.ask("GET", count))["items"] == []


async def test_values_from_outside_are_text_and_long_ones_do_not_break_the_page(
    browser: Browser, inbox: InboxSite
) -> None:
    long = "x" * 5_000
    task = await inbox.task("refund", order=HOSTILE, customer=HOSTILE, comment=long)
    await inbox.ask("POST", f"/v1/tasks/{task['task_id']}/comments", text=HOSTILE, actor=HOSTILE, actor_roles=["clerk"])
    async with open_page(browser, inbox.address, size=NARROW) as page:
        for path in ("/inbox", f"/inbox/{task['task_id']}", f"/inbox?role={HOSTILE.replace('#', '')}"):
            await page.goto(path)
            await expect(page.locator(".task-row, .asked, .state")).not_to_have_count(0)
            assert await overflow_of(page) == 0
        await page.goto(f"/inbox/{task['task_id']}")
        await expect(pane_of(page).locator("blockquote")).to_have_text(HOSTILE)
        await expect(pane_of(page).locator(".asked")).to_contain_text(HOSTILE)
        assert await page.evaluate("window.hit") is None
        assert await page.locator("main img, main script").count() == 0


async def test_somebody_with_a_phone_approves(browser: Browser, inbox: InboxSite) -> None:
    task = await inbox.task("refund", order="o-1", customer="Ada")
    await inbox.task("contract", supplier="Nordwind")
    async with open_page(browser, inbox.address, size=NARROW) as page:
        await page.goto("/inbox")
        await expect(rows_of(page)).to_have_count(2)
        await expect(pane_of(page)).to_be_hidden()
        await rows_of(page).first.click()
        await expect(rows_of(page).first).to_be_hidden()
        button = pane_of(page).get_by_role("button", name="Complete")
        await expect(button).to_be_in_viewport()
        box = await button.bounding_box()
        assert box is not None
        assert box["height"] >= 44
        await fill_refund(pane_of(page))
        await button.click()
        await expect(pane_of(page).locator(".outcome")).to_contain_text("Completed by")
        assert await overflow_of(page) == 0
        await pane_of(page).get_by_role("button", name="Inbox").click()
        await expect(rows_of(page)).to_have_count(1)
        for path in ("/inbox/signals", "/inbox/letters", "/health"):
            await page.goto(path)
            await expect(page.locator(".state, .waits, .graph").first).to_be_visible()
            assert await overflow_of(page) == 0, path
    assert (await inbox.ask("GET", f"/v1/tasks/{task['task_id']}"))["status"] == "COMPLETED"


async def test_a_task_is_answered_with_the_keyboard_alone(screen: Page, inbox: InboxSite) -> None:
    await inbox.task("contract", supplier="Nordwind")
    await screen.goto("/inbox")
    await expect(rows_of(screen)).to_have_count(1)
    await screen.get_by_label("Due").focus()
    await screen.keyboard.press("Tab")
    await expect(rows_of(screen)).to_be_focused()
    await screen.keyboard.press("Enter")
    await expect(pane_of(screen).get_by_label("Acting as")).to_be_visible()
    await expect(rows_of(screen)).to_be_focused()
    for _ in range(20):
        if await screen.evaluate("document.activeElement.type === 'radio'"):
            break
        await screen.keyboard.press("Tab")
    await screen.keyboard.press("Space")
    for _ in range(5):
        if await screen.evaluate("document.activeElement.type === 'submit'"):
            break
        await screen.keyboard.press("Tab")
    await screen.keyboard.press("Enter")
    await expect(pane_of(screen).locator(".approvals")).to_have_text("1 of 2 answers, 3 asked")


@pytest.mark.contract("API-3")
async def test_the_service_goes_away_and_the_list_catches_up(browser: Browser) -> None:
    async with serve_inbox(is_up=False) as inbox, open_page(browser, inbox.address) as page:
        async with inbox.up():
            await inbox.task("refund", order="o-1", customer="Ada")
            await page.goto("/inbox")
            await expect(rows_of(page)).to_have_count(1)
        await expect(page.get_by_text("Connection lost, catching up")).to_be_visible()
        await expect(rows_of(page)).to_have_count(1)
        async with inbox.up():
            await inbox.task("refund", order="o-2", customer="Grace")
            await expect(rows_of(page)).to_have_count(2)
            await expect(page.locator(".banner")).to_be_hidden()


async def test_a_task_that_is_not_there_is_said_so(screen: Page, inbox: InboxSite) -> None:
    await screen.goto("/inbox/nothing-of-the-kind")
    await expect(pane_of(screen).get_by_text("There is nothing here")).to_be_visible()


@pytest.mark.parametrize("scheme", ["light", "dark"])
async def test_no_part_of_it_has_a_barrier(browser: Browser, inbox: InboxSite, scheme: str) -> None:
    task = await inbox.task("refund", order="o-1", customer="Ada", due_s=0.01, escalate_s=0.01)
    await inbox.task("contract", supplier="Nordwind")
    await inbox.dead_letter()
    places = {
        f"/inbox/{task['task_id']}": ".happenings li",
        "/inbox/signals": ".wait",
        "/inbox/letters": ".dead-letter",
        "/health": ".alerts, .panel",
    }
    problems: list[str] = []
    async with open_page(browser, inbox.address, scheme=scheme) as page:
        for place, shown in places.items():
            await page.goto(place)
            await expect(page.locator(shown).first).to_be_visible()
            problems += [f"{place}: {each}" for each in await barriers(page)]
        await page.goto("/inbox/signals")
        await page.get_by_role("button", name="Send…").first.click()
        await expect(page.get_by_role("dialog").get_by_label("By")).to_be_visible()
        problems += [f"send: {each}" for each in await barriers(page)]
    assert not problems, "\n".join(problems)


@pytest.mark.contract("ACT-4", "TSK-1", "PRJ-1")
async def test_an_operator_reads_what_is_known_of_an_unresolved_step_and_decides(
    screen: Page, inbox: InboxSite
) -> None:
    task = await inbox.task("payment", order="ORD-7")
    await screen.goto(f"/runs/{task['run_id']}")
    await expect(screen.get_by_text("Step unresolved").first).to_be_visible()
    await screen.get_by_role("link", name="Open the task").click()
    await screen.wait_for_url("**/inbox/**")
    pane = pane_of(screen)
    await expect(pane.locator("h2")).to_have_text("reconcile charge")
    asked = pane.locator(".asked")
    for text in ("charge-ORD-7", "the payment service does not answer"):
        await expect(asked).to_contain_text(text)
    rows = asked.locator(".asked-table tbody tr")
    await expect(rows).to_have_count(2)
    await expect(rows.first).to_contain_text("ConnectionError: connection reset by peer")
    await pane.get_by_text("happened", exact=True).click()
    await pane.get_by_label("Result").fill('"receipt-7"')
    await pane.get_by_role("button", name="Complete").click()
    await expect(pane.locator(".outcome")).to_contain_text("Completed by")
    events = await inbox.events(task["run_id"])
    [done] = [event["data"] for event in events if event["event_type"] == "StepCompleted"]
    assert (done["result"], done["confirmed_by"]) == ("receipt-7", "operator")
    assert events[-1]["event_type"] == "RunCompleted"


@pytest.mark.contract("ACT-4", "API-4")
async def test_operators_are_asked_about_unresolved_steps_and_viewers_are_not(browser: Browser) -> None:
    async with serve_inbox(is_guarded=True) as inbox:
        task = await inbox.task("payment", order="ORD-8")
        async with open_page(browser, inbox.address) as page:
            await sign_in(page, await inbox.token("olga", "operator"), "/inbox")
            await expect(rows_of(page)).to_have_count(1)
            await page.goto(f"/inbox/{task['task_id']}")
            await pane_of(page).get_by_text("did-not-happen", exact=True).click()
            await expect(pane_of(page).get_by_role("button", name="Complete")).to_be_enabled()
        async with open_page(browser, inbox.address) as page:
            await sign_in(page, await inbox.token("vera", "viewer"), "/inbox")
            await expect(page.get_by_text("Nothing waits for you")).to_be_visible()
