# SPDX-License-Identifier: Apache-2.0
"""A reconciler of one service over a real `ApiClient`, whose transport answers in place of an API server."""

from __future__ import annotations

import asyncio
import json
from typing import Any, cast

import httpx2
from plan_cases import facts

from headrace.fleet.cluster.events import EventRecorder
from headrace.fleet.cluster.reconciler import Reconciler
from headrace.fleet.cluster.view import ClusterView
from headrace.fleet.documents import ClusterFacts
from headrace.fleet.status.conditions import utc_now
from headrace.platforms.kubernetes_client.api import ApiClient
from headrace.platforms.kubernetes_client.objects import ServedResource

STATUS = "/apis/ome.io/v1beta1/namespaces/default/inferenceservices/chat/status"


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

    def activator_for(self, document: dict[str, Any]) -> None:
        return None

    def put(self, resource: Any, document: dict[str, Any]) -> None:
        if resource.kind == "InferenceService":
            self._document = document


class ServiceServer:
    """An API server with one service: it takes writes as they come, but for those of some paths, which it refuses."""

    def __init__(
        self, document: dict[str, Any], owned: list[dict[str, Any]] | None = None, cluster: ClusterFacts | None = None
    ) -> None:
        self.refused: dict[str, tuple[int, str]] = {}
        self.document = document
        self.view = View(document, owned or [], cluster or facts())
        self.statuses: list[dict[str, Any]] = []
        self.writes: list[str] = []

    def answer(self, request: httpx2.Request) -> httpx2.Response:
        path = request.url.path
        if request.method == "GET":
            return httpx2.Response(404, json={"kind": "Status", "code": 404})
        if path in self.refused:
            code, message = self.refused[path]
            return httpx2.Response(code, json={"kind": "Status", "code": code, "message": message})
        body = json.loads(request.content)
        self.writes.append(f"{request.method} {path}")
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
