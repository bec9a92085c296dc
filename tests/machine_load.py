"""How much longer things take because the machine does other things as well: for tests that compare with a time."""

import os


def slowdown() -> float:
    """Return how many processes compete for each core, at least 1: as much longer does what needs a core take."""
    return max(1.0, os.getloadavg()[0] / (os.cpu_count() or 1))
