# SPDX-License-Identifier: Apache-2.0
"""Target `websocket`: frames on `/predict/stream` get a response, or a close code of RFC 6455; never an internal error."""

from __future__ import annotations

from fuzz.in_memory_server import Server
from fuzz.target import Check, Target, require

_HANDSHAKE = (
    b"GET /predict/four/stream HTTP/1.1\r\nhost: fuzz\r\nupgrade: websocket\r\nconnection: upgrade\r\n"
    b"sec-websocket-version: 13\r\nsec-websocket-key: AAAAAAAAAAAAAAAAAAAAAA==\r\n\r\n"
)
_CLOSE, _INTERNAL = 0x88, 1011
_SHORT, _LONG = 126, 127


def _frames(written: bytes) -> list[tuple[int, bytes]]:
    frames, at = [], 0
    while at < len(written):
        first, length = written[at], written[at + 1]
        at += 2
        require(length < 128, "a frame of the server's with a mask")
        size = {_SHORT: 2, _LONG: 8}.get(length, 0)
        if size:
            length = int.from_bytes(written[at : at + size], "big")
        at += size
        require(at + length <= len(written), "a torn frame")
        frames.append((first, written[at : at + length]))
        at += length
    return frames


def _open() -> Check:
    server = Server()

    def check(data: bytes) -> None:
        connection = server.connect()
        connection.send(_HANDSHAKE)
        head, _, _ = connection.written.partition(b"\r\n\r\n")
        require(head.startswith(b"HTTP/1.1 101"), f"no handshake: {head[:80]!r}")
        connection.send(data)
        connection.hang_up()
        server.check()
        for first, payload in _frames(connection.written[len(head) + 4 :]):
            if first == _CLOSE and payload:
                require(int.from_bytes(payload[:2], "big") != _INTERNAL, f"closed by our fault: {payload!r}")

    return check


def masked(first: int, payload: bytes) -> bytes:
    """A frame of a client's, with a mask of zeros."""
    size = bytes([128 + len(payload)]) if len(payload) < _SHORT else b"\xfe" + len(payload).to_bytes(2, "big")
    return bytes([first]) + size + bytes(4) + payload


TARGET = Target(
    "frames of a WebSocket: answered or closed, never with 1011",
    _open,
    (
        masked(0x81, b'{"inputs": [1, 2, 3, 4]}'),
        masked(0x82, bytes(16)),
        masked(0x89, b"ping"),
        masked(0x88, b"\x03\xe8"),
        masked(0x01, b"{"),
        masked(0x80, b"}"),
        b"\xc1",
        b'"inputs"',
        b'"data"',
    ),
)
