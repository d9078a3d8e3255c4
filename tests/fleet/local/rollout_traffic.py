# SPDX-License-Identifier: Apache-2.0
"""Clients of a service while something happens to it: every request is counted, and every failure kept."""

from __future__ import annotations

import http.client
import threading
import time
from collections import Counter
from types import TracebackType
from urllib.parse import urlsplit

_STREAM = 20


class Traffic:
    """Some threads that ask one after the other; each fourth request is a stream. Use `with`."""

    def __init__(self, url: str, clients: int = 4, pause: float = 0.01, streams: bool = True) -> None:
        parts = urlsplit(url)
        self._address = (parts.hostname or "", parts.port or 80)
        self._pause = pause
        self._each = 4 if streams else 0
        self._over = threading.Event()
        self._threads = [threading.Thread(target=self._client, daemon=True) for _ in range(clients)]
        self._lock = threading.Lock()
        self.answers: Counter[str] = Counter()
        """By the first word of the answer: the text of who gave it."""
        self.streams = 0
        self.failures: list[str] = []

    def __enter__(self) -> Traffic:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._over.set()
        for thread in self._threads:
            thread.join(60)
        assert not any(item.is_alive() for item in self._threads), "a request was never answered"

    @property
    def total(self) -> int:
        return sum(self.answers.values()) + len(self.failures)

    def _client(self) -> None:
        connection, number = http.client.HTTPConnection(*self._address, timeout=60), 0
        while not self._over.is_set():
            number += 1
            streams = bool(self._each) and number % self._each == 0
            try:
                self._ask(connection, f"/stream?{_STREAM}" if streams else "/name", streams)
            except (OSError, http.client.HTTPException) as error:
                with self._lock:
                    self.failures.append(f"{type(error).__name__}: {error}")
                connection.close()
            time.sleep(self._pause)
        connection.close()

    def _ask(self, connection: http.client.HTTPConnection, path: str, streams: bool) -> None:
        connection.request("GET", path)
        answer = connection.getresponse()
        body = answer.read().decode()
        lines = body.splitlines()
        with self._lock:
            if answer.status != 200 or (streams and len(lines) != _STREAM):
                self.failures.append(f"{answer.status} with {len(lines)} lines: {body[:100]}")
                return
            self.answers[lines[0].split()[0]] += 1
            self.streams += streams
