# SPDX-License-Identifier: Apache-2.0
"""The controller on a real API server."""

from __future__ import annotations

from typing import Any

import pytest

pytestmark = [pytest.mark.platform, pytest.mark.timeout(900)]

SAMPLES = (
    "cpu",
    "raw",
    "router",
    "canary",
    "rollout-steps",
    "keda",
    "inference-pool",
    "multi-node",
    "multi-node-ray",
    "prefill-decode",
    "scale-to-zero",
    "serverless",
    "virtual",
)


@pytest.mark.parametrize("name", SAMPLES)
def test_a_sample_is_created_reported_and_left_unchanged(clean: Any, name: str) -> None:
    from controller_site import Running

    documents = clean.sample(name)
    service = documents[-1]["metadata"]["name"]
    with Running(clean.server.kubeconfig) as running:
        clean.apply(*documents)
        running.settle()
        made = clean.children()
        told = clean.service(service)
        assert told["status"]["observedGeneration"] == told["metadata"]["generation"]
        assert clean.ready(service).get("reason") != "ReconcileError", clean.ready(service)
        if name != "virtual":
            assert made, told["status"]
        count = len(running.writes)
        clean.apply(*documents)
        running.settle()
        assert running.writes[count:] == []
        assert clean.children().keys() == made.keys()
    with Running(clean.server.kubeconfig) as again:
        again.settle()
        assert again.writes == []


def test_a_service_becomes_ready_is_edited_repaired_and_deleted(clean: Any) -> None:
    from controller_site import Running, until

    with Running(clean.server.kubeconfig) as running:
        documents = clean.sample("cpu")
        clean.apply(*documents)
        running.settle()
        clean.mark_pods("digits")
        until(lambda: clean.ready("digits").get("status") == "True")
        told = clean.service("digits")["status"]
        assert told["url"].startswith("http://digits.default.")
        assert told["components"]["engine"]["url"] and told["runtime"]["name"]
        until(lambda: "InferenceServiceReady" in [each["reason"] for each in clean.events("digits")])
        running.settle()

        count = len(running.writes)
        documents[-1]["spec"]["engine"]["maxReplicas"] = 7
        clean.apply(*documents)
        running.settle()
        wrote = [each.rsplit("/", 2)[1:] for each in running.writes[count:]]
        assert wrote == [["horizontalpodautoscalers", "digits-engine"], ["digits", "status"]]

        count = len(running.writes)
        clean.server.kubectl("label", "service", "digits-engine", "component=mine", "--overwrite")
        running.settle()
        service = clean.fetch("/api/v1/namespaces/default/services/digits-engine")
        assert service["metadata"]["labels"]["component"] == "engine"
        assert len(running.writes) == count + 1
        clean.server.kubectl("scale", "deployment", "digits-engine", "--replicas=2")
        clean.server.kubectl("delete", "service", "digits-engine")
        until(lambda: clean.fetch("/api/v1/namespaces/default/services/digits-engine"))
        running.settle()
        scaled = clean.fetch("/apis/apps/v1/namespaces/default/deployments/digits-engine")
        assert scaled["spec"]["replicas"] == 2, "whoever scales is not undone"

        clean.server.kubectl("delete", "isvc", "digits")
        until(lambda: not clean.children())
        assert clean.service("digits") is None


def test_a_removed_component_leaves_nothing(clean: Any) -> None:
    from controller_site import Running

    with Running(clean.server.kubeconfig) as running:
        documents = clean.sample("router")
        clean.apply(*documents)
        running.settle()
        before = clean.children()
        assert any("-router" in each for each in before)
        del documents[-1]["spec"]["router"]
        clean.apply(*documents)
        running.settle()
        after = clean.children()
        assert after and not any("-router" in each for each in after)
        assert any("-engine" in each for each in after)


def test_a_canary_is_tried_promoted_and_rolled_back(clean: Any) -> None:
    from controller_site import Running, until

    def deployments() -> dict[str, str]:
        found = clean.fetch("/apis/apps/v1/namespaces/default/deployments?labelSelector=component=engine")["items"]
        return {each["metadata"]["name"]: tried(each) for each in found}

    def tried(deployment: Any) -> str:
        variables = deployment["spec"]["template"]["spec"]["containers"][0]["env"]
        return next(str(each["value"]) for each in variables if each["name"] == "TRY")

    def traffic() -> dict[bool, int]:
        told = clean.service("digits").get("status", {}).get("components", {}).get("engine", {})
        return {each.get("latestRevision", False): each["percent"] for each in told.get("traffic", ())}

    def all_up(look: Any) -> None:
        """Wait for something, with every pod made ready that comes on the way."""

        def seen() -> Any:
            for each in clean.pods("digits"):
                clean.mark_pod(each)
            return look()

        until(seen)

    (model, service) = clean.sample("cpu")
    engine = service["spec"]["engine"]

    def edit(value: str, percent: int | None) -> None:
        engine["runner"] = {"name": "ome-container", "env": [{"name": "TRY", "value": value}]}
        engine.pop("canaryTrafficPercent", None)
        if percent is not None:
            engine["canaryTrafficPercent"] = percent
        clean.apply(model, service)

    with Running(clean.server.kubeconfig) as running:
        edit("one", None)
        all_up(lambda: clean.ready("digits").get("status") == "True")
        edit("two", 20)
        all_up(lambda: traffic() == {True: 20, False: 80})
        assert deployments() == {"digits-engine": "one", "digits-engine-canary": "two"}
        edit("two", None)
        all_up(lambda: deployments() == {"digits-engine": "two"})
        all_up(lambda: traffic() == {True: 100})
        edit("three", 30)
        all_up(lambda: traffic() == {True: 30, False: 70})
        edit("two", None)
        all_up(lambda: deployments() == {"digits-engine": "two"})
        clean.mark_pods("digits")
        running.settle()
        assert clean.ready("digits")["status"] == "True"
