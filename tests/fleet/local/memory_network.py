# SPDX-License-Identifier: Apache-2.0
"""An event loop with simulated processes and a network in memory: `MemoryLoop` in virtual time, `RealTimeLoop` in real time.

loop.create_connection("127.0.0.1", port) reaches whatever listens at that port in the same loop, without a socket, so that
bytes are never on their way while the virtual clock jumps. Each task, timer and connection belongs to the simulated process
whose context it was made in (`OWNER`): `loop.kill(owner)` ends them all, as `kill -9` ends a process.
"""

from __future__ import annotations

import asyncio
import contextvars
import os
import socket
import weakref
from collections import deque
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field
from typing import Any

from headrace.core.clock import Clock, SystemClock
from headrace.net.negotiation import feed
from support.virtual_time import LoopClock, VirtualLoop

OWNER: contextvars.ContextVar[object] = contextvars.ContextVar("owner", default="test")
"""The simulated process that runs now."""
Place = int | str
"""A TCP port, or the path of a UNIX socket."""
_HIGH_WATER = 1 << 16


class MemoryTransport(asyncio.Transport):
    """One end of a connection in memory."""

    def __init__(self, loop: MemoryNetwork, context: contextvars.Context, name: tuple[str, int]) -> None:
        super().__init__({"peername": name, "sockname": name})
        self._loop = loop
        self._context = context
        self.owner = context.get(OWNER, "test")
        self.peer: MemoryTransport
        self._protocol: asyncio.BaseProtocol
        self._arrived: deque[bytes] = deque()
        self._eof = False
        self._eof_told = False
        self._reading = True
        self._planned = False
        self._closing = False
        self._lost = False
        self._wrote_eof = False
        self._paused_writer = False

    def begin(self, protocol: asyncio.BaseProtocol) -> None:
        self._protocol = protocol
        self._context.run(protocol.connection_made, self)

    # What protocols call

    def write(self, data: Any) -> None:
        if self._closing or self._wrote_eof or not data:
            return
        peer = self.peer
        peer._arrived.append(bytes(data))
        peer._plan()
        if self.get_write_buffer_size() > _HIGH_WATER and not self._paused_writer:
            self._paused_writer = True
            self._protocol.pause_writing()

    def get_write_buffer_size(self) -> int:
        return sum(map(len, self.peer._arrived))

    def can_write_eof(self) -> bool:
        return True

    def write_eof(self) -> None:
        if not self._wrote_eof:
            self._wrote_eof = True
            self.peer._eof = True
            self.peer._plan()

    def pause_reading(self) -> None:
        self._reading = False

    def resume_reading(self) -> None:
        self._reading = True
        self._plan()

    def is_reading(self) -> bool:
        return self._reading and not self._closing

    def is_closing(self) -> bool:
        return self._closing

    def set_protocol(self, protocol: asyncio.BaseProtocol) -> None:
        self._protocol = protocol

    def get_protocol(self) -> asyncio.BaseProtocol:
        return self._protocol

    def set_write_buffer_limits(self, high: int | None = None, low: int | None = None) -> None:
        """They are always the same here."""

    def close(self) -> None:
        if not self._closing:
            self._closing = True
            self.write_eof()
            self._loop.call_soon(self._lose, context=self._context)

    def abort(self) -> None:
        self.peer._arrived.clear()
        self.close()

    # What the network does

    def die(self) -> None:
        """Its process was killed: its own protocol hears nothing; the peer sees the end of the stream."""
        self._closing = self._lost = True
        self._loop.transports.discard(self)
        self.write_eof()

    def _plan(self) -> None:
        if not self._planned and self._reading and not self._closing:
            self._planned = True
            self._loop.call_soon(self._deliver, context=self._context)

    def _deliver(self) -> None:
        self._planned = False
        while self._arrived and self._reading and not self._closing:
            feed(self._protocol, self._arrived.popleft())
        writer = self.peer
        if writer._paused_writer and not self._arrived and not writer._closing:
            writer._paused_writer = False
            self._loop.call_soon(writer._protocol.resume_writing, context=writer._context)
        if self._eof and not self._arrived and self._reading and not self._closing and not self._eof_told:
            self._eof_told = True
            stays_open = self._protocol.eof_received()  # type: ignore[attr-defined]
            if not stays_open:
                self.close()

    def _lose(self) -> None:
        if not self._lost:
            self._lost = True
            self._loop.transports.discard(self)
            self._protocol.connection_lost(None)


@dataclass
class _Listening:
    """Somebody accepts at a place; or, without a factory, connections wait for who will."""

    owner: object
    context: contextvars.Context
    factory: Callable[[], asyncio.BaseProtocol] | None = None
    waiting: list[asyncio.Future[None]] = field(default_factory=list)


class MemoryServer:
    """What `create_server` returns, and what a simulated process that listens closes."""

    sockets = ()
    """No real socket listens."""

    def __init__(self, loop: MemoryNetwork, place: Place, listening: _Listening) -> None:
        self._loop = loop
        self._place = place
        self._listening = listening
        self._closed = loop.create_future()

    def close(self) -> None:
        self._loop.stop_listening(self._place, self._listening)
        if not self._closed.done():
            self._closed.set_result(None)

    def fileno(self) -> int:
        """As a listening socket that is given to another process has one."""
        return 1000

    async def wait_closed(self) -> None:
        await asyncio.shield(self._closed)


class MemoryNetwork(asyncio.SelectorEventLoop):
    """See the module."""

    clock: Clock

    def __init__(self, *more: Any) -> None:
        super().__init__(*more)
        self.transports: set[MemoryTransport] = set()
        self._places: dict[Place, list[_Listening]] = {}
        self._tasks: weakref.WeakKeyDictionary[asyncio.Task[Any], object] = weakref.WeakKeyDictionary()
        """Each with its process."""
        self._ports = iter(range(40_000, 1 << 30))
        self.set_task_factory(self._make_task)

    # Processes

    def start_task(self, owner: object, work: Coroutine[Any, Any, Any]) -> asyncio.Task[Any]:
        """Run something as a simulated process."""
        context = contextvars.Context()
        context.run(OWNER.set, owner)
        return self.create_task(work, context=context)

    def kill(self, owner: object) -> None:
        """End all that a simulated process has: its sockets, its timers, its tasks."""
        for place, all_ in list(self._places.items()):
            for listening in [item for item in all_ if item.owner == owner]:
                self.stop_listening(place, listening)
        for transport in [transport for transport in self.transports if transport.owner == owner]:
            transport.die()
        for task in self.tasks_of(owner):
            task.cancel()

    def tasks_of(self, owner: object) -> list[asyncio.Task[Any]]:
        return [item for item, its in self._tasks.items() if its == owner and not item.done()]

    def drop_timers(self, owner: object) -> None:
        """Those that a killed process has left."""
        for handle in list(self._scheduled):  # type: ignore[attr-defined]
            if _owner_of(handle._context) == owner:
                handle.cancel()

    def _make_task(self, loop: Any, work: Any, **more: Any) -> asyncio.Task[Any]:
        task = asyncio.Task(work, loop=loop, **more)
        context = more.get("context")
        self._tasks[task] = OWNER.get() if context is None else _owner_of(context)
        return task

    # The network

    def listen(self, place: Place, factory: Callable[[], asyncio.BaseProtocol] | None = None) -> MemoryServer:
        """Accept there. Without a factory: let those who connect wait for a server at the same place."""
        others = self._places.setdefault(place, [])
        if factory is not None and any(item.factory is not None for item in others):
            raise OSError(98, f"{place} is in use")
        listening = _Listening(OWNER.get(), contextvars.copy_context(), factory)
        others.append(listening)
        if factory is not None:
            for other in others:
                for waiter in other.waiting:
                    if not waiter.done():
                        waiter.set_result(None)
                other.waiting.clear()
        return MemoryServer(self, place, listening)

    def stop_listening(self, place: Place, listening: _Listening) -> None:
        all_ = self._places.get(place, [])
        if listening in all_:
            all_.remove(listening)
            if not all_:
                del self._places[place]
        for waiter in listening.waiting:
            if not waiter.done():
                waiter.set_exception(ConnectionResetError(104, "Connection reset by peer"))

    def is_listening(self, place: Place) -> bool:
        return place in self._places

    async def create_connection(self, protocol_factory: Any, host: Any = None, port: Any = None, **more: Any) -> Any:
        return await self._connect(protocol_factory, int(port))

    async def create_unix_connection(self, protocol_factory: Any, path: Any = None, **more: Any) -> Any:
        if not os.path.exists(path):
            raise FileNotFoundError(2, f"no socket {path}")
        return await self._connect(protocol_factory, os.path.realpath(path))

    async def create_server(self, protocol_factory: Any, *more: Any, sock: Any = None, **options: Any) -> Any:
        """Of a wire server, whose listening socket stays open and hears of nobody."""
        address = sock.getsockname()
        place = os.path.realpath(address) if sock.family == socket.AF_UNIX else address[1]
        sock.close()
        return self.listen(place, protocol_factory)

    async def _connect(self, protocol_factory: Callable[[], asyncio.BaseProtocol], place: Place) -> Any:
        while True:
            result = self._places.get(place, [])
            accepting = next((item for item in result if item.factory is not None), None)
            if accepting is not None:
                break
            if not result:
                raise ConnectionRefusedError(111, f"Connect call failed {place}: connection refused")
            waiter = self.create_future()
            result[0].waiting.append(waiter)
            await waiter
        name = ("127.0.0.1", next(self._ports))
        mine = MemoryTransport(self, contextvars.copy_context(), name)
        theirs = MemoryTransport(self, accepting.context.copy(), name)
        mine.peer, theirs.peer = theirs, mine
        self.transports |= {mine, theirs}
        assert accepting.factory is not None
        theirs.begin(theirs._context.run(accepting.factory))
        protocol = protocol_factory()
        mine.begin(protocol)
        await asyncio.sleep(0)
        return mine, protocol


class MemoryLoop(MemoryNetwork, VirtualLoop):
    """In virtual time."""

    clock: LoopClock


class RealTimeLoop(MemoryNetwork):
    """In real time, and with real UNIX sockets: for programs that run in another thread."""

    clock = SystemClock()

    async def create_unix_connection(self, protocol_factory: Any, path: Any = None, **more: Any) -> Any:
        return await asyncio.SelectorEventLoop.create_unix_connection(self, protocol_factory, path, **more)

    async def create_server(self, protocol_factory: Any, *more: Any, sock: Any = None, **options: Any) -> Any:
        return await asyncio.SelectorEventLoop.create_server(self, protocol_factory, *more, sock=sock, **options)


def _owner_of(context: contextvars.Context | None) -> object:
    return context.get(OWNER, "test") if context is not None else "test"


async def settle(turns: int = 20) -> None:
    """Let everything that can go on now do so; no time passes."""
    for _ in range(turns):
        await asyncio.sleep(0)
