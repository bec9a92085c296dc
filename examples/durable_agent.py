"""A Pydantic AI agent whose model calls and tool calls are steps: after a crash none that was recorded is made again.

The tool needs an approval, which is a task for a person. The model here is one for tests; yours would be a real one.
"""

import asyncio
import tempfile

from pydantic_ai import Agent, RunContext
from pydantic_ai.models.test import TestModel

import holdfast as hf
from holdfast.agents.pydantic_ai import Approval, Approvals, DurableAgent

app = hf.App("support")
agent = Agent(TestModel(), name="support", deps_type=str)


@agent.tool(requires_approval=True)
async def refund(ctx: RunContext[str], cents: int = 4200) -> str:
    return f"gave back {cents or 4200} cents to {ctx.deps}"


durable: DurableAgent[str, str] = DurableAgent(app, agent, stream="tokens", approvals=Approvals(roles=["clerk"]))


@app.workflow
async def support(customer: str, question: str) -> str:
    return str((await durable.run(question, deps=customer)).output)


async def main(store: str) -> None:
    async with app.node(store):
        run = await app.start(support, "ann", "The parcel is broken.")
        clerk = hf.Actor("bob", roles=("clerk",))
        while not (tasks := await app.tasks.list(actor=clerk, status="OPEN")):  # noqa: ASYNC110
            await asyncio.sleep(0.01)
        print("refund for ann: 4200 cents?")
        await app.tasks.complete(tasks[0].task_id, Approval(True), actor=clerk)
        print("".join([chunk.value async for chunk in run.stream("tokens")]))
        begun = [event for event in await run.events() if event.event_type in ("StepStarted", "TaskCreated")]
        print(", ".join(str(event.step_id).removeprefix("support.") for event in begun))


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        asyncio.run(main(f"sqlite:///{folder}/support.db"))
