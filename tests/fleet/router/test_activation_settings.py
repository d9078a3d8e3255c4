# SPDX-License-Identifier: Apache-2.0
"""The section `activation` of a router's file, and the scaler of the Kubernetes API server."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx2
import orjson
import pytest

from headrace.cli.router_settings import router_settings
from headrace.core.errors import InvalidArgument
from headrace.fleet.router.proxy import RouterProxy
from headrace.fleet.router.scale_targets import ReplicaCounts, ScalerError
from headrace.fleet.router.settings import RPS, ActivationSettings, ScaleTarget, TargetScale
from headrace.platforms.kubernetes_client.api import ApiClient
from headrace.programs.router_scalers import KubernetesScaler

_FILE = """
backends: [http://chat-engine.default:8080]
activation:
  idle_seconds: 60
  held_bytes: 1000
  targets:
    - {kind: Deployment, apiVersion: apps/v1, namespace: prod, name: chat-engine}
    - apiVersion: leaderworkerset.x-k8s.io/v1
      kind: LeaderWorkerSet
      name: lws-chat-decoder
      scale: {metric: rps, target: 2.5, most: 4}
"""


def test_the_contents_of_the_file(tmp_path: Path) -> None:
    path = tmp_path / "router.yaml"
    path.write_text(_FILE)
    assert router_settings({}, str(path)).router.activation == ActivationSettings(
        (
            ScaleTarget("chat-engine", namespace="prod"),
            ScaleTarget(
                "lws-chat-decoder",
                kind="LeaderWorkerSet",
                api_version="leaderworkerset.x-k8s.io/v1",
                scale=TargetScale(RPS, 2.5, 4),
            ),
        ),
        idle_seconds=60,
        held_bytes=1000,
    )


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("activation: yes please\n", "router.yaml:1: activation has names and values: idle_seconds"),
        ("activation:\n  idle_seconds: 3\n", "router.yaml:2: activation needs targets"),
        ("activation:\n  targets: chat\n", "router.yaml:2: activation.targets is a list"),
        ("activation:\n  targets:\n    - chat\n", "router.yaml:3: a target has names and values"),
        ("activation:\n  targets:\n    - {kind: Deployment}\n", "router.yaml:3: a target needs a name"),
        ("activation:\n  targets:\n    - {name: a/../b}\n", "Kubernetes names"),
        ("activation:\n  targets:\n    - {name: 7}\n", "router.yaml:3: name is a string"),
        ("activation:\n  targets: [{name: a}, {name: a}]\n", "a target twice"),
        ("activation:\n  targets: [{name: a, name: b}]\n", "name is set twice"),
        ("activation:\n  sleep: 3\n", "router.yaml:2: activation has no 'sleep'; there are idle_seconds"),
        ("activation:\n  idle_seconds: 0\n  targets: [{name: a}]\n", "idle_seconds is at least"),
        (
            "activation:\n  idle_seconds: .inf\n  targets: [{name: a}]\n",
            "router.yaml:2: activation.idle_seconds is a n",
        ),
        ("activation:\n  held_requests: 1.5\n  targets: [{name: a}]\n", "held_requests is a whole number"),
        ("activation:\n  wait_seconds: true\n  targets: [{name: a}]\n", "wait_seconds is a number"),
        (
            "activation:\n  targets:\n    - name: a\n      scale: {metric: cpu, target: 1, most: 1}\n",
            "router.yaml:4: sca",
        ),
        ("activation:\n  targets: [{name: a, scale: {metric: rps, target: 0, most: 1}}]\n", "a target over 0"),
    ],
)
def test_mistakes_are_reported_with_their_line(text: str, says: str, tmp_path: Path) -> None:
    path = tmp_path / "router.yaml"
    path.write_text(text)
    with pytest.raises(InvalidArgument, match=says):
        router_settings({"backends": ["http://a:1"]}, str(path))


def test_without_a_scaler_the_router_does_not_start(tmp_path: Path) -> None:
    path = tmp_path / "router.yaml"
    path.write_text(_FILE)
    with pytest.raises(InvalidArgument, match="scaler"):
        RouterProxy(router_settings({}, str(path)).router)


def scaler(answer: Callable[[httpx2.Request], httpx2.Response]) -> KubernetesScaler:
    client = httpx2.AsyncClient(base_url="https://api", transport=httpx2.MockTransport(answer))
    return KubernetesScaler(ApiClient(client))


def _deployment(wanted: int, ready: int) -> dict[str, Any]:
    return {"spec": {"replicas": wanted}, "status": {"readyReplicas": ready} if ready else {}}


def test_a_deployment_is_followed_by_its_name_alone() -> None:
    requests: list[httpx2.Request] = []

    def answer(request: httpx2.Request) -> httpx2.Response:
        requests.append(request)
        if "watch" not in request.url.params:
            return httpx2.Response(200, json={"metadata": {"resourceVersion": "7"}, "items": [_deployment(1, 0)]})
        events = [("MODIFIED", _deployment(1, 1)), ("DELETED", _deployment(1, 1)), ("ERROR", {"code": 410})]
        lines = [orjson.dumps({"type": kind, "object": found}) for kind, found in events]
        return httpx2.Response(200, content=b"\n".join(lines))

    async def follow() -> list[ReplicaCounts]:
        return [item async for item in scaler(answer).watch(ScaleTarget("chat", namespace="prod"))]

    assert asyncio.run(follow()) == [ReplicaCounts(1, 0), ReplicaCounts(1, 1), ReplicaCounts(0, 0)]
    assert {request.url.path for request in requests} == {"/apis/apps/v1/namespaces/prod/deployments"}
    assert {request.url.params["fieldSelector"] for request in requests} == {"metadata.name=chat"}
    assert requests[1].url.params["resourceVersion"] == "7"


def test_a_number_is_written_to_the_scale_alone() -> None:
    requests: list[httpx2.Request] = []

    def answer(request: httpx2.Request) -> httpx2.Response:
        requests.append(request)
        return httpx2.Response(200, json={})

    target = ScaleTarget("lws", kind="LeaderWorkerSet", api_version="leaderworkerset.x-k8s.io/v1")
    asyncio.run(scaler(answer).scale(target, 3))
    [request] = requests
    path = "/apis/leaderworkerset.x-k8s.io/v1/namespaces/default/leaderworkersets/lws/scale"
    assert (request.method, request.url.path) == ("PATCH", path)
    assert orjson.loads(request.content) == {"spec": {"replicas": 3}}
    assert request.headers["content-type"] == "application/merge-patch+json"


@pytest.mark.parametrize(
    ("answer", "says"),
    [
        (lambda request: httpx2.Response(403, json={"message": "secret"}), "bind a Role"),
        (lambda request: httpx2.Response(404, text="no"), "deleted"),
        (lambda request: httpx2.Response(500, text="secret"), "answered 500"),
        (lambda request: httpx2.Response(200, text="<html>"), "does not answer"),
        (lambda request: httpx2.Response(200, json=[1]), "does not answer"),
        (lambda request: (_ for _ in ()).throw(httpx2.ConnectError("secret")), "does not answer"),
    ],
)
def test_failures_are_reported_in_our_own_text(answer: Any, says: str) -> None:
    with pytest.raises(ScalerError, match=says) as failed:
        asyncio.run(scaler(answer).replicas(ScaleTarget("chat")))
    assert "secret" not in str(failed.value)
