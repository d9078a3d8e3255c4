# SPDX-License-Identifier: Apache-2.0
"""`import launched_programs` works from here, and in what is started; and the real platforms, one of each for a whole run.

Platforms are imported when they are asked for: most tests need none.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from docker_platform import DockerEngine
    from kubernetes_platform import Platform
    from slurm_platform import Cluster

    from support.kubernetes_server import KubernetesServer

# Before anybody imports it: its tests are those of every driver, and tell what differed.
pytest.register_assert_rewrite("driver_contract", "service_lifecycle")


def pytest_itemcollected(item: pytest.Item) -> None:
    """Mark those tests of a driver's contract as slow that its class does not name as quick."""
    quick = getattr(getattr(item, "cls", None), "quick_tests", None)
    if quick is not None and getattr(item, "originalname", "") not in quick:
        item.add_marker(pytest.mark.slow)


@pytest.fixture(scope="session")
def engine() -> Iterator[DockerEngine]:
    """A Docker engine with an image of the tests' own."""
    from docker_platform import docker_engine

    with docker_engine() as started:
        yield started


@pytest.fixture(scope="session")
def slurm() -> Iterator[Cluster]:
    """A Slurm of one node."""
    from slurm_platform import cluster

    with cluster() as started:
        yield started


@pytest.fixture(scope="session")
def kubernetes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[KubernetesServer]:
    """An API server with its controllers."""
    from support.kubernetes_server import KubernetesServer

    with KubernetesServer(tmp_path_factory.mktemp("kubernetes")) as started:
        yield started


@pytest.fixture(scope="module")
def cluster(kubernetes: KubernetesServer, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Platform]:
    """The API server with a fake kubelet, which is there for one module only: it looks at its pods without a pause."""
    from kubernetes_platform import with_kubelet

    with with_kubelet(kubernetes, tmp_path_factory.mktemp("kubelet")) as started:
        yield started
