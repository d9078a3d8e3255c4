# SPDX-License-Identifier: Apache-2.0
"""BenchmarkJobs of this machine: a process that runs once, its status, its results; a real language model answers.

More of them: `test_simulated_benchmarks.py`.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from local_site import LocalSite, document, runtime

from headrace.core.files import read_json
from headrace.fleet.client.contract import kind_named
from headrace.fleet.client.describe import describe
from headrace.platforms.kubernetes_client.objects import Document
from headrace.platforms.processes import read_stat
from support.chat_server import chat_server
from support.serving import Serving
from support.waiting import eventually

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not hasattr(os, "pidfd_open"), reason="needs Linux"),
    pytest.mark.timeout(900),  # it starts many programs, one after the other
]
KIND = kind_named("BenchmarkJob")
ENDLESS = 1_000_000


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Serving]:
    with chat_server(tmp_path_factory.mktemp("models")) as started:
        yield started


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalSite]:
    site = LocalSite(tmp_path_factory.mktemp("benchmarks"))
    site.up()
    site.apply(site.model, runtime())
    yield site
    for benchmark in site.ask(lambda fleet: fleet.list(KIND)):
        remove(site, benchmark["metadata"]["name"])
    site.close()


def benchmark(name: str, endpoint: dict[str, Any], requests: int = 3, **spec: Any) -> dict[str, Any]:
    spec = {
        "endpoint": endpoint,
        "task": "text-to-text",
        "trafficScenarios": ["D(20,4)"],
        "numConcurrency": [1, 2],
        "maxTimePerIteration": 60,
        "maxRequestsPerIteration": requests,
        "outputLocation": {"storageUri": "pvc://results/here"},
        **spec,
    }
    return document("BenchmarkJob", name, spec)


def at(server: Serving) -> dict[str, Any]:
    return {"endpoint": {"url": f"http://127.0.0.1:{server.port}", "modelName": "tiny"}}


def status(site: LocalSite, name: str) -> dict[str, Any]:
    answer = site.ask(lambda fleet: fleet.get(KIND, "default", name))
    return dict((answer or {}).get("status", {}))


def has(site: LocalSite, name: str, state: str) -> dict[str, Any]:
    """Its status, once it has that state; fails at once with what it says if it has failed."""

    def in_state() -> dict[str, Any]:
        reported = status(site, name)
        assert state == "Failed" or reported.get("state") != "Failed", reported
        return reported if reported.get("state") == state else {}

    return eventually(in_state, within=180)


def pid_of(site: LocalSite, name: str) -> int:
    return int((read_json(site.root / "benchmarks" / "default" / name / "process.json") or {}).get("pid", 0))


def lives(pid: int) -> bool:
    stat = read_stat(pid)
    return stat is not None and stat.is_alive


def remove(site: LocalSite, name: str) -> None:
    site.ask(lambda fleet: fleet.delete(document("BenchmarkJob", name, {})))
    eventually(lambda: site.ask(lambda fleet: fleet.get(KIND, "default", name)) is None)


def log_of(site: LocalSite, name: str) -> str:
    ((_, said),) = site.ask(lambda fleet: fleet.logs("default", name, kind="BenchmarkJob"))
    return said


def test_it_measures_and_its_status_names_the_folder(site: LocalSite, server: Serving) -> None:
    site.apply(benchmark("load", at(server), serviceMetadata={"engine": "headrace"}))
    reported = has(site, "load", "Completed")
    assert reported["startTime"] and reported["completionTime"] and reported["observedGeneration"] == 1
    folder = Path(reported["details"].removeprefix("results are in "))
    assert folder == site.root / "claims" / "default" / "results" / "here" / "load"
    results = json.loads((folder / "results.json").read_text())
    assert [(run["concurrency"], run["answered"]) for run in results["runs"]] == [(1, 3), (2, 3)]
    page = (folder / "report.html").read_text()
    assert page.count("<svg") == 5
    assert not any(marker in page for marker in ("src=", "href=", "url(", "@import", "<link", "<script")), (
        "it asks nobody"
    )
    assert "D(20,4)" in log_of(site, "load")
    shown = site.ask(lambda fleet: described(fleet, "load"))
    assert "BenchmarkCompleted" in [event["reason"] for event in shown.as_json()["events"]]
    remove(site, "load")
    assert not (site.root / "benchmarks" / "default" / "load").exists() and (folder / "report.html").exists()


async def described(fleet: Any, name: str) -> Any:
    result: Document = await fleet.get(KIND, "default", name)
    return await describe(fleet, result)


def test_a_restarted_daemon_learns_how_a_benchmark_ended(site: LocalSite, server: Serving) -> None:
    site.apply(benchmark("survivor", at(server)))
    has(site, "survivor", "Running")
    pid = pid_of(site, "survivor")
    site.kill()
    eventually(lambda: (site.root / "benchmarks" / "default" / "survivor" / "exit").exists(), within=180)
    eventually(lambda: not lives(pid))
    site.up()
    assert Path(has(site, "survivor", "Completed")["details"].removeprefix("results are in ")).is_dir()
    assert pid_of(site, "survivor") == pid, "it was not run twice"
    remove(site, "survivor")


def test_what_runs_is_found_again_and_ended_by_its_deletion(site: LocalSite, server: Serving) -> None:
    site.apply(benchmark("endless", at(server), ENDLESS))
    has(site, "endless", "Running")
    pid = pid_of(site, "endless")
    site.kill()
    site.up()
    assert lives(pid) and status(site, "endless")["state"] == "Running"
    remove(site, "endless")
    assert not lives(pid)
