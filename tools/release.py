"""Builds a release and checks it: `python -m tools.release`, or `make release`. It uploads nothing.

In `dist/` are then the source archive, the wheel, an SBOM (CycloneDX) of what it installs, a statement of where both
come from (in-toto, with SLSA's predicate), and the hashes of all. With `RELEASE_KEY=~/.ssh/id_ed25519` the hashes are
signed: `ssh-keygen -Y verify -n holdfast-release -s SHA256SUMS.sig … < SHA256SUMS`. A release is refused if the
changelog has no entry of its version, if the wheel is not pure Python or misses files of the package, if a second build
gives other bytes, if files differ from their commit, or if an installation in a new environment does not work.
"""

import hashlib
import json
import os
import subprocess
import sys
import tempfile
import tomllib
import venv
from collections.abc import Iterator, Sequence
from email.parser import Parser
from importlib import metadata
from pathlib import Path
from zipfile import ZipFile

ROOT = Path(__file__).parents[1]
DIST = ROOT / "dist"


def problems_of_wheel(wheel: Path, version: str) -> Iterator[str]:
    """What is wrong with a wheel: its tag, its version, files of the package that it misses or should not have."""
    if not wheel.name.endswith(f"-{version}-py3-none-any.whl"):
        yield f"{wheel.name} is not a pure wheel of {version}"
    with ZipFile(wheel) as archive:
        names = set(archive.namelist())
        (described,) = [name for name in names if name.endswith(".dist-info/METADATA")]
        said = Parser().parsestr(archive.read(described).decode())
    if said["Version"] != version:
        yield f"the wheel says that it is version {said['Version']}"
    source = ROOT / "src"
    expected = {
        path.relative_to(source).as_posix()
        for path in source.rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }
    packed = {name for name in names if ".dist-info/" not in name}
    yield from (f"the wheel misses {name}" for name in sorted(expected - packed))
    yield from (f"the wheel has {name}, which is no file of the package" for name in sorted(packed - expected))


def problems_of_changelog(text: str, version: str) -> Iterator[str]:
    """Whether the changelog has an entry for the version."""
    if f"## [{version}]" not in text:
        yield f"CHANGELOG.md has no entry [{version}]"


def problems_of_second_build(first: Path, second: Path) -> Iterator[str]:
    """Which files of two builds differ: a release that is built again must have the same bytes."""
    names = sorted({file.name for folder in (first, second) for file in folder.iterdir()})
    for name in names:
        builds = [folder / name for folder in (first, second)]
        if not all(file.exists() for file in builds) or builds[0].read_bytes() != builds[1].read_bytes():
            yield f"a second build gives another {name}"


def sbom(python: Path) -> dict[str, object]:
    """Return the packages of an environment as a CycloneDX document."""
    code = "import importlib.metadata as m, json; print(json.dumps([[d.name, d.version] for d in m.distributions()]))"
    listed = json.loads(subprocess.run([python, "-c", code], capture_output=True, text=True, check=True).stdout)
    packages = sorted((name.lower(), version) for name, version in listed if name.lower() not in ("pip", "setuptools"))
    components = [
        {
            "type": "library",
            "name": name,
            "version": version,
            "purl": f"pkg:pypi/{name}@{version}",
            "bom-ref": f"pkg:pypi/{name}@{version}",
        }
        for name, version in packages
    ]
    return {"bomFormat": "CycloneDX", "specVersion": "1.6", "version": 1, "components": components}


def provenance(files: Sequence[Path], commit: str, build: str) -> dict[str, object]:
    """Return where files come from: the commit, what was locked, and what built them, as an in-toto statement."""
    subjects = [{"name": file.name, "digest": {"sha256": hash_of(file)}} for file in files]
    builder = {"python": sys.version.split()[0], "build": build}
    materials = [
        {"name": "commit", "digest": {"gitCommit": commit}},
        {"name": "requirements-dev.lock", "digest": {"sha256": hash_of(ROOT / "requirements-dev.lock")}},
    ]
    definition = {
        "buildType": "python -m build",
        "externalParameters": {},
        "internalParameters": builder,
        "resolvedDependencies": materials,
    }
    return {
        "_type": "https://in-toto.io/Statement/v1",
        "subject": subjects,
        "predicateType": "https://slsa.dev/provenance/v1",
        "predicate": {"buildDefinition": definition, "runDetails": {"builder": {"id": "make release"}}},
    }


def commit_of(root: Path) -> tuple[str, list[str]]:
    """Return the commit of a checkout, and what is wrong with it as the source of a release."""

    def git(*words: str) -> str:
        done = subprocess.run(["git", "-C", root, *words], capture_output=True, text=True, check=False)
        return done.stdout.strip() if done.returncode == 0 else ""

    commit = git("rev-parse", "HEAD")
    if not commit:
        return "", ["this is no checkout: the release would not say which commit it is"]
    changed = git("status", "--porcelain", "--untracked-files=no")
    return commit, [f"{line[2:].strip()} differs from its commit" for line in changed.splitlines()]


def hash_of(file: Path) -> str:
    """Return the SHA256 of a file."""
    return hashlib.sha256(file.read_bytes()).hexdigest()


def sign(hashes: Path, key: Path) -> None:
    """Sign the hashes with a key of SSH, into a file beside them."""
    subprocess.run(["ssh-keygen", "-q", "-Y", "sign", "-n", "holdfast-release", "-f", key, hashes], check=True)


def check_installation(wheel: Path, folder: Path) -> Path:
    """Install a wheel in a new environment, run an example and the tests of a new project; return its interpreter.

    The packages for these tests come into an environment of their own: the SBOM has only what the wheel installs.
    """
    pythons = []
    for name, more in (("plain", []), ("tested", ["pytest", "pytest-asyncio"])):
        venv.create(folder / name, with_pip=True)
        pythons.append(folder / name / "bin" / "python")
        subprocess.run([pythons[-1], "-m", "pip", "install", "--quiet", wheel, *more], check=True)
    plain, tested = pythons
    subprocess.run([plain, ROOT / "examples" / "hello.py"], cwd=folder, check=True)
    subprocess.run([tested, "-m", "holdfast", "init", "shop"], cwd=folder, check=True)
    subprocess.run([tested, "-m", "pytest", "-q"], cwd=folder / "shop", check=True)
    return plain


def main() -> None:
    """Build and check, and write what was made."""
    version = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
    if DIST.exists() and any(DIST.iterdir()):
        raise SystemExit("dist/ is not empty: move what is in it away first")
    subprocess.run([sys.executable, "-m", "build", "--outdir", DIST, ROOT], check=True)
    with tempfile.TemporaryDirectory() as folder:
        subprocess.run([sys.executable, "-m", "build", "--outdir", folder, ROOT], check=True)
        differences = list(problems_of_second_build(DIST, Path(folder)))
    (wheel,) = DIST.glob("*.whl")
    subprocess.run([sys.executable, "-m", "twine", "check", "--strict", *DIST.iterdir()], check=True)
    commit, changes = commit_of(ROOT)
    problems = [
        *changes,
        *differences,
        *problems_of_wheel(wheel, version),
        *problems_of_changelog((ROOT / "CHANGELOG.md").read_text(), version),
    ]
    with tempfile.TemporaryDirectory() as folder:
        python = check_installation(wheel, Path(folder))
        (DIST / f"holdfast-{version}.cdx.json").write_text(json.dumps(sbom(python), indent=2) + "\n")
    statement = provenance(sorted(DIST.iterdir()), commit, metadata.version("build"))
    (DIST / f"holdfast-{version}.intoto.json").write_text(json.dumps(statement, indent=2) + "\n")
    hashes = [f"{hash_of(file)}  {file.name}" for file in sorted(DIST.iterdir())]
    (DIST / "SHA256SUMS").write_text("\n".join(hashes) + "\n")
    key = os.environ.get("RELEASE_KEY")
    if key:
        sign(DIST / "SHA256SUMS", Path(key).expanduser())
    if problems:
        raise SystemExit("\n".join(["This is no release:", *problems]))
    print(
        f"Built and checked with Python {sys.version.split()[0]}, build {metadata.version('build')}:", *hashes, sep="\n"
    )
    print("The hashes are signed." if key else "The hashes are not signed: RELEASE_KEY=KEY-OF-SSH make release")


if __name__ == "__main__":
    main()
