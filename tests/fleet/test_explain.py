# SPDX-License-Identifier: Apache-2.0
"""What would become of a service, from files alone."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import seed_examples
from fleet_cluster import MODELS, RUNTIMES
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace import fleet
from headrace.fleet.explain import ExplainInput, Explanation, explain, prepare, shipped_runtimes
from headrace.fleet.yaml_documents import ParsedFiles, Source, parse, read
from headrace.platforms.kubernetes_client.objects import name_of
from support.properties import examples

CLUSTER = f"{MODELS}---{RUNTIMES}"
EMPTY = ParsedFiles([], [])


def ask(text: str, around: str = CLUSTER, **more: Any) -> ExplainInput:
    return prepare(parse(text, "isvc.yaml"), parse(around, "cluster.yaml") if around else EMPTY, **more)


def one(text: str, around: str = CLUSTER, **more: Any) -> Explanation:
    answer = ask(text, around, **more)
    assert answer.errors == []
    [source] = answer.services
    return explain(source, answer)


def kinds(found: Explanation) -> set[str]:
    return {manifest["kind"] for manifest in found.objects}


@pytest.mark.parametrize(
    ("text", "name", "runtime", "modes", "made"),
    [
        (seed_examples.FIRST, "isvc", "vllm-text-generation", {"engine": "RawDeployment"}, "Deployment"),
        (seed_examples.ENGINE, "isvc", None, {"engine": "RawDeployment"}, "HorizontalPodAutoscaler"),
        (seed_examples.RAW, "llama-chat", "vllm-text-generation", {"engine": "RawDeployment"}, "Deployment"),
        (seed_examples.SERVERLESS, "llama-chat", "vllm-text-generation", {"engine": "Serverless"}, "Service"),
        (seed_examples.MULTI_NODE, "deepseek-chat", "deepseek-many-nodes", {"engine": "MultiNode"}, "LeaderWorkerSet"),
        (
            seed_examples.PAIRS,
            "deepseek-ep-disaggregated",
            "deepseek-pairs",
            {"engine": "RawDeployment", "decoder": "RawDeployment", "router": "RawDeployment"},
            "RoleBinding",
        ),
    ],
    ids=["first", "engine", "raw", "serverless", "multi-node", "pairs"],
)
def test_the_examples_of_the_specification(
    text: str, name: str, runtime: str | None, modes: dict[str, str], made: str
) -> None:
    answer = one(text)
    assert answer.errors == [] and name_of(answer.service) == name
    shown = answer.as_json()
    assert shown["runtime"]["name"] == runtime
    assert {item: told["mode"] for item, told in shown["components"].items()} == modes
    assert made in kinds(answer)
    assert all(manifest["metadata"]["ownerReferences"] for manifest in answer.objects)


@pytest.mark.parametrize(
    ("text", "field"), [(seed_examples.DECODER, "spec.decoder"), (seed_examples.ROUTER, "spec.engine")]
)
def test_partial_examples_report_what_is_missing(text: str, field: str) -> None:
    [error] = one(text).errors
    assert error.problem.field == field and error.place.startswith("isvc.yaml:")


def test_the_shape_for_programs() -> None:
    shown = one(seed_examples.RAW).as_json()
    assert list(shown) == ["runtime", "components", "objects", "errors"]
    assert list(shown["runtime"]) == ["name", "reason", "rejected"] and shown["runtime"]["reason"]
    assert all(
        list(rejection) == ["name", "reason"] and rejection["reason"] for rejection in shown["runtime"]["rejected"]
    )
    assert list(shown["components"]["engine"]) == ["mode", "rule"] and shown["components"]["engine"]["rule"]
    assert {"apiVersion", "kind", "metadata", "spec"} <= set(shown["objects"][1])
    bad = one(seed_examples.RAW.replace("maxReplicas: 10", "maxReplicas: 1")).as_json()
    assert bad["objects"] == [] and [list(error) for error in bad["errors"]] == [["field", "message", "fix"]]
    assert all(all(error.values()) for error in bad["errors"])


def test_every_rejected_runtime_is_reported_with_its_reason() -> None:
    runtime = one(seed_examples.RAW).as_json()["runtime"]
    shipped = {name_of(shipped_runtime) for shipped_runtime in shipped_runtimes()}
    assert shipped | {"deepseek-pairs", "deepseek-many-nodes"} == {
        rejection["name"] for rejection in runtime["rejected"]
    }


def test_the_shipped_runtimes_are_there_and_yours_take_precedence() -> None:
    names = [name_of(runtime) for runtime in ask(seed_examples.RAW, "").facts.runtimes]
    assert {"headrace-cpu", "headrace-gpu", "vllm", "sglang", "triton"} <= set(names)
    own = "apiVersion: ome.io/v1beta1\nkind: ClusterServingRuntime\nmetadata: {name: vllm}\nspec: {disabled: true}\n"
    facts = ask(seed_examples.RAW, own).facts
    assert [name_of(runtime) for runtime in facts.runtimes].count("vllm") == 1
    result = facts.runtime("default", "vllm")
    assert result is not None and result["spec"] == {"disabled": True}


def test_what_is_wrong_elsewhere_still_leaves_the_runtime_explained() -> None:
    answer = one(seed_examples.RAW.replace("minReplicas: 2", "minReplicas: 20"))
    [error] = answer.errors
    assert str(error).startswith("isvc.yaml:9: spec.engine.minReplicas: ") and answer.objects == []
    assert answer.as_json()["runtime"]["name"] == "vllm-text-generation"
    assert answer.as_json()["components"]["engine"]["mode"] == "RawDeployment"


def test_an_unknown_model_is_reported_at_its_line() -> None:
    answer = one(seed_examples.RAW, "")
    [error] = answer.errors
    assert error.place == "isvc.yaml:7" and "llama-3-70b-instruct" in error.problem.message


def test_a_wrong_type_in_the_chosen_runtime_is_an_error_and_in_another_a_warning() -> None:
    broken = CLUSTER.replace("max: 80B", "max: 80B\n  disabled: 3")
    answer = one(seed_examples.RAW, broken.replace("{min: 60B, max: 80B\n  disabled: 3}", "{min: 60B}\n  disabled: 3"))
    assert [error.problem.field for error in answer.errors] == [
        "ClusterServingRuntime vllm-text-generation: spec.disabled"
    ]
    assert answer.errors[0].place.startswith("cluster.yaml:")
    other = CLUSTER.replace("  name: deepseek-pairs\nspec:\n", "  name: deepseek-pairs\nspec:\n  disabled: 3\n")
    answer = one(seed_examples.RAW, other)
    assert answer.errors == []
    assert "ClusterServingRuntime deepseek-pairs: spec.disabled" in [
        warning.problem.field for warning in answer.warnings
    ]


def test_a_service_without_a_name_is_explained_under_its_files() -> None:
    answer = one(seed_examples.FIRST)
    assert [warning.problem.field for warning in answer.warnings] == ["metadata.name"]
    assert [warning.problem.field for warning in one(seed_examples.ENGINE).warnings] == ["kind", "metadata.name"]


def test_what_the_cluster_lacks_changes_the_plan() -> None:
    with_knative, without = one(seed_examples.SERVERLESS), one(seed_examples.SERVERLESS, lacking=["knative"])
    versions = [{manifest["apiVersion"] for manifest in found.objects} for found in (with_knative, without)]
    assert "serving.knative.dev/v1" in versions[0] and "serving.knative.dev/v1" not in versions[1]
    assert without.as_json()["components"]["engine"]["mode"] == "RawDeployment"


def test_no_service_is_an_error() -> None:
    [error] = ask(MODELS).errors
    assert "no InferenceService" in error.problem.message
    [error] = ask("a: [").errors
    assert error.problem.field == "isvc.yaml:1" or error.problem.field.startswith("isvc.yaml:")


SAMPLES = sorted((Path(fleet.__file__).parent / "samples").glob("*.yaml"))


@pytest.mark.parametrize("sample", SAMPLES, ids=lambda path: path.stem)
def test_the_samples_have_no_mistakes(sample: Path) -> None:
    request = prepare(read([sample]), EMPTY)
    assert request.services
    for service in request.services:
        explanation = explain(service, request)
        assert [str(problem) for problem in (*explanation.errors, *explanation.warnings)] == []
        assert explanation.objects or sample.stem == "virtual"


def test_a_folder_may_contain_other_files_and_a_kind_may_be_misspelt() -> None:
    strange = "kind: Kustomization\nresources: [a.yaml]\n---\napiVersion: v1\nkind: Secret\nmetadata: {name: a}\n---"
    answer = one(seed_examples.RAW, strange + CLUSTER)
    assert answer.errors == [] and answer.warnings == []
    errors = ask(seed_examples.RAW.replace("InferenceService", "InferenceServce")).errors
    assert [(error.problem.field, error.place) for error in errors] == [("", ""), ("kind", "isvc.yaml:2")]


def test_null_metadata_is_none() -> None:
    assert (
        one(
            "kind: InferenceService\napiVersion: ome.io/v1beta1\nmetadata:\nspec: {engine: {runner: {image: a}}}"
        ).errors
        == []
    )


VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-2, 5)
    | st.sampled_from(["", "a", "vllm", "llama-3-70b-instruct", "{{ .X }}"]),
    lambda inner: (
        st.lists(inner, max_size=2)
        | st.dictionaries(
            st.sampled_from(
                [
                    "annotations",
                    "args",
                    "containers",
                    "decoder",
                    "engine",
                    "env",
                    "fineTunedWeights",
                    "kedaConfig",
                    "kind",
                    "labels",
                    "leader",
                    "metadata",
                    "minReplicas",
                    "model",
                    "name",
                    "namespace",
                    "resources",
                    "router",
                    "runner",
                    "runtime",
                    "size",
                    "spec",
                    "volumes",
                    "worker",
                ]
            ),
            inner,
            max_size=4,
        )
    ),
    max_leaves=12,
)


@settings(max_examples=examples(100), deadline=None)
@given(
    VALUES,
    VALUES,
    st.sampled_from(["InferenceService", "ClusterServingRuntime", "ClusterBaseModel", "AcceleratorClass"]),
)
def test_no_document_makes_it_raise(spec: Any, metadata: Any, kind: str) -> None:
    document = {"apiVersion": "ome.io/v1beta1", "kind": kind, "metadata": metadata, "spec": spec}
    good = parse(seed_examples.RAW).sources
    request = prepare(ParsedFiles([Source(document), *good], []), AROUND, shipped=SHIPPED)
    for service in request.services:
        shown = explain(service, request)
        assert bool(shown.objects) != bool(shown.errors) or shown.errors == []


AROUND = parse(CLUSTER)
SHIPPED = shipped_runtimes()[:2]
