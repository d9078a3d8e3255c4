# SPDX-License-Identifier: Apache-2.0
"""A real API server asks our webhooks, over TLS, with certificates that nobody made by hand."""

from __future__ import annotations

import copy
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from support.waiting import eventually

pytestmark = [pytest.mark.platform, pytest.mark.timeout(900)]

SAMPLES = sorted(each.stem for each in (Path(__file__).parents[3] / "headrace/fleet/samples").glob("*.yaml"))


def service(name: str, spec: dict[str, Any]) -> dict[str, Any]:
    return {"apiVersion": "ome.io/v1beta1", "kind": "InferenceService", "metadata": {"name": name}, "spec": spec}


RUNNER = {"runner": {"name": "ome-container", "image": "i:1"}}


@pytest.fixture(scope="module")
def place(site: Any) -> Iterator[Any]:
    """The cluster with the operator's namespace; nothing of ours is left behind in it."""
    from webhook_site import NAMESPACE, forget

    site.server.kubectl("create", "namespace", NAMESPACE, check=False)
    forget(site)
    yield site
    forget(site)


@pytest.fixture(scope="module")
def operator(place: Any) -> Iterator[Any]:
    from webhook_site import Operator, free_port, ready, webhooks_at

    with Operator(place.server.kubeconfig, webhooks_at(free_port())) as running:
        ready(place)
        yield running


def test_a_bad_service_is_refused_with_all_that_is_wrong(operator: Any, clean: Any) -> None:
    bad = service(
        "bad",
        {
            "engine": {**RUNNER, "minReplicas": 5, "maxReplicas": 2, "labels": {"team": "a b"}},
            "router": {"config": {"routing_strategy": "fastest"}},
        },
    )
    said = clean.server.kubectl("apply", "-f", "-", input=yaml.safe_dump(bad), check=False)
    assert "spec.engine.minReplicas" in said and "lower" in said, said
    assert "spec.engine.labels[team]" in said and "spec.router.config[routing_strategy]" in said, said
    assert clean.service("bad") is None
    good = service("good", {"engine": RUNNER})
    clean.apply(good)
    edited = copy.deepcopy(good)
    edited["spec"]["engine"] = {**RUNNER, "canaryTrafficPercent": 30, "minReplicas": 9, "maxReplicas": 3}
    said = clean.server.kubectl("apply", "-f", "-", input=yaml.safe_dump(edited), check=False)
    assert "9 is above maxReplicas" in said.replace("`", ""), said
    assert clean.service("good")["spec"]["engine"]["minReplicas"] == 1


def test_defaults_show_after_apply_and_follow_later_edits(operator: Any, clean: Any) -> None:
    made = service("shown", {"engine": RUNNER})
    clean.apply(made)
    live = clean.service("shown")
    assert live["spec"]["engine"]["minReplicas"] == 1 and live["spec"]["engine"]["maxReplicas"] == 3
    assert live["metadata"]["annotations"]["ome.io/deploymentMode"] == "RawDeployment"
    made["spec"]["engine"] = {**RUNNER, "minReplicas": 5}
    clean.apply(made)
    assert clean.service("shown")["spec"]["engine"]["maxReplicas"] == 5


def test_what_is_not_there_yet_is_warned_of_and_waited_for(operator: Any, clean: Any) -> None:
    from controller_site import until

    path = "/apis/ome.io/v1beta1/namespaces/default/inferenceservices"
    misspelt = clean._client.post(
        path, json=service("early", {"model": {"name": "later"}, "engine": {"minReplica": 2}})
    )
    assert misspelt.status_code == 422 and "did you mean minReplicas?" in misspelt.json()["message"], misspelt.text
    made = service("early", {"model": {"name": "later"}, "engine": {"minReplicas": 2}})
    answer = clean._client.post(path, json=made)
    assert answer.status_code == 201
    warnings = " ".join(answer.headers.get_list("warning"))
    assert "there is no model later" in warnings, warnings
    until(lambda: "there is no model later" in clean.ready("early").get("message", ""))
    model = {"apiVersion": "ome.io/v1beta1", "kind": "BaseModel", "metadata": {"name": "later"}}
    clean.apply({**model, "spec": {"modelFormat": {"name": "safetensors"}, "storage": {"storageUri": "local:///m"}}})
    until(lambda: "there is no model later" not in clean.ready("early").get("message", ""))


def test_other_kinds_are_checked_too(operator: Any, clean: Any) -> None:
    head = {"apiVersion": "ome.io/v1beta1"}
    documents = {
        "spec.modelSizeRange.min": {
            "kind": "ClusterServingRuntime",
            "spec": {"modelSizeRange": {"min": "70B", "max": "7B"}, "containers": []},
        },
        "spec.storage.storageUri": {"kind": "ClusterBaseModel", "spec": {"storage": {"storageUri": "ftp://x/y"}}},
        "spec.endpoint": {
            "kind": "BenchmarkJob",
            "spec": {
                "endpoint": {},
                "task": "text-to-text",
                "maxTimePerIteration": 1,
                "maxRequestsPerIteration": 1,
                "outputLocation": {"storageUri": "pvc://a/b"},
            },
        },
    }
    for field, each in documents.items():
        made = {**head, **each, "metadata": {"name": "wrong"}}
        said = clean.server.kubectl("apply", "-f", "-", input=yaml.safe_dump(made), check=False)
        assert "wrong" in said and field in said and "invalid" in said, said


def test_samples_applied_twice_are_written_once(operator: Any, clean: Any) -> None:
    found = {
        (each["kind"], each["metadata"].get("namespace", "default"), each["metadata"]["name"]): each
        for sample in SAMPLES
        for each in clean.sample(sample)
    }
    everything = yaml.safe_dump_all(found.values())
    services = yaml.safe_dump_all(each for (kind, _, _), each in found.items() if kind == "InferenceService")

    def versions() -> dict[str, str]:
        listed = yaml.safe_load(clean.server.kubectl("get", "-f", "-", "-o", "json", input=everything))
        return {each["metadata"]["uid"]: each["metadata"]["resourceVersion"] for each in listed["items"]}

    for each in found.values():
        if "namespace" in each["metadata"]:
            clean.server.kubectl("create", "namespace", each["metadata"]["namespace"], check=False)
    clean.server.kubectl("apply", "-f", "-", input=everything)
    writes = len(operator.quiet())
    before = versions()
    assert len(before) == len(found)
    said = clean.server.kubectl("apply", "-f", "-", input=everything).splitlines()
    # Lists whose items the schema defaults are sent again by kubectl, which changes nothing.
    again = [each for each in said if each.startswith("inferenceservice")]
    assert len(again) >= 8 and all(each.endswith("unchanged") for each in again), said
    assert len(operator.quiet(1.0)) == writes and versions() == before
    # By the server, too: the first takes the fields over, the second has nothing to do. Meanwhile the operator may write a
    # status, because a new autoscaler reports its first condition only after some seconds.
    apply_on_server = ("apply", "--server-side", "--force-conflicts", "-f", "-")
    clean.server.kubectl(*apply_on_server, input=services)

    def is_written_once() -> bool:
        operator.quiet()
        before = versions()
        clean.server.kubectl(*apply_on_server, input=services)
        operator.quiet(1.0)
        return versions() == before

    eventually(is_written_once)
    clean.server.kubectl("delete", "-f", "-", "--wait=false", input=everything)


def test_while_nothing_happens_nothing_is_written(operator: Any, place: Any) -> None:
    operator.quiet()
    writes = len(operator.writes)
    time.sleep(3)  # six looks
    assert len(operator.writes) == writes


def test_configurations_edited_by_hand_are_restored(operator: Any, place: Any) -> None:
    from controller_site import until
    from webhook_site import CONFIGURATIONS, ready

    place.server.kubectl(
        "patch",
        "validatingwebhookconfigurations/headrace-operator",
        "--type=json",
        '-p=[{"op": "replace", "path": "/webhooks/0/failurePolicy", "value": "Fail"}]',
    )
    until(lambda: place.fetch(CONFIGURATIONS[1])["webhooks"][0]["failurePolicy"] == "Ignore")
    place.server.kubectl("delete", "mutatingwebhookconfigurations/headrace-operator")
    ready(place)
