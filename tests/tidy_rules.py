"""The rules of the code base, as functions from source code to a list of problems.

A rule takes parsed sources and yields one line for each problem, ready to be shown. It does no I/O, so that
`test_tidy.py` can show each rule a planted problem as well as the real tree.
"""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import PurePosixPath
from types import ModuleType

# From low to high. A module imports from its own package and from lower rows only.
LAYERS: tuple[frozenset[str], ...] = (
    frozenset({"errors", "clock"}),
    frozenset({"limits"}),
    frozenset({"settings"}),
    frozenset({"core"}),
    frozenset({"program"}),
    frozenset({"registry"}),
    frozenset({"store"}),
    frozenset({"engine"}),
    frozenset({"run"}),
    frozenset({"workflow", "activity", "app_plans", "termination"}),
    frozenset({"app_schedules", "lock"}),
    frozenset({"app"}),
    frozenset({"service", "agents"}),
    frozenset({"client"}),
    frozenset({"cli", "web", "testing"}),
    frozenset({"django"}),
)
RANK = {unit: rank for rank, units in enumerate(LAYERS) for unit in units}
FACADES = frozenset({"__init__", "__main__"})  # they stand above all layers

CORE_MAY_IMPORT = ("holdfast.core", "holdfast.errors", "holdfast.limits", "msgspec")
# What the standard library offers for I/O, waiting, clocks, chance and logging.
IMPURE_MODULES = frozenset(
    """
    asyncio builtins concurrent ctypes fcntl fileinput ftplib getpass glob http imaplib io logging mmap
    multiprocessing os pathlib pickle poplib queue random runpy sched secrets select selectors shelve shutil
    signal smtplib socket socketserver sqlite3 ssl subprocess syslog tempfile threading time tkinter
    urllib.request webbrowser
    """.split()
)
IMPURE_BUILTINS = frozenset({"open", "input", "breakpoint"})

CLOCK_AND_CHANCE = frozenset(
    """
    time.time time.time_ns time.monotonic time.monotonic_ns time.perf_counter time.perf_counter_ns
    datetime.datetime.now datetime.datetime.utcnow datetime.datetime.today datetime.date.today
    uuid.uuid1 uuid.uuid4 os.urandom os.getrandom
    """.split()
)
CHANCE_MODULES = ("random", "secrets")

FUNCTION_LINES_MAX = 70
MODULE_LINES_MIN = 40

DIALECT = re.compile(
    r"\b(?:says? whether|put(?:s|ting)? aside|comes? again|(?:is|are) believed|lets? in|mourn\w*|rings?|rung"
    r"|nobody|whoever|whomever|anybody|tells?|telling|told|who asks|hears? of|heard of|come back later)\b",
    re.IGNORECASE,
)
"""Phrases for which the field has a word: return whether, defer, retry, trusted, admit, notify, the caller."""

DIALECT_OF_TESTS = re.compile(
    r"\b(?:says? whether|put(?:s|ting)? aside|comes? again|(?:is|are) believed|lets? in|mourn\w*|whomever|anybody"
    r"|who asks|hears? of|heard of)\b",
    re.IGNORECASE,
)
"""The same of tests, which tell stories of nodes and people."""

IMPORTED_SCRIPT = re.compile(r"""(?:from|import|src=)\s*["'](?:\{base\})?(\.{0,2}/[^"']+\.js)["']""")

TIME = re.compile(r"\btime\b")
FILE_NAME = re.compile(r"`((?:[a-z_.]+/)*[a-z_]+\.(?:py|sql|js))`")
"""The name of a file in a guide; one in capitals stands for any."""

UNFINISHED = re.compile(r"\b(?:TODO|FIXME|XXX|HACK)\b")
REGISTRY = re.compile(
    r"pypi\.org|pythonhosted\.org|npmjs\.(?:org|com)|docker\.io|ghcr\.io|quay\.io|crates\.io"
    r"|(?:index[-_]url|INDEX[_]URL)\b"
)
MACHINE_PATH = re.compile(
    r"(?:^|(?<=[\s\"'`(=:,])|(?<=//))/(?:work|root)(?![\w-])|(?<![\w.])/(?:home|Users)/\w+", re.MULTILINE
)

Function = ast.FunctionDef | ast.AsyncFunctionDef
Definition = Function | ast.ClassDef
Scope = tuple[Definition, ...]


@dataclass(frozen=True)
class Source:
    """A Python file: its path below the root of its tree (`holdfast/core/state.py`) and its text."""

    path: PurePosixPath
    text: str

    @cached_property
    def tree(self) -> ast.Module:
        """The parsed file."""
        return ast.parse(self.text, str(self.path))

    @cached_property
    def nodes(self) -> tuple[ast.AST, ...]:
        """Every node of the parsed file."""
        return tuple(ast.walk(self.tree))

    @property
    def module(self) -> tuple[str, ...]:
        """The parts of the module's name; a package is named by its folder."""
        parts = self.path.with_suffix("").parts
        return parts[:-1] if parts[-1] == "__init__" else parts

    @property
    def unit(self) -> str:
        """The part of the name that belongs to a layer: `core` for `holdfast/core/state.py`."""
        return self.path.with_suffix("").parts[1]

    def problem(self, line: int, message: str) -> str:
        """A problem as it is shown."""
        return f"{self.path}:{line}: {message}"


# --- Walking ---


def walk_scoped(node: ast.AST, scope: Scope = ()) -> Iterator[tuple[Scope, ast.AST]]:
    """Every node below this one, with the classes and functions around it."""
    for child in ast.iter_child_nodes(node):
        yield scope, child
        yield from walk_scoped(child, (*scope, child) if isinstance(child, Definition) else scope)


def qualified_name(scope: Scope) -> str:
    """The name of a definition by the definitions around it: `Store.commit`."""
    return ".".join(definition.name for definition in scope)


def imports(source: Source) -> Iterator[tuple[int, str]]:
    """Every dotted name that a file imports: `from .state import evolve` gives `…core.state.evolve`."""
    for node in source.nodes:
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield node.lineno, alias.name
        elif isinstance(node, ast.ImportFrom):
            for alias in node.names:
                yield node.lineno, f"{_imported_from(source, node)}.{alias.name}"


def _imported_from(source: Source, node: ast.ImportFrom) -> str:
    package = source.path.parent.parts
    base = package[: len(package) - node.level + 1] if node.level else ()
    return ".".join([*base, *([node.module] if node.module else [])])


@cache
def references(source: Source) -> tuple[tuple[int, str], ...]:
    """Every use of something imported, by its full name, whatever it is called here."""
    finder = _References(_local_names(source))
    finder.visit(source.tree)
    return tuple(finder.found)


def _local_names(source: Source) -> dict[str, str]:
    names: dict[str, str] = {}
    for node in source.nodes:
        if isinstance(node, ast.Import):
            for alias in node.names:
                top = alias.name.partition(".")[0]
                names[alias.asname or top] = alias.name if alias.asname else top
        elif isinstance(node, ast.ImportFrom):
            for alias in node.names:
                names[alias.asname or alias.name] = f"{_imported_from(source, node)}.{alias.name}"
    return names


class _References(ast.NodeVisitor):
    """Resolves `a.b.c` as a whole, so that one use is found once."""

    def __init__(self, names: Mapping[str, str]) -> None:
        self.names = names
        self.found: list[tuple[int, str]] = []

    def visit_Name(self, node: ast.Name) -> None:
        self._add(node)

    def visit_Attribute(self, node: ast.Attribute) -> None:
        if not self._add(node):
            self.generic_visit(node)

    def _add(self, node: ast.Name | ast.Attribute) -> bool:
        attributes: list[str] = []
        root: ast.expr = node
        while isinstance(root, ast.Attribute):
            attributes.insert(0, root.attr)
            root = root.value
        if not isinstance(root, ast.Name) or root.id not in self.names:
            return False
        self.found.append((node.lineno, ".".join([self.names[root.id], *attributes])))
        return True


def _is_within(name: str, modules: Iterable[str]) -> bool:
    return any(name == module or name.startswith(f"{module}.") for module in modules)


# --- Walls ---


def upward_imports(source: Source) -> Iterator[str]:
    """Imports that do not point downwards."""
    if source.unit in FACADES:
        return
    if source.unit not in RANK:
        yield source.problem(1, f"{source.unit} belongs to no layer; put it into LAYERS")
        return
    for line, name in imports(source):
        if not _is_within(name, ["holdfast"]):
            continue
        unit = name.split(".")[1] if "." in name else "holdfast"
        if unit not in RANK:
            yield source.problem(line, f"imports {name}: name the module in a layer, not the top package")
        elif unit != source.unit and RANK[unit] >= RANK[source.unit]:
            yield source.problem(line, f"imports {name}: {unit} is not below {source.unit}")


def impurities_of_core(source: Source) -> Iterator[str]:
    """What ties the core to the outside: I/O, clocks, chance, logging, asyncio, other people's packages."""
    if source.unit != "core":
        return
    for line, name in imports(source):
        pure = _is_within(name, sys.stdlib_module_names) and not _is_within(name, IMPURE_MODULES)
        if not pure and not _is_within(name, CORE_MAY_IMPORT):
            yield source.problem(line, f"core imports {name}")
    for node in source.nodes:
        if isinstance(node, ast.Call) and ast.unparse(node.func) in IMPURE_BUILTINS:
            yield source.problem(node.lineno, f"core calls {ast.unparse(node.func)}")


def clock_and_chance(source: Source) -> Iterator[str]:
    """Uses of a clock or of randomness outside the ports. A mention counts: the call may be elsewhere."""
    if source.unit in {"clock", "testing"}:
        return
    for line, name in references(source):
        if name in CLOCK_AND_CHANCE or _is_within(name, CHANCE_MODULES):
            yield source.problem(line, f"uses {name}; take it from holdfast.clock or as an argument")


# --- Documentation and public names ---


def missing_docstrings(sources: Iterable[Source]) -> Iterator[str]:
    """Public modules, classes, functions and methods without a docstring.

    A method needs none if any class documents a method of its name: whoever implements a protocol has nothing
    to add to its words.
    """
    sources = list(sources)
    documented = {name for source in sources for name in _documented_methods(source)}
    for source in sources:
        if any(part.startswith("_") for part in source.module):
            continue
        if not ast.get_docstring(source.tree):
            yield source.problem(1, "the module has no docstring")
        for scope in _public_definitions(source):
            known = len(scope) > 1 and isinstance(scope[-1], Function) and scope[-1].name in documented
            if not ast.get_docstring(scope[-1]) and not known and not _is_overload(scope[-1]):
                yield source.problem(scope[-1].lineno, f"{qualified_name(scope)} has no docstring")


def _definitions(source: Source) -> Iterator[Scope]:
    """Definitions that can be reached from outside: not those within a function."""
    for scope, node in walk_scoped(source.tree):
        if isinstance(node, Definition) and all(isinstance(outer, ast.ClassDef) for outer in scope):
            yield (*scope, node)


def _public_definitions(source: Source) -> Iterator[Scope]:
    return (scope for scope in _definitions(source) if not any(outer.name.startswith("_") for outer in scope))


def _documented_methods(source: Source) -> Iterator[str]:
    for scope in _definitions(source):
        if len(scope) > 1 and isinstance(scope[-1], Function) and ast.get_docstring(scope[-1]):
            yield scope[-1].name


def _is_overload(node: Definition) -> bool:
    return any(ast.unparse(decorator).endswith("overload") for decorator in node.decorator_list)


def public_name_problems(package: ModuleType) -> Iterator[str]:
    """What is wrong with the names that a package offers."""
    names: list[str] | None = getattr(package, "__all__", None)
    if names is None:
        yield f"{package.__name__} has no __all__"
        return
    for name in names:
        if not hasattr(package, name):
            yield f"{package.__name__}.__all__ names {name}, which does not exist"


# --- Size ---


def long_functions(source: Source) -> Iterator[str]:
    """Functions that do not fit on a screen."""
    for node in source.nodes:
        if isinstance(node, Function):
            lines = (node.end_lineno or node.lineno) - node.lineno + 1
            if lines > FUNCTION_LINES_MAX:
                yield source.problem(node.lineno, f"{node.name} has {lines} lines, more than {FUNCTION_LINES_MAX}")


def fragments(sources: Iterable[Source]) -> Iterator[str]:
    """Small modules that only one other module imports: they belong into it."""
    sources = [source for source in sources if source.path.stem not in FACADES]
    names = {".".join(source.module): source for source in sources}
    importers: dict[str, set[PurePosixPath]] = {name: set() for name in names}
    for source in sources:
        for _, name in imports(source):
            module = name if name in names else name.rpartition(".")[0]
            if module in names and names[module] is not source:
                importers[module].add(source.path)
    yield from _small_with_one_importer({source.path: source.text for source in sources}, importers, names)


def script_fragments(texts: Mapping[PurePosixPath, str]) -> Iterator[str]:
    """The same of scripts of the page, among scripts and pages."""
    importers: dict[str, set[PurePosixPath]] = {str(path): set() for path in texts if path.suffix == ".js"}
    for path, text in texts.items():
        for found in IMPORTED_SCRIPT.findall(text):
            importers.setdefault(str(_resolved(path.parent, found)), set()).add(path)
    scripts = {path: text for path, text in texts.items() if path.suffix == ".js"}
    yield from _small_with_one_importer(scripts, importers, {str(path): path for path in scripts})


def _resolved(folder: PurePosixPath, address: str) -> PurePosixPath:
    parts = [] if address.startswith("/") else list(folder.parts)
    for part in PurePosixPath(address.lstrip("/")).parts:
        if part == "..":
            parts.pop()
        else:
            parts.append(part)
    return PurePosixPath(*parts)


def _small_with_one_importer(
    texts: Mapping[PurePosixPath, str],
    importers: Mapping[str, set[PurePosixPath]],
    names: Mapping[str, Source | PurePosixPath],
) -> Iterator[str]:
    for name, found in names.items():
        path = found.path if isinstance(found, Source) else found
        lines = len(texts[path].splitlines())
        if lines < MODULE_LINES_MIN and len(importers[name]) == 1:
            yield f"{path}:1: has {lines} lines and one importer; it belongs into {min(importers[name])}"


# --- Unfinished and careless ---


def dialect(path: PurePosixPath, text: str, phrases: re.Pattern[str] = DIALECT) -> Iterator[str]:
    """Phrases of our own where the field has a word."""
    yield from _matching_lines(phrases, path, text)


def unfinished_marks(path: PurePosixPath, text: str) -> Iterator[str]:
    """Notes to do something later."""
    yield from _matching_lines(UNFINISHED, path, text)


def not_implemented(source: Source) -> Iterator[str]:
    """Functions that only pretend to exist."""
    for node in source.nodes:
        if isinstance(node, ast.Raise) and node.exc is not None:
            raised = node.exc.func if isinstance(node.exc, ast.Call) else node.exc
            if isinstance(raised, ast.Name) and raised.id == "NotImplementedError":
                yield source.problem(node.lineno, "raises NotImplementedError")


@dataclass(frozen=True)
class Swallow:
    """A place where any exception may disappear; `where` is what an allow-list names."""

    where: str
    problem: str


def swallowed_exceptions(source: Source) -> Iterator[Swallow]:
    """Handlers of every exception that do not raise again, and `suppress(Exception)`."""
    for scope, node in walk_scoped(source.tree):
        if isinstance(node, ast.ExceptHandler):
            swallows = _catches_everything(node.type) and not _raises(node)
        elif isinstance(node, ast.Call):
            swallows = ast.unparse(node.func).endswith("suppress") and any(map(_is_broad, node.args))
        else:
            continue
        if swallows:
            where = f"{source.path}:{qualified_name(scope)}"
            yield Swallow(where, source.problem(node.lineno, f"swallows every exception ({where})"))


def _catches_everything(caught: ast.expr | None) -> bool:
    if isinstance(caught, ast.Tuple):
        return any(map(_is_broad, caught.elts))
    return caught is None or _is_broad(caught)


def _is_broad(node: ast.expr) -> bool:
    return isinstance(node, ast.Name) and node.id in {"Exception", "BaseException"}


def _raises(handler: ast.ExceptHandler) -> bool:
    return any(isinstance(node, ast.Raise) for scope, node in walk_scoped(handler) if not scope)


def sleeps(source: Source) -> Iterator[str]:
    """Tests that wait for real time to pass. A file is parsed only if it names both the module and the function."""
    if not TIME.search(source.text) or "sleep" not in source.text:
        return
    for line, name in references(source):
        if name == "time.sleep":
            yield source.problem(line, "sleeps; use the virtual clock or wait for what should happen")


def swallowed_cancellations(source: Source) -> Iterator[str]:
    """Uses of `asyncio.wait_for`, which on Python 3.11 may return as if its caller had not been cancelled."""
    for line, name in references(source):
        if name in {"asyncio.wait_for", "asyncio.tasks.wait_for"}:
            yield source.problem(line, "uses asyncio.wait_for, which may swallow a cancellation; use asyncio.timeout")


def places_of_this_machine(path: PurePosixPath, text: str) -> Iterator[str]:
    """Package registries and folders that exist for one developer only."""
    yield from _matching_lines(REGISTRY, path, text)
    yield from _matching_lines(MACHINE_PATH, path, text)


def _matching_lines(pattern: re.Pattern[str], path: PurePosixPath, text: str) -> Iterator[str]:
    for number, line in enumerate(text.splitlines(), 1):
        for match in pattern.finditer(line):
            yield f"{path}:{number}: {match.group()}"
