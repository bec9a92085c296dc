"""The graph of a flow or a plan, and Mermaid of it."""

import re
from html import unescape
from random import Random

import pytest

from holdfast.core.graph import FOLD_MOST, Graph, GraphNode, NodeKind, folded, layers_of
from holdfast.errors import InvalidInput


def node(id: str, *depends_on: str, kind: NodeKind = "activity", parent: str | None = None, **more: str) -> GraphNode:
    """A node that is labelled with its id."""
    return GraphNode(id=id, label=more.pop("label", id), kind=kind, parent=parent, depends_on=tuple(depends_on), **more)


def plan(*nodes: GraphNode) -> Graph:
    return Graph(kind="plan", nodes=nodes)


def test_mermaid_shows_groups_arrows_branches_and_details() -> None:
    graph = Graph(
        kind="flow",
        nodes=(
            node("check", detail="check_stock"),
            node("cue", "check", kind="cue", label="over 100"),
            node("cue/approval", kind="signal", parent="cue", branch="then", label="approval"),
            node("chorus", "cue", kind="chorus"),
            node("chorus/charge", parent="chorus", label="charge"),
            node("chorus/wait", "chorus/charge", kind="timer", parent="chorus", label="wait"),
            node("empty", "chorus", kind="scene"),
        ),
    )

    assert graph.mermaid() == (
        "flowchart TD\n"
        '    n0["check (check_stock)"]\n'
        '    subgraph n1["over 100"]\n'
        '        n2{{"then: approval"}}\n'
        "    end\n"
        '    subgraph n3["chorus"]\n'
        '        n4["charge"]\n'
        '        n5(["wait"])\n'
        "    end\n"
        '    n6["empty"]\n'
        "    n0 --> n1\n"
        "    n1 --> n3\n"
        "    n3 --> n6\n"
        "    n4 --> n5\n"
    )


@pytest.mark.parametrize(
    "label",
    [
        'say "hello"',
        "a]b[c}d{e|f",
        "<script>alert(1)</script>",
        "#quot; &lt; #35;",
        "`**bold**`",
        '"];n9["x',
        "%% no comment",
        "\u202eright to left\x07",
        "back\\nslash",
    ],
)
def test_a_label_of_mermaid_is_only_text(label: str) -> None:
    lines = plan(node("a", label=label), node("b", "a")).mermaid().splitlines()

    assert len(lines) == 4  # the label adds no line
    quoted = re.fullmatch(r' {4}n0\["([^"\[\]{}<>&`|\\%*]*)"\]', lines[1])
    assert quoted is not None, lines[1]
    assert unescape(re.sub(r"#(\d+);", r"&#\1;", quoted[1])) == unescape(
        "".join(f"&#{ord(character)};" for character in label)
    )


def test_lines_of_a_label_become_one() -> None:
    assert 'n0["one two"]' in plan(node("a", label="one\n  two")).mermaid()


def test_deep_groups_need_no_deep_stack() -> None:
    nodes = [node("0", kind="scene")]
    nodes += [node(str(depth), kind="scene", parent=str(depth - 1)) for depth in range(1, 3_000)]

    assert plan(*nodes).mermaid().count("end\n") == 2_999


@pytest.mark.parametrize(
    ("nodes", "problem"),
    [
        ([node("a"), node("a")], "same id"),
        ([node("a", parent="x")], "no group 'x'"),
        ([node("a", "b")], "depends on 'b'"),
        ([node("g", kind="scene"), node("a", parent="g"), node("b", "a")], "depends on 'a'"),
    ],
)
def test_a_graph_that_breaks_a_rule_is_refused(nodes: list[GraphNode], problem: str) -> None:
    with pytest.raises(InvalidInput, match=problem):
        plan(*nodes)


# --- folding


def chain(size: int) -> Graph:
    return plan(*(node(f"s{number}", *([f"s{number - 1}"] if number else [])) for number in range(size)))


def fan(size: int) -> Graph:
    wide = [node(f"s{number}", "first") for number in range(size)]
    return plan(node("first"), *wide, node("last", *(each.id for each in wide)))


def layered(layers: int, width: int) -> Graph:
    return plan(
        *(
            node(f"{layer}.{place}", *({f"{layer - 1}.{place}", f"{layer - 1}.{place // 2}"} if layer else ()))
            for layer in range(layers)
            for place in range(width)
        )
    )


@pytest.mark.parametrize(
    ("graph", "outermost"),
    [(chain(10_000), 60), (fan(10_000), 3), (layered(100, 100), 10), (chain(60), 60), (plan(node("a")), 1)],
    ids=["chain", "fan", "layers", "small", "one"],
)
def test_no_group_is_large_after_folding(graph: Graph, outermost: int) -> None:
    small = folded(graph)

    members = small.members()
    assert len(members[None]) == outermost
    assert max(map(len, members.values())) <= FOLD_MOST
    assert {each.id for each in graph.nodes} == {each.id for each in small.nodes if each.kind != "steps"}
    assert folded(graph) == small


def random_graph(random: Random) -> Graph:
    nodes: list[GraphNode] = []
    groups: list[str | None] = [None]
    for number in range(random.randrange(1, 250)):
        parent = random.choice(groups)
        siblings = [each.id for each in nodes if each.parent == parent]
        depends_on = random.sample(siblings, min(len(siblings), random.randrange(4)))
        is_group = random.random() < 0.03
        name = random.choice(["~", "", "~~"]) + str(number)
        nodes.append(node(name, *depends_on, kind="chorus" if is_group else "activity", parent=parent))
        if is_group:
            groups.append(name)
    random.shuffle(nodes)
    return plan(*nodes)


@pytest.mark.parametrize("seed", range(30))
def test_folding_keeps_nodes_groups_and_order(seed: int) -> None:
    graph = random_graph(Random(seed))

    small = folded(graph, 7)

    before, after = {each.id: each for each in graph.nodes}, {each.id: each for each in small.nodes}
    assert before.keys() <= after.keys()
    assert all(len(level) <= 7 for level in small.members().values())
    for level in small.members().values():
        layers_of(level)  # there is no cycle

    def up(id: str) -> list[str | None]:
        """The node and the groups around it, the innermost first."""
        found: list[str | None] = [id]
        while (last := found[-1]) is not None:
            found.append(after[last].parent)
        return found

    for each in graph.nodes:
        real = next(id for id in up(each.id)[1:] if id is None or id in before)
        assert real == each.parent, "a fold is inside the group of its nodes"
        for other in each.depends_on:
            mine, others = up(each.id), up(other)
            shared = next(id for id in mine if id in others)
            below, above = mine[mine.index(shared) - 1], others[others.index(shared) - 1]
            assert below is not None
            assert above in after[below].depends_on


def test_a_cycle_is_refused_where_layers_are_needed() -> None:
    with pytest.raises(InvalidInput, match="cycle"):
        layers_of([node("a", "b"), node("b", "a"), node("c")])
