"""Builds a release and checks it: `python -m tools.release`, or `make release`. It uploads nothing.

In `dist/` are then the source archive, the wheel, the hashes of all, and an SBOM (CycloneDX) of what it installs.
A release is refused if the changelog has no entry of its version, if the wheel is not pure Python or misses files of
the package, if a second build gives other bytes, or if an installation in a new environment does not work.
"""

import hashlib
import json
import subprocess
import sys
import tempfile
import tomllib
import venv
from collections.abc import Iterator
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
    problems = [
        *differences,
        *problems_of_wheel(wheel, version),
        *problems_of_changelog((ROOT / "CHANGELOG.md").read_text(), version),
    ]
    with tempfile.TemporaryDirectory() as folder:
        venv.create(folder, with_pip=True)
        python = Path(folder) / "bin" / "python"
        subprocess.run([python, "-m", "pip", "install", "--quiet", wheel], check=True)
        subprocess.run([python, ROOT / "examples" / "hello.py"], cwd=folder, check=True)
        (DIST / f"holdfast-{version}.cdx.json").write_text(json.dumps(sbom(python), indent=2) + "\n")
    hashes = [f"{hashlib.sha256(file.read_bytes()).hexdigest()}  {file.name}" for file in sorted(DIST.iterdir())]
    (DIST / "SHA256SUMS").write_text("\n".join(hashes) + "\n")
    if problems:
        raise SystemExit("\n".join(["This is no release:", *problems]))
    print(
        f"Built and checked with Python {sys.version.split()[0]}, build {metadata.version('build')}:", *hashes, sep="\n"
    )


if __name__ == "__main__":
    main()
