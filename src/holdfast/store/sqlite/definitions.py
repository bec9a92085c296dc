"""Definitions in the file: what each version of a workflow declares, as it was published last."""

import sqlite3
from collections.abc import Sequence

from holdfast.core.declarations import WorkflowDeclaration
from holdfast.store.port import Plan
from holdfast.store.sql import definition_of, encode, plan_keys
from holdfast.store.sqlite.rows import listing

_PUBLISH = (
    "INSERT INTO definitions (plan_id, plan_version, definition) VALUES (?, ?, ?) ON CONFLICT DO UPDATE "
    "SET definition = excluded.definition WHERE definition <> excluded.definition"
)
_FIND = (
    "SELECT plan_id, plan_version, definition FROM definitions "
    "WHERE plan_id || char(10) || plan_version IN (SELECT value FROM json_each(?))"
)


def publish(db: sqlite3.Connection, definitions: Sequence[WorkflowDeclaration]) -> None:
    """Keep definitions in the place of those of the same versions."""
    db.executemany(_PUBLISH, [(one.plan_id, one.plan_version, encode(one)) for one in definitions])


def find(db: sqlite3.Connection, plans: Sequence[Plan]) -> list[WorkflowDeclaration | None]:
    """Return the definitions in the order asked for; None where there is none."""
    found = {(row[0], row[1]): definition_of(row[2]) for row in db.execute(_FIND, (listing(plan_keys(plans)),))}
    return [found.get(plan) for plan in plans]
