"""Reads the board and the alerts under docker/, and what their PromQL asks for."""

import json
import re
from pathlib import Path
from typing import Any, NamedTuple

import promql_parser
import yaml

DOCKER = Path(__file__).parents[2] / "docker"
BOARD: dict[str, Any] = json.loads((DOCKER / "grafana" / "boards" / "tlt.json").read_text())
PANELS: list[dict[str, Any]] = [panel for panel in BOARD["panels"] if panel["type"] != "row"]
RULES: list[dict[str, Any]] = [
    rule
    for group in yaml.safe_load((DOCKER / "alerts.yml").read_text())["groups"]
    for rule in group["rules"]
]


class Asked(NamedTuple):
    """The metrics and labels that an expression uses."""

    metrics: dict[str, set[str]]  # sample name -> labels that its selectors match on
    labels: set[str]  # labels in its groupings and joins


def plain(expression: str, *, instance: str = ".*", interval: str = "1m") -> str:
    """PromQL, with Grafana's variables filled in."""
    return expression.replace("$instance", instance).replace("$__rate_interval", interval)


def board_expressions() -> dict[str, str]:
    """Map the place of each expression to its text."""
    found = {
        f"{panel['title']} {target['refId']}": target["expr"]
        for panel in PANELS
        for target in panel["targets"]
    }
    return found | {
        f"annotation {entry['name']}": entry["expr"] for entry in BOARD["annotations"]["list"]
    }


def titles_in(row: str) -> set[str]:
    """Return the titles of a row's panels."""
    found: dict[str, set[str]] = {}
    titles = found.setdefault("", set())
    for panel in BOARD["panels"]:
        if panel["type"] == "row":
            titles = found.setdefault(panel["title"], set())
        titles.add(panel["title"])
    return found[row] - {row}


def asked(expression: str) -> Asked:
    metrics: dict[str, set[str]] = {}
    labels: set[str] = set()
    for node in nodes(promql_parser.parse(plain(expression))):
        if isinstance(node, promql_parser.VectorSelector):
            metrics.setdefault(node.name, set()).update(
                matcher.name for matcher in node.matchers.matchers
            )
        modifier = getattr(node, "modifier", None)
        if isinstance(node, promql_parser.AggregateExpr) and modifier is not None:
            labels.update(modifier.labels)
        if (
            isinstance(node, promql_parser.BinaryExpr)
            and modifier is not None
            and modifier.matching is not None
        ):
            labels.update(modifier.matching.labels)
    return Asked(metrics, labels)


def nodes(expression: promql_parser.Expr) -> list[promql_parser.Expr]:
    found: list[promql_parser.Expr] = []
    promql_parser.walk(expression, pre_visit=found.append)
    return found


def in_legend(legend: str) -> set[str]:
    return set(re.findall(r"{{\s*(\w+)\s*}}", legend))
