"""The graph of a flow or a plan, and Mermaid of it."""

import re
from html import unescape

import pytest

from holdfast.core.graph import Graph, GraphNode, NodeKind
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
