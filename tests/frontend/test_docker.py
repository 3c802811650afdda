"""The files under docker/ fit each other and this checkout: paths, flags, secrets, volumes, probes,
image tags.
"""

import json
import re
import runpy
import shlex
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml
from packaging.requirements import Requirement

from tests.frontend.board import BOARD
from tests.frontend.fake_engine import DIES
from tests.frontend.live_server import LiveServer, server_and_client
from tests.waiting import until
from tlt_server.__main__ import _parse
from tlt_server.settings.server import settings

ROOT = Path(__file__).parents[2]
DOCKER = ROOT / "docker"
COMPOSE: dict[str, Any] = yaml.safe_load((DOCKER / "compose.yaml").read_text())
SERVER: dict[str, Any] = COMPOSE["services"]["server"]
PINNED = re.compile(r"[\w./-]+:v?\d+\.\d+(\.\d+)?(-[\w.-]+)?")


def instructions() -> list[tuple[str, str]]:
    """(INSTRUCTION, rest) of the Dockerfile, continued lines joined."""
    text = re.sub(r"^#.*\n", "", (DOCKER / "Dockerfile").read_text(), flags=re.MULTILINE)
    lines = re.sub(r"\\\n\s*", " ", text).splitlines()
    return [
        (word, rest.strip())
        for word, _, rest in (line.partition(" ") for line in lines if line.strip())
    ]


def all_of(word: str) -> list[str]:
    return [rest for name, rest in instructions() if name == word]


def test_the_image_is_pinned_and_has_no_build_tools() -> None:
    default = next(rest for rest in all_of("ARG") if rest.startswith("PYTHON_IMAGE="))
    assert PINNED.fullmatch(default.partition("=")[2])
    assert all_of("FROM") == ["${PYTHON_IMAGE} AS build", "${PYTHON_IMAGE}"]
    last = instructions()[[i for i, (word, _) in enumerate(instructions()) if word == "FROM"][-1] :]
    assert not [rest for word, rest in last if word == "RUN" and re.search(r"pip|apt|gcc", rest)]
    assert [rest for word, rest in last if word == "COPY"] == ["--from=build /opt/tlt /opt/tlt"]


def test_the_image_runs_as_a_user_of_its_own() -> None:
    (user,) = all_of("USER")
    assert user != "root"
    assert any(
        "useradd --uid 10001 " in rest and rest.split("&&")[0].split()[-1] == user
        for rest in all_of("RUN")
    )


def test_copied_files_exist_and_are_not_ignored() -> None:
    sources = [
        source
        for rest in all_of("COPY")
        if not rest.startswith("--from")
        for source in rest.split()[:-1]
    ]
    assert sources and all((ROOT / source).exists() for source in sources)
    ignore = [
        line
        for line in (ROOT / ".dockerignore").read_text().splitlines()
        if line and not line.startswith("#")
    ]
    assert ignore[0] == "*"
    assert {line[1:] for line in ignore if line.startswith("!")} == set(sources)


def pins(text: str) -> dict[str, str]:
    """Name of a package -> version; names in the form of the registry."""
    found = re.findall(r"^([A-Za-z0-9._-]+)(?:\[[\w,-]+\])?==([^ ;\\\n]+)", text, re.MULTILINE)
    return {re.sub(r"[-_.]+", "-", name).lower(): version for name, version in found}


def test_every_package_of_the_image_is_locked_with_hashes() -> None:
    lock = (DOCKER / "requirements.lock").read_text()
    entries = re.split(r"\n(?=[A-Za-z0-9])", lock.strip())
    assert len(entries) > 60 and all("--hash=sha256:" in entry for entry in entries)
    locked, constrained = pins(lock), pins((ROOT / "constraints.txt").read_text())
    differ = {
        name for name in locked.keys() & constrained.keys() if locked[name] != constrained[name]
    }
    assert not differ, "run make lock"
    installs = [rest for rest in all_of("RUN") if "pip install" in rest]
    ours = [each for each in (DOCKER / "requirements.in").read_text().split() if each[0] == "."]
    assert ours == [each for each in shlex.split(installs[1]) if each in ours] != []
    for place, _, extra in (each.removesuffix("]").partition("[") for each in ours):
        project = tomllib.loads((ROOT / place / "pyproject.toml").read_text())["project"]
        asked = [*project["dependencies"], *project.get("optional-dependencies", {}).get(extra, [])]
        names = {Requirement(each).name.lower() for each in asked}
        assert names - {"tlt-kernels", "tlt-client"} <= locked.keys(), "run make lock"
    assert "setuptools" in locked, "which builds our own packages without a download"
    assert not re.search(r"https?://|-i |--index-url", lock)
    assert "--require-hashes -r requirements.lock" in installs[0]
    assert "--no-deps" in installs[1] and "--no-build-isolation" in installs[1]


def test_the_bill_of_materials_matches_the_lock() -> None:
    lock = (DOCKER / "requirements.lock").read_text()
    made = json.loads((DOCKER / "sbom.cdx.json").read_text())
    assert made == runpy.run_path(str(DOCKER / "sbom.py"))["document"](lock), "run make lock"
    listed = {part["name"].lower(): part["version"] for part in made["components"]}
    assert (made["bomFormat"], made["specVersion"]) == ("CycloneDX", "1.6")
    assert listed == pins(lock)
    assert len({part["bom-ref"] for part in made["components"]}) == len(made["components"])


def test_the_image_runs_read_only_and_without_rights() -> None:
    (volume,) = all_of("VOLUME")
    assert SERVER["read_only"] and SERVER["tmpfs"] == ["/tmp"] and SERVER["cap_drop"] == ["ALL"]
    assert SERVER["security_opt"] == ["no-new-privileges:true"]
    writable = [mount for mount in SERVER["volumes"] if not mount.endswith(":ro")]
    assert writable == [f"state:{volume}"]
    kept = re.findall(r"(?:HOME|NUMBA_CACHE_DIR)=(\S+)", all_of("ENV")[0])
    assert kept and all(place.startswith(volume) for place in kept)
    documented = (ROOT / "docs" / "operators.md").read_text()
    assert f"--read-only --tmpfs /tmp --cap-drop ALL -v tlt:{volume} tlt-server" in documented


def test_the_health_check_accepts_a_recovering_server(model: Path) -> None:
    (check,) = all_of("HEALTHCHECK")
    python, flag, code = json.loads(check.partition("CMD ")[2])
    assert (python, flag, all_of("EXPOSE")) == ("python", "-c", ["8000"])

    def status(server: LiveServer) -> int:
        assert "//127.0.0.1:8000/" in code
        asked = code.replace("http://127.0.0.1:8000", server.url)
        return subprocess.run([sys.executable, "-c", asked], capture_output=True).returncode

    with server_and_client(model, max_restarts=1) as (server, client):
        assert status(server) == 0
        server.call(server.may_launch.clear)
        client.generate([{"token_ids": [65, DIES]}])
        assert httpx.get(f"{server.url}/readyz").status_code == 503 and status(server) == 0
        server.call(server.may_launch.set)
        until(lambda: httpx.get(f"{server.url}/readyz").status_code == 200)
        client.generate([{"token_ids": [66, DIES]}])
        assert status(server) == 1


def test_docker_commands_are_accepted_by_the_command_line() -> None:
    assert json.loads(all_of("ENTRYPOINT")[0]) == ["tlt"]
    for command in (json.loads(all_of("CMD")[0]), SERVER["command"]):
        assert _parse(command).model.startswith("/opt/tlt/pair/")
    assert any(
        "/opt/tlt/pair" in rest and "tlt_server.demo.workload import PAIR" in rest
        for rest in all_of("RUN")
    )


def test_gpu_variant_of_the_deployment_changes_only_the_server() -> None:
    overlay: dict[str, Any] = yaml.safe_load((DOCKER / "compose.gpu.yaml").read_text())
    server = overlay["services"].pop("server")
    assert overlay == {"services": {}}
    assert not server.keys() & {"command", "ports", "volumes", "secrets", "read_only"}
    assert server["image"] != SERVER["image"], "the two are built from other bases"
    (device,) = server["deploy"]["resources"]["reservations"]["devices"]
    assert device == {"driver": "nvidia", "count": 1, "capabilities": ["gpu"]}
    base = next(rest for rest in all_of("ARG") if rest.startswith("PYTHON_IMAGE=")).partition("=")[
        2
    ]
    assert server["build"]["args"] == {"PYTHON_IMAGE": base.replace("-slim", "")}
    variables = {setting.variable for setting in settings()}
    assert {name for name in server["environment"] if name.startswith("TLT_")} <= variables
    assert "compute" in server["environment"]["NVIDIA_DRIVER_CAPABILITIES"]


def test_a_publicly_reachable_server_has_keys() -> None:
    flags = dict(flag.removeprefix("--").split("=", 1) for flag in SERVER["command"] if "=" in flag)
    assert flags["host"] == "0.0.0.0" and flags["api-key-file"] == "/run/secrets/api_key"
    assert "api_key" in SERVER["secrets"]
    for service in COMPOSE["services"].values():
        assert all(
            re.match(r"127\.0\.0\.1:|\$\{TLT_PUBLISH:-127\.0\.0\.1\}:", port)
            for port in service["ports"]
        )
    assert int(SERVER["stop_grace_period"].removesuffix("s")) > float(flags["drain-timeout-s"])
    assert flags["state-dir"].startswith("/var/lib/tlt/") and flags["weight-root"] == "/weights"


def test_images_are_pinned_and_mounts_exist() -> None:
    for name, service in COMPOSE["services"].items():
        assert ("build" in service) == (name == "server") and (
            name == "server" or PINNED.fullmatch(service["image"])
        ), name
        for source, _, rest in (
            volume.replace("${TLT_WEIGHTS:-weights}", "weights").partition(":")
            for volume in service["volumes"]
        ):
            assert (
                (DOCKER / source).exists()
                if source.startswith(".")
                else source in COMPOSE["volumes"]
            ), source
            assert rest.startswith("/")
        assert set(service.get("secrets", ())) <= COMPOSE["secrets"].keys()
    assert (DOCKER / SERVER["build"]["context"] / SERVER["build"]["dockerfile"]).samefile(
        DOCKER / "Dockerfile"
    )
    assert SERVER["build"]["args"].keys() <= {rest.partition("=")[0] for rest in all_of("ARG")}
    ignored = (ROOT / ".gitignore").read_text().splitlines()
    assert "docker/secrets/" in ignored
    assert all(secret["file"].startswith("./secrets/") for secret in COMPOSE["secrets"].values())


def test_prometheus_has_the_key_and_the_alerts() -> None:
    config = yaml.safe_load((DOCKER / "prometheus.yml").read_text())
    (job,) = config["scrape_configs"]
    assert job["job_name"] == "tlt" and job["static_configs"] == [{"targets": ["server:8000"]}]
    assert "server" in COMPOSE["services"]
    assert job["authorization"] == {"type": "Bearer", "credentials_file": "/run/secrets/api_key"}
    mounted = dict(volume.split(":")[:2] for volume in COMPOSE["services"]["prometheus"]["volumes"])
    assert mounted["./alerts.yml"] == "/etc/prometheus/" + config["rule_files"][0]
    assert (
        f"--config.file={mounted['./prometheus.yml']}"
        in COMPOSE["services"]["prometheus"]["command"]
    )


def test_grafana_is_provisioned_with_the_source_and_the_board() -> None:
    provisioning = DOCKER / "grafana" / "provisioning"
    (source,) = yaml.safe_load((provisioning / "datasources" / "prometheus.yaml").read_text())[
        "datasources"
    ]
    assert source["uid"] == BOARD["templating"]["list"][0]["datasource"]["uid"]
    assert source["url"] == "http://prometheus:9090"
    (provider,) = yaml.safe_load((provisioning / "dashboards" / "boards.yaml").read_text())[
        "providers"
    ]
    mounted = dict(volume.split(":")[:2] for volume in COMPOSE["services"]["grafana"]["volumes"])
    assert mounted["./grafana/boards"] == provider["options"]["path"]
    assert mounted["./grafana/provisioning"] == "/etc/grafana/provisioning"
    home = Path(
        COMPOSE["services"]["grafana"]["environment"]["GF_DASHBOARDS_DEFAULT_HOME_DASHBOARD_PATH"]
    )
    assert (DOCKER / "grafana" / "boards" / home.name).exists()
    assert str(home.parent) == provider["options"]["path"]


@pytest.mark.parametrize(
    "command",
    re.findall(
        r"^\$ (docker .*|mkdir .*)$", (ROOT / "docs" / "operators.md").read_text(), re.MULTILINE
    ),
)
def test_docker_commands_name_existing_files(command: str) -> None:
    words = shlex.split(command, comments=True)
    assert (ROOT / "docker").exists()
    assert all((ROOT / word).exists() for word in words if word.endswith(".yaml"))
