"""A description of what a run waits for from outside: for the errors of tests that send nothing."""

from holdfast.store.port import Store, TaskQuery, WaitQuery

MOST_NAMED = 50


async def awaited_by(store: Store, run_id: str) -> str:
    """Return the open tasks and the signals that a run waits for, as text; empty if it waits for none."""
    waits = await store.find(WaitQuery(run_id=run_id, limit=MOST_NAMED))
    tasks = await store.find(TaskQuery(run_id=run_id, status="OPEN", limit=MOST_NAMED))
    signals = ", ".join(f"{wait.name!r} (step {wait.step_id!r})" for wait in waits)
    people = ", ".join(f"{task.name!r} (step {task.step_id!r})" for task in tasks)
    return " and ".join([*([f"the signal {signals}"] if signals else []), *([f"the task {people}"] if people else [])])
