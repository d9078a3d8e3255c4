# SPDX-License-Identifier: Apache-2.0
"""What the agent of a node writes to the cluster: model labels of the Node, and one ConfigMap named after it.

`put` and `drop` set the entry of a model. A task writes the difference to what the API server has, with at most two calls
per second, and no call when nothing differs. A change by another process is corrected at the next poll.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import msgspec

from headrace.fleet.agent.model_keys import (
    CONFIG_MAPS,
    FAILED,
    NODES,
    READY,
    STATUS_LABEL,
    UPDATING,
    ModelKey,
    entry_name,
    is_model_label,
    label_of,
)
from headrace.platforms.kubernetes_client.api import ApiClient, ApiError, Unreachable
from headrace.platforms.kubernetes_client.objects import Document, get_mapping, get_str, labels_of
from headrace.platforms.kubernetes_client.work_queue import backoff

log = logging.getLogger("headrace.agent")

_LONGEST_WAIT = 30.0


class NodeStatus:
    """The reported models of one node."""

    def __init__(self, api: ApiClient, node: str, namespace: str, every_seconds: float = 1.0) -> None:
        self._api = api
        self._name = node
        self._namespace = namespace
        self._every = every_seconds
        self._entries: dict[str, str] = {}
        self._labels: dict[str, str] = {}
        self._seen_entries: dict[str, str] | None = None
        """Entries of the live ConfigMap; None if there is none."""
        self._seen_labels: dict[str, str] = {}
        self._uid = ""
        self._changed = asyncio.Event()
        self._flushed = asyncio.Condition()
        self._wanted = self._written = 0
        self.node: Document = {}
        """The Node as last read."""

    async def refresh(self) -> None:
        """Read the Node and its ConfigMap. Raises ApiError, Unreachable."""
        node = await self._api.get(NODES, "", self._name)
        if node is None:
            raise ApiError(
                404, "NotFound", f"there is no node {self._name}; set NODE_NAME or --node to this node's name"
            )
        config_map = await self._api.get(CONFIG_MAPS, self._namespace, self._name)
        self._set_node(node)
        self._seen_entries = _string_data(config_map) if config_map is not None else None
        self._changed.set()

    def adopt(self) -> None:
        """Start from the entries and labels that the API server has."""
        self._entries = dict(self._seen_entries or {})
        self._labels = dict(self._seen_labels)

    def keep_only(self, keys: set[ModelKey]) -> None:
        """Remove the reports of all other models."""
        entries, labels = {entry_name(key) for key in keys}, {label_of(key) for key in keys}
        self._entries = {name: value for name, value in self._entries.items() if name in entries}
        self._labels = {name: value for name, value in self._labels.items() if name in labels}
        self._change()

    def state(self, key: ModelKey) -> str:
        """Return the reported state of a model; "" if there is none."""
        return self._labels.get(label_of(key), "")

    def put(self, key: ModelKey, entry: Mapping[str, Any]) -> None:
        """Report a model."""
        self._entries[entry_name(key)] = encode_entry(entry)
        self._labels[label_of(key)] = entry["status"]
        self._change()

    def remove_label(self, key: ModelKey) -> None:
        """Remove a model's label, so that no new pods start here for it."""
        self._labels.pop(label_of(key), None)
        self._change()

    def remove(self, key: ModelKey) -> None:
        """Remove the report of a model."""
        self._entries.pop(entry_name(key), None)
        self.remove_label(key)

    @property
    def synced(self) -> bool:
        """Whether the API server has the current reports."""
        return self._seen_entries is not None and not self._entry_changes() and not self._label_changes()

    async def flush(self) -> None:
        """Return when all reports so far are written."""
        wanted = self._wanted
        async with self._flushed:
            await self._flushed.wait_for(lambda: self._written >= wanted)

    async def run(self) -> None:
        """Write changed reports until cancelled."""
        failures = 0
        while True:
            await self._changed.wait()
            self._changed.clear()
            wanted = self._wanted
            since = time.monotonic()
            try:
                wrote = await self._write()
            except (ApiError, Unreachable) as error:
                failures += 1
                log.warning("cannot report the models of node %s: %s", self._name, error)
                self._changed.set()
                await asyncio.sleep(min(backoff(failures), _LONGEST_WAIT))
                continue
            failures = 0
            async with self._flushed:
                self._written = wanted
                self._flushed.notify_all()
            if wrote:
                await asyncio.sleep(max(0.0, self._every - (time.monotonic() - since)))

    async def _write(self) -> bool:
        """Return whether anything was written. A node without models has a ConfigMap, too: it shows that an agent runs."""
        entries, labels = self._entry_changes(), self._label_changes()
        new = self._seen_entries is None
        if entries or new:
            await self._write_entries(entries)
        if labels:
            node = await self._api.patch(NODES, "", self._name, {"metadata": {"labels": labels}})
            self._set_node(node)
        return bool(entries or labels or new)

    async def _write_entries(self, changes: dict[str, str | None]) -> None:
        if self._seen_entries is not None:
            try:
                config_map = await self._api.patch(CONFIG_MAPS, self._namespace, self._name, {"data": changes})
                self._seen_entries = _string_data(config_map)
                return
            except ApiError as error:
                if error.code != 404:
                    raise
                self._seen_entries = None  # it was deleted
        # Owned by the node, so that it is deleted with it.
        owner = {"apiVersion": "v1", "kind": "Node", "name": self._name, "uid": self._uid}
        metadata: dict[str, Any] = {"name": self._name, "namespace": self._namespace, "labels": {STATUS_LABEL: "true"}}
        metadata["ownerReferences"] = [owner]
        document = {"apiVersion": "v1", "kind": "ConfigMap", "metadata": metadata, "data": dict(self._entries)}
        try:
            config_map = await self._api.create(CONFIG_MAPS, self._namespace, document)
        except ApiError as error:
            if error.code != 409:
                raise
            live = await self._api.get(CONFIG_MAPS, self._namespace, self._name)
            self._seen_entries = _string_data(live) if live is not None else None
            raise Unreachable("the ConfigMap was created at the same time by another process") from None
        self._seen_entries = _string_data(config_map)

    def _entry_changes(self) -> dict[str, str | None]:
        return _changes(self._seen_entries or {}, self._entries)

    def _label_changes(self) -> dict[str, str | None]:
        return _changes(self._seen_labels, self._labels)

    def _set_node(self, node: Document) -> None:
        self.node = node
        self._uid = get_str(node, "metadata", "uid")
        self._seen_labels = {name: value for name, value in labels_of(node).items() if is_model_label(name)}

    def _change(self) -> None:
        self._wanted += 1
        self._changed.set()


def _changes(live: Mapping[str, str], desired: Mapping[str, str]) -> dict[str, str | None]:
    """Return the merge patch from the live values to the wanted ones."""
    changes: dict[str, str | None] = {name: None for name in live if name not in desired}
    return changes | {name: value for name, value in desired.items() if live.get(name) != value}


def _string_data(config_map: Document) -> dict[str, str]:
    return {name: value for name, value in get_mapping(config_map, "data").items() if isinstance(value, str)}


_LONGEST_REASON = 1000


@dataclass(frozen=True)
class Progress:
    """Progress of a download."""

    done: int
    total: int | None
    speed: int
    """Bytes per second."""
    at: str
    """Time of the last progress."""


def updating_entry(key: ModelKey, progress: Progress | None = None) -> dict[str, Any]:
    """Return the entry of a model that is being downloaded."""
    entry: dict[str, Any] = {"name": key[1], "status": UPDATING}
    if progress is not None:
        entry["progress"] = {
            "phase": "Downloading",
            **({"totalBytes": progress.total} if progress.total is not None else {}),
            "completedBytes": progress.done,
            "speedBytesPerSec": progress.speed,
            "lastUpdated": progress.at,
        }
    return entry


def ready_entry(key: ModelKey, config: Mapping[str, Any], revision: str = "", path: str = "") -> dict[str, Any]:
    """Return the entry of a model that is on the node."""
    details: dict[str, Any] = dict(config)
    if revision:
        details["artifact"] = {"sha": revision, "parentPath": path, "childrenPaths": []}
    return {"name": key[1], "status": READY, **({"config": details} if details else {})}


def failed_entry(key: ModelKey, reason: str) -> dict[str, Any]:
    """Return the entry of a model whose download failed."""
    printable = "".join(char if char.isprintable() else "?" for char in reason)
    return {"name": key[1], "status": FAILED, "reason": printable[:_LONGEST_REASON]}


def encode_entry(entry: Mapping[str, Any]) -> str:
    """Encode an entry for the ConfigMap."""
    return msgspec.json.encode(entry, order="sorted").decode()


def decode_entry(value: Any) -> Document:
    """Decode an entry of a ConfigMap; an empty one if it is invalid."""
    try:
        config_map = msgspec.json.decode(value) if isinstance(value, str) else None
    except msgspec.MsgspecError:
        return {}
    return get_mapping(config_map)


def entry_state(entry: Document) -> str:
    """Return `Ready`, `Updating` or `Failed`; "" for anything else."""
    value = get_str(entry, "status")
    return value if value in (READY, UPDATING, FAILED) else ""
