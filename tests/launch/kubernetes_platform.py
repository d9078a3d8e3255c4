# SPDX-License-Identifier: Apache-2.0
"""One API server with a fake kubelet for all tests of the driver `kubernetes`: import the fixtures that you use."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from fake_kubelet import FakeKubelet
from kubernetes_server import KubernetesServer

from headrace.launch.kubernetes.driver import KubernetesDriver
from headrace.launch.kubernetes.settings import KubernetesSettings


@dataclass
class Platform:
    """A cluster of one node."""

    server: KubernetesServer
    kubelet: FakeKubelet

    def settings(self, **given: Any) -> KubernetesSettings:
        return KubernetesSettings(**{"kubeconfig": str(self.server.kubeconfig), "shm_size": "1Gi", **given})

    def driver(self, **given: Any) -> KubernetesDriver:
        return KubernetesDriver(self.settings(**given))


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Platform]:
    folder: Path = tmp_path_factory.mktemp("kubernetes")
    with KubernetesServer(folder / "server") as server, FakeKubelet(server, folder / "kubelet") as kubelet:
        yield Platform(server, kubelet)
        assert not kubelet.errors, "\n".join(kubelet.errors[:3])
