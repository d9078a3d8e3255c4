# SPDX-License-Identifier: Apache-2.0
"""What every pod of a service has unless its runtime or the service says otherwise."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

from plan_cases import RUNNER, facts, live, one, runtime, service

from headrace.fleet.documents import ClusterFacts
from headrace.fleet.planning import Plan, plan
from headrace.fleet.planning.pod_defaults import SLEEP_ACTION

SLEEP = {"preStop": {"exec": {"command": ["sleep", "5"]}}}


def pod_of(made: Plan, name: str = "chat-engine") -> dict[str, Any]:
    found: dict[str, Any] = one(made, "Deployment", name)["spec"]["template"]["spec"]
    return found


def engine_pod(engine: dict[str, Any], cluster: ClusterFacts | None = None) -> dict[str, Any]:
    return pod_of(plan(service({"engine": engine}), cluster or facts()))


def with_engine(config: dict[str, Any]) -> ClusterFacts:
    cluster = facts()
    return replace(cluster, runtimes=(runtime("plain", engineConfig=config), *cluster.runtimes[1:]))


# A stop that loses no request


def test_a_pod_waits_before_it_stops_and_then_for_its_requests() -> None:
    pod = engine_pod({})
    assert pod["containers"][0]["lifecycle"] == SLEEP
    assert pod["terminationGracePeriodSeconds"] == 5 + 300 + 30
    assert engine_pod({"timeoutSeconds": 900})["terminationGracePeriodSeconds"] == 5 + 900 + 30


def test_a_cluster_whose_kubelets_can_sleep_needs_no_command() -> None:
    cluster = facts()
    able = replace(cluster, capabilities=cluster.capabilities | {SLEEP_ACTION})
    assert engine_pod({}, able)["containers"][0]["lifecycle"] == {"preStop": {"sleep": {"seconds": 5}}}


def test_the_wait_is_a_setting() -> None:
    pod = engine_pod({}, facts(pre_stop_seconds=20))
    assert pod["containers"][0]["lifecycle"]["preStop"]["exec"]["command"] == ["sleep", "20"]
    assert pod["terminationGracePeriodSeconds"] == 20 + 300 + 30
    without = engine_pod({}, facts(pre_stop_seconds=0))
    assert "lifecycle" not in without["containers"][0] and "terminationGracePeriodSeconds" not in without


def test_what_a_runtime_says_of_the_stop_stays() -> None:
    hook = {"preStop": {"httpGet": {"path": "/drain", "port": 9000}}}
    started = {"postStart": {"exec": {"command": ["true"]}}}
    pod = engine_pod({}, with_engine({"runner": {**RUNNER, "lifecycle": hook}, "terminationGracePeriodSeconds": 7}))
    assert pod["containers"][0]["lifecycle"] == hook and pod["terminationGracePeriodSeconds"] == 7
    pod = engine_pod({}, with_engine({"runner": {**RUNNER, "lifecycle": started}}))
    assert pod["containers"][0]["lifecycle"] == {**SLEEP, **started}


def test_a_container_that_requests_pass_through_waits_too_and_others_do_not() -> None:
    proxy = {"name": "proxy", "image": "proxy:1", "ports": [{"containerPort": 8443}]}
    beside = {"name": "metrics", "image": "metrics:1"}
    pod = engine_pod({}, with_engine({"runner": RUNNER, "containers": [proxy, beside]}))
    hooks = {each["name"]: each.get("lifecycle") for each in pod["containers"]}
    assert hooks == {"proxy": SLEEP, "metrics": None, "ome-container": SLEEP}


def test_headrace_waits_as_long_for_its_requests() -> None:
    def grace(args: list[str], **more: Any) -> list[str]:
        pod = engine_pod({"timeoutSeconds": 120}, with_engine({"runner": {**RUNNER, "args": args, **more}}))
        env = pod["containers"][0].get("env", ())
        return [each["value"] for each in env if each["name"] == "INFERENCE_SERVER_GRACE_S"]

    assert grace(["serve", "--model-path=/m"]) == ["120"]
    assert grace(["serve"], command=["headrace"]) == ["120"]
    assert grace(["serve", "--grace-seconds=5"]) == []
    assert grace(["--model", "/m"]) == []
    own = [{"name": "INFERENCE_SERVER_GRACE_S", "value": "9"}]
    assert grace(["serve"], env=own) == ["9"]


def test_front_and_routers_wait_too() -> None:
    first = plan(service({"engine": {"timeoutSeconds": 60}}), facts())
    newer = {"name": "ome-container", "image": "engine:2"}
    document = service({"engine": {"timeoutSeconds": 60, "canaryTrafficPercent": 10, "runner": newer}})
    made = plan(document, facts(), live(first))
    front = pod_of(made, "chat-front")
    assert front["containers"][0]["lifecycle"] == SLEEP and front["terminationGracePeriodSeconds"] == 95
    assert json.loads(one(made, "ConfigMap", "chat-front")["data"]["router.yaml"])["grace_seconds"] == 60
    routed = plan(service({"engine": {}, "router": {}}), facts())
    router = pod_of(routed, "chat-router")
    assert router["containers"][0]["lifecycle"] == SLEEP
    args = router["containers"][0]["args"]
    assert args[args.index("--grace-seconds") + 1] == "300"


def test_groups_wait_with_all_their_nodes() -> None:
    made = plan(service({"engine": {}}, runtime="groups"), facts())
    template = one(made, "LeaderWorkerSet", "lws-chat-engine")["spec"]["leaderWorkerTemplate"]
    for part in ("leaderTemplate", "workerTemplate"):
        pod = template[part]["spec"]
        assert pod["containers"][0]["lifecycle"] == SLEEP and pod["terminationGracePeriodSeconds"] == 335
    document = service({"engine": {}}, runtime="groups", ome_io__deploymentMode="MultiNodeRayVLLM")
    document["spec"]["engine"]["annotations"] = {"ome.io/deploymentMode": "MultiNodeRayVLLM"}
    ray = plan(document, facts())
    head = one(ray, "RayCluster", "chat-engine-0")["spec"]["headGroupSpec"]["template"]["spec"]
    assert head["containers"][0]["lifecycle"]["preStop"]["exec"]["command"][-1] == "sleep 5; ray stop"


# Few privileges

FEW = {
    "seccompProfile": {"type": "RuntimeDefault"},
    "allowPrivilegeEscalation": False,
    "capabilities": {"drop": ["ALL"]},
}


def security(runner: dict[str, Any], pod: dict[str, Any] | None = None, **settings: Any) -> dict[str, Any]:
    cluster = replace(facts(**settings), runtimes=with_engine({**(pod or {}), "runner": {**RUNNER, **runner}}).runtimes)
    found: dict[str, Any] = engine_pod({}, cluster)["containers"][0].get("securityContext", {})
    return found


def test_a_pod_has_few_privileges_and_no_token() -> None:
    pod = engine_pod({}, with_engine({"runner": RUNNER, "initContainers": [{"name": "first", "image": "i:1"}]}))
    assert pod["containers"][0]["securityContext"] == pod["initContainers"][0]["securityContext"] == FEW
    assert pod["automountServiceAccountToken"] is False
    named = engine_pod({"serviceAccountName": "reader"})
    assert "automountServiceAccountToken" not in named
    assert engine_pod({"automountServiceAccountToken": True})["automountServiceAccountToken"] is True


def test_our_image_does_not_run_as_root_and_others_may_unless_the_setting_forbids_it() -> None:
    for image in ("headrace:1", "registry.example:5000/team/headrace@sha256:1", "headrace-full:1"):
        assert security({"image": image}) == {**FEW, "runAsNonRoot": True}
    assert security({"image": "headraces/engine:1"}) == FEW
    assert security({}, pod_security="restricted") == {**FEW, "runAsNonRoot": True}
    assert security({"image": "headrace:1"}, pod_security="unchanged") == {}


def test_what_a_runtime_says_of_privileges_stays() -> None:
    locked = {"capabilities": {"add": ["IPC_LOCK"]}, "seccompProfile": {"type": "Unconfined"}}
    assert security({"securityContext": locked}) == {**FEW, **locked}
    for own in ({"privileged": True}, {"privileged": True, "runAsUser": 0}):
        assert security({"securityContext": own}, pod_security="restricted") == own
    admin = {"capabilities": {"add": ["SYS_ADMIN"]}}
    assert "allowPrivilegeEscalation" not in security({"securityContext": admin}), "the API server refuses both"
    root = {**FEW}
    assert security({"securityContext": {"runAsUser": 0}}, pod_security="restricted") == {**root, "runAsUser": 0}
    for pod in ({"runAsUser": 0}, {"runAsNonRoot": False}):
        assert security({"image": "headrace:1"}, {"securityContext": pod}) == root
    profile = {"securityContext": {"seccompProfile": {"type": "Localhost", "localhostProfile": "p.json"}}}
    assert "seccompProfile" not in security({}, profile)


def test_every_pod_of_a_service_has_few_privileges() -> None:
    made = plan(service({"engine": {}}, runtime="groups"), facts())
    template = one(made, "LeaderWorkerSet", "lws-chat-engine")["spec"]["leaderWorkerTemplate"]
    pods = [template[part]["spec"] for part in ("leaderTemplate", "workerTemplate")]
    pods.append(pod_of(plan(service({"engine": {}, "router": {}}), facts()), "chat-router"))
    serverless = plan(service({"engine": {"minReplicas": 0}}), facts())
    pods.append(one(serverless, "ksvc", "chat-engine")["spec"]["template"]["spec"])
    for pod in pods:
        assert FEW.items() <= pod["containers"][0]["securityContext"].items()
        assert pod["automountServiceAccountToken"] is False
    assert "securityContext" not in pods[-1], "Knative takes none of the pod"
    routed = pod_of(plan(service({"engine": {}, "router": {}}, runtime="routed"), facts()), "chat-router")
    assert "automountServiceAccountToken" not in routed, "it finds its engines by the API server"


def test_the_status_of_a_pod_has_the_last_lines_of_a_container_that_failed() -> None:
    pod = engine_pod({}, with_engine({"runner": RUNNER, "initContainers": [{"name": "first", "image": "i:1"}]}))
    for container in (*pod["containers"], *pod["initContainers"]):
        assert container["terminationMessagePolicy"] == "FallbackToLogsOnError"
    own = engine_pod({}, with_engine({"runner": {**RUNNER, "terminationMessagePolicy": "File"}}))
    assert own["containers"][0]["terminationMessagePolicy"] == "File"


def test_a_local_fleet_does_neither() -> None:
    from headrace.fleet.local import controller

    assert controller.SETTINGS.pre_stop_seconds == 0 and controller.SETTINGS.pod_security == "unchanged"
