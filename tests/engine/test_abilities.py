"""What nodes publish of themselves: as a store keeps it, and as other nodes read it."""

from holdfast.engine.abilities import Abilities, NodeAbilities, decode, lacks_of, other_code
from holdfast.store.port import NodePlans

ORDERS, OLD, TRICKY = ("orders", "2"), ("orders", "1"), ("or@ders", "2")
CODE, OTHER = "0123456789abcdef", "fedcba9876543210"


def test_abilities_are_what_they_were_after_they_were_stored() -> None:
    abilities = Abilities(
        workflows=frozenset({ORDERS, OLD, TRICKY}),
        codes=frozenset({(ORDERS, CODE), (TRICKY, OTHER)}),
        activities=frozenset({"ship", "charge"}),
        lacks=frozenset({("pack", ORDERS)}),
    )
    read = decode(abilities.encode())
    assert (read.codes, read.activities, read.lacks) == (abilities.codes, abilities.activities, abilities.lacks)
    assert abilities.workflows <= read.workflows


def test_the_stored_form_is_that_of_every_version_of_a_node() -> None:
    abilities = Abilities(
        frozenset({ORDERS}), frozenset({(ORDERS, CODE)}), frozenset({"ship"}), frozenset({("pack", ORDERS)})
    )
    assert abilities.encode() == [
        ("orders", "2"),
        (f"orders@{CODE}", "2"),
        ("", "activity\nship"),
        ("", "lacks\npack\norders\n2"),
    ]


def test_what_is_not_known_is_left_out() -> None:
    plans = [("", "activity"), ("", "lacks\npack"), ("", "sings\nloudly"), ("@", "1"), (f"@{CODE}", "1")]
    read = decode(plans)
    assert (read.codes, read.activities, read.lacks) == (frozenset(), frozenset(), frozenset())


def test_an_activity_is_lacking_until_one_node_has_it_together_with_the_definition() -> None:
    lacking = Abilities(frozenset({ORDERS}), lacks=frozenset({("ship", ORDERS)}))
    apart = Abilities(frozenset({OLD}), activities=frozenset({"ship"}))
    both = Abilities(frozenset({ORDERS}), activities=frozenset({"ship"}))
    nodes = [NodePlans(str(each), frozenset(each.encode())) for each in (lacking, apart)]
    assert lacks_of(nodes) == {("ship", ORDERS)}
    assert lacks_of([*nodes, NodePlans("both", frozenset(both.encode()))]) == set()


def test_other_code_is_that_of_the_same_version_which_was_not_tried() -> None:
    nodes = [
        NodeAbilities("a", Abilities(codes=frozenset({(OLD, OTHER), (TRICKY, OTHER), (ORDERS, CODE)}))),
        NodeAbilities("b", Abilities(codes=frozenset({(ORDERS, OTHER)}))),
    ]
    assert other_code(nodes, ORDERS, ()) == ("a", CODE)
    assert other_code(nodes, ORDERS, (CODE,)) == ("b", OTHER)
    assert other_code(nodes, ORDERS, (CODE, OTHER)) is None
