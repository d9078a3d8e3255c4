# SPDX-License-Identifier: Apache-2.0
"""Objects that are as planned are not written again, with managed fields as a current API server writes them."""

from __future__ import annotations

from typing import Any

import pytest
from managed_fields import as_applied
from plan_cases import facts, service
from service_server import STATUS, ServiceServer

from headrace.fleet.planning import plan

DEPLOYMENT = "/apis/apps/v1/namespaces/default/deployments/chat-engine"


@pytest.mark.parametrize("spec", [{"engine": {}}, {"engine": {"minReplicas": 0}}, {"engine": {}, "router": {}}])
def test_a_new_leader_writes_nothing(spec: dict[str, Any]) -> None:
    document = service(spec)
    planned = plan(document, facts()).objects
    owned = [as_applied(each, f"u{number}") for number, each in enumerate(planned)]
    first = ServiceServer(document, owned)
    assert first.reconcile() == [True]
    assert first.writes == [f"PATCH {STATUS}"], "the status alone, which had not been written"
    second = ServiceServer({**document, "status": first.statuses[0]}, owned)
    assert second.reconcile() == [True]
    assert second.writes == []


def test_a_new_deployment_is_applied_once() -> None:
    document = service({"engine": {}})
    server = ServiceServer(document)
    server.reconcile()
    assert server.writes.count(f"PATCH {DEPLOYMENT}") == 1
    # The Deployment's controller adds an annotation, and the API server its managed fields.
    planned = plan(document, facts()).objects
    server.view._owned = [as_applied(each, f"u{number}") for number, each in enumerate(planned)]
    server.reconcile()
    assert server.writes.count(f"PATCH {DEPLOYMENT}") == 1


def test_an_edited_deployment_is_corrected() -> None:
    document = service({"engine": {}})
    owned = [as_applied(each, f"u{number}") for number, each in enumerate(plan(document, facts()).objects)]
    (engine,) = (each for each in owned if each["kind"] == "Deployment")
    engine["spec"]["template"]["spec"]["containers"][0]["image"] = "edited:1"
    server = ServiceServer(document, owned)
    server.reconcile()
    assert [each for each in server.writes if each != f"PATCH {STATUS}"] == [f"PATCH {DEPLOYMENT}"]
