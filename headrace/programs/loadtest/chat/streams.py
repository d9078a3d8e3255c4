# SPDX-License-Identifier: Apache-2.0
"""A connection that asks and notes when each token comes. Used by the workers of `running`, each with one."""

from __future__ import annotations

import asyncio
import ssl
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import httptools
import orjson

from headrace.client.addresses import Address
from headrace.client.http1 import request_head
from headrace.programs.loadtest.lanes import LOST, NO_CONNECTION, TIMED_OUT

_CONNECT_SECONDS = 10.0
_TEXT_BYTES = 4096
_MOST_EVENT_BYTES = 64 * 1024 * 1024


@dataclass
class Answer:
    """What came of one request. Times are of `time.perf_counter`."""

    began: float
    ended: float = 0.0
    times: list[float] = field(default_factory=list)
    """Of each piece of the answer that had something in it."""
    prompt_tokens: int = 0
    """As the server counts them; 0 if it does not tell."""
    answer_tokens: int = 0
    """As the server counts them, else the pieces that came."""
    error: str = ""
    """The kind; "" if it was answered well."""
    told: str = ""


class Stream:
    """One connection to a server; opened when it is needed."""

    def __init__(self, address: Address, fields: Sequence[tuple[str, str]], tls: ssl.SSLContext | None = None) -> None:
        self._address = address
        self._fields = [("host", address.authority), *fields]
        self._tls = tls
        self._lines: tuple[asyncio.StreamReader, asyncio.StreamWriter] | None = None

    async def ask(self, path: str, body: bytes, timeout_seconds: float) -> Answer:
        """Send a request and read its answer to the end. Errors are in the answer."""
        answer = Answer(time.perf_counter())
        try:
            async with asyncio.timeout(timeout_seconds):
                await self._ask("POST", path, body, answer)
        except TimeoutError:
            self._fail(answer, TIMED_OUT, "no end of the answer came in time")
        except (ConnectionError, asyncio.IncompleteReadError, ssl.SSLError):
            self._fail(answer, LOST, "the connection ended before the answer did")
        except OSError as error:
            self._fail(answer, NO_CONNECTION, error.strerror or type(error).__name__)
        except httptools.HttpParserError:
            self._fail(answer, "no HTTP", "what answers there does not speak HTTP/1.1")
        if not answer.ended:
            answer.ended = time.perf_counter()
        return answer

    async def fetch(self, path: str, timeout_seconds: float) -> Any:
        """The JSON behind a path; None if there is none."""
        answer = Answer(time.perf_counter())
        try:
            async with asyncio.timeout(timeout_seconds):
                reading = await self._ask("GET", path, b"", answer)
            return orjson.loads(reading.body) if not answer.error else None
        except (OSError, TimeoutError, httptools.HttpParserError, orjson.JSONDecodeError):
            self.close()
            return None

    def close(self) -> None:
        """End the connection."""
        lines, self._lines = self._lines, None
        if lines is not None:
            lines[1].transport.abort()

    def _fail(self, answer: Answer, kind: str, text: str) -> None:
        answer.error, answer.told = kind, text
        self.close()

    async def _ask(self, method: str, path: str, body: bytes, answer: Answer) -> _Reading:
        if self._lines is None:
            async with asyncio.timeout(_CONNECT_SECONDS):
                host = self._address.host if self._tls is not None else None
                self._lines = await asyncio.open_connection(
                    self._address.host, self._address.port, ssl=self._tls, server_hostname=host
                )
        reader, writer = self._lines
        kind = [("content-type", "application/json")] if body else []
        target = self._address.prefix + path
        writer.write(request_head(method, target, [*self._fields, *kind], len(body) if body else -1) + body)
        reading = _Reading(answer)
        while not reading.complete:
            data = await reader.read(65536)
            if not data:
                raise ConnectionResetError
            reading.feed(data)
        answer.ended = time.perf_counter()
        reading.conclude()
        if not reading.keeps:
            self.close()
        return reading


class _Reading:
    """Reads one HTTP answer; of a stream of events, the time of each."""

    def __init__(self, answer: Answer) -> None:
        self._answer = answer
        self._parser: Any = httptools.HttpResponseParser(self)
        self._events = False
        self._now = 0.0
        self.body = bytearray()
        self.complete = False
        self.keeps = False

    def feed(self, data: bytes) -> None:
        self._now = time.perf_counter()
        self._parser.feed_data(data)

    def on_header(self, name: bytes, value: bytes) -> None:
        if name.lower() == b"content-type":
            self._events = value.lower().startswith(b"text/event-stream")

    def on_body(self, data: bytes) -> None:
        self.body += data
        if self._events and self._parser.get_status_code() == 200:
            while (end := self.body.find(b"\n")) >= 0:
                line = bytes(self.body[:end]).strip()
                del self.body[: end + 1]
                if line.startswith(b"data:"):
                    self._event(line[5:].strip())
        if len(self.body) > _MOST_EVENT_BYTES:
            raise ConnectionResetError

    def on_message_complete(self) -> None:
        if self._parser.get_status_code() >= 200:
            self.complete = True
            self.keeps = self._parser.should_keep_alive()

    def conclude(self) -> None:
        """Sum up: an error's text, or the tokens."""
        answer, status = self._answer, self._parser.get_status_code()
        if status != 200:
            answer.error, answer.told = f"HTTP {status}", _text(bytes(self.body[:_TEXT_BYTES]))
        elif not self._events:
            answer.times.append(self._now)
            self._count(_loaded(bytes(self.body)))
        if not answer.error and not answer.answer_tokens:
            answer.answer_tokens = len(answer.times) if self._events else 0

    def _event(self, data: bytes) -> None:
        if data == b"[DONE]":
            return
        event = _loaded(data)
        if "error" in event:
            self._answer.error, self._answer.told = "error in the stream", _text(data)
        if any(_says(choice) for choice in event.get("choices") or ()):
            self._answer.times.append(self._now)
        self._count(event)

    def _count(self, event: dict[str, Any]) -> None:
        usage = event.get("usage")
        if isinstance(usage, dict):
            self._answer.prompt_tokens = int(usage.get("prompt_tokens") or 0)
            self._answer.answer_tokens = int(usage.get("completion_tokens") or 0)


def _says(choice: Any) -> bool:
    delta = choice.get("delta") if isinstance(choice, dict) else None
    if not isinstance(delta, dict):
        return False
    return any(delta.get(name) for name in ("content", "reasoning_content", "reasoning", "tool_calls"))


def _loaded(data: bytes) -> dict[str, Any]:
    try:
        found = orjson.loads(data)
    except orjson.JSONDecodeError:
        return {}
    return found if isinstance(found, dict) else {}


def _text(body: bytes) -> str:
    """What an error of OpenAI's form says, or of another."""
    found = _loaded(body)
    error = found.get("error")
    if isinstance(error, dict):
        return str(error.get("message", ""))[:300]
    return str(error or found.get("detail") or body[:200].decode(errors="replace"))[:300]
