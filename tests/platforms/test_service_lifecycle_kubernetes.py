# SPDX-License-Identifier: Apache-2.0
"""`headrace service` on a real Kubernetes API server; its pods are run by a fake kubelet, each in a network of its own."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from kubernetes_platform import Platform, with_kubelet
from service_lifecycle import PROGRAM, SECRET, Shell, run_lifecycle, write_architecture

from support.kubernetes_server import KubernetesServer

pytestmark = pytest.mark.platform


@pytest.fixture
def cluster(kubernetes: KubernetesServer, tmp_path: Path) -> Iterator[Platform]:
    before = _links()
    with with_kubelet(kubernetes, tmp_path / "kubelet", networks=True) as started:
        yield started
    assert not _links() - before


def _links() -> set[str]:
    reported = subprocess.check_output(["ip", "-o", "link", "show", "type", "veth"], text=True)
    return {line.split(":")[1] for line in reported.splitlines()}


def test_three_services_from_start_to_stop(cluster: Platform, tmp_path: Path) -> None:
    write_architecture(tmp_path, [sys.executable, str(PROGRAM)], "example/service:1")
    arguments = ["--arch", "show", "--architectures", "architectures", "--model-path", "/models/it's a model"]
    arguments += ["--platform", "kubernetes", "--num-gpus", "2"]
    environ = {"KUBECONFIG": str(cluster.server.kubeconfig)}
    shell = Shell(tmp_path, environ, chat=True, words=arguments)
    shown: list[str] = []

    def kill(row: dict[str, object]) -> None:
        kubectl = cluster.server.kubectl
        shown.append(kubectl("get", "jobs,pods,services,events,configmaps", "-A", "-o", "yaml"))
        [pod] = kubectl("get", "pods", "-l", f"headrace-job={row['job_id']}", "-o", "name").split()
        cluster.kubelet.kill(pod.removeprefix("pod/"))

    started = run_lifecycle(shell, kill=kill, resources=cluster.server.resources, logged="serving /models/it's a model")
    for row in started:
        assert row["namespace"] == "default" and row["job_id"] in row["platform_job_id"]
    assert all(row["job_id"] in shown[0] for row in started) and SECRET not in shown[0]
