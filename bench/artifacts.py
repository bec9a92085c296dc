"""Memory while large artifacts and many large results pass. It must not grow with the number of bytes.

An artifact of 100 MB goes through an activity and back, then runs have results of 1 MB each, which are kept beside the
store. `python -m bench.artifacts --results 10000` is the long form, and needs 20 GB of disk.
"""

import argparse
import asyncio
import tempfile
from collections.abc import Iterator
from pathlib import Path

import holdfast as hf
from bench.effort import FULL, Effort
from bench.report import Rows, progress, table

MB = 1_000_000
AT_ONCE = 8


def resident_mb() -> float:
    """Return how much memory the process has."""
    fields = Path("/proc/self/statm").read_text().split()
    return int(fields[1]) * 4_096 / MB


def frames(megabytes: int) -> Iterator[bytes]:
    """Yield so many chunks of 1 MB."""
    for number in range(megabytes):
        yield bytes([number % 251]) * MB


def make_app(folder: Path) -> tuple[hf.App, hf.Workflow[[int], int], hf.Workflow[[str], str]]:
    """Return an app that makes artifacts and large results."""
    app = hf.App("bench", artifacts=hf.Artifacts(folder))

    @app.activity
    async def film(megabytes: int) -> hf.Artifact:
        return await hf.put_artifact(frames(megabytes), kind="film")

    @app.activity
    async def measure(artifact: hf.Artifact) -> int:
        size = 0
        async for chunk in hf.open_artifact(artifact):
            size += len(chunk)
        return size

    @app.activity
    async def echo(text: str) -> str:
        return text

    @app.workflow
    async def make(megabytes: int) -> int:
        return await measure(await film(megabytes))

    @app.workflow
    async def repeat(text: str) -> str:
        return await echo(text)

    return app, make, repeat


async def measure(effort: Effort, folder: Path) -> Rows:
    """Measure an artifact of 100 MB, and many results of 1 MB each."""
    results = 1_000 if effort is FULL else 40
    return await measured(folder, 100 if effort is FULL else 10, results)


async def measured(folder: Path, megabytes: int, results: int) -> Rows:
    """Return the resident memory along the way."""
    rows: Rows = {}
    app, make, repeat = make_app(folder / "artifacts")
    options = hf.NodeOptions(cached_runs=AT_ONCE)
    async with app.node(f"sqlite:///{folder}/artifacts.db", options=options):
        rows["before"] = {"resident MB": resident_mb()}
        assert await (await app.start(make, megabytes)).result() == megabytes * MB
        rows[f"an artifact of {megabytes} MB"] = {"resident MB": resident_mb()}
        text, done = "m" * MB, 0
        while done < results:
            runs = [await app.start(repeat, text) for _ in range(min(AT_ONCE, results - done))]
            for run in runs:
                assert len(await run.result()) == MB
            done += len(runs)
            progress(f"artifacts: {done:,} runs, {resident_mb():.0f} MB")
            if done % (AT_ONCE * max(1, results // AT_ONCE // 10)) == 0 or done == results:
                rows[f"{done:,} results of 1 MB"] = {"resident MB": resident_mb()}
    return rows


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--megabytes", type=int, default=100)
    parser.add_argument("--results", type=int, default=10_000)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as place:
        print(table("artifacts", asyncio.run(measured(Path(place), given.megabytes, given.results))))
