"""An agent of the OpenAI Agents SDK whose model calls, tool calls and handoffs are steps, also after a crash.

The front desk hands off to billing, whose tool needs an approval: a task for a person. The model here is a script.
"""

import asyncio
import tempfile

from agents import Agent, RunContextWrapper, function_tool
from agents.testing import ScriptedModel, assistant_message, function_call

import holdfast as hf
from holdfast.agents.openai_agents import Approval, Approvals, DurableAgent


@function_tool(needs_approval=True)
async def refund(ctx: RunContextWrapper[str], cents: int) -> str:
    return f"gave back {cents} cents to {ctx.context}"


model = ScriptedModel(
    [
        [function_call("transfer_to_billing", {}, call_id="call-1")],
        [function_call("refund", {"cents": 4200}, call_id="call-2")],
        [assistant_message("Done: 4200 cents.")],
    ]
)
billing = Agent[str]("billing", model=model, tools=[refund])
desk = Agent[str]("desk", model=model, handoffs=[billing])

app = hf.App("support")
durable = DurableAgent[str](app, desk, context_type=str, stream="tokens", approvals=Approvals(roles=["clerk"]))


@app.workflow
async def support(customer: str, question: str) -> str:
    return str((await durable.run(question, context=customer)).final_output)


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
        print(", ".join(str(event.step_id) for event in begun))


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        asyncio.run(main(f"sqlite:///{folder}/support.db"))
