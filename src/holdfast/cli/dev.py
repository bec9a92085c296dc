"""`holdfast dev`: serves an app, its API and its node, and restarts them when the code changes.

There are two processes. This one holds the socket and starts the other, which does everything else and ends when a file
that it has imported changes. The socket stays open, so requests that arrive meanwhile wait for the new code.
"""

import asyncio
import socket
from collections.abc import Awaitable
from typing import Annotated

import msgspec
from cyclopts import Parameter

from holdfast.cli.app_loader import settings_at, split_target
from holdfast.cli.dev_child import DEV_OPTIONS, DRAIN_S, RELOAD, DevOptions
from holdfast.cli.output import note
from holdfast.cli.processes import keep_alive, lifeline, start_python
from holdfast.cli.server import HOST, PORT, Port
from holdfast.engine.observe.logs import describe_store
from holdfast.errors import InvalidInput
from holdfast.service.auth.csrf import is_loopback
from holdfast.service.options import ServiceOptions
from holdfast.termination import termination_signal

PATIENCE_S = 2 * DRAIN_S + 3.0
"""How long the other process may take to end."""


def dev(
    target: str,
    /,
    *,
    store: Annotated[str | None, Parameter(show_default=False)] = None,
    host: str = HOST,
    port: Port = PORT,
) -> int:
    """Run an app for development: its API, its workflows and all its queues; again, when its code changes.

    Access is open, so only this machine is listened to.

    Parameters
    ----------
    target: str
        The app: shop.py, shop.py:app or pkg.module:app.
    store: str
        The address of the store; otherwise HOLDFAST_STORE, then sqlite:///holdfast.db. It is made if it is not there.
    host: str
        Where to listen: an address of this machine that others cannot reach.
    port: int
        Where to listen; 0 takes one that is free.
    """
    split_target(target)  # report a wrong name immediately
    if not is_loopback(host):
        raise InvalidInput(f"access is open here, and others can reach {host}: use `holdfast server`", field="host")
    from holdfast.service.http.server import bind  # imported here, so that other commands start faster

    address = settings_at(store).store
    with bind(ServiceOptions(host=host, port=port)) as listener:
        listener.listen(128)
        place = f"[{host}]" if ":" in host else host
        address_here = f"http://{place}:{listener.getsockname()[1]}"
        note(f"{target} is at {address_here}, and starts again when its code changes")
        note(f"open {address_here}/ in a browser to watch its runs")
        note(f"the store is {describe_store(address)}")
        note("ACCESS IS OPEN: every user of this machine may do everything. Elsewhere use `holdfast server`.")
        return asyncio.run(_supervise(target, address, host, listener))


async def _supervise(target: str, store: str, host: str, listener: socket.socket) -> int:
    """Run the other process, and restart it, until this one is asked to end or the other has ended by itself."""
    with lifeline() as life, termination_signal() as asked:
        port, descriptors = listener.getsockname()[1], (listener.fileno(),)
        given = DevOptions(target=target, store=store, host=host, port=port, listener=listener.fileno())
        # In the environment, which only this user can read: the store's address may contain a password.
        environment = {DEV_OPTIONS: msgspec.json.encode(given).decode()}

        def start() -> Awaitable[asyncio.subprocess.Process]:
            arguments = ("-m", "holdfast.cli.dev_child")
            return start_python(*arguments, life=life, environment=environment, descriptors=descriptors)

        return await keep_alive("the process of the app", start, asked, patience_s=PATIENCE_S, reload=RELOAD)
