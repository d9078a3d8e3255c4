# SPDX-License-Identifier: Apache-2.0
"""The model agent of one node: download the models that belong on the node, and remove the others.

Each model has its own task that downloads it, removes it, or waits for a change. Downloads run in threads; a semaphore
limits how many run at once. A task keeps no state between steps, so that it may be killed at any point.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, TypeVar

from msgspec.structs import replace

from headrace.core.errors import Cancelled, HeadraceError, NotFound
from headrace.fleet.agent import node_status
from headrace.fleet.agent.downloads import Download, adopt_model, download_model
from headrace.fleet.agent.model_keys import (
    BASE_MODELS,
    CLUSTER_BASE_MODELS,
    FAILED,
    READY,
    ModelKey,
    display_name,
    is_model_label,
    is_reserved,
    reads_files,
    relevant_fields,
)
from headrace.fleet.agent.model_metadata import read_metadata
from headrace.fleet.agent.model_sources import ModelSource, parse_source, read_credentials
from headrace.fleet.agent.model_store import ModelState, ModelStore, Record
from headrace.fleet.agent.node_status import NodeStatus
from headrace.fleet.documents import object_key
from headrace.fleet.metrics import AgentMetrics
from headrace.models.storage.credentials import CloudCredentials
from headrace.models.storage.fetch import FetchSettings
from headrace.platforms.kubernetes_client.api import ApiClient, ApiError, Unreachable
from headrace.platforms.kubernetes_client.informer import Informer
from headrace.platforms.kubernetes_client.objects import Document, get_list, get_mapping, get_str, labels_of, name_of
from headrace.platforms.kubernetes_client.work_queue import LONGEST_SECONDS, backoff

log = logging.getLogger("headrace.agent")

T = TypeVar("T")

_INTERNAL_ERROR = "the agent failed to download the model; see its log"


class Agent:
    """Keeps the models of one node as the cluster defines them, and reports their state."""

    def __init__(self, api: ApiClient, settings: AgentSettings, metrics: AgentMetrics) -> None:
        self._api = api
        self._settings = settings
        self._metrics = metrics
        self._store = ModelStore(settings.models_root, settings.keep_free_bytes)
        self._status = NodeStatus(api, settings.node, settings.namespace, settings.write_seconds)
        self._informers = [Informer(api, served, self._on_change) for served in (BASE_MODELS, CLUSTER_BASE_MODELS)]
        self._tasks: dict[ModelKey, asyncio.Task[None]] = {}
        self._changed: dict[ModelKey, asyncio.Event] = {}
        self._pending: set[ModelKey] = set()
        self._downloads: dict[ModelKey, Download] = {}
        self._slots = DownloadSlots(settings.downloads)
        self._threads = ThreadPoolExecutor(settings.downloads + 2, thread_name_prefix="agent")
        self._external: dict[ModelKey, Path] = {}
        """Folders of models that the agent does not download."""
        self._started = False

    @property
    def settled(self) -> bool:
        """Whether all models were processed and their state is written."""
        return self._started and not self._pending and self._status.synced

    async def run(self) -> None:
        """Run until cancelled."""
        await self._in_thread(self._store.open)
        background = [asyncio.create_task(informer.run()) for informer in self._informers]
        try:
            await self._read_node()
            for informer in self._informers:
                await informer.synced.wait()
            self._start()
            loops = (
                self._status.run(),
                self._poll_node(),
                report_progress(self._status, self._downloads, self._settings.progress_seconds),
            )
            background += [asyncio.create_task(loop) for loop in loops]
            await asyncio.gather(*background)
        finally:
            self.stop()
            everything = [*background, *self._tasks.values()]
            for task in everything:
                task.cancel()
            await asyncio.gather(*everything, return_exceptions=True)
            self._threads.shutdown(wait=False, cancel_futures=True)
            self._store.close()

    def stop(self) -> None:
        """Stop all downloads; the bytes that have arrived stay."""
        for download in self._downloads.values():
            download.stop()

    # Which models to reconcile

    def _start(self) -> None:
        """Queue the wanted models and those in the store, and drop the reports of others."""
        self._status.adopt()
        wanted = {object_key(model) for informer in self._informers for model in informer.all()}
        stored = {record.key for record in self._store.records.all() if not record.gone}
        self._status.keep_only(wanted | stored)
        self._started = True
        self._metrics.is_ready = True
        for key in wanted | stored:
            self._enqueue(key)

    def _on_change(self, before: Document | None, after: Document | None) -> None:
        document = after if after is not None else before
        if self._started and document is not None and relevant_fields(before) != relevant_fields(after):
            self._enqueue(object_key(document))

    def _enqueue(self, key: ModelKey) -> None:
        download = self._downloads.get(key)
        if download is not None and not self._is_for(download):
            download.stop()
        self._pending.add(key)
        self._changed.setdefault(key, asyncio.Event()).set()
        if key not in self._tasks:
            self._tasks[key] = asyncio.create_task(self._run_model(key), name=f"model {display_name(key)}")

    def _is_for(self, download: Download) -> bool:
        """Whether a running download still matches its model."""
        model = self._wanted(download.key)
        try:
            return model is not None and parse_source(model) == download.source
        except HeadraceError:
            return False

    def _model(self, key: ModelKey) -> Document | None:
        model = self._informers[0 if key[0] else 1].get(key)
        return None if model is None or get_str(model, "metadata", "deletionTimestamp") else model

    def _wanted(self, key: ModelKey) -> Document | None:
        """Return the model if it belongs on this node."""
        model = self._model(key)
        return model if model is not None and matches_node(model, self._status.node) else None

    # One model

    async def _run_model(self, key: ModelKey) -> None:
        """Reconcile a model after each change, and with back-off while it fails."""
        failures, changed = 0, self._changed[key]
        while True:
            changed.clear()
            again = await self._reconcile(key, first=not failures)
            failures = failures + 1 if again and not changed.is_set() else 0
            if changed.is_set():
                continue
            self._pending.discard(key)
            if not again and self._wanted(key) is None:
                del self._tasks[key], self._changed[key]
                return
            wait = min(backoff(failures), self._settings.retry_seconds) if again else None
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(changed.wait(), wait)
                failures = 0
            self._pending.add(key)

    async def _reconcile(self, key: ModelKey, *, first: bool) -> bool:
        """Reconcile a model once. Return whether to retry. Raises only when cancelled."""
        try:
            model = self._wanted(key)
            source = parse_source(model) if model is not None else None
            if model is None or source is None or source.kind == "claim":
                await self._remove(key)
            elif source.kind == "download":
                await self._ensure_downloaded(key, model, source, first=first)
            else:
                await self._report_external(key, model, source)
            return False
        except Cancelled:
            return True  # the model has changed
        except (ApiError, Unreachable) as error:
            log.warning("%s: %s", display_name(key), error)
        except HeadraceError as error:
            log.warning("%s: %s", display_name(key), error.message)
            self._status.put(key, node_status.failed_entry(key, error.message))
            self._metrics.failed(key)
        except OSError as error:
            log.warning("%s: %s", display_name(key), error)
            message = (
                f"{self._settings.models_root} cannot be used: {os.strerror(error.errno or 0)}; check the node's disk"
            )
            self._status.put(key, node_status.failed_entry(key, message))
        except Exception:
            log.exception("cannot reconcile model %s", display_name(key))
            self._status.put(key, node_status.failed_entry(key, _INTERNAL_ERROR))
        return True

    async def _report_external(self, key: ModelKey, model: Document, source: ModelSource) -> None:
        """Report a model that the agent does not download."""
        self._external.pop(key, None)
        before = self._store.records.get(key)
        # A `local://` URI of a folder that the agent has filled keeps its files.
        await self._delete_files(key, keep=before is not None and before.path == source.path)
        metadata: dict[str, Any] = {}
        if source.kind == "here":
            path = Path(source.path)
            if not await self._in_thread(path.exists):
                raise NotFound(
                    f"{path} is not on this node; put the model there, or mount its folder into the agent's pod"
                )
            if reads_files(model):
                metadata = await self._in_thread(read_metadata, path)
            self._external[key] = path
        self._status.put(key, node_status.ready_entry(key, metadata))

    async def _ensure_downloaded(self, key: ModelKey, model: Document, source: ModelSource, *, first: bool) -> None:
        self._external.pop(key, None)
        before = self._store.records.get(key)
        is_same_source = before is not None and (before.uri, before.path) == (source.uri, source.path)
        if before is not None and is_same_source and await self._in_thread(self._store.is_complete, before):
            if before.reserved != is_reserved(model) or before.gone:
                before = replace(before, reserved=is_reserved(model), gone=False)
                await self._in_thread(self._store.records.put, before)
            self._ready(key, model, before)
            return
        # A retry reports nothing until bytes arrive.
        if first or self._status.state(key) != FAILED:
            self._status.put(key, node_status.updating_entry(key))
        if before is not None and before.state is not ModelState.DOWNLOADING:
            await self._mark_updating(key)
        reserved = is_reserved(model)
        foreign = source.reuse and before is None and await self._in_thread(self._store.has_foreign_files, source.path)
        if not foreign:
            await self._in_thread(lambda: self._store.claim(key, source, reserved=reserved))
        await self._slots.take(self._changed[key])
        download = self._downloads[key] = Download(key, source)
        try:
            keys = await read_credentials(self._api, model, source, self._settings.namespace)
            record = await self._download(download, keys, reserved=reserved)
        finally:
            del self._downloads[key]
            self._slots.release()
        wanted = self._wanted(key)
        if wanted is not None:
            self._ready(key, wanted, record)

    async def _download(self, download: Download, keys: CloudCredentials | None, *, reserved: bool) -> Record:
        key, fetch = download.key, self._settings.fetch
        since, record = time.monotonic(), self._store.records.get(key)
        if record is None:
            log.info("%s: comparing the files in %s", display_name(key), download.source.path)
            return await self._in_thread(lambda: adopt_model(self._store, download, keys, fetch, reserved=reserved))
        log.info("%s: downloading from %s", display_name(key), download.source.shown)
        try:
            placed = await self._in_thread(download_model, self._store, record, download, keys, fetch)
        except asyncio.CancelledError:
            download.stop()
            raise
        self._metrics.succeeded(key, time.monotonic() - since, download.done)
        log.info("%s: downloaded to %s", display_name(key), placed.path)
        return placed

    def _ready(self, key: ModelKey, model: Document, record: Record) -> None:
        config = record.config if reads_files(model) else {}
        self._status.put(key, node_status.ready_entry(key, config, record.revision, record.path))

    async def _remove(self, key: ModelKey) -> None:
        """Remove a model that was deleted or does not belong on this node."""
        model = self._model(key)
        record = self._store.records.get(key)
        if model is not None and record is not None and record.reserved != is_reserved(model):
            await self._in_thread(self._store.records.put, replace(record, reserved=is_reserved(model)))
        self._external.pop(key, None)
        await self._delete_files(key)
        self._status.remove(key)

    async def _delete_files(self, key: ModelKey, *, keep: bool = False) -> None:
        """Delete the files of a model; `keep`: only stop managing them."""
        record = self._store.records.get(key)
        if record is None or record.gone:
            return
        self._status.remove_label(key)
        await self._status.flush()
        await self._in_thread(lambda: self._store.remove(key, keep=keep))
        log.info("%s: removed%s", display_name(key), ", its files stay" if record.reserved or keep else "")
        for other in list(self._tasks):
            if other != key and self._status.state(other) == FAILED:
                self._enqueue(other)  # there may be disk space for it now

    async def _mark_updating(self, key: ModelKey) -> None:
        """Remove the Ready label before changing a folder that pods may use, so that no new pods start here."""
        if self._status.state(key) == FAILED:
            return
        self._status.put(key, node_status.updating_entry(key))
        await self._status.flush()

    # Polling the node

    async def _read_node(self) -> None:
        failures = 0
        while True:
            try:
                await self._status.refresh()
                return
            except (ApiError, Unreachable) as error:
                failures += 1
                log.warning("cannot read the node: %s", error)
                await asyncio.sleep(min(backoff(failures), self._settings.poll_seconds))

    async def _poll_node(self) -> None:
        labels = self._node_labels()
        while True:
            await asyncio.sleep(self._settings.poll_seconds)
            try:
                await self._status.refresh()
            except (ApiError, Unreachable) as error:
                log.warning("cannot read the node: %s", error)
                continue
            # Compared with the labels last acted on: the answer to a write may have updated the node already.
            if self._node_labels() != labels:
                labels = self._node_labels()
                for informer in self._informers:
                    for model in informer.all():
                        self._enqueue(object_key(model))
            for key in await self._in_thread(self._missing):
                if self._status.state(key) == READY:
                    self._enqueue(key)

    def _node_labels(self) -> dict[str, str]:
        """Return the labels that decide which models belong on this node."""
        return {name: value for name, value in labels_of(self._status.node).items() if not is_model_label(name)}

    def _missing(self) -> list[ModelKey]:
        """Return the models whose files were deleted by someone else."""
        missing = [key for key, path in list(self._external.items()) if not path.exists()]
        ready_records = [
            record for record in self._store.records.all() if record.state is ModelState.READY and not record.gone
        ]
        return missing + [record.key for record in ready_records if not self._store.is_complete(record)]

    async def _in_thread(self, work: Callable[..., T], *given: Any) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._threads, work, *given)


class DownloadSlots:
    """Limits how many downloads run at once."""

    def __init__(self, count: int) -> None:
        self._free = asyncio.Semaphore(count)

    async def take(self, changed: asyncio.Event) -> None:
        """Wait for a slot. Raises Cancelled if `changed` is set first: the download may no longer be wanted."""
        slot, reported = asyncio.ensure_future(self._free.acquire()), asyncio.ensure_future(changed.wait())
        try:
            await asyncio.wait([slot, reported], return_when=asyncio.FIRST_COMPLETED)
            if reported.done():
                raise Cancelled("the model changed before its download started")
        except BaseException:
            if not slot.cancel():
                self._free.release()
            raise
        finally:
            reported.cancel()

    def release(self) -> None:
        """Give a slot back."""
        self._free.release()


_REQUIRED = "requiredDuringSchedulingIgnoredDuringExecution"


def matches_node(model: Document, node: Document) -> bool:
    """Return whether a node may hold a model, by `storage.nodeSelector` and required `storage.nodeAffinity`."""
    storage, labels = get_mapping(model, "spec", "storage"), labels_of(node)
    if any(labels.get(name) != value for name, value in get_mapping(storage, "nodeSelector").items()):
        return False
    affinity = get_mapping(storage, "nodeAffinity")
    if not isinstance(affinity.get(_REQUIRED), dict):
        return True
    fields = {"metadata.name": name_of(node)}
    return any(_matches_term(term, labels, fields) for term in get_list(affinity, _REQUIRED, "nodeSelectorTerms"))


def _matches_term(term: Document, labels: dict[str, str], fields: dict[str, str]) -> bool:
    conditions = [(expression, labels) for expression in get_list(term, "matchExpressions")]
    conditions += [(expression, fields) for expression in get_list(term, "matchFields")]
    # An empty term matches no node, as in Kubernetes.
    return bool(conditions) and all(_matches(expression, values) for expression, values in conditions)


def _matches(expression: Document, node_values: dict[str, str]) -> bool:
    operator, values = get_str(expression, "operator"), get_list(expression, "values")
    value = node_values.get(get_str(expression, "key"))
    match operator:
        case "In":
            return value is not None and value in values
        case "NotIn":
            return value is None or value not in values
        case "Exists":
            return value is not None
        case "DoesNotExist":
            return value is None
        case "Gt" | "Lt":
            return _compares(operator, value, values)
    return False


def _compares(operator: str, value: str | None, values: list[object]) -> bool:
    try:
        number, bound = int(value or ""), int(str(values[0]))
    except (ValueError, IndexError):
        return False
    return number > bound if operator == "Gt" else number < bound


async def report_progress(status: NodeStatus, downloads: Mapping[ModelKey, Download], every_seconds: float) -> None:
    """Report the progress of running downloads until cancelled. `downloads` changes meanwhile."""
    reported: dict[ModelKey, tuple[Download, int, float]] = {}
    while True:
        await asyncio.sleep(every_seconds)
        now = time.monotonic()
        reported = {key: item for key, item in reported.items() if downloads.get(key) is item[0]}
        for key, download in downloads.items():
            _, before, since = reported.get(key, (download, 0, now - every_seconds))
            done = download.done
            if done <= before:
                continue
            reported[key] = (download, done, now)
            speed = int((done - before) / max(now - since, 0.001))
            reported_at = datetime.now(UTC).isoformat(timespec="seconds").replace("+00:00", "Z")
            status.put(
                key, node_status.updating_entry(key, node_status.Progress(done, download.total, speed, reported_at))
            )


@dataclass(frozen=True)
class AgentSettings:
    """Settings of the model agent."""

    node: str
    models_root: Path = Path("/mnt/models")
    """Folder of the models, the same on the node and in the agent's pod."""
    namespace: str = "headrace-system"
    """Namespace of the nodes' ConfigMaps, and of the Secrets of ClusterBaseModels."""
    kubeconfig: str = ""
    context: str = ""
    address: str = ""
    """`host:port` of `/metrics` and `/healthz`; "": do not serve them."""
    downloads: int = 2
    """Maximum number of parallel downloads."""
    keep_free_bytes: int = 1_000_000_000
    """Disk space that downloads leave free."""
    progress_seconds: float = 5.0
    """Interval of progress reports."""
    poll_seconds: float = 30.0
    """Interval at which the node and its ConfigMap are read."""
    write_seconds: float = 1.0
    """Minimum interval between writes of the node status."""
    retry_seconds: float = LONGEST_SECONDS
    """Longest delay before a retry."""
    fetch: FetchSettings = field(default_factory=FetchSettings)
