# SPDX-License-Identifier: Apache-2.0
"""Models, runtimes and accelerator classes for tests of selection and merging."""

from __future__ import annotations

from typing import Any

from fleet_documents import document

from headrace.fleet.documents import ClusterFacts, FleetSettings, cluster_facts

Json = dict[str, Any]


def model(name: str = "llama", **spec: Any) -> Json:
    facts: Json = {
        "modelFormat": {"name": "safetensors", "version": "1.0.0"},
        "modelFramework": {"name": "transformers", "version": "4.43.0"},
        "modelArchitecture": "LlamaForCausalLM",
        "modelParameterSize": "8B",
        "storage": {"storageUri": "hf://meta/llama", "path": f"/mnt/models/{name}"},
    }
    facts.update(spec)
    return document("ClusterBaseModel", name, {key: value for key, value in facts.items() if value is not None})


def entry(**fields: Any) -> Json:
    document: Json = {
        "modelFormat": {"name": "safetensors", "version": "1.0.0"},
        "modelFramework": {"name": "transformers", "version": "4.43.0"},
        "modelArchitecture": "LlamaForCausalLM",
        "autoSelect": True,
        "priority": 1,
    }
    document.update(fields)
    return {key: value for key, value in document.items() if value is not None}


def runtime(name: str, *entries: Json, namespace: str = "", size: tuple[str, str] = ("", ""), **spec: Any) -> Json:
    facts: Json = {
        "supportedModelFormats": list(entries) or [entry()],
        "engineConfig": {"runner": {"name": "ome-container", "image": f"{name}:1"}},
    }
    limits = {key: value for key, value in zip(("min", "max"), size, strict=True) if value}
    if limits:
        facts["modelSizeRange"] = limits
    facts.update(spec)
    kept = {key: value for key, value in facts.items() if value is not None}
    return document("ServingRuntime" if namespace else "ClusterServingRuntime", name, kept, namespace)


def service(namespace: str = "", labels: dict[str, str] | None = None, notes: Any = None, **spec: Any) -> Json:
    facts: Json = {"model": {"name": "llama"}, "engine": {}}
    facts.update(spec)
    created = document(
        "InferenceService", "chat", {key: value for key, value in facts.items() if value is not None}, namespace
    )
    if labels:
        created["metadata"]["labels"] = labels
    if notes:
        created["metadata"]["annotations"] = notes
    return created


def accelerator(name: str, memory: str = "80Gi", **spec: Any) -> Json:
    facts: Json = {
        "vendor": "nvidia",
        "family": "hopper",
        "discovery": {"nodeSelector": {"gpu": name}},
        "capabilities": {"memoryGB": memory, "computeCapability": "9.0", "features": ["nvlink"]},
        "resources": [{"name": "nvidia.com/gpu", "quantity": "1"}],
    }
    facts.update(spec)
    return document("AcceleratorClass", name, facts)


def facts(*documents: Json, upstream: bool = False, **settings: Any) -> ClusterFacts:
    return cluster_facts(documents, FleetSettings(upstream_selection=upstream, **settings))
