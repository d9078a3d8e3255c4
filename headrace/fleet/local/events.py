# SPDX-License-Identifier: Apache-2.0
"""Events of services and pods: the latest ones, in memory and in a file. Losing one is not an error."""

from __future__ import annotations

import json
import logging
import uuid
from collections.abc import Callable, Collection
from datetime import datetime
from pathlib import Path
from typing import Any

from headrace.core.errors import FailedPrecondition
from headrace.core.files import write_json
from headrace.fleet.status.conditions import format_time, utc_now
from headrace.platforms.kubernetes_client.objects import Document, get_int, get_str, kind_of, name_of

log = logging.getLogger("headrace.fleet")

_MAX_MESSAGE = 1024


class Events:
    """A bounded list of events."""

    def __init__(self, path: Path, max_events: int, now: Callable[[], datetime] = utc_now) -> None:
        self._path = path
        self._max_events = max_events
        self._now = now
        self._all: dict[tuple[str, str, str], dict[str, Any]] = {}
        self._unwritten = False

    def load(self) -> None:
        """Read the events of an earlier daemon."""
        try:
            content = json.loads(self._path.read_bytes())
        except (OSError, ValueError):
            return
        for event in content if isinstance(content, list) else ():
            if isinstance(event, dict):
                self._all[_key(event)] = event

    def record(self, subject: Document, kind: str, reason: str, message: str, *, latest: bool = False) -> None:
        """Record an event: `Normal` or `Warning`, a reason, a message. A repeated event is counted.

        `latest`: the message differs each time, such as a duration: the last one is kept, and all are counted.
        """
        now = format_time(self._now())
        event: dict[str, Any] = {
            "apiVersion": "v1",
            "kind": "Event",
            "metadata": {
                "name": f"{name_of(subject)[:50]}.{uuid.uuid4().hex[:12]}",
                "namespace": get_str(subject, "metadata", "namespace"),
                "uid": str(uuid.uuid4()),
            },
            "involvedObject": {
                "apiVersion": get_str(subject, "apiVersion"),
                "kind": kind_of(subject),
                "namespace": get_str(subject, "metadata", "namespace"),
                "name": name_of(subject),
                "uid": get_str(subject, "metadata", "uid"),
            },
            "type": kind,
            "reason": reason,
            "message": message[:_MAX_MESSAGE],
            "source": {"component": "headrace-up"},
            "firstTimestamp": now,
            "lastTimestamp": now,
            "count": 1,
        }
        previous = self._all.pop(self._same_reason(event) if latest else _key(event), None)
        if previous is not None:
            event |= {"metadata": previous["metadata"], "firstTimestamp": previous["firstTimestamp"]}
            event["count"] = (get_int(previous, "count") or 1) + 1
        self._all[_key(event)] = event
        while len(self._all) > self._max_events:
            del self._all[next(iter(self._all))]
        self._unwritten = True
        log.log(
            logging.INFO if kind == "Normal" else logging.WARNING, "%s: %s: %s", name_of(subject), reason, message[:300]
        )

    def _same_reason(self, event: Document) -> tuple[str, str, str]:
        """Return the key of the event with the same object and reason."""
        wanted = _key(event)
        return next((key for key in self._all if key[:2] == wanted[:2]), wanted)

    def about(self, uids: Collection[str]) -> list[Document]:
        """Return the events about some objects, oldest first."""
        return [event for event in self._all.values() if get_str(event, "involvedObject", "uid") in uids]

    def flush(self) -> None:
        """Write the events, if there are new ones."""
        if self._unwritten:
            self._unwritten = False
            try:
                write_json(self._path, list(self._all.values()))
            except FailedPrecondition as error:
                log.warning("%s", error.message)


def _key(event: Document) -> tuple[str, str, str]:
    return get_str(event, "involvedObject", "uid"), get_str(event, "reason"), get_str(event, "message")
