"""Definitions in the database: what each version of a workflow declares, as it was published last."""

from collections.abc import Sequence

from holdfast.core.declarations import WorkflowDeclaration
from holdfast.store.port import Plan
from holdfast.store.postgres.columns import askable
from holdfast.store.postgres.pool import Db
from holdfast.store.sql import definition_of, encode

_PUBLISH = """
INSERT INTO holdfast.definitions AS d (plan_id, plan_version, definition)
SELECT x.plan_id, x.plan_version, x.definition
FROM unnest($1::text[], $2::text[], $3::text[]) AS x (plan_id, plan_version, definition)
ORDER BY x.plan_id, x.plan_version
ON CONFLICT (plan_id, plan_version) DO UPDATE SET definition = excluded.definition
WHERE d.definition <> excluded.definition
"""
_FIND = """
SELECT d.plan_id, d.plan_version, d.definition FROM unnest($1::text[], $2::text[]) AS x (plan_id, plan_version)
JOIN holdfast.definitions d ON d.plan_id = x.plan_id AND d.plan_version = x.plan_version
"""


async def publish(db: Db, definitions: Sequence[WorkflowDeclaration]) -> None:
    """Keep definitions in the place of those of the same versions."""
    last = {(one.plan_id, one.plan_version): one for one in definitions}.values()
    columns = [one.plan_id for one in last], [one.plan_version for one in last], [encode(one) for one in last]
    await db.fetch(_PUBLISH, *columns)


async def find(db: Db, plans: Sequence[Plan]) -> list[WorkflowDeclaration | None]:
    """Return the definitions in the order asked for; None where there is none."""
    asked = list(dict.fromkeys((askable(plan_id), askable(version)) for plan_id, version in plans))
    rows = await db.fetch(_FIND, [plan_id for plan_id, _ in asked], [version for _, version in asked])
    found = {(row[0], row[1]): definition_of(row[2]) for row in rows}
    return [found.get(plan) for plan in plans]
