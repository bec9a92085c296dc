"""Commands as processes of their own, without each of them importing everything: they are forked from one that has.

Run as a script this is that one: it reads what to run, a JSON object on a line, and answers with how it ended.
"""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stderr
from pathlib import Path
from typing import Any


class ForkedCommands:
    """Runs commands in processes that are forked from one."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self._process = process

    def run(self, folder: Path, environment: dict[str, str], *words: str) -> subprocess.CompletedProcess[str]:
        """Run a command to its end."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        ask = {"folder": str(folder), "environment": environment, "words": words}
        self._process.stdin.write(json.dumps(ask) + "\n")
        self._process.stdin.flush()
        answer = json.loads(self._process.stdout.readline())
        return subprocess.CompletedProcess(words, answer["code"], answer["out"], answer["err"])


@contextmanager
def fork_commands(environment: dict[str, str]) -> Iterator[ForkedCommands]:
    """Start the process that is forked from."""
    words = [sys.executable, "-W", "error", __file__]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with subprocess.Popen(words, env=environment, text=True, **pipes) as process:  # type: ignore[call-overload]
        yield ForkedCommands(process)
        process.stdin.close()


def _serve() -> None:
    import httpx  # noqa: F401 (so that no command has to)

    from holdfast.cli.main import main

    with redirect_stderr(io.StringIO()):  # nobody answers; what is imported only then is imported once, here
        main(["run", "list", "--server", "http://127.0.0.1:1"])
    for line in sys.stdin:
        ask = json.loads(line)
        with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:
            child = os.fork()
            if child == 0:
                _become(main, ask, out.fileno(), err.fileno())
            _, status = os.waitpid(child, 0)
            answer = {"code": os.waitstatus_to_exitcode(status), "out": _text(out), "err": _text(err)}
        print(json.dumps(answer), flush=True)


def _become(main: Any, ask: dict[str, Any], out: int, err: int) -> None:
    """Be the command: nothing of this returns."""
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.dup2(out, 1)
    os.dup2(err, 2)
    os.chdir(ask["folder"])
    sys.path[0] = ask["folder"]  # as `python -m` has it
    os.environ.clear()
    os.environ.update(ask["environment"])
    code = 70
    try:
        code = main(ask["words"])
    except SystemExit as ended:
        code = ended.code if isinstance(ended.code, int) else 70
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def _text(file: Any) -> str:
    file.seek(0)
    return str(file.read().decode())


if __name__ == "__main__":
    _serve()
