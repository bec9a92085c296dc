"""The graph of a flow or a plan: its steps, what each of them waits for, and the groups they belong to.

A definition returns one (`definition.graph()`); the page draws it, the command line prints it as Mermaid, and
`runs.graph` adds the status of each node's step in a run. Nothing here knows how a flow or a plan is written.

Rules of a graph:
1. A node's `id` is the id of its step, which is its path. A group (a scene, a chorus, a cue, a for_each) has an id as
   well, although no step has it.
2. `parent` names the group that a node belongs to; groups may be in groups.
3. `depends_on` names nodes with the same parent. A node that depends on a group waits for all of its members. So each
   group can be drawn, folded and evaluated by itself.
4. Items of a `for_each` are not nodes: their number is known only in a run. Their steps are `load[0]`, `load[1]`.
"""

from collections.abc import Collection, Iterator, Sequence
from itertools import chain
from math import isqrt
from typing import Literal, get_args

from msgspec import Struct
from msgspec.structs import replace

from holdfast.errors import InvalidInput

GraphKind = Literal["flow", "plan"]
GroupKind = Literal["scene", "chorus", "cue", "for_each"]
NodeKind = Literal["activity", "timer", "signal", "task", "child", "scene", "chorus", "cue", "for_each", "steps"]
"""The kinds of nodes: kinds of steps, kinds of groups, and `steps`, a group that was made by folding."""

GROUP_KINDS: frozenset[str] = frozenset(get_args(GroupKind))


class GraphNode(Struct, frozen=True, kw_only=True, omit_defaults=True, gc=False):
    """A step of a flow or a plan, or a group of them."""

    id: str
    label: str
    kind: NodeKind
    parent: str | None = None
    """The group that it belongs to."""

    depends_on: tuple[str, ...] = ()
    """The ids of the nodes, with the same parent, that have to end before it begins."""

    branch: str = ""
    """In a cue, the case in which the node runs: `then`, `else`, or the name of the case."""

    detail: str = ""
    """What is shown in addition to its label: the activity, a condition, the duration of a timer."""


class Graph(Struct, frozen=True, kw_only=True):
    """The graph of a flow or a plan. Creating one that breaks a rule raises `InvalidInput`."""

    kind: GraphKind
    nodes: tuple[GraphNode, ...]

    def __post_init__(self) -> None:
        by_id = {node.id: node for node in self.nodes}
        if len(by_id) < len(self.nodes):
            raise InvalidInput("two nodes of a graph have the same id")
        for node in self.nodes:
            if node.parent is not None and node.parent not in by_id:
                raise InvalidInput(f"node {node.id!r}: there is no group {node.parent!r}", field="parent")
            for other in node.depends_on:
                if other not in by_id or by_id[other].parent != node.parent:
                    problem = f"node {node.id!r} depends on {other!r}, which is no node with the same parent"
                    raise InvalidInput(problem, field="depends_on")

    def members(self) -> "dict[str | None, list[GraphNode]]":
        """Return the nodes of each group by the group's id, and under None those that are in no group."""
        found: dict[str | None, list[GraphNode]] = {None: []}
        for node in self.nodes:
            found.setdefault(node.parent, []).append(node)
        return found

    def mermaid(self) -> str:
        """Return the graph as a Mermaid flowchart. Ids and labels may contain any text."""
        return "\n".join(["flowchart TD", *_Flowchart(self).lines(), ""])


Change = Literal["added", "removed", "changed"]


def compared(before: Graph, after: Graph, changed: Collection[str]) -> tuple[Graph, dict[str, Change]]:
    """Return one graph of two versions, and what was added, removed or changed in it.

    It has the edges of the newer version. Removed nodes stay where they were, and no remaining node depends on them.
    """
    old, new = {node.id: node for node in before.nodes}, {node.id: node for node in after.nodes}
    changes: dict[str, Change] = {node_id: "added" for node_id in new if node_id not in old}
    changes |= {node_id: "changed" for node_id in changed if node_id in new and node_id in old}
    parents = {node_id: node.parent for node_id, node in {**old, **new}.items()}
    gone: list[GraphNode] = []
    for node in before.nodes:
        if node.id in new:
            continue
        changes[node.id] = "removed"
        kept = tuple(other for other in node.depends_on if parents[other] == node.parent)
        gone.append(replace(node, depends_on=kept))
    return Graph(kind=after.kind, nodes=(*after.nodes, *gone)), changes


def layers_of(nodes: Sequence[GraphNode]) -> list[list[GraphNode]]:
    """Return the nodes of one group in layers: each node is in the first layer after all of its dependencies."""
    waits = {node.id: len(set(node.depends_on)) for node in nodes}
    following: dict[str, list[GraphNode]] = {}
    for node in nodes:
        for other in set(node.depends_on):
            following.setdefault(other, []).append(node)
    layers = []
    ready = [node for node in nodes if not waits[node.id]]
    while ready:
        layers.append(ready)
        behind: list[GraphNode] = []
        for node in ready:
            for each in following.get(node.id, ()):
                waits[each.id] -= 1
                if not waits[each.id]:
                    behind.append(each)
        ready = behind
    if sum(map(len, layers)) < len(nodes):
        raise InvalidInput("a graph has a cycle: its steps wait for each other", field="depends_on")
    return layers


# --- folding

FOLD_MOST = 60
"""The most nodes of a group after folding."""

_TO = " … "


def folded(graph: Graph, most: int = FOLD_MOST) -> Graph:
    """Return the graph with at most this many nodes in any group: the excess is moved into additional groups.

    Layers that are too wide are folded, the widest first; if there are too many layers, adjacent ones are folded.
    The same graph is always folded in the same way, so readers can name the groups that they want to see.
    """
    mark = "~"
    while any(node.id.startswith(mark) for node in graph.nodes):
        mark += "~"
    nodes: list[GraphNode] = []
    pending = [*graph.members().items()]
    number = 0
    while pending:
        parent, level = pending.pop()
        parts = [[node] for node in level] if len(level) <= most else _parts(layers_of(level), most)
        names: list[str] = []
        for part in parts:
            number += len(part) > 1
            names.append(part[0].id if len(part) == 1 else f"{mark}{number}")
        owner = {node.id: name for name, part in zip(names, parts, strict=True) for node in part}
        for name, part in zip(names, parts, strict=True):
            outer = tuple(dict.fromkeys(owner[other] for node in part for other in node.depends_on))
            outer = tuple(other for other in outer if other != name)
            if len(part) == 1:
                nodes.append(replace(part[0], parent=parent, depends_on=outer))
                continue
            nodes.append(fold_of(name, part, parent, outer))
            inner = {node.id for node in part}
            kept = [replace(node, depends_on=tuple(d for d in node.depends_on if d in inner)) for node in part]
            pending.append((name, kept))
    return Graph(kind=graph.kind, nodes=tuple(nodes))


def fold_of(name: str, part: Sequence[GraphNode], parent: str | None, depends_on: tuple[str, ...] = ()) -> GraphNode:
    """Return the node that represents a part of a group."""
    first, last = part[0], part[-1]
    begin = first.label.partition(_TO)[0] if first.kind == "steps" else first.label
    end = last.label.rpartition(_TO)[2] if last.kind == "steps" else last.label
    label = f"{begin}{_TO}{end}"
    return GraphNode(id=name, label=label, kind="steps", parent=parent, depends_on=depends_on)


def _parts(layers: list[list[GraphNode]], most: int) -> list[list[GraphNode]]:
    """Return the parts of a level that is too large: at most `most`, each within one layer or of adjacent layers."""
    if len(layers) == 1:
        (layer,) = layers
        size = max(-(-len(layer) // most), min(most, isqrt(len(layer))))
        return [layer[start : start + size] for start in range(0, len(layer), size)]
    if len(layers) > most:
        size = max(-(-len(layers) // most), min(most, isqrt(len(layers))))
        return [list(chain(*layers[start : start + size])) for start in range(0, len(layers), size)]
    widths = sorted(map(len, layers))
    widest = next(
        width for width in reversed([1, *widths]) if sum(1 if each > width else each for each in widths) <= most
    )
    return [part for layer in layers for part in ([layer] if len(layer) > widest else [[node] for node in layer])]


# --- Mermaid

_SHAPES = {
    "activity": ("[", "]"),
    "timer": ("([", "])"),
    "signal": ("{{", "}}"),
    "task": ("[/", "/]"),
    "child": ("[[", "]]"),
    "cue": ("{", "}"),
}
"""The shape of a node of each kind. A group that has nodes is a frame around them."""

_SPECIAL = frozenset('"#&<>`\\|;[]{}%*~$')
"""Characters that are special inside a quoted label: for Mermaid, for the Markdown in it, or for HTML."""


class _Flowchart:
    def __init__(self, graph: Graph) -> None:
        self._names = {node.id: f"n{number}" for number, node in enumerate(graph.nodes)}
        self._members = graph.members()

    def lines(self) -> Iterator[str]:
        """Yield the frames with their nodes, then the arrows. It uses a stack, because groups may be deeply nested."""
        pending: list[str | GraphNode] = [*reversed(self._members[None])]
        depth = 1
        while pending:
            item = pending.pop()
            if isinstance(item, str):
                depth -= 1
                yield f"{'    ' * depth}{item}"
                continue
            members = self._members.get(item.id)
            yield f"{'    ' * depth}{self._declared(item, is_frame=bool(members))}"
            if members:
                depth += 1
                pending += ["end", *reversed(members)]
        for members in self._members.values():
            for node in members:
                for other in node.depends_on:
                    yield f"    {self._names[other]} --> {self._names[node.id]}"

    def _declared(self, node: GraphNode, *, is_frame: bool) -> str:
        words = f"{node.branch}: {node.label}" if node.branch else node.label
        text = _escaped(f"{words} ({node.detail})" if node.detail else words)
        opening, closing = _SHAPES.get(node.kind, ("[", "]"))
        if is_frame:
            return f'subgraph {self._names[node.id]}["{text}"]'
        return f'{self._names[node.id]}{opening}"{text}"{closing}'


def _escaped(text: str) -> str:
    """Return a label on one line, with special characters as numeric entities."""
    plain = " ".join(text.split())
    return "".join(f"#{ord(char)};" if char in _SPECIAL or not char.isprintable() else char for char in plain)
