"""Coalesces calls: calls that arrive while a call is in progress share the next one.

A caller asks one question and waits for its answer. `answer` is called with many questions, in the order in which they
were asked, and never concurrently. It returns an answer or an exception for each question; if it raises, every caller
of the batch gets the exception. Cancelling one caller does not affect the others. `answered` is called after the
callers have their answers, so they do not wait for it. If it raises, callers without an answer get the exception.
"""

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Sequence
from contextvars import copy_context
from typing import Generic, TypeVar

Q = TypeVar("Q")
A = TypeVar("A")


class Batcher(Generic[Q, A]):
    """Answers questions in batches of at most `most`, in a task with the context in which the batcher was made.

    `stopped` makes the error for callers whose questions are not answered because the batcher was stopped.
    """

    def __init__(
        self,
        answer: Callable[[list[Q]], Awaitable[Sequence[A | Exception]]],
        stopped: Callable[[Q], Exception],
        most: int,
        name: str,
        answered: Callable[[], None] | None = None,
    ) -> None:
        self._answer = answer
        self._answered = answered
        self._stopped = stopped
        self._most = most
        self._name = name
        self._context = copy_context()
        self._asked: list[tuple[Q, asyncio.Future[A]]] = []
        self._task: asyncio.Task[None] | None = None

    def ask(self, question: Q) -> "asyncio.Future[A]":
        """Return a future of the answer to a question. Wrapping it in a coroutine would make each call costlier."""
        future: asyncio.Future[A] = asyncio.get_running_loop().create_future()
        self._asked.append((question, future))
        if self._task is None:
            self._task = asyncio.create_task(self._work(), name=self._name, context=self._context.copy())
        return future

    def close(self) -> None:
        """Stop without waiting: the running batch is cancelled, and every caller gets an error."""
        if self._task is not None:
            self._task.cancel()
            self._task = None  # the task's own cleanup does not run if the task has not begun
        asked, self._asked = self._asked, []
        self._give_up(asked)

    async def stop(self) -> None:
        """Stop, and wait until the running batch has ended."""
        task = self._task
        self.close()
        if task is not None:
            await asyncio.wait([task])

    async def _work(self) -> None:
        try:
            while self._asked:
                batch, self._asked = self._asked[: self._most], self._asked[self._most :]
                await self._answer_batch(batch)
                if self._answered is not None:
                    self._answered()
        except Exception as problem:
            asked, self._asked = self._asked, []
            for _, future in asked:
                if not future.done():
                    future.set_exception(problem)
            raise
        finally:
            if self._task is asyncio.current_task():
                self._task = None

    async def _answer_batch(self, batch: "list[tuple[Q, asyncio.Future[A]]]") -> None:
        answers: Sequence[A | Exception]
        try:
            answers = await self._answer([question for question, _ in batch])
        except asyncio.CancelledError:
            self._give_up(batch)
            raise
        except Exception as problem:
            answers = [problem] * len(batch)
        for (_, future), answer in zip(batch, answers, strict=True):
            if future.done():  # the caller was cancelled
                continue
            if isinstance(answer, Exception):
                future.set_exception(answer)
            else:
                future.set_result(answer)

    def _give_up(self, batch: "Iterable[tuple[Q, asyncio.Future[A]]]") -> None:
        for question, future in batch:
            if not future.done():
                future.set_exception(self._stopped(question))
