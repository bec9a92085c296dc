"""Fields that many operations have, with their bounds and what they mean."""

from typing import Annotated

from msgspec import UNSET, Meta, UnsetType

from holdfast.errors import Conflict, HoldfastError, NotFound, NotPermitted, RateLimited, RunTerminal
from holdfast.limits import NAME_BYTES, SIGNAL_ID_BYTES

Name = Annotated[str, Meta(min_length=1, max_length=NAME_BYTES)]
RunId = Annotated[str, Meta(min_length=1, max_length=NAME_BYTES, description="The run's id.")]
StepId = Annotated[str, Meta(min_length=1, max_length=NAME_BYTES, description="The step's id, which is its path.")]
SignalId = Annotated[
    str,
    Meta(
        min_length=1,
        max_length=SIGNAL_ID_BYTES,
        description="The sender's id, of 1 to 128 UTF-8 bytes: a retry with the same id is answered as the first time.",
    ),
]
ActorName = Annotated[
    str, Meta(max_length=NAME_BYTES, description="Who does this, where access is open; else it is who asks.")
]
ActorRoles = Annotated[
    tuple[Name, ...], Meta(max_length=100, description="The roles of who does this, where access is open.")
]
Reason = Annotated[str, Meta(max_length=1_000, description="Why, for the run's history.")]
WaitSeconds = Annotated[float, Meta(ge=0, le=60, description="How long to wait for it, in seconds.")]

OF_A_RUN: tuple[type[HoldfastError], ...] = (NotFound,)
TO_A_RUN: tuple[type[HoldfastError], ...] = (NotFound, Conflict, RunTerminal, NotPermitted, RateLimited)


def given(value: str | UnsetType) -> str | None:
    """Return a text that may have been left out."""
    return None if value is UNSET else str(value)
