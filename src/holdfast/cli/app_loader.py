"""Finds the app that a command refers to: `shop.py`, `shop.py:app`, `pkg.module` or `pkg.module:app`.

Without a name there must be exactly one app. A file is imported as Python would run it: its own folder is searched
first for its imports.
"""

import importlib
import importlib.util
import os
import sys
import traceback
from pathlib import Path
from types import ModuleType
from typing import Any

from holdfast.app import App
from holdfast.engine.options import NodeOptions
from holdfast.errors import InvalidInput
from holdfast.settings import Settings, load_settings

OURS = (str(Path(__file__).parents[1]) + os.sep, "<frozen importlib", str(importlib.__file__))
"""The prefixes of file names that the author of an app does not want to see in a traceback."""


def settings_at(store: str | None) -> Settings:
    """Return the settings from the environment, with this store if one is given."""
    return load_settings(os.environ) if store is None else load_settings(os.environ, store=store)


def load_app(target: str) -> App:
    """Return the app that a target names."""
    place, name = split_target(target)
    module = _load_file(Path(place)) if _is_file(place) else _load_module(place)
    return _app_named(module, place, name) if name else _only_app(module, place)


def split_target(target: str) -> tuple[str, str]:
    """Return the file or module that a target names, and the app's name in it; refuse a file that does not exist."""
    place, _, name = target.partition(":")
    if not place:
        raise InvalidInput(f"the target {target!r} names no file: use shop.py, shop.py:app or pkg.module:app")
    if _is_file(place) and not Path(place).is_file():
        raise InvalidInput(f"{place}: there is no such file")
    return place, name


def _is_file(place: str) -> bool:
    return place.endswith(".py") or os.sep in place


def _app_named(module: ModuleType, place: str, name: str) -> App:
    found = getattr(module, name, None)
    if isinstance(found, App):
        return found
    problem = f"{name} is no App, its type is {type(found).__name__}" if hasattr(module, name) else f"it has no {name}"
    raise InvalidInput(f"{place}: {problem}; {_listing(_apps(module))}")


def _only_app(module: ModuleType, place: str) -> App:
    apps = _apps(module)
    if len({id(app) for app in apps.values()}) == 1:
        return next(iter(apps.values()))
    if not apps:
        raise InvalidInput(f"{place}: there is no App; make one with `app = holdfast.App('shop')`")
    raise InvalidInput(f"{place}: {_listing(apps)}; say which one, such as {place}:{min(apps)}")


def _apps(module: ModuleType) -> dict[str, App]:
    return {name: value for name, value in vars(module).items() if isinstance(value, App)}


def _listing(apps: dict[str, App]) -> str:
    return f"its apps: {', '.join(sorted(apps))}" if apps else "it has no App at all"


def _load_file(path: Path) -> ModuleType:
    path = path.resolve()
    spec = importlib.util.spec_from_file_location(path.stem, path)
    if spec is None or spec.loader is None:
        raise InvalidInput(f"{path} is not a Python file: its name must end with .py")
    if path.stem in sys.modules:
        raise InvalidInput(f"{path}: there is another module {path.stem!r} already; give the file another name")
    sys.path.insert(0, str(path.parent))
    module = sys.modules[path.stem] = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
    except (Exception, SystemExit) as problem:
        raise _cannot_be_imported(str(path), problem) from problem
    return module


def _load_module(name: str) -> ModuleType:
    sys.path.insert(0, str(Path.cwd()))
    try:
        return importlib.import_module(name)
    except (Exception, SystemExit) as problem:
        if isinstance(problem, ModuleNotFoundError) and problem.name and f"{name}.".startswith(f"{problem.name}."):
            raise InvalidInput(f"there is no module {problem.name!r} (a file is named with its .py)") from problem
        raise _cannot_be_imported(name, problem) from problem


def _cannot_be_imported(place: str, problem: BaseException) -> InvalidInput:
    trace = traceback.TracebackException.from_exception(problem)
    _leave_out_ours(trace)
    return InvalidInput(f"{place} cannot be imported:", traceback="".join(trace.format()).rstrip())


def _leave_out_ours(trace: traceback.TracebackException | None) -> None:
    """Keep only the lines of the author's code, not those of Holdfast and the interpreter, also in causes."""
    if trace is None:
        return
    frames = [frame for frame in trace.stack if not frame.filename.startswith(OURS)]
    trace.stack = traceback.StackSummary.from_list([(f.filename, f.lineno or 0, f.name, f.line) for f in frames])
    _leave_out_ours(trace.__cause__)
    _leave_out_ours(trace.__context__)


def node_options(store: str | None, **given: Any) -> NodeOptions:
    """Return the options of a node: those given here, otherwise those of the settings, otherwise the defaults."""
    flags = {name: value for name, value in given.items() if value is not None}
    return NodeOptions(**{"tune_gc": True, **settings_at(store).node.given(), **flags})
