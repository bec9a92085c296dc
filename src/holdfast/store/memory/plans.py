"""Plans in the reference model."""

from collections.abc import Set

from msgspec.structs import replace

from holdfast.core.instants import Instant
from holdfast.core.plans import RegisteredPlan
from holdfast.store import decisions
from holdfast.store.queries import PlanQuery
from holdfast.store.types import PurgePolicy

Body = tuple[str, str]
"""A tenant, and the hash of one of its bodies."""


class Plans:
    """The bodies of plans, and the registered versions."""

    def __init__(self) -> None:
        self._bodies: dict[Body, tuple[bytes, Instant]] = {}
        self._registered: dict[tuple[str, str, str], RegisteredPlan] = {}

    def put(self, tenant: str, sha256: str, body: bytes, now: Instant) -> None:
        """Store a body; if it is known, only update when it was last put."""
        known, _ = self._bodies.get((tenant, sha256), (body, 0))
        self._bodies[tenant, sha256] = known, now

    def get(self, tenant: str, sha256: str) -> bytes | None:
        """Return a body, or None."""
        return self._bodies.get((tenant, sha256), (None, 0))[0]

    def register(self, plan: RegisteredPlan, now: Instant) -> RegisteredPlan:
        """Register a version, or return it as it was registered."""
        known = self._registered.get((plan.tenant, plan.plan_id, plan.plan_version))
        if known is None and (plan.tenant, plan.sha256) not in self._bodies:
            raise decisions.no_such_plan_body(plan)
        if known is not None and known.sha256 != plan.sha256:
            raise decisions.plan_conflict(known)
        stored = known or replace(plan, registered_at=now)
        self._registered[plan.tenant, plan.plan_id, plan.plan_version] = stored
        return stored

    def restore(self, plan: RegisteredPlan) -> None:
        """Put back a version as it was registered."""
        self._registered[plan.tenant, plan.plan_id, plan.plan_version] = plan

    def find(self, query: PlanQuery) -> list[RegisteredPlan]:
        """Return the versions that match the query."""
        found = [
            plan
            for key, plan in sorted(self._registered.items())
            if key > query.after
            and query.tenant in (None, plan.tenant)
            and query.plan_id in (None, plan.plan_id)
            and query.plan_version in (None, plan.plan_version)
        ]
        if query.newest_first:
            found.sort(
                key=lambda plan: (plan.registered_at, plan.tenant, plan.plan_id, plan.plan_version), reverse=True
            )
        return found

    def unused(self, policy: PurgePolicy, used: Set[Body], now: Instant) -> list[Body]:
        """Return the bodies that a purge deletes: those that no run and no remaining version needs."""
        until = decisions.unused_until(policy, now)
        if until is None:
            return []
        named = set() if policy.plans else {(plan.tenant, plan.sha256) for plan in self._registered.values()}
        return [
            key
            for key, (_, put_at) in sorted(self._bodies.items())
            if put_at <= until and policy.tenant in (None, key[0]) and key not in named and key not in used
        ]

    def forget(self, bodies: list[Body], tenant: str | None) -> None:
        """Delete bodies, and all versions that this tenant has registered."""
        for key in bodies:
            del self._bodies[key]
        self._registered = {key: plan for key, plan in self._registered.items() if plan.tenant != tenant}
