# SPDX-License-Identifier: Apache-2.0
"""One API server for all tests of the controller: it takes longer to start than any of them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest


@pytest.fixture(scope="package")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    from controller_site import Site, install

    from support.kubernetes_server import KubernetesServer

    with KubernetesServer(tmp_path_factory.mktemp("controller") / "server") as server:
        install(server)
        site = Site(server)
        site.runtimes()
        yield site
        site.close()


@pytest.fixture
def clean(site: Any) -> Iterator[Any]:
    from controller_site import until

    yield site
    site.server.kubectl("delete", "isvc,basemodels.ome.io,benchmarkjobs.ome.io", "--all")
    site.server.kubectl("delete", "clusterbasemodels.ome.io", "--all")
    until(lambda: not site.children())  # the first time the collector learns the kinds
    until(lambda: not site.fetch("/apis/batch/v1/jobs?labelSelector=benchmark")["items"])
    until(lambda: not site.fetch("/api/v1/pods")["items"])
