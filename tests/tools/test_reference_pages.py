"""The reference in the site names everything that is public, and says of each error what to do."""

import importlib
import inspect
import re

import msgspec
import pytest

import holdfast as hf
from holdfast import errors
from holdfast.core.events import BODIES
from holdfast.service import ServiceOptions
from holdfast.service.http import prometheus
from tests.test_public_api import PUBLIC
from tools import reference_pages

PAGES = reference_pages.pages()


def headings(page: str) -> set[str]:
    """Return what the headings of a page name."""
    return set(re.findall(r"^#+ `(.+)`$", PAGES[f"reference/{page}.md"], re.MULTILINE))


@pytest.mark.parametrize("module", [module for module in PUBLIC if module != "holdfast.errors"])
def test_every_public_name_has_its_place_and_words(module: str) -> None:
    package = importlib.import_module(module)
    public = [name for name in package.__all__ if not inspect.ismodule(getattr(package, name))]
    assert {f"{module}.{name}" for name in public} <= headings("api")
    for name in public:
        part = PAGES["reference/api.md"].partition(f"### `{module}.{name}`\n")[2].partition("\n### ")[0]
        assert len(re.sub(r"```.*?```", "", part, flags=re.DOTALL).split()) >= 3, f"{module}.{name} is not explained"


def test_methods_are_listed_with_their_signatures() -> None:
    run = PAGES["reference/api.md"].partition("### `holdfast.RunHandle`\n")[2].partition("\n### ")[0]
    assert "#### `result()`" in run
    assert "async def result() -> R" in run


def test_every_error_that_is_raised_says_what_to_do() -> None:
    defined = {name for name, kind in vars(errors).items() if inspect.isclass(kind) and not name.startswith("_")}
    groups = {"Any", "ClassVar", "HoldfastError", "CallerError", "RunError", "EngineError", "StoreError"}
    assert headings("errors") == defined - groups
    assert PAGES["reference/errors.md"].count("**What to do.** ") == len(defined - groups)


def test_every_event_and_its_fields_are_there() -> None:
    assert headings("events") == set(BODIES)
    assert "| `requires_approval` | `bool` | `False` |" in PAGES["reference/events.md"]


@pytest.mark.parametrize("options", [hf.NodeOptions, ServiceOptions])
def test_every_option_is_there(options: type[msgspec.Struct]) -> None:
    assert all(f"| `{name}` |" in PAGES["reference/settings.md"] for name in options.__struct_fields__)


def test_each_option_that_is_a_setting_of_nodes_has_its_default_and_its_meaning() -> None:
    rows = [row for row in PAGES["reference/settings.md"].splitlines() if row.startswith("| `HOLDFAST_NODE__")]
    assert len(rows) == len(hf.Settings().node.__struct_fields__)
    for _, default, meaning, _ in (row.split(" |") for row in rows):
        assert default.strip("` ") != "None" or "None" in meaning, meaning
        assert len(meaning.split()) >= 3, meaning


def test_what_a_class_takes_is_explained_beside_it() -> None:
    app = PAGES["reference/api.md"].partition("### `holdfast.App`\n")[2].partition("#### ")[0]
    assert "- `attributes`: the types of search attributes" in app


@pytest.mark.parametrize("group", ["", "node", "encryption", "artifacts", "retention", "limits"])
def test_every_setting_and_limit_is_there(group: str) -> None:
    kind = getattr(hf.Settings(), group) if group else hf.Settings()
    prefix = f"HOLDFAST_{group.upper()}__" if group else "HOLDFAST_"
    for name in kind.__struct_fields__:
        assert re.search(rf"`{prefix}{name.upper()}(?:__…)?`", PAGES["reference/settings.md"]), name


def unexplained(page: str, heading: str) -> tuple[int, list[str]]:
    """Return how many fields a page lists, and those that have no words, neither beside them nor above the table."""
    parts = re.split(rf"^{heading} `(.+)`$", PAGES[f"reference/{page}.md"], flags=re.MULTILINE)[1:]
    count, silent = 0, []
    for name, text in zip(parts[::2], parts[1::2], strict=True):
        prose = re.sub(r"^\|.*$", "", text, flags=re.MULTILINE)
        for field, words in re.findall(r"^\| `(\w+)` .*\|([^|]*)\|$", text, re.MULTILINE):
            count += 1
            if not words.strip() and not re.search(rf"`{field}\b", prose):
                silent.append(f"{name}.{field}")
    return count, silent


@pytest.mark.parametrize(("page", "heading", "least"), [("api", "###", 300), ("events", "##", 140)])
def test_every_field_is_explained(page: str, heading: str, least: int) -> None:
    count, silent = unexplained(page, heading)
    assert count > least
    assert silent == []


def test_what_fields_of_events_mean_is_said_of_fields_that_exist() -> None:
    there = {field for body in BODIES.values() for field in body.__struct_fields__}
    assert reference_pages.EVENT_FIELDS.keys() <= there


def test_metrics_are_listed_with_kind_and_labels() -> None:
    page = PAGES["reference/metrics.md"]
    text = "Runs in the store; the completed ones are estimated if there are many."
    assert f"| `holdfast_runs` | gauge | `status` | {text} |" in page
    assert "| `holdfast_http_requests_total` | counter | `operation`, `status` |" in page
    assert "| `holdfast_commit_seconds` | histogram |" in page
    source = inspect.getsource(prometheus)
    written = re.findall(r'_(?:gauge|counter|histogram)\(\s*"(\w+)"', source)
    assert len(written) > 30
    assert {f"holdfast_{name}" for name in written} <= set(re.findall(r"^\| `(\w+)`", page, re.MULTILINE))
