# SPDX-License-Identifier: Apache-2.0
"""Active health checks: request the health path of each backend at an interval, and report the result to `backends`.

Each check opens a new connection: the check should find out whether that works. Backends that have answered no client for a
while may also get a real inference request.
"""

from __future__ import annotations

import asyncio
import logging
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import TYPE_CHECKING

from headrace.fleet.router.responses import BadResponse, parse_status
from headrace.fleet.router.upstream import backend_tls

if TYPE_CHECKING:
    from headrace.fleet.router.backend import Backend
    from headrace.fleet.router.backends import Backends
    from headrace.fleet.router.settings import HealthSettings, RouterSettings

log = logging.getLogger("headrace.router")

_HEAD_BYTES = 16 * 1024


class HealthChecker:
    """Runs one task per backend."""

    def __init__(self, settings: RouterSettings, backends: Backends) -> None:
        self._settings = settings.health
        self._backends = backends
        self._tasks: dict[Backend, asyncio.Task[None]] = {}
        self._started = False
        self._tls_settings = settings
        https = any(backend.address.scheme == "https" for backend in backends.all)
        self._tls = backend_tls(settings) if https else None
        self._random = Random()  # noqa: S311 - spreads checks over time, hides nothing
        self._proofs: dict[Backend, _Proof] = {}
        """Last successful inference of each backend."""

    async def start(self) -> None:
        """Check every backend once, and start the tasks."""
        if self._settings.path:
            await asyncio.gather(*(self._check(backend) for backend in self._backends.all))
        self._started = True
        for backend in self._backends.all:
            self._start_task(backend, at_once=False)

    def add(self, backend: Backend) -> None:
        """Check a new backend, at once and then at the interval."""
        if self._started:
            self._start_task(backend, at_once=True)

    def remove(self, backend: Backend) -> None:
        """Stop the checks of a backend."""
        self._proofs.pop(backend, None)
        task = self._tasks.pop(backend, None)
        if task is not None:
            task.cancel()

    def update_settings(self, settings: RouterSettings) -> None:
        """Apply new settings, and check every backend again."""
        self._settings = settings.health
        for backend in tuple(self._tasks):
            self.remove(backend)
        for backend in self._backends.all:
            self.add(backend)

    async def close(self) -> None:
        """Stop all checks."""
        tasks = list(self._tasks.values())
        self._tasks.clear()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def is_answering(self, backend: Backend) -> bool:
        """Return whether a backend passes a check now (without a path: accepts a connection). Changes nothing."""
        return (await self._probe(backend))[0]

    def _start_task(self, backend: Backend, *, at_once: bool) -> None:
        if self._settings.path:
            self._tasks[backend] = asyncio.create_task(self._run(backend, at_once=at_once))

    async def _run(self, backend: Backend, *, at_once: bool) -> None:
        interval = self._settings.interval_seconds
        if at_once:
            await self._check(backend)
        while True:
            # Not all at the same time, nor in step with other routers.
            await asyncio.sleep(interval * self._random.uniform(0.8, 1.2))
            await self._check(backend)

    async def _check(self, backend: Backend) -> None:
        healthy, reason = await self._probe(backend)
        if healthy and self._settings.inference_path:
            healthy, reason = await self._check_inference(backend)
        self._backends.checked(backend, healthy, asyncio.get_running_loop().time(), reason)

    async def _check_inference(self, backend: Backend) -> tuple[bool, str]:
        """Send an inference request, unless the backend has answered clients since the last one."""
        settings, now = self._settings, asyncio.get_running_loop().time()
        proof = self._proofs.get(backend)
        if proof is not None:
            if backend.stats.ok > proof.answered:
                proof.answered, proof.time = backend.stats.ok, now
            if now - proof.time < settings.inference_interval_seconds:
                return True, ""
        try:
            request = _inference_request(settings, backend)
        except (OSError, UnicodeError):
            return False, f"the key for its inference check cannot be read from {settings.inference_key_file}"
        healthy, reason = await self._probe(
            backend, settings.inference_path, request, settings.inference_timeout_seconds
        )
        if healthy:
            self._proofs[backend] = _Proof(backend.stats.ok, asyncio.get_running_loop().time())
        return healthy, reason

    async def _probe(
        self, backend: Backend, path: str = "", request: bytes = b"", seconds: float = 0.0
    ) -> tuple[bool, str]:
        """Send a request, by default that for the health path; return whether the status is good, or why not."""
        path, seconds = path or self._settings.path, seconds or self._settings.timeout_seconds
        try:
            async with asyncio.timeout(seconds):
                status = await self._request(backend, request or _health_request(path, backend))
        except TimeoutError:
            return False, f"no answer to its check within {seconds:g} s"
        except OSError as error:
            return False, f"cannot be reached: {error.strerror or type(error).__name__}"
        except (BadResponse, EOFError, asyncio.LimitOverrunError):
            return False, "its answer to the check is not HTTP/1.1"
        except Exception:
            log.exception("A check of %s failed", backend.name)
            return False, "the check failed; see the router's log"
        healthy = 200 <= status < 300
        return healthy, "" if healthy else f"{path} answered {status}"

    async def _request(self, backend: Backend, request: bytes) -> int:
        address = backend.address
        if address.scheme == "https" and self._tls is None:
            self._tls = backend_tls(self._tls_settings)
        tls = self._tls if address.scheme == "https" else None
        reader, writer = await asyncio.open_connection(address.host, address.port, ssl=tls, limit=_HEAD_BYTES)
        try:
            if not self._settings.path:
                return 200
            writer.write(request)
            return parse_status(await reader.readuntil(b"\r\n\r\n"))
        finally:
            writer.transport.abort()


@dataclass(slots=True)
class _Proof:
    """The last good answer of a backend."""

    answered: int
    """Number of its successful responses at that time."""
    time: float


def _health_request(path: str, backend: Backend) -> bytes:
    return f"GET {path} HTTP/1.1\r\n{_fields(backend)}\r\n".encode()


def _inference_request(settings: HealthSettings, backend: Backend) -> bytes:
    body = settings.inference_body.encode()
    key = ""
    if settings.inference_key_file:
        key = f"authorization: Bearer {Path(settings.inference_key_file).read_text('ascii').strip()}\r\n"
    head = f"POST {settings.inference_path} HTTP/1.1\r\n{_fields(backend)}{key}"
    return f"{head}content-type: application/json\r\ncontent-length: {len(body)}\r\n\r\n".encode() + body


def _fields(backend: Backend) -> str:
    host = backend.address.url.partition("://")[2]
    return f"host: {host}\r\nuser-agent: headrace-router\r\nconnection: close\r\n"
