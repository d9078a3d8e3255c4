# SPDX-License-Identifier: Apache-2.0
"""Headrace on a real node: kubelet, scheduler, kube-proxy and containerd, with the image of this repository."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import urllib.request
from pathlib import Path
from typing import Any

import pytest
import yaml

from support.waiting import eventually

pytestmark = [pytest.mark.platform, pytest.mark.node, pytest.mark.worker("node"), pytest.mark.timeout(1800)]


def test_the_image_runs_as_a_pod(bare_node: Any) -> None:
    from node_site import PATIENCE

    from support.node_image import IMAGE

    bare_node.kubectl("run", "one", f"--image={IMAGE}", "--restart=Never", "--", "--version")
    phase = ("get", "pod", "one", "-o", "jsonpath={.status.phase}")
    eventually(lambda: bare_node.kubectl(*phase) == "Succeeded", within=PATIENCE)
    assert bare_node.kubectl("logs", "one").startswith("headrace ")
    bare_node.kubectl("delete", "pod", "one")


def test_a_service_becomes_ready_and_answers_by_its_name(site: Any) -> None:
    from node_site import Clients

    site.service("first", minReplicas=1, maxReplicas=1)
    site.await_ready("first")
    with Clients(site, "first") as clients:
        clients.wait_for(50)
    assert not clients.failed and len(clients.answered) == 2, clients
    # By its name, from another pod of the cluster; and the model that the agent has found on its node.
    script = "import urllib.request as u; print(u.urlopen('http://first.default.svc.cluster.local:8080/v2/models/first').read())"
    pod = site.names("pods", "ome.io/inferenceservice=first")[0]
    assert "PIXELS" in site.node.kubectl("exec", pod, "--", "python3", "-c", script)
    labels = site.get("node", "node1")["metadata"]["labels"]
    assert "Ready" in {value for name, value in labels.items() if name.startswith("models.ome.io/")}
    described = site.headrace("describe", "first", "--kube")
    assert "node1" in described and "headrace-cpu (ClusterServingRuntime)" in described
    site.node.kubectl("delete", "isvc", "first")


def test_no_request_fails_while_a_service_changes(site: Any) -> None:
    """An edit, a canary, its promotion, undo, fewer replicas: clients with and without keep-alive notice nothing."""
    from node_site import PATIENCE, Clients

    def service(revision: str, replicas: int = 2, **engine: Any) -> None:
        site.service("busy", minReplicas=replicas, maxReplicas=replicas, runner=site.runner(revision), **engine)

    service("one")
    site.await_ready("busy")
    with Clients(site, "busy") as clients:
        clients.wait_for(100)
        service("two")
        site.await_revision("busy", "two", 2)
        clients.wait_for(100)
        service("three", canaryTrafficPercent=30)
        eventually(lambda: "30% of 30%" in shares(site), within=PATIENCE, message=lambda: site.state("busy"))
        clients.wait_for(300)
        site.headrace("rollout", "promote", "busy", "--kube")
        site.await_revision("busy", "three", 2)
        clients.wait_for(100)
        site.headrace("rollout", "undo", "busy", "--kube")
        site.await_revision("busy", "two", 2)
        service("two", replicas=1)
        site.await_revision("busy", "two", 1)
        clients.wait_for(100)
    assert not clients.failed, clients
    print(clients)
    site.node.kubectl("delete", "isvc", "busy")
    eventually(lambda: not site.names("pods,services,deployments", "ome.io/inferenceservice=busy"), within=PATIENCE)


def shares(site: Any) -> str:
    return str(site.headrace("rollout", "status", "busy", "--kube"))


def test_a_service_without_requests_has_no_pod_and_a_request_wakes_it(site: Any) -> None:
    from node_site import PATIENCE, REQUEST

    idle = {"ome.io/scale-to-zero-idle-seconds": "3", "ome.io/deploymentMode": "RawDeployment"}
    site.service("sleeper", annotations=idle, minReplicas=0, maxReplicas=1)

    def pods() -> list[str]:
        return list(site.names("pods", "ome.io/inferenceservice=sleeper"))

    for _ in range(2):
        eventually(lambda: site.condition("sleeper") == "True" and not pods(), within=PATIENCE)
        url = f"http://{site.address('sleeper')}:8080/v2/models/sleeper/infer"
        with urllib.request.urlopen(urllib.request.Request(url, REQUEST), timeout=PATIENCE) as answer:
            assert b"PROBABILITIES" in answer.read()
        assert pods()
    site.node.kubectl("delete", "isvc", "sleeper")


def test_a_pod_that_ends_by_itself_says_why(site: Any) -> None:
    from node_site import PATIENCE, SMALL

    def message(name: str) -> str:
        conditions = site.get("inferenceservice", name).get("status", {}).get("conditions", ())
        return " ".join(condition.get("message", "") for condition in conditions if condition["type"] == "Ready")

    site.service("broken", minReplicas=1, maxReplicas=1, runner={**SMALL, "args": ["serve", "/nowhere/at/all"]})
    reason = "'/nowhere/at/all' does not exist"  # the last line of the container's log
    eventually(lambda: reason in message("broken"), within=PATIENCE, message=lambda: site.state("broken"))
    site.node.kubectl("delete", "isvc", "broken")


def test_a_benchmark_job_finds_its_service_by_name_and_says_why_it_failed(site: Any) -> None:
    """The service has no language model, which the job's pod learns from the service itself."""
    from node_site import PATIENCE

    (site.node.folder / "mnt" / "benchmarks").mkdir()
    (site.node.folder / "mnt" / "benchmarks").chmod(0o777)
    site.service("measured", minReplicas=1, maxReplicas=1)
    site.await_ready("measured")
    size, head = {"storage": "1Gi"}, {"accessModes": ["ReadWriteOnce"], "storageClassName": "by-hand"}
    volume = {**head, "capacity": size, "hostPath": {"path": "/mnt/benchmarks"}}
    claim = {**head, "resources": {"requests": size}, "volumeName": "benchmarks"}
    job = {
        "endpoint": {"inferenceService": {"name": "measured", "namespace": "default"}},
        "task": "text-to-text",
        "trafficScenarios": ["D(10,10)"],
        "numConcurrency": [1],
        "maxTimePerIteration": 1,
        "maxRequestsPerIteration": 10,
        "outputLocation": {"storageUri": "pvc://benchmarks/measured"},
    }
    for version, kind, spec in (
        ("v1", "PersistentVolume", volume),
        ("v1", "PersistentVolumeClaim", claim),
        ("ome.io/v1beta1", "BenchmarkJob", job),
    ):
        document = {"apiVersion": version, "kind": kind, "metadata": {"name": "benchmarks"}, "spec": spec}
        site.node.kubectl("apply", "-f", "-", input=yaml.safe_dump(document))
    address = "http://measured.default.svc.cluster.local:8080/v1/models lists no model"
    eventually(
        lambda: address in str(site.get("benchmarkjob", "benchmarks").get("status", {}).get("failureMessage")),
        within=PATIENCE,
        message=lambda: site.state("measured"),
    )
    site.node.kubectl("delete", "isvc/measured", "benchmarkjob/benchmarks", "pvc/benchmarks", "pv/benchmarks")


def test_a_node_whose_starter_is_killed_leaves_nothing_behind(tmp_path: Path) -> None:
    from support.kubernetes_node import SCRIPT

    script = "import subprocess, sys; subprocess.Popen(sys.argv[1:], stdin=subprocess.PIPE).wait()"
    starter = subprocess.Popen([sys.executable, "-c", script, "bash", SCRIPT, "run", tmp_path / "node"])
    eventually((tmp_path / "node" / "kubeconfig").exists, within=400)
    (number,) = re.findall(r"10\.77\.(\d+)\.2", (tmp_path / "node" / "kubeconfig").read_text())
    assert living(tmp_path) and cgroups(number)
    os.kill(starter.pid, signal.SIGKILL)
    starter.wait()
    eventually(lambda: not living(tmp_path))
    eventually(lambda: not cgroups(number))
    assert str(tmp_path) not in Path("/proc/self/mounts").read_text()
    assert not Path(f"/sys/class/net/hr-node{number}").exists()


def cgroups(number: str) -> list[Path]:
    return [*Path("/sys/fs/cgroup").glob(f"*/hr-node{number}"), *Path("/sys/fs/cgroup").glob(f"hr-node{number}")]


def living(folder: Path) -> list[str]:
    """Programs with a folder among their words."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            words = path.read_bytes()
        except OSError:
            continue
        if b"/node" in words and str(folder).encode() in words and b"pytest" not in words.split(b"\0")[0]:
            found.append(words.decode(errors="replace"))
    return found
