"""`holdfast node`: a process that is nothing but a node."""

import asyncio
import logging
import os
import sys
import threading
from typing import Annotated

from cyclopts import Parameter, validators

from holdfast.cli.app_loader import load_app, node_options
from holdfast.cli.exit_codes import OK
from holdfast.cli.server import set_up_logging
from holdfast.core.keys import check_name
from holdfast.engine.activities.slots import THREADS
from holdfast.errors import InvalidInput
from holdfast.limits import ACTIVITY_NAME_BYTES

LEFT_BEHIND_S = 2.0
"""How long a process waits, after its node has stopped, for activities that do not heed their cancellation."""

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
    as_json: Annotated[bool, Parameter(name="--json", negative="", show_default=False)] = False,
) -> int:
    """Run workflows until SIGTERM or Ctrl-C, then finish what is under way and give the rest back.

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
    as_json: bool
        Write the log as lines of JSON, with run and step.
    """
    _refuse_idle(queue, runs)
    app = load_app(target)
    set_up_logging(as_json)
    options = node_options(
        store,
        queues=queue,
        takes_runs=runs,
        drain_s=drain_s,
        lease_ms=lease_ms,
        activities_at_once=activities_at_once,
        cached_runs=cached_runs,
    )
    asyncio.run(app.serve(store, name=name, options=options))
    if working := [thread for thread in threading.enumerate() if thread.name.startswith(THREADS)]:
        leaving = threading.Timer(LEFT_BEHIND_S, _leave)
        leaving.daemon = True
        leaving.start()
        for thread in working:
            thread.join()
    return OK


def _refuse_idle(queues: tuple[str, ...], takes_runs: bool) -> None:
    """Refuse what would leave the node with nothing to do, or waiting at a queue with a misspelt name."""
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
    """End the process. The runs are given back, so nothing is lost; and no thread is in the way of how it ends."""
    logger.warning("activities that did not stop are left behind")
    sys.stdout.flush()
    logging.shutdown()
    os._exit(OK)
