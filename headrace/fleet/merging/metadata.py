# SPDX-License-Identifier: Apache-2.0
"""Labels and annotations of a component's pods and objects, and the placeholders in its main container."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from headrace.fleet import names
from headrace.fleet.documents import namespace_of
from headrace.fleet.merging.pod_builder import has_merged_weights
from headrace.platforms.kubernetes_client.objects import (
    Document,
    annotations_of,
    get_mapping,
    get_str,
    labels_of,
    name_of,
)

_SERVICE_ONLY = frozenset(
    {names.KNATIVE_MIN_SCALE, names.KNATIVE_MAX_SCALE, names.STORAGE_URI_INTERNAL, names.LAST_APPLIED}
)
"""Annotations of a service that its pods do not get."""
_SMALL = "SMALL"
_DEDICATED_PRIORITY = "kueue-scheduling-high-priority"
_INVALID_CHARACTERS = re.compile(r"[^A-Za-z0-9_.-]+")


def labels_for(
    name: str,
    component: Document,
    service: Document,
    runtime: Document | None,
    model: Document | None,
    weights: Sequence[Document],
) -> dict[str, str]:
    """Return the labels of a component's pods and objects."""
    labels = {
        **labels_of(service),
        **_string_values(component, "labels"),
        names.SERVICE_LABEL: name_of(service),
        names.COMPONENT_LABEL: name,
        names.RUNTIME_LABEL: label_value(name_of(runtime)) if runtime is not None else "",
        names.FINE_TUNED_LABEL: _bool_label(bool(weights)),
    }
    if model is not None:
        labels[names.BASE_MODEL_NAME_LABEL] = label_value(name_of(model))
        labels[names.BASE_MODEL_SIZE_LABEL] = label_value(annotations_of(model).get(names.MODEL_CATEGORY, _SMALL))
        labels[names.BASE_MODEL_TYPE_LABEL] = "Serving"
        if get_str(model, "spec", "vendor"):
            labels[names.BASE_MODEL_VENDOR_LABEL] = label_value(get_str(model, "spec", "vendor"))
    if weights:
        labels[names.FT_STRATEGY_LABEL] = label_value(get_str(weights[0], "spec", "hyperParameters", "strategy"))
        labels[names.MERGED_WEIGHTS_LABEL] = _bool_label(has_merged_weights(weights))
    return {**labels, **_queue_labels({**annotations_of(service), **_string_values(component, "annotations")})}


def _queue_labels(annotations: dict[str, str]) -> dict[str, str]:
    """Return the labels of the batch queue of the pods."""
    queue, dedicated = annotations.get(names.VOLCANO_QUEUE, ""), annotations.get(names.DEDICATED_AI_CLUSTER, "")
    if dedicated and not queue and annotations.get(names.KUEUE_ENABLED) == "true":
        return {names.KUEUE_QUEUE_LABEL: label_value(dedicated), names.KUEUE_PRIORITY_LABEL: _DEDICATED_PRIORITY}
    return {names.VOLCANO_QUEUE_LABEL: label_value(queue or dedicated)} if queue or dedicated else {}


def annotations_for(
    component: Document,
    service: Document,
    runtime: Document | None,
    model: Document | None,
    weights: Sequence[Document],
) -> dict[str, str]:
    """Return the annotations of a component's pods and objects."""
    own = annotations_of(service).items()
    # Rollout annotations change during a rollout: pods must not be replaced for that.
    annotations = {key: value for key, value in own if key not in _SERVICE_ONLY and not key.startswith(names.ROLLOUT)}
    annotations.update(_string_values(component, "annotations"))
    if weights:
        annotations[names.FT_STRATEGY] = get_str(weights[0], "spec", "hyperParameters", "strategy")
    if has_merged_weights(weights):
        annotations[names.MERGED_WEIGHTS] = "true"
        annotations[names.INJECT_MODEL_INIT] = "false"
    elif model is not None:
        of_model = annotations_of(model)
        for key in (names.BASE_MODEL_DECRYPTION_KEY, names.BASE_MODEL_DECRYPTION_SECRET):
            if key in of_model:
                annotations[key] = of_model[key]
    if model is not None:
        spec = get_mapping(model, "spec")
        model_annotations = {
            names.BASE_MODEL_NAME: name_of(model),
            names.BASE_MODEL_VENDOR: get_str(spec, "vendor"),
            names.BASE_MODEL_FORMAT: get_str(spec, "modelFormat", "name"),
            names.BASE_MODEL_FORMAT_VERSION: get_str(spec, "modelFormat", "version"),
        }
        annotations.update({key: value for key, value in model_annotations.items() if value})
    if runtime is not None:
        annotations[names.SERVING_RUNTIME] = name_of(runtime)
    return annotations


def label_value(text: str) -> str:
    """Turn a string into a valid label value: "Meta Inc." becomes Meta-Inc."""
    return _INVALID_CHARACTERS.sub("-", names.trunc63(_INVALID_CHARACTERS.sub("-", text).strip("-_."))).strip("-_.")


def _string_values(component: Document, field: str) -> dict[str, str]:
    return {key: value for key, value in get_mapping(component, field).items() if isinstance(value, str)}


def _bool_label(value: bool) -> str:
    return "true" if value else "false"


_IDENTIFIER = r"[A-Za-z_][A-Za-z0-9_]*"
_PLACEHOLDER = re.compile(
    r"\{\{-?\s*(?:"
    r"\.(?P<field>Name|Namespace)"
    rf"|\.(?P<source>Labels|Annotations)\.(?P<key>{_IDENTIFIER})"
    r'|index\s+\.(?P<indexed>Labels|Annotations)\s+["`](?P<quoted>[^"`]{1,317})["`]'
    r")\s*-?\}\}"
)
_ANY_PLACEHOLDER = re.compile(r"\{\{[^}]{0,200}\}\}")


class Placeholders:
    """The values of a service's placeholders, such as `{{ .Name }}`."""

    def __init__(self, service: Document) -> None:
        self._fields = {"Name": name_of(service), "Namespace": namespace_of(service)}
        self._sources = {"Labels": labels_of(service), "Annotations": annotations_of(service)}

    def filled(self, value: Any) -> Any:
        """Replace the placeholders in all strings of a value; return the value itself if there are none."""
        if isinstance(value, str):
            return _PLACEHOLDER.sub(self._value, value) if "{{" in value else value
        if isinstance(value, dict):
            replaced = {name: self.filled(item) for name, item in value.items()}
            return replaced if any(replaced[name] is not value[name] for name in value) else value
        if isinstance(value, list):
            items = [self.filled(item) for item in value]
            return items if any(new is not old for new, old in zip(items, value, strict=True)) else value
        return value

    def _value(self, match: re.Match[str]) -> str:
        if match["field"]:
            return self._fields[match["field"]]
        source, key = match["source"] or match["indexed"], match["key"] or match["quoted"]
        # A missing label is empty, as in a Go template.
        return self._sources[source].get(key, "")


def find_placeholder(value: Any) -> str:
    """Return the first `{{ ... }}` left in a value; "" if there is none. OME refuses such a service."""
    if isinstance(value, str):
        match = _ANY_PLACEHOLDER.search(value) if "{{" in value else None
        return match[0] if match else ""
    inner = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return next((placeholder for item in inner if (placeholder := find_placeholder(item))), "")
