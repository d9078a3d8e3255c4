# SPDX-License-Identifier: Apache-2.0
"""Pods of a real API server as backends, found with no more rights than to list pods."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from typing import Any

import pytest
from routing import ask, routing

from headrace.fleet.router.settings import DiscoverySettings
from support.serving import echo_site, serving
from support.waiting import eventually

pytestmark = pytest.mark.platform


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    from support.kubernetes_server import KubernetesServer

    with KubernetesServer(tmp_path_factory.mktemp("pods") / "server") as made:
        yield made


def _pod(name: str, port: int) -> str:
    return json.dumps(
        {
            "apiVersion": "v1",
            "kind": "Pod",
            "metadata": {"name": name, "labels": {"app": "chat"}},
            "spec": {"containers": [{"name": "main", "image": "none", "ports": [{"containerPort": port}]}]},
        }
    )


def test_pods_are_added_and_removed(server: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KUBECONFIG", str(server.kubeconfig_of_nobody()))
    server.kubectl("create", "role", "router", "--verb=list", "--resource=pods")
    server.kubectl("create", "rolebinding", "router", "--role=router", "--user=nobody")
    settings = DiscoverySettings(pods="app=chat", namespace="default", interval_seconds=0.1)
    with serving(echo_site()) as one, serving(echo_site()) as two, routing(discovery=settings) as router:

        def urls() -> list[str]:
            return [backend.name for backend in router.proxy.backends.all]

        ready = {"phase": "Running", "podIP": "127.0.0.1", "conditions": [{"type": "Ready", "status": "True"}]}
        assert ask(router.port, "GET", "/hello").status == 503
        for name, item in (("one", one), ("two", two)):
            server.kubectl("create", "-f", "-", input=_pod(name, item.port))
        threading.Event().wait(0.3)
        assert not urls(), "they are not ready"
        server.mark("one", ready)
        eventually(lambda: urls() == [f"http://127.0.0.1:{one.port}"])
        assert ask(router.port, "GET", "/hello").body == b"hello"
        server.mark("two", ready)
        eventually(lambda: len(urls()) == 2)
        server.kubectl("delete", "pod", "one", "--wait=false")
        eventually(lambda: urls() == [f"http://127.0.0.1:{two.port}"])
        # Without rights, what was found goes on counting.
        server.kubectl("delete", "rolebinding", "router")
        eventually(lambda: router.proxy._discoverer.failures())  # type: ignore[union-attr]
        failures = router.proxy._discoverer.failures()  # type: ignore[union-attr]
        assert "bind a Role with list of pods" in next(iter(failures.values()))
        assert ask(router.port, "GET", "/hello").body == b"hello"
