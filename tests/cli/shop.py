"""An app for the commands: what waits, answers, asks humans and fails. Written to a file, and served from there."""

SHOP = '''
from dataclasses import dataclass
from pathlib import Path

import holdfast as hf

app = hf.App("shop", artifacts=hf.Artifacts(Path.cwd() / "artifacts"))


@dataclass
class Approval:
    approved: bool


@app.activity(on_failure="pause", retry=hf.Retry(max_attempts=1))
async def charge(order_id: str) -> str:
    raise ValueError("the card was refused")


@app.activity(queue="gpu")
async def render() -> str:
    return "rendered"


@app.workflow(signals={"approval": Approval})
async def order(order_id: str, cents: int = 0) -> str:
    """Wait for an approval."""
    hf.on_query("progress", lambda: {"order_id": order_id})
    hf.on_update("double", lambda number: 2 * number)
    approval = await hf.wait_signal("approval", Approval)
    return f"{order_id}: {approval.approved}"


@app.workflow
async def echo(value: str = "") -> str:
    return value


@app.activity
async def film(title: str, kind: str) -> hf.Artifact:
    return await hf.put_artifact([title.encode()] * 100_000, kind=kind)


@app.workflow
async def filming(title: str, kinds: list[str]) -> int:
    return len([await film(title, kind) for kind in kinds])


@app.workflow(failures=ValueError)
async def failing() -> None:
    raise ValueError("by design")


@app.workflow
async def paying(order_id: str) -> str:
    return await charge(order_id)


@app.workflow
async def asking(who: str) -> bool:
    return await hf.task("approve", bool, payload={"who": who})


@app.activity(retry=hf.Retry(max_attempts=1))
async def measure(file: str) -> int:
    context = hf.activity_context()
    Path("part").write_text(context.token)
    Path("part").rename(file)
    context.complete_later()


@app.workflow
async def measuring(file: str) -> int:
    return await measure(file)


@app.workflow
async def trusting() -> int:
    return await hf.wait_signal("count", int)


@app.workflow(requires_approval=True)
async def grave() -> str:
    return "done"


@app.workflow
async def telling() -> str:
    story = hf.stream("story")
    await story.write("To ")
    await story.write("be")
    await story.write({"page": 2})
    return "told"


@app.workflow
async def far() -> str:
    return await render()
'''
