"""A hook of MkDocs: what the site needs from outside `docs/`, links that lead there, and the reference.

A page is written for a code forge: its links are paths in the repository. Files beside `docs/` that pages link to
become pages of the site, and each link is rewritten from the path in the repository to the path in the site. A link to
any other file of the repository is a warning, which fails the build, as a link to a missing file does.
"""

import logging
import posixpath
import re
import tomllib
from collections.abc import Iterator
from pathlib import Path, PurePosixPath
from typing import Any

from mkdocs.structure.files import File

from tools import diagrams, reference_pages

ROOT = Path(__file__).parents[1]
PROJECT = {
    "README.md": "index.md",
    "ARCHITECTURE.md": "project/architecture.md",
    "CHANGELOG.md": "project/changelog.md",
    "CONTRIBUTING.md": "project/contributing.md",
    "LICENSE": "project/license.md",
    "SECURITY.md": "project/security.md",
}
FOLDERS = {"examples": "Examples", "deploy": "Files for deployment"}
"""Folders whose files are pages, each with the file as it is, below a page that lists them."""

CODE = re.compile(r"(```.*?^\s*```|`[^`\n]+`)", re.DOTALL | re.MULTILINE)
LINK = re.compile(r"\]\(([^)\s#]+)(#[^)\s]*)?\)")
LANGUAGES = {".py": "python", ".json": "json", ".yml": "yaml", ".yaml": "yaml", ".toml": "toml"}

MERMAID = re.compile(r"^```mermaid\n.*?^```$", re.DOTALL | re.MULTILINE)
STATES = "pictures/states.svg"

USAGE = re.compile(r"^## `(holdfast(?: [a-z-]+)+)( [^`]+)`$", re.MULTILINE)
"""The heading of a command, with its arguments."""

log = logging.getLogger("mkdocs.hooks.site")


def site_pages() -> dict[str, str]:
    """Return the pages that come from outside `docs/`: their path in the repository, and in the site."""
    pages = dict(PROJECT)
    for folder in FOLDERS:
        pages[folder] = f"{folder}/index.md"
        pages |= {path: f"{path}.md" for path in _files_of(folder)}
    return pages


def rewritten(text: str, source: str, pages: dict[str, str]) -> str:
    """Return a page with its links as the site has them. `source` is its path in the repository."""
    target_of = {**pages, **{path: path.removeprefix("docs/") for path in _files_of("docs")}}
    here = posixpath.dirname(target_of[source])

    def link(found: re.Match[str]) -> str:
        address, anchor = found[1], found[2] or ""
        if re.match(r"\w+:|/", address):
            return found[0]
        path = posixpath.normpath(posixpath.join(posixpath.dirname(source), address))
        if path not in target_of:
            log.warning("%s links to %s, which is no page of the site", source, path)
            return found[0]
        return f"]({posixpath.relpath(target_of[path], here or '.')}{anchor})"

    parts = CODE.split(text)
    return "".join(part if number % 2 else LINK.sub(link, part) for number, part in enumerate(parts))


def page_of(path: str) -> str:
    """Return the text of a page from a file outside `docs/`: Markdown as it is, anything else as code."""
    if path in FOLDERS:
        links = [f"- [{PurePosixPath(file).relative_to(path)}]({file})" for file in _files_of(path)]
        return "\n".join([f"# {FOLDERS[path]}", "", *links, ""])
    text = (ROOT / path).read_text(encoding="utf-8")
    if path.endswith(".md"):
        return text
    language = LANGUAGES.get(PurePosixPath(path).suffix, "text")
    return f"# {PurePosixPath(path).name}\n\n````{language}\n{text}````\n"


def _files_of(folder: str) -> Iterator[str]:
    for file in sorted((ROOT / folder).rglob("*")):
        if file.is_file() and "__pycache__" not in file.parts:
            yield str(PurePosixPath(file.relative_to(ROOT)))


def on_config(config: Any) -> Any:
    """MkDocs asks: what is the configuration? Each page names the version that it describes."""
    version = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["version"]
    config.copyright = f"Holdfast {version}"
    return config


def on_files(files: Any, config: Any) -> Any:
    """MkDocs asks: which files are there?"""
    for path, target in site_pages().items():
        files.append(File.generated(config, target, content=page_of(path)))
    for target, text in reference_pages.pages().items():
        files.append(File.generated(config, target, content=text))
    files.append(File.generated(config, STATES, content=diagrams.states()))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """MkDocs asks: what is the text of this page?"""
    pages = site_pages()
    sources = {target: path for path, target in pages.items()}
    target = page.file.src_uri
    if target == "index.md":  # it is alone in its part of the navigation
        page.meta["hide"] = ["navigation"]
    if target.startswith("reference/"):
        return markdown
    if target == "command-line.md":  # the table of contents has no room for arguments
        markdown = USAGE.sub(r"## `\1`\n\n`\1\2`", markdown)
    if target.startswith("adr/"):  # a decision is not what a search for its words is for
        page.meta["search"] = {"boost": 0.01}
    if target == "states.md":  # Mermaid would be drawn by a script from another host
        return MERMAID.sub(f"![The life of a run]({STATES})", markdown)
    return rewritten(markdown, sources.get(target, f"docs/{target}"), pages)
