# SPDX-License-Identifier: Apache-2.0
"""A service that OME has left with its finalizer can be deleted: the reconciler removes it, and only that one.

Over a real `ApiClient`, whose transport answers in place of an API server.
"""

from __future__ import annotations

import asyncio
import json
from typing import Any, cast

import httpx2
import pytest

from headrace.fleet.cluster.events import EventRecorder
from headrace.fleet.cluster.reconciler import Reconciler
from headrace.fleet.cluster.resources import SERVICES
from headrace.fleet.cluster.view import ClusterView
from headrace.fleet.status.conditions import utc_now
from headrace.platforms.kubernetes_client.api import ApiClient
from headrace.platforms.kubernetes_client.objects import ServedResource


class View:
    """The part of a `ClusterView` that a deletion needs."""

    def __init__(self, service: dict[str, Any]) -> None:
        self._service = service

    def service(self, key: tuple[str, str]) -> dict[str, Any]:
        return self._service

    def served(self, resource: Any) -> ServedResource:
        return ServedResource(SERVICES, "v1beta1")


def reconcile(finalizers: list[str], *, status: int = 200) -> tuple[bool, list[tuple[str, str, Any]]]:
    """What the reconciler returns for a service that is being deleted, and the calls that it makes."""
    calls: list[tuple[str, str, Any]] = []

    def answer(request: httpx2.Request) -> httpx2.Response:
        calls.append((request.method, request.url.path, json.loads(request.content)))
        return httpx2.Response(status, json={"kind": "Status", "code": status} if status >= 400 else {"kind": "x"})

    metadata = {
        "name": "digits",
        "namespace": "default",
        "resourceVersion": "7",
        "deletionTimestamp": "2026-11-17T00:00:00Z",
        "finalizers": finalizers,
    }
    view = cast("ClusterView", View({"kind": "InferenceService", "metadata": metadata, "spec": {}}))

    async def run() -> bool:
        async with httpx2.AsyncClient(transport=httpx2.MockTransport(answer), base_url="http://cluster") as client:
            api = ApiClient(client)
            return await Reconciler(api, view, EventRecorder(api, utc_now)).reconcile(("default", "digits"))

    return asyncio.run(run()), calls


def test_the_finalizer_of_ome_is_removed_and_others_stay() -> None:
    done, calls = reconcile(["example.com/other", "inferenceservice.finalizers"])
    assert done
    ((method, path, body),) = calls
    assert (method, path) == ("PATCH", "/apis/ome.io/v1beta1/namespaces/default/inferenceservices/digits")
    assert body["metadata"] == {"finalizers": ["example.com/other"], "resourceVersion": "7"}


def test_nothing_is_written_where_there_is_none() -> None:
    assert reconcile(["example.com/other"]) == (True, [])


@pytest.mark.parametrize(("status", "done"), [(404, True), (409, False), (500, False)])
def test_a_failed_removal_is_retried_unless_the_service_is_gone(status: int, done: bool) -> None:
    result, calls = reconcile(["inferenceservice.finalizers"], status=status)
    assert len(calls) >= 1 and result is done
