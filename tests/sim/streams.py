"""Streams in the stories: what a run and its activity write, and a judge that reads it at the end."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import TYPE_CHECKING, Any

import holdfast as hf
from holdfast.app import App
from holdfast.core import codec
from holdfast.core import events as e
from holdfast.core.streams import StreamPage, StreamRead

if TYPE_CHECKING:
    from tests.sim.world import World

PARTS = 4
"""How many chunks a step writes."""


def register_streams(app: App, play: Callable[[list[Any], list[Any]], Awaitable[list[Any]]]) -> None:
    """Register a workflow that writes to a stream before and after its activity, which writes to another one."""

    @app.activity(retry=hf.Retry(max_attempts=50, initial_ms=100, most_ms=1_000))
    async def emit() -> int:
        out = hf.stream("parts")
        for number in range(await out.resume(), PARTS):
            await out.write(number)
            await asyncio.sleep(0.15)
        return PARTS

    @app.workflow
    async def streamed(script: list[Any], seen: list[Any]) -> list[Any]:
        progress = hf.stream("progress")
        await progress.write("begun")
        try:
            seen.append(await emit())
        except hf.errors.InvalidInput:  # an operator has skipped it
            seen.append("skipped")
        await progress.write("emitted")
        return await play(script, seen)


async def judge_streams(world: World, run_id: str, history: Sequence[e.Event]) -> None:
    """Check that each chunk is there once and in order, and that all are there of what has ended."""
    queued = history[0].data
    assert isinstance(queued, e.RunQueued)
    if queued.plan_id != "streamed" or queued.forked_from is not None:  # a fork begins without chunks
        return
    asked = [StreamRead(run_id=run_id, name=name) for name in ("progress", "parts")]
    progress, parts = [_chunks(page) for page in await world.opened.read_streams(asked)]
    world.note(f"stream {run_id} {len(progress)} {len(parts)}", "chunks of runs" if progress else None)
    stretches = 1 + sum(isinstance(event.data, e.ContinuedAsNew) for event in history)
    expected = [chunk for _ in range(stretches) for chunk in ("begun", "emitted")]
    said = [chunk for _, chunk in progress]
    is_whole = isinstance(history[-1].data, e.RunCompleted)
    if said != (expected if is_whole else expected[: len(said)]):
        world.violate(f"{run_id}: its code has written {said}, and {expected} is to be there at most")
    completed = {event.step_id for event in history if isinstance(event.data, e.StepCompleted)}
    by_step: dict[str, list[object]] = {}
    for step_id, chunk in parts:
        by_step.setdefault(step_id, []).append(chunk)
    for step_id in {*by_step, *(step_id for step_id in completed if step_id and "emit" in step_id)}:
        written = by_step.get(step_id, [])
        world.note(f"parts  {run_id} {step_id} {written}", "chunks of steps")
        if written != list(range(PARTS if step_id in completed else len(written))):
            world.violate(f"{run_id} {step_id}: it has written {written}")


def _chunks(page: StreamPage | None) -> list[tuple[str, object]]:
    """Return the chunks of a stream, each with the step that has written it."""
    found: list[tuple[str, object]] = []
    for segment in page.segments if page is not None else ():
        assert segment.first_seq == len(found) + 1
        found += [(segment.step_id, chunk) for chunk in codec.decode(segment.body, list[object])]
    return found
