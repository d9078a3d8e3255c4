# SPDX-License-Identifier: Apache-2.0
"""Answers in the order of the requests (`preserve_ordering`), where several instances finish in another."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable
from functools import partial
from typing import Any

from headrace.core.messages import InferResponse
from headrace.engine.scheduling.pending import Pending

log = logging.getLogger("headrace.engine")


class Order:
    """Keeps each (last) answer back until all earlier requests have theirs."""

    def __init__(self) -> None:
        self._places: deque[_Place] = deque()

    def follow(self, pending: Pending) -> None:
        """Let a request be answered after those that came before it."""
        place = _Place(pending.done)
        self._places.append(place)
        pending.done = partial(self._answered, place)

    def _answered(self, place: _Place, result: InferResponse | BaseException | None) -> None:
        place.result = result
        place.ready = True
        while self._places and self._places[0].ready:
            first = self._places.popleft()
            try:
                first.done(first.result)
            except Exception:  # of one caller: the others want their answers too
                log.exception("an answer could not be delivered")


class _Place:
    __slots__ = ("done", "ready", "result")

    def __init__(self, done: Callable[[Any], None]) -> None:
        self.done = done
        self.ready = False
        self.result: InferResponse | BaseException | None = None
