"""Builds the documentation of this version beside that of others: `make docs`, `python -m tools.site_versions DIR`.

The folder has a folder for each version, `versions.json` for the choice in the head of each page (the form of the
theme's provider, mike), and a page that leads to the newest. Folders of other versions stay as they are.
"""

import json
import os
import subprocess
import sys
import tomllib
from pathlib import Path

from packaging.version import InvalidVersion, Version

ROOT = Path(__file__).parents[1]
SITE = ROOT / "build" / "site"

INDEX = """\
<!doctype html>
<meta charset="utf-8">
<title>Holdfast</title>
<meta http-equiv="refresh" content="0; url={newest}/index.html">
<a href="{newest}/index.html">Holdfast {newest}</a>
"""


def versions_in(site: Path) -> list[str]:
    """Return the versions whose documentation is in a folder, the newest first."""
    found = []
    for folder in site.iterdir():
        try:
            version = Version(folder.name)
        except InvalidVersion:
            continue
        if (folder / "index.html").exists():
            found.append((version, folder.name))
    return [name for _, name in sorted(found, reverse=True)]


def write_index(site: Path) -> None:
    """Write which versions there are, and the page that leads to the newest."""
    versions = versions_in(site)
    listed = [{"version": each, "title": each, "aliases": []} for each in versions]
    (site / "versions.json").write_text(json.dumps(listed, indent=2) + "\n")
    (site / "index.html").write_text(INDEX.format(newest=versions[0]))


def main() -> None:
    """Build the documentation of this version, strictly."""
    site = Path(sys.argv[1]) if len(sys.argv) > 1 else SITE
    version = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["version"]
    command = [
        sys.executable,
        "-m",
        "mkdocs",
        "build",
        "--strict",
        "--quiet",
        "--site-dir",
        (site / version).absolute(),
    ]
    environment = {**os.environ, "NO_MKDOCS_2_WARNING": "1", "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, cwd=ROOT, env=environment, check=False)
    if done.returncode:
        raise SystemExit(done.returncode)
    write_index(site)


if __name__ == "__main__":
    main()
