"""The graph of a run: the status of each step of a flow or a plan, small enough to be drawn.

A graph is folded once (`GraphFold`) and combined with the snapshot of a run for each request. The result is bounded,
however many steps there are: the outermost nodes, and the nodes of expanded groups. Groups of a flow are expanded as
long as there is room; folds and the items of a `for_each` are expanded on request.

A step that no event names has not begun. It was skipped if the program decided so, if a step that depends on it has
begun, or if the run is completed.
"""

import re
from collections.abc import Collection, Iterable, Mapping
from enum import StrEnum
from typing import get_args

from msgspec import Struct
from msgspec.structs import replace

from holdfast.core.events import StepKind
from holdfast.core.graph import FOLD_MOST, GROUP_KINDS, Change, Graph, GraphKind, GraphNode, NodeKind, fold_of, folded
from holdfast.core.instants import Instant
from holdfast.core.snapshot import RunSnapshot, StepSnapshot, StepStatus
from holdfast.core.state import TERMINAL, RunStatus

AUTOMATIC_NODES = 150
"""The most nodes up to which the groups of a flow are expanded without a request."""

MOST_NODES = 1_000
"""The most nodes that are returned, whatever is requested, in addition to those of the outermost level."""

COMPENSATE = "compensate"
"""The role of a step that compensates another one. Its id is `charge:compensate`."""

_ITEM = re.compile(r"(.+)\[(\d+)\]")
_WAITS = frozenset({"timer", "signal", "task"})


class NodeStatus(StrEnum):
    """The status of a node: that of its step, or WAITING if the step waits for a time, a signal or a person."""

    PENDING = "PENDING"
    RUNNING = "RUNNING"
    WAITING = "WAITING"
    SUCCESS = "SUCCESS"
    FAILED = "FAILED"
    SKIPPED = "SKIPPED"


class RunNode(Struct, frozen=True, kw_only=True):
    """A step or a group of steps, and its status in a run."""

    id: str
    label: str
    kind: NodeKind
    parent: str | None
    depends_on: tuple[str, ...]
    branch: str
    detail: str
    status: NodeStatus
    started_at: Instant | None
    completed_at: Instant | None
    attempts: int
    """How often a step was tried."""

    counts: dict[NodeStatus, int]
    """For a group, the number of its steps in each status."""

    is_expanded: bool
    """Whether the nodes of a group are included."""

    is_critical: bool
    """Whether it is on the critical path: the chain for which the end of its group waits, or has waited, longest."""

    critical_after: str | None
    """The node before it on that path: one of those that it depends on."""

    change: Change | None
    """In a comparison of two versions, the change of the node; for a group, whether something in it changes."""


class RunGraph(Struct, frozen=True, kw_only=True):
    """The part of a run's graph that is shown."""

    kind: GraphKind
    steps: int
    """How many steps the whole graph has."""

    counts: dict[NodeStatus, int]
    nodes: tuple[RunNode, ...]


class _Standing:
    """The status of one node; for a group, that of all its steps."""

    __slots__ = (
        "attempts",
        "change",
        "completed_at",
        "counts",
        "is_begun",
        "is_open",
        "is_skipped",
        "started_at",
        "status",
    )

    def __init__(self) -> None:
        self.status = NodeStatus.PENDING
        self.counts: dict[NodeStatus, int] = {}
        self.started_at: Instant | None = None
        self.completed_at: Instant | None = None
        self.attempts = 0
        self.change: Change | None = None
        self.is_begun = False
        self.is_open = False
        self.is_skipped = False


class GraphFold:
    """A folded graph, which can be combined with any of its runs."""

    def __init__(self, graph: Graph) -> None:
        small = folded(graph)
        self.kind = graph.kind
        self.size = len(small.nodes)
        self._nodes = {node.id: node for node in small.nodes}
        self._members: Mapping[str | None, list[GraphNode]] = small.members()

    def of_run(self, snapshot: RunSnapshot, expand: Collection[str] = (), collapse: Collection[str] = ()) -> RunGraph:
        """Return the graph of a run. `expand` names groups to be shown with their nodes, or nodes to be shown."""
        return _OfRun(self, self._nodes, self._members, snapshot).shown(expand, collapse)

    def of_versions(
        self, changes: Mapping[str, Change], expand: Collection[str] = (), collapse: Collection[str] = ()
    ) -> RunGraph:
        """Return the graph without a run, with the differences between two versions."""
        return _OfRun(self, self._nodes, self._members, RunSnapshot(run_id="")).mark(changes).shown(expand, collapse)


class _OfRun:
    def __init__(
        self,
        fold: GraphFold,
        nodes: Mapping[str, GraphNode],
        members: Mapping[str | None, list[GraphNode]],
        snapshot: RunSnapshot,
    ) -> None:
        self._kind = fold.kind
        self._status = snapshot.status
        self._steps = {step.step_id: step for step in snapshot.steps}
        self._decided = dict(snapshot.decided)
        self._nodes = dict(nodes)
        self._members = dict(members)
        self._own: set[str | None] = set()
        self._helpers: dict[str, list[StepSnapshot]] = {}
        self._add_unplanned()
        self._order = self._from_the_top()
        self._standing = {node.id: _Standing() for node in self._order}
        self._take_steps()
        self._mark_skipped()
        self._sum_up()

    def mark(self, changes: Mapping[str, Change]) -> "_OfRun":
        """Mark the nodes that differ from another version, and their groups."""
        for node_id, change in changes.items():
            self._standing[node_id].change = change
            parent = self._nodes[node_id].parent
            while parent is not None and self._standing[parent].change is None:
                self._standing[parent].change = "changed"
                parent = self._nodes[parent].parent
        return self

    def _add_unplanned(self) -> None:
        """Add steps that the graph does not name.

        Items of a for_each belong to its node. `charge:compensate` follows `charge`; other steps with a colon, such as
        `charge:approval`, only contribute to the status of `charge`. All others are in one group.
        """
        items: dict[str, list[tuple[int, str]]] = {}
        others: list[str] = []
        for step_id in {**self._steps, **self._decided}:
            if step_id in self._nodes:
                continue
            base, role = _role_of(step_id)
            item = _ITEM.fullmatch(base)
            is_item = item is not None and item[1] in self._nodes
            if role and role != COMPENSATE and (is_item or base in self._nodes):
                self._helpers.setdefault(base, []).append(self._steps[step_id])
            elif item is not None and is_item:
                items.setdefault(item[1], []).append((int(item[2]), step_id))
            elif base in self._nodes:
                parent = self._nodes[base].parent
                self._add([replace(self._step_node(parent, step_id), depends_on=(base,))])
            else:
                others.append(step_id)
        for parent, found_items in items.items():
            self._add_items(parent, sorted(found_items))
        if others:
            name = self._free("~others")
            self._add([GraphNode(id=name, label="Other steps", kind="steps")])
            self._add_items(name, [*enumerate(others)])

    def _free(self, name: str) -> str:
        while name in self._nodes or name in self._steps:
            name = f"~{name}"
        return name

    def _add_items(self, parent: str, items: list[tuple[int, str]]) -> None:
        """Add the items of a group in folds of fixed size, so that their names stay when more items are added."""
        size = FOLD_MOST
        level = [(number, self._step_node(parent, step_id)) for number, step_id in items]
        while len(level) > FOLD_MOST:
            parts: dict[int, list[tuple[int, GraphNode]]] = {}
            for number, node in level:
                parts.setdefault(number // size, []).append((number, node))
            following = []
            for place, part in parts.items():
                nodes = [node for _, node in part]
                name = self._free(f"{parent}[{place * size}-{(place + 1) * size - 1}]")
                following.append((place * size, fold_of(name, nodes, parent)))
                self._add([replace(node, parent=name) for node in nodes])
            level, size = following, size * FOLD_MOST
        self._add([node for _, node in level])

    def _step_node(self, parent: str | None, step_id: str) -> GraphNode:
        step = self._steps.get(step_id)
        kind: NodeKind = "activity" if step is None else _STEP_KINDS.get(step.kind, "activity")
        found = _ITEM.fullmatch(step_id)
        label = step_id.rpartition("/")[2]
        if parent is not None and found is not None and found[1] == parent:
            label = f"{self._nodes[parent].label}[{found[2]}]"
        return GraphNode(id=step_id, label=label, kind=kind, parent=parent)

    def _add(self, nodes: Iterable[GraphNode]) -> None:
        for node in nodes:
            self._nodes[node.id] = node
            if node.parent not in self._own:  # the list of a fold is shared by all runs
                self._own.add(node.parent)
                self._members[node.parent] = [*self._members.get(node.parent, ())]
            self._members[node.parent].append(node)

    def _from_the_top(self) -> list[GraphNode]:
        """Return all nodes, each group before its members."""
        order: list[GraphNode] = []
        pending = [*self._members[None]]
        while pending:
            node = pending.pop()
            order.append(node)
            pending += self._members.get(node.id, ())
        return order

    def _take_steps(self) -> None:
        for node in reversed(self._order):
            here = self._standing[node.id]
            step = self._steps.get(node.id)
            if step is not None:
                here.status, here.attempts = _status_of(step), step.engine_attempt_id
                here.started_at, here.completed_at = step.started_at, step.completed_at
                here.is_begun = step.status is not StepStatus.PENDING
                here.is_open = here.is_begun and step.completed_at is None
            elif self._decided.get(node.id) in (StepStatus.FAILED, StepStatus.SUCCESS):
                here.status, here.is_begun = NodeStatus(self._decided[node.id].value), True
            else:
                here.is_skipped = node.id in self._decided
            for helper in self._helpers.get(node.id, ()):
                _take_helper(here, helper)
            if here.is_begun and node.parent is not None:
                self._standing[node.parent].is_begun = True

    def _mark_skipped(self) -> None:
        """Mark the nodes that never begin: one that depends on them has begun, or the run is completed."""
        if self._status is RunStatus.COMPLETED:
            for here in self._standing.values():
                here.is_skipped = not here.is_begun
            return
        for parent, level in self._members.items():
            self._mark_passed(level)
            is_chosen = parent is not None and self._nodes[parent].kind == "cue" and self._standing[parent].is_begun
            branches = {node.branch for node in level if self._standing[node.id].is_begun}
            for node in level if is_chosen else ():
                here = self._standing[node.id]
                here.is_skipped |= not here.is_begun and node.branch not in branches
        for node in self._order:
            if node.parent is not None and self._standing[node.parent].is_skipped:
                self._standing[node.id].is_skipped = True

    def _mark_passed(self, level: list[GraphNode]) -> None:
        pending = [node for node in level if self._standing[node.id].is_begun]
        while pending:
            for other in pending.pop().depends_on:
                here = self._standing[other]
                if not here.is_begun and not here.is_skipped:
                    here.is_skipped = True
                    pending.append(self._nodes[other])

    def _sum_up(self) -> None:
        for node in reversed(self._order):
            here = self._standing[node.id]
            if node.id in self._members:
                here.status = _status_of_group(here, is_finished=self._status in TERMINAL)
            else:
                if here.is_skipped:
                    here.status = NodeStatus.SKIPPED
                here.counts = {here.status: 1}
            if node.parent is not None:
                _add_up(self._standing[node.parent], here)

    # --- what is shown

    def shown(self, expand: Collection[str], collapse: Collection[str]) -> RunGraph:
        asked = self._asked(expand)
        levels: list[str | None] = [None]
        room, automatic = MOST_NODES, AUTOMATIC_NODES - len(self._members[None])
        for level in levels:  # grows during the loop
            for node in self._members[level]:
                size = len(self._members.get(node.id, ()))
                is_wanted = node.id in asked or (node.kind in _OPEN_KINDS and size <= automatic)
                if not size or not is_wanted or node.id in collapse or size > room:
                    continue
                levels.append(node.id)
                room, automatic = room - size, automatic - size
        path = self._critical_path(levels)
        expanded = set(levels)
        nodes = [self._drawn(node, expanded, path) for level in levels for node in self._members[level]]
        total = _Standing()
        for node in self._members[None]:
            _add_up(total, self._standing[node.id])
        return RunGraph(kind=self._kind, steps=sum(total.counts.values()), counts=total.counts, nodes=tuple(nodes))

    def _asked(self, expand: Collection[str]) -> set[str]:
        """Return the requested groups, and the groups that contain them."""
        asked: set[str] = set()
        for name in expand:
            node = self._nodes.get(name)
            while node is not None and node.id not in asked:
                asked.add(node.id)
                node = None if node.parent is None else self._nodes[node.parent]
        return asked

    def _critical_path(self, levels: list[str | None]) -> dict[str, str | None]:
        """Return the nodes on the critical path of the levels that are shown, each with its predecessor."""
        path: dict[str, str | None] = {}
        for level in levels:
            if level is not None and level not in path:
                continue
            begun = [node for node in self._members[level] if self._standing[node.id].is_begun]
            last = max(begun, key=self._end_of, default=None)
            while last is not None:
                before = [self._nodes[other] for other in last.depends_on]
                begun = [node for node in before if self._standing[node.id].is_begun]
                previous = max(begun, key=self._end_of, default=before[0] if before else None)
                path[last.id] = None if previous is None else previous.id
                last = previous
        return path

    def _end_of(self, node: GraphNode) -> tuple[bool, Instant]:
        here = self._standing[node.id]
        return here.is_open, -(here.started_at or 0) if here.is_open else (here.completed_at or 0)

    def _drawn(self, node: GraphNode, expanded: set[str | None], path: dict[str, str | None]) -> RunNode:
        here = self._standing[node.id]
        return RunNode(
            id=node.id,
            label=node.label,
            kind=node.kind,
            parent=node.parent,
            depends_on=node.depends_on,
            branch=node.branch,
            detail=node.detail,
            status=here.status,
            started_at=here.started_at,
            completed_at=None if here.is_open else here.completed_at,
            attempts=here.attempts,
            counts=here.counts if node.id in self._members else {},
            is_expanded=node.id in expanded,
            is_critical=node.id in path,
            critical_after=path.get(node.id),
            change=here.change,
        )


_OPEN_KINDS = GROUP_KINDS - {"for_each"}
_STEP_KINDS: dict[str, NodeKind] = {kind: kind for kind in get_args(NodeKind) if kind in get_args(StepKind)}


def _role_of(step_id: str) -> tuple[str, str]:
    """Return the step that an auxiliary step serves, and its role; for any other step, the step itself."""
    base, _, role = step_id.rpartition(":")
    return (base, role) if base else (step_id, "")


def _take_helper(here: _Standing, helper: StepSnapshot) -> None:
    """Count an auxiliary step of another one, such as its approval: while only this is open, the other step waits."""
    if helper.completed_at is None and not here.is_open and here.status in (NodeStatus.PENDING, NodeStatus.FAILED):
        here.status = _status_of(helper)
        here.started_at = helper.started_at if here.started_at is None else here.started_at
        here.is_begun = here.is_open = True


def _status_of(step: StepSnapshot) -> NodeStatus:
    if step.status is StepStatus.RUNNING and step.kind in _WAITS:
        return NodeStatus.WAITING
    return NodeStatus(step.status.value)


def _add_up(group: _Standing, part: _Standing) -> None:
    for status, count in part.counts.items():
        group.counts[status] = group.counts.get(status, 0) + count
    group.is_open |= part.is_open
    if part.started_at is not None:
        group.started_at = min(part.started_at, group.started_at or part.started_at)
    if part.completed_at is not None:
        group.completed_at = max(part.completed_at, group.completed_at or 0)


def _status_of_group(group: _Standing, *, is_finished: bool) -> NodeStatus:
    """Return the status of a group: the one that needs attention most."""
    counts = group.counts
    for status in (NodeStatus.FAILED, NodeStatus.RUNNING, NodeStatus.WAITING):
        if status in counts:
            return status
    if NodeStatus.PENDING not in counts:
        return NodeStatus.SUCCESS if NodeStatus.SUCCESS in counts else NodeStatus.SKIPPED
    if not group.is_begun:
        return NodeStatus.PENDING
    return NodeStatus.SKIPPED if is_finished else NodeStatus.RUNNING
