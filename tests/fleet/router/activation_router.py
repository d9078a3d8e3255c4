# SPDX-License-Identifier: Apache-2.0
"""Routers with activation: one whose scaler is the test itself, and one that starts and stops real processes.

with serving(echo_site()) as server, activation_router(server.port) as nap:
    nap.scaler.ready = 1          # what the test says of the target
    ask(nap.port, "GET", "/hello")
"""

from __future__ import annotations

import asyncio
import subprocess
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import contextmanager
from typing import Any

from headrace.core.telemetry.tracing import NO_TRACING, Tracer
from headrace.fleet.router.grpc.proxy import GrpcProxy
from headrace.fleet.router.proxy import RouterProxy
from headrace.fleet.router.scale_targets import ReplicaCounts, Scaler, ScalerError
from headrace.fleet.router.settings import (
    ActivationSettings,
    BackendAddress,
    HealthSettings,
    RouterSettings,
    ScaleTarget,
)
from headrace.net.http.routes import Routes
from headrace.net.site import Site
from support.ports import free_port
from support.serving import Serving, serving
from support.waiting import eventually

TARGET = ScaleTarget("chat-engine")
_IDLE_SECONDS = 3600.0
"""Nothing falls asleep by itself, unless a test asks for it; `Nap.idle_for` moves the time."""


async def watch_by_polling(
    replicas: Callable[[ScaleTarget], Awaitable[ReplicaCounts]], target: ScaleTarget, seconds: float
) -> AsyncIterator[ReplicaCounts]:
    """Implement `Scaler.watch` by calling `replicas` at an interval."""
    last: ReplicaCounts | None = None
    while True:
        counts = await replicas(target)
        if counts != last:
            last = counts
            yield counts
        await asyncio.sleep(seconds)


class ScriptedScaler:
    """Does what the test says: how many are ready is set from outside, and `down` makes every call fail."""

    def __init__(self, wanted: int = 0, ready: int = 0) -> None:
        self.wanted = dict.fromkeys((TARGET.name,), wanted)
        self.ready = ready
        self.follows = True
        """Whether one is ready as soon as it is wanted, and gone as soon as it is not."""
        self.down = False
        self.asked: list[tuple[str, int]] = []

    async def replicas(self, target: ScaleTarget) -> ReplicaCounts:
        if self.down:
            raise ScalerError("the test has cut the wire")
        wanted = self.wanted.get(target.name, 0)
        return ReplicaCounts(wanted, min(wanted, self.ready) if self.follows else self.ready)

    async def scale(self, target: ScaleTarget, replicas: int) -> None:
        await self.replicas(target)
        self.asked.append((target.name, replicas))
        self.wanted[target.name] = replicas

    def watch(self, target: ScaleTarget) -> AsyncIterator[ReplicaCounts]:
        return watch_by_polling(self.replicas, target, 0.005)

    async def close(self) -> None:
        pass


_SERVER = """
import socket, sys, threading, time
port, load = int(sys.argv[1]), float(sys.argv[2])
time.sleep(load)
listener = socket.socket()
listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
listener.bind(("127.0.0.1", port))
listener.listen(256)
ready = b"%.6f" % time.monotonic()
answer = b"HTTP/1.1 200 OK\\r\\ncontent-length: %d\\r\\n\\r\\n%b" % (len(ready), ready)
def serve(sock):
    with sock:
        data = b""
        while piece := sock.recv(65536):
            data += piece
            while b"\\r\\n\\r\\n" in data:
                head, _, rest = data.partition(b"\\r\\n\\r\\n")
                length = 0
                for line in head.lower().split(b"\\r\\n"):
                    if line.startswith(b"content-length:"):
                        length = int(line[15:])
                if len(rest) < length:
                    break
                data = rest[length:]
                sock.sendall(answer)
while True:
    threading.Thread(target=serve, args=(listener.accept()[0],), daemon=True).start()
"""
"""Answers every request with the time at which it began to listen. SIGTERM kills it at once, whatever it is doing."""


class ProcessScaler:
    """One replica, as a process on a port of its own: `Scaler` with nothing but `subprocess` behind it."""

    def __init__(self, load_seconds: float = 0.0) -> None:
        self.port = free_port()
        self.starts = 0
        self._load = load_seconds
        self._process: subprocess.Popen[bytes] | None = None

    async def replicas(self, target: ScaleTarget) -> ReplicaCounts:
        count = int(self._process is not None and self._process.poll() is None)
        return ReplicaCounts(count, count)

    async def scale(self, target: ScaleTarget, replicas: int) -> None:
        running, self._process = self._process, None
        if running is not None and (not replicas or running.poll() is not None):
            running.terminate()
            await asyncio.to_thread(running.wait)
            running = None
        if replicas and running is None:
            self.starts += 1
            command = [sys.executable, "-S", "-E", "-c", _SERVER, str(self.port), str(self._load)]
            running = subprocess.Popen(command)
        self._process = running

    def watch(self, target: ScaleTarget) -> AsyncIterator[ReplicaCounts]:
        return watch_by_polling(self.replicas, target, 0.01)

    async def close(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.wait()


class ActivationRouter:
    """A running router with activation."""

    def __init__(self, server: Serving, proxy: RouterProxy, scaler: Any) -> None:
        self.server = server
        self.proxy = proxy
        self.port = server.port
        self.scaler = scaler
        self._ahead = 0.0

    @property
    def activator(self) -> Any:
        return self.proxy.activator

    @property
    def state(self) -> str:
        return str(self.activator.state)

    def idle_for(self, seconds: float = _IDLE_SECONDS + 1) -> None:
        """Move the activator's clock: it samples the load before and after."""

        def sample() -> None:
            activator, loop = self.activator, self.server.loop
            activator._now = lambda: loop.time() + self._ahead
            for later in (0.0, seconds):
                self._ahead += later
                activator._timer.cancel()  # `_sample` sets the next one
                activator._sample()

        self.server.call(sample)

    def becomes(self, state: str) -> None:
        eventually(lambda: self.state == state)

    def held(self, count: int) -> None:
        eventually(lambda: len(self.activator.held) == count)


@contextmanager
def activation_router(
    *ports: int,
    scaler: Any = None,
    targets: tuple[ScaleTarget, ...] = (TARGET,),
    health: str = "",
    health_seconds: float = 0.5,
    idle_seconds: float = _IDLE_SECONDS,
    tracer: Tracer = NO_TRACING,
    **bounds: Any,
) -> Iterator[ActivationRouter]:
    """A router with the servers at these ports as backends, for the targets of `scaler`."""
    made_scaler: Scaler = scaler or ScriptedScaler()
    settings = RouterSettings(
        tuple(BackendAddress.parse(f"http://127.0.0.1:{port}") for port in ports),
        health=HealthSettings(path=health, interval_seconds=health_seconds),
        activation=ActivationSettings(targets, idle_seconds=idle_seconds, **bounds),
    )
    created: list[tuple[RouterProxy, GrpcProxy]] = []

    async def build() -> Site:
        proxy = RouterProxy(settings, made_scaler, tracer)
        grpc = GrpcProxy(proxy.backends, settings, budget=proxy.budget)
        grpc.activator = proxy.activator
        routes = Routes()
        proxy.add_to(routes)
        await proxy.start()
        grpc.start()
        created.append((proxy, grpc))
        return Site(routes, services=grpc.services)

    with serving(build) as server:  # type: ignore[arg-type]
        proxy, grpc = created[0]
        try:
            yield ActivationRouter(server, proxy, made_scaler)
        finally:
            server.call(proxy.close)
            server.call(grpc.close)
