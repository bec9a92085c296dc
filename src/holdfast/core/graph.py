"""The graph of a flow or a plan: its steps, what each of them waits for, and the groups they belong to.

A definition returns one (`definition.graph()`); the page draws it, the command line prints it as Mermaid, and
`runs.graph` adds to each node how its step stands in a run. Nothing here knows how a flow or a plan is written.

Rules of a graph:
1. A node's `id` is the id of its step, which is its path. A group (a scene, a chorus, a cue, a for_each) has an id as
   well, although no step has it.
2. `parent` names the group that a node belongs to; groups may be in groups.
3. `depends_on` names nodes with the same parent. What waits for a group waits for all that is in it. So each group can
   be drawn, folded and judged by itself.
4. Items of a `for_each` are no nodes: how many there are is known only in a run. Their steps are `load[0]`, `load[1]`.
"""

from collections.abc import Iterator
from typing import Literal, get_args

from msgspec import Struct

from holdfast.errors import InvalidInput

GraphKind = Literal["flow", "plan"]
GroupKind = Literal["scene", "chorus", "cue", "for_each"]
NodeKind = Literal["activity", "timer", "signal", "task", "child", "scene", "chorus", "cue", "for_each"]
"""What a node is: a kind of step, or a kind of group."""

GROUP_KINDS: frozenset[str] = frozenset(get_args(GroupKind))


class GraphNode(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A step of a flow or a plan, or a group of them."""

    id: str
    label: str
    kind: NodeKind
    parent: str | None = None
    """The group that it belongs to."""

    depends_on: tuple[str, ...] = ()
    """What has to end before it begins: ids of nodes with the same parent."""

    branch: str = ""
    """In a cue, the case in which it runs: `then`, `else`, or the name of the case."""

    detail: str = ""
    """What a reader should know of it beside its label: the activity, a condition, how long it sleeps."""


class Graph(Struct, frozen=True, kw_only=True):
    """The graph of a flow or a plan. Making one that breaks a rule raises `InvalidInput`."""

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

    def mermaid(self) -> str:
        """Return the graph as a flowchart of Mermaid. Ids and labels may hold any text."""
        return "\n".join(["flowchart TD", *_Flowchart(self).lines(), ""])


# --- Mermaid

_SHAPES = {
    "activity": ("[", "]"),
    "timer": ("([", "])"),
    "signal": ("{{", "}}"),
    "task": ("[/", "/]"),
    "child": ("[[", "]]"),
    "cue": ("{", "}"),
}
"""What a node of each kind is drawn as. A group that has nodes is a frame around them."""

_SPECIAL = frozenset('"#&<>`\\|;[]{}%*~$')
"""What has a meaning inside the quotes of a label: for Mermaid, for the Markdown in it, or for HTML."""


class _Flowchart:
    def __init__(self, graph: Graph) -> None:
        self._names = {node.id: f"n{number}" for number, node in enumerate(graph.nodes)}
        self._members: dict[str | None, list[GraphNode]] = {}
        for node in graph.nodes:
            self._members.setdefault(node.parent, []).append(node)

    def lines(self) -> Iterator[str]:
        """Yield the frames with their nodes, each followed by its arrows. A stack, because groups may be deep."""
        pending: list[str | GraphNode] = [*reversed(self._members.get(None, ()))]
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
    """Return a label in which nothing has a meaning: entities by number, and one line."""
    plain = " ".join(text.split())
    return "".join(f"#{ord(char)};" if char in _SPECIAL or not char.isprintable() else char for char in plain)
