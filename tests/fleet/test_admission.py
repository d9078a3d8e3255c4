# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
from fleet_documents import document, service, small_cluster
from hypothesis import given
from hypothesis import strategies as st
from schema_values import sample, ways, whole_document

from headrace.fleet import admission, schema, yaml_documents
from headrace.fleet.documents import FleetSettings, Problem
from headrace.fleet.schema.fields import Kind
from headrace.fleet.schema.kinds import KINDS

MODE = "ome.io/deploymentMode"


def fields(spec: dict[str, Any], *more: dict[str, Any], name: str = "llama-chat", **annotations: str) -> list[str]:
    return [item.field for item in admission.validate(service(spec, name, **annotations), small_cluster(*more))]


PLAIN = {"model": {"name": "llama"}, "engine": {}}


def test_a_plain_service_is_accepted_and_defaulted() -> None:
    given = service(PLAIN)
    before = copy.deepcopy(given)
    assert admission.validate(given, small_cluster()) == []
    created = admission.with_defaults(given, small_cluster())
    assert created["spec"]["engine"] == {"minReplicas": 1, "maxReplicas": 3}
    assert created["spec"]["model"] == {"name": "llama", "kind": "ClusterBaseModel", "apiGroup": "ome.io"}
    assert created["metadata"]["annotations"] == {MODE: "RawDeployment"}
    assert given == before
    assert admission.with_defaults(created, small_cluster()) == created


@pytest.mark.parametrize(
    ("spec", "mode"),
    [
        ({"engine": {}}, "RawDeployment"),
        ({"engine": {}, "decoder": {}}, "PDDisaggregated"),
        ({"engine": {"leader": {}, "worker": {"size": 1}}}, "MultiNode"),
        ({"engine": {"worker": {"size": 1}}}, "MultiNode"),
        ({"engine": {"leader": {}, "worker": {"size": 0}}}, "RawDeployment"),
        ({"engine": {"minReplicas": 0}}, None),
    ],
)
def test_the_mode_follows_the_shape(spec: dict[str, Any], mode: str | None) -> None:
    created = admission.with_defaults(service(spec), small_cluster())
    assert created["metadata"].get("annotations", {}).get(MODE) == mode
    output = admission.with_defaults(service(spec, **{MODE: "VirtualDeployment"}), small_cluster())
    assert output["metadata"]["annotations"] == {MODE: "VirtualDeployment"}


def test_without_a_raw_default_no_mode_is_written() -> None:
    facts = small_cluster(settings=FleetSettings(default_mode="Serverless"))
    assert "annotations" not in admission.with_defaults(service(PLAIN), facts)["metadata"]


def test_replicas_are_defaulted_by_component() -> None:
    spec = {"engine": {"minReplicas": 5}, "decoder": {"maxReplicas": 8}, "router": {}}
    created = admission.with_defaults(service(spec), small_cluster())["spec"]
    assert created["engine"] == {"minReplicas": 5, "maxReplicas": 5}
    assert created["decoder"] == {"minReplicas": 1, "maxReplicas": 8}
    assert created["router"] == {"minReplicas": 1, "maxReplicas": 2}


PREDICTOR = {
    "model": {
        "baseModel": "own",
        "runtime": "vllm",
        "fineTunedWeights": ["lora"],
        "storageUri": "hf://a/b",
        "env": [{"name": "A", "value": "1"}],
    },
    "minReplicas": 2,
    "nodeSelector": {"gpu": "yes"},
    "containers": [{"name": "side"}, {"name": "ome-container", "image": "i", "env": [{"name": "B", "value": "2"}]}],
    "workerSpec": {"size": 1},
}


def test_a_predictor_becomes_engine_model_and_runtime() -> None:
    created = admission.with_defaults(service({"predictor": PREDICTOR}), small_cluster())
    assert created["spec"] == {
        "model": {"name": "own", "kind": "BaseModel", "apiGroup": "ome.io", "fineTunedWeights": ["lora"]},
        "runtime": {"name": "vllm", "kind": "ClusterServingRuntime", "apiGroup": "ome.io"},
        "engine": {
            "minReplicas": 2,
            "maxReplicas": 3,
            "nodeSelector": {"gpu": "yes"},
            "runner": {
                "name": "ome-container",
                "image": "i",
                "env": [
                    {"name": "B", "value": "2"},
                    {"name": "A", "value": "1"},
                    {"name": "STORAGE_URI", "value": "hf://a/b"},
                ],
            },
            "containers": [{"name": "side"}],
            "worker": {"size": 1},
        },
    }
    assert "deprecated" in created["metadata"]["annotations"]["ome.io/deprecation-warning"]
    assert created["metadata"]["annotations"][MODE] == "MultiNode"
    assert admission.validate(service({"predictor": PREDICTOR}), small_cluster()) == []


def test_other_shapes_of_a_predictor() -> None:
    def engine(predictor: dict[str, Any]) -> Any:
        return admission.with_defaults(service({"predictor": predictor}), small_cluster())["spec"]["engine"]

    assert engine({"containers": [{"name": "a"}, {"name": "b"}]})["runner"] == {"name": "a"}
    assert engine({"containers": [{"name": "a"}, {"name": "b"}]})["containers"] == [{"name": "b"}]
    assert engine({"model": {"baseModel": "llama", "name": "x", "image": "i"}})["runner"] == {"name": "x", "image": "i"}
    assert "runner" not in engine({"model": {"baseModel": "llama", "protocolVersion": "v2"}})


def test_a_predictor_is_not_changed_where_disabled() -> None:
    facts = small_cluster(settings=FleetSettings(migrate_predictor=False))
    assert "predictor" in admission.with_defaults(service({"predictor": PREDICTOR}), facts)["spec"]
    assert fields({**PLAIN, "predictor": PREDICTOR}) == ["spec.predictor"]


@pytest.mark.parametrize(
    ("spec", "field"),
    [
        ({"model": {"name": "llama"}}, "spec.engine"),
        ({"model": {"name": "llama"}, "decoder": {}}, "spec.decoder"),
        ({"engine": {}}, "spec.model"),
        ({"model": {"name": "nobody"}, "engine": {}}, "spec.model.name"),
        ({"model": {"name": "old"}, "engine": {}}, "spec.model.name"),
        ({"model": {"name": "llama", "kind": "BaseModel"}, "engine": {}}, "spec.model.kind"),
        ({**PLAIN, "runtime": {"name": "nobody"}}, "spec.runtime.name"),
        ({**PLAIN, "runtime": {"name": "dead"}}, "spec.runtime.name"),
        (
            {"model": {"name": "llama", "fineTunedWeights": ["lora", "lora"]}, "engine": {}},
            "spec.model.fineTunedWeights",
        ),
        ({"model": {"name": "llama", "fineTunedWeights": ["none"]}, "engine": {}}, "spec.model.fineTunedWeights[0]"),
        ({"model": {"name": "llama", "fineTunedWeights": ["gone"]}, "engine": {}}, "spec.model.fineTunedWeights[0]"),
        ({**PLAIN, "engine": {"minReplicas": 4, "maxReplicas": 2}}, "spec.engine.minReplicas"),
        ({**PLAIN, "router": {"minReplicas": 4, "maxReplicas": 2}}, "spec.router.minReplicas"),
        ({**PLAIN, "engine": {"canaryTrafficPercent": 101}}, "spec.engine.canaryTrafficPercent"),
        ({**PLAIN, "engine": {"canaryTrafficPercent": -1}}, "spec.engine.canaryTrafficPercent"),
        ({**PLAIN, "engine": {"minAvailable": 1, "maxUnavailable": "25%"}}, "spec.engine.minAvailable"),
        (
            {**PLAIN, "engine": {"deploymentStrategy": {"type": "Recreate", "rollingUpdate": {"maxSurge": 1}}}},
            "spec.engine.deploymentStrategy.rollingUpdate",
        ),
        (
            {**PLAIN, "engine": {"deploymentStrategy": {"rollingUpdate": {"maxSurge": 0, "maxUnavailable": "0%"}}}},
            "spec.engine.deploymentStrategy.rollingUpdate",
        ),
        ({**PLAIN, "kedaConfig": {"authModes": "basic,magic"}}, "spec.kedaConfig.authModes"),
        ({**PLAIN, "slo": {"percentile": 99}}, "spec.slo"),
        ({**PLAIN, "slo": {"ttftMilliseconds": 0}}, "spec.slo.ttftMilliseconds"),
        ({**PLAIN, "slo": {"ttftMiliseconds": 500}}, "spec.slo.ttftMiliseconds"),
        ({**PLAIN, "slo": {"ttftMilliseconds": 500, "percentile": 100}}, "spec.slo.percentile"),
        ({**PLAIN, "slo": {"ttftMilliseconds": 5}, "engine": {"scaleMetric": "cpu"}}, "spec.engine.scaleMetric"),
        (
            {**PLAIN, "slo": {"ttftMilliseconds": 5}, "kedaConfig": {"customPromQuery": "x"}},
            "spec.kedaConfig.customPromQuery",
        ),
        ({**PLAIN, "engine": {"slo": {}}}, "spec.engine.slo"),
        ({**PLAIN, "router": {"slo": {"ttftMilliseconds": 5}}}, "spec.router.slo"),
        ({**PLAIN, "kedaConfig": {"scalingOperator": "Above"}}, "spec.kedaConfig.scalingOperator"),
        ({**PLAIN, "kedaConfig": {"scalingThreshold": "many"}}, "spec.kedaConfig.scalingThreshold"),
        ({**PLAIN, "kedaConfig": {"promServerAddress": "ftp://x"}}, "spec.kedaConfig.promServerAddress"),
        ({**PLAIN, "engine": {"kedaConfig": {"authModes": "x"}}}, "spec.engine.kedaConfig.authModes"),
        ({**PLAIN, "router": {"config": {"routing_strategy": "magic"}}}, "spec.router.config[routing_strategy]"),
        (
            {**PLAIN, "router": {"config": {"health_check_interval": "soon"}}},
            "spec.router.config[health_check_interval]",
        ),
        ({**PLAIN, "router": {"config": {"routing_stratgy": "random"}}}, "spec.router.config[routing_stratgy]"),
        ({**PLAIN, "router": {"config": {"a b": "c"}}}, "spec.router.config[a b]"),
        ({**PLAIN, "engine": {"labels": {"a": "b c"}}}, "spec.engine.labels[a]"),
        ({**PLAIN, "engine": {"labels": {"a": "b" * 64}}}, "spec.engine.labels[a]"),
        ({**PLAIN, "engine": {"annotations": {"/a": "b"}}}, "spec.engine.annotations[/a]"),
        ({**PLAIN, "engine": {"annotations": {MODE: "Rawr"}}}, f"spec.engine.annotations[{MODE}]"),
        ({**PLAIN, "engine": {"containers": [{"name": "a"}, {"name": "a"}]}}, "spec.engine.containers[1].name"),
        ({**PLAIN, "acceleratorSelector": {"acceleratorClass": "b200"}}, "spec.acceleratorSelector.acceleratorClass"),
        (
            {**PLAIN, "engine": {"acceleratorOverride": {"acceleratorClass": "b200"}}},
            "spec.engine.acceleratorOverride.acceleratorClass",
        ),
        (
            {**PLAIN, "acceleratorSelector": {"constraints": {"minMemory": 80, "maxMemory": 40}}},
            "spec.acceleratorSelector.constraints.minMemory",
        ),
        ({**PLAIN, "engine": 3}, "spec.engine"),
    ],
)
def test_invalid_services(spec: dict[str, Any], field: str) -> None:
    result = admission.validate(service(spec), small_cluster())
    assert [item.field for item in result] == [field], result
    assert all(item.message and item.fix for item in result)


@pytest.mark.parametrize(
    ("name", "bad", "good"),
    [
        (MODE, "Raw", "PDDisaggregated"),
        ("ome.io/autoscalerClass", "kpa", "keda"),
        ("ome.io/metrics", "rps", "memory"),
        ("ome.io/targetUtilizationPercentage", "101", "100"),
        ("ome.io/targetUtilizationPercentage", "0", "1"),
        ("ome.io/targetUtilizationPercentage", "x", "50"),
        ("autoscaling.keda.sh/operator", "Above", "LessThan"),
        ("autoscaling.keda.sh/threshold", "nan", "0.5"),
        ("autoscaling.keda.sh/prometheus.serverAddress", "prom:9090", "https://prom:9090"),
        ("ome.io/accelerator-class", "b200", "h100"),
        ("ome.io/service-type", "ClusterIp", "NodePort"),
        ("ome.io/ingress-url-scheme", "ftp", "https"),
        ("ome.io/ingress-disable-creation", "yes", "false"),
        ("ome.io/slo", "1 s", '{"ttftMilliseconds": 1000}'),
        ("ome.io/slo", "{}", '{"tpotMilliseconds": 40, "percentile": 99}'),
    ],
)
def test_annotations_of_a_service(name: str, bad: str, good: str) -> None:
    assert fields(PLAIN, **{name: bad}) == [f"metadata.annotations[{name}]"]
    assert fields(PLAIN, **{name: good}) == []


def test_names_that_overflow_are_reported_and_long_ones_are_fine() -> None:
    assert fields(PLAIN, name="a" * 64) == ["metadata.name"]
    assert fields(PLAIN, name="a" * 63) == []


@pytest.mark.parametrize(
    "spec",
    [
        {"engine": {"runner": {"image": "i"}}},
        {"engine": {"leader": {"runner": {"image": "i"}}, "worker": {"size": 1, "runner": {"image": "i"}}}},
        {"engine": {}, "runtime": {"name": "vllm"}},
        {"engine": {}, "runtime": {"name": "local", "kind": "ServingRuntime"}},
        {"engine": {}, "model": {"name": "own"}},
        {**PLAIN, "kedaConfig": {"enableKeda": True, "customPromQuery": "a{x=~'%s'} % 5 > 10%"}},
        {
            **PLAIN,
            "engine": {"runner": {"image": "i", "command": ["sh", "-c", "{% if x %}{{ bos_token }}{% endif %}"]}},
        },
        {
            **PLAIN,
            "router": {"config": {"routing_strategy": "cache_aware", "health_check_interval": "30s", "MY_OWN": "1"}},
        },
    ],
)
def test_valid_services(spec: dict[str, Any]) -> None:
    assert fields(spec) == []


def test_a_virtual_service_needs_nothing() -> None:
    assert fields({"model": {"name": "elsewhere"}}, **{MODE: "VirtualDeployment"}) == []


def test_every_problem_is_reported_together() -> None:
    spec = {
        "model": {"name": "nobody"},
        "runtime": {"name": "none"},
        "engine": {"minReplicas": "x", "timeoutSeconds": 0},
    }
    assert set(fields(spec)) == {
        "spec.model.name",
        "spec.runtime.name",
        "spec.engine.minReplicas",
        "spec.engine.timeoutSeconds",
    }


def runtime(name: str = "r", **spec: Any) -> dict[str, Any]:
    entry = {"name": "safetensors", "modelFormat": {"name": "safetensors"}, "autoSelect": True, "priority": 1}
    return document(
        "ClusterServingRuntime", name, {"supportedModelFormats": [entry], "protocolVersions": ["openAI"], **spec}
    )


@pytest.mark.parametrize(
    ("spec", "field"),
    [
        ({"workers": {"size": 0}}, "spec.workers.size"),
        ({"workers": {}}, "spec.workers.size"),
        ({"containers": [{"name": "c", "env": [{"name": "DEPLOYMENT_MODE", "value": "MultiNode"}]}]}, "spec.workers"),
        (
            {
                "workers": {"size": 1},
                "containers": [{"name": "c", "env": [{"name": "DEPLOYMENT_MODE", "value": "RawDeployment"}]}],
            },
            "spec.workers",
        ),
        (
            {"acceleratorRequirements": {"acceleratorClasses": ["h100", "b200"]}},
            "spec.acceleratorRequirements.acceleratorClasses[1]",
        ),
        ({"modelSizeRange": {"min": "1.2T", "max": "70B"}}, "spec.modelSizeRange.min"),
        ({"modelSizeRange": {"min": "seven"}}, "spec.modelSizeRange.min"),
        ({"engineConfig": {"minReplicas": 2, "maxReplicas": 1}}, "spec.engineConfig.minReplicas"),
        ({"routerConfig": {"kedaConfig": {"authModes": "x"}}}, "spec.routerConfig.kedaConfig.authModes"),
        (
            {"supportedModelFormats": [{"name": "a", "priority": 1}, {"name": "a", "priority": 2}]},
            "spec.supportedModelFormats[1].priority",
        ),
    ],
)
def test_invalid_runtimes(spec: dict[str, Any], field: str) -> None:
    assert [item.field for item in admission.validate(runtime(**spec), small_cluster())] == [field]


def test_a_disabled_runtime_may_have_any_values_that_fit_the_schema() -> None:
    assert admission.validate(runtime(disabled=True, workers={"size": 0}), small_cluster()) == []
    assert admission.validate(runtime(modelSizeRange={"max": "7B"}, workers={"size": 2}), small_cluster()) == []


def test_two_runtimes_may_not_be_equally_right() -> None:
    facts = small_cluster(runtime("r"), runtime("other"), runtime("off", disabled=True, protocolVersions=["cohere"]))
    (problem,) = admission.validate(runtime("r"), facts)
    assert problem.field == "spec.supportedModelFormats[0]"
    assert "other" in problem.message
    assert admission.validate(runtime("r", modelSizeRange={"min": "1B", "max": "7B"}), facts) == []
    assert admission.validate(runtime("r", protocolVersions=["openInference-v2"]), facts) == []
    assert admission.validate(runtime("r", protocolVersions=["cohere"]), facts) == []
    own = {**runtime("r"), "kind": "ServingRuntime"}
    assert admission.validate(own, facts) == []


@pytest.mark.parametrize(
    ("uri", "good"),
    [
        ("hf://meta/llama@main", True),
        ("hf://meta/llama/x", False),
        ("s3://bucket/prefix", True),
        ("pvc://claim/a/b", True),
        ("pvc://team:claim/a", True),
        ("pvc://claim", False),
        ("local:///mnt/x", True),
        ("local://x", False),
        ("oci://n/a/b/c/o/d", True),
        ("ftp://x/y", False),
        ("vendor://openai/gpt/x", True),
        ("nothing", False),
    ],
)
@pytest.mark.parametrize("kind", ["BaseModel", "ClusterBaseModel", "FineTunedWeight"])
def test_model_locations(kind: str, uri: str, good: bool) -> None:
    result = admission.validate(document(kind, "m", {"storage": {"storageUri": uri}}), small_cluster())
    assert [item.field for item in result] == ([] if good else ["spec.storage.storageUri"])


def test_benchmark_jobs() -> None:
    spec = {"endpoint": {"inferenceService": {"name": "x"}}, "task": "text-to-text", "maxTimePerIteration": 5,
            "maxRequestsPerIteration": 10, "outputLocation": {"storageUri": "pvc://claim/out"},
            "trafficScenarios": ["U(5,12)", "D(100,100)", "N(480,240)/(300,150)"]}  # fmt: skip

    def found(**changed: Any) -> list[str]:
        return [
            item.field
            for item in admission.validate(document("BenchmarkJob", "b", {**spec, **changed}), small_cluster())
        ]

    assert found() == []
    assert found(task="text-to-embeddings", trafficScenarios=["E(512)"]) == []
    assert found(trafficScenarios=["E(512)"]) == ["spec.trafficScenarios[0]"]
    assert found(endpoint={}) == ["spec.endpoint"]
    assert found(endpoint={"inferenceService": {"name": "x"}, "endpoint": {"url": "http://x"}}) == ["spec.endpoint"]
    assert found(outputLocation={}) == ["spec.outputLocation.storageUri"]
    assert found(outputLocation={"storageUri": "ftp://x"}) == ["spec.outputLocation.storageUri"]
    assert found(trafficScenarios=["X(1)"]) == ["spec.trafficScenarios[0]"]
    assert admission.validate(document("AcceleratorClass", "a", {}), small_cluster()) == []


def test_the_examples_of_the_specification_are_accepted_unchanged() -> None:
    read = yaml_documents.read([Path(__file__).parent / "seed_examples.yaml"])
    assert not read.problems
    services = [document for document in read.documents if document.get("kind") == "InferenceService"]
    parts = [document["spec"] for document in read.documents if set(document) == {"spec"}]
    assert (len(services), len(parts)) == (5, 3)
    models = [document("ClusterBaseModel", name, {}) for name in ("llama-3-70b-instruct", "deepseek-r1")]
    facts = small_cluster(*models, document("ClusterServingRuntime", "vllm-text-generation", {}))
    for service_document in services:
        named = {**service_document, "metadata": service_document.get("metadata", {"name": "llama"})}
        assert admission.validate(named, facts) == []
    for spec in parts:
        assert admission.validate(service({**PLAIN, **spec}), facts) == []
    (status,) = [document for document in read.documents if "status" in document]
    assert schema.validate_status({"kind": "InferenceService", **status}) == []


NAMES = sorted({item.name for kind in KINDS for _, item, _ in ways(kind.spec) if item.name})
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(NAMES) | st.text(max_size=4), inner, max_size=4)
    ),
    max_leaves=14,
)


@given(st.sampled_from(KINDS), JSON, JSON)
def test_no_document_raises_at_admission(kind: Kind, spec: Any, metadata: Any) -> None:
    given = {**whole_document(kind, spec), "metadata": metadata}
    facts = small_cluster(given)
    for item in admission.validate(given, facts):
        assert isinstance(item, Problem) and item.message and item.fix
    admission.with_defaults(given, facts)


@pytest.mark.parametrize("kind", KINDS, ids=[kind.name for kind in KINDS])
def test_defaulting_twice_changes_nothing(kind: Kind) -> None:
    given = whole_document(kind, sample(kind.spec, full=True))
    created = admission.with_defaults(given, small_cluster())
    assert admission.with_defaults(created, small_cluster()) == created
