# SPDX-License-Identifier: Apache-2.0
"""The verbs of `headrace` on a fleet of a simulated machine, as their user types them; in real time, in this process."""

from __future__ import annotations

import json
from collections.abc import Iterator
from importlib import resources
from pathlib import Path
from typing import Any

import pytest
import yaml
from local_site import document, runtime, service
from simulated_fleet import SimulatedFleet

from headrace.platforms.kubernetes_client.objects import get_list
from support.programs import run
from support.waiting import eventually

SAMPLES = resources.files("headrace.fleet").joinpath("samples")


class User:
    """Types verbs."""

    def __init__(self, fleet: SimulatedFleet) -> None:
        self.fleet = fleet
        self._environ = {"HEADRACE_STATE_DIR": str(fleet.root)}

    def run(self, *words: str | Path, code: int = 0, given: str = "") -> str:
        """What a verb prints."""
        done = run(*words, env=self._environ, input=given)
        assert done.returncode == code, done.stdout + done.stderr
        return done.stdout + done.stderr

    def apply(self, *documents: Any, code: int = 0) -> str:
        return self.run("apply", "-f", "-", code=code, given="\n---\n".join(map(json.dumps, documents)))


@pytest.fixture(scope="module")
def user(tmp_path_factory: pytest.TempPathFactory) -> Iterator[User]:
    folder = tmp_path_factory.mktemp("fleet")
    fleet = SimulatedFleet(folder, models_root=folder / "models")
    with fleet.in_real_time():
        yield User(fleet)


def test_the_cpu_sample_runs_as_it_is(user: User) -> None:
    (user.fleet.root.parent / "models" / "digits").mkdir(parents=True)
    result = user.run("apply", "-f", str(SAMPLES / "cpu.yaml"), "--wait", "--timeout", "60")
    assert "inferenceservice.ome.io/digits created" in result
    url = result.partition("digits is ready: ")[2].split()[0]
    assert "unchanged" in user.run("apply", "-f", str(SAMPLES / "cpu.yaml"))
    table = user.run("get", "isvc")
    assert url in table and "headrace-cpu" in table and "1/1" in table
    shown = user.run("describe", "isvc", "digits")
    assert "InferenceServiceReady" in shown and f"ask it at {url}" in shown
    assert "listening" in user.run("logs", "digits")
    assert "scaled to 2" in user.run("scale", "digits", "--replicas", "2")
    eventually(lambda: "2/2" in user.run("get", "isvc", "digits"))
    document = json.loads(user.run("get", "isvc", "digits", "-o", "json"))
    assert [condition["type"] for condition in get_list(document, "status", "conditions")] == [
        "Ready",
        "IngressReady",
        "EngineReady",
        "LatestDeploymentReady",
    ]
    assert document["status"]["modelStatus"]["modelCopies"] == {"failedCopies": 0, "totalCopies": 2}
    assert yaml.safe_load(user.run("get", "isvc", "digits", "-o", "yaml"))["status"] == document["status"]
    assert "deleted" in user.run("delete", "isvc", "digits", "--yes")
    assert not list((user.fleet.root / "pods").iterdir())


def test_a_sample_that_needs_a_gpu_reports_it(user: User) -> None:
    (user.fleet.root.parent / "models" / "llama-3-8b-instruct").mkdir(parents=True, exist_ok=True)
    user.run("apply", "-f", str(SAMPLES / "raw.yaml"))
    eventually(lambda: _says_why(user.run("describe", "isvc", "llama-chat")))
    result = user.run("apply", "-f", str(SAMPLES / "raw.yaml"), "--wait", "--timeout", "1", code=1)
    assert _says_why(result), result
    assert "deleted" in user.run("delete", "isvc", "llama-chat", "--yes")


def _says_why(told: str) -> bool:
    return "on this machine 0 are free" in told or "cores, and this machine has" in told


def test_a_rollout_is_shown_undone_and_promoted(user: User) -> None:
    user.apply(user.fleet.model, runtime(), service("birds"))
    eventually(lambda: "1/1" in user.run("get", "isvc", "birds"))
    newer = {"name": "ome-container", "args": ["--port=8080", "--text=canary"]}
    user.apply(service("birds", runner=newer, canaryTrafficPercent=25))
    eventually(lambda: _shares(user) == [25, 75])
    user.run("rollout", "undo", "birds")
    eventually(lambda: _shares(user) == [0, 100])
    user.run("rollout", "promote", "birds")
    eventually(lambda: _shares(user) == [100])
    # After the promotion, an undo returns to the spec before.
    before, promoted = json.loads(user.run("rollout", "history", "birds", "--json"))
    assert (before["revision"], promoted["revision"], promoted["state"]) == (1, 2, "rolled out")
    assert promoted["change"].startswith("engine.runner.") and "--text=canary" in promoted["change"]
    user.run("rollout", "undo", "birds")
    eventually(lambda: [row["revision"] for row in _history(user)] == [2, 3])
    eventually(lambda: _history(user)[-1]["state"] == "rolled out")
    document = json.loads(user.run("get", "isvc", "birds", "-o", "json"))
    assert "runner" not in document["spec"]["engine"]
    assert "engine.runner" in user.run("rollout", "history", "birds")
    user.run("delete", "isvc", "birds", "--yes")


def _history(user: User) -> list[dict[str, Any]]:
    shown: list[dict[str, Any]] = json.loads(user.run("rollout", "history", "birds", "--json"))
    return shown


def _shares(user: User) -> list[int]:
    """Of the revisions, the newest first."""
    shown = json.loads(user.run("rollout", "status", "birds", "--json"))
    return [target["percent"] for target in shown["components"][0]["traffic"]]


def test_a_benchmark(user: User) -> None:
    user.fleet.machine.bench.seconds = 0.1
    results = user.fleet.root.parent / "numbers"
    spec = {
        "endpoint": {"endpoint": {"url": "http://127.0.0.1:9", "modelName": "m"}},
        "task": "text-to-text",
        "trafficScenarios": ["D(20,4)"],
        "numConcurrency": [2],
        "maxTimePerIteration": 1,
        "maxRequestsPerIteration": 4,
        "outputLocation": {"storageUri": f"local://{results}"},
    }
    user.apply(document("BenchmarkJob", "tiny", spec))
    eventually(lambda: "Completed" in user.run("get", "benchmarkjobs", "tiny"))
    assert f"results are in {results}/tiny" in user.run("describe", "benchmarkjob", "tiny")
    assert (results / "tiny" / "results.json").exists()
    assert "D(20,4)" in user.run("logs", "benchmarkjob/tiny")
    assert "deleted" in user.run("delete", "benchmarkjob", "tiny", "--yes")
    assert not list((user.fleet.root / "benchmarks" / "default").iterdir())


def test_mistakes_are_reported_in_a_sentence(user: User, tmp_path: Path) -> None:
    elsewhere = run("get", "isvc", env={"HEADRACE_STATE_DIR": str(tmp_path)})
    assert elsewhere.returncode == 1
    assert "no fleet runs on this machine: start one with `headrace up`" in elsewhere.stderr
    assert "has no pods" in user.run("logs", "nobody", code=1)
    assert "has no engine that runs" in user.run("scale", "nobody", "--replicas", "1", code=1)
    assert "there is no InferenceService nobody" in user.run("bench", "--service", "nobody", code=1)
    assert "add --service" in user.run("bench", "tiny", "-n", "team", code=2)
    assert "spec" in user.apply(document("BenchmarkJob", "b", {}), code=2)


def test_a_second_fleet_in_the_same_folder_is_refused(user: User) -> None:
    second = run("up", "--state-dir", user.fleet.root)
    assert second.returncode == 1 and "a fleet runs in" in second.stdout + second.stderr
