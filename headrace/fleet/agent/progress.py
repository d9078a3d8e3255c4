# SPDX-License-Identifier: Apache-2.0
"""How far the downloads of a node are, told every few seconds, and not when nothing has come. A task of `agent`."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping
from datetime import UTC, datetime

from headrace.fleet.agent import entries
from headrace.fleet.agent.board import Board
from headrace.fleet.agent.fetching import Download
from headrace.fleet.agent.marks import ModelKey


async def tell_progress(board: Board, downloads: Mapping[ModelKey, Download], every_seconds: float) -> None:
    """Tell until cancelled. `downloads` are those under way; the mapping changes."""
    heard: dict[ModelKey, tuple[Download, int, float]] = {}
    while True:
        await asyncio.sleep(every_seconds)
        now = time.monotonic()
        heard = {key: each for key, each in heard.items() if downloads.get(key) is each[0]}
        for key, download in downloads.items():
            _, before, since = heard.get(key, (download, 0, now - every_seconds))
            done = download.done
            if done <= before:
                continue
            heard[key] = (download, done, now)
            speed = int((done - before) / max(now - since, 0.001))
            at = datetime.now(UTC).isoformat(timespec="seconds").replace("+00:00", "Z")
            board.put(key, entries.updating(key, entries.Told(done, download.total, speed, at)))
