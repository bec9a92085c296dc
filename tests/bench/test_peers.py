"""The comparison with other engines: Holdfast's part of it runs, and what was measured becomes a page with charts."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from xml.etree import ElementTree

import msgspec
import pytest

from bench.peers import write_up
from bench.peers.contenders import ALL
from bench.peers.measure import Figures
from bench.peers.write_up import Results

ROOT = Path(__file__).parents[2]


def of(runs: float, signals_ms: list[float]) -> Figures:
    """Return figures that are alike but for some."""
    return Figures(
        runs_s=[runs, runs * 1.1],
        step_ms=[1.0],
        long_step_ms=[1.5],
        signal_ms=signals_ms,
        signals_s=[runs],
        kb_per_parked=[-1.0],
        idle_cpu=[0.0],
        recovered_s=[2.0],
        interrupted_again=[5],
        doubled=[0],
        lost=[0],
        stolen=[0.5],
    )


@pytest.mark.process
@pytest.mark.slow
def test_the_short_form_measures_every_figure_and_loses_nothing(tmp_path: Path) -> None:
    figures = tmp_path / "figures.json"
    command = [sys.executable, "-m", "bench.peers", "--short", "--rounds", "1", "--only", "Holdfast, SQLite"]
    command += ["--shapes", "one process", "--json", str(figures), "--dir", str(tmp_path), "--allow-memory"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120, check=False)

    assert done.returncode == 0, done.stderr
    [found] = msgspec.json.decode(figures.read_bytes(), type=Results).figures.values()
    for name in ("step_ms", "long_step_ms", "signal_ms", "signals_s", "recovered_s"):
        assert all(value > 0 for value in getattr(found, name)), name
    assert (found.lost, found.doubled, found.interrupted_again) == ([0], [0], [5])
    assert [path.name for path in tmp_path.iterdir()] == ["figures.json"], "nothing is left behind"


def test_the_page_has_a_row_for_each_contender_and_a_chart_for_each_comparison(tmp_path: Path) -> None:
    names = [write_up.key(contender, shape) for contender in ALL for shape in contender.shapes]
    figures = {name: of(2_000.0 if "Holdfast" in name else 100.0, [2.0] * 99 + [9.0]) for name in names}
    figures[names[-1]] = Figures(failures=["no answer within 1 s"])
    results = Results({"cores": "2"}, {"dbos": "3"}, ["Restate"], figures, rounds=2, minutes=9.0)

    write_up.write(results, tmp_path / "page.md")

    page = (tmp_path / "page.md").read_text(encoding="utf-8")
    assert all(f"| {name} |" in page for name in names)
    assert "2,100 (2,000–2,200)" in page
    assert "20 ×" in page, "the best of the others has 105"
    assert "not measured: Restate" in page
    assert "no answer within 1 s" in page
    assert "{" not in page
    for path in sorted((tmp_path / "pictures").iterdir()):
        assert f"pictures/{path.name}" in page
        drawn = ElementTree.fromstring(path.read_text(encoding="utf-8"))
        assert len(drawn.findall("{*}rect")) == len(names) - 1
        assert "prefers-color-scheme: dark" in path.read_text(encoding="utf-8")
