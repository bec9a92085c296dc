"""What pages with whole programs show: their programs run as they stand."""

import re
import runpy
import subprocess
import sys
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

import holdfast as hf

DOCS = Path(__file__).parents[2] / "docs"
FOUND = """\
cents>1000 reference.customer=42 [('order', {'cents': 1500})]
region=eu [('ship', {'region': 'eu'})]
"""


@pytest.mark.parametrize(
    ("page", "shown"),
    [
        ("outages.md", "receipt of o-1 True 1\n"),
        ("coming-from.md", "mailed receipt of o-1\nreceipt of o-1\n"),
        (
            "streams.md",
            "1 'It'\n2 ' is'\n3 ' durable'\n4 '.'\nIt is durable.\n['done']\n",
        ),
        ("artifacts.md", "mailed 988890 bytes, True\n"),
        ("secrets.md", "charged 4200 with [redacted: stripe/key]\n"),
        ("search.md", FOUND),
        ("fork.md", "receipt for o-1 ['reserve', 'charge', 'charge']\nreceipt for o-2\n"),
        ("bus.md", "[4200]\n"),
        ("retention.md", ""),
        ("middleware.md", "950 cents, asked for by ann\n950\n"),
        ("signals.md", "o-1: approved by ann 0\n"),
        ("reconciliation.md", "4200 cents for o-1\n"),
        ("types.md", "receipt of o-1\n43.00\n"),
        ("payload-encryption.md", "hello Ada Lovelace\nFalse\n"),
    ],
)
def test_the_programs_on_the_page_run(page: str, shown: str, tmp_path: Path) -> None:
    programs = re.findall(r'```python title="\w+\.py"\n(.*?)```', (DOCS / page).read_text(), re.DOTALL)
    (tmp_path / "program.py").write_text("\n".join(programs))
    done = subprocess.run(
        [sys.executable, "-W", "error", "program.py"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert (done.returncode, done.stdout) == (0, shown), done.stderr


def test_the_flow_on_its_page_is_drawn_as_the_page_shows_it() -> None:
    page = (DOCS / "flows.md").read_text()
    [code] = re.findall(r"```python\n(fulfil = .*?)\n\nrun = ", page, re.DOTALL)
    [drawing] = re.findall(r"```mermaid\n(.*?)```", page, re.DOTALL)
    app = hf.App("shop")

    @dataclass
    class Order:
        cents: int
        approved: bool = False

    def change(order: Order, *_: object) -> Order:
        return order

    def act(name: str) -> Any:
        async def function(order: Order) -> None: ...

        return app.activity(name=name)(function)

    names: dict[str, object] = {
        name: act(name) for name in ("check_stock", "charge", "refund", "reserve", "release", "ship")
    }
    names |= {"app": app, "hf": hf, "timedelta": timedelta, "Order": Order, "Approval": str}
    made: dict[str, Any] = names | {"approve": change, "reject": change}
    exec(code, made)
    assert made["fulfil"].mermaid().strip() == drawing.strip()


@pytest.mark.parametrize("number", [0, 1])
def test_the_agents_on_their_page_can_be_made(number: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", "none")
    programs = re.findall(r"```python\n(.*?)```", (DOCS / "agents.md").read_text(), re.DOTALL)
    assert len(programs) == 2
    made: dict[str, Any] = {}
    exec(programs[number], made)
    assert {"support.model", "support.tool", "desk.model", "desk.tool"} & set(made["app"].registry.activities)


async def test_the_plan_on_its_page_runs_with_the_activities_of_the_example() -> None:
    [text] = re.findall(r"```yaml\n(plan: etl\n.*?)```", (DOCS / "plans.md").read_text(), re.DOTALL)
    app: hf.App = runpy.run_path(str(DOCS.parent / "examples" / "etl.py"))["app"]
    async with app.node("memory://"):
        assert app.plans.validate(text) == []
        await app.plans.register(text)
        run = await app.plans.start("etl", {"day": "2026-01-28"})
        result = await run.result()
    assert result["rows"] > 0
