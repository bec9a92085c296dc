"""An inbox of agents: each works until a person has to decide, waits for as long as that takes, and goes on.

The program of DBOS's agent inbox. What waits is found by its search attribute, and an answer is a signal with an id:
of two clicks one counts. No process has to be there while an agent waits.
"""

import asyncio
import tempfile
from dataclasses import dataclass
from datetime import timedelta

import holdfast as hf

app = hf.App("agents", attributes={"stage": str, "task": str})


@dataclass
class Answer:
    approved: bool
    comment: str = ""


@app.activity
async def propose(task: str, comment: str) -> str:
    return f"{task} in Lisbon" if comment else f"{task} in Venice"


@app.activity
async def act(proposal: str) -> str:
    return f"done: {proposal}"


@app.workflow(signals={"answer": Answer})
async def agent(task: str) -> str:
    """Propose until a person approves, then act. Without an answer within a week it fails with TimeoutError."""
    proposal = await propose(task, "")
    while True:
        hf.set_attributes(stage="waits", task=proposal)  # holdfast run list --where "stage=waits"
        answer = await hf.wait_signal("answer", Answer, timeout=timedelta(weeks=1))
        hf.set_attributes(stage="works")
        if answer.approved:
            return await act(proposal)
        proposal = await propose(task, answer.comment)


async def main(store: str) -> None:
    """Let two agents work; reject the first proposal of one."""
    async with app.node(store):
        runs = [await app.start(agent, task) for task in ("book a hotel", "rent a car")]
        for run, answers in zip(runs, ([Answer(False, "too wet"), Answer(True)], [Answer(True)]), strict=True):
            for number, answer in enumerate(answers):
                await run.signal("answer", answer, signal_id=f"click-{number}")
        print(*[await run.result() for run in runs], sep="\n")


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        asyncio.run(main(f"sqlite:///{folder}/agents.db"))
