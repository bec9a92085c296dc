"""`holdfast dev`: an app, its API and its node, started again whenever its code changes.

Two processes: this one holds the address and starts the other, which does everything and ends when a file that it has
imported changes. The socket is listened on all the time, so what is asked meanwhile waits for the new code.
"""

import asyncio
import os
import signal
import socket
import sys
from collections import deque
from typing import Annotated, Any

import msgspec
from cyclopts import Parameter

from holdfast.cli.app_loader import settings_at, split_target
from holdfast.cli.dev_child import DEV_OPTIONS, DRAIN_S, RELOAD, DevOptions
from holdfast.cli.exit_codes import BAD_INPUT, CODES, FAILED, INTERRUPTED, OK
from holdfast.cli.output import note
from holdfast.cli.server import HOST, PORT, Port
from holdfast.engine.observe.logs import describe_store
from holdfast.errors import InvalidInput
from holdfast.service.auth.csrf import is_loopback
from holdfast.service.options import ServiceOptions
from holdfast.termination import termination_signal

PATIENCE_S = 2 * DRAIN_S + 3.0
"""How long the other process may take to end."""

OWN_CODES = frozenset({OK, FAILED, BAD_INPUT, *CODES.values(), INTERRUPTED, 143})
"""With these it has said why. After others it has crashed, by code of the app."""

PAUSE_S = 0.5
CRASHES = 12
CRASHES_S = 60.0


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
    split_target(target)  # a name that is wrong from the start is reported at once
    if not is_loopback(host):
        raise InvalidInput(f"access is open here, and others can reach {host}: use `holdfast server`", field="host")
    from holdfast.service.http.server import bind  # here, so that commands which do not serve do not wait for it

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
    """Run the other process, again and again, until this one is asked to end or the other has ended by itself."""
    ours, theirs = os.pipe()  # nothing is ever written: the other process sees when this one is gone
    given = DevOptions(
        target=target, store=store, host=host, port=listener.getsockname()[1], listener=listener.fileno(), life=ours
    )
    try:
        with termination_signal() as asked:
            crashes = _Crashes()
            while not asked.done():
                process = await _start(given)
                ended = asyncio.ensure_future(process.wait())
                awaited: set[asyncio.Future[Any]] = {asked, ended}
                await asyncio.wait(awaited, return_when=asyncio.FIRST_COMPLETED)
                if not ended.done():
                    await _end(process, ended)
                elif ended.result() != RELOAD:
                    if ended.result() in OWN_CODES or crashes.is_too_often():
                        return max(ended.result(), FAILED)
                    note(f"the process of the app has ended {_by(ended.result())}, without stopping: starting it again")
                    await asyncio.wait([asked], timeout=PAUSE_S)
            return OK
    finally:
        os.close(ours)
        os.close(theirs)


class _Crashes:
    """Counts how often the other process has crashed of late: more often than a run that ends it is tried."""

    def __init__(self) -> None:
        self._at: deque[float] = deque(maxlen=CRASHES)

    def is_too_often(self) -> bool:
        """Note a crash, and return whether it is no use to start it again."""
        self._at.append(asyncio.get_running_loop().time())
        is_full = len(self._at) == CRASHES and self._at[-1] - self._at[0] < CRASHES_S
        if is_full:
            note(f"the process of the app has ended {CRASHES} times within {CRASHES_S:.0f} s: mend it, and start again")
        return is_full


def _by(code: int) -> str:
    if code >= 0:
        return f"with {code}"
    try:
        return f"by {signal.Signals(-code).name}"
    except ValueError:
        return f"by signal {-code}"


async def _start(given: DevOptions) -> asyncio.subprocess.Process:
    # In the environment, which only this user can read: the store's address may hold a password.
    return await asyncio.create_subprocess_exec(
        *[sys.executable, "-m", "holdfast.cli.dev_child"],
        env={**os.environ, DEV_OPTIONS: msgspec.json.encode(given).decode()},
        stdin=asyncio.subprocess.DEVNULL,
        pass_fds=(given.listener, given.life),
        process_group=0,  # Ctrl-C is for this process, which passes it on once
    )


async def _end(process: asyncio.subprocess.Process, ended: "asyncio.Future[int]") -> None:
    process.terminate()
    await asyncio.wait([ended], timeout=PATIENCE_S)
    if not ended.done():
        process.kill()
        await ended
