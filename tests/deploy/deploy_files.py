# SPDX-License-Identifier: Apache-2.0
"""The dashboards of `deploy/grafana` and the alerts of `deploy/prometheus`, read from their files."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import yaml

ROOT = Path(__file__).parents[2]
DASHBOARDS = sorted((ROOT / "deploy" / "grafana").glob("*.json"))
RULES = ROOT / "deploy" / "prometheus" / "rules.yaml"
_GRAFANA_VARIABLE = re.compile(r"\$(\w+)")


class Query(NamedTuple):
    """One expression of one panel."""

    dashboard: str
    panel: str
    expression: str
    legend: str


def dashboard(path: Path) -> dict[str, Any]:
    document: dict[str, Any] = json.loads(path.read_text())
    return document


def panels(document: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return all panels but the headings of rows."""
    return [panel for panel in document["panels"] if panel["type"] != "row"]


def queries(path: Path) -> Iterator[Query]:
    for panel in panels(dashboard(path)):
        for target in panel["targets"]:
            yield Query(path.stem, panel["title"], target["expr"], target["legendFormat"])


def variables(document: Mapping[str, Any]) -> dict[str, str]:
    """Return the query of each variable but the data source."""
    listed = document["templating"]["list"]
    return {row["name"]: row["query"]["query"] for row in listed if row["type"] == "query"}


def filled_in(expression: str, interval: str = "1m") -> str:
    """Return an expression as Grafana sends it if All is chosen for every variable."""
    values = {"__rate_interval": interval}
    return _GRAFANA_VARIABLE.sub(lambda match: values.get(match[1], ".*"), expression)


def used_variables(expression: str) -> set[str]:
    return set(_GRAFANA_VARIABLE.findall(expression)) - {"__rate_interval"}


def alerts() -> list[dict[str, Any]]:
    return [rule for group in yaml.safe_load(RULES.read_text())["groups"] for rule in group["rules"]]
