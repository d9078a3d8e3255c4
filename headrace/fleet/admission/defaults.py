# SPDX-License-Identifier: Apache-2.0
"""Fill in the defaults of a document that depend on other fields, the cluster or the deprecated `spec.predictor`.

Called by the mutating webhook, by planning and by the commands that read files, so that all see the same service.
"""

from __future__ import annotations

from typing import Any

from headrace.fleet import schema
from headrace.fleet.documents import ClusterFacts, namespace_of
from headrace.fleet.names import (
    DEPLOYMENT_MODE,
    DEPRECATION_WARNING,
    GROUP,
    MAIN_CONTAINER,
    MULTI_NODE,
    PD_DISAGGREGATED,
    RAW,
    SERVICE,
)
from headrace.platforms.kubernetes_client.objects import (
    Document,
    annotations_of,
    get_int,
    get_list,
    get_mapping,
    get_str,
    kind_of,
)

MIN_REPLICAS = 1
MAX_REPLICAS = {"engine": 3, "decoder": 3, "router": 2}


def with_defaults(service: Document, facts: ClusterFacts) -> Document:
    """Return the document with its defaults. Kinds other than InferenceService get only those of their schema."""
    document = schema.with_defaults(service)
    if kind_of(document) != SERVICE:
        return document
    if facts.settings.migrate_predictor:
        document = migrate_predictor(document, facts)
    return _with_mode(_with_replicas(document), facts)


def _with_replicas(service: Document) -> Document:
    changed: dict[str, Any] = {}
    for name, maximum in MAX_REPLICAS.items():
        component = get_mapping(service, "spec").get(name)
        if not isinstance(component, dict) or ("minReplicas" in component and "maxReplicas" in component):
            continue
        minimum = component.get("minReplicas", MIN_REPLICAS)
        # A minimum above the default maximum raises it.
        enough = max(maximum, minimum) if isinstance(minimum, int) else maximum
        changed[name] = {**component, "minReplicas": minimum, "maxReplicas": component.get("maxReplicas", enough)}
    return {**service, "spec": {**service["spec"], **changed}} if changed else service


def _with_mode(service: Document, facts: ClusterFacts) -> Document:
    if DEPLOYMENT_MODE in get_mapping(service, "metadata", "annotations"):
        return service
    mode = _mode(get_mapping(service, "spec"), facts)
    if not mode:
        return service
    metadata = get_mapping(service, "metadata")
    annotations = {**annotations_of(service), DEPLOYMENT_MODE: mode}
    return {**service, "metadata": {**metadata, "annotations": annotations}}


def _mode(spec: Document, facts: ClusterFacts) -> str:
    engine = get_mapping(spec, "engine")
    if "engine" in spec and "decoder" in spec:
        return PD_DISAGGREGATED
    if (get_int(engine, "worker", "size") or 0) > 0:
        return MULTI_NODE
    # OME writes RawDeployment here even if the engine becomes Serverless, and then reads the wrong conditions.
    if get_int(engine, "minReplicas") == 0:
        return ""
    return RAW if facts.settings.default_mode == RAW else ""


WARNING = "spec.predictor is deprecated: it became spec.engine, spec.model and spec.runtime. Write those instead."

_MODEL_FIELDS = ("baseModel", "runtime", "storageUri", "protocolVersion", "fineTunedWeights")
"""Fields of `predictor.model` that are not fields of a container."""


def migrate_predictor(service: Document, facts: ClusterFacts) -> Document:
    """Turn `spec.predictor` into engine, model and runtime. A service with an engine or a model is left alone."""
    spec = get_mapping(service, "spec")
    predictor = get_mapping(spec, "predictor")
    if not predictor or "engine" in spec or "model" in spec:
        return service
    migrated: dict[str, Any] = {name: value for name, value in spec.items() if name != "predictor"}
    model = get_mapping(predictor, "model")
    name = get_str(model, "baseModel")
    if name:
        migrated["model"] = _model(model, name, namespace_of(service), facts)
    if get_str(model, "runtime"):
        migrated["runtime"] = {"name": get_str(model, "runtime"), "kind": "ClusterServingRuntime", "apiGroup": GROUP}
    migrated["engine"] = _engine(predictor, model)
    metadata = get_mapping(service, "metadata")
    annotations = {**get_mapping(metadata, "annotations"), DEPRECATION_WARNING: WARNING}
    return {**service, "metadata": {**metadata, "annotations": annotations}, "spec": migrated}


def _model(model: Document, name: str, namespace: str, facts: ClusterFacts) -> Document:
    live = facts.model("", name) or facts.model(namespace, name)
    kind = get_str(live, "kind") if live is not None else "ClusterBaseModel"
    weights = get_list(model, "fineTunedWeights")
    reference: dict[str, Any] = {"name": name, "kind": kind, "apiGroup": GROUP}
    return {**reference, "fineTunedWeights": weights} if weights else reference


def _engine(predictor: Document, model: Document) -> Document:
    engine: dict[str, Any] = {
        name: value for name, value in predictor.items() if name not in ("model", "workerSpec", "containers")
    }
    containers = [container for container in get_list(predictor, "containers") if isinstance(container, dict)]
    main = _main_container(containers)
    if main is not None:
        engine["runner"] = _with_env(main, [*get_list(model, "env"), *_storage_variables(model)])
        containers = [container for container in containers if container is not main]
    elif get_str(model, "name"):
        runner = {name: value for name, value in model.items() if name not in _MODEL_FIELDS}
        engine["runner"] = _with_env(runner, _storage_variables(model))
    if containers:
        engine["containers"] = containers
    worker = predictor.get("workerSpec", predictor.get("worker"))
    engine.pop("worker", None)
    return engine if worker is None else {**engine, "worker": worker}


def _main_container(containers: list[Any]) -> dict[str, Any] | None:
    """Return the main container: by its name, else the first."""
    main = [
        container
        for container in containers
        if get_str(container, "name") == MAIN_CONTAINER or "ome" in get_str(container, "name").lower()
    ]
    first: dict[str, Any] | None = next(iter([*main, *containers]), None)
    return first


def _storage_variables(model: Document) -> list[Document]:
    pairs = (("STORAGE_URI", get_str(model, "storageUri")), ("PROTOCOL_VERSION", get_str(model, "protocolVersion")))
    return [{"name": name, "value": value} for name, value in pairs if value]


def _with_env(runner: Document, more: list[Any]) -> Document:
    return {**runner, "env": [*get_list(runner, "env"), *more]} if more else runner
