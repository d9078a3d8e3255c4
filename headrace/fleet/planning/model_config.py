# SPDX-License-Identifier: Apache-2.0
"""The ConfigMap that tells programs in the cluster what a service serves."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from headrace.fleet.names import SERVICE_LABEL, model_config_name, trunc63
from headrace.fleet.planning.site import Object, Site
from headrace.fleet.words import Document, name_of, part, text

_CONFIG_MAP = ("v1", "ConfigMap")


def model_config(site: Site, model: Document | None, weights: Sequence[Document]) -> list[Object]:
    """The ConfigMap of a service's model; none for a service without."""
    if model is None:
        return []
    entry: dict[str, Any] = {"modelName": name_of(model), "modelSpec": _described(model)}
    if weights:
        entry["fineTunedWeightSpec"] = _described(weights[0])
    data = {"models.json": json.dumps([entry], sort_keys=True)}
    return [site.made(_CONFIG_MAP, model_config_name(site.name), {SERVICE_LABEL: trunc63(site.name)}, data=data)]


def _described(model: Document) -> dict[str, Any]:
    spec = part(model, "spec")
    storage = part(spec, "storage")
    told: dict[str, Any] = {
        "storageUri": text(storage, "storageUri"),
        "path": text(storage, "path"),
        "schemaPath": text(storage, "schemaPath"),
        # Anybody in the namespace may read a ConfigMap.
        "parameters": {name: value for name, value in part(storage, "parameters").items() if name != "token"},
        "storageKey": text(storage, "key"),
        "modelFormatName": text(spec, "modelFormat", "name"),
        "modelFormatVersion": text(spec, "modelFormat", "version"),
        "modelType": text(spec, "modelType"),
        "modelFrameworkName": text(spec, "modelFramework", "name"),
        "modelFrameworkVersion": text(spec, "modelFramework", "version"),
    }
    return {name: value for name, value in told.items() if value}
