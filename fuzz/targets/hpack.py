# SPDX-License-Identifier: Apache-2.0
"""Target `hpack`: cached header blocks decode to what the `hpack` package returns, block after block."""

from __future__ import annotations

from hpack import Decoder, HPACKError

from fuzz.target import Check, Target, require
from headrace.core.limits import Limits
from headrace.net.http2.frames import Http2ConnectionError, StreamError
from headrace.net.http2.headers import HeaderReader

_LIMITS = Limits(header_bytes=8192)


def _open() -> Check:
    def check(data: bytes) -> None:
        ours, theirs = HeaderReader(_LIMITS), Decoder(max_header_list_size=_LIMITS.header_bytes)
        blocks, at = [], 0
        while at < len(data):
            blocks.append(data[at + 1 : at + 1 + data[at]])
            at += 1 + data[at]
        # Twice: the second time what is remembered answers.
        for block in (*blocks, *blocks):
            try:
                expected = [(bytes(name), bytes(value)) for name, value in theirs.decode(block, raw=True)]
            except (HPACKError, IndexError, ValueError):
                expected = None
            try:
                head = ours.request(block)
            except Http2ConnectionError:
                require(expected is None or len(expected) > _LIMITS.header_count, "refused what hpack reads")
                return  # the connection has ended
            except StreamError:
                require(expected is not None, "the stream is refused where the connection must be")
                continue
            require(expected is not None, "read what hpack refuses")
            pseudo = dict(expected or ())
            require((head.method, head.path) == (pseudo[b":method"], pseudo[b":path"]), "another method or path")
            fields = [field for field in expected or () if not field[0].startswith(b":") and field[0] != b"cookie"]
            fields_kept = [field for field in head.fields if field[0] != b"cookie"]
            require(fields_kept[: len(fields)] == fields, f"{fields_kept} of {fields}")

    return check


TARGET = Target(
    "header blocks of one connection: as the hpack package reads them, also from memory",
    _open,
    (
        b"\x82\x86\x84",
        b"\x41\x01a",
        b"\x40\x01x\x01y",
        b"\x3f\xe1\x1f",
        b"\x20",
        b"\xbe",
        b"\x10\x04cook\x00",
        b"\x83\x87",
    ),
    1024,
)
