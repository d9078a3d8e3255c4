# SPDX-License-Identifier: Apache-2.0
"""Containers as command lines of this machine."""

from __future__ import annotations

from typing import Any

import pytest

from headrace.fleet.local.container_command import (
    CommandContext,
    ContainerCommand,
    ContainerStartError,
    build_command,
    container_ports,
    expand_variables,
    is_port_configurable,
)
from headrace.fleet.local.scheduler import pod_requests
from headrace.platforms.kubernetes_client.objects import Document

OURS = "registry.example/ai/headrace:1.0-full"
CONFIG = {"kind": "ConfigMap", "metadata": {"name": "knobs"}, "data": {"size": "7", "colour": "blue"}}


def pod(**container: Any) -> dict[str, Any]:
    metadata = {"name": "p-1", "namespace": "team", "uid": "u", "labels": {"ome.io/inferenceservice": "chat"}}
    main = {"name": "ome-container", "image": OURS, **container}
    return {"metadata": metadata, "spec": {"containers": [{"name": "side", "image": "x"}, main]}}


def line(container: dict[str, Any], **around: Any) -> ContainerCommand:
    def find(kind: str, name: str) -> Document | None:
        return CONFIG if (kind, name) == ("ConfigMap", "knobs") else None

    return build_command(CommandContext(pod(**container), "node-1", find=find, **around))


def test_variables_are_filled_in_as_a_kubelet_does() -> None:
    known = {"A": "1", "B.c-d": "2"}
    assert expand_variables("$(A)/$(B.c-d)/$(NONE)/$$(A)/$A/$$", known) == "1/2/$(NONE)/$(A)/$A/$"


def test_arguments_and_variables_of_the_pod() -> None:
    env = [
        {"name": "NAMESPACE", "valueFrom": {"fieldRef": {"fieldPath": "metadata.namespace"}}},
        {"name": "WHO", "valueFrom": {"fieldRef": {"fieldPath": "metadata.labels['ome.io/inferenceservice']"}}},
        {"name": "IP", "valueFrom": {"fieldRef": {"fieldPath": "status.podIP"}}},
        {"name": "NODE", "valueFrom": {"fieldRef": {"fieldPath": "spec.nodeName"}}},
        {"name": "SIZE", "valueFrom": {"configMapKeyRef": {"name": "knobs", "key": "size"}}},
        {"name": "MAYBE", "valueFrom": {"configMapKeyRef": {"name": "knobs", "key": "none", "optional": True}}},
        {"name": "CORES", "valueFrom": {"resourceFieldRef": {"resource": "limits.cpu"}}},
        {"name": "BOTH", "value": "$(WHO)-$(SIZE)"},
    ]
    result = line(
        {
            "command": ["headrace", "router"],
            "args": ["--name=$(BOTH)", "$(LWS_GROUP_SIZE)"],
            "env": env,
            "envFrom": [{"prefix": "P_", "configMapRef": {"name": "knobs"}}],
            "resources": {"limits": {"cpu": "1500m"}},
        },
        environment={"LWS_GROUP_SIZE": "3"},
    )
    assert result.is_headrace and result.args == ("router", "--name=chat-7", "3")
    assert result.environment == {
        "P_size": "7",
        "P_colour": "blue",
        "NAMESPACE": "team",
        "WHO": "chat",
        "IP": "127.0.0.1",
        "NODE": "node-1",
        "SIZE": "7",
        "CORES": "2",
        "BOTH": "chat-7",
        "LWS_GROUP_SIZE": "3",
    }


@pytest.mark.parametrize(
    ("words", "after"),
    [
        (["--port=8080", "--host=0.0.0.0"], ["--port=23", "--host=127.0.0.1"]),
        (["--port", "8080", "--size", "8080"], ["--port", "23", "--size", "8080"]),
        (
            ["-c", "x serve --port=8080 --seed=8080 --to 10.0.0.0"],
            ["-c", "x serve --port=23 --seed=8080 --to 10.0.0.0"],
        ),
        (["--listen", "0.0.0.0:8080"], ["--listen", "127.0.0.1:23"]),
        (["--join=http://a.team.svc.cluster.local:80/x"], ["--join=http://127.0.0.1:8080/x"]),
        (["http://a.team.svc.cluster.local:8080,weight=9"], ["http://127.0.0.1:8080,weight=9"]),
        (["http://b.a.team.svc.cluster.local"], ["http://b.a.team.svc.cluster.local"]),
        (["--m=/mnt/m/one", "/mnt/m/one/x,/mnt/m", "/mnt/more"], ["--m=/tmp/z", "/tmp/z/x,/mnt/m", "/mnt/more"]),
        (["/tmp/a:/tmp", "/var/tmp/a"], ["/pods/1/tmp/a:/pods/1/tmp", "/var/tmp/a"]),
        (["v0.8080", "18080", "8080"], ["v0.8080", "18080", "8080"]),
    ],
)
def test_ports_and_paths_in_the_arguments_are_replaced(words: list[str], after: list[str]) -> None:
    result = line(
        {"command": ["server"], "image": "other", "args": words},
        ports={8080: 23},
        paths=[("/tmp", "/pods/1/tmp"), ("/mnt/m/one", "/tmp/z")],
        hosts={"a.team.svc.cluster.local": "127.0.0.1:8080"},
    )
    assert result.args == ("server", *after) and not result.is_headrace


def test_a_server_of_ours_opens_no_port_that_a_second_one_would_need() -> None:
    result = line({"args": ["serve", "--model-path=/m"]}, ports={8080: 23})
    assert result.args == ("serve", "--model-path=/m", "--http-port=23", "--grpc-port=0", "--metrics-port=0")
    reported = line({"args": ["serve", "--http-port", "8080", "--grpc-port=9"]}, ports={8080: 23})
    assert reported.args == ("serve", "--http-port", "23", "--grpc-port=9", "--metrics-port=0")


def test_a_router_with_pod_discovery_gets_their_services() -> None:
    arguments = [
        "router",
        "--port=8080",
        "--health-path=",
        "--discover-prefill-pods=component=engine,ome.io/inferenceservice=chat",
        "--discover-decode-pods",
        "component=decoder,ome.io/inferenceservice=chat",
        "--discover-pods=app=other",
    ]
    domain = "team.svc.cluster.local"
    hosts = {f"chat-engine.{domain}": "127.0.0.1:9001", f"chat-decoder.{domain}": "127.0.0.1:9002"}
    assert line({"args": arguments}, ports={8080: 31000}, hosts=hosts).args == (
        "router",
        "--port=31000",
        "--health-path=",
        "--backend=http://127.0.0.1:9001,role=prefill",
        "--backend=http://127.0.0.1:9002,role=decode",
        "--discover-pods=app=other",
    )


def test_a_worker_reaches_its_leader_where_that_is() -> None:
    arguments = ["join", "$(LWS_LEADER_ADDRESS):8080", "--port=9"]
    result = line(
        {"command": arguments, "image": "x"}, environment={"LWS_LEADER_ADDRESS": "127.0.0.1"}, leader_ports={8080: 23}
    )
    assert result.args == ("join", "127.0.0.1:23", "--port=9")


@pytest.mark.parametrize(
    ("container", "reason", "words"),
    [
        ({"image": "vllm/vllm-openai:v1"}, "ErrImageNeverPull", "needs Docker: run `headrace up --driver docker`"),
        (
            {"env": [{"name": "A", "valueFrom": {"configMapKeyRef": {"name": "knobs", "key": "none"}}}]},
            "CreateContainerConfigError",
            "ConfigMap knobs has no key none",
        ),
        (
            {"env": [{"name": "A", "valueFrom": {"secretKeyRef": {"name": "keys", "key": "k"}}}]},
            "CreateContainerConfigError",
            "Secret keys does not exist: apply it",
        ),
        (
            {"env": [{"name": "A", "valueFrom": {"fieldRef": {"fieldPath": "status.phase"}}}]},
            "CreateContainerConfigError",
            "cannot refer to the field status.phase",
        ),
    ],
)
def test_a_pod_that_cannot_run_states_the_reason(container: dict[str, Any], reason: str, words: str) -> None:
    with pytest.raises(ContainerStartError, match=words) as caught:
        line(container)
    assert caught.value.reason == reason


def test_ports_and_whether_they_can_be_changed() -> None:
    named = pod(command=["x"], args=["--port=9000"], ports=[{"containerPort": 9000}, {"containerPort": 9001}])
    assert (
        container_ports(named) == (9000, 9001)
        and is_port_configurable(named, 9000)
        and not is_port_configurable(named, 9001)
    )
    assert container_ports(pod()) == (8080,) and container_ports(pod(), serves=False) == ()
    assert is_port_configurable(pod(command=["x"], env=[{"name": "PORT", "value": "8080"}]), 8080)
    assert is_port_configurable(pod(args=["serve"]), 8080) and not is_port_configurable(
        pod(command=["x", "8080"]), 8080
    )


def test_the_resources_that_a_pod_requests() -> None:
    request = pod_requests(
        pod(resources={"requests": {"cpu": "500m"}, "limits": {"cpu": "4", "memory": "2Gi", "nvidia.com/gpu": "2"}})
    )
    assert (request.cores, request.memory, request.gpus) == (0.5, 2 * 1024**3, 2)
