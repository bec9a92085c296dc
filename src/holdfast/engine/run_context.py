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
    """What is bound, and in which attempt of an activity: a node's own context is not that of its runs."""

    texts: Mapping[str, str]
    inside: ActivityContext | None


BOUND: ContextVar[_Bound | None] = ContextVar("holdfast_context", default=None)
"""What is bound around the code that runs."""


def context() -> dict[str, str]:
    """Return the context: of the run, inside a workflow or an activity; elsewhere what `bind_context` has bound.

    In a workflow it is the same on every replay. It is a copy.
    """
    program = current_program()
    return texts_of(program.about.context) if program is not None else _around()


def _around() -> dict[str, str]:
    """Return what is bound around code that is no workflow's."""
    activity, bound = current_activity(), BOUND.get()
    if bound is not None and bound.inside is activity:
        return dict(bound.texts)
    return {} if activity is None else activity.run_context


@contextmanager
def bind_context(**texts: str) -> Iterator[None]:
    """Add these texts to the context of runs and schedules that are started inside the `with`."""
    refuse_inside("bind_context", "a run keeps the context that it was started with")
    encode_context(texts)  # which raises where it is wrong, and not where something is started
    token = BOUND.set(_Bound({**_around(), **texts}, current_activity()))
    try:
        yield
    finally:
        BOUND.reset(token)


def context_of_start(texts: Mapping[str, str]) -> Raw:
    """Return the context of what is started here: what is bound, and these texts; redacted of an activity's secrets."""
    raw = encode_context({**_around(), **texts})
    redactor = current_redactor()
    return raw if redactor is None else redactor.json(raw)
