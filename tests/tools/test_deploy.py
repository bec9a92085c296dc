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
import tempfile
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.tools.plain_user import IS_ROOT, NOBODY, installed, interpreter, run_until_up, start
from tools.reference_pages import metric_rows

ROOT = Path(__file__).parents[2]
DEPLOY = ROOT / "deploy"
MANIFESTS: list[dict[str, Any]] = list(yaml.safe_load_all((DEPLOY / "kubernetes.yaml").read_text()))
SERVICES: dict[str, Any] = yaml.safe_load((DEPLOY / "compose.yaml").read_text())["services"]
OURS = ("migrate", "node", "server")
PODS = [each["spec"]["template"]["spec"] for each in MANIFESTS if "template" in each["spec"]]
BIN = Path(sys.executable).parent


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
def test_images_on_the_page_are_linted(tmp_path: Path) -> None:
    """But that they build on an image of this machine, which has no version."""
    if not (BIN / "hadolint").exists():
        pytest.skip("there is no hadolint for this processor")
    [image] = re.findall(
        r"^```dockerfile\n(.*?)^```", (ROOT / "docs" / "deployment.md").read_text(), re.DOTALL | re.MULTILINE
    )
    (tmp_path / "Dockerfile").write_text(image)
    lint = [str(BIN / "hadolint"), "--ignore", "DL3006", "Dockerfile"]
    done = subprocess.run(lint, cwd=tmp_path, capture_output=True, text=True, timeout=60, check=False)
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


QUIET = {
    "holdfast_nodes": "3x60",
    "holdfast_workflow_nodes": "2x60",
    "holdfast_ready_lag_seconds": "1x60",
    "holdfast_dead_letters_open": "0x60",
    'holdfast_runs{status="PAUSED"}': "0x60",
    'holdfast_turns_lost_total{reason="fenced"}': "7x60",
    'holdfast_writes_over_budget_total{verb="commit"}': "0x60",
    'holdfast_bus_backlog_age_seconds{sink="orders"}': "4x60",
}
"""What a server reports where nothing is wrong."""

ALARMING = {
    "HoldfastNoMetrics": ("holdfast_nodes", "_x60", {}),
    "HoldfastNoNode": ("holdfast_workflow_nodes", "2 0x60", {}),
    "HoldfastReadyLag": ("holdfast_ready_lag_seconds", "31+60x60", {}),
    "HoldfastDeadLetters": ("holdfast_dead_letters_open", "1x60", {}),
    "HoldfastPausedRuns": ('holdfast_runs{status="PAUSED"}', "5x60", {}),
    "HoldfastTurnsLost": ('holdfast_turns_lost_total{reason="fenced"}', "0+2x60", {}),
    "HoldfastSlowWrites": ('holdfast_writes_over_budget_total{verb="commit"}', "0+1x60", {}),
    "HoldfastBusBehind": ('holdfast_bus_backlog_age_seconds{sink="orders"}', "301+60x60", {"sink": "orders"}),
}
"""What makes each alert fire, and no other one: the metric, its values each minute, the labels of the alert."""


@pytest.mark.process
def test_each_alert_fires_when_it_should_and_else_none(tmp_path: Path) -> None:
    promtool = shutil.which("promtool", path=f"{BIN}{os.pathsep}{os.environ['PATH']}")
    if promtool is None:
        pytest.skip("there is no promtool: it is in the Debian package prometheus")
    rules = {
        each["alert"]: each
        for each in yaml.safe_load((DEPLOY / "prometheus-rules.yaml").read_text())["groups"][0]["rules"]
    }
    assert rules.keys() == ALARMING.keys()

    def played(values: dict[str, str], firing: str | None) -> dict[str, Any]:
        expected = [
            {
                "eval_time": "50m",
                "alertname": name,
                "exp_alerts": [
                    {"exp_labels": rule["labels"] | ALARMING[name][2], "exp_annotations": rule["annotations"]}
                ]
                if name == firing
                else [],
            }
            for name, rule in rules.items()
        ]
        series = [{"series": name, "values": each} for name, each in values.items()]
        return {"interval": "1m", "input_series": series, "alert_rule_test": expected}

    cases = [played(QUIET, None)]
    cases += [played({**QUIET, metric: values}, name) for name, (metric, values, _) in ALARMING.items()]
    file = tmp_path / "cases.yaml"
    file.write_text(yaml.safe_dump({"rule_files": [str(DEPLOY / "prometheus-rules.yaml")], "tests": cases}))
    done = subprocess.run([promtool, "test", "rules", file], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


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


def test_lines_for_docker_and_kubernetes_name_what_is_there() -> None:
    page = (ROOT / "docs" / "deployment.md").read_text()
    lines = re.findall(r"^docker .*", page, re.MULTILINE)
    assert len(lines) == 4
    for line in lines:
        words = shlex.split(line)
        files = [
            words[words.index("-f") + 1],
            *(word.removeprefix("APP=") for word in words if word.startswith("APP=")),
        ]
        assert [file for file in files if not (ROOT / file).is_file()] == []
        assert "--rm" not in words or words[words.index("--rm") + 1] in SERVICES
        tagged = words[words.index("-t") + 1] if "-t" in words else None
        assert tagged in (None, SERVICES["node"]["image"])
    variable = re.findall(r"^export (\w+)=", page, re.MULTILINE)
    assert [f"${{{name}:?" in (DEPLOY / "compose.yaml").read_text() for name in variable] == [True]
    [deployment] = re.findall(r"`kubectl exec deploy/(\S+) ", page)
    assert deployment in {each["metadata"]["name"] for each in MANIFESTS if each["kind"] == "Deployment"}


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
    if IS_ROOT:
        os.chown(data, NOBODY, NOBODY)
    command = [interpreter(), "-m", "holdfast"]
    more = installed(HOLDFAST_STORE=url or f"sqlite:///{data}/app.db")
    migrate = [*command, *SERVICES["migrate"]["command"]]
    async with asyncio.timeout(120):
        if url:
            await refuse_a_closed_home(migrate, folder, more, place / "closed")
        more["HOME"] = str(data)  # as the units have it
        migrated = await start(migrate, folder, more)
        _, problem = await migrated.communicate()
        assert migrated.returncode == 0, problem.decode()
        for name in ("node", "server"):
            words = [*SERVICES[name]["command"], *(["--port", "0", "--open"] if name == "server" else [])]
            await run_until_up([*command, *words], folder, more)
    assert {path.name for path in folder.iterdir()} == {"app.py"}
    assert bool(list(data.iterdir())) is not bool(url), "with a server nothing is written"


async def refuse_a_closed_home(migrate: list[str], folder: Path, environ: dict[str, str], home: Path) -> None:
    """Check what is said if the driver may not look for certificates at home, such as below ProtectHome."""
    home.mkdir(mode=0o700 if IS_ROOT else 0)
    process = await start(migrate, folder, environ | {"HOME": str(home)})
    _, problem = await process.communicate()
    home.chmod(0o700)
    assert "set HOME to a folder that the user may read" in problem.decode()
    assert process.returncode != 0
