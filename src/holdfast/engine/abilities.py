"""The abilities of a node, as it publishes them with its lease and as other nodes read them.

A store keeps the plans of a node as pairs of texts, and claims runs by the pairs that are workflows with their
versions. The other abilities are stored along with them in the same form. Only this module encodes and decodes them.
Names contain no line break and no plan's id is empty, so an ability is never mistaken for a workflow.
"""

from collections.abc import Collection, Iterable

from msgspec import Struct

from holdfast.core.plans import ANY_PLAN
from holdfast.engine.observe.metrics import LateWrites
from holdfast.program.fingerprint import CHARS as FINGERPRINT_CHARS
from holdfast.store.port import NodePlans, Plan

Lack = tuple[str, Plan]
"""An activity that runs of a definition wait for, because the node lacks it, and that definition."""


class Abilities(Struct, frozen=True):
    """What a node can execute, and what it lacks."""

    workflows: frozenset[Plan] = frozenset()
    codes: frozenset[tuple[Plan, str]] = frozenset()
    """The definitions whose runs may be handed over to the node, each with the fingerprint of its code."""
    activities: frozenset[str] = frozenset()
    lacks: frozenset[Lack] = frozenset()
    late_writes: LateWrites | None = None
    """Its recent writes to the store that were over the latency budget."""
    process: str = ""
    """Its process, and the machine that the process runs on."""
    version: str = ""
    """The version of Holdfast that it runs."""
    queues: frozenset[str] = frozenset()
    """The queues that it takes jobs from."""
    level: int = 0
    """The highest level of the format that it understands (`core/plans.py`)."""
    load: tuple[int, int] | None = None
    """How many runs it owns, and how many activities are running on it."""

    @property
    def named_workflows(self) -> set[Plan]:
        """Return the workflows that it runs, without the entries that represent their code and plans."""
        coded = {(f"{plan_id}@{code}", version) for (plan_id, version), code in self.codes}
        return {plan for plan in self.workflows - coded if plan != ANY_PLAN}

    def encode(self) -> list[Plan]:
        """Return the abilities as a store keeps them."""
        codes = [(f"{plan_id}@{code}", version) for (plan_id, version), code in sorted(self.codes)]
        activities = [("", f"activity\n{name}") for name in sorted(self.activities)]
        lacks = [("", f"lacks\n{name}\n{plan_id}\n{version}") for name, (plan_id, version) in sorted(self.lacks)]
        late = self.late_writes
        writes = [("", f"late writes\n{late.count}\n{late.slowest_ms}\n{late.budget_ms}")] if late is not None else []
        process = [("", f"process\n{self.process}")] if self.process else []
        version = [("", f"version\n{self.version}")] if self.version else []
        queues = [("", f"queue\n{name}") for name in sorted(self.queues)]
        level = [("", f"level\n{self.level}")] if self.level else []
        load = [("", f"load\n{self.load[0]}\n{self.load[1]}")] if self.load is not None else []
        own = [*process, *version, *queues, *level, *load]
        return [*sorted(self.workflows), *codes, *activities, *lacks, *writes, *own]


class NodeAbilities(Struct, frozen=True):
    """A node that is alive, and what it can do."""

    node: str
    abilities: Abilities


def decode(plans: Iterable[Plan]) -> Abilities:
    """Decode the abilities that a store keeps of a node. Entries that another version of Holdfast has added are
    ignored.
    """
    workflows: set[Plan] = set()
    codes: set[tuple[Plan, str]] = set()
    activities: set[str] = set()
    lacks: set[Lack] = set()
    late: LateWrites | None = None
    process = running = ""
    queues: set[str] = set()
    level = 0
    load: tuple[int, int] | None = None
    for key, value in plans:
        if key:
            workflows.add((key, value))
            plan_id, code = key[: -FINGERPRINT_CHARS - 1], key[-FINGERPRINT_CHARS:]
            if plan_id and key == f"{plan_id}@{code}":
                codes.add(((plan_id, value), code))
            continue
        kind, *names = value.split("\n")
        if kind == "activity" and len(names) == 1:
            activities.add(names[0])
        elif kind == "lacks" and len(names) == 3:
            lacks.add((names[0], (names[1], names[2])))
        elif kind == "late writes" and len(names) == 3 and all(name.isdecimal() for name in names):
            late = LateWrites(*map(int, names))
        elif kind == "process" and len(names) == 1:
            process = names[0]
        elif kind == "version" and len(names) == 1:
            running = names[0]
        elif kind == "queue" and len(names) == 1:
            queues.add(names[0])
        elif kind == "level" and len(names) == 1 and names[0].isdecimal():
            level = int(names[0])
        elif kind == "load" and len(names) == 2 and all(name.isdecimal() for name in names):
            load = int(names[0]), int(names[1])
    return Abilities(
        frozenset(workflows),
        frozenset(codes),
        frozenset(activities),
        frozenset(lacks),
        late,
        process,
        running,
        frozenset(queues),
        level,
        load,
    )


def abilities_of(nodes: Iterable[NodePlans]) -> list[NodeAbilities]:
    """Return what nodes can do, in the order of the nodes."""
    return [NodeAbilities(each.node, decode(each.plans)) for each in nodes]


def lacks_of(nodes: Iterable[NodePlans]) -> set[Lack]:
    """Return the activities that runs wait for and that no node has together with the definition, each with that
    definition.
    """
    able = [each.abilities for each in abilities_of(nodes)]
    return {
        (name, plan)
        for lacking in able
        for name, plan in lacking.lacks
        if not any(plan in each.workflows and name in each.activities for each in able)
    }


def other_code(nodes: Iterable[NodeAbilities], plan: Plan, tried: Collection[str]) -> tuple[str, str] | None:
    """Return the name of the first node that has untried code for a definition, and the fingerprint of that code."""
    for each in nodes:
        for of, code in sorted(each.abilities.codes):
            if of == plan and code not in tried:
                return each.node, code
    return None
