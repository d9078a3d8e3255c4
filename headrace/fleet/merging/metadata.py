# SPDX-License-Identifier: Apache-2.0
"""Labels and annotations of a component's pods and objects.

Called by `components`. Selectors of shipped routers and dashboards rest on these names.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from headrace.fleet import names
from headrace.fleet.merging.models import merges_weights
from headrace.fleet.words import Document, annotations_of, labels_of, name_of, part, text

_DENIED = frozenset({names.KNATIVE_MIN_SCALE, names.KNATIVE_MAX_SCALE, names.STORAGE_URI_INTERNAL, names.LAST_APPLIED})
"""Annotations of a service that are not its pods'."""
_SMALL = "SMALL"
_DEDICATED_PRIORITY = "kueue-scheduling-high-priority"
_UNFIT = re.compile(r"[^A-Za-z0-9_.-]+")


def labels_for(
    name: str,
    component: Document,
    service: Document,
    runtime: Document | None,
    model: Document | None,
    weights: Sequence[Document],
) -> dict[str, str]:
    """The labels of a component."""
    made = {
        **labels_of(service),
        **_texts(component, "labels"),
        names.SERVICE_LABEL: name_of(service),
        names.COMPONENT_LABEL: name,
        names.RUNTIME_LABEL: label_value(name_of(runtime)) if runtime is not None else "",
        names.FINE_TUNED_LABEL: _word(bool(weights)),
    }
    if model is not None:
        made[names.BASE_MODEL_NAME_LABEL] = label_value(name_of(model))
        made[names.BASE_MODEL_SIZE_LABEL] = label_value(annotations_of(model).get(names.MODEL_CATEGORY, _SMALL))
        made[names.BASE_MODEL_TYPE_LABEL] = "Serving"
        if text(model, "spec", "vendor"):
            made[names.BASE_MODEL_VENDOR_LABEL] = label_value(text(model, "spec", "vendor"))
    if weights:
        made[names.FT_STRATEGY_LABEL] = label_value(text(weights[0], "spec", "hyperParameters", "strategy"))
        made[names.MERGED_WEIGHTS_LABEL] = _word(merges_weights(weights))
    return {**made, **_queues({**annotations_of(service), **_texts(component, "annotations")})}


def _queues(annotations: dict[str, str]) -> dict[str, str]:
    """The batch queue that pods go through."""
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
    """The annotations of a component."""
    said = annotations_of(service).items()
    # How a rollout goes on is told in the middle of it: pods must not be replaced for that.
    made = {key: value for key, value in said if key not in _DENIED and not key.startswith(names.ROLLOUT)}
    made.update(_texts(component, "annotations"))
    if weights:
        made[names.FT_STRATEGY] = text(weights[0], "spec", "hyperParameters", "strategy")
    if merges_weights(weights):
        made[names.MERGED_WEIGHTS] = "true"
        made[names.INJECT_MODEL_INIT] = "false"
    elif model is not None:
        of_model = annotations_of(model)
        for key in (names.BASE_MODEL_DECRYPTION_KEY, names.BASE_MODEL_DECRYPTION_SECRET):
            if key in of_model:
                made[key] = of_model[key]
    if model is not None:
        spec = part(model, "spec")
        told = {
            names.BASE_MODEL_NAME: name_of(model),
            names.BASE_MODEL_VENDOR: text(spec, "vendor"),
            names.BASE_MODEL_FORMAT: text(spec, "modelFormat", "name"),
            names.BASE_MODEL_FORMAT_VERSION: text(spec, "modelFormat", "version"),
        }
        made.update({key: value for key, value in told.items() if value})
    if runtime is not None:
        made[names.SERVING_RUNTIME] = name_of(runtime)
    return made


def label_value(written: str) -> str:
    """A text as the value of a label, which takes 63 of a few characters: "Meta Inc." becomes Meta-Inc."""
    return _UNFIT.sub("-", names.trunc63(_UNFIT.sub("-", written).strip("-_."))).strip("-_.")


def _texts(component: Document, field: str) -> dict[str, str]:
    return {key: value for key, value in part(component, field).items() if isinstance(value, str)}


def _word(truth: bool) -> str:
    return "true" if truth else "false"
