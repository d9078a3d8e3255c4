# SPDX-License-Identifier: Apache-2.0
"""What all nodes tell of one model, as its status, and as what its spec lacks. Pure; for `summing`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from headrace.fleet.agent.entries import state_of
from headrace.fleet.agent.marks import FAILED, READY, is_read
from headrace.fleet.words import Document, part, text

IN_TRANSIT = "In_Transit"
_READ = (
    "modelType",
    "modelArchitecture",
    "modelFramework",
    "modelFormat",
    "modelParameterSize",
    "maxTokens",
    "modelCapabilities",
    "quantization",
    "diffusionPipeline",
)
"""Fields of a spec that files tell of."""


def status_change(model: Document, nodes: Mapping[str, Document], *, counted: bool) -> dict[str, Any]:
    """The merge patch of a model's status; empty when it says the truth. `nodes`: the entries of those that have one.

    `counted`: some node has an agent. Where none has, nobody knows where models are, and nothing is said of it.
    """
    before = part(model, "status")
    if text(model, "spec", "storage", "storageUri").startswith("pvc://"):
        after: dict[str, Any] = {"state": READY}  # pods mount it, so it is on no node, and wherever it is wanted
    elif not counted and not nodes and not before.get("nodesReady") and not before.get("nodesFailed"):
        return {}
    else:
        ready = sorted(name for name, entry in nodes.items() if state_of(entry) == READY)
        failed = sorted(name for name, entry in nodes.items() if state_of(entry) == FAILED)
        after = {"state": READY if ready else FAILED if failed else IN_TRANSIT, "nodesReady": ready}
        after["nodesFailed"] = failed
    same = {name: before.get(name) or ([] if name != "state" else "") for name in after}
    return {name: value for name, value in after.items() if same[name] != value}


def spec_change(model: Document, nodes: Mapping[str, Document]) -> dict[str, Any]:
    """The merge patch that fills what a model's spec does not say; what its author wrote stays."""
    spec = part(model, "spec")
    if not is_read(model):
        return {}
    for name in sorted(nodes):
        if state_of(nodes[name]) == READY and part(nodes[name], "config"):
            config = part(nodes[name], "config")
            return {each: config[each] for each in _READ if config.get(each) and not spec.get(each)}
    return {}
