"""What was measured, for readers: docs/benchmarks.md, and a chart for each figure that is compared."""

import statistics
from collections.abc import Callable
from pathlib import Path

from msgspec import Struct

from bench.chart import Bar, bars
from bench.peers.contenders import APART, ONE, Contender
from bench.peers.load import LEASE_S
from bench.peers.measure import FULL, STEPS, Figures
from bench.report import percentile


class Results(Struct):
    """All figures, by contender and shape, and what is to be known about them."""

    environment: dict[str, str]
    versions: dict[str, str]
    missing: list[str]
    figures: dict[str, Figures]
    rounds: int = 0
    minutes: float = 0.0


class Column(Struct, frozen=True):
    """A figure that is shown: of several rounds the median, with the least and the most."""

    title: str
    values: Callable[[Figures], list[float]]
    more_is_better: bool
    short: str


COLUMNS = (
    Column("runs of 3 steps a second", lambda found: found.runs_s, True, "runs"),
    Column("ms a step, one run at a time", lambda found: found.step_ms, False, "step"),
    Column("ms from signal to result", lambda found: _of(found.signal_ms, statistics.median), False, "signal"),
    Column(
        "the same, 99 of 100", lambda found: _of(found.signal_ms, lambda all_ms: percentile(all_ms, 99)), False, "p99"
    ),
    Column("signals a second", lambda found: found.signals_s, True, "signals"),
    Column("KB of memory a parked run", lambda found: [max(kb, 0.0) for kb in found.kb_per_parked], False, "memory"),
)
CHARTS = ("runs", "step", "signal", "signals", "memory")


def _of(values: list[float], function: Callable[[list[float]], float]) -> list[float]:
    return [function(values)] if values else []


def key(contender: Contender, shape: str) -> str:
    """Return the name of a contender in a shape."""
    return f"{contender.name}, {shape}"


def _is_ours(name: str) -> bool:
    return name.startswith("Holdfast")


def _number(value: float) -> str:
    if value >= 100:
        return f"{value:,.0f}"
    return f"{value:.1f}" if value >= 10 else f"{value:.2f}"


def _cell(values: list[float]) -> str:
    if not values:
        return "–"
    middle = _number(statistics.median(values))
    return middle if len(values) == 1 else f"{middle} ({_number(min(values))}–{_number(max(values))})"


def _table(header: list[str], lines: list[list[str]]) -> str:
    rows = [header, ["---"] * len(header), *lines]
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


def tables(results: Results) -> str:
    """Return the tables of speed, of recovery, and of how far Holdfast is from the best of the others."""
    speed = [[name, *(_cell(column.values(found)) for column in COLUMNS)] for name, found in results.figures.items()]
    return "\n\n".join(
        [
            _table(["", *(column.title for column in COLUMNS)], speed),
            _recovery(results),
            _ratios(results),
        ]
    )


def _recovery(results: Results) -> str:
    header = [
        "",
        "s until all had finished",
        "runs lost",
        "finished steps that ran again",
        "interrupted steps that ran again",
    ]
    header += ["idle, % of a core", "ms a step in a run of 100"]
    lines = []
    for name, found in results.figures.items():
        counts = [[float(number) for number in many] for many in (found.lost, found.doubled, found.interrupted_again)]
        row = [name, _cell(found.recovered_s), *(f"{many[0]:.0f}" if many else "–" for many in counts)]
        lines.append([*row, _cell(found.idle_cpu), _cell(found.long_step_ms)])
    return _table(header, lines)


def _ratios(results: Results) -> str:
    """Return how many times better Holdfast is than the best of all others, whatever store and shape that has."""
    lines = []
    for column in COLUMNS:
        best = _best(results, column)
        if best is None:
            continue
        row = [column.title, f"{_number(best[1])} ({best[0]})"]
        for name, found in results.figures.items():
            if _is_ours(name):
                values = column.values(found)
                row.append(_times(statistics.median(values), best[1], column) if values else "–")
        lines.append(row)
    ours = [name for name in results.figures if _is_ours(name)]
    return _table(["", "best of the others", *ours], lines)


def _best(results: Results, column: Column) -> tuple[str, float] | None:
    middles = {
        name: statistics.median(values)
        for name, found in results.figures.items()
        if not _is_ours(name) and (values := column.values(found))
    }
    if not middles:
        return None
    name = (max if column.more_is_better else min)(middles, key=lambda one: middles[one])
    return name, middles[name]


def _times(ours: float, best: float, column: Column) -> str:
    ratio = (ours / best if column.more_is_better else best / ours) if ours and best else 0.0
    return f"{ratio:.2g} ×" if ratio else "–"


# --- the page


def write(results: Results, page: Path) -> None:
    """Write the page and its charts."""
    pictures = page.parent / "pictures"
    pictures.mkdir(exist_ok=True)
    charts = []
    for column in COLUMNS:
        if column.short not in CHARTS:
            continue
        values = {name: column.values(found) for name, found in results.figures.items()}
        drawn = [Bar(name, statistics.median(of), _is_ours(name)) for name, of in values.items() if of]
        if not drawn:
            continue
        better = "more is better" if column.more_is_better else "less is better"
        file = f"benchmark-{column.short}.svg"
        (pictures / file).write_text(bars(f"{column.title[0].upper()}{column.title[1:]} ({better})", drawn), "utf-8")
        charts.append(f"![{column.title}](pictures/{file})")
    page.write_text(_page(results, charts), encoding="utf-8")


def _page(results: Results, charts: list[str]) -> str:
    text = Path(__file__).with_name("page.md").read_text(encoding="utf-8")
    return text.format(
        figures=_figures(results, charts) if results.rounds else NOTHING,
        steps=STEPS,
        seconds=FULL.runs_s,
        held=FULL.held,
        lease=LEASE_S,
        least=FULL.parked_bounds[0],
        most=FULL.parked_bounds[1],
        one=ONE,
        apart=APART,
    )


NOTHING = "There are no figures here yet: the command has not been run on a quiet machine."


BEST = (
    "The best figure of any other engine, on any store and in any shape, and how many times better Holdfast is; below 1"
    " it is worse."
)


def _figures(results: Results, charts: list[str]) -> str:
    stolen = [share for found in results.figures.values() for share in found.stolen]
    speed, recovery, ratios = tables(results).split("\n\n")
    failures = [
        f"{name} failed: {text.splitlines()[0]}" for name, of in results.figures.items() for text in of.failures
    ]
    about = "; ".join(f"{name} {value}" for name, value in results.environment.items())
    packages = ", ".join(f"{name} {value}" for name, value in results.versions.items())
    taken = f"{statistics.mean(stolen):.1f} % of the machine's time, at most {max(stolen):.1f} % in one turn"
    parts = [
        f"{about}.",
        f"{packages}.",
        f"{results.rounds} rounds in {results.minutes:.0f} minutes; others took {taken}.",
        "Medians over the rounds, with the least and the most.",
        f"Not installed, and so not measured: {', '.join(results.missing)}." if results.missing else "",
        speed,
        *failures,
        "## Against the best of the others",
        BEST,
        ratios,
        "## After SIGKILL, and at rest",
        recovery,
        *charts,
    ]
    return "\n\n".join(part for part in parts if part)
