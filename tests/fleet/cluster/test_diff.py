# SPDX-License-Identifier: Apache-2.0
"""Whether an apply would change anything."""

from __future__ import annotations

import copy
from typing import Any

import pytest
from managed_fields import as_applied
from plan_cases import facts, service

from headrace.fleet.cluster.diff import contains, differs, digest, quantity
from headrace.fleet.cluster.webhooks.registration import configurations
from headrace.fleet.cluster.webhooks.settings import WebhookSettings
from headrace.fleet.planning import plan

WANTED: dict[str, Any] = {
    "apiVersion": "apps/v1",
    "kind": "Deployment",
    "metadata": {"name": "a", "labels": {"app": "a"}},
    "spec": {
        "template": {
            "spec": {
                "hostNetwork": False,
                "containers": [
                    {
                        "name": "main",
                        "image": "one:1",
                        "env": [{"name": "A", "value": ""}, {"name": "B", "value": "b"}],
                        "resources": {"limits": {"cpu": "1000m", "memory": "1024Mi", "nvidia.com/gpu": 1}},
                        "ports": [{"containerPort": 80, "protocol": "TCP"}],
                    }
                ],
            }
        }
    },
}
OWNED: dict[str, Any] = {
    "f:metadata": {"f:labels": {"f:app": {}}},
    "f:spec": {
        "f:template": {
            "f:spec": {
                "f:containers": {
                    'k:{"name":"main"}': {
                        ".": {},
                        "f:name": {},
                        "f:image": {},
                        "f:env": {
                            'k:{"name":"A"}': {".": {}, "f:name": {}},
                            'k:{"name":"B"}': {".": {}, "f:name": {}, "f:value": {}},
                        },
                        "f:resources": {"f:limits": {"f:cpu": {}, "f:memory": {}, "f:nvidia.com/gpu": {}}},
                        "f:ports": {
                            'k:{"containerPort":80,"protocol":"TCP"}': {"f:containerPort": {}, "f:protocol": {}}
                        },
                    }
                }
            }
        }
    },
}


def live() -> dict[str, Any]:
    """As an API server would have it: defaults filled in, values in its own way, a sidecar of somebody else."""
    made = copy.deepcopy(WANTED)
    made["metadata"] |= {
        "uid": "u",
        "resourceVersion": "7",
        "managedFields": [{"manager": "headrace-operator", "operation": "Apply", "fieldsV1": OWNED}],
    }
    pod = made["spec"]["template"]["spec"]
    del pod["hostNetwork"]
    pod["restartPolicy"] = "Always"
    main = pod["containers"][0]
    main["env"] = [{"name": "A"}, {"name": "B", "value": "b"}]
    main["resources"] = {"limits": {"cpu": "1", "memory": "1Gi", "nvidia.com/gpu": "1"}}
    main["imagePullPolicy"] = "IfNotPresent"
    pod["containers"].insert(0, {"name": "sidecar", "image": "proxy"})
    made["status"] = {"replicas": 1}
    return made


def test_an_object_in_the_desired_state_is_not_written() -> None:
    assert not differs(WANTED, live())


def _image(made: Any) -> None:
    made["spec"]["template"]["spec"]["containers"][1]["image"] = "two:2"


def _label(made: Any) -> None:
    del made["metadata"]["labels"]["app"]


def _variable(made: Any) -> None:
    made["spec"]["template"]["spec"]["containers"][1]["env"].pop()


def _nobody(made: Any) -> None:
    made["metadata"]["managedFields"] = [{"manager": "kubectl", "operation": "Apply", "fieldsV1": {}}]


def _once_ours(made: Any) -> None:
    fields = copy.deepcopy(OWNED)
    fields["f:spec"]["f:paused"] = {}
    made["metadata"]["managedFields"][0]["fieldsV1"] = fields


def _once_our_port(made: Any) -> None:
    fields = copy.deepcopy(OWNED)
    main = fields["f:spec"]["f:template"]["f:spec"]["f:containers"]['k:{"name":"main"}']
    main["f:ports"]['k:{"containerPort":90,"protocol":"TCP"}'] = {".": {}}
    made["metadata"]["managedFields"][0]["fieldsV1"] = fields


def _theirs(made: Any) -> None:
    """Edited there and back: nothing in it tells, but it is no longer ours."""
    fields = copy.deepcopy(OWNED)
    del fields["f:spec"]["f:template"]["f:spec"]["f:containers"]['k:{"name":"main"}']["f:image"]
    made["metadata"]["managedFields"][0]["fieldsV1"] = fields


@pytest.mark.parametrize("change", [_theirs, _image, _label, _variable, _nobody, _once_ours, _once_our_port])
def test_a_foreign_change_is_seen(change: Any) -> None:
    made = live()
    change(made)
    assert differs(WANTED, made)


OWNER = {"apiVersion": "v1", "kind": "Namespace", "name": "headrace-system", "uid": "n1"}


def test_owner_references_as_current_servers_write_them() -> None:
    """As a whole, `k:{"uid": ...}: {}`; older ones list their fields."""
    wanted = {**WANTED, "metadata": {**WANTED["metadata"], "ownerReferences": [OWNER]}}
    made = as_applied(wanted)
    fields = made["metadata"]["managedFields"][1]["fieldsV1"]
    assert fields["f:metadata"]["f:ownerReferences"] == {'k:{"uid":"n1"}': {}}
    assert not differs(wanted, made)
    other = {**OWNER, "uid": "n2"}
    assert differs({**wanted, "metadata": {**wanted["metadata"], "ownerReferences": [other]}}, made)
    assert differs(WANTED, made), "an owner that is no longer wanted"
    made["metadata"]["ownerReferences"] = [{**OWNER, "name": "edited"}]
    assert differs(wanted, made)
    older = as_applied(wanted)
    item = {".": {}, **{f"f:{name}": {} for name in OWNER}}
    older["metadata"]["managedFields"][1]["fieldsV1"]["f:metadata"]["f:ownerReferences"] = {'k:{"uid":"n1"}': item}
    assert not differs(wanted, older)
    del item["f:uid"]
    assert differs(wanted, older), "somebody else has taken it over"


def test_webhook_configurations_are_written_once() -> None:
    settings = WebhookSettings(address="0.0.0.0:9443", namespace="headrace-system")
    for wanted in configurations(settings, "authority", {"metadata": {"uid": "n1"}}):
        assert not differs(wanted, as_applied(wanted))


@pytest.mark.parametrize("runtime", ["plain", "routed", "groups"])
@pytest.mark.parametrize("engine", [{}, {"minReplicas": 0}, {"annotations": {"a/b": "c"}, "timeoutSeconds": 9}])
def test_no_planned_object_differs_from_itself(engine: dict[str, Any], runtime: str) -> None:
    spec: dict[str, Any] = {"engine": engine} | ({"router": {}} if runtime != "plain" else {})
    made = plan(service(spec, runtime=runtime), facts())
    assert made.objects and not made.problems
    for document in made.objects:
        assert not differs(document, as_applied(document)), document["kind"]


def test_fields_written_by_the_server_are_not_a_change() -> None:
    one, two = live(), live()
    two["metadata"]["resourceVersion"] = "8"
    two["status"] = {"replicas": 2}
    assert digest(one) == digest(two)
    two["spec"]["paused"] = True
    assert digest(one) != digest(two)


@pytest.mark.parametrize(
    ("one", "two", "same"),
    [
        ("1", "1000m", True),
        (1, "1", True),
        ("1Gi", "1024Mi", True),
        ("1G", "1Gi", False),
        ("0.5", "500m", True),
        ("a", "b", False),
        (True, 1, False),
        (1, True, False),
        ("true", True, False),
        (["a"], ["a", "b"], False),
        (["a", "b"], ["b", "a"], False),
        ({}, [], False),
    ],
)
def test_values_in_the_servers_own_way(one: Any, two: Any, same: bool) -> None:
    assert contains({"resources": {"cpu": one}}, {"resources": {"cpu": two}}) is same


def test_elsewhere_a_text_is_a_text() -> None:
    assert not contains({"value": "1"}, {"value": "1.0"})
    assert not contains({"value": "8k"}, {"value": "8000"})


def test_text_that_is_not_a_number_is_not_a_quantity() -> None:
    for each in ("", "Gi", "x1", "nan", "inf", None, "--1", "1e9999999999"):
        assert quantity(each) is None or quantity(each).is_finite()  # type: ignore[union-attr]
