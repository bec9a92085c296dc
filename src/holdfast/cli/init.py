"""`holdfast init`: a project with a workflow, its tests, and what is needed to run them."""

import re
from pathlib import Path

from holdfast.cli.exit_codes import OK
from holdfast.errors import Conflict, InvalidInput

NAME = re.compile(r"[a-z][a-z0-9_-]{0,62}")

FILES = {
    "pyproject.toml": """\
[project]
name = "{name}"
version = "0.1.0"
requires-python = ">=3.11"
dependencies = ["holdfast"]

[dependency-groups]
dev = ["pytest>=8", "pytest-asyncio>=1.0"]

[tool.pytest.ini_options]
asyncio_mode = "auto"
asyncio_default_fixture_loop_scope = "function"
pythonpath = ["."]
""",
    "app.py": '''\
"""An order that waits for approval, and is charged."""

from dataclasses import dataclass
from datetime import timedelta

import holdfast as hf

app = hf.App("{name}")


@dataclass
class Approval:
    """What the manager decides."""

    approved: bool
    by: str


@app.activity(retry=hf.Retry(max_attempts=5), timeout=30)
async def charge(order_id: str, cents: int) -> str:
    """Call the bank here. It may be called again after a crash: pass it a key by which it knows the order."""
    return f"receipt of {{order_id}}"


@app.workflow(signals={{"approval": Approval}})
async def order(order_id: str, cents: int) -> str:
    """Charge an order once it is approved; give up after two days."""
    try:
        approval = await hf.wait_signal("approval", Approval, timeout=timedelta(days=2))
    except TimeoutError:
        return "not approved in time"
    if not approval.approved:
        return f"rejected by {{approval.by}}"
    return await charge(order_id, cents)
''',
    "tests/test_app.py": '''\
"""The order, in virtual time."""

from app import Approval, app, charge, order
from holdfast.testing import TestNode


async def test_an_approved_order_is_charged() -> None:
    async with TestNode(app) as node:
        node.fake(charge, side_effect=[ConnectionError("the bank is away"), "receipt"])
        run = await app.start(order, "o-1", 4200)
        await run.signal("approval", Approval(approved=True, by="ann"))
        assert await run.result() == "receipt"


async def test_an_order_that_is_rejected_is_not_charged() -> None:
    async with TestNode(app) as node:
        run = await app.start(order, "o-2", 4200)
        await run.signal("approval", Approval(approved=False, by="bob"))
        assert await run.result() == "rejected by bob"
        assert node.calls(charge) == []


async def test_an_order_without_an_answer_ends_after_two_days() -> None:
    async with TestNode(app):
        run = await app.start(order, "o-3", 4200)
        assert await run.result() == "not approved in time"
''',
    "README.md": """\
# {name}

```sh
python -m venv .venv && . .venv/bin/activate
pip install /path/to/the/checkout pytest pytest-asyncio   # Holdfast is not on the package index yet
pytest                # the tests, in virtual time
holdfast dev app.py   # the app with its page, on http://127.0.0.1:8321/
holdfast run start order order_id=o-1 cents:=4200 --run-id o-1
holdfast run signal o-1 approval approved:=true by=ann
holdfast run result o-1
```
""",
    ".gitignore": ".venv/\n__pycache__/\n*.db\n*.db-shm\n*.db-wal\n",
}


def init(name: str, /) -> int:
    """Create a project: a folder with a workflow, its tests and a README. Existing files are never overwritten.

    Parameters
    ----------
    name: str
        What the project is called, and its folder: small letters, digits, - and _.
    """
    if not NAME.fullmatch(name):
        raise InvalidInput(
            f"a project's name consists of lower-case letters, digits, - and _, not {name!r}", field="name"
        )
    folder = Path(name)
    if folder.exists():
        raise Conflict(f"{name} exists already; choose another name")
    for file, text in FILES.items():
        (folder / file).parent.mkdir(parents=True, exist_ok=True)
        (folder / file).write_text(text.format(name=name), encoding="utf-8")
    print(f"{name}/ is made. Next:  cd {name} && pytest && holdfast dev app.py")
    return OK
