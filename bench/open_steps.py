"""What a turn costs when more and more steps of its run are open: one ends, and another begins. Committed to a file."""

import statistics
import time
from pathlib import Path

from msgspec import Raw
from msgspec.structs import replace

from bench.effort import Effort
from bench.report import Rows, progress
from holdfast.core.commands import RunActivity
from holdfast.core.messages import ActivitySucceeded
from holdfast.core.state import state_of
from holdfast.engine.turns.draft import TurnDraft
from holdfast.store.port import Committed
from holdfast.store.sqlite import SqliteStore
from holdfast.testing.samples import SampleNode, read_history

OPEN = (10, 100, 1_000, 10_000)
TURNS_EACH = 20


async def measure(effort: Effort, folder: Path) -> Rows:
    """Measure with several numbers of open steps. `growth` is the cost relative to the smallest number."""
    rows: Rows = {}
    first = 0.0
    store = await SqliteStore.open(folder / "open.db")
    await store.migrate()
    node = SampleNode(store, lease_ms=3_600_000)
    for count in OPEN:
        progress(f"open: {count:,} steps")
        decided, committed = await _turns(node, f"run-{count}", count, effort.rounds * TURNS_EACH)
        turn_us = statistics.median(decided) * 1e6
        first = first or turn_us
        rows[f"{count:,} open"] = {
            "µs/turn": turn_us,
            "growth": turn_us / first,
            "µs/commit": statistics.median(committed) * 1e6,
        }
    await store.close()
    return rows


async def _turns(node: SampleNode, run_id: str, count: int, turns: int) -> tuple[list[float], list[float]]:
    loaded = await node.start(run_id, *(_step(number) for number in range(count)))
    state = state_of(run_id, await read_history(node.store, run_id))
    decided: list[float] = []
    committed: list[float] = []
    for number in range(turns):
        loaded = replace(loaded, head=replace(loaded.head, version=state.version))
        began = time.perf_counter()
        draft = TurnDraft(state, loaded, await node.store.now(), node.name)
        draft.handle(ActivitySucceeded(f"step-{number}", 1, Raw(b"1")))
        draft.apply_commands([_step(count + number)])
        turn = draft.finish()
        decided.append(time.perf_counter() - began)
        state, began = draft.state, time.perf_counter()
        [answer] = await node.store.commit([turn])
        committed.append(time.perf_counter() - began)
        assert isinstance(answer, Committed)
    return decided, committed


def _step(number: int) -> RunActivity:
    return RunActivity(step_id=f"step-{number}", name="charge", input=Raw(b'{"number":1}'))
