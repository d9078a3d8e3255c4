# SPDX-License-Identifier: Apache-2.0
"""An InferenceService as settings for Ray Serve; what is not supported on Ray is refused by name. No Ray is needed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import headrace.fleet
from headrace.fleet import yaml_documents
from headrace.fleet.ray_serve.replica_spec import ReplicaSpec, deployment_options
from headrace.fleet.ray_serve.translation import RayServices, read_services
from headrace.fleet.yaml_documents import ParsedFiles, Source

SAMPLES = Path(headrace.fleet.__file__).parent / "samples"


def document(kind: str, name: str, spec: dict[str, Any], **metadata: Any) -> dict[str, Any]:
    return {"apiVersion": "ome.io/v1beta1", "kind": kind, "metadata": {"name": name, **metadata}, "spec": spec}


def services(
    engine: dict[str, Any] | None = None,
    *,
    spec: dict[str, Any] | None = None,
    storage: dict[str, Any] | None = None,
    annotations: dict[str, str] | None = None,
    more: tuple[dict[str, Any], ...] = (),
) -> RayServices:
    """The services of a file with an ONNX model and a service for it."""
    place = {"storageUri": "local:///models/digits", "path": "/mnt/models/digits", **(storage or {})}
    model = document("ClusterBaseModel", "digits", {"modelFormat": {"name": "onnx"}, "storage": place})
    wanted = {"model": {"name": "digits"}, "engine": engine or {}, **(spec or {})}
    service = document("InferenceService", "digits", wanted, namespace="default", annotations=annotations or {})
    return read_services(ParsedFiles([Source(item) for item in (model, service, *more)], []))


def spec_of(engine: dict[str, Any] | None = None, **given: Any) -> ReplicaSpec:
    found = services(engine, **given)
    assert [str(error) for error in found.errors] == []
    (spec,) = found.specs
    return spec


def refused(engine: dict[str, Any] | None = None, **given: Any) -> list[str]:
    """The fields that are refused."""
    found = services(engine, **given)
    assert not found.specs
    return [error.problem.field for error in found.errors]


def test_a_service_becomes_a_deployment_with_the_resources_of_its_container() -> None:
    resources = {"requests": {"cpu": "1500m", "memory": "2Gi"}, "limits": {"cpu": "4", "memory": "8Gi"}}
    spec = spec_of({"minReplicas": 2, "maxReplicas": 2, "runner": {"resources": resources}})
    options = deployment_options(spec)
    assert options["num_replicas"] == 2 and "autoscaling_config" not in options
    assert options["placement_group_bundles"] == [{"CPU": 1.5, "memory": 2.0 * 2**30}]
    assert options["placement_group_strategy"] == "STRICT_PACK"
    assert options["ray_actor_options"] == {"num_cpus": 1.5, "memory": 2 << 30}
    assert options["health_check_period_s"] == 5.0  # of the runtime's readiness probe
    assert (spec.name, spec.namespace, spec.memory) == ("digits", "default", 2 << 30)


def test_a_spec_survives_the_way_to_a_replica() -> None:
    spec = spec_of()
    assert ReplicaSpec.from_json(json.loads(json.dumps(spec.as_json()))) == spec


def test_replicas_follow_the_requests_in_flight() -> None:
    engine = {"minReplicas": 1, "maxReplicas": 6, "scaleMetric": "concurrency", "scaleTarget": 16}
    options = deployment_options(spec_of({**engine, "containerConcurrency": 32}))
    assert options["autoscaling_config"] == {
        "min_replicas": 1,
        "initial_replicas": 1,
        "max_replicas": 6,
        "target_ongoing_requests": 16,
    }
    assert options["max_ongoing_requests"] == 32
    assert deployment_options(spec_of())["autoscaling_config"]["target_ongoing_requests"] == 100


def test_a_service_that_scales_to_zero_starts_once() -> None:
    idle = {"ome.io/scale-to-zero-idle-seconds": "600"}
    scaling = deployment_options(spec_of({"minReplicas": 0, "maxReplicas": 4}, annotations=idle))["autoscaling_config"]
    assert scaling["min_replicas"] == 0 and scaling["initial_replicas"] == 1
    assert scaling["downscale_to_zero_delay_s"] == 600.0


def test_an_autoscaler_of_class_none_keeps_the_minimum() -> None:
    engine = {"minReplicas": 3, "maxReplicas": 9, "autoscaler": {"class": "None"}}
    assert deployment_options(spec_of(engine))["num_replicas"] == 3


def test_time_limits_become_those_of_requests_and_of_the_drain() -> None:
    spec = spec_of({"timeoutSeconds": 40})
    assert (spec.request_seconds, spec.grace_seconds) == (40.0, 40.0)
    assert spec_of({"terminationGracePeriodSeconds": 7}).grace_seconds == 7.0
    assert (spec_of().request_seconds, spec_of().grace_seconds) == (0.0, 300.0)


def gpu_engine(gpus: int, *args: str) -> dict[str, Any]:
    return {"runner": {"args": list(args), "resources": {"limits": {"nvidia.com/gpu": gpus}}}}


def test_the_ranks_of_a_model_are_in_one_bundle_on_one_node() -> None:
    spec = spec_of(gpu_engine(4, "--tensor-parallel-size=4"))
    options = deployment_options(spec)
    (bundle,) = options["placement_group_bundles"]
    assert bundle["GPU"] == 4.0 and options["ray_actor_options"]["num_gpus"] == 4


def group(worker: dict[str, Any] | None = None, **leader: Any) -> RayServices:
    """The services of the sample with a leader and a worker, changed."""
    files = yaml_documents.read([SAMPLES / "multi-node-headrace.yaml"])
    (service,) = (item for item in files.documents if item["kind"] == "InferenceService")
    engine = {"minReplicas": 1, "maxReplicas": 1, "worker": {"size": 1, **(worker or {})}}
    service["spec"]["engine"] = {**engine, **({"leader": leader} if leader else {})}
    return read_services(files)


def test_a_model_over_nodes_has_a_bundle_for_each() -> None:
    limits = {"resources": {"requests": {"cpu": "2"}, "limits": {"nvidia.com/gpu": 1, "memory": "4Gi"}}}
    found = group({"size": 2, "runner": limits}, runner={"resources": {"requests": {"cpu": "1", "memory": "1Gi"}}})
    assert [str(error) for error in found.errors] == []
    (spec,) = found.specs
    options = deployment_options(spec)
    worker = {"CPU": 2.0, "GPU": 1.0, "memory": 2.0 * 2**30}  # the runtime's own request for memory
    assert options["placement_group_bundles"] == [{"CPU": 1.0, "memory": 2.0**30}, worker, worker]
    assert options["placement_group_strategy"] == "SPREAD"
    assert options["ray_actor_options"] == {"num_cpus": 1.0, "memory": 1 << 30}
    assert ReplicaSpec.from_json(json.loads(json.dumps(spec.as_json()))) == spec
    assert (
        spec.of_worker().pod != spec.pod and deployment_options(spec.of_worker())["ray_actor_options"]["num_gpus"] == 1
    )


def test_a_group_of_one_is_one_server() -> None:
    (spec,) = group({"size": 0}).specs
    assert (
        spec.worker is not None
        and spec.worker.size == 0
        and len(deployment_options(spec)["placement_group_bundles"]) == 1
    )


@pytest.mark.parametrize(
    ("field", "worker"),
    [
        ("spec.engine.worker.nodeSelector", {"nodeSelector": {"gpu": "yes"}}),
        ("spec.engine.worker.runner.lifecycle", {"runner": {"lifecycle": {}}}),
        ("spec.engine.worker.runner.image", {"runner": {"image": "example/other:1"}}),
        (
            "spec.engine.worker.runner.env[KEY].valueFrom",
            {"runner": {"env": [{"name": "KEY", "valueFrom": {"secretKeyRef": {"name": "a", "key": "b"}}}]}},
        ),
        (
            "spec.engine.worker.runner.resources",
            {"runner": {"args": ["--tensor-parallel-size=4"], "resources": {"limits": {"nvidia.com/gpu": 1}}}},
        ),
    ],
)
def test_a_worker_with_what_has_no_meaning_on_ray_is_refused_by_name(field: str, worker: dict[str, Any]) -> None:
    assert [error.problem.field for error in group(worker).errors] == [field]


def test_a_runtime_that_starts_a_ray_cluster_is_refused_by_name() -> None:
    for name, text in (
        ("multi-node-ray", "starts a Ray cluster of its own"),
        ("multi-node", "another engine over several nodes does not run on Ray"),
    ):
        error = read_services(yaml_documents.read([SAMPLES / f"{name}.yaml"])).errors[0]
        assert text in str(error) and "choose the runtime headrace-multi-node" in str(error)


@pytest.mark.parametrize("words", [("--tensor-parallel-size", "4"), ("--tensor-parallel-size=4",)])
def test_more_ranks_than_gpus_are_refused(words: tuple[str, ...]) -> None:
    found = services(gpu_engine(2, *words))
    (error,) = found.errors
    assert "4 ranks and 2 GPUs" in str(error) and "nvidia.com/gpu: 4" in str(error)


@pytest.mark.parametrize(
    ("field", "engine"),
    [
        ("spec.engine.canaryTrafficPercent", {"canaryTrafficPercent": 10}),
        ("spec.engine.deploymentStrategy", {"deploymentStrategy": {"type": "Recreate"}}),
        ("spec.engine.minAvailable", {"minAvailable": 1}),
        ("spec.engine.nodeSelector", {"nodeSelector": {"gpu": "yes"}}),
        ("spec.engine.tolerations", {"tolerations": [{"key": "gpu", "operator": "Exists"}]}),
        ("spec.engine.serviceAccountName", {"serviceAccountName": "reader"}),
        ("spec.engine.labels", {"labels": {"team": "a"}}),
        ("spec.engine.kedaConfig", {"kedaConfig": {"enableKeda": False}}),
        ("spec.engine.scaleMetric", {"scaleMetric": "cpu", "scaleTarget": 70}),
        ("spec.engine.scaleMetric", {"scaleMetric": "rps", "scaleTarget": 5}),
        ("spec.engine.scaleTarget", {"scaleTarget": 70}),
        ("spec.engine.autoscaler.class", {"autoscaler": {"class": "HPA"}}),
        ("spec.engine.runner.securityContext", {"runner": {"securityContext": {"runAsUser": 1}}}),
        ("spec.engine.runner.lifecycle", {"runner": {"lifecycle": {"preStop": {"sleep": {"seconds": 1}}}}}),
        ("spec.engine.runner.args", {"runner": {"args": ["--nnodes=2"]}}),
        ("spec.engine.runner.image", {"runner": {"image": "example/other:1"}}),
        (
            "spec.engine.runner.resources.requests.ephemeral-storage",
            {"runner": {"resources": {"requests": {"ephemeral-storage": "1Gi"}}}},
        ),
        (
            "spec.engine.runner.env[KEY].valueFrom",
            {"runner": {"env": [{"name": "KEY", "valueFrom": {"secretKeyRef": {"name": "a", "key": "b"}}}]}},
        ),
        (
            "spec.engine.volumes[settings]",
            {
                "volumes": [{"name": "settings", "configMap": {"name": "settings"}}],
                "runner": {"volumeMounts": [{"name": "settings", "mountPath": "/etc/settings"}]},
            },
        ),
        ("spec.engine.initContainers", {"initContainers": [{"name": "first", "image": "busybox"}]}),
    ],
)
def test_a_field_without_a_meaning_on_ray_is_refused_by_name(field: str, engine: dict[str, Any]) -> None:
    assert refused(engine) == [field]


def test_other_components_are_refused_by_name() -> None:
    assert "spec.router" in refused(spec={"router": {}})
    assert "spec.decoder" in refused(spec={"decoder": {}})
    assert "spec.acceleratorSelector" in refused(spec={"acceleratorSelector": {"policy": "BestFit"}})


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("ome.io/deploymentMode", "Serverless"),
        ("ome.io/rollout-steps", "10,50"),
        ("ome.io/autoscalerClass", "external"),
        ("autoscaling.keda.sh/threshold", "5"),
    ],
)
def test_an_annotation_without_a_meaning_on_ray_is_refused_by_name(name: str, value: str) -> None:
    assert f"metadata.annotations[{name}]" in refused(annotations={name: value})


def test_annotations_of_others_and_the_usual_mode_pass() -> None:
    spec_of(annotations={"ome.io/deploymentMode": "RawDeployment", "example.com/owner": "me"})


def test_credentials_do_not_go_into_the_state_of_the_cluster() -> None:
    remote = {"storageUri": "hf://org/digits"}
    for storage in ({"key": "hub"}, {"parameters": {"token": "hf_secret"}}):
        found = services(storage={**remote, **storage})
        assert [error.problem.field for error in found.errors] == ["spec.model.name"]
        assert "hf_secret" not in str(found.errors)


def test_a_missing_model_is_named() -> None:
    found = services(spec={"model": {"name": "letters"}})
    assert any("letters" in str(error) for error in found.errors)


def test_two_services_of_one_name_are_refused() -> None:
    other = document("InferenceService", "digits", {"model": {"name": "digits"}, "engine": {}}, namespace="other")
    (error,) = services(more=(other,)).errors
    assert "two services have the name digits" in str(error)


def test_a_file_without_a_service_is_refused() -> None:
    assert [str(error) for error in read_services(ParsedFiles([], [])).errors]


RUN = {"benchmark", "cpu", "multi-node-headrace", "own-runtime", "scale-to-zero", "serverless"}


@pytest.mark.parametrize("path", sorted(SAMPLES.glob("*.yaml")), ids=lambda path: path.stem)
def test_the_samples_run_or_are_refused(path: Path) -> None:
    found = read_services(yaml_documents.read([path]))
    assert bool(found.specs) == (path.stem in RUN) and bool(found.errors) != bool(found.specs)
    for error in found.errors:
        assert "Ray" in str(error) and error.place.startswith(str(path))
