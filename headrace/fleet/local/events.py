# SPDX-License-Identifier: Apache-2.0
"""What happened to services and pods: the last of it, kept in memory and in a file. A lost one is no failure."""

from __future__ import annotations

import json
import logging
import uuid
from collections.abc import Callable, Collection
from datetime import datetime
from pathlib import Path
from typing import Any

from headrace.core.errors import FailedPrecondition
from headrace.fleet.local.store import utc_now, write_json
from headrace.fleet.status.conditions import time_text
from headrace.fleet.words import Document, kind_of, name_of, text, whole

log = logging.getLogger("headrace.fleet")

_LONGEST = 1024


class Events:
    """A bounded list."""

    def __init__(self, path: Path, most: int, now: Callable[[], datetime] = utc_now) -> None:
        self._path = path
        self._most = most
        self._now = now
        self._all: dict[tuple[str, str, str], dict[str, Any]] = {}
        self._unwritten = False

    def load(self) -> None:
        """Read those of the daemon before."""
        try:
            found = json.loads(self._path.read_bytes())
        except (OSError, ValueError):
            return
        for each in found if isinstance(found, list) else ():
            if isinstance(each, dict):
                self._all[_key(each)] = each

    def record(self, about: Document, kind: str, reason: str, message: str, *, latest: bool = False) -> None:
        """One event: `Normal` or `Warning`, a word, a sentence. The same again is counted.

        `latest`: of what differs each time, such as a duration, the last one is kept and all are counted.
        """
        now = time_text(self._now())
        event: dict[str, Any] = {
            "apiVersion": "v1",
            "kind": "Event",
            "metadata": {
                "name": f"{name_of(about)[:50]}.{uuid.uuid4().hex[:12]}",
                "namespace": text(about, "metadata", "namespace"),
                "uid": str(uuid.uuid4()),
            },
            "involvedObject": {
                "apiVersion": text(about, "apiVersion"),
                "kind": kind_of(about),
                "namespace": text(about, "metadata", "namespace"),
                "name": name_of(about),
                "uid": text(about, "metadata", "uid"),
            },
            "type": kind,
            "reason": reason,
            "message": message[:_LONGEST],
            "source": {"component": "headrace-up"},
            "firstTimestamp": now,
            "lastTimestamp": now,
            "count": 1,
        }
        before = self._all.pop(self._like(event) if latest else _key(event), None)
        if before is not None:
            event |= {"metadata": before["metadata"], "firstTimestamp": before["firstTimestamp"]}
            event["count"] = (whole(before, "count") or 1) + 1
        self._all[_key(event)] = event
        while len(self._all) > self._most:
            del self._all[next(iter(self._all))]
        self._unwritten = True
        log.log(
            logging.INFO if kind == "Normal" else logging.WARNING, "%s: %s: %s", name_of(about), reason, message[:300]
        )

    def _like(self, event: Document) -> tuple[str, str, str]:
        """The key of the one for the same reason."""
        mine = _key(event)
        return next((each for each in self._all if each[:2] == mine[:2]), mine)

    def of(self, uids: Collection[str]) -> list[Document]:
        """About some objects, the oldest first."""
        return [each for each in self._all.values() if text(each, "involvedObject", "uid") in uids]

    def flush(self) -> None:
        """Write them, if there are new ones."""
        if self._unwritten:
            self._unwritten = False
            try:
                write_json(self._path, list(self._all.values()))
            except FailedPrecondition as error:
                log.warning("%s", error.message)


def _key(event: Document) -> tuple[str, str, str]:
    return text(event, "involvedObject", "uid"), text(event, "reason"), text(event, "message")
