# SPDX-License-Identifier: Apache-2.0
"""An API server with a fake kubelet for tests of the driver `kubernetes`, which have it by the fixture `cluster`."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from headrace.platforms.kubernetes.driver import KubernetesDriver
from headrace.platforms.kubernetes.settings import KubernetesSettings
from support.fake_kubelet import FakeKubelet
from support.kubernetes_server import KubernetesServer


@dataclass
class Platform:
    """A cluster of one node."""

    server: KubernetesServer
    kubelet: FakeKubelet

    def settings(self, **given: Any) -> KubernetesSettings:
        return KubernetesSettings(**{"kubeconfig": str(self.server.kubeconfig), "shm_size": "1Gi", **given})

    def driver(self, **given: Any) -> KubernetesDriver:
        return KubernetesDriver(self.settings(**given))


@contextlib.contextmanager
def with_kubelet(server: KubernetesServer, folder: Path, *, networks: bool = False) -> Iterator[Platform]:
    """Started and stopped."""
    with FakeKubelet(server, folder, networks=networks) as kubelet:
        yield Platform(server, kubelet)
        assert not kubelet.errors, "\n".join(kubelet.errors[:3])
