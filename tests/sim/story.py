"""What is in a story, beside what its seed decides: how many runs of which kind, how many nodes, how long harm is done.

A big story has some twenty runs on three nodes, and much happens at once. A small one has one to three runs, of any
workflow that there is, and a short storm that is dense: it costs a tenth, so that many more crashes are tried.
"""

from __future__ import annotations

from random import Random
from typing import Any

from msgspec import Struct

from tests.sim.features import GATES
from tests.sim.flows import KINDS as FLOW_KINDS
from tests.sim.plans import draw_document
from tests.sim.scripts import ROTATING, Script, draw_payments, draw_script

PAYERS = 3
SCRIPTED = ("play", "play", "narrow")
"""The workflows of runs that play a script and use no features."""
STORM_S = 25.0
ANY = ("play", "narrow", "narrow", "pay", "flow", "plan", "edited", "rotating", "dying", *sorted({*GATES} - {"play"}))
"""What a run of a small story may be."""


class Story(Struct, frozen=True, kw_only=True):
    """What is in a story."""

    runs: int = 12
    """Runs that play a script."""

    gates: tuple[str, ...] = SCRIPTED
    """In which workflows they play."""

    payers: int = PAYERS
    flows: int = 0
    plans: int = 0
    featured: int = 0
    few: int = 0
    """One to so many runs of `kinds`, each drawn, beside the others."""

    kinds: tuple[str, ...] = ANY
    strays: int = 6
    """Runs that are started once and without an id."""

    rotating: int = 1
    """Runs that rotate while they are updated."""

    documents: int = 2
    """Keys of debounced runs, if there are features."""

    nodes: tuple[int, ...] = (2, 2, 3)
    storm_s: float = STORM_S
    pauses_s: tuple[float, ...] = (0.5, 2.0, 5.0)
    """The mean time between two harms."""

    @property
    def has_features(self) -> bool:
        """Whether nodes have the workflows with features."""
        return self.featured > 0 or self.few > 0

    @property
    def pace(self) -> float:
        """How long the storm is, as a part of that of a big story: clients come as much closer together."""
        return self.storm_s / STORM_S


SMALL = Story(
    runs=0,
    payers=0,
    few=3,
    strays=0,
    rotating=0,
    documents=0,
    nodes=(1, 2),
    storm_s=6.0,
    pauses_s=(0.1, 0.3, 1.0),
)
"""A small story of anything that there is."""


class Casting(Struct):
    """The runs of one story: what each is given, in which workflow, and of which tenant."""

    scripts: dict[str, Script]
    gates: dict[str, str]
    tenants: dict[str, str]
    documents: int = 0

    def add(self, run_id: str, script: Script, gate: str, tenant: str = "default") -> None:
        """Add a run."""
        self.scripts[run_id], self.gates[run_id], self.tenants[run_id] = script, gate, tenant


def cast(story: Story, seed: int, rng: Random, features: Any) -> Casting:
    """Draw the runs of a story. Each kind has chance of its own, so that more of one changes no other."""
    runs = Casting({}, {}, {}, story.documents if features is not None else 0)
    gates, tenants = Random(f"gates {seed}"), Random(f"tenants {seed}")
    for number in range(story.runs):
        runs.add(f"r{number}", draw_script(rng), gates.choice(story.gates), tenants.choice(("default", "acme")))
    for _ in range(story.rotating):
        runs.add("rotating", ROTATING, "play")
    payments, documents, few = Random(f"payments {seed}"), Random(f"plans {seed}"), Random(f"few {seed}")
    for number in range(story.payers):
        runs.add(f"p{number}", draw_payments(payments, number), "pay")
    for number in range(story.flows):
        runs.add(f"f{number}", [], f"flow{number % FLOW_KINDS}")
    for number in range(story.plans):
        runs.add(f"d{number}", [draw_document(documents, number)], "planned")
    for number in range(story.featured):
        runs.add(f"m{number}", draw_script(features.rng), features.gate())
    for number in range(few.randint(1, story.few) if story.few else 0):
        _add_any(runs, few, few.choice(story.kinds), number)
    return runs


def _add_any(runs: Casting, rng: Random, kind: str, number: int) -> None:
    match kind:
        case "play" | "narrow":
            runs.add(f"r{number}", draw_script(rng), kind, rng.choice(("default", "default", "acme")))
        case "dying":  # it ends its processes, or some of them
            bomb = ["die", f"{rng.getrandbits(32):x}", rng.choice((1, 2, 9))]
            runs.add(f"r{number}", [bomb, *draw_script(rng)], "play")
        case "rotating":
            runs.add("rotating", ROTATING, "play")
        case "pay":
            runs.add(f"p{number}", draw_payments(rng, number), kind)
        case "flow":
            runs.add(f"f{number}", [], f"flow{rng.randrange(FLOW_KINDS)}")
        case "plan":
            runs.add(f"d{number}", [draw_document(rng, number)], "planned")
        case "edited":
            runs.documents += 1
        case _:
            runs.add(f"m{number}", draw_script(rng), kind)
