# SPDX-License-Identifier: Apache-2.0
"""The model in a pod: its files, where they are, and on which nodes.

Called by `components` for each pod. A node agent puts models under `storage.path` and labels the nodes that have them; a
claim (`pvc://`) is mounted as it is; with `ome.io/inject-model-init` an init container brings the files into memory.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal

from headrace.fleet.merging.drafts import PodDraft
from headrace.fleet.names import INJECT_FINE_TUNED_ADAPTER, INJECT_MODEL_INIT, model_label, trunc63
from headrace.fleet.words import Document, Problem, kind_of, name_of, namespace_of, part, text

MODEL_PATH = "MODEL_PATH"
WEIGHT_PATH, WEIGHT_NAME = "FINE_TUNED_WEIGHT_PATH", "FINE_TUNED_WEIGHT_NAME"
MEMORY_VOLUME, MEMORY_PATH = "model-empty-dir", "/opt/ml/model"
READY = "Ready"


def merges_weights(weights: Sequence[Document]) -> bool:
    """Whether the weights contain their base model, so that it is not needed."""
    return bool(weights) and part(weights[0], "spec", "configuration").get("merged_weights") in (True, "true")


def add_model(
    draft: PodDraft,
    model: Document | None,
    weights: Sequence[Document],
    annotations: Mapping[str, str],
    *,
    serves: bool,
    pinning: Literal["required", "preferred", "none"],
) -> None:
    """Bring the model into a pod. A router gets the volume alone."""
    in_memory = annotations.get(INJECT_MODEL_INIT) == "true" or INJECT_FINE_TUNED_ADAPTER in annotations
    if in_memory:
        draft.add_volume({"name": MEMORY_VOLUME, "emptyDir": {"medium": "Memory"}})
        if serves:
            draft.add_mount({"name": MEMORY_VOLUME, "mountPath": MEMORY_PATH})
            draft.set_variable(MODEL_PATH, MEMORY_PATH, keep=True)
    for number, weight in enumerate(weights):
        _add_weight(draft, weight, serves=serves, is_model=merges_weights(weights) and number == 0)
    if model is None or merges_weights(weights):
        return
    if not in_memory:
        path = _add_files(draft, model, volume_name(name_of(model)), serves=serves)
        if serves and path:
            draft.set_variable(MODEL_PATH, path, keep=True)
    if serves and not claim_of(model):
        _pin(draft, model, pinning)


def _add_files(draft: PodDraft, document: Document, name: str, *, serves: bool) -> str:
    """The volume of a model or a weight and its mount; where it is mounted."""
    path, claim = text(document, "spec", "storage", "path"), claim_of(document)
    if not path and not claim:
        return ""
    mount: dict[str, Any] = {"name": name, "mountPath": path or MEMORY_PATH, "readOnly": True}
    if claim:
        _, claim_name, inside = claim
        draft.add_volume({"name": name, "persistentVolumeClaim": {"claimName": claim_name, "readOnly": True}})
        if inside:
            mount["subPath"] = inside
    else:
        draft.add_volume({"name": name, "hostPath": {"path": path}})
    if serves:
        draft.add_mount(mount)
    return str(mount["mountPath"])


def _add_weight(draft: PodDraft, weight: Document, *, serves: bool, is_model: bool) -> None:
    # A weight may have the name of its model; two volumes may not.
    path = _add_files(draft, weight, volume_name(f"weight-{name_of(weight)}"), serves=serves)
    if serves and path:
        draft.set_variable(WEIGHT_PATH, path, keep=True)
        draft.set_variable(WEIGHT_NAME, name_of(weight), keep=True)
        if is_model:
            draft.set_variable(MODEL_PATH, path, keep=True)


def _pin(draft: PodDraft, model: Document, pinning: str) -> None:
    if pinning == "none":
        return
    label = model_label(name_of(model), namespace_of(model) if kind_of(model) == "BaseModel" else "")
    if pinning == "required":
        draft.select_nodes({label: READY})
    else:
        draft.prefer_nodes(label, READY)


def claim_of(document: Document) -> tuple[str, str, str] | None:
    """Namespace ("" for the pod's own), name and folder of the claim that a model lies on, if it does."""
    scheme, found, rest = text(document, "spec", "storage", "storageUri").partition("://")
    if scheme != "pvc" or not found:
        return None
    claim, _, inside = rest.partition("/")
    namespace, colon, name = claim.partition(":")
    return (namespace, name, inside.strip("/")) if colon else ("", claim, inside.strip("/"))


def claim_problem(model: Document | None, namespace: str) -> Problem | None:
    """A pod reaches claims of its own namespace alone."""
    claim = claim_of(model) if model is not None else None
    if claim is None or claim[0] in ("", namespace):
        return None
    said = f"the model's files are on a claim of namespace {claim[0]}, and pods of {namespace} cannot mount it"
    return Problem("spec.model.name", said, f"create the service in {claim[0]}, or copy the model to {namespace}")


def volume_name(name: str) -> str:
    """A model's name as that of a volume, which takes no dots and 63 characters."""
    return trunc63(name.replace(".", "-"))
