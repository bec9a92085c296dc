"""The context of a run as code sees it: read anywhere, and bound where runs are started.

`context` returns the context of the run whose workflow or activity is executing. Elsewhere it returns what the caller
has bound. A run that is started inherits the context of its starter, so an activity that starts a run passes on its
own.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from typing import NamedTuple

from msgspec import Raw

from holdfast.core.run_context import encode_context, texts_of
from holdfast.engine.activities.context import ActivityContext, current_activity
from holdfast.program.coroutine import current_program, refuse_inside
from holdfast.program.secrets import current_redactor


class _Bound(NamedTuple):
    """The bound texts, and the attempt of an activity that bound them: a node's own context is not that of its runs."""

    texts: Mapping[str, str]
    inside: ActivityContext | None


BOUND: ContextVar[_Bound | None] = ContextVar("holdfast_context", default=None)
"""The context that is bound around the running code."""


def context() -> dict[str, str]:
    """Return the context: inside a workflow or an activity that of the run, elsewhere the one bound by `bind_context`.

    In a workflow it is the same on every replay. It is a copy.
    """
    program = current_program()
    return texts_of(program.about.context) if program is not None else _around()


def _around() -> dict[str, str]:
    """Return the context that is bound around code outside of workflows."""
    activity, bound = current_activity(), BOUND.get()
    if bound is not None and bound.inside is activity:
        return dict(bound.texts)
    return {} if activity is None else activity.run_context


@contextmanager
def bind_context(**texts: str) -> Iterator[None]:
    """Add these texts to the context of runs and schedules that are started inside the `with`."""
    refuse_inside("bind_context", "a run keeps the context that it was started with")
    encode_context(texts)  # raises here, where the mistake is, and not at a later start
    token = BOUND.set(_Bound({**_around(), **texts}, current_activity()))
    try:
        yield
    finally:
        BOUND.reset(token)


def context_of_start(texts: Mapping[str, str]) -> Raw:
    """Return the context of a run that is started here: the bound one and these texts, with secrets redacted."""
    raw = encode_context({**_around(), **texts})
    redactor = current_redactor()
    return raw if redactor is None else redactor.json(raw)
