"""The client for code without an event loop: scripts, Flask, Django views. A loop in a thread does the work.

`SyncClient` has every operation as a method, over HTTP or in process; in process it also returns typed runs. It is
thread-safe. It belongs to one process: after a fork (gunicorn, multiprocessing) the child opens its own connections at
its next call, and leaves the inherited ones to the parent. It may not be used in a thread that runs an event loop,
because it would block that loop.
"""

import asyncio
import atexit
import os
import threading
from collections.abc import AsyncGenerator, Callable, Coroutine, Iterator
from concurrent.futures import CancelledError, Future
from contextlib import AsyncExitStack, suppress
from functools import partial
from queue import SimpleQueue
from types import TracebackType
from typing import Any, Generic, Self, TypeVar
from weakref import WeakSet

from holdfast.app import App
from holdfast.client import resources
from holdfast.client.asynchronous import Client
from holdfast.core.events import Event
from holdfast.core.messages import AcceptedSignalResult
from holdfast.core.snapshot import RunSnapshot
from holdfast.core.state import RunStatus
from holdfast.engine.options import NodeOptions
from holdfast.engine.stream_reading import StreamChunk
from holdfast.errors import EngineError, HoldfastError, InvalidInput
from holdfast.program.coroutine import refuse_inside
from holdfast.run import RunHandle, reopened
from holdfast.store.joined import InThread
from holdfast.store.port import Store
from holdfast.workflow import Workflow

R = TypeVar("R")
T = TypeVar("T")

CONNECTION = NodeOptions(takes_runs=False, relays=False)
"""What is opened in process without `node`: it starts and reads runs, and other nodes execute them."""

_Asked = SimpleQueue[Callable[[], None] | None]
"""Functions to call in the thread of the caller; None when there are no more."""

_clients: "WeakSet[SyncClient]" = WeakSet()
"""The clients to close at the end of the process, if nothing else has closed them."""

_inherited: list[Any] = []
"""What a fork has left in this process. Nothing of it is closed here, not even by the garbage collector."""


class _LoopThread:
    """An event loop in its own thread, with an open client."""

    def __init__(self, enter: Callable[[AsyncExitStack], Coroutine[Any, Any, Client]]) -> None:
        self.pid = os.getpid()
        self._enter = enter
        self._opened: Future[Client] = Future()
        self._is_closed = threading.Event()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._ending: asyncio.Event | None = None
        self._failure: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="holdfast-client", daemon=True)
        self._thread.start()
        self.client = self._opened.result()

    def _run(self) -> None:
        try:
            with asyncio.Runner() as runner:
                runner.run(self._live())
        except BaseException as problem:
            if self._opened.done():
                self._failure = problem
            else:
                self._opened.set_exception(problem)
        finally:
            self._is_closed.set()

    async def _live(self) -> None:
        async with AsyncExitStack() as stack:
            client = await self._enter(stack)
            self._loop, self._ending = asyncio.get_running_loop(), asyncio.Event()
            self._opened.set_result(client)
            await self._ending.wait()

    def call(self, work: Coroutine[Any, Any, T], asked: "_Asked | None" = None) -> T:
        """Run a coroutine in the loop, in the context of the caller, and return its result.

        Functions that are put into `asked` meanwhile are called here, in the thread of the caller.
        """
        assert self._loop is not None
        try:
            future = asyncio.run_coroutine_threadsafe(work, self._loop)
        except RuntimeError as problem:
            work.close()
            raise _closed() from problem
        if asked is not None:
            future.add_done_callback(partial(_no_more, asked))
        while True:
            try:
                while asked is not None and (function := asked.get()) is not None:
                    function()
                asked = None
                return future.result(timeout=1.0)
            except CancelledError as problem:
                raise _closed() from problem
            except TimeoutError:
                if future.done():
                    raise  # raised by the work itself
                if self._is_closed.is_set():
                    raise _closed() from None
            except BaseException:
                future.cancel()
                raise

    def close(self) -> None:
        """Close everything that is open, and wait for that. An error of the node is raised."""
        if self._loop is not None and self._ending is not None and not self._is_closed.is_set():
            self._loop.call_soon_threadsafe(self._ending.set)
        self._thread.join()
        if self._failure is not None:
            raise self._failure


def _no_more(asked: "_Asked", _: object) -> None:
    asked.put(None)


def _closed() -> EngineError:
    return EngineError("the client was closed during this call")


class _Resource:
    """A resource of the client that is open when the method is called."""

    def __init__(self, client: "SyncClient", name: str) -> None:
        self._client = client
        self._name = name

    def __getattr__(self, verb: str) -> Any:
        return getattr(getattr(self._client._open().client, self._name), verb)


class SyncRun(Generic[R]):
    """One run, for code without an event loop: like `RunHandle`, with methods that block."""

    def __init__(self, client: "SyncClient", run_id: str, handle: Callable[[], RunHandle[R]]) -> None:
        self.run_id = run_id
        self._client = client
        self._handle = handle

    def result(self) -> R:
        """Wait for the run to finish; return its result, or raise `RunFailed` or `RunCancelled`."""
        return self._call(lambda run: run.result())

    def status(self) -> RunStatus:
        """Return the run's status."""
        return self._call(lambda run: run.status())

    def published(self) -> dict[str, Any]:
        """Return what the workflow has published so far (`hf.publish`)."""
        return self._call(lambda run: run.published())

    def events(self) -> list[Event]:
        """Return the whole history."""
        return self._call(lambda run: run.events())

    def stream(self, name: str, *, after: int = 0, value_type: Any = Any) -> Iterator[StreamChunk]:
        """Read a stream of the run while it is written, as `RunHandle.stream` does."""

        async def chunks() -> AsyncGenerator[StreamChunk, None]:
            async for chunk in self._handle().stream(name, after=after, value_type=value_type):
                yield chunk

        found: Iterator[StreamChunk] = resources.iterate(chunks(), self._client._run)
        return found

    def snapshot(self) -> RunSnapshot:
        """Return the run as operators see it."""
        return self._call(lambda run: run.snapshot())

    def signal(
        self,
        name: str,
        payload: Any = None,
        *,
        signal_id: str | None = None,
        require_waiting: bool = False,
        step_id: str | None = None,
        actor: str = "",
        connection: Any = None,
    ) -> AcceptedSignalResult:
        """Send a signal, as `RunHandle.signal` does. A `connection` is used in this thread only."""

        async def sent(joined: Any) -> AcceptedSignalResult:
            return await self._handle().signal(
                name,
                payload,
                signal_id=signal_id,
                require_waiting=require_waiting,
                step_id=step_id,
                actor=actor,
                connection=joined,
            )

        return self._client._call_beside(connection, sent)

    def query(self, name: str, /, **arguments: Any) -> Any:
        """Call a query of the run."""
        return self._call(lambda run: run.query(name, **arguments))

    def update(self, name: str, /, *, update_id: str | None = None, **arguments: Any) -> Any:
        """Send an update and wait for the run's answer."""
        return self._call(lambda run: run.update(name, update_id=update_id, **arguments))

    def cancel(self, reason: str = "", *, actor: str = "", wait: bool = False) -> None:
        """Request the run to cancel itself."""
        self._call(lambda run: run.cancel(reason, actor=actor, wait=wait))

    def _call(self, verb: Callable[[RunHandle[R]], Coroutine[Any, Any, T]]) -> T:
        async def called() -> T:
            return await verb(self._handle())

        return self._client._call(called)


class SyncClient:
    """Calls a service by its address, or an app in this process, without an event loop.

    The first call opens an app, or `with` does; after a fork, each process opens its own. Without `node` this process
    only starts runs, sends to them and waits for them. With `node` it also executes workflows. Threads may share a
    client.
    """

    def __init__(
        self, to: str | App, store: str | Store | None = None, *, node: NodeOptions | None = None, **options: Any
    ) -> None:
        """`store` and `node` are for an app; `options` are those of `Client`."""
        if isinstance(to, str) and not (store is None and node is None):
            raise InvalidInput(
                "a store and a node are for an app in this process; a service has its own", field="store"
            )
        if not isinstance(to, str | App):
            raise InvalidInput("a SyncClient needs the address of a service, or an app", field="to")
        self._to = to
        self._store = store
        self._node = node
        self._options = options
        self._lock = threading.Lock()
        self._pid = os.getpid()
        self._thread: _LoopThread | None = None
        self._is_closed = False
        _clients.add(self)
        self.runs = resources.SyncRuns(_Resource(self, "runs"), self._run)
        self.signals = resources.SyncSignals(_Resource(self, "signals"), self._run)
        self.tasks = resources.SyncTasks(_Resource(self, "tasks"), self._run)
        self.activities = resources.SyncActivities(_Resource(self, "activities"), self._run)
        self.letters = resources.SyncLetters(_Resource(self, "letters"), self._run)
        self.workflows = resources.SyncWorkflows(_Resource(self, "workflows"), self._run)
        self.plans = resources.SyncPlans(_Resource(self, "plans"), self._run)
        self.system = resources.SyncSystem(_Resource(self, "system"), self._run)
        self.tokens = resources.SyncTokens(_Resource(self, "tokens"), self._run)
        self.audit = resources.SyncAudit(_Resource(self, "audit"), self._run)
        self.retention = resources.SyncRetention(_Resource(self, "retention"), self._run)
        self.schedules = resources.SyncSchedules(_Resource(self, "schedules"), self._run)
        self.archive = resources.SyncArchive(_Resource(self, "archive"), self._run)
        self.sinks = resources.SyncSinks(_Resource(self, "sinks"), self._run)
        self.bus = resources.SyncBus(_Resource(self, "bus"), self._run)
        self.tenants = resources.SyncTenants(_Resource(self, "tenants"), self._run)
        self.streams = resources.SyncStreams(_Resource(self, "streams"), self._run)
        self.lists = resources.SyncLists(_Resource(self, "lists"), self._run)
        self.artifacts = resources.SyncArtifacts(_Resource(self, "artifacts"), self._run)
        if isinstance(to, str):
            Client(to, **options)  # an invalid address is refused here

    # --- runs of an app in this process

    def start(self, workflow: Workflow[..., R], *args: Any, connection: Any = None, **options: Any) -> SyncRun[R]:
        """Start a run, as `App.start` does with the same arguments. A `connection` is used in this thread only."""
        app = self._app()

        async def started(joined: Any) -> RunHandle[R]:
            return await app.start(workflow, *args, connection=joined, **options)

        return self._sync_run(self._call_beside(connection, started))

    def run(self, run_id: str) -> SyncRun[Any]:
        """Return an existing run."""
        app = self._app()
        return SyncRun(self, run_id, lambda: app.run(run_id))

    def _sync_run(self, handle: RunHandle[R]) -> SyncRun[R]:
        app = self._app()
        return SyncRun(self, handle.run_id, lambda: reopened(handle, app.runtime()))

    def _app(self) -> App:
        if not isinstance(self._to, App):
            raise InvalidInput("this client calls a service: use runs.start and the other resources", field="to")
        return self._to

    # --- every operation

    def result(self, run_id: str, kind: Any = Any) -> Any:
        """Wait for a run to finish, as `Client.result` does."""
        return self._call(lambda: self._open().client.result(run_id, kind))

    def open(self) -> Self:
        """Open the store, or the connections. Otherwise the first call does."""
        self._open()
        return self

    def close(self) -> None:
        """Close what is open in this process. Later calls raise an error."""
        with self._lock:
            self._is_closed = True
            thread = None if self._thread is None or self._thread.pid != os.getpid() else self._thread
            self._thread = None
        if thread is not None:
            thread.close()

    def __enter__(self) -> Self:
        return self.open()

    def __exit__(
        self, kind: type[BaseException] | None, problem: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _open(self) -> _LoopThread:
        """Return the loop of this process, which is created when it is first needed."""
        refuse_inside("SyncClient", "call a child, wait for a signal, or make it an activity")
        if asyncio._get_running_loop() is not None:
            raise InvalidInput("a SyncClient would block the event loop of this thread: await the methods of Client")
        if self._pid != os.getpid():  # a thread of the parent may have held the lock when it forked
            self._lock, self._pid = threading.Lock(), os.getpid()
        with self._lock:
            if self._is_closed:
                raise EngineError("the client is closed")
            if self._thread is not None and self._thread.pid != os.getpid():
                _inherited.append(self._thread)
                self._thread = None
            if self._thread is None:
                self._thread = _LoopThread(self._enter)
            return self._thread

    async def _enter(self, stack: AsyncExitStack) -> Client:
        if isinstance(self._to, App):
            await stack.enter_async_context(self._to.node(self._store, options=self._node or CONNECTION))
        return await stack.enter_async_context(Client(self._to, **self._options))

    def _call(self, work: Callable[[], Coroutine[Any, Any, T]]) -> T:
        thread = self._open()
        return thread.call(work())

    def _call_beside(self, connection: Any, work: Callable[[Any], Coroutine[Any, Any, T]]) -> T:
        """Call a function with a connection, or None. Its use of the connection runs here, in this thread."""
        if connection is None:
            return self._call(lambda: work(None))
        thread, asked = self._open(), _Asked()

        async def here(function: Callable[[], Any]) -> Any:
            answer: Future[Any] = Future()
            asked.put(lambda: _answer(answer, function))
            return await asyncio.wrap_future(answer)

        return thread.call(work(InThread(connection, here)), asked)

    def _run(self, work: Coroutine[Any, Any, Any]) -> Any:
        try:
            thread = self._open()
        except HoldfastError:
            work.close()
            raise
        return thread.call(work)


def _answer(answer: "Future[Any]", function: Callable[[], Any]) -> None:
    try:
        answer.set_result(function())
    except Exception as problem:
        answer.set_exception(problem)


@atexit.register
def _close_all() -> None:
    """Close what is still open when the process ends: a thread that the interpreter stops releases nothing."""
    for client in [*_clients]:
        with suppress(HoldfastError):
            client.close()


__all__ = ["SyncClient", "SyncRun"]
