"""Fan-out: a hundred activities at once, with plain `asyncio.gather`.

Each result is recorded as it comes. After a crash only the activities whose results are missing run again. How many
run at the same time is a setting of the node, not of the workflow.
"""

import asyncio
import tempfile
import time

import holdfast as hf

app = hf.App("thumbnails")


@app.activity(timeout=5, retry=hf.Retry(max_attempts=3, initial_ms=50))
async def resize(picture: str) -> int:
    """Pretend to resize a picture; return its new size. One of them is broken the first time."""
    await asyncio.sleep(0.05)
    if picture == "picture-013" and hf.activity_context().attempt == 1:
        raise OSError("the disk had a bad moment")
    return len(picture) * 1_000


@app.workflow
async def resize_all(pictures: list[str]) -> int:
    """Resize all pictures side by side and add up their sizes."""
    sizes = await asyncio.gather(*(resize(picture) for picture in pictures))
    return sum(sizes)


async def main(store: str) -> None:
    """Resize a hundred pictures, twenty at a time."""
    pictures = [f"picture-{number:03}" for number in range(100)]
    async with app.node(store, options=hf.NodeOptions(activities_at_once=20)):
        began = time.perf_counter()
        run = await app.start(resize_all, pictures)
        total = await run.result()
        print(f"{len(pictures)} pictures, {total:,} bytes, in {time.perf_counter() - began:.2f} s")
        types = [event.event_type for event in await run.events()]
        print(f"{types.count('StepCompleted')} results recorded; {types.count('StepRetried')} attempt was repeated")


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        asyncio.run(main(f"sqlite:///{folder}/fan_out.db"))
