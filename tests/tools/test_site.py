"""The documentation site: it builds strictly, holds every page, and loads nothing from another host."""

from __future__ import annotations

import importlib.metadata
import os
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from tools import site

ROOT = Path(__file__).parents[2]
VERSION = importlib.metadata.version("holdfast")
LOADED = re.compile(
    r"""<(?:script|img|iframe)[^>]*\ssrc="?(?:https?:)?//|<link[^>]*rel="?stylesheet[^>]*href="?(?:https?:)?//"""
)


@pytest.mark.process
@pytest.mark.slow
def test_the_site_builds_strictly_and_loads_nothing_from_another_host(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(tmp_path)]
    environ = {**os.environ, "NO_MKDOCS_2_WARNING": "1", "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, cwd=ROOT, env=environ, capture_output=True, text=True, timeout=300, check=False)
    assert (done.returncode, done.stdout + done.stderr) == (0, "")
    sources = [path.relative_to(ROOT / "docs") for path in (ROOT / "docs").rglob("*.md")]
    targets = [str(path) for path in sources] + list(site.site_pages().values())
    for target in targets:
        built = re.sub(r"(^|/)README\.md$", r"\1index.html", target).removesuffix(".md").removesuffix(".html") + ".html"
        text = (tmp_path / built).read_text(encoding="utf-8")
        assert not LOADED.search(text), f"{built} loads something from another host"
        assert f"Holdfast {VERSION}" in text, f"{built} does not name its version"


def test_links_are_rewritten_from_the_repository_to_the_site() -> None:
    pages = {"README.md": "index.md", "SECURITY.md": "project/security.md", "examples/saga.py": "examples/saga.py.md"}
    text = "[a](../SECURITY.md#x) [b](../examples/saga.py) [c](signals.md) [d](https://e.org) [e](#here) `[f](g.md)`"
    assert site.rewritten(text, "docs/flows.md", pages) == (
        "[a](project/security.md#x) [b](examples/saga.py.md) [c](signals.md) [d](https://e.org) [e](#here) `[f](g.md)`"
    )
    assert site.rewritten("![a](docs/pictures/run-light.png)", "README.md", pages) == "![a](pictures/run-light.png)"
    assert site.rewritten("[a](README.md)", "SECURITY.md", pages) == "[a](../index.md)"


def test_the_arguments_of_a_command_are_below_its_heading() -> None:
    page = SimpleNamespace(file=SimpleNamespace(src_uri="command-line.md"), meta={})
    made = site.on_page_markdown("## `holdfast run tail RUN-ID [--after NUMBER]`\n\nPrints events.\n", page)
    assert made == "## `holdfast run tail`\n\n`holdfast run tail RUN-ID [--after NUMBER]`\n\nPrints events.\n"


def test_a_link_to_what_is_no_page_is_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    site.rewritten("[a](../Makefile)", "docs/flows.md", {})
    assert "docs/flows.md links to Makefile, which is no page of the site" in caplog.text
