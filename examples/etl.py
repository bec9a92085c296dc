"""ETL: a plan, which is data instead of code. It loads the files that were extracted, or none if a check fails."""

import asyncio

import holdfast as hf

app = hf.App("etl")

ETL = """
plan: etl
version: "1"
inputs: {day: {type: string}}
steps:
  - id: extract
    activity: extract
    input: {day: "${inputs.day}"}
  - id: load
    for_each: ${steps.extract.output}
    activity: load
    input: {file: "${item}"}
    compensate: {activity: unload, input: {file: "${item}"}}
  - id: check
    activity: check
    input: {rows: "${steps.load.output}"}
    on_failure: compensate
output: {day: "${inputs.day}", rows: "${sum(steps.load.output)}"}
"""


@app.activity
async def extract(day: str) -> list[str]:
    return [f"{day}-{part}.csv" for part in ("a", "b", "c")]


@app.activity
async def load(file: str) -> int:
    return len(file)


@app.activity
async def unload(file: str) -> None: ...


@app.activity
async def check(rows: list[int]) -> None:
    if not all(rows):
        raise hf.NonRetryable("a file is empty")


async def main(store: hf.MemoryStore) -> None:
    """Register the plan, and start it by its id."""
    async with app.node(store):
        await app.plans.register(ETL)
        run = await app.plans.start("etl", {"day": "2026-01-28"})
        print(await run.result())


if __name__ == "__main__":
    asyncio.run(main(hf.MemoryStore()))
