"""What a fleet of nodes on several databases would give, computed of measured figures: `python -m bench.fleet_model`.

    runs/s = M * min(n / c(n), k / s(n))        n = N / M

N nodes, a core each, on M databases, which have k cores each; c(n) is the CPU of all processes for a run of three
steps when n nodes are on one database, and s(n) that of the server. Both are from fleets on one PostgreSQL server
(`python -m bench.scale --only bursts`), and between two measured sizes on the line between them. Beyond the largest
fleet that was measured nothing is computed. It is no measurement, and the page says what it knows nothing of.
"""

import sys
from pathlib import Path

from msgspec import Struct

from bench import figures
from bench.figures import Figures, NotMeasured

TITLE = "postgres bursts"
SIZES = (1, 2, 4, 8)
NODES = (1, 2, 4, 8, 16, 32, 64)
DATABASES = (1, 2, 4, 8)
SERVER_CORES = (2, 8)


class Cost(Struct, frozen=True):
    """The CPU of a run, in microseconds: of the processes, and of the server."""

    processes: float
    server: float


def costs_of(found: Figures) -> dict[int, Cost]:
    """Return what was measured, by how many nodes were on the database. All of it must have been."""
    labels = {size: f"runs of 3 steps, {size} node{'s' if size > 1 else ''}" for size in SIZES}
    return {
        size: Cost(*(found.value(TITLE, label, column) for column in ("CPU µs each", "server CPU µs each")))
        for size, label in labels.items()
    }


def cost_of(nodes: float, costs: dict[int, Cost]) -> Cost:
    """Return the cost of a run with so many nodes on a database: measured, or on the line between two that were."""
    if nodes in costs:
        return costs[int(nodes)]
    below = [size for size in costs if size < nodes]
    above = [size for size in costs if size > nodes]
    if not below or not above:
        raise NotMeasured(f"{nodes:g} nodes on a database were not measured: only {min(costs)} to {max(costs)}")
    low, high = max(below), min(above)
    share = (nodes - low) / (high - low)
    first, second = costs[low], costs[high]
    return Cost(
        first.processes + share * (second.processes - first.processes),
        first.server + share * (second.server - first.server),
    )


def runs_per_s(nodes: int, databases: int, cores: int, costs: dict[int, Cost]) -> tuple[float, str]:
    """Return the rate, and what limits it: the nodes or the databases."""
    each = nodes / databases
    cost = cost_of(each, costs)
    of_nodes, of_database = each * 1e6 / cost.processes, cores * 1e6 / cost.server
    return databases * min(of_nodes, of_database), "nodes" if of_nodes <= of_database else "databases"


def report(found: Figures) -> str:
    """Return the tables: the inputs, and what follows."""
    costs, measured = costs_of(found), found.measured[TITLE]
    parts = [
        f"Inputs, measured on {measured['cores']} cores at {measured['time']}, beside other work:",
        "",
        "| nodes on a database | c: CPU of all processes for a run | s: CPU of the server for a run | load |",
        "|---|---|---|---|",
    ]
    for size, cost in costs.items():
        load = found.value(TITLE, f"runs of 3 steps, {size} node{'s' if size > 1 else ''}", "load")
        parts.append(f"| {size} | {cost.processes:.0f} µs | {cost.server:.0f} µs | {load:.0f} |")
    for cores in SERVER_CORES:
        parts += ["", f"**Computed, not measured:** runs of three steps a second, databases of {cores} cores each"]
        parts += ["", f"| nodes | {' | '.join(f'M = {count}' for count in DATABASES)} |", "|---" * 5 + "|"]
        for nodes in NODES:
            cells = [_cell(nodes, count, cores, costs) for count in DATABASES]
            parts.append(f"| {nodes} | {' | '.join(cells)} |")
    return "\n".join(parts) + "\n"


def _cell(nodes: int, databases: int, cores: int, costs: dict[int, Cost]) -> str:
    try:
        rate, limit = runs_per_s(nodes, databases, cores, costs)
    except NotMeasured:
        return "-"
    return f"{float(f'{rate:.2g}'):,.0f}{' *' if limit == 'databases' else ''}"


if __name__ == "__main__":
    sys.stdout.write(report(figures.read(Path(sys.argv[1]) if sys.argv[1:] else figures.KEPT)))
