"""Runs the quick tests on each supported Python that is installed: `make pythons`, `python -m tools.pythons [3.12 …]`.

Each has an environment of its own in `build/pythons`, with what `requirements-dev.lock` names. A Python that is not
installed is reported and does not fail the command: nothing but packages is downloaded. A failing test does, and so
does finding no Python at all.
"""

import os
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

ROOT = Path(__file__).parents[1]
FOLDER = ROOT / "build" / "pythons"


def supported() -> list[str]:
    """Return the versions that the package says it supports, such as "3.12"."""
    classifiers = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["classifiers"]
    return re.findall(r"Python :: (3\.\d+)", "\n".join(classifiers))


def find(version: str) -> Path | None:
    """Return the interpreter of a version: on the path, or where pyenv keeps its versions."""
    pyenv = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv")) / "versions"
    found = shutil.which(f"python{version}")
    candidates = [Path(found)] if found else []
    candidates += sorted(pyenv.glob(f"{version}.*/bin/python{version}"))
    for program in candidates:  # a shim of pyenv is there for versions that cannot be run
        code = "import sys; print('%d.%d' % sys.version_info[:2])"
        done = subprocess.run([program, "-c", code], capture_output=True, text=True, check=False)
        if done.returncode == 0 and done.stdout.strip() == version:
            return program
    return None


def test(version: str, program: Path) -> bool:
    """Make an environment, run the quick tests in it, and return whether they pass."""
    venv = FOLDER / version
    python = venv / "bin" / "python"
    subprocess.run([program, "-m", "venv", venv], check=True)

    def run(*words: str) -> int:
        return subprocess.run([python, "-m", *words], cwd=ROOT, check=False).returncode

    installed = run("pip", "install", "--quiet", "--require-hashes", "--requirement", "requirements-dev.lock")
    installed = installed or run("pip", "install", "--quiet", "--no-deps", "--no-build-isolation", "--editable", ".")
    workers = str(os.cpu_count())
    return not installed and not run("pytest", "-q", "-n", workers, "--dist", "worksteal", "-m", "quick")


def main() -> None:
    """Test each version that is there, and print a table."""
    outcomes: dict[str, str] = {}
    for version in sys.argv[1:] or supported():
        program = find(version)
        if program is None:
            outcomes[version] = "not installed"
        else:
            print(f"Python {version}: {program}", flush=True)
            outcomes[version] = "passed" if test(version, program) else "FAILED"
    print(*(f"Python {version:5} {outcome}" for version, outcome in outcomes.items()), sep="\n")
    if "passed" not in outcomes.values() or "FAILED" in outcomes.values():
        raise SystemExit(1)


if __name__ == "__main__":
    main()
