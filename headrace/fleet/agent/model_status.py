# SPDX-License-Identifier: Apache-2.0
"""Sum up the reports of all nodes in the status of each model: a task of the leading operator.

It watches the models and the nodes' ConfigMaps of its own namespace, and writes a model's status, and empty fields of its
spec, when they differ from what the nodes report.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping
from typing import Any

from headrace.fleet.agent.model_keys import (
    BASE_MODELS,
    CLUSTER_BASE_MODELS,
    CONFIG_MAPS,
    FAILED,
    READY,
    STATUS_LABEL,
    ModelKey,
    display_name,
    entry_name,
    reads_files,
)
from headrace.fleet.agent.node_status import decode_entry, entry_state
from headrace.fleet.documents import object_key
from headrace.platforms.kubernetes_client.api import ApiClient, ApiError, Unreachable
from headrace.platforms.kubernetes_client.informer import Informer
from headrace.platforms.kubernetes_client.objects import Document, get_list, get_mapping, get_str, name_of
from headrace.platforms.kubernetes_client.work_queue import WorkQueue

log = logging.getLogger("headrace.operator")

_OME_FINALIZERS = ("basemodels.ome.io/finalizer", "clusterbasemodels.ome.io/finalizer")
"""Finalizers that OME set: removed, or the model could never be deleted."""
_WORKERS = 2


class ModelStatuses:
    """Writes the status of models from the reports of all nodes."""

    def __init__(self, api: ApiClient, namespace: str) -> None:
        self._api = api
        self._namespace = namespace
        self._queue = WorkQueue(self._reconcile, _WORKERS)
        self._models = [Informer(api, served, self._on_model_change) for served in (BASE_MODELS, CLUSTER_BASE_MODELS)]
        self._nodes = Informer(api, CONFIG_MAPS, self._on_node_change, selector=f"{STATUS_LABEL}=true")
        self._entries: dict[str, dict[str, Document]] = {}
        """Reports by the name of their entry and the node."""
        self._agents: set[str] = set()
        """Nodes with an agent."""

    @property
    def settled(self) -> bool:
        """Whether the informers are synced and the queue is empty."""
        return self._queue.idle and all(model.synced.is_set() for model in (*self._models, self._nodes))

    async def run(self) -> None:
        """Run until cancelled."""
        tasks = [asyncio.create_task(model.run()) for model in (*self._models, self._nodes)]
        try:
            for model in (*self._models, self._nodes):
                await model.synced.wait()
            await self._queue.run()
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    def _on_model_change(self, before: Document | None, after: Document | None) -> None:
        if after is not None:
            self._queue.add(object_key(after))

    def _on_node_change(self, before: Document | None, after: Document | None) -> None:
        document = after if after is not None else before
        # Users may create a ConfigMap with this label in their own namespace.
        if document is None or get_str(document, "metadata", "namespace") != self._namespace:
            return
        node, had_agents = name_of(document), bool(self._agents)
        if after is None:
            self._agents.discard(node)
        else:
            self._agents.add(node)
        old, new = get_mapping(before, "data"), get_mapping(after, "data")
        changed = {name for name in {*old, *new} if old.get(name) != new.get(name)}
        for name in changed:
            nodes = self._entries.setdefault(name, {})
            nodes.pop(node, None)
            if name in new:
                nodes[node] = decode_entry(new[name])
            if not nodes:
                del self._entries[name]
        for model in (model for informer in self._models for model in informer.all()):
            if had_agents != bool(self._agents) or entry_name(object_key(model)) in changed:
                self._queue.add(object_key(model))

    async def _reconcile(self, key: ModelKey) -> bool:
        """Reconcile a model once. Return False to retry."""
        informer = self._models[0 if key[0] else 1]
        model = informer.get(key)
        if model is None:
            return True
        try:
            await self._write(informer, model, key)
            return True
        except Unreachable as error:
            log.warning("model %s: the API server does not answer (%s)", display_name(key), error)
        except ApiError as error:
            if error.code == 404:
                return True
            if error.code != 409:
                log.warning("model %s: %s", display_name(key), error)
        except Exception:
            log.exception("cannot reconcile model %s", display_name(key))
        return False

    async def _write(self, informer: Informer, model: Document, key: ModelKey) -> None:
        version = {"resourceVersion": get_str(model, "metadata", "resourceVersion")}
        if get_str(model, "metadata", "deletionTimestamp"):
            finalizers = get_list(model, "metadata", "finalizers")
            remaining = [finalizer for finalizer in finalizers if finalizer not in _OME_FINALIZERS]
            if remaining != finalizers:
                await self._api.patch(informer.served, *key, {"metadata": {**version, "finalizers": remaining}})
            return
        nodes = self._entries.get(entry_name(key), {})
        status = status_change(model, nodes, has_agents=bool(self._agents))
        if status:
            model = await self._api.patch(informer.served, *key, {"metadata": version, "status": status}, "status")
            version = {"resourceVersion": get_str(model, "metadata", "resourceVersion")}
            informer.put(model)
        spec = spec_change(model, nodes)
        if spec:
            informer.put(await self._api.patch(informer.served, *key, {"metadata": version, "spec": spec}))


IN_TRANSIT = "In_Transit"
_MAX_NODES = 8
"""Number of nodes that a message names."""
_MAX_MESSAGE = 1024
_INFERRED_FIELDS = (
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
"""Fields of a spec that can be read from the files."""


def status_change(model: Document, nodes: Mapping[str, Document], *, has_agents: bool) -> dict[str, Any]:
    """Return the merge patch of a model's status; empty if it is up to date. `nodes`: the entries by node.

    `has_agents`: some node has an agent. Without agents nothing is known about nodes, and nothing is written.
    """
    before = get_mapping(model, "status")
    if get_str(model, "spec", "storage", "storageUri").startswith("pvc://"):
        after: dict[str, Any] = {"state": READY}  # pods mount the claim: it is ready on every node
    elif not has_agents and not nodes and not before.get("nodesReady") and not before.get("nodesFailed"):
        return {}
    else:
        ready = sorted(name for name, entry in nodes.items() if entry_state(entry) == READY)
        failed = sorted(name for name, entry in nodes.items() if entry_state(entry) == FAILED)
        after = {"state": READY if ready else FAILED if failed else IN_TRANSIT, "nodesReady": ready}
        after["nodesFailed"] = failed
        after["message"] = failure_message({name: get_str(nodes[name], "reason") for name in failed})
    same = {name: before.get(name) or ([] if name.startswith("nodes") else "") for name in after}
    changed = {name: value for name, value in after.items() if same[name] != value}
    # A null removes the field.
    return {name: None if name == "message" and not value else value for name, value in changed.items()}


def failure_message(reasons: Mapping[str, str]) -> str:
    """Return `node-1, node-2: the disk is full` from the reasons by node."""
    nodes: dict[str, list[str]] = {}
    for node, reason in reasons.items():
        nodes.setdefault(reason or "it does not say why", []).append(node)
    parts = []
    for reason, names in nodes.items():
        more = f" and {len(names) - _MAX_NODES} more" if len(names) > _MAX_NODES else ""
        parts.append(f"{', '.join(names[:_MAX_NODES])}{more}: {reason}")
    message = "; ".join(parts)
    return message if len(message) <= _MAX_MESSAGE else message[: _MAX_MESSAGE - 3] + "..."


def spec_change(model: Document, nodes: Mapping[str, Document]) -> dict[str, Any]:
    """Return the merge patch that fills empty fields of a model's spec."""
    spec = get_mapping(model, "spec")
    if not reads_files(model):
        return {}
    for name in sorted(nodes):
        if entry_state(nodes[name]) == READY and get_mapping(nodes[name], "config"):
            config = get_mapping(nodes[name], "config")
            return {field: config[field] for field in _INFERRED_FIELDS if config.get(field) and not spec.get(field)}
    return {}
