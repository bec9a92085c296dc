"""Writes the figures, the charts and the computed fleets of docs/scaling.md: `python -m bench.scaling_page`.

All of it comes from bench/scaling.json, which `python -m bench.scale --json bench/scaling.json` writes.
"""

import re
from collections.abc import Mapping, Sequence
from pathlib import Path

from bench import figures, fleet_model
from bench.chart import lines
from bench.figures import Figures
from bench.report import Row, Rows

DOCS = Path(__file__).parents[1] / "docs"
STORES = {"SQLite": "sqlite", "PostgreSQL": "postgres"}
WORK = {"a run of three steps": "run", "a signal to a waiting run": "signal"}
LOOKS = ("newest", "failed", "claim of nothing", "next due", "orphaned", "metrics", "health sample", "doctor")
CHARTED = ("metrics", "health sample", "doctor")

SIZE_ROWS = {
    "load of the machine while it was measured": "load",
    "first result of a new process, s of CPU": "first result CPU s",
    "a run of three steps: CPU µs of the node": "CPU µs/run",
    "the same: CPU µs of the server": "server CPU µs/run",
    "a signal to a waiting run: CPU µs of the node": "CPU µs/signal",
    "the same: CPU µs of the server ": "server CPU µs/signal",
    "an idle node, % of a core": "idle CPU %",
    "memory of the node, MB": "resident MB",
    "the store on the disk, GB": "GB",
    "**CPU ms for one question** (node and server)": "",
    "the newest 50 runs": "newest, CPU ms",
    "the newest 50 that failed": "failed, CPU ms",
    "the newest 50 of a workflow": "of a workflow, CPU ms",
    "a word that is nowhere, in 20,000 runs": "a word that is nowhere, CPU ms",
    "counts by workflow and status (up to 100,000 of each)": "counts, CPU ms",
    "a claim that finds nothing": "claim of nothing, CPU ms",
    "when something is due next": "next due, CPU ms",
    "what no node can run": "orphaned, CPU ms",
    "the metrics": "metrics, CPU ms",
    "a health sample": "health sample, CPU ms",
    "`doctor`, without its sample of histories": "doctor, CPU ms",
    "the preview of retention": "retention's preview, CPU ms",
}
BURST_ROWS = {
    "load": "load",
    "all done after, s": "all done after s",
    "CPU µs each, of all processes": "CPU µs each",
    "CPU µs each, of the server": "server CPU µs each",
}


def blocks(found: Figures) -> dict[str, str]:
    """Return what is generated, by its name on the page."""
    sizes = [_sizes(found, name, title) for name, title in STORES.items()]
    bursts = [_bursts(found, name, title) for name, title in STORES.items()]
    return {"sizes": "\n".join(sizes), "bursts": "\n".join(bursts), "fleets": fleet_model.report(found)}


def _sizes(found: Figures, name: str, store: str) -> str:
    title = f"{store} by size"
    rows = found.results[title]
    return _said(found, title, name) + _table(list(rows), SIZE_ROWS, rows)


def _bursts(found: Figures, name: str, store: str) -> str:
    title = f"{store} bursts"
    rows = found.results[title]
    turned: Rows = {column: {label: row[column] for label, row in rows.items() if column in row} for column in BURSTS}
    return _said(found, title, name) + _table(list(BURSTS.values()), {label: label for label in rows}, {
        shown: turned[column] for column, shown in BURSTS.items()
    })  # fmt: skip


BURSTS = {column: label for label, column in BURST_ROWS.items()}


def _said(found: Figures, title: str, name: str) -> str:
    measured = found.measured[title]
    return f"\n**{name}**, {measured['cores']} cores, from {measured['time']} on\n\n"


def _table(columns: Sequence[str], named: Mapping[str, str], rows: Mapping[str, Row]) -> str:
    text = [f"| | {' | '.join(columns)} |", "|---" * (len(columns) + 1) + "|"]
    for label, key in named.items():
        cells = [_cell(rows[column].get(key)) for column in columns]
        if key == "" or any(cells):
            text.append(f"| {label.strip()} | {' | '.join(cells)} |")
    return "\n".join(text) + "\n"


def _cell(value: float | list[float] | None) -> str:
    if value is None or isinstance(value, list):
        return ""
    return f"{value:,.0f}" if value >= 100 else f"{float(f'{value:.2g}'):g}"


def charts(found: Figures) -> dict[str, str]:
    """Return the charts by the names of their files."""
    drawn = {}
    for name, title in STORES.items():
        rows = found.results[f"{title} by size"]
        ticks = [label.partition(" ")[0] for label in rows]
        work = {
            f"{shown}{where}": values
            for shown, key in WORK.items()
            for where, column in (("", f"CPU µs/{key}"), (", server", f"server CPU µs/{key}"))
            if (values := _values(rows, column))
        }
        drawn[f"scaling-work-{title}.svg"] = lines(f"CPU µs by finished runs ({name})", _short(work), ticks)
        asked = {look: _values(rows, f"{look}, CPU ms") for look in CHARTED}
        drawn[f"scaling-questions-{title}.svg"] = lines(f"CPU ms a question, by finished runs ({name})", asked, ticks)
    return drawn


def _values(rows: Rows, column: str) -> list[float]:
    return [value for row in rows.values() if isinstance(value := row.get(column), int | float)]


def _short(work: Mapping[str, list[float]]) -> dict[str, list[float]]:
    return {label.replace("a run of three steps", "run").replace("a signal to a waiting run", "signal"): values
            for label, values in work.items()}  # fmt: skip


def page_with(text: str, found: Figures) -> str:
    """Return the page with what is generated in its places."""
    for name, block in blocks(found).items():
        begin, end = f"<!-- {name} -->\n", f"<!-- end of {name} -->\n"
        pattern = re.compile(re.escape(begin) + ".*?" + re.escape(end), re.DOTALL)
        if not pattern.search(text):
            raise ValueError(f"the page has no place for {name}")
        new = begin + "\n" + block.strip() + "\n\n" + end
        text = pattern.sub(lambda _, new=new: new, text)  # type: ignore[misc]
    return text


def main() -> None:
    """Write the page and its charts."""
    found, page = figures.read(figures.KEPT), DOCS / "scaling.md"
    page.write_text(page_with(page.read_text(encoding="utf-8"), found), encoding="utf-8")
    for name, chart in charts(found).items():
        (DOCS / "pictures" / name).write_text(chart, encoding="utf-8")


if __name__ == "__main__":
    main()
