"""The process that `holdfast dev` starts: it serves an app, and ends when one of the app's files changes.

Code that cannot be imported is reported, and imported again when it changes.
"""

import asyncio
import os
import select
import signal
import socket
import sys
import sysconfig
from collections.abc import Iterator
from types import TracebackType

import msgspec
from msgspec import Struct

from holdfast.app import App
from holdfast.cli.app_loader import OURS, load_app
from holdfast.cli.exit_codes import run_command
from holdfast.cli.output import note, show_traceback
from holdfast.cli.server import set_up_logging
from holdfast.engine.options import NodeOptions
from holdfast.errors import InvalidInput
from holdfast.service.options import ServiceOptions
from holdfast.termination import LIFE

RELOAD = 75
"""The exit code that requests a restart."""

DEV_OPTIONS = "_HOLDFAST_DEV"
"""The environment variable with the process's options. It is removed, so that children do not inherit it."""

DRAIN_S = 2.0
POLL_S = 0.5
"""How often to check whether a file has changed."""

FileStates = dict[str, tuple[int, int] | None]
_INSTALLED = tuple({sysconfig.get_path(name) + os.sep for name in ("stdlib", "platstdlib", "purelib", "platlib")})


class DevOptions(Struct, frozen=True, kw_only=True):
    """The options that the process gets from the one that starts it."""

    target: str
    store: str
    host: str
    port: int
    listener: int


def run(given: DevOptions) -> int:
    """Serve until a file changes, or until asked to end."""
    set_up_logging()
    place = os.path.abspath(given.target.partition(":")[0])
    first = states_of({place})  # its state before it is read
    try:
        app = load_app(given.target)
    except InvalidInput as problem:
        before = states_of({*imported(), *_files_of(problem), os.path.dirname(place)}) | first
        note(problem.message)
        show_traceback(problem)
        note("waiting for the code to change")
        return _wait_for_change(before)
    return asyncio.run(_serve(app, given, states_of(imported()) | first))


async def _serve(app: App, given: DevOptions, before: FileStates) -> int:
    from holdfast.service.http.server import serve  # imported here, so that other commands start faster

    watching = asyncio.create_task(_watch(before))
    service = ServiceOptions(host=given.host, port=given.port, is_open=True, drain_s=DRAIN_S)
    queues = {activity.options.queue for activity in app.registry.activities.values()}
    served = tuple(sorted(queue for queue in queues if queue))
    node = NodeOptions(drain_s=DRAIN_S, queues=served, tune_gc=True)
    with socket.socket(fileno=given.listener) as listener:
        await serve(app, given.store, options=service, node=node, listener=listener)
    if not watching.done():
        watching.cancel()
        return 0
    note(f"{watching.result()} has changed: starting again")
    return RELOAD


async def _watch(before: FileStates) -> str:
    """Wait until a file changes, then end this process; return the file."""
    while True:
        await asyncio.sleep(POLL_S)
        for file in imported() - before.keys():  # imported later, by an activity
            before |= states_of({file})
        changed = changed_since(before)
        if changed is not None:
            os.kill(os.getpid(), signal.SIGTERM)
            return changed


def _wait_for_change(before: FileStates) -> int:
    """Wait until a file of the failed import has changed, or a missing file may have been created."""
    life = int(os.environ[LIFE])
    while True:
        gone, _, _ = select.select([life], [], [], POLL_S)
        if gone:
            return 0
        if changed_since(before) is not None:
            return RELOAD


def imported() -> set[str]:
    """Return the files of the modules that are neither installed nor part of Holdfast."""
    files = [getattr(module, "__file__", None) for module in list(sys.modules.values())]
    return {file for file in files if file and not file.startswith((*_INSTALLED, *OURS))}


def states_of(files: set[str]) -> FileStates:
    """Return the states of files: modification time and size, or None if a file does not exist."""
    found: FileStates = {}
    for file in files:
        try:
            stat = os.stat(file)
            found[file] = (stat.st_mtime_ns, stat.st_size)
        except OSError:
            found[file] = None
    return found


def changed_since(before: FileStates) -> str | None:
    """Return a file that has changed, if there is one."""
    now = states_of(set(before))
    return next((file for file, state in now.items() if state != before[file]), None)


def _files_of(problem: BaseException | None) -> Iterator[str]:
    """Yield the files that an error and its causes involve."""
    while problem is not None:
        trace: TracebackType | None = problem.__traceback__
        while trace is not None:
            yield trace.tb_frame.f_code.co_filename
            trace = trace.tb_next
        if isinstance(problem, SyntaxError) and problem.filename:
            yield problem.filename
        problem = problem.__cause__ or problem.__context__


if __name__ == "__main__":
    sys.exit(run_command(lambda: run(msgspec.json.decode(os.environ.pop(DEV_OPTIONS), type=DevOptions))))
