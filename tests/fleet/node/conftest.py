# SPDX-License-Identifier: Apache-2.0
"""One real node for all tests of this folder, with Headrace installed."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest


@pytest.fixture(scope="package")
def bare_node(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    from support.kubernetes_node import KubernetesNode

    with KubernetesNode(tmp_path_factory.mktemp("node") / "n") as node:
        yield node


@pytest.fixture(scope="package")
def site(bare_node: Any) -> Any:
    from node_site import NodeSite

    site = NodeSite(bare_node)
    site.install()
    return site
