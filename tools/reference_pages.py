"""The reference in the site: the public API, settings, errors, events and metrics, each from the code that defines it.

The pages are made when the site is built (`tools/site.py`), so they are never out of date. Signatures and the words
about fields are read from the sources.
"""

import ast
import asyncio
import importlib
import inspect
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from textwrap import dedent
from typing import Any

import holdfast as hf
from holdfast import settings
from holdfast.core.events import BODIES, RunBody
from holdfast.errors import HoldfastError
from holdfast.service import ServiceOptions
from holdfast.service.context import OPEN, make_service
from holdfast.service.http.problems import rpc_code_of, status_of
from holdfast.service.http.prometheus import Metrics

MODULES = (
    *("holdfast", "holdfast.testing", "holdfast.client", "holdfast.service", "holdfast.django"),
    *("holdfast.agents.pydantic_ai", "holdfast.agents.openai_agents"),
)
TO_DO = "What to do: "

Definition = ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef


def pages() -> dict[str, str]:
    """Return every page of the reference by its path in the site."""
    return {
        "reference/api.md": api_page(),
        "reference/settings.md": settings_page(),
        "reference/errors.md": errors_page(),
        "reference/events.md": events_page(),
        "reference/metrics.md": metrics_page(),
    }


# --- the public API


def api_page() -> str:
    """Return the page about every public class and function."""
    lines = [
        "# The Python API",
        "",
        "Everything that may be imported; modules below these are internal. Errors have [their own page](errors.md).",
    ]
    for module in MODULES:
        package = importlib.import_module(module)
        lines += ["", f"## `{module}`"]
        for name in sorted(package.__all__, key=str.lower):
            value = getattr(package, name)
            if not inspect.ismodule(value):
                lines += ["", f"### `{module}.{name}`", "", *_described(package, name, value)]
    return _page(lines)


def _described(package: Any, name: str, value: Any) -> Iterator[str]:
    home = _home_of(package, name)
    if home is not package and hasattr(home, "__all__") and home.__name__ in MODULES:
        yield f"The same as `{home.__name__}.{name}`."
        return
    node = _definition(value) if inspect.isclass(value) or inspect.isroutine(value) else None
    if node is None:
        yield from _constant(home, name)
        return
    yield from _code(_signature(node, name))
    yield from _prose(ast.get_docstring(node))
    if isinstance(node, ast.ClassDef):
        made = _method(node, "__init__")
        yield from _prose(ast.get_docstring(made) if made else None)
        yield from _members(node)


def _home_of(package: Any, name: str) -> Any:
    """Return the module in which a public name is written down."""
    for statement in ast.walk(_tree(inspect.getsourcefile(package) or "")):
        if isinstance(statement, ast.ImportFrom):
            for alias in statement.names:
                if (alias.asname or alias.name) == name and statement.module:
                    return importlib.import_module(statement.module)
    return package


def _constant(home: Any, name: str) -> Iterator[str]:
    body = _tree(inspect.getsourcefile(home) or "").body
    for statement, following in zip(body, [*body[1:], None], strict=True):
        targets = statement.targets if isinstance(statement, ast.Assign) else [getattr(statement, "target", None)]
        if any(isinstance(target, ast.Name) and target.id == name for target in targets):
            yield from _code(ast.unparse(statement))
            yield from _prose(_text(following))
            return
    raise LookupError(f"{home.__name__}.{name} is neither a class, a function nor a constant")


def _members(node: ast.ClassDef) -> Iterator[str]:
    fields = list(_fields(node))
    if fields:
        yield from ("", "| field | type | default | |", "|---|---|---|---|")
        for name, kind, default, words in fields:
            yield f"| `{name}` | {_cell(kind)} | {_cell(default)} | {_flat(words)} |"
    for method in node.body:
        if not isinstance(method, ast.FunctionDef | ast.AsyncFunctionDef) or method.name.startswith("_"):
            continue
        decorators = {ast.unparse(decorator) for decorator in method.decorator_list}
        if decorators & {"overload", "typing.overload"}:
            continue
        title = method.name if "property" in decorators else f"{method.name}()"
        yield from (
            "",
            f"#### `{title}`",
            "",
            *_code(_signature(method, method.name)),
            *_prose(ast.get_docstring(method)),
        )


def _fields(node: ast.ClassDef) -> Iterator[tuple[str, str, str, str]]:
    for statement, following in zip(node.body, [*node.body[1:], None], strict=True):
        if not isinstance(statement, ast.AnnAssign) or not isinstance(statement.target, ast.Name):
            continue
        name, kind = statement.target.id, ast.unparse(statement.annotation)
        if not name.startswith("_") and not kind.startswith("ClassVar"):
            yield name, kind, ast.unparse(statement.value) if statement.value else "", _text(following) or ""


def _signature(node: Definition, name: str) -> str:
    if isinstance(node, ast.ClassDef):
        bases = [ast.unparse(base) for base in node.bases if ast.unparse(base) not in ("Struct", "ABC")]
        made = _method(node, "__init__")
        line = f"class {name}" + (f"({', '.join(bases)})" if bases else "")
        return f"{line}\n\n{_signature(made, name)}" if made else line
    arguments = [part for part in _arguments(node.args) if part not in ("self", "cls")]
    returns = f" -> {ast.unparse(node.returns)}" if node.returns and node.name != "__init__" else ""
    head = "async def " if isinstance(node, ast.AsyncFunctionDef) else "def " if node.name != "__init__" else ""
    line = f"{head}{name}({', '.join(arguments)}){returns}"
    return (
        line
        if len(line) <= 100
        else f"{head}{name}(\n" + "".join(f"    {part},\n" for part in arguments) + f"){returns}"
    )


def _method(node: ast.ClassDef, name: str) -> ast.FunctionDef | None:
    return next((each for each in node.body if isinstance(each, ast.FunctionDef) and each.name == name), None)


def _arguments(given: ast.arguments) -> Iterator[str]:
    positional = [*given.posonlyargs, *given.args]
    defaults = [None] * (len(positional) - len(given.defaults)) + list(given.defaults)
    for number, (argument, default) in enumerate(zip(positional, defaults, strict=True)):
        yield _argument(argument, default)
        if given.posonlyargs and number == len(given.posonlyargs) - 1:
            yield "/"
    if given.vararg:
        yield "*" + _argument(given.vararg, None)
    elif given.kwonlyargs:
        yield "*"
    for argument, value in zip(given.kwonlyargs, given.kw_defaults, strict=True):
        yield _argument(argument, value)
    if given.kwarg:
        yield "**" + _argument(given.kwarg, None)


def _argument(argument: ast.arg, default: ast.expr | None) -> str:
    text = argument.arg + (f": {ast.unparse(argument.annotation)}" if argument.annotation else "")
    return text if default is None else f"{text}{' = ' if argument.annotation else '='}{ast.unparse(default)}"


# --- settings, options and limits


def settings_page() -> str:
    """Return the page about settings, options and limits."""
    lines = [
        "# Settings, options and limits",
        "",
        "Settings come from, each over the one before: the defaults, a TOML file, environment variables, arguments.",
        "An unknown name is refused. A group is a table of the file, and `__` in a variable:",
        "`HOLDFAST_LIMITS__BATCH_ITEMS`.",
        "",
        "## Settings",
        "",
        *_variables(settings.Settings, settings.PREFIX),
    ]
    for kind, title, prefix in (
        (hf.NodeOptions, "Options of a node", "`app.node(store, options=hf.NodeOptions(…))`"),
        (ServiceOptions, "Options of a service", "`hf.serve(app, options=hf.ServiceOptions(…))`"),
    ):
        lines += ["", f"## {title}", "", prefix, "", *_options(kind)]
    return _page(lines)


def _variables(kind: type[Any], prefix: str) -> Iterator[str]:
    groups: list[tuple[str, type[Any]]] = []
    options = {name: (default, words) for name, _, default, words in _fields(_class(hf.NodeOptions))}
    yield from ("| variable | default | meaning |", "|---|---|---|")
    for name, _, default, words in _fields(_class(kind)):
        if kind is settings.NodeSettings:  # what is not set there is as the options have it
            default, words = options[name]
        value = getattr(kind(), name) if not _needs_arguments(kind) else None
        if hasattr(type(value), "__struct_fields__"):
            groups.append((f"{prefix}{name.upper()}__", type(value)))
        else:
            yield f"| `{prefix}{name.upper()}` | {_cell(default)} | {_flat(words)} |"
    for inner, group in groups:
        yield from ("", f"### `{inner}…`", "", _flat(ast.get_docstring(_class(group)) or ""), "")
        yield from _variables(group, inner)


def _needs_arguments(kind: type[Any]) -> bool:
    return any(not default for _, _, default, _ in _fields(_class(kind)))


def _options(kind: type[Any]) -> Iterator[str]:
    yield from ("| option | type | default | meaning |", "|---|---|---|---|")
    for name, annotation, default, words in _fields(_class(kind)):
        yield f"| `{name}` | {_cell(annotation)} | {_cell(default)} | {_flat(words)} |"


# --- errors, events, metrics


def error_kinds(root: type[HoldfastError] = HoldfastError) -> Iterator[type[HoldfastError]]:
    """Return the errors that are raised, in the order of the tree."""
    for kind in root.__subclasses__():
        if kind.__module__ == HoldfastError.__module__:
            if kind.__doc__ and TO_DO in kind.__doc__:
                yield kind
            yield from error_kinds(kind)


def errors_page() -> str:
    """Return the page about errors: what each means, and what to do."""
    lines = [
        "# Errors",
        "",
        "All are in `holdfast.errors`. `code` is the name of the class and is stable; programs look at it.",
        "The parent says whose fault it is: `CallerError` the caller's, `RunError` that of one run, `EngineError` that",
        "of the installation.",
    ]
    for kind in error_kinds():
        meaning, _, rest = inspect.cleandoc(kind.__doc__ or "").partition(TO_DO)
        parent = next(base.__name__ for base in kind.__mro__[1:] if not base.__name__.startswith("_"))
        lines += ["", f"## `{kind.code}`", "", *meaning.strip().splitlines(), "", f"**What to do.** {_flat(rest)}", ""]
        lines += [f"A `{parent}`. HTTP {status_of(kind)}, JSON-RPC {rpc_code_of(kind)}."]
    return _page(lines)


EVENT_FIELDS = {
    "action": "The operation on the task.",
    "actor": "Who did it. Empty for the engine.",
    "addressed_to": "The step that the sender named; None for any wait of that name.",
    "answer": "The answer, which fits the form.",
    "artifacts": "The artifacts that were stored.",
    "assignee": "The one person who may answer.",
    "attributes": "The search attributes of the child.",
    "child_run_id": "The run that was started.",
    "close_policy": "What happens to the child if this run ends first: `await`, `cancel` or `abandon`.",
    "depth": "How many runs are above it: 0 without a parent.",
    "due_at": "When the task is overdue.",
    "environment": "The environment of the run.",
    "error": "The error: its code, its message, and whether a retry could help.",
    "escalation": "Who gets the task, and when, if nothing is answered.",
    "forked_from": "The run and the event at which this one was forked.",
    "form": "The JSON Schema of the answer.",
    "idempotency_key": "The key by which the outside system knows the call.",
    "input": "The arguments, as JSON.",
    "limit_ms": "How long the run was allowed to take.",
    "name": "The name of the activity, signal, task, update, command or marker.",
    "node": "The node on which the attempt ran.",
    "options": "The options of the activity for this call.",
    "parent_run_id": "The run that started it as a child.",
    "parent_step_id": "The step of the parent that waits for it.",
    "parent_token": "What the parent's step expects from it.",
    "payload": "What came or goes with it, as JSON.",
    "plan": "Where the text of the plan is, if it runs one.",
    "plan_id": "The workflow, or `plan:ID`.",
    "plan_version": "The version of the workflow or the plan.",
    "project": "The project of the run.",
    "queue": "The queue that its job is in. Empty: the node of the run executes it.",
    "reason": "The reason that was given.",
    "reference_key": "The caller's own key of the run.",
    "remind_ms": "How often a reminder is recorded.",
    "result": "The result, as JSON.",
    "retry_of": "The finished run that it does again.",
    "roles": "The roles that may answer.",
    "route": "For the program that shows tasks.",
    "run_id": "The run that gets the signal.",
    "run_request_id": "The request that started it.",
    "schedule": "The schedule and the tick that started it.",
    "signal_id": "The id that the sender gave it, by which a repetition is recognised.",
    "tags": "The tags of the run.",
    "target_step_id": "The step that the command is about.",
    "task_id": "The id of the task.",
    "task_type": "For the program that shows tasks, except `reconciliation`.",
    "tenant": "The tenant of the run.",
    "text": "The comment.",
    "timeouts": "How long the run may take.",
    "token": "What a message must carry to be about this wait. An older one changes nothing.",
    "until": "When the wait times out.",
    "value": "The value, as JSON.",
    "values": "The new values; None removes an attribute.",
}
"""What a field means in every event that has it, unless the event says more beside it or in its own words."""


def events_page() -> str:
    """Return the page about the types of events, with their fields."""
    lines = [
        "# Events",
        "",
        "The types of events in a run's history, as `runs.events` and `holdfast run events` return them. The fields",
        "below are in `data`. A reader keeps and skips types that it does not know. [States](../states.md) has the",
        "transitions.",
    ]
    for name, body in BODIES.items():
        lines += ["", f"## `{name}`", "", *inspect.cleandoc(body.__doc__ or "").splitlines(), ""]
        if body.LEADS_TO is not None:
            lines += [f"The run: {', '.join(body.LEADS_FROM)} → {body.LEADS_TO}.", ""]
        lines += [f"An event of {'the run' if issubclass(body, RunBody) else 'a step'}."]
        fields = list(_fields(_class(body)))
        if fields:
            lines += ["", "| field | type | default | |", "|---|---|---|---|"]
            lines += [
                f"| `{field}` | {_cell(kind)} | {_cell(default)} | {_flat(words or EVENT_FIELDS.get(field, ''))} |"
                for field, kind, default, words in fields
            ]
    return _page(lines)


def metric_rows() -> list[tuple[str, str, list[str], str]]:
    """Return the metrics of a service: name, kind, labels, what it counts."""

    async def collect() -> list[tuple[str, str, list[str], str]]:
        app = hf.App("reference")
        async with app.connect("memory://"):
            service = make_service(app)
            families = await Metrics(service).families(service.context(OPEN, "reference"))
        totals = {"counter": "_total"}
        return [
            (
                each.name + totals.get(each.type, ""),
                each.type,
                list(getattr(each, "_labelnames", ())),
                each.documentation,
            )
            for each in families
        ]

    return asyncio.run(collect())


def metrics_page() -> str:
    """Return the page about metrics."""
    rows = [
        f"| `{name}` | {kind} | {', '.join(f'`{label}`' for label in labels)} | {words} |"
        for name, kind, labels, words in metric_rows()
    ]
    return _page(
        [
            "# Metrics",
            "",
            "`GET /metrics` of a service, in the text format of Prometheus, with the scope `system:read`. Counters and",
            "histograms are of the process that answers, gauges of runs and queues of the whole store.",
            "[Observing](../observing.md) says which are worth an alarm.",
            "",
            "| metric | kind | labels | what it counts |",
            "|---|---|---|---|",
            *rows,
        ]
    )


# --- sources and Markdown


@cache
def _tree(file: str) -> ast.Module:
    return ast.parse(Path(file).read_text(encoding="utf-8"))


def _definition(value: Any) -> Definition | None:
    file = inspect.getsourcefile(inspect.unwrap(value))
    for node in reversed(_tree(file or "").body):  # the last one, after its overloads
        if isinstance(node, Definition) and node.name == value.__name__:
            return node
    return None


def _class(kind: type[Any]) -> ast.ClassDef:
    node = _definition(kind)
    if not isinstance(node, ast.ClassDef):
        raise LookupError(f"{kind!r} has no source")
    return node


def _text(statement: ast.stmt | None) -> str | None:
    """Return the words below a field or a constant."""
    if isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant):
        return inspect.cleandoc(str(statement.value.value)) if isinstance(statement.value.value, str) else None
    return None


def _prose(text: str | None) -> list[str]:
    """Return a docstring as Markdown: a block after `::` is code."""
    blocks = re.split(r"\n\n", text or "")
    lines: list[str] = []
    for block in blocks:
        if block.startswith("    "):
            lines += ["", "```python", dedent(block), "```"]
        elif block.strip() != "::":
            lines += ["", re.sub(r"::$", ":", block.rstrip())]
    return lines


def _code(text: str) -> list[str]:
    return ["```python", text, "```"]


def _flat(text: str) -> str:
    return re.sub(r"\s+", " ", text).strip().replace("|", "\\|")


def _cell(text: str) -> str:
    return f"`{_flat(text)}`" if text else ""


def _page(lines: list[str]) -> str:
    return re.sub(r"\n{3,}", "\n\n", "\n".join(lines)).rstrip() + "\n"
