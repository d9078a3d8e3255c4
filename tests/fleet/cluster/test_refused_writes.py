# SPDX-License-Identifier: Apache-2.0
"""A write that the API server refuses shows in the status of its service, with the server's reason."""

from __future__ import annotations

from dataclasses import replace

import pytest
from plan_cases import facts, service
from service_server import ServiceServer

from headrace.fleet.documents import ClusterFacts
from headrace.platforms.kubernetes_client.objects import get_str

DEPLOYMENT = "/apis/apps/v1/namespaces/default/deployments/chat-engine"
UNKNOWN = (
    "failed to create typed patch object (default/chat-engine; apps/v1, Kind=Deployment): "
    ".spec.template.spec.minReplica: field not declared in schema"
)


def misspelt() -> ClusterFacts:
    """A runtime that was applied without the webhooks, with a misspelt field in its pod."""
    cluster = facts()
    (plain, *others) = cluster.runtimes
    config = {**plain["spec"]["engineConfig"], "minReplica": 1}
    changed = {**plain, "spec": {**plain["spec"], "engineConfig": config}}
    return replace(cluster, runtimes=(changed, *others))


@pytest.mark.parametrize("code", [400, 422, 500])
def test_an_unknown_field_in_the_pods_shows_in_the_status(code: int) -> None:
    server = ServiceServer(service({"engine": {}}), cluster=misspelt())
    server.refused[DEPLOYMENT] = code, UNKNOWN
    assert server.reconcile(2) == [False, False]
    assert server.ready["status"] == "False" and server.ready["reason"] == "ReconcileError"
    assert ".spec.template.spec.minReplica: field not declared in schema" in server.ready["message"]
    assert "change the field named there" in server.ready["message"]


@pytest.mark.parametrize("code", [429, 500, 503])
def test_an_error_that_passes_does_not(code: int) -> None:
    server = ServiceServer(service({"engine": {}}))
    server.refused[DEPLOYMENT] = code, "etcdserver: request timed out"
    assert server.reconcile() == [False]
    assert server.statuses == []
    server.refused.clear()
    assert server.reconcile() == [True]
    assert server.ready["reason"] != "ReconcileError"


def test_a_server_that_errs_again_and_again_is_quoted_until_it_does_not() -> None:
    server = ServiceServer(service({"engine": {}}))
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
    server = ServiceServer(document, [old])
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
    server = ServiceServer(document, owned)
    server.refused[f"{DEPLOYMENT}/scale"] = 403, 'User "x" cannot patch resource "deployments/scale"'
    assert server.reconcile() == [False]
    assert "refuses to scale Deployment chat-engine" in get_str(server.ready, "message")
