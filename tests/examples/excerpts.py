"""Excerpts of a page: its blocks of Python that are no program of their own, executed among names that a test gives."""

from __future__ import annotations

import ast
import inspect
import re
import socket
import textwrap
from pathlib import Path
from typing import Any

DOCS = Path(__file__).parents[2] / "docs"

EXCERPT = re.compile(r"^```python\n(.*?)^```", re.DOTALL | re.MULTILINE)


def excerpts_of(page: str) -> list[str]:
    """Return the blocks of Python of a page that are not files."""
    return EXCERPT.findall((DOCS / page).read_text(encoding="utf-8"))


def with_parts(code: str, parts: dict[str, str]) -> str:
    """Return code with its parts replaced; each must be there."""
    for old, new in parts.items():
        assert old in code, f"{old!r} is not in\n{code}"
        code = code.replace(old, new)
    return code


async def play(code: str, names: dict[str, Any]) -> None:
    """Execute code among names, and await what it awaits."""
    compiled = compile(code, "<page>", "exec", flags=ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)
    pending = eval(compiled, names)
    if inspect.iscoroutine(pending):
        await pending


def function(head: str, body: str) -> str:
    """Return a function with this body."""
    return f"{head}\n{textwrap.indent(body, '    ')}\n"


def free_port() -> int:
    """Return a port that is free."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
