# SPDX-License-Identifier: Apache-2.0
"""What is in the cluster, kept up to date: one list of a kind, then a watch, for as long as the controller runs.

An API server that goes away is asked again, later and later; what was seen before stays until it answers.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections import deque
from collections.abc import Callable, Iterable

from headrace.fleet.cluster.api import MANAGER, Api, Refused, Unreachable
from headrace.fleet.cluster.queue import Key, backoff
from headrace.fleet.cluster.resources import Served
from headrace.fleet.words import Document, items, name_of, part, text

log = logging.getLogger("headrace.operator")

OnChange = Callable[[Document | None, Document | None], None]
"""Told of an object before and after; None where it was not, or is no more."""


class Follower:
    """The objects of one kind. `changed` is called for each that is new, differs or is gone."""

    def __init__(
        self,
        api: Api,
        where: Served,
        changed: OnChange,
        *,
        selector: str = "",
        owner: Callable[[Document], Iterable[Key]] = lambda _: (),
    ) -> None:
        self.where = where
        self._api = api
        self._changed = changed
        self._selector = selector
        self._owner = owner
        self._objects: dict[Key, Document] = {}
        self._of: dict[Key, dict[Key, Document]] = {}
        self._gone: deque[str] = deque(maxlen=1000)
        self.listed = asyncio.Event()
        """Set when everything has been seen once."""

    def all(self) -> list[Document]:
        """All objects, by namespace and name."""
        return [self._objects[key] for key in sorted(self._objects)]

    def get(self, key: Key) -> Document | None:
        """One by namespace and name."""
        return self._objects.get(key)

    def of(self, owner: Key) -> list[Document]:
        """The objects of an owner, by name."""
        found = self._of.get(owner, {})
        return [found[key] for key in sorted(found)]

    def put(self, document: Document) -> None:
        """What a write gave back, before the watch tells of it. Older than what is known: forgotten."""
        if text(document, "metadata", "uid") in self._gone:
            return  # the watch was quicker, and has told of its end as well
        self._set(_key(document), {"apiVersion": self.where.api_version, "kind": self.where.resource.kind, **document})

    async def run(self) -> None:
        """Follow until cancelled."""
        failures = 0
        while True:
            try:
                version = await self._list()
                failures = 0
                while True:
                    since = time.monotonic()
                    version = await self._watch(version)
                    if time.monotonic() - since < 1:
                        await asyncio.sleep(1)  # a server, or a proxy, that ends watches at once
            except Refused as refused:
                if refused.code != 410:  # Gone: the version is too old, which is no fault
                    log.warning("cannot follow %s: %s", self.where.resource.plural, refused)
                    failures += 1
            except Unreachable as error:
                failures += 1
                log.warning("cannot follow %s: the API server does not answer (%s)", self.where.resource.plural, error)
            except Exception:
                # A mistake of ours. To go blind without a word would be worse than to look again.
                failures += 1
                log.exception("cannot follow %s", self.where.resource.plural)
            if failures:
                await asyncio.sleep(min(backoff(failures), 30.0))

    async def _list(self) -> str:
        found, version = await self._api.list(self.where, self._selector)
        seen = {_key(each): each for each in found}
        for key in [each for each in self._objects if each not in seen]:
            self._remove(key)
        for key, each in seen.items():
            self._set(key, each)
        self.listed.set()
        return version

    async def _watch(self, version: str) -> str:
        # The iterator is closed here, so that the connection is back before the next one is asked for.
        async with contextlib.aclosing(self._api.watch(self.where, version, self._selector)) as events:  # type: ignore[type-var]
            async for kind, document in events:
                version = text(document, "metadata", "resourceVersion") or version
                if kind in ("ADDED", "MODIFIED"):
                    self._set(_key(document), document)
                elif kind == "DELETED":
                    self._remove(_key(document), text(document, "metadata", "uid"))
        return version

    def _set(self, key: Key, document: Document) -> None:
        before = self._objects.get(key)
        if before is not None and _same_life(before, document) and _version(document) <= _version(before):
            return
        slim = _slim(document)
        self._objects[key] = slim
        for owner in self._owner(before) if before is not None else ():
            self._of.get(owner, {}).pop(key, None)
        for owner in self._owner(slim):
            self._of.setdefault(owner, {})[key] = slim
        self._changed(before, slim)

    def _remove(self, key: Key, uid: str = "") -> None:
        before = self._objects.get(key)
        if before is None or (uid and text(before, "metadata", "uid") != uid):
            return
        del self._objects[key]
        self._gone.append(text(before, "metadata", "uid"))
        for owner in self._owner(before):
            self._of.get(owner, {}).pop(key, None)
        self._changed(before, None)


def _key(document: Document) -> Key:
    return text(document, "metadata", "namespace"), text(document, "metadata", "name") or name_of(document)


def _same_life(one: Document, other: Document) -> bool:
    return text(one, "metadata", "uid") == text(other, "metadata", "uid")


def _version(document: Document) -> int:
    said = text(document, "metadata", "resourceVersion")
    return int(said) if said.isdecimal() else 0


def _slim(document: Document) -> Document:
    """Without the fields that others own: they are half of an object, and nobody here reads them."""
    metadata = dict(part(document, "metadata"))
    ours = [each for each in items(document, "metadata", "managedFields") if text(each, "manager") == MANAGER]
    if "managedFields" in metadata:
        metadata["managedFields"] = ours
    return {**document, "metadata": metadata}
