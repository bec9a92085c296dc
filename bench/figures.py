"""Figures that are kept as JSON, with when and where they were measured, for what is computed of them later.

A file has a digest of what is in it. `read` refuses one that was changed by hand, or holds what nothing can measure: so
nobody computes with a number that was never measured without knowing it.
"""

import json
import math
import os
import platform
import sqlite3
import time
from hashlib import sha256
from pathlib import Path
from typing import Any

from bench.report import Rows

KEPT = Path(__file__).with_name("scaling.json")
"""What docs/scaling.md is made of."""

Results = dict[str, Rows]
Measured = dict[str, dict[str, Any]]
"""When and where each measurement was made, by its title."""


class NotMeasured(Exception):
    """What is asked for is not among the figures, or they are not what was measured."""


class Figures:
    """What was measured, by the title of the measurement, the label of the row and the name of the column."""

    def __init__(self, results: Results, measured: Measured) -> None:
        self.results = results
        self.measured = measured

    def value(self, title: str, label: str, column: str) -> float:
        """Return a figure. There is no other value for one that is missing."""
        if not self.measured.get(title, {}).get("time"):
            raise NotMeasured(f"{title}: it is not known when it was measured")
        value = self.results.get(title, {}).get(label, {}).get(column)
        if not isinstance(value, int | float) or isinstance(value, bool) or not math.isfinite(value) or value <= 0:
            raise NotMeasured(f"{title}: {label}: {column} was not measured: {value!r}")
        return value


def environment() -> dict[str, Any]:
    """Return where and when it is measured."""
    return {
        "time": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "cores": os.cpu_count() or 0,
        "load": round(os.getloadavg()[0], 1),
        "python": platform.python_version(),
        "sqlite": sqlite3.sqlite_version,
    }


def write(path: Path, results: Results, measured: Measured) -> None:
    """Write figures as they have just been measured."""
    kept = {"measured": measured, "results": results}
    path.write_text(json.dumps({**kept, "sha256": _digest(kept)}, indent=2) + "\n", encoding="utf-8")


def read(path: Path) -> Figures:
    """Return the figures of a file, or raise `NotMeasured`."""
    kept = json.loads(path.read_text(encoding="utf-8"))
    digest = kept.pop("sha256", None)
    if digest != _digest(kept):
        raise NotMeasured(f"{path.name} is not what was written by the measurement: its digest is another one")
    return Figures(kept["results"], kept["measured"])


def _digest(kept: dict[str, Any]) -> str:
    return sha256(json.dumps(kept, sort_keys=True).encode()).hexdigest()
