"""How the SQL stores search runs by attributes and in an order: one plan, whose SQL both databases understand.

A search is *driven* by an index, in the order of the answer: that of the attribute to order by; or, for the newest
runs, that of one condition. The other conditions are checked run by run. So many entries of the driving index are read
at a time, and the answer then has a cursor: what a search costs is bounded, whatever it looks for.

For the newest runs a condition drives if it holds of few runs, as a bounded count shows, or if it is an equality,
whose entries are in the order of creation. If there is none, so many runs match that walking through the newest ones
finds a page soon.
"""

from collections.abc import Callable, Sequence
from typing import Any

from msgspec import Struct

from holdfast.core.search import Condition, Order
from holdfast.store.sql import HEAD, Where, found_of, head_of
from holdfast.store.types import Found, RunCountQuery, RunHead, RunQuery, within

FEW = 2_000
"""How many runs a condition holds of at most, to be read and sorted for one answer."""

LOOK = 500
"""How many entries of the driving index are read for one answer, unless the query says so."""


class Driver(Struct, frozen=True):
    """The part of a search that an index answers, in order: statements with `?` for each value."""

    source: str
    """The table, and the conditions."""
    values: tuple[Any, ...]
    value: str
    """The expression that is ordered by, before the number of the run."""
    direction: str

    def rows(self, limit: int, skip: int = 0) -> tuple[str, list[Any]]:
        """Return the statement of so many of its rows: number, and value."""
        order = f"{self.value} {self.direction}, " if self.value != "0" else ""
        text = (
            f"SELECT run_no AS driven_no, {self.value} AS driven_value FROM {self.source} "
            f"ORDER BY {order}run_no {self.direction} LIMIT {limit:d} OFFSET {skip:d}"
        )
        return text, list(self.values)


def is_driven(query: RunQuery) -> bool:
    """Return whether a query may be driven by an index of attributes, or by the time of end."""
    return query.order is not None or (query.newest and bool(query.where))


def column_of(kind: str | None) -> str:
    """Return the column of the index that holds values of this kind."""
    return "word" if kind == "s" else "number"


def add_attribute_conditions(where: Where, query: RunQuery, prefix: str) -> None:
    """Add that each condition holds of a run's attributes. SQLite, without statistics, would walk another index."""
    index = "" if prefix else "INDEXED BY run_attributes_run "
    for condition in query.where:
        of_run = f"SELECT 1 FROM {prefix}run_attributes a {index}WHERE a.run_no = runs.run_no AND a.name = ?"
        if condition.operator in ("exists", "missing"):
            negation = "" if condition.operator == "exists" else "NOT "
            where.add(f"{negation}EXISTS ({of_run})", condition.name)
            continue
        of_kind = f"{of_run} AND a.kind = ? AND a.{column_of(condition.kind)}"
        given = (condition.name, condition.kind, condition.value)
        if condition.operator == "!=":
            where.add(f"EXISTS ({of_kind} IS NOT NULL)", *given[:2])
            where.add(f"NOT EXISTS ({of_kind} = ?)", *given)
        else:
            where.add(f"EXISTS ({of_kind} {condition.operator} ?)", *given)


def number_query(prefix: str, *, descending: bool) -> str:
    """Return the statement of a run's number, of (run id, created_at); if it was deleted, of the one before it."""
    return (
        f"SELECT coalesce((SELECT run_no FROM {prefix}runs WHERE run_id = ?), (SELECT run_no + {int(descending)} "
        f"FROM {prefix}runs WHERE created_at <= ? ORDER BY run_no DESC LIMIT 1), 0)"
    )


def ordered_driver(query: RunQuery, order: Order, number: int, prefix: str) -> Driver:
    """Return what leads to the runs in an order, from behind a value and a number."""
    where = Where()
    direction = "DESC" if order.descending else "ASC"
    beyond = "<" if order.descending else ">"
    if order.kind is None:
        value = "finished_at" if order.name == "finished_at" else "0"
        if value != "0":
            where.add("finished_at IS NOT NULL")
            where.add_given("finished_at >= ?", query.finished_from)
            where.add_given("finished_at < ?", query.finished_until)
        if query.behind is not None and value != "0":
            where.add(f"({value}, run_no) {beyond} (?, ?)", int(query.behind[0]), number)
        else:
            where.add(f"run_no {beyond} ?", number if query.behind is not None else -1 if beyond == ">" else 2**62)
        return Driver(f"{prefix}runs {where.text}", tuple(where.values()), value, direction)
    value = column_of(order.kind)
    where.add(f"name = ? AND kind = ? AND {value} IS NOT NULL", order.name, order.kind)
    for condition in query.where:
        if (condition.name, condition.kind) == (order.name, order.kind) and _is_comparison(condition):
            where.add(f"{value} {condition.operator} ?", condition.value)
    if query.behind is not None:
        where.add(f"({value}, run_no) {beyond} (?, ?)", query.behind[0], number)
    return Driver(f"{prefix}run_attributes {where.text}", tuple(where.values()), value, direction)


def condition_groups(query: RunQuery) -> list[tuple[Condition, ...]]:
    """Return the conditions that can drive a search; those on one number together, because it is never a list."""
    groups: dict[Any, tuple[Condition, ...]] = {}
    for index, condition in enumerate(query.where):
        if condition.kind is not None and (_is_comparison(condition) or condition.operator == "exists"):
            key = (condition.name, condition.kind) if condition.kind != "s" else index
            groups[key] = (*groups.get(key, ()), condition)
    return list(groups.values())


def _is_comparison(condition: Condition) -> bool:
    return condition.operator not in ("!=", "exists", "missing")


def group_driver(group: Sequence[Condition], before: int, prefix: str) -> Driver:
    """Return what leads to the newest runs of which these conditions hold."""
    where = Where()
    column = column_of(group[0].kind)
    where.add(f"name = ? AND kind = ? AND {column} IS NOT NULL", group[0].name, group[0].kind)
    for condition in group:
        if _is_comparison(condition):
            where.add(f"{column} {condition.operator} ?", condition.value)
    where.add("run_no < ?", before)
    return Driver(f"{prefix}run_attributes {where.text}", tuple(where.values()), "0", "DESC")


def count_query(driver: Driver) -> tuple[str, list[Any]]:
    """Return the statement that counts the entries of a driver, up to one more than are few."""
    return f"SELECT count(*) FROM (SELECT 1 FROM {driver.source} LIMIT {FEW + 1}) x", list(driver.values)


def choose(groups: list[tuple[Condition, ...]], counts: list[int]) -> tuple[Condition, ...] | None:
    """Return the conditions that drive a search: those that hold of few runs; else an equality; else none."""
    few = [(count, place) for place, count in enumerate(counts) if count <= FEW]
    if few:
        return groups[min(few)[1]]
    return next((group for group in groups if any(each.operator == "=" for each in group)), None)


def heads_query(driver: Driver, look: int, where: Where, limit: int, prefix: str) -> tuple[str, list[Any]]:
    """Return the statement of the runs that match, with what they are ordered by."""
    rows, values = driver.rows(look)
    order = f"driven_value {driver.direction}, " if driver.value != "0" else ""
    text = (
        f"SELECT {HEAD}, driven_value FROM ({rows}) driven JOIN {prefix}runs ON runs.run_no = driven_no "
        f"{where.text} ORDER BY {order}driven_no {driver.direction} LIMIT {limit:d}"
    )
    return text, values + where.values()


def end_query(driver: Driver, look: int, prefix: str) -> tuple[str, list[Any]]:
    """Return the statement of the place at which so many entries of the driver end: value, created_at, run id."""
    rows, values = driver.rows(1, look - 1)
    text = f"SELECT driven_value, created_at, run_id FROM ({rows}) driven JOIN {prefix}runs ON runs.run_no = driven_no"
    return text, values


def found_runs(
    query: RunQuery, rows: Sequence[Any], limit: int, end: Any, size_of: Callable[[Any], int]
) -> Found[RunHead]:
    """Return an answer with its cursor, if there may be more. `end` is where the entries end that were looked at."""
    taken = list(within(rows, query.most_bytes, size_of))
    place: Any = None
    if taken and (len(taken) < len(rows) or len(rows) == limit):
        place = (taken[-1][-1], taken[-1][14], taken[-1][1])
    elif end is not None:
        place = tuple(end)
    if place is not None and query.order is None:
        place = place[1:]
    found = found_of(taken, lambda row: head_of(tuple(row)[:-1]), lambda row: str(row[1]), lambda row: None)
    return Found(found, place, found.unreadable)


def counts_query(query: RunCountQuery, driver: Driver | None, where: Where, prefix: str) -> tuple[str, list[Any]]:
    """Return the statement of the counts: workflow, status, count."""
    if driver is None:
        rows: str = f"SELECT run_no AS driven_no FROM {prefix}runs ORDER BY run_no DESC LIMIT {query.look:d}"
        values: list[Any] = []
    else:
        rows, values = driver.rows(query.look)
    text = (
        f"SELECT plan_id, status, count(*) FROM ({rows}) driven JOIN {prefix}runs ON runs.run_no = driven_no "
        f"{where.text} GROUP BY plan_id, status ORDER BY plan_id, status"
    )
    return text, values + where.values()


def beyond_query(query: RunCountQuery, driver: Driver | None, prefix: str) -> tuple[str, list[Any]]:
    """Return the statement that finds whether there is more than was counted."""
    if driver is None:
        return f"SELECT 1 FROM {prefix}runs ORDER BY run_no DESC LIMIT 1 OFFSET {query.look:d}", []
    return driver.rows(1, query.look)
