"""What is in `deploy/`: it is linted, names metrics that exist, keeps the rights small, and its commands run."""

from __future__ import annotations

import asyncio
import configparser
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.cli.command_process import SOURCES, environment
from tools.reference_pages import metric_rows

ROOT = Path(__file__).parents[2]
DEPLOY = ROOT / "deploy"
MANIFESTS: list[dict[str, Any]] = list(yaml.safe_load_all((DEPLOY / "kubernetes.yaml").read_text()))
SERVICES: dict[str, Any] = yaml.safe_load((DEPLOY / "compose.yaml").read_text())["services"]
OURS = ("migrate", "node", "server")
PODS = [each["spec"]["template"]["spec"] for each in MANIFESTS if "template" in each["spec"]]
BIN = Path(sys.executable).parent
NOBODY = 65534


@pytest.mark.process
@pytest.mark.parametrize(
    "lint",
    [
        ["hadolint", "Dockerfile"],
        ["yamllint", "--strict", "-d", "{extends: relaxed, rules: {line-length: disable}}", "."],
        ["kubernetes-validate", "--strict", "--quiet", "kubernetes.yaml"],
        ["check-jsonschema", "--builtin-schema", "vendor.compose-spec", "compose.yaml"],
    ],
    ids=lambda lint: str(lint[0]),
)
def test_the_files_are_linted(lint: list[str]) -> None:
    program = BIN / lint[0]
    if lint[0] == "hadolint" and not program.exists():
        pytest.skip("there is no hadolint for this processor")
    done = subprocess.run([program, *lint[1:]], cwd=DEPLOY, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.process
@pytest.mark.parametrize("name", ["node", "server"])
def test_systemd_finds_nothing_wrong_with_the_units(name: str, tmp_path: Path) -> None:
    """But that there is no app on this machine: the command is one that is there."""
    assert shutil.which("systemd-analyze"), "it checks units: make commands"
    text = (DEPLOY / f"holdfast-{name}.service").read_text()
    for given, is_good in ((text, True), (text.replace("TimeoutStopSec=30", "TimeoutStopSec=soon"), False)):
        unit = tmp_path / f"holdfast-{name}.service"
        unit.write_text(given.replace("/srv/holdfast/.venv/bin/holdfast", "/bin/true"))
        done = subprocess.run(
            ["systemd-analyze", "verify", "--man=no", unit], capture_output=True, text=True, timeout=60, check=False
        )
        assert (done.returncode == 0 and done.stderr == "") is is_good, done.stderr


@pytest.mark.parametrize("file", ["grafana-dashboard.json", "prometheus-rules.yaml"])
def test_every_metric_that_is_named_exists(file: str) -> None:
    text = (DEPLOY / file).read_text()
    panels = json.loads(text)["panels"] if file.endswith(".json") else []
    rules = yaml.safe_load(text)["groups"][0]["rules"] if not panels else []
    queries = [target["expr"] for panel in panels for target in panel["targets"]] + [rule["expr"] for rule in rules]
    assert len(queries) >= 7
    labels = {name: set(names) for name, _, names, _ in metric_rows()}
    for query in queries:
        (name,) = re.findall(r"holdfast_\w+", query)
        known = name.removesuffix("_bucket")
        assert known in labels, f"{file} names {name}, which does not exist"
        used = {label.strip() for group in re.findall(r"by \(([^)]*)\)", query) for label in group.split(",")}
        used |= set(re.findall(r"(\w+)=~?\"", query))
        assert used <= labels[known] | {"le"}, f"{file}: {query}"


def test_every_alert_leads_to_its_part_of_the_runbook() -> None:
    headings = re.findall(r"^## (.+)$", (ROOT / "docs" / "runbook.md").read_text(), re.MULTILINE)
    anchors = {heading.lower().replace(" ", "-") for heading in headings}
    for rule in yaml.safe_load((DEPLOY / "prometheus-rules.yaml").read_text())["groups"][0]["rules"]:
        page, _, anchor = rule["annotations"]["runbook"].partition("#")
        assert page == "docs/runbook.md"
        assert anchor in anchors, rule["alert"]


def test_containers_run_without_rights_and_without_files() -> None:
    assert re.search(r"^USER 10001:10001$", (DEPLOY / "Dockerfile").read_text(), re.MULTILINE)
    assert all(SERVICES[name]["read_only"] and SERVICES[name]["cap_drop"] == ["ALL"] for name in OURS)
    assert len(PODS) == 3
    for pod in PODS:
        assert pod["securityContext"]["runAsNonRoot"] is True
        (container,) = pod["containers"]
        assert container["securityContext"]["readOnlyRootFilesystem"] is True
        assert container["securityContext"]["allowPrivilegeEscalation"] is False
    (server,) = [pod["containers"][0] for pod in PODS if pod["containers"][0]["name"] == "server"]
    assert server["readinessProbe"]["httpGet"]["path"] == "/v1/health"
    assert {"livenessProbe", "startupProbe"} <= server.keys()


def test_units_have_a_home_that_is_theirs() -> None:
    for name in ("node", "server"):
        text = (DEPLOY / f"holdfast-{name}.service").read_text()
        assert "ProtectHome=yes" in text
        assert re.findall("^Environment=HOME=(.*)$", text, re.MULTILINE) == ["/var/lib/holdfast"]
        assert "StateDirectory=holdfast\n" in text


def test_the_same_commands_are_run_everywhere() -> None:
    image = (DEPLOY / "Dockerfile").read_text()
    entry, words = (json.loads(re.findall(rf"^{each} (.*)$", image, re.MULTILINE)[0]) for each in ("ENTRYPOINT", "CMD"))
    assert (entry, words) == (["holdfast"], SERVICES["node"]["command"])
    in_pods = {pod["containers"][0]["name"]: pod["containers"][0]["args"] for pod in PODS}
    assert in_pods == {name: SERVICES[name]["command"] for name in OURS}
    for name in ("node", "server"):
        unit = configparser.ConfigParser(interpolation=None, strict=False)
        unit.optionxform = str  # type: ignore[assignment,method-assign]
        unit.read(DEPLOY / f"holdfast-{name}.service")
        words = shlex.split(unit["Service"]["ExecStart"])[1:]
        assert words == [word for word in SERVICES[name]["command"] if word not in ("--host", "0.0.0.0")]


def interpreter(rights: dict[str, Any]) -> str:
    """Return a Python of this version that a user without rights can run: this one may be in the folder of another."""
    code = "import sys; print(sys.version_info[:2])"
    for program in (sys.executable, "/usr/bin/python3"):
        try:
            done = subprocess.run([program, "-c", code], capture_output=True, text=True, check=False, **rights)
        except OSError:
            continue
        if done.stdout.strip() == str(sys.version_info[:2]):
            return program
    pytest.skip("there is no interpreter that a user without rights can run")


@pytest.mark.process
@pytest.mark.parametrize("kind", ["sqlite", pytest.param("postgres", marks=pytest.mark.postgres)])
async def test_the_commands_run_as_they_stand_without_rights(kind: str, request: pytest.FixtureRequest) -> None:
    """In a plain folder, by a user without rights, where only the folder of the store can be written."""
    url = request.getfixturevalue("postgres_url") if kind == "postgres" else ""
    with tempfile.TemporaryDirectory() as place:  # pytest's own folders are closed to other users, again and again
        os.chmod(place, 0o755)
        await run_without_rights(Path(place), url)


async def run_without_rights(place: Path, url: str) -> None:
    """Migrate, then run a node and a server, until each is up. Without an address the store is a file."""
    folder, data = place / "app", place / "data"
    folder.mkdir()
    data.mkdir()
    shutil.copy(ROOT / "examples" / "approval.py", folder / "app.py")
    is_root = os.geteuid() == 0
    if is_root:
        os.chown(data, NOBODY, NOBODY)
    rights: dict[str, Any] = {"user": NOBODY, "group": NOBODY, "extra_groups": []} if is_root else {}
    program, packages = interpreter(rights), sysconfig.get_path("purelib")
    more = environment(HOLDFAST_STORE=url or f"sqlite:///{data}/app.db", PYTHONDONTWRITEBYTECODE="1")
    more["PYTHONPATH"] = os.pathsep.join([SOURCES, packages])

    async def start(*words: str) -> asyncio.subprocess.Process:
        pipe = asyncio.subprocess.PIPE
        return await asyncio.create_subprocess_exec(
            program, "-m", "holdfast", *words, cwd=folder, env=more, stdout=pipe, stderr=pipe, **rights
        )

    async with asyncio.timeout(120):
        if url:
            await refuse_a_closed_home(start, more, place / "closed")
        more["HOME"] = str(data)  # as the units have it
        migrated = await start(*SERVICES["migrate"]["command"])
        _, problem = await migrated.communicate()
        assert migrated.returncode == 0, problem.decode()
        for name in ("node", "server"):
            words = [*SERVICES[name]["command"], *(["--port", "0", "--open"] if name == "server" else [])]
            process = await start(*words)
            assert process.stderr is not None
            said = await process.stderr.readline()
            while said and json.loads(said)["level"] != "INFO":  # it is up when it says where
                said = await process.stderr.readline()
            process.terminate()
            _, rest = await process.communicate()
            assert process.returncode == 0, (said + rest).decode()
    assert {path.name for path in folder.iterdir()} == {"app.py"}
    assert bool(list(data.iterdir())) is not bool(url), "with a server nothing is written"


async def refuse_a_closed_home(start: Any, environ: dict[str, str], home: Path) -> None:
    """Check what is said if the driver may not look for certificates at home, such as below ProtectHome."""
    home.mkdir(mode=0o700 if os.geteuid() == 0 else 0)
    environ["HOME"] = str(home)
    process = await start(*SERVICES["migrate"]["command"])
    _, problem = await process.communicate()
    home.chmod(0o700)
    assert "set HOME to a folder that the user may read" in problem.decode()
    assert process.returncode != 0
