"""`acquire_limited_jobs`: which calls of activities with a limit get a place.

`core/call_limits.py` decides; this module has the queries whose results it needs. The lines of a limit are read in the
order of their turns, each with an index lookup, until one has room: calls that wait in a line cost nothing.
"""

import sqlite3
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from holdfast.core.call_limits import UNLIMITED, CallDecision, CallLimit, LimitState, Line, decide_call
from holdfast.core.instants import Instant
from holdfast.store import port, sql
from holdfast.store.queries import PLACES_COUNTED
from holdfast.store.sqlite import jobs, queries

Id = tuple[int, str]

ANY = """
SELECT 1 FROM jobs WHERE queue = ? AND visible_at IS NOT NULL AND activity IN (SELECT value FROM json_each(?)) LIMIT 1
"""
NEXT_NAME = """
SELECT limit_name FROM jobs INDEXED BY jobs_lines
WHERE limit_name > ? AND visible_at IS NOT NULL ORDER BY limit_name LIMIT 1
"""
# The next line: of any tenant, or of a tenant within bounds of the keys.
NEXT_TENANT = """
SELECT limit_tenant FROM jobs INDEXED BY jobs_lines
WHERE limit_name = ? AND limit_tenant > ? AND visible_at IS NOT NULL ORDER BY limit_tenant LIMIT 1
"""
NEXT_KEY = """
SELECT limit_key FROM jobs INDEXED BY jobs_lines
WHERE limit_name = ? AND limit_tenant = ? AND limit_key {above} ? AND visible_at IS NOT NULL
ORDER BY limit_key LIMIT 1
"""
FIRST = """
SELECT run_no, step_id FROM jobs INDEXED BY jobs_lines
WHERE limit_name = :name AND limit_tenant = :tenant AND limit_key = :key AND visible_at <= :now
    AND queue IN (SELECT value FROM json_each(:queues)) AND activity IN (SELECT value FROM json_each(:activities))
ORDER BY visible_at, run_no, step_id LIMIT 1
"""
INSIDE_LINE = """
SELECT count(*) FROM jobs INDEXED BY jobs_lines
WHERE limit_name = ? AND limit_tenant = ? AND limit_key = ? AND visible_at > ? AND taken_by IS NOT NULL
"""
INSIDE = """
SELECT count(*), min(visible_at) FROM jobs INDEXED BY jobs_places
WHERE limit_name = ? AND visible_at > ? AND taken_by IS NOT NULL
"""
NTH_LAST = "SELECT begun_at FROM limit_begins WHERE name = ? ORDER BY begun_at DESC LIMIT 1 OFFSET ?"
NTH_LAST_OF_KEY = """
SELECT begun_at FROM limit_begins WHERE name = ? AND tenant = ? AND key = ? ORDER BY begun_at DESC LIMIT 1 OFFSET ?
"""
LAST = "SELECT last FROM limit_turns WHERE name = ? AND tenant = ?"
TURN = "INSERT INTO limit_turns VALUES (?, ?, ?) ON CONFLICT DO UPDATE SET last = excluded.last"
FORGET = "DELETE FROM limit_begins WHERE name = ? AND begun_at <= ?"
BEGIN = """
INSERT INTO limit_begins SELECT ?1, ?2, coalesce(max(number), 0) + 1, ?3, ?4 FROM limit_begins
WHERE name = ?1 AND begun_at = ?2
"""
PLACES = f"""
WITH asked AS MATERIALIZED (
    SELECT run_no, run_id FROM runs WHERE run_id IN (SELECT value FROM json_each(:run_ids)) AND finished_at IS NULL
), calls AS (
    SELECT run_id, j.run_no AS run_no, step_id, limit_name AS name, limit_tenant AS tenant, limit_key AS key,
        visible_at,
        row_number() OVER (PARTITION BY j.run_no ORDER BY visible_at, step_id) AS place,
        count(*) OVER (PARTITION BY j.run_no) AS waiting
    FROM asked CROSS JOIN jobs j ON j.run_no = asked.run_no
    WHERE limit_name IS NOT NULL AND visible_at <= :now
        AND NOT EXISTS (SELECT 1 FROM gate_runs w WHERE w.run_no = asked.run_no AND NOT w.is_inside)
)
SELECT run_id, step_id, name, key, (
    SELECT count(*) FROM (
        SELECT 1 FROM jobs AS t INDEXED BY jobs_places
        WHERE t.limit_name = name AND t.visible_at > :now AND t.taken_by IS NOT NULL LIMIT {PLACES_COUNTED}
    )
), (
    SELECT count(*) FROM (
        SELECT 1 FROM jobs AS t INDEXED BY jobs_lines
        WHERE t.limit_name = name AND t.limit_tenant = tenant AND t.limit_key = key AND t.visible_at > :now
            AND t.taken_by IS NOT NULL LIMIT {PLACES_COUNTED}
    )
), (
    SELECT count(*) FROM (
        SELECT 1 FROM jobs AS t INDEXED BY jobs_lines
        WHERE t.limit_name = name AND t.limit_tenant = tenant AND t.limit_key = key AND t.visible_at <= calls.visible_at
            AND (t.visible_at, t.run_no, t.step_id) < (calls.visible_at, calls.run_no, calls.step_id)
        LIMIT {PLACES_COUNTED}
    )
), waiting FROM calls WHERE place = 1
UNION ALL
SELECT run_id, '', g.plan_id, g.key, gates.inside,
    coalesce((SELECT inside FROM gate_lines l WHERE (l.plan_id, l.tenant, l.key) = (g.plan_id, g.tenant, g.key)), 0), (
        SELECT count(*) FROM (
            SELECT 1 FROM gate_runs AS b INDEXED BY gate_runs_waiting
            WHERE b.plan_id = g.plan_id AND b.tenant = g.tenant AND b.key = g.key AND NOT b.is_inside
                AND (b.place, b.run_no) < (g.place, g.run_no) LIMIT {PLACES_COUNTED}
        )
    ), 1
FROM asked CROSS JOIN gate_runs g ON g.run_no = asked.run_no AND NOT g.is_inside
    CROSS JOIN gates ON gates.plan_id = g.plan_id
ORDER BY 1 LIMIT :limit
"""
NEXT_VISIBLE = """
SELECT visible_at FROM jobs WHERE queue = ? AND visible_at > ? AND activity IN (SELECT value FROM json_each(?))
ORDER BY visible_at LIMIT 1
"""


def are_there(db: sqlite3.Connection, queues: Sequence[str], activities: Sequence[str]) -> bool:
    """Return whether these queues have calls of these activities."""
    listed = queries.listing(activities)
    return any(db.execute(ANY, (queue, listed)).fetchone() for queue in queues)


def find_places(db: sqlite3.Connection, query: port.PlaceQuery, limit: int, now: Instant) -> list[port.PlaceInLine]:
    """Return what waits for a place in these runs: calls under their limits, and runs to be admitted."""
    asked = {"run_ids": queries.listing(query.run_ids), "now": now, "limit": limit}
    return [sql.place_of(row) for row in db.execute(PLACES, asked)]


def acquire(
    db: sqlite3.Connection,
    node: str,
    queues: Sequence[str],
    activities: Sequence[str],
    limits: Mapping[str, CallLimit],
    most: int,
    visible_ms: int,
    now: Instant,
) -> tuple[list[port.Job], Instant | None]:
    """Acquire up to `most` jobs that have room under their limits, ordered by the limits' names."""
    look = _Look(db, queries.listing(queues), queries.listing(activities), now)
    taken: list[port.Job] = []
    instants: list[Instant] = []
    name = ""
    while (found := db.execute(NEXT_NAME, (name,)).fetchone()) is not None and len(taken) < most:
        [name] = found
        limit = limits.get(name, UNLIMITED)
        while len(taken) < most:
            decision, until = look.decide(name, limit)
            if decision.line is None:
                instants += [each for each in (decision.free_at, until) if each is not None]
                break
            run_no, step_id = decision.line.first
            job = jobs.acquire_one(db, node, run_no, step_id, now + visible_ms * 1_000, now)
            if job is not None:
                _begin(db, name, decision.line, limit, now)
                taken.append(job)
    for queue in set(queues):
        instants += [at for (at,) in db.execute(NEXT_VISIBLE, (queue, now, look.activities))]
    return taken, min(instants, default=None)


class _Look:
    """The calls that one `acquire` can take."""

    def __init__(self, db: sqlite3.Connection, queues: str, activities: str, now: Instant) -> None:
        self._db = db
        self._queues = queues
        self.activities = activities
        self._now = now

    def decide(self, name: str, limit: CallLimit) -> tuple[CallDecision[Id], Instant | None]:
        """Return the next call; and when a place of the limit expires, if that is what calls wait for."""
        inside, expires_at = 0, None
        if limit.at_once is not None or limit.per_key is not None:
            inside, expires_at = self._db.execute(INSIDE, (name, self._now)).fetchone()
        nth_last = None
        if limit.calls is not None:
            nth_last = self._one(NTH_LAST, name, limit.calls - 1)
        state = LimitState(inside=inside, nth_last_begin=nth_last)
        decision = decide_call(limit, state, self._lines(name, limit), self._now)
        return decision, expires_at if decision.line is None and decision.free_at is None else None

    def _lines(self, name: str, limit: CallLimit) -> Iterator[Line[Id]]:
        """Yield the lines in the order of their turns."""
        last_tenant = self._one(LAST, name, "") or ""
        for tenant in self._tenants(name, last_tenant):
            last_key = self._one(LAST, name, tenant)
            for key in self._keys(name, tenant, last_key):
                asked = {"name": name, "tenant": tenant, "key": key, "now": self._now}
                asked |= {"queues": self._queues, "activities": self.activities}
                first = self._db.execute(FIRST, asked).fetchone()
                if first is not None:
                    yield Line(
                        tenant=tenant,
                        key=key,
                        first=first,
                        inside=self._one(INSIDE_LINE, name, tenant, key, self._now) if limit.per_key else 0,
                        nth_last_begin=self._one(NTH_LAST_OF_KEY, name, tenant, key, limit.key_calls - 1)
                        if limit.key_calls
                        else None,
                    )

    def _tenants(self, name: str, last: str) -> Iterator[str]:
        place = last
        while (tenant := self._one(NEXT_TENANT, name, place)) is not None:
            yield tenant
            place = tenant
        place = ""
        while (tenant := self._one(NEXT_TENANT, name, place)) is not None and tenant <= last:
            yield tenant
            place = tenant

    def _keys(self, name: str, tenant: str, last: str | None) -> Iterator[str]:
        query = NEXT_KEY.format(above=">")
        if last is not None:
            place = last
            while (key := self._one(query, name, tenant, place)) is not None:
                yield key
                place = key
        key = self._one(NEXT_KEY.format(above=">="), name, tenant, "")
        while key is not None and (last is None or key <= last):
            yield key
            key = self._one(query, name, tenant, key)

    def _one(self, query: str, *values: object) -> Any:
        found = self._db.execute(query, values).fetchone()
        return None if found is None else found[0]


def _begin(db: sqlite3.Connection, name: str, line: Line[Id], limit: CallLimit, now: Instant) -> None:
    """Record the start of an attempt: the last turn, and the instant if a rate counts it."""
    db.execute(TURN, (name, "", line.tenant))
    db.execute(TURN, (name, line.tenant, line.key))
    if limit.calls is not None or limit.key_calls is not None:
        db.execute(FORGET, (name, now - max(limit.period_ms, limit.key_period_ms) * 1_000))
        db.execute(BEGIN, (name, now, line.tenant, line.key))
