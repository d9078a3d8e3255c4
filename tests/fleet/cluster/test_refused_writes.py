# SPDX-License-Identifier: Apache-2.0
"""A write that the API server refuses shows in the status of its service, with the server's reason.

Over a real `ApiClient`, whose transport answers in place of an API server.
"""

from __future__ import annotations

import asyncio
import json
from dataclasses import replace
from typing import Any, cast

import httpx2
import pytest
from plan_cases import facts, service

from headrace.fleet.cluster.events import EventRecorder
from headrace.fleet.cluster.reconciler import Reconciler
from headrace.fleet.cluster.view import ClusterView
from headrace.fleet.documents import ClusterFacts
from headrace.fleet.status.conditions import utc_now
from headrace.platforms.kubernetes_client.api import ApiClient
from headrace.platforms.kubernetes_client.objects import ServedResource, get_str

DEPLOYMENT = "/apis/apps/v1/namespaces/default/deployments/chat-engine"
STATUS = "/apis/ome.io/v1beta1/namespaces/default/inferenceservices/chat/status"
UNKNOWN = (
    "failed to create typed patch object (default/chat-engine; apps/v1, Kind=Deployment): "
    ".spec.template.spec.minReplica: field not declared in schema"
)


class View:
    """The part of a `ClusterView` that a service needs."""

    def __init__(self, document: dict[str, Any], owned: list[dict[str, Any]], cluster: ClusterFacts) -> None:
        self._document = document
        self._owned = owned
        self.facts = cluster

    def service(self, key: tuple[str, str]) -> dict[str, Any]:
        return self._document

    def owned(self, document: dict[str, Any]) -> list[dict[str, Any]]:
        return self._owned

    def pods(self, document: dict[str, Any]) -> list[dict[str, Any]]:
        return []

    def served(self, resource: Any) -> ServedResource:
        return ServedResource(resource, resource.versions[0])

    def put(self, resource: Any, document: dict[str, Any]) -> None:
        if resource.kind == "InferenceService":
            self._document = document


class Server:
    """Answers writes as they come, but for those of some paths, which it refuses."""

    def __init__(
        self, document: dict[str, Any], owned: list[dict[str, Any]] | None = None, cluster: ClusterFacts | None = None
    ) -> None:
        self.refused: dict[str, tuple[int, str]] = {}
        self.document = document
        self.view = View(document, owned or [], cluster or facts())
        self.statuses: list[dict[str, Any]] = []

    def answer(self, request: httpx2.Request) -> httpx2.Response:
        path = request.url.path
        if request.method == "GET":
            return httpx2.Response(404, json={"kind": "Status", "code": 404})
        if path in self.refused:
            code, message = self.refused[path]
            return httpx2.Response(code, json={"kind": "Status", "code": code, "message": message})
        body = json.loads(request.content)
        if path == STATUS:
            self.statuses.append(body["status"])
            body = {**self.document, "status": body["status"]}
        return httpx2.Response(200, json=body)

    def reconcile(self, times: int = 1) -> list[bool]:
        async def run() -> list[bool]:
            transport = httpx2.MockTransport(self.answer)
            async with httpx2.AsyncClient(transport=transport, base_url="http://cluster") as client:
                api = ApiClient(client)
                reconciler = Reconciler(api, cast("ClusterView", self.view), EventRecorder(api, utc_now))
                return [await reconciler.reconcile(("default", "chat")) for _ in range(times)]

        return asyncio.run(run())

    @property
    def ready(self) -> dict[str, Any]:
        conditions = self.statuses[-1]["conditions"]
        return cast("dict[str, Any]", next(each for each in conditions if each["type"] == "Ready"))


def misspelt() -> ClusterFacts:
    """A runtime that was applied without the webhooks, with a misspelt field in its pod."""
    cluster = facts()
    (plain, *others) = cluster.runtimes
    config = {**plain["spec"]["engineConfig"], "minReplica": 1}
    changed = {**plain, "spec": {**plain["spec"], "engineConfig": config}}
    return replace(cluster, runtimes=(changed, *others))


@pytest.mark.parametrize("code", [400, 422, 500])
def test_an_unknown_field_in_the_pods_shows_in_the_status(code: int) -> None:
    server = Server(service({"engine": {}}), cluster=misspelt())
    server.refused[DEPLOYMENT] = code, UNKNOWN
    assert server.reconcile(2) == [False, False]
    assert server.ready["status"] == "False" and server.ready["reason"] == "ReconcileError"
    assert ".spec.template.spec.minReplica: field not declared in schema" in server.ready["message"]
    assert "change the field named there" in server.ready["message"]


@pytest.mark.parametrize("code", [429, 500, 503])
def test_an_error_that_passes_does_not(code: int) -> None:
    server = Server(service({"engine": {}}))
    server.refused[DEPLOYMENT] = code, "etcdserver: request timed out"
    assert server.reconcile() == [False]
    assert server.statuses == []
    server.refused.clear()
    assert server.reconcile() == [True]
    assert server.ready["reason"] != "ReconcileError"


def test_a_server_that_errs_again_and_again_is_quoted_until_it_does_not() -> None:
    server = Server(service({"engine": {}}))
    server.refused[DEPLOYMENT] = 500, "failed calling webhook policy.example.com: connection refused"
    server.reconcile(3)
    assert "failed calling webhook policy.example.com" in server.ready["message"]
    server.refused.clear()
    assert server.reconcile() == [True]
    assert server.ready["reason"] != "ReconcileError"


def test_a_refused_deletion_shows_in_the_status() -> None:
    old = {
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "metadata": {"name": "old", "namespace": "default", "uid": "u2"},
    }
    document = service({"engine": {}})
    server = Server(document, [old])
    server.refused["/api/v1/namespaces/default/configmaps/old"] = 403, 'User "x" cannot delete resource "configmaps"'
    assert server.reconcile() == [False]
    assert "refuses to delete ConfigMap old" in server.ready["message"]
    assert "grant the operator that permission" in server.ready["message"]


def test_a_refused_scale_up_shows_in_the_status() -> None:
    document = service({"engine": {"minReplicas": 2}})
    named = {"namespace": "default", "labels": {}}
    owned = [
        {"apiVersion": "apps/v1", "kind": "Deployment", "metadata": {"name": name, "uid": name, **named}, "spec": spec}
        for name, spec in (("chat-engine", {"replicas": 0}), ("chat-front", {"replicas": 1}))
    ]
    server = Server(document, owned)
    server.refused[f"{DEPLOYMENT}/scale"] = 403, 'User "x" cannot patch resource "deployments/scale"'
    assert server.reconcile() == [False]
    assert "refuses to scale Deployment chat-engine" in get_str(server.ready, "message")
