# SPDX-License-Identifier: Apache-2.0
"""The adapters of a model in host memory: loaded when a request names them, and the least recently used dropped for others.

A load serves all requests that wait for it, also if some of them give up. If it fails, all of them get the error, and it is
tried again by a later request, after a pause that grows; at once if the files have changed. `adapter_slots` does the rest.
"""

from __future__ import annotations

import logging
import threading
from collections import OrderedDict
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

from headrace.backends.llm.adapter_files import WEIGHTS
from headrace.backends.llm.adapter_fit import LoadedAdapter
from headrace.backends.llm.metrics import AdapterMetrics
from headrace.backends.restart_backoff import Backoff
from headrace.core.clock import Clock
from headrace.core.errors import Code, HeadraceError, Internal, NotFound, Unavailable, with_message
from headrace.core.names import nearest
from headrace.models.adapters import CONFIG, AdapterSource, ModelAdapters

log = logging.getLogger("headrace.backends.llm")

Done = Callable[[LoadedAdapter | HeadraceError], None]
Waiter = tuple[object, Done]
"""Who waits, and the callback."""
_THREADS = 2
"""Adapters that are read at a time: reading competes with requests for cores and memory."""
_FIRST_PAUSES_SECONDS = (1.0, 2.0)
_LONGEST_PAUSE_SECONDS = 60.0
_MOST_FAILURES = 1024


@dataclass(slots=True)
class _Load:
    source: AdapterSource
    waiters: list[Waiter] = field(default_factory=list)
    is_kept: bool = True


@dataclass(slots=True)
class _Failure:
    error: HeadraceError
    backoff: Backoff
    retry_at: float = 0.0
    stamp: Any = None
    """Of the files that could not be loaded."""


class AdapterStore:
    """The adapters of one model, which its instances share. Thread-safe; implements `models.adapters.AdapterLoader`."""

    def __init__(
        self,
        adapters: ModelAdapters,
        capacity: int,
        metrics: AdapterMetrics,
        clock: Clock,
    ) -> None:
        self._adapters = adapters
        self._capacity = capacity
        self._metrics = metrics
        self._clock = clock
        self.read: Callable[[AdapterSource], LoadedAdapter] | None = None
        """Set when the model is loaded, before the first request."""
        self._loaded: OrderedDict[str, LoadedAdapter] = OrderedDict()
        """Least recently used first."""
        self._loads: dict[str, _Load] = {}
        self._failures: OrderedDict[str, _Failure] = OrderedDict()
        self._lock = threading.Lock()
        self._delivery = threading.Lock()
        """Held while callbacks are called, so that none is called after `detach`."""
        self._threads = ThreadPoolExecutor(_THREADS, thread_name_prefix=f"adapters {adapters.model}")
        self._closing = threading.Event()

    @property
    def is_closing(self) -> bool:
        """Whether the model is being unloaded."""
        return self._closing.is_set()

    @property
    def loaded(self) -> list[str]:
        """The names of the adapters in host memory, least recently used first."""
        with self._lock:
            return list(self._loaded)

    def get(self, name: str, owner: object, done: Done) -> None:
        """Pass an adapter, or the error, to `done`: now if it is known, else in another thread. `owner`: see `detach`."""
        try:
            with self._lock:
                found: LoadedAdapter | HeadraceError | None = self._loaded.get(name)
                if found is not None:
                    self._loaded.move_to_end(name)
                elif name in self._loads:
                    self._loads[name].waiters.append((owner, done))
                    return
            if found is None:
                source = self._source(name)
                found = self._refusal(name, source)
                if found is None and self._begin(source, (owner, done)):
                    return
                found = found or Unavailable(f"model '{self._adapters.model}' is being unloaded")
        except HeadraceError as error:
            found = error
        done(found)

    def load(self, source: AdapterSource, done: Callable[[HeadraceError | None], None]) -> None:
        """Read an adapter again. Requests that wait for it get the new one."""
        waiter = (None, lambda result: done(result if isinstance(result, HeadraceError) else None))
        if not self._begin(source, waiter, again=True):
            done(Unavailable(f"model '{self._adapters.model}' is being unloaded"))

    def forget(self, name: str) -> None:
        """Drop an adapter. Requests that use it go on, and those that wait for it get it."""
        with self._lock:
            self._loaded.pop(name, None)
            self._failures.pop(name, None)
            if name in self._loads:
                self._loads[name].is_kept = False

    def detach(self, owner: object, error: HeadraceError) -> None:
        """Answer the requests of an instance that is being closed; no callback of it is called afterwards."""
        with self._delivery:
            given_up: list[Done] = []
            with self._lock:
                for load in self._loads.values():
                    given_up += [done for who, done in load.waiters if who is owner]
                    load.waiters = [waiter for waiter in load.waiters if waiter[0] is not owner]
            for done in given_up:
                done(error)

    def close(self) -> None:
        """Stop loads and free the memory."""
        self._closing.set()
        self._threads.shutdown(cancel_futures=True)
        with self._lock:
            loads = list(self._loads.values())
            self._loads.clear()
            self._loaded.clear()
        self.read = None
        for load in loads:
            _deliver(load.waiters, Unavailable(f"model '{self._adapters.model}' is being unloaded"))

    def _source(self, name: str) -> AdapterSource:
        source = self._adapters.find(name)
        if source is None:
            names = self._adapters.names()
            close = nearest(name, names)
            hint = f"did you mean '{close}'?" if close else "GET /v1/models lists the adapters"
            raise NotFound(f"model '{self._adapters.model}' has no adapter {name[:64]!a}: {hint}")
        return source

    def _refusal(self, name: str, source: AdapterSource) -> HeadraceError | None:
        """Return the error of a load that failed a moment ago."""
        with self._lock:
            failure = self._failures.get(name)
        left = 0.0 if failure is None else failure.retry_at - self._clock.monotonic()
        if failure is None or left <= 0 or _stamp(source) != failure.stamp:
            return None
        error = with_message(failure.error, failure.error.message)
        if error.code is Code.UNAVAILABLE:
            error.retry_after_seconds = left
        return error

    def _begin(self, source: AdapterSource, waiter: Waiter, *, again: bool = False) -> bool:
        """Start a load, or use the one that began or ended meanwhile; return False if the model is being unloaded."""
        with self._lock:
            loaded = None if again else self._loaded.get(source.name)
            before = self._loads.get(source.name)
            if before is not None and not again:
                before.waiters.append(waiter)
                return True
            if loaded is None:
                load = _Load(source, [*(before.waiters if before is not None else ()), waiter])
                try:
                    self._threads.submit(self._run, load)
                except RuntimeError:
                    return False
                if before is not None:
                    before.waiters = []
                self._loads[source.name] = load
                return True
        waiter[1](loaded)
        return True

    def _run(self, load: _Load) -> None:
        """Load an adapter and tell all who wait for it. In a thread of the pool."""
        source, read, stamp = load.source, self.read, _stamp(load.source)
        began = self._clock.monotonic()
        result: LoadedAdapter | HeadraceError
        try:
            if read is None:
                raise Unavailable(f"model '{self._adapters.model}' is being unloaded")
            result = read(source)
        except HeadraceError as error:
            result = error.with_traceback(None)
        except MemoryError:
            result = Unavailable(f"there is not enough memory for adapter '{source.name}': try again later")
        except Exception:
            log.exception("Adapter '%s' of model '%s' could not be loaded.", source.name, self._adapters.model)
            result = Internal(f"adapter '{source.name}' could not be loaded; the server's log has the details")
        with self._delivery:
            with self._lock:
                if self._loads.get(source.name) is not load:
                    return  # another load took its place, and those who wait
                del self._loads[source.name]
                if isinstance(result, LoadedAdapter):
                    self._failures.pop(source.name, None)
                    if load.is_kept:
                        self._keep(result)
                elif not self.is_closing:
                    self._failed(source.name, result, stamp)
            self._report(source.name, result, self._clock.monotonic() - began)
            _deliver(load.waiters, result)

    def _report(self, name: str, result: LoadedAdapter | HeadraceError, seconds: float) -> None:
        if isinstance(result, LoadedAdapter):
            self._metrics.loaded(seconds)
            log.info("Loaded adapter '%s' of model '%s' (%d bytes).", name, self._adapters.model, result.bytes)
        else:
            self._metrics.load_failed()
            log.warning("Adapter of model '%s' was not loaded: %s", self._adapters.model, result.message)

    def _keep(self, adapter: LoadedAdapter) -> None:
        self._loaded[adapter.name] = adapter
        self._loaded.move_to_end(adapter.name)
        while len(self._loaded) > self._capacity:
            self._loaded.popitem(last=False)
            self._metrics.evicted("host")

    def _failed(self, name: str, error: HeadraceError, stamp: Any) -> None:
        failure = self._failures.pop(name, None)
        if failure is None or failure.stamp != stamp:
            failure = _Failure(error, Backoff(_FIRST_PAUSES_SECONDS, longest=_LONGEST_PAUSE_SECONDS, lived=0.0))
        now = self._clock.monotonic()
        failure.error, failure.stamp, failure.retry_at = error, stamp, now + failure.backoff.next_delay(now)
        self._failures[name] = failure
        while len(self._failures) > _MOST_FAILURES:
            self._failures.popitem(last=False)


def _deliver(waiters: list[Waiter], result: LoadedAdapter | HeadraceError) -> None:
    for _, done in waiters:
        try:
            done(result)
        except Exception:  # an error in one callback must not affect the others
            log.exception("A request that waited for an adapter could not be resumed.")


def _stamp(source: AdapterSource) -> Any:
    """Return what changes when the files of an adapter change; None on the Hub."""
    if source.folder is None:
        return None
    stamps: list[tuple[int, int, int] | None] = []
    for name in (CONFIG, WEIGHTS):
        try:
            status = (source.folder / name).stat()
        except OSError:
            stamps.append(None)
        else:
            stamps.append((status.st_size, status.st_mtime_ns, status.st_ino))
    return (source.folder, *stamps)
