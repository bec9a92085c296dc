"""Queries of runs for which this process has no code: a node that has the code answers, through the store.

The process that was queried writes the question into the store as a bulletin for one live node that has the run's
definition, if possible the owner of the run, and waits for the bulletin with the answer. A node looks for questions
when it is notified, at most once per `LOOK_S`, and every `safety_poll_s` in case a notification was lost. Nothing is
recorded in the run, and both bulletins expire soon. If the node is lost, another one is asked.

A question without a name asks which queries and updates the run answers.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable
from zlib import crc32

import msgspec
from msgspec import Raw, Struct

from holdfast import errors
from holdfast.clock import Ids
from holdfast.core.events import NULL
from holdfast.core.plans import definition_of
from holdfast.engine.abilities import abilities_of
from holdfast.errors import (
    CallerError,
    HoldfastError,
    QueryFailed,
    RequestTimedOut,
    RunError,
    StoreError,
    VersionMismatch,
)
from holdfast.store.port import Bulletin, BulletinQuery, RunHead, Store

QUESTION, ANSWER = "question", "answer"
LOOK_S = 0.5
WAIT_S = 8.0
"""How long to wait for one node before another one is asked."""

KEEP_MS = 30_000
NODES = 3
AT_ONCE = 500
"""How many questions a node reads in one look."""

Answerer = Callable[[str, str, Raw], Awaitable[Raw]]
"""Answers a query of a run by its name, with arguments."""

logger = logging.getLogger("holdfast.node")


class _Question(Struct, frozen=True):
    node: str
    run_id: str
    name: str
    arguments: Raw


class _Answer(Struct, frozen=True):
    result: Raw = NULL
    code: str = ""
    message: str = ""


_questions = msgspec.json.Decoder(_Question)
_answers = msgspec.json.Decoder(_Answer)


class RemoteQueries:
    """Asks other nodes on behalf of this process, and answers the questions of others on behalf of this node."""

    def __init__(self, store: Store, node: str, safety_poll_s: float, answer: Answerer, ids: Ids) -> None:
        self._store = store
        self._node = node
        self._safety_poll_s = safety_poll_s
        self._answer = answer
        self._ids = ids
        self._seen: set[str] = set()
        self._answering: set[asyncio.Task[None]] = set()

    # --- asking

    async def ask(self, head: RunHead, name: str, arguments: Raw) -> Raw:
        """Return the answer of a live node; raise `VersionMismatch` if none has the code of the run."""
        tried: set[str] = set()
        for _ in range(NODES):
            node = await self._able_node(head, tried)
            if node is None:
                break
            tried.add(node)
            question = _Question(node, head.run_id, name, arguments)
            answer = await self._answer_of(question)
            if answer is not None:
                return _result_of(answer)
        if tried:
            names = ", ".join(sorted(tried))
            raise RequestTimedOut(f"run {head.run_id}: {names} did not answer in time", run_id=head.run_id)
        raise VersionMismatch(
            f"run {head.run_id} needs {head.plan_id!r} {head.plan_version!r}: neither this process nor any live "
            "node has it; start a node that does",
            run_id=head.run_id,
        )

    async def _able_node(self, head: RunHead, tried: set[str]) -> str | None:
        """Return a live node that has the definition of a run: its owner, or one chosen by the run's id."""
        wanted = {(head.plan_id, head.plan_version), definition_of(head.plan_id, head.plan_version)}
        able = [
            each.node
            for each in abilities_of(await self._store.find_nodes())
            if each.node not in tried and each.node != self._node and wanted & each.abilities.workflows
        ]
        if head.lease_owner in able:
            return head.lease_owner
        return able[crc32(head.run_id.encode()) % len(able)] if able else None

    async def _answer_of(self, question: _Question) -> _Answer | None:
        """Send a question, and wait for its answer; None if none comes in time."""
        question_id = self._ids.new_id()
        listener = self._store.wakeups.listen()
        loop = asyncio.get_running_loop()
        until = loop.time() + WAIT_S
        try:
            body = Raw(msgspec.json.encode(question))
            await self._store.put_bulletins(QUESTION, {question_id: body}, KEEP_MS)
            wanted = BulletinQuery(kind=ANSWER, bulletin_ids=(question_id,))
            while True:
                if found := await self._store.find_bulletins(wanted):
                    return _answers.decode(found[0].body)
                left_s = until - loop.time()
                if left_s <= 0:
                    return None
                await asyncio.sleep(min(0.02, left_s))  # others are notified too, which is often if there is much to do
                await listener.wait(min(0.5, max(0.0, left_s)))
        finally:
            listener.close()

    # --- answering

    async def serve(self) -> None:
        """Answer the questions for this node, until this is cancelled."""
        listener = self._store.wakeups.listen()
        try:
            while True:
                await listener.wait(self._safety_poll_s)
                try:
                    await self._look()
                except StoreError:
                    logger.warning("node %s could not look for queries", self._node, exc_info=True)
                await asyncio.sleep(LOOK_S)
        finally:
            listener.close()
            for task in self._answering:
                task.cancel()

    async def _look(self) -> None:
        """Start to answer the questions that are new. They expire soon, so there are few."""
        found = await self._store.find_bulletins(BulletinQuery(kind=QUESTION, limit=AT_ONCE))
        new = [bulletin for bulletin in found if bulletin.bulletin_id not in self._seen]
        self._seen = {bulletin.bulletin_id for bulletin in found}
        for bulletin in new:
            task = asyncio.create_task(self._reply(bulletin), name="query")
            self._answering.add(task)
            task.add_done_callback(self._answering.discard)

    async def _reply(self, bulletin: Bulletin) -> None:
        try:
            question = _questions.decode(bulletin.body)
        except msgspec.MsgspecError:  # from another release, or encrypted with keys that are not here
            return
        if question.node != self._node:
            return
        try:
            answer = _Answer(await self._answer(question.run_id, question.name, question.arguments))
        except HoldfastError as problem:
            answer = _Answer(code=problem.code, message=problem.message)
        try:
            await self._put(bulletin.bulletin_id, answer)
        except CallerError as problem:  # it is too large to be stored
            await self._put(bulletin.bulletin_id, _Answer(code=problem.code, message=problem.message))
        except StoreError:
            logger.warning("node %s could not answer a query of run %s", self._node, question.run_id, exc_info=True)

    async def _put(self, question_id: str, answer: _Answer) -> None:
        await self._store.put_bulletins(ANSWER, {question_id: Raw(msgspec.json.encode(answer))}, KEEP_MS)


def _result_of(answer: _Answer) -> Raw:
    """Return the result in an answer, or raise its error, by its original type if that takes only a message."""
    if not answer.code:
        return answer.result
    kind = getattr(errors, answer.code, None)
    if isinstance(kind, type) and issubclass(kind, CallerError | RunError) and kind.__init__ is HoldfastError.__init__:
        raise kind(answer.message)
    raise QueryFailed(f"{answer.code}: {answer.message}")
