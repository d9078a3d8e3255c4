# SPDX-License-Identifier: Apache-2.0
"""The deprecated `spec.predictor` turned into engine, model and runtime.

Called by `defaulting`. A service that has an engine or a model already is left alone: `checking` says so.
"""

from __future__ import annotations

from typing import Any

from headrace.fleet.names import DEPRECATION_WARNING, GROUP, MAIN_CONTAINER
from headrace.fleet.words import ClusterFacts, Document, items, namespace_of, part, text

WARNING = "spec.predictor is deprecated: it became spec.engine, spec.model and spec.runtime. Write those instead."

_MODEL_OWN = ("baseModel", "runtime", "storageUri", "protocolVersion", "fineTunedWeights")
"""Fields of `predictor.model` that are not fields of a container."""


def migrated(service: Document, facts: ClusterFacts) -> Document:
    """The service without a predictor, if it has one that says something."""
    spec = part(service, "spec")
    predictor = part(spec, "predictor")
    if not predictor or "engine" in spec or "model" in spec:
        return service
    made: dict[str, Any] = {name: value for name, value in spec.items() if name != "predictor"}
    model = part(predictor, "model")
    name = text(model, "baseModel")
    if name:
        made["model"] = _model(model, name, namespace_of(service), facts)
    if text(model, "runtime"):
        made["runtime"] = {"name": text(model, "runtime"), "kind": "ClusterServingRuntime", "apiGroup": GROUP}
    made["engine"] = _engine(predictor, model)
    metadata = part(service, "metadata")
    annotations = {**part(metadata, "annotations"), DEPRECATION_WARNING: WARNING}
    return {**service, "metadata": {**metadata, "annotations": annotations}, "spec": made}


def _model(model: Document, name: str, namespace: str, facts: ClusterFacts) -> Document:
    found = facts.model("", name) or facts.model(namespace, name)
    kind = text(found, "kind") if found is not None else "ClusterBaseModel"
    weights = items(model, "fineTunedWeights")
    made: dict[str, Any] = {"name": name, "kind": kind, "apiGroup": GROUP}
    return {**made, "fineTunedWeights": weights} if weights else made


def _engine(predictor: Document, model: Document) -> Document:
    engine: dict[str, Any] = {
        name: value for name, value in predictor.items() if name not in ("model", "workerSpec", "containers")
    }
    containers = [each for each in items(predictor, "containers") if isinstance(each, dict)]
    main = _main(containers)
    if main is not None:
        engine["runner"] = _with_env(main, [*items(model, "env"), *_told(model)])
        containers = [each for each in containers if each is not main]
    elif text(model, "name"):
        runner = {name: value for name, value in model.items() if name not in _MODEL_OWN}
        engine["runner"] = _with_env(runner, _told(model))
    if containers:
        engine["containers"] = containers
    worker = predictor.get("workerSpec", predictor.get("worker"))
    engine.pop("worker", None)
    return engine if worker is None else {**engine, "worker": worker}


def _main(containers: list[Any]) -> dict[str, Any] | None:
    """The container that serves: by its name, else the first."""
    named = [each for each in containers if text(each, "name") == MAIN_CONTAINER or "ome" in text(each, "name").lower()]
    first: dict[str, Any] | None = next(iter([*named, *containers]), None)
    return first


def _told(model: Document) -> list[Document]:
    pairs = (("STORAGE_URI", text(model, "storageUri")), ("PROTOCOL_VERSION", text(model, "protocolVersion")))
    return [{"name": name, "value": value} for name, value in pairs if value]


def _with_env(runner: Document, more: list[Any]) -> Document:
    return {**runner, "env": [*items(runner, "env"), *more]} if more else runner
