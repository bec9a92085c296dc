"""The public API is what the documentation uses: everything that a page or an example imports, and nothing internal."""

import ast
import importlib
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import FunctionType, ModuleType

import pytest

ROOT = Path(__file__).parent.parent
PAGES = sorted([ROOT / "README.md", *(ROOT / "docs").rglob("*.md"), *(ROOT / "examples").rglob("*.py")])
PUBLIC = (
    *("holdfast", "holdfast.agents.openai_agents", "holdfast.agents.pydantic_ai", "holdfast.client"),
    *("holdfast.django", "holdfast.errors", "holdfast.service", "holdfast.testing"),
)
IMPORT = re.compile(r"^\s*(?:>>> )?((?:from|import) holdfast\b[^\n#]*(?:\([^)]*\))?)", re.MULTILINE)
ATTRIBUTE = re.compile(r"\bhf\.(\w+)")
INTERNAL = re.compile(r"\bholdfast\.(?:core|engine|program|store|cli|registry|limits|settings)\b[\w.]*")
INTERNAL_OF_SERVICE = re.compile(r"\bholdfast\.(?:service|client)\.\w+")
EXPLAINS_THE_CODE = frozenset({"contract.md", "states.md"})
"""Pages about the code itself, which may name modules."""


def imported(text: str) -> Iterator[tuple[str, str]]:
    """Each module and name that a text imports from the package; the name is empty for `import module`."""
    for line in IMPORT.findall(text):
        for node in ast.walk(ast.parse(line.strip())):
            if isinstance(node, ast.Import):
                yield from ((alias.name, "") for alias in node.names)
            elif isinstance(node, ast.ImportFrom):
                yield from ((node.module or "", alias.name) for alias in node.names)
    yield from (("holdfast", name) for name in ATTRIBUTE.findall(text))


@pytest.mark.parametrize("page", PAGES, ids=lambda path: str(path.relative_to(ROOT)))
def test_what_the_documentation_imports_is_public(page: Path) -> None:
    for module, name in imported(page.read_text()):
        is_module = name and f"{module}.{name}" in PUBLIC
        assert module in PUBLIC, f"from {module} import {name}: the module is internal"
        package = importlib.import_module(module)
        assert not name or is_module or hasattr(package, name), f"{module} has no {name}"


@pytest.mark.parametrize("page", PAGES, ids=lambda path: str(path.relative_to(ROOT)))
def test_the_documentation_names_no_internal_module(page: Path) -> None:
    if page.parent.name == "adr" or page.name in EXPLAINS_THE_CODE:
        return
    found = [*INTERNAL.findall(page.read_text()), *INTERNAL_OF_SERVICE.findall(page.read_text())]
    public = {
        f"{module}.{name}" for module in PUBLIC for name in getattr(importlib.import_module(module), "__all__", ())
    }
    assert not [name for name in found if name not in public]


@pytest.mark.parametrize("module", [module for module in PUBLIC if module != "holdfast.errors"])
def test_public_names_exist_and_are_documented(module: str) -> None:
    package = importlib.import_module(module)
    for name in package.__all__:
        value = getattr(package, name)
        is_alias = not isinstance(value, type | ModuleType | FunctionType)  # of a type, such as `Headers`
        assert is_alias or value.__doc__, f"{module}.{name} has no docstring"


def test_unknown_names_are_no_attributes() -> None:
    for module in ("holdfast", "holdfast.service"):
        with pytest.raises(AttributeError):
            _ = importlib.import_module(module).nothing


@pytest.mark.process
def test_importing_the_package_loads_no_server_and_no_optional_package() -> None:
    heavy = ("uvicorn", "starlette", "httpx", "asyncpg", "cyclopts", "rich", "opentelemetry", "prometheus_client")
    code = f"import holdfast, sys; print([name for name in {heavy} if name in sys.modules])"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "[]\n"
