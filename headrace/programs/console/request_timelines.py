# SPDX-License-Identifier: Apache-2.0
"""The last requests of all models, and timelines of watched requests.

The last requests of each version are in its statistics, without their content; they are read when a page asks. A watch ends
when it has its requests, or after a minute; its timelines stay until the next watch of the same model.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import orjson

from headrace.core.errors import InvalidArgument, ResourceExhausted
from headrace.core.names import check_name
from headrace.engine.dataplane import DataPlane, ServingVersion
from headrace.engine.scheduling.request_timeline import MAX_REQUEST_IDS, MAX_TIMELINES, ReceivedTime, TimelineRecorder

SECONDS = 60.0
_MODELS = 16
"""Models whose timelines are kept."""
_ID_LENGTH = 256
_RECENT = 100
"""Answered requests, and failed ones, that a process reports."""


@dataclass(frozen=True, slots=True)
class WatchRequest:
    """Which requests to record."""

    model: str
    requests: int = 20
    """The number of requests to record, from now on; 0 to stop."""
    id: str = ""
    """Record the request with this id instead."""


class RequestWatcher:
    """Records the timelines of watched requests in one process."""

    def __init__(
        self,
        plane: DataPlane,
        received: ReceivedTime = lambda _request: None,
        switch: Callable[[bool], None] = lambda _on: None,
        seconds: float = SECONDS,
    ) -> None:
        self._plane = plane
        self._received = received
        self._switch = switch
        self._seconds = seconds
        self._watches: dict[str, TimelineRecorder] = {}
        """By model, including those that have ended."""
        self._running: dict[str, tuple[list[ServingVersion], asyncio.TimerHandle]] = {}

    def start(self, request: WatchRequest) -> None:
        """Start watching a model, or change its running watch."""
        versions = self._plane.statistics(request.model)
        watch = self._watches.pop(request.model, None)
        if watch is None or (request.model not in self._running and not request.id):
            watch = TimelineRecorder(self._received, partial(self._stop, request.model))
        self._watches[request.model] = watch
        if len(self._watches) > _MODELS:
            oldest = next(iter(self._watches))
            self._stop(oldest)
            del self._watches[oldest]
        if request.id:
            if len(watch.ids) >= MAX_REQUEST_IDS:
                raise ResourceExhausted(
                    f"{MAX_REQUEST_IDS} requests of model '{request.model}' are being watched already: try again in a minute"
                )
            watch.ids.add(request.id)
        else:
            watch.remaining = request.requests
        if not watch.remaining and not watch.ids:
            self._stop(request.model)
            return
        self._cancel_timer(request.model)
        if not self._running:
            self._switch(True)
        timer = asyncio.get_running_loop().call_later(self._seconds, self._stop, request.model)
        self._running[request.model] = (versions, timer)
        for version in versions:
            version.record_timelines(watch)

    def document(self) -> dict[str, Any]:
        """Return watches and timelines as JSON. Request keys differ between processes."""
        now = asyncio.get_running_loop().time()
        return {
            "watching": {
                name: {"left": self._watches[name].remaining, "seconds": round(max(0.0, timer.when() - now), 1)}
                for name, (_, timer) in self._running.items()
            },
            "requests": {
                f"{name}/{timeline['began']:.6f}/{os.getpid()}/{timeline['number']}": timeline
                for name, watch in self._watches.items()
                for timeline in watch.documents()
            },
        }

    def recent(self) -> dict[str, Any]:
        """Return the newest answered and failed requests of all models as JSON, by keys that differ between processes."""
        offset = time.time() - time.monotonic_ns() / 1e9
        answered: list[tuple[int, Any]] = []
        failed: list[tuple[int, Any]] = []
        for version in self._plane.statistics():
            statistics, name = version.statistics, {"model": version.name, "version": version.version_text}
            for arrived_ns, took_ns, rows, request_id in tuple(statistics.recent):
                timing = {"began": offset + arrived_ns / 1e9, "took_ms": took_ns / 1e6}
                answered.append((arrived_ns, {**name, **timing, "id": request_id, "rows": rows, "outcome": "ok"}))
            for failure in tuple(statistics.recent_failures):
                timing = {"began": offset + failure.arrived_ns / 1e9, "took_ms": failure.took_ns / 1e6}
                texts = {"id": failure.id, "outcome": failure.code, "message": failure.message}
                failed.append((failure.arrived_ns, {**name, **timing, "rows": failure.rows, **texts}))
        return {"answered": _newest(answered), "failed": _newest(failed)}

    def _stop(self, model: str) -> None:
        running = self._running.pop(model, None)
        if running is None:
            return
        versions, timer = running
        timer.cancel()
        watch = self._watches[model]
        watch.remaining = 0
        watch.ids.clear()
        for version in versions:
            version.record_timelines(None)
        if not self._running:
            self._switch(False)

    def _cancel_timer(self, model: str) -> None:
        if model in self._running:
            self._running[model][1].cancel()


def _newest(requests: list[tuple[int, Any]]) -> dict[str, Any]:
    requests.sort(key=lambda request: request[0])
    pid = os.getpid()
    return {f"{pid}/{arrived_ns}/{index}": request for index, (arrived_ns, request) in enumerate(requests[-_RECENT:])}


def parse_watch_request(body: bytes) -> WatchRequest:
    """Parse `{"model": NAME, "requests": 20}` or `{"model": NAME, "id": ID}`."""
    try:
        fields = orjson.loads(body)
    except orjson.JSONDecodeError:
        fields = None
    if not isinstance(fields, dict) or not isinstance(fields.get("model"), str):
        raise InvalidArgument('the body must name the model to watch, as JSON: {"model": "NAME", "requests": 20}')
    unknown = fields.keys() - {"model", "requests", "id"}
    if unknown:
        raise InvalidArgument(f"unknown field {min(unknown)[:64]!a}: use model, and requests or id")
    requests, request_id = fields.get("requests", 20), fields.get("id", "")
    if type(requests) is not int or not 0 <= requests <= MAX_TIMELINES:
        raise InvalidArgument(f"'requests' must be a whole number from 0 (stop) to {MAX_TIMELINES}")
    if not isinstance(request_id, str) or len(request_id) > _ID_LENGTH:
        raise InvalidArgument(f"'id' must be a text of at most {_ID_LENGTH} characters")
    return WatchRequest(check_name(fields["model"]), requests, request_id)
