# SPDX-License-Identifier: Apache-2.0
"""Timelines of requests: which models are watched, for how long, and the recorded requests.

A watch ends when it has its requests, or after a minute; its timelines stay until the next watch of the same model.
"""

from __future__ import annotations

import asyncio
import os
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


@dataclass(frozen=True, slots=True)
class Wish:
    """What to watch."""

    model: str
    requests: int = 20
    """The next so many requests; 0 to stop."""
    id: str = ""
    """Instead: the request with this id."""


class Watching:
    """All watches of one process."""

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
        """By model, including finished ones."""
        self._running: dict[str, tuple[list[ServingVersion], asyncio.TimerHandle]] = {}

    def begin(self, wish: Wish) -> None:
        """Watch a model; a running watch of it is changed."""
        versions = self._plane.statistics(wish.model)
        watch = self._watches.pop(wish.model, None)
        if watch is None or (wish.model not in self._running and not wish.id):
            watch = TimelineRecorder(self._received, partial(self._over, wish.model))
        self._watches[wish.model] = watch
        if len(self._watches) > _MODELS:
            oldest = next(iter(self._watches))
            self._over(oldest)
            del self._watches[oldest]
        if wish.id:
            if len(watch.ids) >= MAX_REQUEST_IDS:
                raise ResourceExhausted(
                    f"{MAX_REQUEST_IDS} requests of model '{wish.model}' are waited for: try again in a minute"
                )
            watch.ids.add(wish.id)
        else:
            watch.remaining = wish.requests
        if not watch.remaining and not watch.ids:
            self._over(wish.model)
            return
        self._end_timer(wish.model)
        if not self._running:
            self._switch(True)
        timer = asyncio.get_running_loop().call_later(self._seconds, self._over, wish.model)
        self._running[wish.model] = (versions, timer)
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
                f"{name}/{each['began']:.6f}/{os.getpid()}/{each['number']}": each
                for name, watch in self._watches.items()
                for each in watch.documents()
            },
        }

    def _over(self, model: str) -> None:
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

    def _end_timer(self, model: str) -> None:
        if model in self._running:
            self._running[model][1].cancel()


def wish_of(body: bytes) -> Wish:
    """Parse `{"model": NAME, "requests": 20}` or `{"model": NAME, "id": ID}`."""
    try:
        told = orjson.loads(body)
    except orjson.JSONDecodeError:
        told = None
    if not isinstance(told, dict) or not isinstance(told.get("model"), str):
        raise InvalidArgument('send which model to watch, as JSON: {"model": "NAME", "requests": 20}')
    unknown = told.keys() - {"model", "requests", "id"}
    if unknown:
        raise InvalidArgument(f"unknown field {min(unknown)[:64]!a}: use model, and requests or id")
    requests, wanted = told.get("requests", 20), told.get("id", "")
    if type(requests) is not int or not 0 <= requests <= MAX_TIMELINES:
        raise InvalidArgument(f"'requests' is a whole number from 0, for no more, to {MAX_TIMELINES}")
    if not isinstance(wanted, str) or len(wanted) > _ID_LENGTH:
        raise InvalidArgument(f"'id' is a text of at most {_ID_LENGTH} characters")
    return Wish(check_name(told["model"]), requests, wanted)
