"""Whatever order things end in, one history has one outcome."""

import asyncio
import random
from typing import Any

import pytest

import holdfast as hf
from holdfast.app import App
from tests.program.core_run import CoreRun

app = App("shuffles")


@app.activity
async def fetch(number: int) -> int:
    return number


@app.activity
async def store(number: int) -> int:
    return number


@app.workflow
async def fan_out() -> dict[str, Any]:
    """Fan out, race, keep going with whoever is first, and follow each up with another step."""
    log: list[str] = []

    async def follow(number: int) -> int:
        found = await fetch(number)
        log.append(f"fetched {number}")
        return await store(found)

    async def bounded(number: int) -> int | None:
        try:
            async with asyncio.timeout(10 + number):
                return await fetch(number + 100)
        except TimeoutError:
            log.append(f"late {number}")
            return None

    race = {asyncio.create_task(follow(n), name=f"race {n}") for n in range(3)}
    others = [asyncio.create_task(bounded(n)) for n in range(3)]
    done, pending = await asyncio.wait(race, return_when=asyncio.FIRST_COMPLETED)
    log.append("first " + ",".join(task.get_name() for task in done))
    for task in pending:
        task.cancel()
    signal = await hf.wait_signal("go", int)
    results = await asyncio.gather(*others, return_exceptions=True)
    for finished in asyncio.as_completed([asyncio.create_task(store(n)) for n in range(2)]):
        log += [f"stored {await finished}"]
    kinds = [type(result).__name__ for result in results]
    return {"log": log, "kinds": kinds, "signal": signal, "chance": hf.random().random(), "id": str(hf.uuid4())}


def play(seed: int) -> CoreRun:
    """Return a run in which everything ends in an order drawn by the seed."""
    chance = random.Random(seed)
    run = CoreRun(app, fan_out).start()
    is_sent = False
    while not run.state.is_finished:
        step = chance.choice(list(run.state.open_steps.values()) or [None])
        dice = chance.random()
        if not is_sent and (dice < 0.1 or step is None):
            run.send("go", seed)
            is_sent = True
        elif dice < 0.2:
            run.control("PAUSE" if chance.random() < 0.5 else "RESUME")
        elif step is None:
            run.control("RESUME")
        elif step.kind == "timer":
            run.fire(step.step_id)
        elif step.kind == "activity" and dice < 0.85:
            run.complete(step.step_id, chance.randrange(100))
        elif step.kind == "activity":
            run.fail(step.step_id)
        elif is_sent:
            run.control("RESUME")
        if dice > 0.97:
            run.replay.close()
            run = run.replayed()  # evicted, and made again
    return run


@pytest.mark.contract("WF-2", "EVT-5")
@pytest.mark.parametrize("first", range(0, 1_000, 100))
def test_a_thousand_orders_of_completion_each_replay_to_what_they_were(first: int) -> None:
    for seed in range(first, first + 100):
        run = play(seed)
        try:
            again = run.replayed()
        except Exception as problem:
            raise AssertionError(f"seed {seed}: {problem}") from problem
        main, replayed = run.program._main, again.program._main
        assert main is not None
        assert replayed is not None
        if main.exception() is None:
            assert replayed.result() == main.result(), f"seed {seed}"
        else:
            assert str(replayed.exception()) == str(main.exception()), f"seed {seed}"
