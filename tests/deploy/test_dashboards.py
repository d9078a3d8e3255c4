# SPDX-License-Identifier: Apache-2.0
"""Dashboards and alerts use metrics and labels that Headrace emits, and are complete."""

from __future__ import annotations

import re
import shutil
import urllib.request
from pathlib import Path
from typing import Any

import pytest
from deploy_files import (
    DASHBOARDS,
    ROOT,
    alerts,
    dashboard,
    filled_in,
    panels,
    queries,
    used_variables,
    variables,
)
from emitted_metrics import emitted
from prometheus_client.parser import text_string_to_metric_families
from promql_names import Use, annotation_labels, legend_labels, output_labels, uses, variable_use

from headrace.cli.commands import SECTIONS
from headrace.cli.root import load_command
from support.programs import Program, run_script

each_dashboard = pytest.mark.parametrize("path", DASHBOARDS, ids=[path.stem for path in DASHBOARDS])
each_alert = pytest.mark.parametrize("alert", alerts(), ids=[alert["alert"] for alert in alerts()])


def problems(found: list[Use]) -> list[str]:
    """What of these is not emitted."""
    unknown = [f"no metric {use.series}" for use in found if use.series not in emitted()]
    known = [use for use in found if use.series in emitted()]
    return unknown + [
        f"{use.series} has no label {label}" for use in known for label in sorted(use.labels - emitted()[use.series])
    ]


def test_the_files_are_up_to_date_with_the_tables() -> None:
    result = run_script(ROOT / "scripts" / "generate_dashboards.py", "--check")
    assert result.returncode == 0, result.stdout + result.stderr
    assert [path.name for path in DASHBOARDS] == ["fleet.json", "language-models.json", "router.json", "server.json"]


def test_a_dashboard_that_was_edited_is_noticed(tmp_path: Path) -> None:
    script = tmp_path / "scripts" / "generate_dashboards.py"
    script.parent.mkdir()
    for name in ("generate_dashboards.py", "generated_files.py"):
        shutil.copy(ROOT / "scripts" / name, script.parent)
    shutil.copytree(ROOT / "deploy" / "grafana", tmp_path / "deploy" / "grafana")
    edited = tmp_path / "deploy" / "grafana" / "server.json"
    edited.write_text(edited.read_text().replace("Servers up", "Up"))
    result = run_script(script, "--check")
    assert (result.returncode, "server.json" in result.stdout, "router.json" in result.stdout) == (1, True, False)
    assert run_script(script).returncode == 0
    assert edited.read_bytes() == (ROOT / "deploy" / "grafana" / "server.json").read_bytes()


@each_dashboard
def test_a_dashboard_uses_metrics_and_labels_that_exist(path: Path) -> None:
    results = {query: problems(uses(filled_in(query.expression))) for query in queries(path)}
    assert len(results) > 10
    assert {query.panel: wrong for query, wrong in results.items() if wrong} == {}
    requests = {name: problems([variable_use(filled_in(query))]) for name, query in variables(dashboard(path)).items()}
    assert {name: wrong for name, wrong in requests.items() if wrong} == {}


@each_dashboard
def test_a_legend_has_labels_that_the_expression_keeps(path: Path) -> None:
    for query in queries(path):
        kept = output_labels(filled_in(query.expression), emitted())
        assert legend_labels(query.legend) <= kept, query


@each_dashboard
def test_variables_are_declared_and_used(path: Path) -> None:
    document = dashboard(path)
    declared = [variable["name"] for variable in document["templating"]["list"]]
    assert declared[0] == "datasource" and len(set(declared)) == len(declared)
    own_uses = [used_variables(query) for query in variables(document).values()]
    used = set().union(*(used_variables(query.expression) for query in queries(path)), *own_uses)
    assert used == set(declared) - {"datasource"}
    for place, names in enumerate(own_uses, 1):
        assert names <= set(declared[1:place]), f"{declared[place]} uses a variable that comes later"


@each_dashboard
def test_every_panel_has_a_title_a_unit_and_an_expression(path: Path) -> None:
    document = dashboard(path)
    assert document["uid"] and document["title"].startswith("Headrace / ") and document["schemaVersion"] == 39
    for panel in panels(document):
        assert panel["title"] and panel["fieldConfig"]["defaults"]["unit"], panel
        assert panel["targets"] and all(target["expr"] for target in panel["targets"]), panel
        assert {target["datasource"]["uid"] for target in panel["targets"]} == {"${datasource}"}
        several = len(panel["targets"]) > 1
        assert all(not several or target["legendFormat"] != "__auto" for target in panel["targets"]), panel["title"]
    titles = [panel["title"] for panel in panels(document)]
    assert len(set(titles)) == len(titles)


@each_dashboard
def test_panels_do_not_overlap(path: Path) -> None:
    taken: set[tuple[int, int]] = set()
    for panel in dashboard(path)["panels"]:
        grid = panel["gridPos"]
        cells = {(grid["x"] + x, grid["y"] + y) for x in range(grid["w"]) for y in range(grid["h"])}
        assert not cells & taken, panel["title"]
        assert grid["x"] + grid["w"] <= 24, panel["title"]
        taken |= cells


def test_ids_are_unique() -> None:
    documents = [dashboard(path) for path in DASHBOARDS]
    assert len({document["uid"] for document in documents}) == len(documents)
    assert len({document["title"] for document in documents}) == len(documents)
    for document in documents:
        ids = [panel["id"] for panel in document["panels"]]
        assert len(set(ids)) == len(ids), document["uid"]


@each_alert
def test_an_alert_uses_metrics_and_labels_that_exist(alert: dict[str, Any]) -> None:
    assert problems(uses(alert["expr"])) == []
    texts = " ".join(alert["annotations"].values())
    assert annotation_labels(texts) <= output_labels(alert["expr"], emitted())


@each_alert
def test_an_alert_says_what_happened_and_what_to_do(alert: dict[str, Any]) -> None:
    assert alert["alert"].startswith("Headrace")
    assert alert["labels"]["severity"] in ("critical", "warning")
    summary, description = alert["annotations"]["summary"], alert["annotations"]["description"]
    assert summary.endswith(".") and description.endswith(".")
    assert annotation_labels(summary), "the summary names no job, instance or model"


def test_alerts_have_names_of_their_own() -> None:
    names = [alert["alert"] for alert in alerts()]
    assert len(set(names)) == len(names) > 20


def test_the_commands_in_alerts_exist() -> None:
    verbs = {verb.name: verb for verbs in SECTIONS.values() for verb in verbs}
    commands = [
        line for alert in alerts() for line in re.findall(r"`headrace ([^`]+)`", alert["annotations"]["description"])
    ]
    assert len(commands) > 4
    for words in map(str.split, commands):
        command = load_command(verbs[words[0]])
        subcommands = getattr(command, "commands", None)
        assert subcommands is None or words[1] in subcommands, words


def test_panels_that_alerts_name_exist() -> None:
    titles = {panel["title"] for path in DASHBOARDS for panel in dashboard(path)["panels"]}
    named = [title for alert in alerts() for title in re.findall(r'"([^"]+)"', alert["annotations"]["description"])]
    assert len(named) > 4
    assert set(named) <= titles


def test_all_series_of_a_scrape_are_among_those_we_compare_with(session_server: Program) -> None:
    with urllib.request.urlopen(f"{session_server.url}/metrics", timeout=60) as response:
        text = response.read().decode()
    # The parser adds `_total` to counters without it.
    written = set(re.findall(r"^([a-zA-Z_:][\w:]*)", text, re.MULTILINE))
    names = set()
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            name = sample.name if sample.name in written else sample.name.removesuffix("_total")
            names.add(name)
            assert name in emitted(), name
            assert sample.labels.keys() <= emitted()[name], sample
    assert "nv_inference_request_histogram_us_bucket" in names and len(names) > 30


@pytest.mark.parametrize(
    ("expression", "wrong"),
    [
        ("sum(rate(nv_inference_request_sucess[5m]))", ["no metric nv_inference_request_sucess"]),
        ("sumup(up)", ["no metric sumup"]),
        ("nv_inference_request_histogram_us", ["no metric nv_inference_request_histogram_us"]),
        ('up{model="m"} == 0', ["up has no label model"]),
        ("sum by (model) (rate(process_cpu_seconds_total[5m]))", ["process_cpu_seconds_total has no label model"]),
        ("max by (job) (sum by (job, reason) (up))", ["up has no label reason"]),
        ("up / on (job, instance) up + time() - 1e6", []),
    ],
)
def test_a_wrong_name_or_label_is_found(expression: str, wrong: list[str]) -> None:
    assert problems(uses(expression)) == wrong


def test_a_label_that_an_inner_aggregation_drops_is_found() -> None:
    with pytest.raises(AssertionError, match="drops"):
        uses("max by (job) (sum by (instance) (up))")
