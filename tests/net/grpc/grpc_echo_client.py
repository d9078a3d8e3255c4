# SPDX-License-Identifier: Apache-2.0
"""What the gRPC tests share: calls of `test.Echo` by grpcio, a raw HTTP/2 client for what grpcio would not send."""

from __future__ import annotations

import socket
import struct
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import grpc
import h2.config
import h2.connection
import h2.events
import h2.settings

from support.serving import Serving

SECONDS = 30
"""How long anything may take before a test gives up. Nothing is decided by how much of it was used."""

_SIZES = (("grpc.max_send_message_length", -1), ("grpc.max_receive_message_length", -1))


def options(*more: tuple[str, Any]) -> list[tuple[str, Any]]:
    """Options for a channel of its own (grpcio shares sockets between equal channels), with messages of any size."""
    return [*_SIZES, ("grpc.use_local_subchannel_pool", 1), *more]


@contextmanager
def channel_to(server: Serving, *more: tuple[str, Any], **named: Any) -> Iterator[grpc.Channel]:
    with grpc.insecure_channel(f"127.0.0.1:{server.port}", options(*more), **named) as channel:
        yield channel


def aio_channel(server: Serving, *more: tuple[str, Any]) -> grpc.aio.Channel:
    return grpc.aio.insecure_channel(f"127.0.0.1:{server.port}", options(*more))


def unary(channel: Any, method: str = "Unary") -> Any:
    return channel.unary_unary(f"/test.Echo/{method}")


def collect(channel: Any, method: str = "Collect") -> Any:
    return channel.stream_unary(f"/test.Echo/{method}")


def expand(channel: Any, method: str = "Expand") -> Any:
    return channel.unary_stream(f"/test.Echo/{method}")


def chat(channel: Any, method: str = "Chat") -> Any:
    return channel.stream_stream(f"/test.Echo/{method}")


def wait_until_still(value: Callable[[], Any], seconds: float = 0.5) -> Any:
    """What a value is when it has stopped changing."""
    last, since = value(), time.monotonic()
    deadline = since + 3 * SECONDS
    while time.monotonic() - since < seconds:
        assert time.monotonic() < deadline, "it never stood still"
        time.sleep(0.02)
        now = value()
        if now != last:
            last, since = now, time.monotonic()
    return last


def open_streams(server: Serving) -> list[Any]:
    """Every open HTTP/2 stream of a server."""
    return list(server.call(lambda: [s for c in server.site.connections for s in getattr(c, "streams", {}).values()]))


def prefixed(message: bytes, flag: int = 0) -> bytes:
    return struct.pack(">BI", flag, len(message)) + message


class RawCall:
    """One gRPC call, byte by byte, over an HTTP/2 connection of its own."""

    def __init__(self, server: Serving, method: str, *fields: tuple[str, str], verb: str = "POST") -> None:
        self._socket = socket.create_connection(("127.0.0.1", server.port), timeout=SECONDS)
        self._h2 = h2.connection.H2Connection(h2.config.H2Configuration(header_encoding="utf-8"))
        self._h2.initiate_connection()
        self.stream = self._h2.get_next_available_stream_id()
        self.data = b""
        self.headers: dict[str, str] = {}
        self.trailers: dict[str, str] = {}
        self.reset: int | None = None
        self.ended = False
        own = {name for name, _ in fields}
        given = [("content-type", "application/grpc"), ("te", "trailers")]
        self._h2.send_headers(
            self.stream,
            [
                (":method", verb),
                (":scheme", "http"),
                (":path", f"/test.Echo/{method}"),
                (":authority", "test"),
                *[field for field in given if field[0] not in own],
                *fields,
            ],
        )
        self._flush()

    def send(self, data: bytes, *, end: bool = False) -> None:
        """Send in frames as large as the server takes, waiting for room as a client must."""
        while len(data) > (room := self._send_window()):
            if room:
                self._h2.send_data(self.stream, data[:room])
                data = data[room:]
                self._flush()
            else:
                self.receive(until=lambda: self._h2.local_flow_control_window(self.stream) > 0)
        self._h2.send_data(self.stream, data, end_stream=end)
        self._flush()

    def cancel(self) -> None:
        self._h2.reset_stream(self.stream, 8)
        self._flush()

    def receive(self, *, until: Callable[[], bool] | None = None, take: bool = True) -> RawCall:
        """Read until the stream ends, or `until` says so. Without `take`, no window is given back."""
        while not (until() if until is not None else self.ended):
            received = self._socket.recv(65536)
            if not received:
                raise ConnectionError("the server closed the connection")
            for event in self._h2.receive_data(received):
                self._see(event, take)
            self._flush()
        return self

    def widen(self, connection: int) -> None:
        """Give the server room on the connection, but none on the stream."""
        self._h2.increment_flow_control_window(connection)
        self._flush()

    def settle(self, window: int) -> list[str]:
        """Change the streams' initial window; the order in which its acknowledgement and more DATA come."""
        self._h2.update_settings({h2.settings.SettingCodes.INITIAL_WINDOW_SIZE: window})
        self._flush()
        order: list[str] = []
        received = b""
        while "acknowledged" not in order or "data" not in order:
            received += self._socket.recv(65536)
            while len(received) >= 9 and len(received) >= 9 + (size := int.from_bytes(received[:3], "big")):
                if received[3] == 0:
                    order.append("data")
                elif received[3] == 4 and received[4] & 1:
                    order.append("acknowledged")
                received = received[9 + size :]
        return order

    @property
    def status(self) -> grpc.StatusCode:
        code = int({**self.headers, **self.trailers}["grpc-status"])
        return next(known for known in grpc.StatusCode if known.value[0] == code)

    @property
    def message(self) -> str:
        return {**self.headers, **self.trailers}.get("grpc-message", "")

    def close(self) -> None:
        self._socket.close()

    def __enter__(self) -> RawCall:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _see(self, event: Any, take: bool) -> None:
        if isinstance(event, h2.events.ResponseReceived):
            self.headers = dict(event.headers)
        elif isinstance(event, h2.events.TrailersReceived):
            self.trailers = dict(event.headers)
        elif isinstance(event, h2.events.DataReceived):
            self.data += event.data
            if take:
                self._h2.acknowledge_received_data(event.flow_controlled_length, event.stream_id)
        elif isinstance(event, h2.events.StreamEnded):
            self.ended = True
        elif isinstance(event, h2.events.StreamReset):
            self.reset = event.error_code
            self.ended = True

    def _send_window(self) -> int:
        return min(self._h2.local_flow_control_window(self.stream), self._h2.max_outbound_frame_size)

    def _flush(self) -> None:
        data = self._h2.data_to_send()
        if data:
            self._socket.sendall(data)


def messages_of(data: bytes) -> list[bytes]:
    """Uncompressed messages, cut out of a body."""
    results = []
    while data:
        flag, size = struct.unpack_from(">BI", data)
        assert flag == 0
        results.append(data[5 : 5 + size])
        data = data[5 + size :]
    return results


def raised(call: Callable[[], Any]) -> grpc.RpcError:
    """The error a call ends with."""
    try:
        result = call()
        if isinstance(result, Iterable) and not isinstance(result, bytes):
            list(result)
    except grpc.RpcError as error:
        return error
    raise AssertionError("the call succeeded")
