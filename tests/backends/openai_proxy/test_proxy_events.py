# SPDX-License-Identifier: Apache-2.0
"""Server-Sent Events read in pieces of any size."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.backends.openai_proxy.client import EventReader
from headrace.core.errors import Unavailable

STREAM = (
    ': keep-alive\r\n\r\ndata: {"a": "ä🙂"}\n\ndata:first\ndata: second\r\n\r\nevent: error\rdata: x\r\r'
    "id: 7\nretry: 100\ndata: [DONE]\n\nerror: {}\n\n"
).encode()
EVENTS = [
    (b"", '{"a": "ä🙂"}'.encode()),
    (b"", b"first\nsecond"),
    (b"error", b"x"),
    (b"", b"[DONE]"),
    (b"error", b"{}"),
]


def read(pieces: list[bytes], most: int = 1000) -> list[tuple[bytes, bytes]]:
    reader = EventReader(most)
    return [event for piece in pieces for event in reader.feed(piece)] + reader.finish()


def test_whole_and_byte_by_byte() -> None:
    assert read([STREAM]) == EVENTS
    assert read([STREAM[at : at + 1] for at in range(len(STREAM))]) == EVENTS


@given(st.lists(st.integers(0, len(STREAM)), max_size=12))
def test_cut_anywhere(cuts: list[int]) -> None:
    edges = [0, *sorted(cuts), len(STREAM)]
    assert read([STREAM[left:right] for left, right in zip(edges, edges[1:], strict=False)]) == EVENTS


def test_an_event_without_its_empty_line_counts_at_the_end() -> None:
    assert read([b"data: 1\n\ndata: 2"]) == [(b"", b"1"), (b"", b"2")]
    assert read([b"event: only a name\n\n"]) == []


@pytest.mark.parametrize("piece", [b"x" * 40, b"data: 123\n", b": " + b"y" * 40])
def test_too_much_without_an_end_is_refused(piece: bytes) -> None:
    reader = EventReader(100)
    with pytest.raises(Unavailable, match="more than 100 bytes"):
        for _ in range(40):
            reader.feed(piece)


def test_many_small_events_are_not_one_large_event() -> None:
    reader = EventReader(100)
    assert sum(len(reader.feed(b"data: 12345678\n\n")) for _ in range(1000)) == 1000
    assert len(reader.feed(b"data: 1\n\n" * 1000)) == 1000
