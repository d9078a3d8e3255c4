# SPDX-License-Identifier: Apache-2.0
"""What a node tells the cluster: the labels of models on the Node, and the ConfigMap named after it. All that it writes.

Whoever has something to tell calls `put` or `drop`; a task of its own writes what differs from what the API server has, in
two calls at most and not more than one round in a second, and nothing when nothing differs. What somebody else changes in
either is put right at the next look.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Mapping
from typing import Any

from headrace.fleet.agent.entries import written
from headrace.fleet.agent.marks import CONFIG_MAPS, NODES, STATUS_LABEL, ModelKey, entry_key, is_model_label, label_of
from headrace.fleet.cluster.api import Api, Refused, Unreachable
from headrace.fleet.cluster.queue import backoff
from headrace.fleet.words import Document, labels_of, part, text

log = logging.getLogger("headrace.agent")

_LONGEST_WAIT = 30.0


class Board:
    """One node's."""

    def __init__(self, api: Api, node: str, namespace: str, every_seconds: float = 1.0) -> None:
        self._api = api
        self._name = node
        self._namespace = namespace
        self._every = every_seconds
        self._entries: dict[str, str] = {}
        self._labels: dict[str, str] = {}
        self._seen_entries: dict[str, str] | None = None
        """None: there is no ConfigMap."""
        self._seen_labels: dict[str, str] = {}
        self._uid = ""
        self._changed = asyncio.Event()
        self._round = asyncio.Condition()
        self._wanted = self._written = 0
        self.node: Document = {}
        """As it was last seen."""

    async def look(self) -> None:
        """See what the API server has. Raises Refused, Unreachable."""
        node = await self._api.get(NODES, "", self._name)
        if node is None:
            raise Refused(404, "NotFound", f"there is no node {self._name}; NODE_NAME or --node must say where we are")
        found = await self._api.get(CONFIG_MAPS, self._namespace, self._name)
        self._see_node(node)
        self._seen_entries = _texts(found) if found is not None else None
        self._changed.set()

    def adopt(self) -> None:
        """Take over what is told already, until something else is known."""
        self._entries = dict(self._seen_entries or {})
        self._labels = dict(self._seen_labels)

    def forget_others(self, keys: set[ModelKey]) -> None:
        """Tell of these models alone."""
        entries, labels = {entry_key(each) for each in keys}, {label_of(each) for each in keys}
        self._entries = {name: said for name, said in self._entries.items() if name in entries}
        self._labels = {name: said for name, said in self._labels.items() if name in labels}
        self._change()

    def state(self, key: ModelKey) -> str:
        """What is told of a model by its label; "" for nothing."""
        return self._labels.get(label_of(key), "")

    def put(self, key: ModelKey, entry: Mapping[str, Any]) -> None:
        """Tell of a model."""
        self._entries[entry_key(key)] = written(entry)
        self._labels[label_of(key)] = entry["status"]
        self._change()

    def drop_label(self, key: ModelKey) -> None:
        """No pod is to come here for a model any more."""
        self._labels.pop(label_of(key), None)
        self._change()

    def drop(self, key: ModelKey) -> None:
        """Tell nothing of a model."""
        self._entries.pop(entry_key(key), None)
        self.drop_label(key)

    @property
    def quiet(self) -> bool:
        """Whether the API server has all that is to be told."""
        return self._seen_entries is not None and not self._entry_changes() and not self._label_changes()

    async def told(self) -> None:
        """Return when all that was put so far has been written."""
        wanted = self._wanted
        async with self._round:
            await self._round.wait_for(lambda: self._written >= wanted)

    async def run(self) -> None:
        """Write until cancelled."""
        failures = 0
        while True:
            await self._changed.wait()
            self._changed.clear()
            wanted = self._wanted
            since = time.monotonic()
            try:
                wrote = await self._write()
            except (Refused, Unreachable) as error:
                failures += 1
                log.warning("cannot tell of the models of %s: %s", self._name, error)
                self._changed.set()
                await asyncio.sleep(min(backoff(failures), _LONGEST_WAIT))
                continue
            failures = 0
            async with self._round:
                self._written = wanted
                self._round.notify_all()
            if wrote:
                await asyncio.sleep(max(0.0, self._every - (time.monotonic() - since)))

    async def _write(self) -> bool:
        """Whether anything was written. A node without models has a ConfigMap, too: it says that there is an agent."""
        entries, labels = self._entry_changes(), self._label_changes()
        new = self._seen_entries is None
        if entries or new:
            await self._write_entries(entries)
        if labels:
            node = await self._api.patch(NODES, "", self._name, {"metadata": {"labels": labels}})
            self._see_node(node)
        return bool(entries or labels or new)

    async def _write_entries(self, changes: dict[str, str | None]) -> None:
        if self._seen_entries is not None:
            try:
                made = await self._api.patch(CONFIG_MAPS, self._namespace, self._name, {"data": changes})
                self._seen_entries = _texts(made)
                return
            except Refused as refused:
                if refused.code != 404:
                    raise
                self._seen_entries = None  # somebody has deleted it
        # Owned by the node, so that it goes with it.
        owner = {"apiVersion": "v1", "kind": "Node", "name": self._name, "uid": self._uid}
        metadata: dict[str, Any] = {"name": self._name, "namespace": self._namespace, "labels": {STATUS_LABEL: "true"}}
        metadata["ownerReferences"] = [owner]
        document = {"apiVersion": "v1", "kind": "ConfigMap", "metadata": metadata, "data": dict(self._entries)}
        try:
            made = await self._api.create(CONFIG_MAPS, self._namespace, document)
        except Refused as refused:
            if refused.code != 409:
                raise
            found = await self._api.get(CONFIG_MAPS, self._namespace, self._name)
            self._seen_entries = _texts(found) if found is not None else None
            raise Unreachable("somebody else has just made our ConfigMap") from None
        self._seen_entries = _texts(made)

    def _entry_changes(self) -> dict[str, str | None]:
        return _changes(self._seen_entries or {}, self._entries)

    def _label_changes(self) -> dict[str, str | None]:
        return _changes(self._seen_labels, self._labels)

    def _see_node(self, node: Document) -> None:
        self.node = node
        self._uid = text(node, "metadata", "uid")
        self._seen_labels = {name: said for name, said in labels_of(node).items() if is_model_label(name)}

    def _change(self) -> None:
        self._wanted += 1
        self._changed.set()


def _changes(seen: Mapping[str, str], wanted: Mapping[str, str]) -> dict[str, str | None]:
    """The merge patch that makes one of the other."""
    changes: dict[str, str | None] = {name: None for name in seen if name not in wanted}
    return changes | {name: said for name, said in wanted.items() if seen.get(name) != said}


def _texts(config_map: Document) -> dict[str, str]:
    return {name: said for name, said in part(config_map, "data").items() if isinstance(said, str)}
