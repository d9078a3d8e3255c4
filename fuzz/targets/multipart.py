# SPDX-License-Identifier: Apache-2.0
"""Target `multipart`: multipart/form-data bodies have the same parts at once and byte by byte, or are refused."""

from __future__ import annotations

from fuzz.target import Check, Target, require
from headrace.core.errors import HeadraceError
from headrace.net.http.multipart import MultipartReader, PartHead, PartSink, read_form

_TYPE = b"multipart/form-data; boundary=b"


def _open() -> Check:
    def check(data: bytes) -> None:
        whole = _read(data, len(data) or 1)
        require(whole == _read(data, 1), "byte by byte it means something else")
        try:
            read_form(data[:200], b"")
        except HeadraceError as error:
            require(bool(str(error)), "a refusal without a word")

    return check


def _read(data: bytes, size: int) -> list[tuple[PartHead, bytes]] | str:
    parts: list[tuple[PartHead, list[bytes]]] = []

    def open_part(head: PartHead) -> PartSink:
        parts.append((head, []))
        return parts[-1][1].append

    reader = MultipartReader(_TYPE, open_part)
    try:
        for start in range(0, len(data), size):
            reader.feed(data[start : start + size])
        reader.finish()
    except HeadraceError as error:
        return str(error)
    return [(head, b"".join(pieces)) for head, pieces in parts]


TARGET = Target(
    "multipart/form-data: refused, or the same parts whole and byte by byte",
    _open,
    (
        b"--b\r\n",
        b"--b--",
        b"\r\n\r\n",
        b"Content-Disposition: form-data; ",
        b'name="x"',
        b'filename="y.jsonl"',
        b"Content-Type: application/json\r\n",
        b"Content-Transfer-Encoding: base64\r\n",
        b"multipart/form-data; boundary=",
        b"\\",
    ),
)
