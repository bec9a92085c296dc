"""The web page: files of the package, without a build and without external resources.

The document names its scripts and style sheets one by one; it is sent with one of each (`bundle.py`). The files have
addresses that contain a hash of their content, so browsers cache them permanently; only the document that names these
addresses is requested each time. The files contain no data and need no authentication: what they show comes from the
same operations that all other callers use.
"""

import gzip
import hashlib
import html
import re
from collections.abc import Mapping
from functools import cache, cached_property
from pathlib import Path

from starlette.responses import Response
from starlette.routing import BaseRoute, Route
from starlette.types import ASGIApp, Receive, Scope, Send

from holdfast.errors import NotFound
from holdfast.service.http.bundle import join_modules

FOLDER = Path(__file__).parents[2] / "web"
DOCUMENT = "index.html"
ASSETS = "/assets"
PLACES = (
    "/",
    "/runs",
    "/runs/{rest:path}",
    "/inbox",
    "/inbox/{rest:path}",
    "/plans",
    "/schedules",
    "/health",
    "/audit",
)
"""The addresses of the document. It decides itself what it shows at each of them."""

KINDS = {
    ".css": "text/css; charset=utf-8",
    ".html": "text/html; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".map": "application/json",
    ".svg": "image/svg+xml",
}
SCRIPT, SOURCE_MAP, SHEET = "bundle.js", "bundle.js.map", "style/bundle.css"
_SCRIPT = re.compile(r'<script type="module" src="\{base\}/([^"]+)"></script>\s*')
_SHEET = re.compile(r'<link rel="stylesheet" href="\{base\}/([^"]+)">\s*')
FOR_GOOD = "public, max-age=31536000, immutable"
ASK_FIRST = "no-cache"


class Asset:
    """A file as it is sent. It is compressed at the first request for that: most files are only used in a bundle."""

    def __init__(self, name: str, body: bytes) -> None:
        self.body = body
        self.kind = KINDS[Path(name).suffix]
        self.tag = f'"{hashlib.sha256(body).hexdigest()[:16]}"'

    @cached_property
    def packed(self) -> bytes:
        """Return the file compressed."""
        return gzip.compress(self.body, 6, mtime=0)


class Page:
    """All files of the page, read once."""

    def __init__(self, folder: Path = FOLDER) -> None:
        names = sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.suffix in KINDS)
        bodies = {name: (folder / name).read_bytes() for name in names}
        digest = hashlib.sha256(b"".join(name.encode() + b"\0" + body + b"\0" for name, body in bodies.items()))
        self.version = digest.hexdigest()[:16]
        texts = {name: body.decode() for name, body in bodies.items()}
        document, bundles = _bundled(texts)
        self._document = document
        bodies |= {name: text.encode() for name, text in bundles.items()}
        self.assets = {name: Asset(name, body) for name, body in bodies.items()}
        self.assets[DOCUMENT] = self.document_at("")

    def document_at(self, mount: str) -> Asset:
        """Return the document of a service that is mounted below a prefix; the prefix is empty at the root."""
        prefix = html.escape(mount)
        text = self._document.replace("{base}", f"{prefix}{ASSETS}/{self.version}").replace("{mount}", prefix)
        return Asset(DOCUMENT, text.encode())


def _bundled(texts: Mapping[str, str]) -> tuple[str, dict[str, str]]:
    """Return the document with one script and one style sheet in place of the ones that it names, and these two."""
    document = texts[DOCUMENT]
    scripts, sheets = _SCRIPT.findall(document), _SHEET.findall(document)
    bundles: dict[str, str] = {}
    if scripts:
        script, described = join_modules(texts, scripts)
        bundles |= {SCRIPT: f"{script}\n//# sourceMappingURL={SOURCE_MAP}\n", SOURCE_MAP: described}
    if sheets:
        bundles[SHEET] = "\n".join(texts[name] for name in sheets)
    for found, name in ((_SCRIPT, SCRIPT), (_SHEET, SHEET)):
        places = [*found.finditer(document)]
        for place in reversed(places):
            whole = place[0].replace(place[1], name) if place is places[-1] else ""
            document = document[: place.start()] + whole + document[place.end() :]
    return document, bundles


@cache
def the_page() -> Page:
    """Return the page of this package."""
    return Page()


async def _document(scope: Scope, receive: Receive, send: Send) -> None:
    page, mount = the_page(), scope["holdfast.mount"]
    document = page.document_at(mount) if mount else page.assets[DOCUMENT]
    await _answer(document, ASK_FIRST, scope, receive, send)


async def nothing_here(scope: Scope, receive: Receive, send: Send) -> None:
    """Respond at an unknown address: browsers get the page, which reports it; others get an error."""
    is_browser = scope["type"] == "http" and scope["method"] in ("GET", "HEAD")
    if not is_browser or b"text/html" not in scope["holdfast.headers"].get(b"accept", b"").lower():
        raise NotFound("there is nothing at this address")
    document = the_page().document_at(scope["holdfast.mount"])
    headers = {"cache-control": "no-store", "vary": "accept"}
    await Response(document.body, 404, headers=headers, media_type=document.kind)(scope, receive, send)


async def _asset_of(scope: Scope, receive: Receive, send: Send) -> None:
    """Respond with a file. A file requested with an outdated hash is sent too, but not cached."""
    page, parameters = the_page(), scope["path_params"]
    asset = page.assets.get(parameters["name"])
    if asset is None or parameters["name"] == DOCUMENT:
        raise NotFound("there is nothing at this address")
    await _answer(asset, FOR_GOOD if parameters["version"] == page.version else ASK_FIRST, scope, receive, send)


async def _answer(asset: Asset, keep: str, scope: Scope, receive: Receive, send: Send) -> None:
    headers, asked = {"cache-control": keep, "etag": asset.tag, "vary": "accept-encoding"}, scope["holdfast.headers"]
    if asset.tag.encode() in asked.get(b"if-none-match", b""):
        await Response(status_code=304, headers=headers)(scope, receive, send)
        return
    is_packed = b"gzip" in asked.get(b"accept-encoding", b"")
    if is_packed:
        headers["content-encoding"] = "gzip"
    response = Response(asset.packed if is_packed else asset.body, headers=headers, media_type=asset.kind)
    await response(scope, receive, send)


class _Served:
    """An ASGI application for a route. It is not a function, which a route would call with a request instead."""

    def __init__(self, answer: ASGIApp) -> None:
        self._answer = answer

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await self._answer(scope, receive, send)


def page_routes() -> list[BaseRoute]:
    """Return the routes of the page."""
    places = [Route(place, _Served(_document), methods=["GET"]) for place in PLACES]
    return [*places, Route(f"{ASSETS}/{{version}}/{{name:path}}", _Served(_asset_of), methods=["GET"])]
