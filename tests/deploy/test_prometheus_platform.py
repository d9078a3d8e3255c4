# SPDX-License-Identifier: Apache-2.0
"""A real Prometheus loads the alerts, evaluates every dashboard, and gets data from a real server and a real router."""

from __future__ import annotations

import json
import math
import shutil
import subprocess
import threading
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import yaml
from alert_cases import FIRING, HEALTHY
from deploy_files import DASHBOARDS, RULES, Query, alerts, filled_in, queries
from language_model_server import configure, third_parties
from promql_names import legend_labels

from support.llm_models import tiny_llama
from support.ports import free_port
from support.programs import Program
from support.servers import serve_process
from support.tiny_models import CACHED, CONFIG, make_models
from support.waiting import eventually

pytestmark = [pytest.mark.platform, pytest.mark.timeout(900)]

INTERVAL = "10s"
"""Prometheus scrapes every second here."""
WITHOUT_DATA = {
    "server": {
        "Requests refused before a model",  # needs API keys or --max-in-flight
        "Requests by version of a split",
        "Errors by version of a split",
        "Rollbacks by version of a split",
        "Shadow requests by outcome",
        "GPU utilization",
        "GPU memory in use",
        "GPU power",
    },
    "language-models": {
        "Accepted share of drafted tokens by model",  # needs a model that speculates, and text that repeats itself
        "Transferred prompts per second",
        "Transferred bytes per second",
        "Time of a transfer (p95)",
        "Prompts computed without a transfer",
    },
    "router": {
        "Hedged requests by outcome",
        "Requests by revision",
        "Requests that wait in the router",  # needs --max-outstanding or activation
        "Waiting requests that were refused",
        "Cold start",
        "Parts of a cold start (mean)",
        "Prompts by outcome",
    },
    "fleet": {
        "Service active",  # needs activation
        "Starts from zero in the last hour",
        "Cold start by service (p95)",
        "Requests held for a cold start",
        "Requests per second by revision",
        "Error ratio by revision",
        "Rollbacks of model versions",
        # Of the operator, the model agent and the gateway, which do not run here.
        "Reconciliations per second",
        "Duration of a reconciliation",
        "Calls to the API server",
        "Admission reviews",
        "Webhook certificate expires in",
        "Downloads in the last hour",
        "Downloaded bytes per second",
        "Duration of a download",
        "Responses per second by status",
        "Latency of inference requests",
        "Inference requests in flight, and services",
        "Failed reconcile rounds in the last hour",
    },
}
"""Panels about what these programs do not have. Every other panel must show something."""
ECHO = {"inputs": [{"name": "INPUT0", "shape": [1, 4], "datatype": "FP32", "data": [1, 2, 3, 4]}]}
CHAT = {"model": "llama", "messages": [{"role": "user", "content": "hello"}], "max_tokens": 8}


def program(name: str) -> str:
    result = shutil.which(name)
    assert result, f"{name} is not installed: run 'make test-platforms', which installs it"
    return result


class Prometheus:
    """A Prometheus with our rules that scrapes a server and a router."""

    def __init__(self, url: str) -> None:
        self.url = url

    def ask(self, path: str, **query: str) -> Any:
        try:
            with urllib.request.urlopen(f"{self.url}{path}?{urllib.parse.urlencode(query)}", timeout=60) as response:
                return json.load(response)["data"]
        except urllib.error.HTTPError as error:
            raise RuntimeError(f"{query}: {error.read().decode()}") from None

    def query(self, expression: str) -> list[dict[str, str]]:
        """Return the labels of every result that is a number."""
        result = self.ask("/api/v1/query", query=expression)["result"]
        return [item["metric"] for item in result if not math.isnan(float(item["value"][1]))]

    def alert_states(self) -> dict[str, str]:
        rules = [rule for group in self.ask("/api/v1/rules")["groups"] for rule in group["rules"]]
        return {rule["name"]: rule["state"] for rule in rules}


class Site:
    """The running programs."""

    def __init__(self, prometheus: Prometheus, server: Program, router_url: str) -> None:
        self.prometheus = prometheus
        self.server = server
        self.router_url = router_url


@contextmanager
def load(url: str) -> Iterator[None]:
    """Requests to three models, one after the other, until the block ends."""
    stop, failures = threading.Event(), []

    def post(path: str, document: Any) -> None:
        request = urllib.request.Request(
            url + path, json.dumps(document).encode(), {"content-type": "application/json"}
        )
        with urllib.request.urlopen(request, timeout=60) as response:
            response.read()

    def run() -> None:
        try:
            while not stop.wait(0.02):
                post("/v2/models/echo/infer", ECHO)
                post("/v2/models/cached/infer", ECHO)
                post("/v1/chat/completions", CHAT)
        except BaseException as error:
            failures.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join(60)
    assert not failures


def prometheus_config(folder: Path, server: int, router: int) -> Path:
    jobs = [
        {"job_name": "headrace", "static_configs": [{"targets": [f"127.0.0.1:{server}"]}]},
        {
            "job_name": "headrace-router",
            "metrics_path": "/router/metrics",
            "static_configs": [{"targets": [f"127.0.0.1:{router}"]}],
        },
    ]
    config = {
        "global": {"scrape_interval": "1s", "scrape_timeout": "1s", "evaluation_interval": "1s"},
        "rule_files": [str(RULES)],
        "scrape_configs": jobs,
    }
    path = folder / "prometheus.yml"
    path.write_text(yaml.safe_dump(config))
    return path


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    folder = tmp_path_factory.mktemp("site")
    models = make_models(folder / "models", echo=CONFIG, cached=CACHED)
    with third_parties():
        tiny_llama(models / "llama" / "1")
    configure(models / "llama")
    http, metrics, router, own = free_port(), free_port(), free_port(), free_port()
    command = (
        program("prometheus"),
        f"--config.file={prometheus_config(folder, metrics, router)}",
        f"--storage.tsdb.path={folder / 'data'}",
        f"--web.listen-address=127.0.0.1:{own}",
    )
    options = ("--http-port", str(http), "--metrics-port", str(metrics), "--cache-config", "local,size=1048576")
    options += ("--metrics-config", "histogram_latencies=true")  # for the panel of decoupled models
    with (
        serve_process(folder / "server.log", models, *options) as server,
        Program(
            *("router", "--backend", f"http://127.0.0.1:{http}", "--port", str(router)),
            log=folder / "router.log",
            ready="listening on",
        ),
        Program(log=folder / "prometheus.log", command=command, ready="Server is ready to receive web requests"),
    ):
        yield Site(Prometheus(f"http://127.0.0.1:{own}"), server, f"http://127.0.0.1:{router}")


def wrong_legend(query: Query, results: list[dict[str, str]]) -> bool:
    return any(not legend_labels(query.legend) <= labels.keys() for labels in results)


def test_every_dashboard_shows_what_a_server_and_a_router_do(site: Site) -> None:
    every = {query for path in DASHBOARDS for query in queries(path)}
    without_data = {query for query in every if query.panel in WITHOUT_DATA[query.dashboard]}
    assert {
        name: {query.panel for query in without_data if query.dashboard == name} for name in WITHOUT_DATA
    } == WITHOUT_DATA
    wanted = every - without_data
    assert len(wanted) > 80
    with load(site.router_url):

        def ask_for_missing() -> bool:
            for query in sorted(wanted):
                results = site.prometheus.query(filled_in(query.expression, INTERVAL))
                assert not wrong_legend(query, results), query
                if results:
                    wanted.discard(query)
            return not wanted

        eventually(ask_for_missing, within=240, message=lambda: [(query.dashboard, query.panel) for query in wanted])
    shown = {query.panel for query in without_data if site.prometheus.query(filled_in(query.expression, INTERVAL))}
    assert shown == set(), "these have data: remove them from WITHOUT_DATA"


def test_prometheus_evaluates_all_alerts(site: Site) -> None:
    def evaluated() -> list[Any]:
        groups = site.prometheus.ask("/api/v1/rules")["groups"]
        rules = [rule for group in groups for rule in group["rules"]]
        assert all(rule["health"] != "unknown" for rule in rules), rules
        return rules

    rules = eventually(evaluated)
    assert {rule["name"]: (rule["health"], rule.get("lastError")) for rule in rules} == {
        alert["alert"]: ("ok", None) for alert in alerts()
    }


def test_a_stopped_server_raises_alerts_until_it_runs_again(site: Site) -> None:
    down = ("HeadraceServerDown", "HeadraceNoReadyReplica")
    eventually(lambda: all(site.prometheus.alert_states()[name] == "inactive" for name in down))
    site.server.stop()
    eventually(lambda: all(site.prometheus.alert_states()[name] in ("pending", "firing") for name in down))
    (alert,) = [
        alert
        for alert in site.prometheus.ask("/api/v1/alerts")["alerts"]
        if alert["labels"]["alertname"] == "HeadraceServerDown"
    ]
    assert alert["labels"]["severity"] == "critical"
    assert alert["annotations"]["summary"].endswith(" of headrace does not answer Prometheus.")
    site.server.start()
    eventually(lambda: all(site.prometheus.alert_states()[name] == "inactive" for name in down))


def promtool(folder: Path, tests: list[dict[str, Any]]) -> None:
    """Run promtool's unit tests of rules. It compares annotations, too, so they are left out here."""
    rules = yaml.safe_load(RULES.read_text())
    for group in rules["groups"]:
        for rule in group["rules"]:
            del rule["annotations"]
    (folder / "rules.yaml").write_text(yaml.safe_dump(rules))
    file = folder / "tests.yaml"
    file.write_text(yaml.safe_dump({"rule_files": ["rules.yaml"], "evaluation_interval": "1m", "tests": tests}))
    done = subprocess.run([program("promtool"), "test", "rules", file], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def input_series(series: dict[str, str]) -> list[dict[str, str]]:
    return [{"series": name, "values": values} for name, values in series.items()]


def test_promtool_accepts_the_rules() -> None:
    done = subprocess.run([program("promtool"), "check", "rules", RULES], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"{len(alerts())} rules found" in done.stdout


def test_every_alert_has_a_case_in_which_it_fires() -> None:
    assert FIRING.keys() == {alert["alert"] for alert in alerts()}


@pytest.mark.parametrize("name", FIRING)
def test_an_alert_fires(tmp_path: Path, name: str) -> None:
    case = FIRING[name]
    (severity,) = [alert["labels"]["severity"] for alert in alerts() if alert["alert"] == name]
    expected = [{"exp_labels": {**case.labels, "severity": severity}}]
    looks = [{"eval_time": case.at, "alertname": name, "exp_alerts": expected}]
    promtool(tmp_path, [{"interval": "1m", "input_series": input_series(case.series), "alert_rule_test": looks}])


def test_no_alert_fires_for_healthy_programs(tmp_path: Path) -> None:
    looks = [{"eval_time": "100m", "alertname": alert["alert"], "exp_alerts": []} for alert in alerts()]
    promtool(tmp_path, [{"interval": "1m", "input_series": input_series(HEALTHY), "alert_rule_test": looks}])
