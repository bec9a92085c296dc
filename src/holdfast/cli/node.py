"""`holdfast node`: a process that only runs a node, or several such processes.

With --processes this process executes no workflows. It starts the others with the same command, each with a name of its
own, restarts those that crash, and stops them together.
"""

import asyncio
import logging
import os
import sys
import threading
from collections.abc import Awaitable
from typing import Annotated, Any

from cyclopts import Parameter, validators

from holdfast.cli.app_loader import load_app, node_options, settings_at, split_target
from holdfast.cli.exit_codes import OK
from holdfast.cli.output import note
from holdfast.cli.processes import keep_alive, lifeline, start_python
from holdfast.cli.server import set_up_logging
from holdfast.clock import SystemIds
from holdfast.core.keys import check_name
from holdfast.engine.activities.slots import THREADS
from holdfast.errors import InvalidInput
from holdfast.limits import ACTIVITY_NAME_BYTES
from holdfast.store.validation import check_node_name
from holdfast.termination import termination_signal

MOST_PROCESSES = 1_000
STORE = "HOLDFAST_STORE"

LEFT_BEHIND_S = 2.0
"""How long a process waits, after its node has stopped, for activities that ignore their cancellation."""

logger = logging.getLogger("holdfast.node")


def node(
    target: str,
    /,
    *,
    store: str | None = None,
    name: str | None = None,
    queue: Annotated[tuple[str, ...], Parameter(negative=(), show_default=False)] = (),
    runs: bool = True,
    drain_s: Annotated[float | None, Parameter(validator=validators.Number(gte=0), show_default=False)] = None,
    lease_ms: Annotated[int | None, Parameter(validator=validators.Number(gte=1), show_default=False)] = None,
    activities_at_once: Annotated[int | None, Parameter(validator=validators.Number(gte=1), show_default=False)] = None,
    cached_runs: Annotated[int | None, Parameter(validator=validators.Number(gte=0), show_default=False)] = None,
    processes: Annotated[int, Parameter(validator=validators.Number(gte=1, lte=MOST_PROCESSES))] = 1,
    as_json: Annotated[bool, Parameter(name="--json", negative="", show_default=False)] = False,
) -> int:
    """Run workflows until SIGTERM or Ctrl-C, then finish running activities and release the runs.

    A second signal ends the process at once.

    Parameters
    ----------
    target: str
        The app: shop.py, shop.py:app or pkg.module:app.
    store: str
        The address of the store, such as sqlite:///orders.db; otherwise HOLDFAST_STORE, then sqlite:///holdfast.db.
        It is made if it is not there.
    name: str
        What the node is called; its own, for a process that starts under it takes over what its former life held.
    queue: str
        A queue whose activities are carried out here; for several queues, give it several times.
    runs: bool
        Whether to run workflows; --no-runs leaves activities from queues, so it needs --queue.
    drain_s: float
        How long activities may go on after the first signal, in seconds; otherwise HOLDFAST_NODE__DRAIN_S, then 10.
    lease_ms: int
        How long the node may be silent before others take its runs; otherwise HOLDFAST_NODE__LEASE_MS, then 10000.
    activities_at_once: int
        How many activities it carries out at a time; otherwise HOLDFAST_NODE__ACTIVITIES_AT_ONCE, then 200.
    cached_runs: int
        How many runs it keeps in memory; otherwise HOLDFAST_NODE__CACHED_RUNS, then 5000.
    processes: int
        How many nodes to run, each in a process of its own, such as one for each core. One that crashes is started
        again. With --name they are called NAME-1, NAME-2 and so on.
    as_json: bool
        Write the log as lines of JSON, with run and step.
    """
    _refuse_idle(queue, runs)
    tuning = {"drain_s": drain_s, "lease_ms": lease_ms}
    tuning |= {"activities_at_once": activities_at_once, "cached_runs": cached_runs}
    options = node_options(store, queues=queue, takes_runs=runs, **tuning)
    if processes > 1:
        split_target(target)  # report initial errors only once
        command = [
            *["node", target, "--runs" if runs else "--no-runs", *(["--json"] if as_json else ())],
            *(f"--queue={each}" for each in queue),
            *(f"--{flag.replace('_', '-')}={number}" for flag, number in tuning.items() if number is not None),
        ]
        return _run_several(command, settings_at(store).store, name, processes)
    app = load_app(target)
    set_up_logging(as_json)
    asyncio.run(app.serve(store, name=name, options=options))
    if working := [thread for thread in threading.enumerate() if thread.name.startswith(THREADS)]:
        leaving = threading.Timer(LEFT_BEHIND_S, _leave)
        leaving.daemon = True
        leaving.start()
        for thread in working:
            thread.join()
    return OK


def _run_several(command: list[str], store: str, name: str | None, processes: int) -> int:
    if store.startswith("memory:"):
        raise InvalidInput("each process would have a store of its own: --processes needs one that they share")
    name = name or f"node-{SystemIds().new_id()}"  # known here, so that a node that crashes takes over what it owned
    if (problem := check_node_name(f"{name}-{processes}")) is not None:
        raise problem
    return asyncio.run(_keep_alive(command, store, name, processes))


async def _keep_alive(command: list[str], store: str, name: str, processes: int) -> int:
    """Run the nodes until this process is asked to end, or one of them ends by itself; return the worst exit code."""
    with lifeline() as life, termination_signal() as asked:
        ending: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        # The store is in the environment, which only this user can read: its address may contain a password.
        environment = {STORE: store}

        async def keep(number: int) -> int:
            arguments = ("-m", "holdfast", *command, f"--name={name}-{number}")

            def start() -> Awaitable[asyncio.subprocess.Process]:
                return start_python(*arguments, life=life, environment=environment)

            try:
                return await keep_alive(f"node {name}-{number}", start, ending, patience_s=None)
            finally:
                if not ending.done():
                    note(f"node {name}-{number} has ended: the others end with it")
                    ending.set_result("another has ended")

        nodes = asyncio.gather(*(keep(number) for number in range(1, processes + 1)))
        awaited: set[asyncio.Future[Any]] = {asked, nodes}
        await asyncio.wait(awaited, return_when=asyncio.FIRST_COMPLETED)
        if not ending.done():
            ending.set_result(asked.result())
        return max(await nodes)


def _refuse_idle(queues: tuple[str, ...], takes_runs: bool) -> None:
    """Refuse options that would leave the node without work, or waiting at a queue with a misspelt name."""
    if not takes_runs and not queues:
        raise InvalidInput("--no-runs leaves nothing to do: name a queue with --queue")
    for name in queues:
        problem = check_name("--queue", name)
        if problem is None and len(name.encode()) > ACTIVITY_NAME_BYTES:
            problem = InvalidInput(f"--queue has at most {ACTIVITY_NAME_BYTES} UTF-8 bytes: {name!r}")
        if problem is not None:
            raise problem
        if "," in name:
            several = " ".join(f"--queue {part.strip()}" for part in name.split(",") if part.strip())
            raise InvalidInput(f"--queue {name} is one name with a comma in it: use {several or 'another name'}")


def _leave() -> None:
    """End the process. The runs are released, so nothing is lost, and no remaining thread delays the end."""
    logger.warning("activities did not stop, and are abandoned")
    sys.stdout.flush()
    logging.shutdown()
    os._exit(OK)
