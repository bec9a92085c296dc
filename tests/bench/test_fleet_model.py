"""Fleets are computed of figures that were measured, and of nothing else; the page shows what follows from them."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest

from bench import figures, fleet_model, scaling_page
from bench.figures import NotMeasured

TITLE = fleet_model.TITLE


def a_fleet(**changes: Any) -> dict[str, Any]:
    labels = [f"runs of 3 steps, {size} node{'s' if size > 1 else ''}" for size in fleet_model.SIZES]
    row = {"load": 1.0, "CPU µs each": 500.0, "server CPU µs each": 250.0, **changes}
    return {TITLE: {label: dict(row) for label in labels}}


def written(path: Path, results: dict[str, Any], when: str = "2026-11-19T21:00:00Z") -> Path:
    figures.write(path, results, {TITLE: {"time": when, "cores": 2}})
    return path


def test_a_fleet_gives_what_its_nodes_or_its_databases_can() -> None:
    costs = fleet_model.costs_of(figures.Figures(a_fleet(), {TITLE: {"time": "now"}}))
    assert fleet_model.runs_per_s(1, 1, 2, costs) == (2_000, "nodes")
    assert fleet_model.runs_per_s(8, 1, 2, costs) == (8_000, "databases")
    assert fleet_model.runs_per_s(8, 1, 8, costs) == (16_000, "nodes")
    assert fleet_model.runs_per_s(16, 4, 1, costs) == (16_000, "databases")


def test_between_two_measured_fleets_the_cost_is_between_theirs_and_beyond_them_unknown() -> None:
    costs = {2: fleet_model.Cost(400, 100), 4: fleet_model.Cost(600, 140)}
    assert fleet_model.cost_of(3, costs) == fleet_model.Cost(500, 120)
    for nodes in (1, 0.5, 4.5, 8):
        with pytest.raises(NotMeasured):
            fleet_model.cost_of(nodes, costs)


def test_a_figure_that_was_changed_by_hand_is_refused(tmp_path: Path) -> None:
    path = written(tmp_path / "figures.json", a_fleet())
    assert figures.read(path).value(TITLE, "runs of 3 steps, 1 node", "CPU µs each") == 500
    kept = json.loads(path.read_text(encoding="utf-8"))
    kept["results"][TITLE]["runs of 3 steps, 1 node"]["CPU µs each"] = 50.0
    path.write_text(json.dumps(kept), encoding="utf-8")
    with pytest.raises(NotMeasured, match="its digest is another"):
        figures.read(path)
    del kept["sha256"]
    path.write_text(json.dumps(kept), encoding="utf-8")
    with pytest.raises(NotMeasured):
        figures.read(path)


@pytest.mark.parametrize("value", [None, 0, -1.0, math.nan, math.inf, "500", True, [500.0]])
def test_what_was_not_measured_has_no_other_value(value: Any) -> None:
    for column in ("CPU µs each", "server CPU µs each"):
        results = a_fleet(**{column: value})
        if value is None:
            for row in results[TITLE].values():
                del row[column]
        with pytest.raises(NotMeasured, match=column):
            fleet_model.costs_of(figures.Figures(results, {TITLE: {"time": "now"}}))


def test_every_size_must_have_been_measured_at_a_known_time(tmp_path: Path) -> None:
    for label in a_fleet()[TITLE]:
        results = a_fleet()
        del results[TITLE][label]
        with pytest.raises(NotMeasured, match=label):
            fleet_model.report(figures.read(written(tmp_path / "figures.json", results)))
    with pytest.raises(NotMeasured, match="when"):
        fleet_model.report(figures.read(written(tmp_path / "figures.json", a_fleet(), when="")))


def test_the_table_has_no_figure_beyond_what_was_measured(tmp_path: Path) -> None:
    text = fleet_model.report(figures.read(written(tmp_path / "figures.json", a_fleet())))
    assert "Computed, not measured" in text
    rows = [line.strip("| ").split(" | ") for line in text.splitlines() if line.startswith("| 64 ")]
    assert rows
    assert all(row[1:4] == ["-", "-", "-"] and row[4] != "-" for row in rows), "at most 8 nodes on a database"


def test_the_page_and_its_charts_are_what_the_kept_figures_give() -> None:
    found, page = figures.read(figures.KEPT), scaling_page.DOCS / "scaling.md"
    text = page.read_text(encoding="utf-8")
    assert scaling_page.page_with(text, found) == text, "run `python -m bench.scaling_page`"
    for name, chart in scaling_page.charts(found).items():
        assert (scaling_page.DOCS / "pictures" / name).read_text(encoding="utf-8") == chart
        assert f"pictures/{name}" in text
        assert "prefers-color-scheme: dark" in chart
