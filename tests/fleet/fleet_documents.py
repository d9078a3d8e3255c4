# SPDX-License-Identifier: Apache-2.0
"""Small documents for tests of schema and admission."""

from __future__ import annotations

from typing import Any

from headrace.fleet.documents import ClusterFacts, FleetSettings, cluster_facts


def document(kind: str, name: str, spec: Any, namespace: str = "", **annotations: str) -> dict[str, Any]:
    metadata: dict[str, Any] = {"name": name}
    if namespace:
        metadata["namespace"] = namespace
    if annotations:
        metadata["annotations"] = annotations
    return {"apiVersion": "ome.io/v1beta1", "kind": kind, "metadata": metadata, "spec": spec}


def service(spec: dict[str, Any], name: str = "llama-chat", **annotations: str) -> dict[str, Any]:
    return document("InferenceService", name, spec, **annotations)


def small_cluster(*more: dict[str, Any], settings: FleetSettings | None = None) -> ClusterFacts:
    """One model and one runtime of the cluster, one of each in the namespace, one of each disabled, a weight, a class."""
    return cluster_facts(
        [
            document("ClusterBaseModel", "llama", {"modelFormat": {"name": "safetensors"}}),
            document("ClusterBaseModel", "old", {"disabled": True}),
            document("BaseModel", "own", {}, "default"),
            document("ClusterServingRuntime", "vllm", {}),
            document("ClusterServingRuntime", "dead", {"disabled": True}),
            document("ServingRuntime", "local", {}, "default"),
            document("FineTunedWeight", "lora", {}),
            document("FineTunedWeight", "gone", {"disabled": True}),
            document("AcceleratorClass", "h100", {}),
            *more,
        ],
        settings,
    )
