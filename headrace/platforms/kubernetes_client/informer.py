# SPDX-License-Identifier: Apache-2.0
"""An informer: list the objects of one resource type, then watch them, and keep a local copy.

While the API server is unreachable, the informer retries with back-off and keeps the objects it last saw.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections import deque
from collections.abc import Callable, Iterable

from headrace.platforms.kubernetes_client.api import FIELD_MANAGER, ApiClient, ApiError, Unreachable
from headrace.platforms.kubernetes_client.objects import (
    Document,
    Key,
    ServedResource,
    get_list,
    get_mapping,
    get_str,
    name_of,
)
from headrace.platforms.kubernetes_client.work_queue import backoff

log = logging.getLogger("headrace.operator")

ChangeHandler = Callable[[Document | None, Document | None], None]
"""Called with an object before and after a change; None before it was added and after it was deleted."""


class Informer:
    """The objects of one resource type. Calls `on_change` for each that was added, changed or deleted."""

    def __init__(
        self,
        api: ApiClient,
        served: ServedResource,
        on_change: ChangeHandler,
        *,
        selector: str = "",
        index_by: Callable[[Document], Iterable[Key]] = lambda _: (),
    ) -> None:
        """index_by: the keys under which `indexed` finds an object, such as those of its owners."""
        self.served = served
        self._api = api
        self._on_change = on_change
        self._selector = selector
        self._index_by = index_by
        self._objects: dict[Key, Document] = {}
        self._index: dict[Key, dict[Key, Document]] = {}
        self._deleted_uids: deque[str] = deque(maxlen=1000)
        self.synced = asyncio.Event()
        """Set after the first complete list."""

    def all(self) -> list[Document]:
        """Return all objects, ordered by namespace and name."""
        return [self._objects[key] for key in sorted(self._objects)]

    def get(self, key: Key) -> Document | None:
        """Return one object by namespace and name."""
        return self._objects.get(key)

    def indexed(self, key: Key) -> list[Document]:
        """Return the objects with that index key, ordered by name."""
        objects = self._index.get(key, {})
        return [objects[name] for name in sorted(objects)]

    def put(self, document: Document) -> None:
        """Store the answer of a write before the watch reports it. An older version than the stored one is ignored."""
        if get_str(document, "metadata", "uid") in self._deleted_uids:
            return  # the watch has already reported the deletion
        self._set(
            _key(document), {"apiVersion": self.served.api_version, "kind": self.served.resource.kind, **document}
        )

    async def run(self) -> None:
        """List and watch until cancelled."""
        failures = 0
        while True:
            try:
                version = await self._list()
                failures = 0
                while True:
                    started = time.monotonic()
                    version = await self._watch(version)
                    if time.monotonic() - started < 1:
                        await asyncio.sleep(1)  # back off if the server or a proxy ends watches at once
            except ApiError as error:
                if error.code != 410:  # Gone: the version is too old, which is normal
                    log.warning("cannot watch %s: %s", self.served.resource.plural, error)
                    failures += 1
            except Unreachable as error:
                failures += 1
                log.warning("cannot watch %s: the API server does not answer (%s)", self.served.resource.plural, error)
            except Exception:
                # A bug in Headrace. Retrying is better than serving a stale copy silently.
                failures += 1
                log.exception("cannot watch %s", self.served.resource.plural)
            if failures:
                await asyncio.sleep(min(backoff(failures), 30.0))

    async def _list(self) -> str:
        objects, version = await self._api.list(self.served, self._selector)
        by_key = {_key(document): document for document in objects}
        for key in [key for key in self._objects if key not in by_key]:
            self._remove(key)
        for key, document in by_key.items():
            self._set(key, document)
        self.synced.set()
        return version

    async def _watch(self, version: str) -> str:
        # Closed here, so that the connection is back in the pool before the next request.
        async with contextlib.aclosing(self._api.watch(self.served, version, self._selector)) as events:  # type: ignore[type-var]
            async for kind, document in events:
                version = get_str(document, "metadata", "resourceVersion") or version
                if kind in ("ADDED", "MODIFIED"):
                    self._set(_key(document), document)
                elif kind == "DELETED":
                    self._remove(_key(document), get_str(document, "metadata", "uid"))
        return version

    def _set(self, key: Key, document: Document) -> None:
        before = self._objects.get(key)
        if before is not None and _same_uid(before, document) and _version(document) <= _version(before):
            return
        after = _without_foreign_fields(document)
        self._objects[key] = after
        for owner in self._index_by(before) if before is not None else ():
            self._index.get(owner, {}).pop(key, None)
        for owner in self._index_by(after):
            self._index.setdefault(owner, {})[key] = after
        self._on_change(before, after)

    def _remove(self, key: Key, uid: str = "") -> None:
        before = self._objects.get(key)
        if before is None or (uid and get_str(before, "metadata", "uid") != uid):
            return
        del self._objects[key]
        self._deleted_uids.append(get_str(before, "metadata", "uid"))
        for owner in self._index_by(before):
            self._index.get(owner, {}).pop(key, None)
        self._on_change(before, None)


def _key(document: Document) -> Key:
    return get_str(document, "metadata", "namespace"), name_of(document)


def _same_uid(before: Document, after: Document) -> bool:
    return get_str(before, "metadata", "uid") == get_str(after, "metadata", "uid")


def _version(document: Document) -> int:
    version = get_str(document, "metadata", "resourceVersion")
    return int(version) if version.isdecimal() else 0


def _without_foreign_fields(document: Document) -> Document:
    """Drop the managedFields of other managers: they are half of an object, and nothing here reads them."""
    metadata = dict(get_mapping(document, "metadata"))
    fields = get_list(document, "metadata", "managedFields")
    if "managedFields" in metadata:
        metadata["managedFields"] = [entry for entry in fields if get_str(entry, "manager") == FIELD_MANAGER]
    return {**document, "metadata": metadata}
