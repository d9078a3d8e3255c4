# SPDX-License-Identifier: Apache-2.0
"""What the agents of all nodes tell, put into the models: `ModelStatuses`, a task of the operator that leads.

It follows models and the nodes' ConfigMaps, of its own namespace alone, and writes a model's status, or fields of its spec
that are empty, when they differ from what `summary` makes of them.
"""

from __future__ import annotations

import asyncio
import logging

from headrace.fleet.agent.entries import entry_of
from headrace.fleet.agent.marks import (
    BASE_MODELS,
    CLUSTER_BASE_MODELS,
    CONFIG_MAPS,
    STATUS_LABEL,
    ModelKey,
    entry_key,
    key_of,
    shown,
)
from headrace.fleet.agent.summary import spec_change, status_change
from headrace.fleet.cluster.api import Api, Refused, Unreachable
from headrace.fleet.cluster.following import Follower
from headrace.fleet.cluster.queue import Queue
from headrace.fleet.words import Document, items, name_of, part, text

log = logging.getLogger("headrace.operator")

_OLD_FINALIZERS = ("basemodels.ome.io/finalizer", "clusterbasemodels.ome.io/finalizer")
"""OME's: a model that it left behind could never be deleted without it."""
_WORKERS = 2


class ModelStatuses:
    """Keeps the status of models."""

    def __init__(self, api: Api, namespace: str) -> None:
        self._api = api
        self._namespace = namespace
        self._queue = Queue(self._sum_up, _WORKERS)
        self._models = [Follower(api, each, self._model_seen) for each in (BASE_MODELS, CLUSTER_BASE_MODELS)]
        self._nodes = Follower(api, CONFIG_MAPS, self._node_seen, selector=f"{STATUS_LABEL}=true")
        self._told: dict[str, dict[str, Document]] = {}
        """Entries, by their key and the node."""
        self._agents: set[str] = set()
        """Nodes that tell."""

    @property
    def settled(self) -> bool:
        """Whether everything was seen, and nothing is left to do."""
        return self._queue.idle and all(each.listed.is_set() for each in (*self._models, self._nodes))

    async def run(self) -> None:
        """Work until cancelled."""
        tasks = [asyncio.create_task(each.run()) for each in (*self._models, self._nodes)]
        try:
            for each in (*self._models, self._nodes):
                await each.listed.wait()
            await self._queue.run()
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    def _model_seen(self, before: Document | None, after: Document | None) -> None:
        if after is not None:
            self._queue.add(key_of(after))

    def _node_seen(self, before: Document | None, after: Document | None) -> None:
        document = after if after is not None else before
        # Anybody may make a ConfigMap with our label in a namespace of their own.
        if document is None or text(document, "metadata", "namespace") != self._namespace:
            return
        node, counted = name_of(document), bool(self._agents)
        if after is None:
            self._agents.discard(node)
        else:
            self._agents.add(node)
        old, new = part(before, "data"), part(after, "data")
        changed = {name for name in {*old, *new} if old.get(name) != new.get(name)}
        for name in changed:
            nodes = self._told.setdefault(name, {})
            nodes.pop(node, None)
            if name in new:
                nodes[node] = entry_of(new[name])
            if not nodes:
                del self._told[name]
        for model in (each for follower in self._models for each in follower.all()):
            if counted != bool(self._agents) or entry_key(key_of(model)) in changed:
                self._queue.add(key_of(model))

    async def _sum_up(self, key: ModelKey) -> bool:
        """Look at a model once. False: try again later."""
        follower = self._models[0 if key[0] else 1]
        model = follower.get(key)
        if model is None:
            return True
        try:
            await self._write(follower, model, key)
            return True
        except Unreachable as error:
            log.warning("model %s: the API server does not answer (%s)", shown(key), error)
        except Refused as refused:
            if refused.code == 404:
                return True
            if refused.code != 409:
                log.warning("model %s: %s", shown(key), refused)
        except Exception:
            log.exception("model %s cannot be looked at", shown(key))
        return False

    async def _write(self, follower: Follower, model: Document, key: ModelKey) -> None:
        version = {"resourceVersion": text(model, "metadata", "resourceVersion")}
        if text(model, "metadata", "deletionTimestamp"):
            left = items(model, "metadata", "finalizers")
            kept = [each for each in left if each not in _OLD_FINALIZERS]
            if kept != left:
                await self._api.patch(follower.where, *key, {"metadata": {**version, "finalizers": kept}})
            return
        nodes = self._told.get(entry_key(key), {})
        status = status_change(model, nodes, counted=bool(self._agents))
        if status:
            model = await self._api.patch(follower.where, *key, {"metadata": version, "status": status}, "status")
            version = {"resourceVersion": text(model, "metadata", "resourceVersion")}
            follower.put(model)
        spec = spec_change(model, nodes)
        if spec:
            follower.put(await self._api.patch(follower.where, *key, {"metadata": version, "spec": spec}))
