"""How the SQL stores search runs: one query plan, whose SQL both databases understand.

A search is *driven* by an index; all other conditions are checked run by run. What can drive a search is called a
source: the entries of a search attribute (of one tenant, if the query names one), the runs of a status, a tenant or a
workflow, and those that ended within a period. The entries of each source are counted, up to `FEW`:

- If a source has few, its runs are gathered and sorted, and the answer is complete, in any order.
- Otherwise an index is walked in the order of the answer. For the newest runs this is the index of a source that is in
  order of creation, or else all runs, of which so many match that a page is found soon. For another order it is the
  index of that order. Only so many entries are walked at a time, and the answer then has a cursor. So the cost of a
  search is bounded, whatever it searches for.

The tenant `default` is no source, and is not in the indexes by tenant: installations without tenants pay nothing for
them. Completed runs are no source either, because nearly all runs are completed.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

from msgspec import Struct
from msgspec.structs import replace

from holdfast.core.search import Condition, Order, after_prefix
from holdfast.core.state import RunStatus
from holdfast.store.queries import Found, RunCount, RunCountQuery, RunQuery, within
from holdfast.store.sql import HEAD, Where, count_rows, found_of, head_of
from holdfast.store.types import RunHead

FEW = 5_000
"""How many entries of a source are gathered and sorted for one answer, at most."""

LOOK = 500
"""How many entries of an index are walked for one answer, unless the query sets another number."""

LONG_LOOK = 20_000
"""How many entries are walked at a time for a query that must be answered in full."""

WITHOUT_INDEX = "default"
"""The tenant of installations without tenants."""


class Source(Struct, frozen=True):
    """Entries of an index: the table and the conditions, with `?` for each value."""

    text: str
    values: tuple[Any, ...]
    is_ordered: bool
    """Whether the entries are in order of creation."""


class Driver(Struct, frozen=True):
    """What drives a search: run numbers and the values they are sorted by, in the order of the answer."""

    source: Source
    direction: str
    value: str = "0"
    """The expression to sort by, before the number of the run."""
    is_gathered: bool = False
    """Whether all entries are taken and sorted."""
    order: Order | None = None
    """Of gathered runs: their order, and the position to start behind."""
    behind: tuple[Any, int] | None = None

    def rows(self, limit: int, skip: int = 0) -> tuple[str, list[Any]]:
        """Return the statement that reads a number of its rows: run number and value."""
        order = f"{self.value} {self.direction}, " if self.value != "0" else ""
        text = (
            f"SELECT run_no AS driven_no, {self.value} AS driven_value FROM {self.source.text} "
            f"ORDER BY {order}run_no {self.direction} LIMIT {limit:d} OFFSET {skip:d}"
        )
        return text, list(self.source.values)

    def gathered(self, prefix: str) -> tuple[str, list[Any]]:
        """Return the statement that reads all its rows, which are few. A list may have several entries of one run."""
        numbers = f"SELECT DISTINCT run_no FROM (SELECT run_no FROM {self.source.text} LIMIT {FEW:d}) found"
        values = list(self.source.values)
        order = self.order
        if order is None or _is_by_creation(order):
            return f"SELECT run_no AS driven_no, 0 AS driven_value FROM ({numbers}) gathered", values
        if order.kind is None:
            value, named = f"SELECT o.finished_at FROM {prefix}runs o WHERE o.run_no = gathered.run_no", []
        else:
            index = "" if prefix else " INDEXED BY run_attributes_run"
            value = (
                f"SELECT o.{column_of(order.kind)} FROM {prefix}run_attributes o{index} "
                "WHERE o.run_no = gathered.run_no AND o.name = ? AND o.kind = ? LIMIT 1"
            )
            named = [order.name, order.kind]
        where = Where()
        where.add("driven_value IS NOT NULL")
        if self.behind is not None:
            where.add(f"(driven_value, driven_no) {'<' if order.descending else '>'} (?, ?)", *self.behind)
        text = (
            f"SELECT driven_no, driven_value FROM (SELECT run_no AS driven_no, ({value}) AS driven_value "
            f"FROM ({numbers}) gathered{_apart(prefix)}) valued {where.text}"
        )
        return text, [*named, *values, *where.values()]


def _apart(prefix: str) -> str:
    """Return what keeps PostgreSQL from joining a part with others, and reading a whole attribute for that."""
    return " OFFSET 0" if prefix else ""


def is_driven(query: RunQuery) -> bool:
    """Return whether an index may drive a query."""
    if query.run_ids is not None or query.reference_key is not None or query.parent_run_id is not None:
        return query.order is not None or (query.newest and bool(query.where))
    return query.order is not None or (query.newest and next(_kinds(query), None) is not None)


def _kinds(query: RunQuery) -> Iterator[str]:
    """Yield the possible sources other than attributes."""
    if query.where:
        yield "where"
    if query.status not in (None, RunStatus.COMPLETED):
        yield "status"
    if query.tenant not in (None, WITHOUT_INDEX):
        yield "tenant"
    if query.finished_from is not None or query.finished_until is not None:
        yield "finished"
    if query.workflow is not None:
        yield "workflow"


def column_of(kind: str | None) -> str:
    """Return the column of the index that holds values of this kind."""
    return "word" if kind == "s" else "number"


def compared(column: str, condition: Condition) -> tuple[str, tuple[Any, ...]]:
    """Return how to compare a column with the value of a condition, and the value to compare with."""
    if condition.operator != "prefix":
        return f"{column} {condition.operator} ?", (condition.value,)
    end = after_prefix(str(condition.value))
    return (f"{column} >= ?", (condition.value,)) if end is None else (
        f"{column} >= ? AND {column} < ?", (condition.value, end)
    )  # fmt: skip


def add_attribute_conditions(where: Where, query: RunQuery, prefix: str) -> None:
    """Add that each condition holds for a run's attributes. SQLite, without statistics, would walk another index."""
    index = "" if prefix else "INDEXED BY run_attributes_run "
    for condition in query.where:
        of_run = f"SELECT 1 FROM {prefix}run_attributes a {index}WHERE a.run_no = runs.run_no AND a.name = ?"
        if condition.operator in ("exists", "missing"):
            negation = "" if condition.operator == "exists" else "NOT "
            where.add(f"{negation}EXISTS ({of_run}{_apart(prefix)})", condition.name)
            continue
        # The entries of one run are few. PostgreSQL, by its estimates, would also search all entries with the value.
        kind = "(a.kind || '')" if prefix else "a.kind"
        of_kind = f"{of_run} AND {kind} = ? AND "
        given = (condition.name, condition.kind)
        column = f"a.{column_of(condition.kind)}"
        if condition.operator == "!=":
            where.add(f"EXISTS ({of_kind}{column} IS NOT NULL{_apart(prefix)})", *given)
            where.add(f"NOT EXISTS ({of_kind}{column} = ?{_apart(prefix)})", *given, condition.value)
        else:
            text, values = compared(column, condition)
            where.add(f"EXISTS ({of_kind}{text}{_apart(prefix)})", *given, *values)


def number_query(prefix: str, *, descending: bool) -> str:
    """Return the statement that finds a run's number from (run id, created_at), or the one before a deleted run's."""
    return (
        f"SELECT coalesce((SELECT run_no FROM {prefix}runs WHERE run_id = ?), (SELECT run_no + {int(descending)} "
        f"FROM {prefix}runs WHERE created_at <= ? ORDER BY run_no DESC LIMIT 1), 0)"
    )


# --- sources


def sources(query: RunQuery, prefix: str, bound: tuple[str, Any] | None = None) -> list[Source]:
    """Return what can drive a query. `bound` restricts the numbers of runs, such as ("run_no < ?", 7).

    The more specific ones come first: among those with many entries, the first ordered one is used.
    """
    kinds = set(_kinds(query)) - _read_in_order(query)
    found: list[Source] = []
    status = None if query.status is None else str(query.status)
    if "status" in kinds and query.tenant not in (None, WITHOUT_INDEX):
        given = ("tenant = ? AND tenant <> 'default' AND status = ? AND status <> 'COMPLETED'", query.tenant, status)
        found.append(_of_runs("runs_by_tenant_status", prefix, given))
    elif "status" in kinds:
        found.append(_of_runs("runs_by_status", prefix, ("status = ? AND status <> 'COMPLETED'", status)))
    groups = [] if "where" not in kinds else condition_groups(query)
    found += [_attribute_source(group, query.tenant, prefix) for group in groups]
    if "finished" in kinds:
        found.append(finished_source(query, prefix))
    if "tenant" in kinds:
        found.append(_of_runs("runs_by_tenant", prefix, ("tenant = ? AND tenant <> 'default'", query.tenant)))
    if "workflow" in kinds:
        condition = "plan_id = ? AND plan_id <> ''" if prefix else "plan_id = ?"  # as in PostgreSQL's index
        found.append(_of_runs("runs_by_workflow", prefix, (condition, query.workflow)))
    if bound is None:
        return found
    return [Source(f"{each.text} AND {bound[0]}", (*each.values, bound[1]), each.is_ordered) for each in found]


def _read_in_order(query: RunQuery) -> set[str]:
    """Return the conditions that the index of the order covers already: they need not be gathered and sorted."""
    order = query.order
    if order is None or _is_by_creation(order):
        return set()
    if order.kind is None:
        return {"tenant", "finished"}
    is_own = all((each.name, each.kind) == (order.name, order.kind) for each in query.where)
    return {"tenant", "where"} if is_own else {"tenant"}


def _of_runs(index: str, prefix: str, *conditions: tuple[Any, ...], is_ordered: bool = True) -> Source:
    where = Where()
    for condition in conditions:
        where.add(*condition)
    hint = "" if prefix else f" INDEXED BY {index}"
    return Source(f"{prefix}runs{hint} {where.text}", tuple(where.values()), is_ordered)


def finished_source(query: RunQuery, prefix: str) -> Source:
    """Return the runs that ended within the period of a query, ordered by when they ended."""
    given: list[tuple[Any, ...]] = [("finished_at IS NOT NULL",)]
    index = "runs_finished"
    if query.tenant not in (None, WITHOUT_INDEX):
        given.append(("tenant = ? AND tenant <> 'default'", query.tenant))
        index = "runs_by_tenant_finished"
    if query.finished_from is not None:
        given.append(("finished_at >= ?", query.finished_from))
    if query.finished_until is not None:
        given.append(("finished_at < ?", query.finished_until))
    return _of_runs(index, prefix, *given, is_ordered=False)


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


def _attribute_source(group: Sequence[Condition], tenant: str | None, prefix: str) -> Source:
    return attribute_source(group[0].name, group[0].kind, group, tenant, prefix)[0]


def attribute_source(
    name: str, kind: str | None, conditions: Sequence[Condition], tenant: str | None, prefix: str
) -> tuple[Source, str]:
    """Return the entries of an attribute that meet the conditions, and the column of its values."""
    where = Where()
    table, column = f"{prefix}run_attributes", column_of(kind)
    if tenant is not None:
        where.add("tenant = ?", tenant)
        if not prefix:
            table, column = "tenant_attributes", "value"
    where.add(f"name = ? AND kind = ? AND {column} IS NOT NULL", name, kind)
    for condition in conditions:
        if _is_comparison(condition):
            text, values = compared(column, condition)
            where.add(text, *values)
    is_ordered = any(condition.operator == "=" for condition in conditions)
    return Source(f"{table} {where.text}", tuple(where.values()), is_ordered), column


def count_query(source: Source) -> tuple[str, list[Any]]:
    """Return the statement that counts the entries of a source, up to one more than `FEW`."""
    return f"SELECT count(*) FROM (SELECT 1 FROM {source.text} LIMIT {FEW + 1}) x", list(source.values)


# --- choosing the driver


def newest_driver(found: Sequence[Source], counts: Sequence[int], *, descending: bool = True) -> Driver | None:
    """Return what drives a search in order of creation; None: walk through all runs."""
    direction = "DESC" if descending else "ASC"
    few = [(count, place) for place, count in enumerate(counts) if count <= FEW]
    if few:
        return Driver(found[min(few)[1]], direction, is_gathered=True)
    ordered = next((source for source in found if source.is_ordered), None)
    return None if ordered is None else Driver(ordered, direction)


def ordered_driver(
    query: RunQuery, order: Order, number: int, found: Sequence[Source], counts: Sequence[int], prefix: str
) -> Driver:
    """Return what drives a search in another order, starting behind a value and a number."""
    direction = "DESC" if order.descending else "ASC"
    behind = None if query.behind is None else (query.behind[0], number)
    few = [(count, place) for place, count in enumerate(counts) if count <= FEW]
    if few:
        return Driver(found[min(few)[1]], direction, _value(order), True, order, behind)
    beyond = "<" if order.descending else ">"
    if _is_by_creation(order):
        bound = beyond_number(query, number)
        where, values = ("", ()) if bound is None else (f" WHERE {bound[0]}", bound[1:])
        every = Driver(Source(f"{prefix}runs{where}", values, True), direction)
        return newest_driver(found, counts, descending=order.descending) or every
    if order.kind is None:
        source, column = finished_source(query, prefix), "finished_at"
    else:
        own = [each for each in query.where if (each.name, each.kind) == (order.name, order.kind)]
        source, column = attribute_source(order.name, order.kind, own, query.tenant, prefix)
    if behind is not None:
        given = (int(behind[0]) if order.kind is None else behind[0], number)
        source = Source(f"{source.text} AND ({column}, run_no) {beyond} (?, ?)", (*source.values, *given), False)
    return Driver(source, direction, column)


def _value(order: Order) -> str:
    return "0" if _is_by_creation(order) else "driven_value"


def beyond_number(query: RunQuery, number: int) -> tuple[str, int] | None:
    """Return the condition on numbers behind a page in order of creation; None for a first page or another order."""
    if query.order is None:
        return "run_no < ?", number
    if query.behind is None or not _is_by_creation(query.order):
        return None
    return ("run_no < ?", number) if query.order.descending else ("run_no > ?", number)


def _is_by_creation(order: Order) -> bool:
    return order.kind is None and order.name == "created_at"


def heads_query(driver: Driver, look: int, where: Where, limit: int, prefix: str) -> tuple[str, list[Any]]:
    """Return the statement that reads the matching runs, with the values they are sorted by."""
    rows, values = driver.gathered(prefix) if driver.is_gathered else driver.rows(look)
    order = f"driven_value {driver.direction}, " if driver.value != "0" else ""
    text = (
        f"SELECT {HEAD}, driven_value FROM ({rows}) driven JOIN {prefix}runs ON runs.run_no = driven_no "
        f"{where.text} ORDER BY {order}driven_no {driver.direction} LIMIT {limit:d}"
    )
    return text, values + where.values()


def end_query(driver: Driver, look: int, prefix: str) -> tuple[str, list[Any]]:
    """Return the statement that finds where these entries of the driver end: value, created_at, run id."""
    rows, values = driver.rows(1, look - 1)
    text = f"SELECT driven_value, created_at, run_id FROM ({rows}) driven JOIN {prefix}runs ON runs.run_no = driven_no"
    return text, values


def found_runs(
    query: RunQuery, rows: Sequence[Any], limit: int, end: Any, size_of: Callable[[Any], int]
) -> Found[RunHead]:
    """Return an answer with its cursor, if there may be more. `end` is the position after the examined entries."""
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


def part_of(query: RunQuery, cursor: Any) -> RunQuery:
    """Return the query for the next part of an answer; the same query, unless it must be answered in full."""
    if not _is_answered_in_full(query):
        return query
    return replace(query, look=LONG_LOOK, before=query.before if cursor is None else cursor)


def joined(found: Found[RunHead], more: Found[RunHead]) -> Found[RunHead]:
    """Combine two parts of an answer."""
    return Found([*found, *more], more.cursor, (*found.unreadable, *more.unreadable))


def goes_on(query: RunQuery, found: Found[RunHead], limit: int) -> bool:
    """Return whether the search must continue."""
    if found.cursor is None or len(found) >= limit or not _is_answered_in_full(query):
        return False
    return query.most_bytes is None or not found


def _is_answered_in_full(query: RunQuery) -> bool:
    return query.look is None and query.order is None and not query.where


# --- counts


class CountPart(Struct, frozen=True):
    """One part of a count: the rows, named `runs` in a statement, the condition, and the statement for "more"."""

    runs: tuple[str, list[Any]]
    condition: tuple[Any, ...] = ("TRUE",)
    end: tuple[str, list[Any]] | None = None


def counted(query: RunCountQuery) -> RunQuery:
    """Return which runs are counted."""
    return replace(query.runs, order=None, behind=None, newest=True, before=(2**62 - 1, ""))


def count_parts(query: RunQuery, driver: Driver | None, look: int, prefix: str) -> Iterator[CountPart]:
    """Yield the parts of a count. Unless few runs can match, runs that are not completed are counted separately.

    Usually they are few, and an index finds them: so the number of failed runs is known among any number of runs.
    """
    if driver is not None and driver.is_gathered:
        yield CountPart(_joined(driver.gathered(prefix), prefix))
        return
    if query.status is not RunStatus.COMPLETED:
        source = _uncompleted(query, prefix)
        rows, values = f"SELECT * FROM {source.text} LIMIT ", list(source.values)
        yield CountPart((f"({rows}{look:d}) runs", values), end=(f"{rows}1 OFFSET {look:d}", values))
    if query.status in (None, RunStatus.COMPLETED):
        is_completed = ("status = 'COMPLETED'",)
        if driver is not None:
            yield CountPart(_joined(driver.rows(look), prefix), is_completed, driver.rows(1, look))
        else:
            rows = f"SELECT * FROM {prefix}runs ORDER BY run_no DESC LIMIT "
            yield CountPart((f"({rows}{look:d}) runs", []), is_completed, (f"{rows}1 OFFSET {look:d}", []))


def _joined(rows: tuple[str, list[Any]], prefix: str) -> tuple[str, list[Any]]:
    return f"({rows[0]}) driven JOIN {prefix}runs ON runs.run_no = driven_no", rows[1]


def _uncompleted(query: RunQuery, prefix: str) -> Source:
    given: list[tuple[Any, ...]] = [("status <> 'COMPLETED'",)]
    index = "runs_by_status"
    if query.tenant not in (None, WITHOUT_INDEX):
        given.append(("tenant = ? AND tenant <> 'default'", query.tenant))
        index = "runs_by_tenant_status"
    if query.status is not None:
        given.append(("status = ?", str(query.status)))
    return _of_runs(index, prefix, *given)


def counts_query(part: CountPart, where: Where) -> tuple[str, list[Any]]:
    """Return the statement that counts: workflow, status, count."""
    runs, values = part.runs
    text = f"SELECT plan_id, status, count(*) FROM {runs} {where.text} GROUP BY plan_id, status"
    return text, values + where.values()


def found_counts(rows: Sequence[Any], limit: int, *, is_cut: bool) -> Found[RunCount]:
    """Return the counts as an answer."""
    return Found([RunCount(*row) for row in sorted(count_rows(rows))][:limit], is_cut or None)
