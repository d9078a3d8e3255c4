# SPDX-License-Identifier: Apache-2.0
"""One node's models, kept as the cluster wants them: `Agent`. Made by `program`.

Each model has a task of its own that brings it, lets it go, or waits until there is something to do; downloads run in
threads and share a number of slots. What a task needs it reads anew each time, so that it may be killed at any point.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

from headrace.core.errors import Cancelled, HeadraceError, NotFound
from headrace.fleet.agent import entries
from headrace.fleet.agent.adopting import adopt_model
from headrace.fleet.agent.board import Board
from headrace.fleet.agent.fetching import Download, fetch_model
from headrace.fleet.agent.marks import (
    BASE_MODELS,
    CLUSTER_BASE_MODELS,
    FAILED,
    READY,
    ModelKey,
    is_model_label,
    is_read,
    is_reserved,
    key_of,
    shown,
    what_matters,
)
from headrace.fleet.agent.placing import belongs
from headrace.fleet.agent.progress import tell_progress
from headrace.fleet.agent.reading import read_model
from headrace.fleet.agent.records import Record
from headrace.fleet.agent.secret_keys import credentials_for
from headrace.fleet.agent.serving import AgentMetrics
from headrace.fleet.agent.settings import AgentSettings
from headrace.fleet.agent.shelf import Shelf
from headrace.fleet.agent.slots import Slots
from headrace.fleet.agent.sources import Source, source_of
from headrace.fleet.cluster.api import Api, Refused, Unreachable
from headrace.fleet.cluster.following import Follower
from headrace.fleet.cluster.queue import backoff
from headrace.fleet.words import Document, labels_of, text
from headrace.models.storage.credentials import CloudCredentials

log = logging.getLogger("headrace.agent")

Made = TypeVar("Made")

_BAD_NEWS = "the agent failed to bring the model; its log has the details"


class Agent:
    """Brings models to one node, and tells of them."""

    def __init__(self, api: Api, settings: AgentSettings, metrics: AgentMetrics) -> None:
        self._api = api
        self._settings = settings
        self._metrics = metrics
        self._shelf = Shelf(settings.models_root, settings.keep_free_bytes)
        self._board = Board(api, settings.node, settings.namespace, settings.tell_seconds)
        self._followers = [Follower(api, each, self._seen) for each in (BASE_MODELS, CLUSTER_BASE_MODELS)]
        self._tasks: dict[ModelKey, asyncio.Task[None]] = {}
        self._news: dict[ModelKey, asyncio.Event] = {}
        self._busy: set[ModelKey] = set()
        self._downloads: dict[ModelKey, Download] = {}
        self._slots = Slots(settings.downloads)
        self._threads = ThreadPoolExecutor(settings.downloads + 2, thread_name_prefix="agent")
        self._here: dict[ModelKey, Path] = {}
        """Models that others put there, and where."""
        self._started = False

    @property
    def settled(self) -> bool:
        """Whether everything was seen, all that can be there is, and all of it has been told."""
        return self._started and not self._busy and self._board.quiet

    async def run(self) -> None:
        """Work until cancelled."""
        await self._in_thread(self._shelf.open)
        background = [asyncio.create_task(each.run()) for each in self._followers]
        try:
            await self._first_look()
            for follower in self._followers:
                await follower.listed.wait()
            self._start()
            loops = (
                self._board.run(),
                self._keep_looking(),
                tell_progress(self._board, self._downloads, self._settings.progress_seconds),
            )
            background += [asyncio.create_task(each) for each in loops]
            await asyncio.gather(*background)
        finally:
            self.stop()
            everything = [*background, *self._tasks.values()]
            for task in everything:
                task.cancel()
            await asyncio.gather(*everything, return_exceptions=True)
            self._threads.shutdown(wait=False, cancel_futures=True)
            self._shelf.close()

    def stop(self) -> None:
        """End all downloads; what has come stays."""
        for each in self._downloads.values():
            each.stop()

    # Who is to be looked at

    def _start(self) -> None:
        """What is told, what has been brought and what is wanted, put together."""
        self._board.adopt()
        wanted = {key_of(each) for follower in self._followers for each in follower.all()}
        brought = {each.key for each in self._shelf.records.all() if not each.gone}
        self._board.forget_others(wanted | brought)
        self._started = True
        self._metrics.started = True
        for key in wanted | brought:
            self._look_at(key)

    def _seen(self, before: Document | None, after: Document | None) -> None:
        document = after if after is not None else before
        if self._started and document is not None and what_matters(before) != what_matters(after):
            self._look_at(key_of(document))

    def _look_at(self, key: ModelKey) -> None:
        download = self._downloads.get(key)
        if download is not None and not self._is_for(download):
            download.stop()
        self._busy.add(key)
        self._news.setdefault(key, asyncio.Event()).set()
        if key not in self._tasks:
            self._tasks[key] = asyncio.create_task(self._keep(key), name=f"model {shown(key)}")

    def _is_for(self, download: Download) -> bool:
        """Whether a download is still the one that is wanted."""
        model = self._wanted(download.key)
        try:
            return model is not None and source_of(model) == download.source
        except HeadraceError:
            return False

    def _model(self, key: ModelKey) -> Document | None:
        model = self._followers[0 if key[0] else 1].get(key)
        return None if model is None or text(model, "metadata", "deletionTimestamp") else model

    def _wanted(self, key: ModelKey) -> Document | None:
        """The model, if it is to be on this node."""
        model = self._model(key)
        return model if model is not None and belongs(model, self._board.node) else None

    # One model

    async def _keep(self, key: ModelKey) -> None:
        """Look at a model whenever there is news of it, and again, later and later, while it does not come."""
        failures, news = 0, self._news[key]
        while True:
            news.clear()
            again = await self._once(key, first=not failures)
            failures = failures + 1 if again and not news.is_set() else 0
            if news.is_set():
                continue
            self._busy.discard(key)
            if not again and self._wanted(key) is None:
                del self._tasks[key], self._news[key]
                return
            wait = min(backoff(failures), self._settings.retry_seconds) if again else None
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(news.wait(), wait)
                failures = 0
            self._busy.add(key)

    async def _once(self, key: ModelKey, *, first: bool) -> bool:
        """Do what is to be done now. Whether to try again. Never raises but when cancelled."""
        try:
            model = self._wanted(key)
            source = source_of(model) if model is not None else None
            if model is None or source is None or source.way == "claim":
                await self._let_go(key)
            elif source.way == "download":
                await self._bring(key, model, source, first=first)
            else:
                await self._is_here(key, model, source)
            return False
        except Cancelled:
            return True  # there is news, which is why
        except (Refused, Unreachable) as error:
            log.warning("%s: %s", shown(key), error)
        except HeadraceError as error:
            log.warning("%s: %s", shown(key), error.message)
            self._board.put(key, entries.failed(key, error.message))
            self._metrics.failed(key)
        except OSError as error:
            log.warning("%s: %s", shown(key), error)
            said = (
                f"{self._settings.models_root} cannot be used: {os.strerror(error.errno or 0)}; look at the node's disk"
            )
            self._board.put(key, entries.failed(key, said))
        except Exception:
            log.exception("%s cannot be brought", shown(key))
            self._board.put(key, entries.failed(key, _BAD_NEWS))
        return True

    async def _is_here(self, key: ModelKey, model: Document, source: Source) -> None:
        """A model that somebody else puts there."""
        self._here.pop(key, None)
        before = self._shelf.records.get(key)
        # Who says `local://` of a folder that we have filled means to keep it.
        await self._clear(key, keep=before is not None and before.path == source.path)
        found: dict[str, Any] = {}
        if source.way == "here":
            path = Path(source.path)
            if not await self._in_thread(path.exists):
                raise NotFound(
                    f"{path} is not on this node; put the model there, or mount its folder into the agent's pod"
                )
            if is_read(model):
                found = await self._in_thread(read_model, path)
            self._here[key] = path
        self._board.put(key, entries.ready(key, found))

    async def _bring(self, key: ModelKey, model: Document, source: Source, *, first: bool) -> None:
        self._here.pop(key, None)
        before = self._shelf.records.get(key)
        same = before is not None and (before.uri, before.path) == (source.uri, source.path)
        if before is not None and same and await self._in_thread(self._shelf.is_whole, before):
            if before.reserved != is_reserved(model) or before.gone:
                before = replace(before, reserved=is_reserved(model), gone=False)
                await self._in_thread(self._shelf.records.put, before)
            self._ready(key, model, before)
            return
        # Another try is no news until bytes come.
        if first or self._board.state(key) != FAILED:
            self._board.put(key, entries.updating(key))
        if before is not None and before.state != "coming":
            await self._no_more_pods(key)
        reserved = is_reserved(model)
        foreign = source.reuse and before is None and await self._in_thread(self._shelf.is_foreign, source.path)
        if not foreign:
            await self._in_thread(lambda: self._shelf.claim(key, source, reserved=reserved))
        await self._slots.take(self._news[key])
        download = self._downloads[key] = Download(key, source)
        try:
            keys = await credentials_for(self._api, model, source, self._settings.namespace)
            record = await self._download(download, keys, reserved=reserved)
        finally:
            del self._downloads[key]
            self._slots.release()
        wanted = self._wanted(key)
        if wanted is not None:
            self._ready(key, wanted, record)

    async def _download(self, download: Download, keys: CloudCredentials | None, *, reserved: bool) -> Record:
        key, bring = download.key, self._settings.bring
        since, record = time.monotonic(), self._shelf.records.get(key)
        if record is None:
            log.info("%s may be in %s", shown(key), download.source.path)
            return await self._in_thread(lambda: adopt_model(self._shelf, download, keys, bring, reserved=reserved))
        log.info("%s comes from %s", shown(key), download.source.shown)
        try:
            placed = await self._in_thread(fetch_model, self._shelf, record, download, keys, bring)
        except asyncio.CancelledError:
            download.stop()
            raise
        self._metrics.succeeded(key, time.monotonic() - since, download.done)
        log.info("%s is there, in %s", shown(key), placed.path)
        return placed

    def _ready(self, key: ModelKey, model: Document, record: Record) -> None:
        config = record.config if is_read(model) else {}
        self._board.put(key, entries.ready(key, config, record.revision, record.path))

    async def _let_go(self, key: ModelKey) -> None:
        """A model that is deleted, or not for this node."""
        model = self._model(key)
        record = self._shelf.records.get(key)
        if model is not None and record is not None and record.reserved != is_reserved(model):
            await self._in_thread(self._shelf.records.put, replace(record, reserved=is_reserved(model)))
        self._here.pop(key, None)
        await self._clear(key)
        self._board.drop(key)

    async def _clear(self, key: ModelKey, *, keep: bool = False) -> None:
        """Delete what was brought of a model, or let somebody else have it."""
        record = self._shelf.records.get(key)
        if record is None or record.gone:
            return
        self._board.drop_label(key)
        await self._board.told()
        await self._in_thread(lambda: self._shelf.remove(key, keep=keep))
        log.info("%s is gone%s", shown(key), ", its files stay" if record.reserved or keep else "")
        for other in list(self._tasks):
            if other != key and self._board.state(other) == FAILED:
                self._look_at(other)  # there may be room for it now

    async def _no_more_pods(self, key: ModelKey) -> None:
        """Before a folder changes that pods may be using, no more of them are to come."""
        if self._board.state(key) == FAILED:
            return
        self._board.put(key, entries.updating(key))
        await self._board.told()

    # What goes on beside

    async def _first_look(self) -> None:
        failures = 0
        while True:
            try:
                await self._board.look()
                return
            except (Refused, Unreachable) as error:
                failures += 1
                log.warning("cannot look at the node: %s", error)
                await asyncio.sleep(min(backoff(failures), self._settings.look_seconds))

    async def _keep_looking(self) -> None:
        looked_with = self._node_labels()
        while True:
            await asyncio.sleep(self._settings.look_seconds)
            try:
                await self._board.look()
            except (Refused, Unreachable) as error:
                log.warning("cannot look at the node: %s", error)
                continue
            # Not what was there before this look: an answer to what we wrote may have told of it already.
            if self._node_labels() != looked_with:
                looked_with = self._node_labels()
                for follower in self._followers:
                    for model in follower.all():
                        self._look_at(key_of(model))
            for key in await self._in_thread(self._missing):
                if self._board.state(key) == READY:
                    self._look_at(key)

    def _node_labels(self) -> dict[str, str]:
        """Those that decide which models are for this node."""
        return {name: said for name, said in labels_of(self._board.node).items() if not is_model_label(name)}

    def _missing(self) -> list[ModelKey]:
        """Models that were there and are not any more: somebody has deleted files."""
        gone = [key for key, path in list(self._here.items()) if not path.exists()]
        known = [each for each in self._shelf.records.all() if each.state == "there" and not each.gone]
        return gone + [each.key for each in known if not self._shelf.is_whole(each)]

    async def _in_thread(self, work: Callable[..., Made], *given: Any) -> Made:
        return await asyncio.get_running_loop().run_in_executor(self._threads, work, *given)
