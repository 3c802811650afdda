"""The board and the alerts ask for what the server exposes, by names and labels; the operators'
page lists every metric and alert.
"""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import httpx
import pytest
import yaml
from prometheus_client.parser import text_string_to_metric_families

from tests.frontend.board import BOARD, DOCKER, PANELS, RULES, asked, board_expressions, in_legend
from tests.frontend.live_server import live_server
from tests.processes import completed
from tests.tools import require
from tlt_client import Client
from tlt_client.rpc import GetInfoRequest, RolloutServiceStub
from tlt_client.wire import ReplicaStatus
from tlt_server.wire.events import BufferReport
from tlt_server.wire.training import Judged, SpotReport

PAGE = DOCKER.parent / "docs" / "operators.md"
TARGET_LABELS = {"job", "instance"}  # added by Prometheus itself
JUDGED = Judged(
    candidate=1,
    target_version="v1",
    drafter_version="d1",
    outcome="no_gain",
    ms_per_token=1.5,
    ms_per_token_before=1.8,
    accepted_at_depth=[0.9],
)
TRAINED = SpotReport(candidate=JUDGED, loss_at_depth=[0.5], refused={"no_gain": 1})
OWN = {"up": set[str]()}  # made by Prometheus itself


@pytest.fixture(scope="module")
def families(model: Path) -> Iterator[list[Any]]:
    """Yield the metrics of a server that has served, refused, taken a push, and trained."""
    with (
        live_server(model, grpc_port=0) as server,
        Client(server.url) as client,
        grpc.insecure_channel(server.grpc_address) as channel,
    ):
        RolloutServiceStub(channel).GetInfo(GetInfoRequest())
        client.generate([{"prompt": "abc"}], sampling={"max_tokens": 9})
        client.update_weights("p", "v1", role="target")
        server.engine.weights = type(server.engine.weights)(target="v1", drafter="d1")
        client.weights()
        httpx.post(f"{server.url}/generate", content=b"{")
        training = server.service.metrics.training
        server.call(lambda: training.took(TRAINED))
        samples = server.service.metrics.samples
        server.call(lambda: samples.took(BufferReport(tokens_by_version={"v1": 9})))
        fleet = server.service.metrics.fleet
        server.call(lambda: fleet.watch(lambda: [ReplicaStatus(name="a", state="ready")]))
        text = client.metrics()
    yield list(text_string_to_metric_families(text))


@pytest.fixture(scope="module")
def exposed(families: list[Any]) -> dict[str, set[str]]:
    """Sample name -> its labels."""
    found = dict(OWN)
    for family in families:
        for sample in family.samples:
            found.setdefault(sample.name, set()).update(sample.labels)
    return found


EXPRESSIONS = board_expressions() | {f"alert {rule['alert']}": rule["expr"] for rule in RULES}


@pytest.mark.parametrize("place", EXPRESSIONS)
def test_board_metrics_and_labels_exist(place: str, exposed: dict[str, set[str]]) -> None:
    wanted = asked(EXPRESSIONS[place])
    assert wanted.metrics
    for name, labels in wanted.metrics.items():
        assert name in exposed, f"{name} is not exposed"
        assert labels <= exposed[name] | TARGET_LABELS, name
    assert wanted.labels <= set().union(*(exposed[name] for name in wanted.metrics)) | TARGET_LABELS


def test_promql_parser_finds_names_labels_and_groups() -> None:
    wanted = asked(
        'a{x="$instance"} / on (i) group_left () '
        'sum by (le) (rate(b{y!="1"}[$__rate_interval])) > 3'
    )
    assert wanted.metrics == {"a": {"x"}, "b": {"y"}} and wanted.labels == {"i", "le"}


@pytest.mark.parametrize("panel", PANELS, ids=lambda panel: panel["title"])
def test_every_panel_has_a_title_a_description_and_a_unit(
    panel: dict[str, Any], exposed: dict[str, set[str]]
) -> None:
    assert panel["title"] and len(panel["description"]) > 20
    assert panel["fieldConfig"]["defaults"]["unit"]
    assert panel["datasource"] == {"type": "prometheus", "uid": "tlt-prometheus"}
    assert panel["targets"]
    for target in panel["targets"]:
        labels = set().union(*(exposed[name] for name in asked(target["expr"]).metrics))
        assert in_legend(target["legendFormat"]) <= labels | TARGET_LABELS
        assert "$instance" in target["expr"], "the board's choice of servers applies to every panel"


def test_panels_are_unique_and_do_not_overlap() -> None:
    assert len({panel["title"] for panel in PANELS}) == len(PANELS) > 30
    assert len({panel["id"] for panel in BOARD["panels"]}) == len(BOARD["panels"])
    cells: set[tuple[int, int]] = set()
    for panel in BOARD["panels"]:
        place = panel["gridPos"]
        own = {
            (x, y)
            for x in range(place["x"], place["x"] + place["w"])
            for y in range(place["y"], place["y"] + place["h"])
        }
        assert max(x for x, _ in own) < 24 and not own & cells, panel["title"]
        cells |= own


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule["alert"])
def test_every_alert_has_severity_summary_and_runbook(rule: dict[str, Any]) -> None:
    assert rule["labels"]["severity"] in ("critical", "warning", "info")
    assert "{{" in rule["annotations"]["summary"]
    page, _, anchor = rule["annotations"]["runbook_url"].partition("#")
    assert DOCKER.parent / page == PAGE
    assert anchor == rule["alert"].lower() and anchor in anchors(PAGE.read_text())


def anchors(markdown: str) -> set[str]:
    headings = re.findall(r"^#+ (.*)$", markdown, re.MULTILINE)
    return {re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings}


def test_docs_name_only_existing_metrics(exposed: dict[str, set[str]]) -> None:
    named = {
        name
        for page in PAGE.parent.glob("*.md")
        for name in re.findall(r"\btlt_[a-z_]+[a-z]\b(?![./*])", page.read_text())
    } - {"tlt_server", "tlt_kernels", "tlt_client", "tlt_rollouts"}
    assert len(named) >= 10
    assert named - set(exposed) == set()


@pytest.mark.parametrize(
    "arguments",
    [["check", "rules", "docker/alerts.yml"], ["test", "rules", "tests/frontend/alerts_test.yml"]],
)
def test_promtool_accepts_the_rules(arguments: list[str]) -> None:
    require("promtool")
    done = completed(["promtool", *arguments], cwd=DOCKER.parent)
    assert done.returncode == 0, done.stdout + done.stderr


def test_every_alert_is_tested() -> None:
    cases = yaml.safe_load(Path(__file__).with_name("alerts_test.yml").read_text())["tests"]
    fires = {
        case["alertname"]
        for test in cases
        for case in test["alert_rule_test"]
        if case.get("exp_alerts")
    }
    stays = {
        case["alertname"]
        for test in cases
        for case in test["alert_rule_test"]
        if not case.get("exp_alerts")
    }
    assert fires == stays == {rule["alert"] for rule in RULES}
