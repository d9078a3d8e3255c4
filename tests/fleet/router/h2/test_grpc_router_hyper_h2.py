# SPDX-License-Identifier: Apache-2.0
"""The router between a client and a backend of the `h2` package, which raise at any breach of HTTP/2.

Everything is in one thread and chosen by a seed: windows, frame sizes, how bytes are cut, when sockets are full, and
whether calls are cancelled, refused or cut off. Whatever is chosen, each call ends, and with the right bytes.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from random import Random
from typing import Any

import h2.config
import h2.connection
import h2.errors
import h2.events
import h2.exceptions
import h2.settings
import pytest
import uvloop

from headrace.core.limits import Limits
from headrace.fleet.router.backends import Backends
from headrace.fleet.router.grpc.connections import GrpcConnection
from headrace.fleet.router.grpc.proxy import GrpcProxy
from headrace.fleet.router.settings import BackendAddress, GrpcProxySettings, RouterSettings
from headrace.net.http2.connection import Http2Connection
from headrace.net.negotiation import feed
from headrace.net.site import Site

Code = h2.settings.SettingCodes


class _Socket:
    """A transport that keeps what is written until the other side takes it."""

    def __init__(self) -> None:
        self.written = bytearray()
        self.ended = False

    def write(self, data: Any) -> None:
        self.written += data

    def writelines(self, buffers: list[Any]) -> None:
        for buffer in buffers:
            self.written += buffer

    def get_extra_info(self, name: str, default: Any = None) -> Any:
        return ("127.0.0.1", 1) if name == "peername" else default

    def get_write_buffer_size(self) -> int:
        return len(self.written)

    def can_write_eof(self) -> bool:
        return True

    def write_eof(self) -> None:
        self.ended = True

    def abort(self) -> None:
        self.ended = True

    close = abort


class _Side:
    """An `h2` connection, the connection of the router that it talks to, and the bytes between them."""

    def __init__(self, random: Random, protocol: Http2Connection, *, client: bool) -> None:
        self.random = random
        self.protocol = protocol
        self.socket = _Socket()
        self.full = False
        self.h2 = h2.connection.H2Connection(h2.config.H2Configuration(client_side=client, header_encoding="utf-8"))
        self.h2.initiate_connection()
        self.h2.update_settings(_settings(random))
        protocol.connection_made(self.socket)  # type: ignore[arg-type]

    def exchange(self, see: Callable[[Any], None]) -> bool:
        """Carry some bytes both ways; whether there were any."""
        data = self.h2.data_to_send()
        moved = bool(data)
        while data:
            size = self.random.choice((9, 100, 5000, len(data)))
            feed(self.protocol, data[:size])
            data = data[size:]
        if self.random.random() < 0.1 and not self.full:
            self.full = True
            self.protocol.pause_writing()
        elif self.full:
            self.full = False
            self.protocol.resume_writing()
        size = self.random.choice((50, 3000, 1 << 20))
        taken = bytes(self.socket.written[:size])
        del self.socket.written[:size]
        if taken:
            for event in self.h2.receive_data(taken):
                see(event)
        return moved or bool(taken)


def _settings(random: Random) -> dict[Any, int]:
    return {
        Code.INITIAL_WINDOW_SIZE: random.choice((200, 5000, 65_535, 1_000_000)),
        Code.MAX_FRAME_SIZE: random.choice((16_384, 100_000)),
        Code.HEADER_TABLE_SIZE: random.choice((0, 4096)),
        Code.MAX_CONCURRENT_STREAMS: random.choice((1, 3, 100)),
    }


class _RoutedCalls:
    """A client with calls, a router, and a backend that sends every request's bytes back."""

    def __init__(self, seed: int, *, faulty: bool) -> None:
        self.random = Random(seed)
        self.faulty = faulty
        # A backend cannot be waited for here, so that one connection has to do.
        address = BackendAddress.parse("http://127.0.0.1:1")
        settings = RouterSettings((address,))
        grpc = GrpcProxySettings(
            connections=1, stream_window_bytes=65_535, replay_bytes=self.random.choice((10, 10**6))
        )
        self.backends = Backends(settings)
        self.proxy = GrpcProxy(self.backends, settings, grpc)
        self.site = Site(services=self.proxy.services, limits=Limits(stream_window_bytes=65_535))
        pool = self.proxy.pools[self.backends.all[0]]
        upstream = GrpcConnection(self.proxy.site, pool)
        self.back = _Side(self.random, upstream, client=False)
        self.front = _Side(self.random, Http2Connection(self.site), client=True)
        pool._ready.append(upstream)
        self.sent: dict[int, bytes] = {}
        self.unsent: dict[int, bytes] = {}
        self.got: dict[int, bytes] = {}
        self.ended: dict[int, str] = {}
        self.requests: dict[int, bytearray] = {}
        self.answers: dict[int, bytes] = {}

    async def settle(self) -> None:
        """Let both sides know each other's settings."""
        for _ in range(50):
            self.front.exchange(self.see_answer)
            self.back.exchange(self.see_request)
            await asyncio.sleep(0)

    # The client.

    def ask(self) -> None:
        connection = self.front.h2
        number = connection.get_next_available_stream_id()
        fields = [(":method", "POST"), (":path", "/a/b"), (":scheme", "http"), (":authority", "x"), ("te", "trailers")]
        fields += [("content-type", "application/grpc"), ("x-own", str(number % 3))]
        connection.send_headers(number, fields)
        self.sent[number] = self.unsent[number] = self.random.randbytes(self.random.choice((0, 5, 70, 3000, 40_000)))
        self.got[number] = b""

    def push(self) -> None:
        """Send what the windows allow of each request; now and then give one up."""
        connection = self.front.h2
        for number, rest in list(self.unsent.items()):
            if number in self.ended:
                del self.unsent[number]
                continue
            if self.faulty and self.random.random() < 0.02:
                connection.reset_stream(number, h2.errors.ErrorCodes.CANCEL)
                self.ended[number] = "cancelled"
                del self.unsent[number]
                continue
            room = min(connection.local_flow_control_window(number), connection.max_outbound_frame_size)
            size = min(len(rest), room, self.random.choice((30, 1000, 1 << 20)))
            padding = self.random.choice((None, None, 3)) if room > size + 4 else None
            if size or not rest:
                connection.send_data(number, rest[:size], end_stream=size == len(rest), pad_length=padding)
                self.unsent[number] = rest[size:]
                if size == len(rest):
                    del self.unsent[number]

    def see_answer(self, event: Any) -> None:
        number = getattr(event, "stream_id", 0)
        if isinstance(event, h2.events.DataReceived):
            self.got[number] += event.data
            self.front.h2.acknowledge_received_data(event.flow_controlled_length, number)
        elif isinstance(event, h2.events.TrailersReceived | h2.events.ResponseReceived):
            if "grpc-status" in dict(event.headers):
                self.ended[number] = dict(event.headers)["grpc-status"]
        elif isinstance(event, h2.events.StreamReset) and event.remote_reset:
            self.ended.setdefault(number, "reset")

    # The backend.

    def see_request(self, event: Any) -> None:
        connection = self.back.h2
        number = getattr(event, "stream_id", 0)
        if isinstance(event, h2.events.RequestReceived):
            self.requests[number] = bytearray()
            if self.faulty and self.random.random() < 0.1:
                with contextlib.suppress(h2.exceptions.StreamClosedError):
                    connection.reset_stream(number, self.random.choice((7, 7, 8, 2)))
                del self.requests[number]
        elif isinstance(event, h2.events.DataReceived):
            connection.acknowledge_received_data(event.flow_controlled_length, number)
            if number in self.requests:
                self.requests[number] += event.data
        elif isinstance(event, h2.events.StreamEnded) and number in self.requests:
            connection.send_headers(number, [(":status", "200"), ("content-type", "application/grpc")])
            self.answers[number] = bytes(self.requests.pop(number))
        elif isinstance(event, h2.events.StreamReset):
            self.requests.pop(number, None)
            self.answers.pop(number, None)

    def answer(self) -> None:
        connection = self.back.h2
        for number, rest in list(self.answers.items()):
            room = min(connection.local_flow_control_window(number), connection.max_outbound_frame_size)
            size = min(len(rest), room, self.random.choice((30, 1000, 1 << 20)))
            if size:
                connection.send_data(number, rest[:size])
            self.answers[number] = rest[size:]
            if size == len(rest):
                connection.send_headers(number, [("grpc-status", "0"), ("x-last", str(number % 5))], end_stream=True)
                del self.answers[number]

    async def run(self, calls: int) -> None:
        await self.settle()
        idle = rounds = 0
        while idle < 50:
            rounds += 1
            assert rounds < 20_000, "it stands still"
            if calls and len(self.sent) - len(self.ended) < 8 and self.random.random() < 0.3:
                calls -= 1
                self.ask()
            self.push()
            moved = self.front.exchange(self.see_answer)
            moved |= self.back.exchange(self.see_request)
            self.answer()
            await asyncio.sleep(0)
            idle = 0 if moved or calls or self.unsent or self.answers else idle + 1


@pytest.mark.parametrize("seed", range(12))
def test_every_byte_arrives(seed: int) -> None:
    async def main() -> None:
        routed_calls = _RoutedCalls(seed, faulty=False)
        await routed_calls.run(12)
        assert routed_calls.got == routed_calls.sent
        assert set(routed_calls.ended.values()) == {"0"}
        assert routed_calls.backends.all[0].outstanding == 0
        assert not routed_calls.front.protocol.streams
        assert not routed_calls.back.protocol.streams
        assert routed_calls.back.protocol.load == 0  # type: ignore[attr-defined]

    uvloop.run(main())


@pytest.mark.parametrize("seed", range(12))
def test_every_call_ends_whatever_is_reset(seed: int) -> None:
    async def main() -> None:
        routed_calls = _RoutedCalls(seed, faulty=True)
        await routed_calls.run(30)
        assert set(routed_calls.ended) == set(routed_calls.sent)
        right = [number for number, status in routed_calls.ended.items() if status == "0"]
        assert all(routed_calls.got[number] == routed_calls.sent[number] for number in right)
        assert right
        assert routed_calls.backends.all[0].outstanding == 0
        assert not routed_calls.front.protocol.streams
        assert routed_calls.back.protocol.load == 0  # type: ignore[attr-defined]

    uvloop.run(main())


@pytest.mark.parametrize("seed", range(40))
def test_garbage_from_a_backend_ends_its_calls_and_nothing_else(seed: int) -> None:
    """Right frames with some bytes wrong, in any place: the connection lives or dies, and the client hears of it."""

    async def main() -> None:
        routed_calls = _RoutedCalls(seed, faulty=False)
        random = routed_calls.random
        await routed_calls.settle()
        for _ in range(5):
            routed_calls.ask()
        for _ in range(30):
            routed_calls.push()
            routed_calls.front.exchange(routed_calls.see_answer)
            routed_calls.back.exchange(routed_calls.see_request)
            routed_calls.answer()
            await asyncio.sleep(0)
        data = bytearray(routed_calls.back.h2.data_to_send())
        for number in (1, 3, 5):
            data += bytes([0, 0, random.randrange(20), random.randrange(11), random.randrange(256), 0, 0, 0, number])
            data += random.randbytes(20)
        for _ in range(random.randrange(4)):
            data[random.randrange(len(data))] = random.randrange(256)
        feed(routed_calls.back.protocol, bytes(data))
        await asyncio.sleep(0)
        routed_calls.back.protocol.connection_lost(None)
        for _ in range(20_000):
            if not routed_calls.front.exchange(routed_calls.see_answer) and set(routed_calls.ended) == set(
                routed_calls.sent
            ):
                break
            await asyncio.sleep(0)
        assert set(routed_calls.ended) == set(routed_calls.sent)
        assert routed_calls.backends.all[0].outstanding == 0

    uvloop.run(main())
