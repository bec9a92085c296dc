"""Outcomes of activities that are reported later by the bearer of the completion token: a link in an e-mail, a webhook.

The completion token is all that the bearer needs. It identifies the attempt of a step, cannot be forged, and grants the
right to report one outcome. The response reveals nothing else about the run.
"""

from typing import Annotated, Any, Literal

from msgspec import Meta, Struct

from holdfast.core.keys import ACTIVITY_TOKEN_CHARS, outcome_id
from holdfast.engine.activities.context import NonRetryable
from holdfast.errors import Conflict, NotFound, PayloadTooLarge, RateLimited, RunTerminal
from holdfast.limits import ERROR_TEXT_CHARS
from holdfast.service.context import RequestContext
from holdfast.service.registry import Request, operation

BEARER = "bearer of a completion token"
"""The actor of a reported outcome in the audit log."""

CompletionToken = Annotated[
    str,
    Meta(
        min_length=1,
        max_length=ACTIVITY_TOKEN_CHARS,
        description="`activity_context().token`, as the activity gave it away.",
    ),
]


class CompleteActivity(Request, frozen=True, kw_only=True):
    """The result of an activity that ended without an outcome."""

    completion_token: CompletionToken
    result: Any = None


class FailActivity(Request, frozen=True, kw_only=True):
    """The failure of such an activity. With `retryable` it is tried again, if its policy allows, with a new token."""

    completion_token: CompletionToken
    message: Annotated[str, Meta(max_length=ERROR_TEXT_CHARS)] = ""
    retryable: bool = True


class HeartbeatActivity(Request, frozen=True, kw_only=True):
    """Whose answer is still being worked on."""

    completion_token: CompletionToken


class OutcomeAccepted(Struct, frozen=True):
    """The outcome counts, and will be recorded."""

    accepted: Literal[True] = True


@operation(
    "activities.complete",
    "POST /v1/activities/complete",
    scope=None,
    status=202,
    errors=(Conflict, PayloadTooLarge, RateLimited),
    audit="its commit",
)
async def complete(context: RequestContext, request: CompleteActivity) -> OutcomeAccepted:
    """Report the result of an activity by its completion token, which is all that this needs.

    The first outcome stands. The same one again is answered alike; another, or one that comes too late, by `Conflict`.
    """
    return await _report(context, request.completion_token, request)


@operation(
    "activities.fail",
    "POST /v1/activities/fail",
    scope=None,
    status=202,
    errors=(Conflict, PayloadTooLarge, RateLimited),
    audit="its commit",
)
async def fail(context: RequestContext, request: FailActivity) -> OutcomeAccepted:
    """Report that an activity has failed, by its completion token; answered like `activities.complete`."""
    return await _report(context, request.completion_token, request)


@operation(
    "activities.heartbeat",
    "POST /v1/activities/heartbeat",
    scope=None,
    status=202,
    errors=(Conflict, RateLimited),
    audit="nothing",
)
async def heartbeat(context: RequestContext, request: HeartbeatActivity) -> OutcomeAccepted:
    """Report by the token of a callback that its answer is still being worked on: its `heartbeat_timeout` restarts."""
    return await _report(context, request.completion_token, request)


async def _report(
    context: RequestContext, token: str, request: CompleteActivity | FailActivity | HeartbeatActivity
) -> OutcomeAccepted:
    runtime = context.runtime
    of = runtime.activity_token(token)  # before any lookup, so that made-up tokens cost nothing
    caller = f"completion:{of.run_id}:{outcome_id(of)}"
    context.service.refusals.check(caller)
    actor = context.principal.name or BEARER
    try:
        if isinstance(request, CompleteActivity):
            await runtime.complete_activity(token, request.result, actor=actor, caller=context.principal)
        elif isinstance(request, HeartbeatActivity):
            await runtime.heartbeat_activity(token)
        else:
            error = request.message if request.retryable else NonRetryable(request.message)
            await runtime.fail_activity(token, error, actor=actor, caller=context.principal)
    except (Conflict, NotFound, RunTerminal) as refusal:
        context.service.refusals.count(caller)
        takes = "heartbeats: only that of an open callback with a heartbeat_timeout does"
        what = takes if isinstance(request, HeartbeatActivity) else "outcome any more"
        raise Conflict(f"this completion token takes no {what}") from refusal
    return OutcomeAccepted()
