"""Signals that workflows send to other runs, checked before they are committed against what those runs declare."""

from collections.abc import Mapping, Sequence
from typing import Any

from msgspec.structs import replace

from holdfast.core.instants import Instant
from holdfast.core.messages import SignalRequest
from holdfast.core.names import RESERVED_PREFIX
from holdfast.engine.inbox.declarations import Declarations, Declared
from holdfast.errors import CallerError
from holdfast.store.outgoing import refused_letter
from holdfast.store.port import RunHead, Turn


def has_signals(turns: Sequence[Turn]) -> bool:
    """Return whether one of the turns has a signal for another run that a workflow sends."""
    return any(turn.sends and any(map(_is_signal, turn.sends)) for turn in turns)


async def refuse_misfits(
    declarations: Declarations, turns: Sequence[Turn], heads: Sequence[RunHead], now: Instant
) -> list[Turn]:
    """Return turns without the signals that do not keep to what their targets declare: a dead letter stands for each.

    A target in another place than its sender is left to the store, which refuses it as if it were not there: the
    sender is told nothing of what it declares.
    """
    new = {new.run_id: (new.plan_id, new.plan_version) for turn in turns for new in turn.starts}
    declared = await declarations.of_runs([s.run_id for turn in turns for s in turn.sends if _is_signal(s)], new)
    checked = []
    for turn, head in zip(turns, heads, strict=True):
        place = head.tenant, head.project, head.environment
        near = {
            run_id: declaration
            for run_id, declaration in declared.items()
            if turn.crosses_tenants or declarations.places.get(run_id, place) == place
        }
        checked.append(_without_misfits(turn, near, now) if turn.sends else turn)
    return checked


def _is_signal(item: Any) -> bool:
    return isinstance(item, SignalRequest) and not item.name.startswith(RESERVED_PREFIX)


def _without_misfits(turn: Turn, declared: Mapping[str, Declared | None], now: Instant) -> Turn:
    sends: list[Any] = []
    dead = list(turn.dead)
    for place, item in enumerate(turn.sends):
        declaration = declared.get(item.run_id) if _is_signal(item) else None
        try:
            if declaration is not None and isinstance(item, SignalRequest):
                declaration.check(item.name, item.payload)
            sends.append(item)
        except CallerError as problem:
            what = f"{getattr(item, 'name', '')!r} to run {item.run_id!r}"
            dead.append(refused_letter(turn, f"undeclared {place}", what, item, problem, now))
    return turn if len(sends) == len(turn.sends) else replace(turn, sends=tuple(sends), dead=tuple(dead))
