"""The site for the tests of Inbox and Health: runs that ask people, wait for signals, fill queues and are queued."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from datetime import timedelta
from typing import Annotated, Any, Literal
from uuid import UUID

from msgspec import Meta, Struct
from msgspec.structs import replace
from playwright.async_api import Page

import holdfast as hf
from holdfast.app import App
from holdfast.program.tasks import Escalation
from holdfast.service.auth.tokens import TokenAccess, make_token
from holdfast.service.context import Service, make_service, open_access
from holdfast.service.http.server import bind, listening
from holdfast.service.options import ServiceOptions
from holdfast.testing.samples import message
from tests.web.site import MOST_SECONDS, Approval, Orchard, Site


class Refund(Struct, frozen=True):
    """Return whether the money goes back. What a UUID is the service knows, and the page does not."""

    approved: bool
    reason: Literal["damaged", "late", "goodwill"]
    note: Annotated[str, Meta(max_length=400)] = ""
    voucher: UUID | None = None


class InboxApp(Orchard):
    """An app whose runs need people."""

    def __init__(self) -> None:
        super().__init__()
        self.app = _make_app()


def _make_app() -> App:
    app = App("orchard", limits=hf.Limits(poison_retries=1))

    @app.activity(queue="labels")
    async def label() -> None:
        """Wait for a node that nobody starts."""

    @app.activity
    async def pick(number: int) -> int:
        return number

    @app.workflow
    async def refund(
        order: str, customer: str, comment: str = "", due_s: float = 7200, escalate_s: float = 3600
    ) -> Any:
        """Ask a clerk whether the money goes back."""
        payload = {"order": order, "customer": customer, "comment": comment}
        later = Escalation(after=timedelta(seconds=escalate_s), roles=["clerk", "lead"])
        due = timedelta(seconds=due_s)
        return await hf.task("Approve a refund", Refund, payload=payload, roles=["clerk"], due=due, escalate=later)

    async def find_charge(order: str) -> hf.Indeterminate:
        return hf.Indeterminate("the payment service does not answer")

    @app.activity(idempotency_key=lambda order: f"charge-{order}", verify=find_charge, retry=hf.Retry(initial_ms=1))
    async def charge(order: str, cents: int) -> str:
        raise ConnectionError("connection reset by peer")

    @app.workflow
    async def payment(order: str) -> str:
        """Charge a card, and never learn whether it was charged."""
        return await charge(order, 4200)

    @app.workflow
    async def contract(supplier: str) -> Any:
        """Ask two directors of three."""
        payload = {"supplier": supplier, "terms": {"net_days": 30}}
        return await hf.task("Sign the contract", bool, payload=payload, roles=["director"], approvals=2, of=3)

    @app.workflow(signals={"approval": Approval}, allow_other_signals=True)
    async def order(order_id: str) -> str:
        """Wait for an approval."""
        return (await hf.wait_signal("approval", Approval, timeout=timedelta(hours=40))).by

    @app.workflow(at_once=1)
    async def sync(customer: str) -> Any:
        """Wait, one at a time."""
        return await hf.wait_signal("synced")

    @app.workflow
    async def printing() -> None:
        """Put two jobs into a queue."""
        await asyncio.gather(label(), label())

    @app.workflow
    async def picking(steps: int = 3) -> int:
        """Do a few steps."""
        return sum([await pick(number) for number in range(steps)])

    return app


class InboxSite(Site):
    """The app behind a socket. Its service can be spoken to while it is up."""

    service: Service

    @asynccontextmanager
    async def up(self) -> AsyncIterator[None]:
        """Answer, while the context is open."""
        self.service = make_service(self.orchard.app, self._options, self._authenticate)
        async with listening(self.service):
            yield

    async def ask(self, verb: str, path: str, **body: Any) -> Any:
        """Ask for an operation, past the page."""
        if verb == "POST":
            response = await self.http.post(path, json=body)
        else:
            response = await self.http.get(path, params=body)
        assert response.is_success, response.text
        return response.json()

    async def until(self, path: str, is_so: Callable[[list[Any]], bool], **fields: Any) -> list[Any]:
        """Return a list when it is as it should be."""
        items: list[Any] | None = None
        while items is None or not is_so(items):
            items = (await self.ask("GET", path, **fields))["items"]
        return items

    async def task(self, workflow: str, **input: Any) -> dict[str, Any]:
        """Start a run that asks somebody, and return its task."""
        run_id = await self.start(workflow, **input)
        [task] = await self.until("/v1/tasks", lambda items: len(items) == 1, run_id=run_id)
        return dict(task)

    async def waiting(self, workflow: str, **input: Any) -> str:
        """Start a run that waits for a signal, and return its id when it does."""
        run_id = await self.start(workflow, **input)
        await self.until(f"/v1/runs/{run_id}/waits", lambda items: len(items) == 1)
        return run_id

    async def dead_letter(self) -> str:
        """Return the run of a message that cannot be handled, when it is a dead letter."""
        run_id = await self.waiting("order", order_id="o-dead")
        store = self.orchard.app.runtime().store
        await store.deliver([replace(message(run_id, "poison"), expected_version=99)])
        await self.until("/v1/dead-letters", lambda items: len(items) == 1, run_id=run_id)
        return run_id

    async def token(self, name: str, role: str = "operator", **fields: Any) -> str:
        """Make a token on the store."""
        return (await make_token(self.orchard.app.runtime().store, name, role=role, **fields))[0]


@asynccontextmanager
async def serve_inbox(*, is_guarded: bool = False, is_up: bool = True) -> AsyncIterator[InboxSite]:
    """Serve the app; with `is_guarded` for those who have tokens only."""
    inbox = InboxApp()
    with bind(ServiceOptions(port=0)) as found:
        port = found.getsockname()[1]
    options = ServiceOptions(
        port=port, is_open=not is_guarded, watch_poll_s=0.05, list_rest_s=0.02, drain_s=1.0, tokens_s=0.0
    )
    async with asyncio.timeout(MOST_SECONDS), inbox.app.node("memory://"):
        site = InboxSite(inbox, options, TokenAccess(inbox.app, 0.0) if is_guarded else open_access)
        if is_guarded:
            site.http.headers["authorization"] = f"Bearer {await site.token('root', 'admin')}"
        try:
            if is_up:
                async with site.up():
                    yield site
            else:
                yield site
        finally:
            await site.http.aclose()


async def sign_in(page: Page, token: str, path: str) -> None:
    """Go somewhere as somebody."""
    await page.goto(path)
    await page.get_by_label("Token").fill(token)
    await page.get_by_role("button", name="Sign in").click()


async def overflow_of(page: Page) -> int:
    """Return by how many pixels the page is wider than the screen."""
    return int(await page.evaluate("document.documentElement.scrollWidth - document.documentElement.clientWidth"))
