# SPDX-License-Identifier: Apache-2.0
"""Frames of a WebSocket of `/predict/stream`: answered, or closed with a code that RFC 6455 has; never by our fault."""

from __future__ import annotations

from fuzz.line import Server
from fuzz.target import Check, Target, must

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
        must(length < 128, "a frame of the server's with a mask")
        size = {_SHORT: 2, _LONG: 8}.get(length, 0)
        if size:
            length = int.from_bytes(written[at : at + size], "big")
        at += size
        must(at + length <= len(written), "a torn frame")
        frames.append((first, written[at : at + length]))
        at += length
    return frames


def _open() -> Check:
    server = Server()

    def check(data: bytes) -> None:
        line = server.line()
        line.send(_HANDSHAKE)
        head, _, _ = line.written.partition(b"\r\n\r\n")
        must(head.startswith(b"HTTP/1.1 101"), f"no handshake: {head[:80]!r}")
        line.send(data)
        line.hang_up()
        server.check()
        for first, payload in _frames(line.written[len(head) + 4 :]):
            if first == _CLOSE and payload:
                must(int.from_bytes(payload[:2], "big") != _INTERNAL, f"closed by our fault: {payload!r}")

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
