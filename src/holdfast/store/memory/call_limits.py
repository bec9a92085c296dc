"""Limits on activities in the reference model: which calls get a place. `core/call_limits.py` has the rule."""

from collections.abc import Iterable, Mapping
from typing import NamedTuple

from holdfast.core.call_limits import UNLIMITED, CallDecision, CallLimit, LimitState, Line, decide_call, in_turn
from holdfast.core.instants import Instant
from holdfast.store.queries import PlaceInLine

Id = tuple[int, str]
"""A job: the position of its run in order of creation, and its step."""


class Call(NamedTuple):
    """A job that has a limit."""

    id: Id
    tenant: str
    key: str
    visible_at: Instant
    is_taken: bool
    is_wanted: bool
    """Whether the calling node could take it, by its queue and its activity."""

    def has_place(self, now: Instant) -> bool:
        """Return whether an attempt of it is in progress."""
        return self.is_taken and self.visible_at > now

    @property
    def turn(self) -> tuple[Instant, Id]:
        """Its position in its line."""
        return self.visible_at, self.id


def place_in_line(run_id: str, mine: list[Call], name: str, calls: list[Call], now: Instant) -> PlaceInLine:
    """Return the position of the first of a run's waiting calls among all `calls` of its limit."""
    first = min(mine, key=lambda call: call.turn)
    line = [call for call in calls if (call.tenant, call.key) == (first.tenant, first.key)]
    return PlaceInLine(
        run_id=run_id,
        step_id=first.id[1],
        limit=name,
        key=first.key,
        taken=sum(call.has_place(now) for call in calls),
        taken_of_key=sum(call.has_place(now) for call in line),
        before=sum(call.visible_at <= now and call.turn < first.turn for call in line),
        waiting=len(mine),
    )


class CallLimits:
    """For each limit, by its name: when calls have started, and whose turn it is."""

    def __init__(self) -> None:
        self._begins: dict[str, list[tuple[Instant, str, str]]] = {}
        self._last_tenant: dict[str, str] = {}
        self._last_keys: dict[str, dict[str, str]] = {}

    def acquire(
        self,
        calls: Mapping[str, Iterable[Call]],
        limits: Mapping[str, CallLimit],
        most: int,
        now: Instant,
        until: Instant,
    ) -> tuple[list[Id], Instant | None]:
        """Return the calls that get places until then, and when to call again. `calls` are keyed by limit name."""
        taken: list[Id] = []
        instants: list[Instant] = []
        for name, known in sorted(calls.items()):
            limit, left = limits.get(name, UNLIMITED), list(known)
            while len(taken) < most:
                decision = self._decide(name, left, limit, now)
                if decision.line is None:
                    if decision.free_at is not None:
                        instants.append(decision.free_at)
                    elif limit.at_once is not None or limit.per_key is not None:
                        instants += [call.visible_at for call in left if call.is_taken and call.visible_at > now]
                    break
                line = decision.line
                self._begin(name, line.tenant, line.key, limit, now)
                left = [
                    call._replace(is_taken=True, visible_at=until) if call.id == line.first else call for call in left
                ]
                taken.append(line.first)
            instants += [call.visible_at for call in left if call.visible_at > now and call.is_wanted]
        return taken, min(instants, default=None)

    def _decide(self, name: str, calls: list[Call], limit: CallLimit, now: Instant) -> CallDecision[Id]:
        inside = [call for call in calls if call.has_place(now)]
        due = sorted((c for c in calls if c.is_wanted and c.visible_at <= now), key=lambda c: (c.visible_at, c.id))
        first = {(call.tenant, call.key): call.id for call in reversed(due)}
        lines = [
            Line(
                tenant=tenant,
                key=key,
                first=id,
                inside=sum((call.tenant, call.key) == (tenant, key) for call in inside),
                nth_last_begin=self._nth_last(name, limit.key_calls, (tenant, key)),
            )
            for (tenant, key), id in first.items()
        ]
        state = LimitState(inside=len(inside), nth_last_begin=self._nth_last(name, limit.calls))
        last = self._last_tenant.get(name, "")
        ordered = in_turn(lines, last, self._last_keys.get(name, {}))
        return decide_call(limit, state, ordered, now)

    def _nth_last(self, name: str, number: int | None, line: tuple[str, str] | None = None) -> Instant | None:
        if number is None:
            return None
        begins = sorted(at for at, *whose in self._begins.get(name, []) if line is None or tuple(whose) == line)
        return begins[-number] if len(begins) >= number else None

    def _begin(self, name: str, tenant: str, key: str, limit: CallLimit, now: Instant) -> None:
        self._last_tenant[name] = tenant
        self._last_keys.setdefault(name, {})[tenant] = key
        if limit.calls is None and limit.key_calls is None:
            return
        kept = now - max(limit.period_ms, limit.key_period_ms) * 1_000
        begins = [begun for begun in self._begins.get(name, []) if begun[0] > kept]
        self._begins[name] = [*begins, (now, tenant, key)]
