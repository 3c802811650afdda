"""The manifests under docker/k8s are valid, fit each other, and ask the server for what it has."""

from pathlib import Path
from typing import Any

import httpx
import kubernetes_validate
import pytest
import yaml

from tests.frontend.live_server import live_server
from tests.frontend.test_docker import COMPOSE, SERVER, all_of
from tlt_server.__main__ import _parse
from tlt_server.config import Config
from tlt_server.fleet.launchers.static import Static
from tlt_server.fleet.settings import planned

K8S = Path(__file__).parents[2] / "docker" / "k8s"
# The oldest version that has all fields of the manifests by default, and a new one.
VERSIONS = ("1.30", "1.37")
KUSTOMIZATION: dict[str, Any] = yaml.safe_load((K8S / "kustomization.yaml").read_text())
MANIFESTS: dict[str, list[dict[str, Any]]] = {
    path.name: list(yaml.safe_load_all(path.read_text()))
    for path in sorted(K8S.glob("*.yaml"))
    if path.name != "kustomization.yaml"
}
WORKLOADS = {
    name: documents[0]
    for name, documents in MANIFESTS.items()
    if documents[0]["kind"] in ("Deployment", "StatefulSet")
}
SERVERS = {name: each for name, each in WORKLOADS.items() if name != "gateway.yaml"}
GATEWAY = WORKLOADS["gateway.yaml"]
LABELS = {"app.kubernetes.io/name": "tlt"}


def container(workload: dict[str, Any]) -> dict[str, Any]:
    (only,) = workload["spec"]["template"]["spec"]["containers"]
    return dict(only)


def flags(workload: dict[str, Any]) -> dict[str, str]:
    """Return the settings that the command line of a workload gives, parsed by the server; of a
    gateway those on both sides of `--`.
    """
    given = dict(vars(_parse(container(workload)["args"])))
    return {**given.pop("served", {}), **given}


def ports(workload: dict[str, Any]) -> dict[str, int]:
    return {port["name"]: port["containerPort"] for port in container(workload)["ports"]}


@pytest.mark.parametrize(
    "manifest",
    [each for name, all_ in MANIFESTS.items() if name != "podmonitor.yaml" for each in all_],
    ids=lambda manifest: f"{manifest['kind']} {manifest['metadata']['name']}",
)
def test_a_manifest_has_the_fields_of_its_kind(manifest: dict[str, Any]) -> None:
    for version in VERSIONS:
        kubernetes_validate.validate(manifest, version, strict=True)


@pytest.mark.parametrize("place", [("spec", "replicass"), ("spec", "template", "spec", "volume")])
def test_manifest_check_finds_an_unknown_field(place: tuple[str, ...]) -> None:
    broken = yaml.safe_load((K8S / "deployment.yaml").read_text())
    inner = broken
    for name in place[:-1]:
        inner = inner[name]
    inner[place[-1]] = []
    with pytest.raises(kubernetes_validate.ValidationError):
        kubernetes_validate.validate(broken, VERSIONS[0], strict=True)


def test_the_kustomization_names_files_and_the_image() -> None:
    assert set(KUSTOMIZATION) == {"apiVersion", "kind", "resources", "images"}
    others = {"statefulset.yaml", "gateway.yaml"}
    assert {*KUSTOMIZATION["resources"], *others} == set(MANIFESTS)
    (image,) = KUSTOMIZATION["images"]
    overlay = yaml.safe_load((K8S.parent / "compose.gpu.yaml").read_text())
    built = overlay["services"]["server"]["image"]
    assert {image["name"], *(container(each)["image"] for each in WORKLOADS.values())} == {built}


@pytest.mark.parametrize("name", WORKLOADS)
def test_a_workload_starts_the_server_of_compose(name: str) -> None:
    workload = WORKLOADS[name]
    given, compose = flags(workload), vars(_parse(SERVER["command"]))
    same = ("model", "drafter", "host", "port", "drain_timeout_s", "log_format")
    assert [given[each] for each in same] == [compose[each] for each in same]
    names = {"http": "port", "probes": "probe_port", "link": "link_port"}
    listens = {name: int(given[port]) for name, port in names.items() if port in given}
    assert ports(workload) == listens
    assert given["state_dir"] == compose["state_dir"]


def test_a_push_over_the_network_has_a_channel(model: Path, tmp_path: Path) -> None:
    """A trainer shares no disk with a Pod, and need not share one with compose's server."""
    for given in (*map(flags, WORKLOADS.values()), vars(_parse(SERVER["command"]))):
        asked = {name: given[name] for name in ("weight_channels", "weight_root") if name in given}
        if "weight_root" in asked:
            asked["weight_root"] = tmp_path
        config = Config(model=model, state_dir=tmp_path, **asked).checked()
        assert "http" in config.channels and ("disk" in config.channels) == ("weight_root" in given)


@pytest.mark.parametrize("name", WORKLOADS)
def test_a_pod_has_no_rights_and_writes_to_its_volumes_alone(name: str) -> None:
    pod = WORKLOADS[name]["spec"]["template"]["spec"]
    security = container(WORKLOADS[name])["securityContext"]
    assert security["readOnlyRootFilesystem"] and not security["allowPrivilegeEscalation"]
    assert security["capabilities"] == {"drop": ["ALL"]} and pod["securityContext"]["runAsNonRoot"]
    assert f"--uid {pod['securityContext']['runAsUser']} " in " ".join(all_of("RUN"))
    claims = WORKLOADS[name]["spec"].get("volumeClaimTemplates", [])
    volumes = {volume["name"] for volume in pod["volumes"]} | {
        claim["metadata"]["name"] for claim in claims
    }
    mounts = {each["mountPath"]: each for each in container(WORKLOADS[name])["volumeMounts"]}
    assert {each["name"] for each in mounts.values()} == volumes
    (volume,) = all_of("VOLUME")
    assert {place for place, each in mounts.items() if not each.get("readOnly")} == {volume, "/tmp"}
    given = flags(WORKLOADS[name])
    assert Path(given["api_key_file"]).parent == Path("/etc/tlt") and "/etc/tlt" in mounts
    assert given["state_dir"].startswith(f"{volume}/")
    assert [claim["metadata"]["name"] for claim in claims] == (
        ["state"] if WORKLOADS[name]["kind"] == "StatefulSet" else []
    )


@pytest.mark.parametrize("name", WORKLOADS)
def test_a_server_asks_for_a_gpu_and_ends_after_the_drain(name: str) -> None:
    pod, server = WORKLOADS[name]["spec"]["template"]["spec"], container(WORKLOADS[name])
    limits, requests = server["resources"]["limits"], server["resources"]["requests"]
    assert limits.get("nvidia.com/gpu") == ("1" if name in SERVERS else None)
    assert limits["memory"] == requests["memory"]
    wait_s = server["lifecycle"]["preStop"]["sleep"]["seconds"]
    drain_s = float(flags(WORKLOADS[name])["drain_timeout_s"])
    assert pod["terminationGracePeriodSeconds"] > wait_s + drain_s


@pytest.mark.parametrize("name", WORKLOADS)
def test_probes_ask_the_servers_health_routes(name: str, model: Path) -> None:
    server = container(WORKLOADS[name])
    probes = {kind: server[f"{kind}Probe"] for kind in ("startup", "liveness", "readiness")}
    paths = {kind: probe["httpGet"]["path"] for kind, probe in probes.items()}
    assert paths == {"startup": "/startupz", "liveness": "/livez", "readiness": "/readyz"}
    assert {probe["httpGet"]["port"] for probe in probes.values()} == {"probes"}
    with live_server(model, probe_port=0) as live:
        assert {httpx.get(live.probe_url + path).status_code for path in paths.values()} == {200}
        startup_s = probes["startup"]["periodSeconds"] * probes["startup"]["failureThreshold"]
        assert startup_s >= live.config.startup_timeout_s


def test_services_and_monitor_select_the_pods() -> None:
    (monitor,) = MANIFESTS["podmonitor.yaml"]
    assert monitor["apiVersion"] == "monitoring.coreos.com/v1"
    services = MANIFESTS["service.yaml"]
    for workload in SERVERS.values():
        assert workload["spec"]["selector"]["matchLabels"] == LABELS
        assert workload["spec"]["template"]["metadata"]["labels"] == LABELS
        assert {port["targetPort"] for each in services for port in each["spec"]["ports"]} <= set(
            ports(workload)
        )
        (keys,) = (
            volume["secret"]["secretName"]
            for volume in workload["spec"]["template"]["spec"]["volumes"]
            if "secret" in volume
        )
        (endpoint,) = monitor["spec"]["podMetricsEndpoints"]
        assert endpoint["port"] in ports(workload) and endpoint["path"] == "/metrics"
        assert endpoint["interval"] == "15s" and endpoint["authorization"]["type"] == "Bearer"
        credentials = endpoint["authorization"]["credentials"]
        assert credentials == {"name": keys, "key": Path(flags(workload)["api_key_file"]).name}
    assert {str(each["spec"]["selector"]) for each in services} == {str(LABELS)}
    (selected,) = monitor["spec"]["selector"]["matchExpressions"]
    names = {each["metadata"]["labels"][selected["key"]] for each in WORKLOADS.values()}
    assert (selected["operator"], {*selected["values"]}) == ("In", names)
    assert monitor["spec"]["jobLabel"] in LABELS
    headless = {each["metadata"]["name"] for each in services if "clusterIP" in each["spec"]}
    assert WORKLOADS["statefulset.yaml"]["spec"]["serviceName"] in headless


def test_the_two_workloads_differ_in_their_state_alone() -> None:
    deployment, stateful = (container(each) for each in SERVERS.values())
    assert deployment == stateful
    assert ["state"] == [
        volume["name"]
        for volume in WORKLOADS["deployment.yaml"]["spec"]["template"]["spec"]["volumes"]
        if volume not in WORKLOADS["statefulset.yaml"]["spec"]["template"]["spec"]["volumes"]
    ]
    assert "state" in COMPOSE["volumes"]


def test_gateway_finds_the_links_of_all_replicas() -> None:
    labels = GATEWAY["spec"]["selector"]["matchLabels"]
    assert labels == GATEWAY["spec"]["template"]["metadata"]["labels"] != LABELS
    _, claim, service = MANIFESTS["gateway.yaml"]
    assert service["spec"]["selector"] == labels
    assert {port["targetPort"] for port in service["spec"]["ports"]} <= set(ports(GATEWAY))
    volumes = GATEWAY["spec"]["template"]["spec"]["volumes"]
    claimed = [each["persistentVolumeClaim"] for each in volumes if "persistentVolumeClaim" in each]
    assert claimed == [{"claimName": claim["metadata"]["name"]}]
    given = flags(GATEWAY)
    kind, name, port = given["addresses"].split(":")
    (pods,) = (each for each in MANIFESTS["service.yaml"] if each["metadata"]["name"] == name)
    assert (given["launcher"], kind, pods["spec"]["clusterIP"]) == ("static", "dns", "None")
    assert pods["spec"]["publishNotReadyAddresses"] and pods["spec"]["selector"] == LABELS
    assert {"name": "link", "port": int(port), "targetPort": "link"} in pods["spec"]["ports"]
    stateful = SERVERS["statefulset.yaml"]
    assert stateful["spec"]["serviceName"] == name and ports(stateful)["link"] == int(port)
    assert str(given["link_key_file"]) == flags(stateful)["api_key_file"]


def test_gateway_of_the_manifest_is_accepted(model: Path, tmp_path: Path) -> None:
    (tmp_path / "api_key").write_text("secret scopes=data,link\n")
    places = {"/etc/tlt": tmp_path, "/var/lib/tlt": tmp_path, "/opt/tlt/pair/target": model}
    line = [
        next((word.replace(old, str(new)) for old, new in places.items() if old in word), word)
        for word in container(GATEWAY)["args"]
        if "--drafter" not in word
    ]
    plan = planned(_parse(line))
    assert Static(plan) and plan.key == "secret" and plan.config.channels == ("http",)
