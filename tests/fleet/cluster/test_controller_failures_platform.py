# SPDX-License-Identifier: Apache-2.0
"""The controller on a real API server, when things go wrong: killed, cut off, refused, in the way of others."""

from __future__ import annotations

from typing import Any

import pytest

pytestmark = [pytest.mark.platform, pytest.mark.timeout(900)]


def test_killed_between_any_two_writes_it_converges(clean: Any) -> None:
    """A kill after a read is one after the write before it: nothing else outlives the process."""
    from controller_site import Running, until

    clean.apply(*clean.sample("scale-to-zero"))
    for _ in range(40):
        with Running(clean.server.kubeconfig, writes=1) as running:
            until(lambda running=running: running.dead or running.controller.settled)
            if not running.dead:
                break
    else:
        raise AssertionError("it never came to an end")
    # What the cluster's own controllers made of it meanwhile.
    with Running(clean.server.kubeconfig) as rest:
        rest.settle()
    with Running(clean.server.kubeconfig) as last:
        last.settle()
        assert last.writes == []
    told = clean.service("llama-sleeper")
    assert told["status"]["observedGeneration"] == told["metadata"]["generation"]
    made = set(clean.children())
    clean.server.kubectl("delete", "isvc", "--all")
    until(lambda: not clean.children())
    with Running(clean.server.kubeconfig) as whole:
        clean.apply(*clean.sample("scale-to-zero"))
        whole.settle()
    assert set(clean.children()) == made


def test_an_invalid_service_is_reported_and_the_others_continue(clean: Any) -> None:
    from controller_site import Running, until

    good, bad = clean.sample("cpu"), clean.sample("raw")
    with Running(clean.server.kubeconfig) as running:
        clean.apply(*good, bad[-1])
        running.settle()
        said = clean.ready("llama-chat")
        assert said["status"] == "False" and said["reason"] == "BaseModelNotFound", said
        assert "llama-3-8b-instruct" in said["message"]
        assert [each["type"] for each in clean.events("llama-chat")] == ["Warning"]
        made = clean.children()
        assert made and not any("llama-chat" in each for each in made)
        # The model comes: nobody has to touch the service.
        clean.apply(*bad)
        until(lambda: any("Deployment" in each and "llama-chat" in each for each in clean.children()))
        running.settle()
        # And what ran goes on when the service is edited to something that cannot be.
        made = clean.children()
        bad[-1]["spec"]["runtime"] = {"name": "no-such-runtime"}
        clean.apply(bad[-1])
        until(lambda: clean.ready("llama-chat").get("reason") == "RuntimeNotRecognized")
        running.settle()
        assert clean.children().keys() == made.keys()


def test_an_object_of_another_owner_is_not_adopted(clean: Any) -> None:
    from controller_site import Running, until

    mine = {"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": "modelconfig-digits"}, "data": {"a": "b"}}
    clean.apply(mine)
    (model, service) = clean.sample("cpu")
    with Running(clean.server.kubeconfig) as running:
        clean.apply(model)  # else the service may be seen before its model, and is told of that first
        running.settle()
        clean.apply(service)
        said = until(lambda: clean.ready("digits"))
        assert said["reason"] == "ReconcileError" and "modelconfig-digits exists" in said["message"], said
        kept = clean.fetch("/api/v1/namespaces/default/configmaps/modelconfig-digits")
        assert kept["data"] == {"a": "b"}
        clean.server.kubectl("delete", "configmap", "modelconfig-digits")
        until(lambda: clean.ready("digits").get("reason") != "ReconcileError")


def test_kinds_that_are_added_and_removed(clean: Any) -> None:
    from controller_site import FOREIGN, Running, until

    (ray,) = [each for each in FOREIGN if each.capability == "ray"]
    *models, service = clean.sample("multi-node-ray")
    clean.take(ray)
    with Running(clean.server.kubeconfig) as running:
        clean.apply(*models)  # else the service may be seen before its model, and is told of that first
        running.settle()
        clean.apply(service)
        said = until(lambda: clean.ready(service["metadata"]["name"]))
        assert said["status"] == "False" and "KubeRay" in said["message"], said
        clean.bring(ray)
        until(lambda: any(each.startswith("RayCluster") for each in clean.children()))
        running.settle()


def test_a_runtime_is_edited(clean: Any) -> None:
    from controller_site import Running, until

    def image(name: str) -> str:
        found = clean.fetch(f"/apis/apps/v1/namespaces/default/deployments/{name}-engine")
        return str(found["spec"]["template"]["spec"]["containers"][0]["image"])

    yaml_documents = clean.sample("cpu")
    kept = {**yaml_documents[-1], "metadata": {**yaml_documents[-1]["metadata"], "name": "kept"}}
    kept["metadata"]["annotations"] = {"ome.io/disable-auto-update": "true"}
    runtime = {
        "apiVersion": "ome.io/v1beta1",
        "kind": "ServingRuntime",
        "metadata": {"name": "mine", "namespace": "default"},
        "spec": {
            "supportedModelFormats": [{"modelFormat": {"name": "onnx"}, "autoSelect": True, "priority": 9}],
            "containers": [{"name": "ome-container", "image": "one:1", "args": ["serve"]}],
        },
    }
    for each in (yaml_documents[-1], kept):
        each["spec"] = {**each["spec"], "runtime": {"name": "mine"}}
    with Running(clean.server.kubeconfig) as running:
        clean.apply(runtime, *yaml_documents, kept)
        running.settle()
        assert image("digits") == image("kept") == "one:1"
        runtime["spec"]["containers"][0]["image"] = "two:2"
        clean.apply(runtime)
        until(lambda: image("digits") == "two:2")
        running.settle()
        assert image("kept") == "one:1"
        kept["spec"]["engine"] = {"minReplicas": 1, "maxReplicas": 5}
        clean.apply(kept)
        until(lambda: image("kept") == "two:2")
        running.settle()
    clean.server.kubectl("delete", "servingruntime", "mine")


def test_the_api_server_is_unreachable_for_a_while(clean: Any) -> None:
    from controller_site import Running, until

    with Running(clean.server.kubeconfig) as running:
        running.settle()
        running.transport.down = True
        clean.apply(*clean.sample("cpu"))
        until(lambda: not running.controller.settled)
        running.transport.down = False
        until(lambda: any("Deployment" in each for each in clean.children()))
        running.settle()


def test_the_rights_of_the_manifests_are_enough(clean: Any) -> None:
    from controller_site import Running, until

    from headrace.fleet.install.manifests import cluster_rules

    role = {
        "apiVersion": "rbac.authorization.k8s.io/v1",
        "kind": "ClusterRole",
        "metadata": {"name": "the-operators"},
        "rules": cluster_rules(),
    }
    clean.apply(role)
    clean.server.kubectl(
        "create", "clusterrolebinding", "the-operators", "--clusterrole=the-operators", "--user=nobody"
    )
    with Running(clean.server.kubeconfig_of_nobody()) as running:
        for each in ("scale-to-zero", "router", "keda", "prefill-decode"):
            yaml_documents = clean.sample(each)
            clean.apply(*yaml_documents)
            running.settle()
            said = clean.ready(yaml_documents[-1]["metadata"]["name"])
            assert said and said.get("reason") != "ReconcileError", said
        bad = {**yaml_documents[-1], "metadata": {"name": "bad", "namespace": "default"}}
        clean.apply({**bad, "spec": {"model": {"name": "nothing"}, "engine": {}}})
        until(lambda: clean.events("bad"))
    # Others want to know of a user who may do nothing.
    clean.server.kubectl("delete", "clusterrolebinding", "the-operators")


def test_the_manifests_are_accepted_and_one_of_two_leads(clean: Any) -> None:
    import asyncio

    from headrace.fleet import yaml_documents
    from headrace.fleet.cluster.reconciler import utc_now
    from headrace.fleet.install.manifests import ManifestSettings, manifests
    from headrace.platforms.kubernetes_client.api import connect
    from headrace.platforms.kubernetes_client.leader_election import LeaderElector, LeaseSettings

    clean.server.kubectl("apply", "-f", "-", input=yaml_documents.write(manifests(ManifestSettings())))
    again = clean.server.kubectl("apply", "-f", "-", input=yaml_documents.write(manifests(ManifestSettings())))
    assert "created" not in again and "configured" not in again
    deployments = ("deployment/headrace-operator", "deployment/headrace-activator")
    clean.server.kubectl("scale", *deployments, "-n", "headrace-system", "--replicas=0")

    async def elect() -> None:
        api = connect(str(clean.server.kubeconfig))

        def leader(name: str) -> LeaderElector:
            return LeaderElector(
                api, LeaseSettings("headrace-system", name, duration_seconds=2, retry_seconds=0.1), utc_now
            )

        first, second, third = leader("first"), leader("second"), leader("third")
        await first.acquire()
        waiting = asyncio.create_task(second.acquire())
        await asyncio.wait([waiting], timeout=0.5)
        assert not waiting.done()
        await first.release()
        await asyncio.wait_for(waiting, 30)
        # The second dies without a word: the third leads when the Lease has run out, and the second is told.
        await asyncio.wait_for(third.acquire(), 30)
        await asyncio.wait_for(leader_kept(second), 30)
        await api.close()

    async def leader_kept(leader: LeaderElector) -> None:
        leader._settings = LeaseSettings("headrace-system", "second", duration_seconds=2, renew_seconds=0.1)
        await leader.renew()

    asyncio.run(elect())


def test_five_services_need_a_bounded_number_of_calls(clean: Any) -> None:
    from controller_site import Running

    from headrace.programs.operator import OperatorSettings

    (model, service) = clean.sample("cpu")
    names = [f"digits-{number}" for number in range(5)]
    with Running(clean.server.kubeconfig) as running:
        clean.apply(model, *({**service, "metadata": {"name": each, "namespace": "default"}} for each in names))
        running.settle()
    # One discovery: how many there are in a second of this machine is another matter.
    with Running(clean.server.kubeconfig, OperatorSettings(discover_seconds=600)) as idle:
        idle.settle()
        first = idle.controller.api.calls
        assert idle.writes == []
        assert first < 120, "a list and a watch of each kind, and discovery"


def test_a_list_with_a_foreign_entry_is_restored(clean: Any) -> None:
    import json

    from controller_site import Running, until

    path = "/apis/keda.sh/v1alpha1/namespaces/default/scaledobjects/scaledobject-llama-keda-engine"
    with Running(clean.server.kubeconfig) as running:
        clean.apply(*clean.sample("keda"))
        running.settle()
        triggers = clean.fetch(path)["spec"]["triggers"]
        more = [*triggers, {"type": "cron", "metadata": {"timezone": "UTC"}}]
        patch = json.dumps({"spec": {"triggers": more}})
        name = path.rsplit("/", 1)[1]
        clean.server.kubectl("patch", "scaledobjects.keda.sh", name, "--type=merge", "-p", patch)
        until(lambda: clean.fetch(path)["spec"]["triggers"] == triggers)
        running.settle()
