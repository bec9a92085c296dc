"""The documentation site: it builds strictly, holds every page, and loads nothing from another host."""

from __future__ import annotations

import functools
import http.server
import importlib.metadata
import json
import re
import shutil
import subprocess
import sys
import threading
from pathlib import Path
from types import SimpleNamespace

import pytest

from tests.machine_load import slowdown
from tests.web.browser import open_browser
from tools import site, site_versions

ROOT = Path(__file__).parents[2]
VERSION = importlib.metadata.version("holdfast")
LOADED = re.compile(
    r"""<(?:script|img|iframe)[^>]*\ssrc="?(?:https?:)?//|<link[^>]*rel="?stylesheet[^>]*href="?(?:https?:)?//"""
)


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with the documentation of this version, and of another."""
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "tools.site_versions", str(folder)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300, check=False)
    assert (done.returncode, done.stdout + done.stderr) == (0, "")
    assert [each["version"] for each in json.loads((folder / "versions.json").read_text())] == [VERSION]
    shutil.copytree(folder / VERSION, folder / "0.0.9")
    site_versions.write_index(folder)
    return folder


@pytest.mark.process
@pytest.mark.slow
def test_the_site_builds_strictly_and_loads_nothing_from_another_host(built: Path) -> None:
    sources = [path.relative_to(ROOT / "docs") for path in (ROOT / "docs").rglob("*.md")]
    targets = [str(path) for path in sources] + list(site.site_pages().values())
    for target in targets:
        page = re.sub(r"(^|/)README\.md$", r"\1index.html", target).removesuffix(".md").removesuffix(".html") + ".html"
        text = (built / VERSION / page).read_text(encoding="utf-8")
        assert not LOADED.search(text), f"{page} loads something from another host"
        assert f"Holdfast {VERSION}" in text, f"{page} does not name its version"


@pytest.mark.browser
@pytest.mark.process
@pytest.mark.slow
async def test_a_reader_chooses_a_version_searches_and_reads_in_the_dark(built: Path) -> None:
    handler = functools.partial(QuietHandler, directory=str(built))
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        try:
            async with open_browser() as browser:
                page = await browser.new_page()
                await page.goto(f"http://127.0.0.1:{server.server_address[1]}/")
                await page.wait_for_selector(".md-version", state="attached")
                assert page.url.endswith(f"/{VERSION}/index.html")
                assert await page.locator(".md-version__item").all_inner_texts() == [VERSION, "0.0.9"]
                await page.locator("label[for=__palette_1]").first.click()
                assert await page.evaluate("document.body.dataset.mdColorScheme") == "slate"
                await page.locator("[data-md-component=search-query]").press_sequentially("dead letter")
                await page.wait_for_selector(".md-search-result__item", state="attached", timeout=30_000 * slowdown())
        finally:
            server.shutdown()


class QuietHandler(http.server.SimpleHTTPRequestHandler):
    """Serves files without a line for each."""

    def log_message(self, *_: object) -> None: ...


def test_each_version_is_listed_and_the_newest_is_led_to(tmp_path: Path) -> None:
    for name in ("0.9", "0.10.1", "0.10", "search", "1.0"):
        (tmp_path / name).mkdir()
        if name != "1.0":  # whose build has failed
            (tmp_path / name / "index.html").touch()
    site_versions.write_index(tmp_path)
    listed = json.loads((tmp_path / "versions.json").read_text())
    assert [each["version"] for each in listed] == ["0.10.1", "0.10", "0.9"]
    assert 'url=0.10.1/index.html"' in (tmp_path / "index.html").read_text()


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
