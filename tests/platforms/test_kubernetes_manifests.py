# SPDX-License-Identifier: Apache-2.0
"""Manifests are plain values: the same for the same spec, YAML and back, and nothing secret but in the Secret."""

from __future__ import annotations

import base64
import dataclasses
import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import yaml
from driver_contract import hostile
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.core.errors import InvalidArgument
from headrace.platforms.contract import Container, LaunchSpec, Mount
from headrace.platforms.kubernetes import manifests
from headrace.platforms.kubernetes.settings import KubernetesSettings
from support.properties import examples

JOB = "0f9c3a51-6c53-4d4d-9a51-3f3c7e0b2f11"
JOBS = KubernetesSettings()
SETS = KubernetesSettings(workload="statefulset", service_type="ClusterIP", ptrace=True)
SECRET = "hf_abcdefgh"


def _to_yaml(objects: Iterable[manifests.Manifest]) -> str:
    """Return the objects as YAML for `kubectl apply -f`, without Secrets."""
    return yaml.safe_dump_all([manifest for manifest in objects if manifest["kind"] != "Secret"], sort_keys=True)


def spec(**given: Any) -> LaunchSpec:
    document = {
        "job_id": JOB,
        "container": Container("nvcr.io/nvidia/tao/tao-toolkit:7.0.1-cosmos-rl", "umask 0 && serve", 8080),
        "environment": {"MODE": "x"},
        "secret_environment": {"HF_TOKEN": SECRET},
        "gpus": 2,
        "labels": {"org": "acme", "experiment": "e-1"},
    }
    return LaunchSpec(**{**document, **given})


def all_of(wanted: LaunchSpec, settings: KubernetesSettings) -> list[dict[str, Any]]:
    created = [manifests.workload(wanted, settings, "s1"), manifests.service(wanted, settings)]
    secret = manifests.secret(wanted, settings)
    return created + ([secret] if secret else [])


def container_of(manifest: dict[str, Any]) -> dict[str, Any]:
    result: dict[str, Any] = manifest["spec"]["template"]["spec"]["containers"][0]
    return result


def expanded(text: str) -> str:
    """As Kubernetes reads it, where no variable is named."""
    return text.replace("$$", "$")


def test_a_job_has_the_fields_that_the_launcher_documents() -> None:
    job, service, secret = all_of(spec(), KubernetesSettings(image_pull_secret="ngc-pull-secret"))
    assert (job["apiVersion"], job["kind"], job["metadata"]["name"]) == ("batch/v1", "Job", f"tao-job-{JOB}")
    assert job["metadata"]["annotations"]["tao-job-id"] == JOB
    assert job["spec"] | {"template": None} == {
        "parallelism": 1,
        "completions": 1,
        "backoffLimit": 0,
        "ttlSecondsAfterFinished": 3600,
        "template": None,
    }
    pod = job["spec"]["template"]["spec"]
    assert pod["restartPolicy"] == "Never" and pod["imagePullSecrets"] == [{"name": "ngc-pull-secret"}]
    assert pod["automountServiceAccountToken"] is False
    assert pod["volumes"] == [{"name": "shm", "emptyDir": {"medium": "Memory", "sizeLimit": "16Gi"}}]
    container = container_of(job)
    assert container["name"] == "tao" and container["command"] == ["/bin/sh", "-c", "umask 0 && serve"]
    assert container["resources"]["limits"] == {"nvidia.com/gpu": "2"}
    assert container["envFrom"] == [{"secretRef": {"name": f"tao-creds-{JOB}"}}]
    assert container["readinessProbe"]["httpGet"]["path"] == "/api/v1/health/readiness"
    assert container["livenessProbe"]["httpGet"]["path"] == "/api/v1/health/liveness"
    assert container["startupProbe"]["failureThreshold"] * container["startupProbe"]["periodSeconds"] == 600
    assert service["metadata"]["name"] == f"tao-job-{JOB}" and service["spec"]["type"] == "LoadBalancer"
    assert service["spec"]["selector"] == {"job-name": f"tao-job-{JOB}"}
    assert service["spec"]["ports"][0]["port"] == 8080 and service["spec"]["ports"][0]["protocol"] == "TCP"
    assert base64.b64decode(secret["data"]["HF_TOKEN"]).decode() == SECRET


def test_a_stateful_set_has_the_fields_that_the_gateway_documents() -> None:
    made, service, _ = all_of(spec(), SETS)
    assert (made["kind"], made["metadata"]["name"]) == ("StatefulSet", f"ims-{JOB}")
    assert (service["metadata"]["name"], made["spec"]["serviceName"]) == (f"ims-svc-{JOB}", f"ims-svc-{JOB}")
    wanted = {"app": "ims", "job-id": JOB, "job": JOB, "statefulset": f"ims-{JOB}", "org": "acme", "experiment": "e-1"}
    assert wanted.items() <= made["spec"]["template"]["metadata"]["labels"].items()
    assert made["spec"]["selector"]["matchLabels"].items() <= made["spec"]["template"]["metadata"]["labels"].items()
    assert service["spec"]["selector"].items() <= made["spec"]["template"]["metadata"]["labels"].items()
    assert made["spec"]["podManagementPolicy"] == "Parallel" and made["spec"]["replicas"] == 1
    container = container_of(made)
    assert container["name"] == "ims-container" and container["ports"][0]["name"] == "http-ims"
    assert container["securityContext"]["capabilities"]["add"] == ["SYS_PTRACE"]
    assert {"name": "JOB_ID", "value": JOB} in container["env"]
    assert made["spec"]["template"]["spec"]["restartPolicy"] == "Always"


@pytest.mark.parametrize("settings", [JOBS, SETS], ids=["job", "statefulset"])
def test_the_same_spec_gives_the_same_bytes_and_yaml_reads_back_the_same(settings: KubernetesSettings) -> None:
    one = spec(environment={"A": "1", "B": "2"})
    other = spec(environment={"B": "2", "A": "1"})
    assert json.dumps(all_of(one, settings)) == json.dumps(all_of(other, settings))
    shown = _to_yaml(all_of(one, settings))
    assert list(yaml.safe_load_all(shown)) == all_of(one, settings)[:2]


@pytest.mark.parametrize("settings", [JOBS, SETS], ids=["job", "statefulset"])
def test_a_secret_is_in_the_secret_alone(settings: KubernetesSettings) -> None:
    created = all_of(spec(), settings)
    encoded = base64.b64encode(SECRET.encode()).decode()
    shown = _to_yaml(created)
    for text in (SECRET, encoded):
        assert text not in json.dumps(created[:2]) and text not in shown
    assert "HF_TOKEN" not in shown
    none = spec(secret_environment={})
    assert manifests.secret(none, settings) is None
    assert "envFrom" not in container_of(manifests.workload(none, settings, "s1"))


def test_hostile_texts_stay_what_they_are() -> None:
    for text in hostile(Path("/tmp/never-touched")):
        wanted = spec(
            environment={"PLAIN": text},
            secret_environment={"PRIVATE": text},
            container=Container("a/b:1", text, 8080),
            labels={"org": text},
        )
        created = [*yaml.safe_load_all(_to_yaml(all_of(wanted, JOBS)))]
        container = container_of(created[0])
        assert expanded(container["command"][2]) == text
        assert {variable["name"]: expanded(variable["value"]) for variable in container["env"]}["PLAIN"] == text
        assert created[0]["metadata"]["annotations"]["headrace/org"] == text
        secret = manifests.secret(wanted, JOBS)
        assert secret is not None and base64.b64decode(secret["data"]["PRIVATE"]).decode() == text


@settings(max_examples=examples(200), deadline=None)
@given(text=st.text(st.characters(exclude_characters="\0", exclude_categories=["Cs"]), max_size=60))
def test_any_text_survives_yaml(text: str) -> None:
    wanted = spec(environment={"PLAIN": text}, labels={"org": text})
    shown = _to_yaml(all_of(wanted, SETS))
    assert list(yaml.safe_load_all(shown)) == all_of(wanted, SETS)[:2]


def test_a_label_that_cannot_be_one_is_an_annotation_alone() -> None:
    metadata = manifests.workload(spec(labels={"org": "two words", "experiment": "e"}), JOBS, "s1")["metadata"]
    assert "org" not in metadata["labels"] and metadata["labels"]["experiment"] == "e"
    assert metadata["annotations"]["headrace/org"] == "two words"


def test_a_given_label_cannot_take_the_place_of_ours() -> None:
    metadata = manifests.workload(spec(labels={manifests.JOB_LABEL: "other"}), JOBS, "s1")["metadata"]
    assert metadata["labels"][manifests.JOB_LABEL] == JOB


@pytest.mark.parametrize(
    "change",
    [
        {"job_id": "../x"},
        {"job_id": JOB.upper()},
        {"container": None},
        {"container": Container("", "x")},
        {"container": Container("a b", "x")},
        {"container": Container("--privileged", "x")},
        {"container": Container("a", "x\0")},
        {"container": Container("a", "x", 0)},
        {"container": Container("a", "x", 8080, (Mount("relative", "/in"),))},
        {"container": Container("a", "x", 8080, (Mount("/a/../b", "/in"),))},
        {"container": Container("a", "x", 8080, (Mount("/a", "/in:rw"),))},
        {"host_port": 70_000},
        {"environment": {"A B": "x"}},
        {"environment": {"A": "\ud800"}},
        {"environment": {"HF_TOKEN": "twice"}},
        {"secret_environment": {"1A": "x"}},
        {"labels": {"a b": "x"}},
        {"labels": {"a/b/c": "x"}},
        {"gpus": -1},
    ],
)
def test_what_cannot_arrive_is_refused(change: dict[str, Any]) -> None:
    with pytest.raises(InvalidArgument):
        manifests.workload(dataclasses.replace(spec(), **change), JOBS, "s1")


def test_restricted_pods_may_do_nothing_but_serve() -> None:
    created = manifests.workload(spec(), KubernetesSettings(restricted=True), "s1")["spec"]["template"]["spec"]
    assert created["securityContext"] == {"seccompProfile": {"type": "RuntimeDefault"}, "runAsNonRoot": True}
    container = created["containers"][0]
    assert container["securityContext"]["capabilities"] == {"drop": ["ALL"]}
    assert container["securityContext"]["readOnlyRootFilesystem"] is True
    assert {"name": "tmp", "mountPath": "/tmp"} in container["volumeMounts"]


def test_settings_are_read_from_the_environment_and_arguments_override_them() -> None:
    environ = {
        "KUBECONFIG": "/a:/b",
        "TAO_K8S_NAMESPACE": "tao",
        "TAO_K8S_CONTEXT": "c",
        "IMAGEPULLSECRET": "ngc",
        "TAO_K8S_SKIP_NODE_RUNTIME_CHECK": "True",
    }
    created = KubernetesSettings.from_environment(environ, namespace="mine", workload=None)
    assert (created.kubeconfig, created.namespace, created.context, created.workload) == ("/a:/b", "mine", "c", "job")
    assert created.image_pull_secret == "ngc" and not created.check_gpus
    assert KubernetesSettings.from_environment({}) == KubernetesSettings()


@pytest.mark.parametrize(
    "given",
    [
        {"namespace": "A"},
        {"namespace": "a/../b"},
        {"namespace": ""},
        {"image_pull_secret": "a b"},
        {"shm_size": "lots"},
        {"workload": "deployment"},
        {"service_type": "ExternalName"},
        {"readiness_path": "x"},
        {"node_selector": {"a b": "c"}},
    ],
)
def test_settings_that_no_cluster_takes_are_refused(given: dict[str, Any]) -> None:
    with pytest.raises(InvalidArgument):
        KubernetesSettings(**given)
