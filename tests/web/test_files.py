"""The files of the page: how they are served, and what must not be in them."""

import re
from pathlib import Path

import httpx
import pytest

from holdfast.service.http.static import FOLDER, Page
from holdfast.service.operations import OPERATIONS
from tests.service.in_process import serve_in_process
from tests.service.token_callers import serve_with_tokens

FILES = sorted(path for path in FOLDER.rglob("*") if path.is_file())
SCRIPTS = [path for path in FILES if path.suffix == ".js"]


@pytest.mark.parametrize("place", ["/", "/runs", "/runs/a%2Fb", "/inbox", "/schedules", "/health"])
async def test_the_document_is_asked_for_each_time_and_names_files_that_are_kept(place: str) -> None:
    async with serve_in_process() as server:
        document = await server.http.get(place)
        assert (document.status_code, document.headers["cache-control"]) == (200, "no-cache")
        assert "'self'" in document.headers["content-security-policy"]
        again = await server.http.get(place, headers={"if-none-match": document.headers["etag"]})
        assert (again.status_code, again.content) == (304, b"")
        for address in re.findall(r'(?:src|href)="([^"]+)"', document.text):
            file = await server.http.get(address)
            assert (file.status_code, file.headers["cache-control"]) == (200, "public, max-age=31536000, immutable")


async def test_other_answers_are_still_not_kept() -> None:
    async with serve_in_process() as server:
        for address in ("/v1/runs", "/session", "/openapi.json", "/nothing", "/assets/x/nothing.js"):
            assert (await server.http.get(address)).headers.get_list("cache-control") == ["no-store"]
        other = await server.http.get("/assets/0123456789abcdef/app.js")
        assert (other.status_code, other.headers["cache-control"]) == (200, "no-cache")
        assert (await server.http.post("/")).status_code == 405


async def test_files_come_compressed_or_not_and_never_from_outside_their_folder() -> None:
    async with serve_in_process() as server:
        name = "/assets/x/app.js"
        plain = await server.http.get(name, headers={"accept-encoding": "identity"})
        packed = await server.http.get(name, headers={"accept-encoding": "gzip"})
        assert plain.content == packed.content == (FOLDER / "app.js").read_bytes()
        assert packed.headers["content-encoding"] == "gzip"
        for name in ("..%2fservice%2fpage.py", "index.html", "../py.typed", ""):
            assert (await server.http.get(f"/assets/x/{name}")).status_code == 404


def test_another_content_has_another_address(tmp_path: Path) -> None:
    (tmp_path / "index.html").write_text("{base}")
    first = Page(tmp_path).version
    (tmp_path / "a.js").write_text("1")
    second = Page(tmp_path)
    assert first != second.version
    assert second.assets["index.html"].body.decode() == f"/assets/{second.version}"


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_nothing_comes_from_elsewhere_and_nothing_becomes_markup(path: Path) -> None:
    text = path.read_text(encoding="utf-8").replace("http://www.w3.org/2000/svg", "")
    assert not re.search(r"https?://[a-z]|@import|url\(\s*['\"]?(?:data:|//)", text)
    assert not re.search(r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|\beval\(|new Function", text)
    assert not re.search(r"\sstyle=|\son[a-z]+=\"|<script>|<style>", text) or path.suffix != ".html"


@pytest.mark.parametrize("path", SCRIPTS, ids=lambda path: path.name)
def test_every_import_is_there(path: Path) -> None:
    for line in re.findall(r'from "([^"]+)"', path.read_text(encoding="utf-8")):
        assert (path.parent / line).is_file(), line


@pytest.mark.contract("API-1")
def test_the_page_asks_for_operations_as_the_catalogue_has_them() -> None:
    listed = re.findall(r'^  "([a-z._]+)": "([A-Z]+ [^"]+)",$', (FOLDER / "lib" / "api.js").read_text(), re.MULTILINE)
    assert len(listed) > 30
    assert dict(listed) == {name: f"{OPERATIONS[name].verb} {OPERATIONS[name].path}" for name, _ in listed}


async def test_the_page_needs_no_token_and_gives_nothing_away() -> None:
    async with serve_with_tokens() as server:
        page: httpx.Response = await server.http.get("/")
        assert page.status_code == 200
        assert "shop" not in page.text
        assert (await server.http.get("/v1/runs")).status_code == 401
