# SPDX-License-Identifier: Apache-2.0
"""The mode of each component, rule by rule."""

from __future__ import annotations

from dataclasses import replace

import pytest
from selection_documents import Json, facts, service

from headrace.fleet.merging.components import Mode, choose_mode

MODE = "ome.io/deploymentMode"


def mode(name: str, component: Json, *, notes: Json | None = None, upstream: bool = False, default: str = "RawDeployment",
         knative: bool = True, **spec: Json) -> Mode:  # fmt: skip
    known = facts(upstream=upstream, default_mode=default)
    if not knative:
        known = replace(known, capabilities=frozenset())
    return choose_mode(name, component, service(notes=notes, **{name: component, **spec}), known)


@pytest.mark.parametrize("upstream", [False, True])
@pytest.mark.parametrize(
    ("name", "component", "expected"),
    [
        ("engine", {}, "RawDeployment"),
        ("engine", {"minReplicas": 1}, "RawDeployment"),
        ("engine", {"minReplicas": 0}, "Serverless"),
        ("engine", {"leader": {}}, "MultiNode"),
        ("engine", {"worker": {"size": 1}, "minReplicas": 0}, "MultiNode"),
        ("engine", {"annotations": {MODE: "MultiNodeRayVLLM"}}, "MultiNodeRayVLLM"),
        ("engine", {"annotations": {MODE: "RawDeployment"}, "worker": {}, "minReplicas": 0}, "RawDeployment"),
        ("engine", {"annotations": {MODE: "PDDisaggregated"}, "minReplicas": 0}, "Serverless"),
        ("engine", {"annotations": {MODE: "Nonsense"}}, "RawDeployment"),
        ("decoder", {}, "RawDeployment"),
        ("decoder", {"minReplicas": 0}, "RawDeployment"),
        ("decoder", {"annotations": {MODE: "Serverless"}}, "RawDeployment"),
        ("decoder", {"worker": {}}, "MultiNode"),
        ("router", {}, "RawDeployment"),
        ("router", {"minReplicas": 0}, "Serverless"),
        ("router", {"annotations": {MODE: "Serverless"}}, "RawDeployment"),
    ],
)
def test_the_table(name: str, component: Json, expected: str, upstream: bool) -> None:
    result = mode(name, component, upstream=upstream)
    assert result.mode == expected and result.rule


def test_with_a_decoder_nothing_is_serverless() -> None:
    result = mode("engine", {"minReplicas": 0}, decoder={})
    assert result == Mode("RawDeployment", "minReplicas is 0, but with a decoder there is no Serverless")
    assert mode("engine", {"annotations": {MODE: "Serverless"}}, decoder={}).mode == "RawDeployment"


def test_a_virtual_service_is_virtual_throughout() -> None:
    for name in ("engine", "decoder", "router"):
        assert mode(name, {}, notes={MODE: "VirtualDeployment"}).mode == "VirtualDeployment"


def test_scale_to_zero_without_knative_is_a_deployment_and_reported() -> None:
    result = mode("engine", {"minReplicas": 0}, knative=False)
    assert result.mode == "RawDeployment" and "no Knative" in result.rule
    assert mode("engine", {"minReplicas": 0}, knative=False, upstream=True).mode == "Serverless"


def test_scale_to_zero_as_a_deployment_because_the_service_requests_it() -> None:
    result = mode("engine", {"minReplicas": 0}, notes={MODE: "RawDeployment"})
    assert result.mode == "RawDeployment" and f"annotation {MODE} is RawDeployment" in result.rule
    assert mode("engine", {"minReplicas": 0}, notes={MODE: "RawDeployment"}, upstream=True).mode == "Serverless"
    assert mode("router", {"minReplicas": 0}, notes={MODE: "RawDeployment"}).mode == "Serverless", "admission wrote it"


@pytest.mark.parametrize("asked", ["Serverless", "MultiNodeRayVLLM"])
def test_the_services_annotation_counts_where_ome_forgets_it(asked: str) -> None:
    assert mode("engine", {}, notes={MODE: asked}).mode == asked
    assert mode("engine", {}, notes={MODE: asked}, upstream=True).mode == "RawDeployment"


def test_what_admission_wrote_does_not_overrule_a_runtime_with_workers() -> None:
    assert mode("engine", {"worker": {"size": 1}}, notes={MODE: "RawDeployment"}).mode == "MultiNode"


def test_the_operators_default_applies_to_services_without_a_mode() -> None:
    assert mode("engine", {}, default="Serverless").mode == "Serverless"
    assert mode("engine", {}, default="Serverless", upstream=True).mode == "RawDeployment"
    assert mode("engine", {}, default="Serverless", notes={MODE: "RawDeployment"}).mode == "RawDeployment"
    assert mode("decoder", {}, default="Serverless").mode == "RawDeployment"
