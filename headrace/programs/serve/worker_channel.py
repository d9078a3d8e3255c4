# SPDX-License-Identifier: Apache-2.0
"""The channel between the workers of one server: requests and answers in JSON over UNIX sockets.

The sockets are in a folder that the supervisor created, readable by this user only. One request is one connection.
Workers trust each other.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import tempfile
import time
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import orjson

from headrace.core.errors import INTERNAL_TEXT, Code, HeadraceError, Unavailable, error_of

log = logging.getLogger("headrace.apps")

_STARTED = "started"

RequestHandler = Callable[[Any], Awaitable[Any]]
"""Turns the arguments of a request into an answer; both are JSON."""


class WorkerUnavailable(Unavailable):
    """Raised for a worker that is dead, still starting, or busy for too long."""


class WorkerTimeout(WorkerUnavailable):
    """Raised for a worker that does not answer in time."""


class WorkerChannel:
    """One worker's end of the channel. Used in the event loop's thread only."""

    def __init__(self, folder: str | Path, index: int, count: int) -> None:
        self.folder = Path(folder)
        self.index = index
        self.others = [worker for worker in range(count) if worker != index]
        self._handlers: dict[str, RequestHandler] = {}
        self._server: asyncio.AbstractServer | None = None

    def register_handler(self, name: str, handler: RequestHandler) -> None:
        """Register the handler of a request."""
        self._handlers[name] = handler

    def has_handler(self, name: str) -> bool:
        """Return whether a request has a handler."""
        return name in self._handlers

    async def start(self) -> None:
        """Listen. A socket of a dead predecessor is replaced."""
        path = self._path(self.index)
        path.unlink(missing_ok=True)
        self._server = await asyncio.start_unix_server(self._serve, path=str(path))

    async def close(self) -> None:
        """Stop answering."""
        if self._server is not None:
            self._server.close()
            self._server = None
            with contextlib.suppress(OSError):
                self._path(self.index).unlink()

    async def request_all(self, name: str, arguments: Any = None, *, seconds: float) -> dict[int, Any]:
        """Return the answer of every other worker, by its number; an exception for one that has none."""
        answers = await asyncio.gather(
            *(self.request(worker, name, arguments, seconds=seconds) for worker in self.others), return_exceptions=True
        )
        return dict(zip(self.others, answers, strict=True))

    async def request(self, worker: int, name: str, arguments: Any = None, *, seconds: float) -> Any:
        """Return the answer of one worker. Raises `WorkerUnavailable` or `WorkerTimeout`, or the error of the worker."""
        try:
            async with asyncio.timeout(seconds):
                document = await self._exchange(worker, orjson.dumps([name, arguments]))
        except TimeoutError:
            raise WorkerTimeout(f"worker {worker} does not answer in time") from None
        except (OSError, orjson.JSONDecodeError):
            raise WorkerUnavailable(f"worker {worker} does not answer") from None
        if "error" in document:
            raise error_of(document.get("code", ""), document["error"])
        return document["answer"]

    async def _exchange(self, worker: int, message: bytes) -> Any:
        reader, writer = await asyncio.open_unix_connection(str(self._path(worker)))
        try:
            writer.write(message)
            writer.write_eof()
            return orjson.loads(await reader.read())
        finally:
            writer.close()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            name, arguments = orjson.loads(await reader.read())
            writer.write(orjson.dumps(await self._answer(name, arguments)))
            await writer.drain()
        except (OSError, ValueError) as error:  # The other worker has died or timed out.
            log.debug("Could not answer a request of another worker: %s", error)
        finally:
            writer.close()

    async def _answer(self, name: str, arguments: Any) -> dict[str, Any]:
        handler = self._handlers.get(name)
        try:
            if handler is None:
                raise Unavailable(f"worker {self.index} is starting")
            return {"answer": await handler(arguments)}
        except HeadraceError as error:
            return {"error": error.message, "code": error.code.value}
        except Exception:
            log.exception("Could not answer %r of another worker", name)
            return {"error": INTERNAL_TEXT, "code": Code.INTERNAL.value}

    def _path(self, index: int) -> Path:
        return self.folder / f"worker-{index}.sock"


@contextlib.contextmanager
def worker_folder() -> Iterator[str]:
    """Create a folder for the workers of one server and remove it at the end. The supervisor calls this before it forks."""
    usual = tempfile.gettempdir()
    # A socket's path may have 107 bytes.
    parent = usual if len(os.fsencode(usual)) < 72 else "/tmp"  # noqa: S108
    with tempfile.TemporaryDirectory(prefix="headrace-", dir=parent, ignore_cleanup_errors=True) as folder:
        (Path(folder) / _STARTED).write_text(repr(time.monotonic()))
        yield folder


def started_at(folder: Path) -> float:
    """Return when the server was started, by the monotonic clock, which all processes share."""
    return float((folder / _STARTED).read_text())
