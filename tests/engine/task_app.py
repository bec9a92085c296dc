"""An app that asks humans, and the humans."""

from dataclasses import dataclass
from typing import Any, TypedDict

import msgspec

import holdfast as hf
from holdfast.core.messages import Actor
from holdfast.engine.inbox.tasks import TaskView
from holdfast.run import RunHandle
from holdfast.workflow import Workflow
from tests.engine.harness import wait_for_event

ANN = Actor("ann", ("clerk",))
BOB = Actor("bob", ("clerk",))
EVE = Actor("eve")
ROOT = Actor("root", is_admin=True)


@dataclass
class Approval:
    approved: bool
    note: str = ""


class Choice(msgspec.Struct):
    colour: str


class Size(TypedDict):
    width: int


def make_task_app(form: Any = Approval, **options: Any) -> tuple[hf.App, Workflow[[], Any]]:
    """Return an app with a workflow that asks for an approval, and returns the answer."""
    app = hf.App("asking", on_error="fail")

    @app.workflow
    async def asks() -> Any:
        return await hf.task("approve", form, **{"roles": ["clerk"], **options})

    return app, asks


async def open_task(app: hf.App, run: RunHandle[Any], times: int = 1) -> TaskView:
    """Wait for the run to ask, and return its open task."""
    await wait_for_event(run, "TaskCreated", times)
    [found] = await app.tasks.list(run_id=run.run_id, status="OPEN")
    return found
