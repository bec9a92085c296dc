"""The files of the page: how they are served, and what must not be in them."""

import re
from pathlib import Path

import httpx
import msgspec
import pytest

from holdfast.errors import InternalError
from holdfast.service.http.bundle import join_modules
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


async def test_the_page_comes_as_one_script_and_one_style_sheet() -> None:
    async with serve_in_process() as server:
        document = (await server.http.get("/")).text
        addresses = re.findall(r'(?:src|href)="([^"]+)"', document)
        assert [address.rpartition("/")[2] for address in addresses] == ["icon.svg", "bundle.css", "bundle.js"]
        base = addresses[0].removesuffix("/icon.svg")
        script = (await server.http.get(f"{base}/bundle.js")).text
        described = (await server.http.get(f"{base}/bundle.js.map")).json()
        assert script.endswith("//# sourceMappingURL=bundle.js.map\n")
        assert sorted(described["sources"]) == [str(path.relative_to(FOLDER)) for path in SCRIPTS]
        for source in described["sources"]:
            assert (await server.http.get(f"{base}/{source}")).status_code == 200


def test_a_line_of_the_script_leads_to_its_line_in_a_file() -> None:
    files = {
        "app.js": 'import { add } from "./lib/sum.js";\nimport {\n  one,\n} from "./lib/one.js";\nadd(one, 1);\n',
        "lib/one.js": "export const one = 1;\n",
        "lib/sum.js": 'import { one as first } from "./one.js";\n\nexport function add(a) {\n  return a + first;\n}\n',
    }
    script, described = join_modules(files, ["app.js"])
    found = msgspec.json.decode(described)
    assert found["sources"] == ["lib/one.js", "lib/sum.js", "app.js"]
    assert found["mappings"] == "AAAA;AACA;ACDA;AACA;AACA;AACA;AACA;AACA;ACLA;AACA;AACA;AACA;AACA;AACA"
    lines = script.splitlines()
    assert "return a + first;" in lines[2 + 3]
    assert lines[2 + 6 + 4] == "add(one, 1);"


@pytest.mark.parametrize(
    ("files", "problem"),
    [
        ({"app.js": 'import { a } from "./b.js";', "b.js": 'import { b } from "./app.js";'}, "app.js → b.js → app.js"),
        ({"app.js": 'import { a } from "./b.js";'}, "app.js names b.js"),
        ({"app.js": "export default 3;"}, "app.js of the page imports or exports .* export default 3;"),
        ({"app.js": 'export * from "./b.js";'}, "in a way that is not known"),
    ],
)
def test_modules_that_cannot_be_joined_are_refused(files: dict[str, str], problem: str) -> None:
    with pytest.raises(InternalError, match=problem):
        join_modules(files, ["app.js"])


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


@pytest.mark.contract("API-3")
async def test_where_nothing_is_a_browser_gets_the_page_and_a_program_the_error() -> None:
    """The page says so itself; the status is the same."""
    browser = {"accept": "text/html,application/xhtml+xml,*/*;q=0.8"}
    async with serve_in_process() as server:
        page = await server.http.get("/nowhere/at/all", headers=browser)
        assert (page.status_code, page.headers["content-type"]) == (404, "text/html; charset=utf-8")
        assert page.text == (await server.http.get("/")).text
        assert page.headers.get_list("cache-control") == ["no-store"]
        assert "'self'" in page.headers["content-security-policy"]
        for accept in ("*/*", "application/json"):
            error = await server.http.get("/nowhere", headers={"accept": accept})
            assert (error.status_code, error.json()["code"]) == (404, "NotFound")
        for address in ("/v1/nowhere", "/assets/x/nothing.js"):
            assert (await server.http.get(address, headers=browser)).json()["code"] == "NotFound"
        assert (await server.http.post("/nowhere", headers=browser)).json()["code"] == "NotFound"
