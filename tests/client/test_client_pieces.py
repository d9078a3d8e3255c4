# SPDX-License-Identifier: Apache-2.0
"""The parts of the client by themselves: addresses, waits, events and answers that come in pieces, shapes of events."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from client_servers import chunks
from hypothesis import given
from hypothesis import strategies as st

from headrace.client import Client
from headrace.client.http1 import ConnectionClosed, EventReader, Response, check_fields
from headrace.client.http_codec import decode_event, encode_generation
from headrace.client.inference import Input, build_inference
from headrace.client.retries import Deadline, Failure, Retry
from headrace.client.sockets import Address, run_blocking
from headrace.core.errors import DeadlineExceeded, Internal, InvalidArgument

FOREVER = Deadline(None, "a test")


@pytest.mark.parametrize(
    ("url", "shown"),
    [
        ("http://host", "http://host:80"),
        ("host", "http://host:8000"),
        ("host:9000", "http://host:9000"),
        ("https://host/behind/", "https://host:443/behind"),
        ("grpc://host", "grpc://host:8001"),
        ("grpcs://[::1]:5", "grpcs://[::1]:5"),
    ],
)
def test_addresses(url: str, shown: str) -> None:
    assert str(Address.parse(url)) == shown


@pytest.mark.parametrize(
    ("url", "text"),
    [
        ("", "names no host"),
        ("ftp://host", "'ftp' is not spoken"),
        ("http://", "names no host"),
        ("http://host:99999", "0 to 65535"),
        ("http://host:x", "0 to 65535"),
        ("http://user:secret@host", "token="),
        ("http://host?x=1", "no user"),
        ("grpc://host/path", "has no path"),
        ("http://ho st", "is not a server address"),
        ("http://host/\r\nx: y", "is not a server address"),
        ("http://hôst", "is not a server address"),
        (None, "is not a server address"),
    ],
)
def test_text_that_is_not_an_address(url: Any, text: str) -> None:
    with pytest.raises(InvalidArgument, match=text):
        Address.parse(url)


@pytest.mark.parametrize(
    "fields", [{"a b": "c"}, {"a": "b\r\nc: d"}, {"a": "\x00"}, {"": "b"}, {"a": "日本"}, {"a": 5}]
)
def test_headers_that_cannot_be_sent(fields: Any) -> None:
    with pytest.raises(InvalidArgument, match="HTTP cannot carry"):
        check_fields(fields)


@pytest.mark.parametrize("name", ["Host", "content-length", "Transfer-Encoding", "X-Request-Id"])
def test_headers_that_are_the_clients_own(name: str) -> None:
    with pytest.raises(InvalidArgument, match="written by the client itself"):
        check_fields({name: "x"})


@pytest.mark.parametrize(("name", "value"), [("a", "naïve"), ("a!", "b"), ("grpc-timeout", "1S"), ("a-bin", "x")])
def test_headers_that_grpc_cannot_carry(name: str, value: str) -> None:
    with pytest.raises(InvalidArgument, match="gRPC cannot carry"):
        Client("grpc://127.0.0.1:1", headers={name: value})


def test_waits_grow_and_are_spread() -> None:
    retry = Retry(first_seconds=1, most_seconds=5)
    assert [retry.wait_seconds(tried, None, 1.0) for tried in (1, 2, 3, 4, 99999)] == [1, 2, 4, 5, 5]
    assert [retry.wait_seconds(tried, None, 0.0) for tried in (1, 2, 3, 4)] == [0.5, 1, 2, 2.5]
    assert retry.wait_seconds(1, 7.0, 0.0) == 7.0
    assert retry.wait_seconds(1, 7.0, 1.0) == 7.5


@pytest.mark.parametrize("fate", Failure)
def test_what_is_sent_again(fate: Failure) -> None:
    safe = fate in (Failure.UNSENT, Failure.RETRY_LATER)
    lost = fate is Failure.LOST
    assert Retry().should_retry(fate, repeatable=False) is safe
    assert Retry().should_retry(fate, repeatable=True) is (safe or lost)
    assert Retry(lost_answers=True).should_retry(fate, repeatable=False) is (safe or lost)


def test_settings_that_make_no_sense() -> None:
    for wrong in ({"attempts": 0}, {"first_seconds": -1.0}, {"most_seconds": -1.0}):
        with pytest.raises(InvalidArgument, match="Retry"):
            Retry(**wrong)  # type: ignore[arg-type]


def test_a_deadline_passes() -> None:
    deadline = Deadline(1e-9, "model 'm'")
    with pytest.raises(DeadlineExceeded, match="model 'm': no answer within the timeout"):
        deadline.left()
    assert not deadline.covers(0)
    assert FOREVER.left() is None
    assert FOREVER.covers(1e9)
    assert Deadline(float("inf"), "").left() is None


@given(
    st.lists(st.binary(max_size=20).map(lambda data: data.replace(b"\r", b"").replace(b"\n", b"")), max_size=5),
    st.sampled_from([b"\n", b"\r\n"]),
    st.integers(1, 7),
)
def test_events_wherever_they_are_cut(events: list[bytes], end: bytes, size: int) -> None:
    text = b"".join(b": a comment" + end + b"data: " + event + end + end for event in events)
    reader, seen = EventReader(), []
    for start in range(0, len(text), size):
        reader.feed(text[start : start + size])
        while (data := reader.take()) is not None:
            seen.append(data)
    assert seen == events


def test_events_of_several_lines() -> None:
    reader = EventReader()
    reader.feed(b"event: x\ndata:one\ndata: two\nid: 7\n\ndata: three\n")
    assert reader.take() == b"one\ntwo"
    assert reader.take() is None


class Pieces:
    """A line that brings what a test cut."""

    def __init__(self, pieces: Sequence[bytes]) -> None:
        self._pieces = list(pieces)

    async def send(self, buffers: Any, deadline: Deadline) -> None:
        raise AssertionError

    async def receive(self, deadline: Deadline) -> bytes:
        return self._pieces.pop(0) if self._pieces else b""

    async def fill(self, view: memoryview, deadline: Deadline) -> int:
        data = b"".join(self._pieces)[: len(view)]
        view[: len(data)] = data
        return len(data)

    def is_stale(self) -> bool:
        return False

    def close(self) -> None:
        pass


async def whole(line: Pieces) -> tuple[int, bytes, bool]:
    answer = Response(line, FOREVER)
    head = await answer.head()
    return head.status, bytes(await answer.body()), answer.complete and head.keeps_alive


@given(st.binary(max_size=60), st.integers(1, 9), st.sampled_from(["length", "chunked", "end"]))
def test_answers_wherever_they_are_cut(body: bytes, size: int, form: str) -> None:
    head = b"HTTP/1.1 200 OK\r\n"
    if form == "length":
        text = head + b"Content-Length: %d\r\n\r\n" % len(body) + body
    elif form == "chunked":
        text = head + b"Transfer-Encoding: chunked\r\n\r\n"
        text += chunks([body[start : start + 5] for start in range(0, len(body), 5)])
    else:
        text = head + b"\r\n" + body
    cut = [text[start : start + size] for start in range(0, len(text), size)]
    assert run_blocking(whole(Pieces(cut))) == (200, body, form != "end")
    if form != "end":
        with pytest.raises(ConnectionClosed):
            run_blocking(whole(Pieces([text[:-1]])))


@pytest.mark.parametrize(
    ("values", "declared", "shape"),
    [
        (5, [1], (1,)),
        (5, [-1, 1], (1, 1)),
        ([1, 2], [2], (2,)),
        ([1, 2, 3, 4], [-1, 2], (2, 2)),
        ([1, 2, 3], [-1, -1], (1, 3)),
        ([1, 2, 3], [-1, -1, -1], (3,)),
        ([1, 2, 3], [-1, 2], (3,)),
        ([], [-1], (0,)),
        ([], [-1, 2], (0,)),
        (1, [], ()),
    ],
)
def test_shapes_of_events(values: Any, declared: list[int], shape: tuple[int, ...]) -> None:
    outputs = {"y": {"name": "y", "datatype": "INT32", "shape": declared}}
    result = decode_event({"y": values, "more": "said"}, outputs, build_inference("m", {}), "id")
    assert result["y"].shape == shape
    assert result["y"].ravel().tolist() == np.ravel(values).tolist()
    assert result.parameters == {"more": "said"}
    assert result.request_id == "id"


def test_types_missing_in_the_metadata_are_those_of_json() -> None:
    outputs = {name: {"name": name, "datatype": "", "shape": [-1]} for name in "abcd"}
    result = decode_event({"a": 1, "b": [0.5], "c": "t", "d": True}, outputs, build_inference("m", {}), "id")
    assert [tensor.dtype.name for tensor in result.tensors.values()] == ["INT64", "FP64", "BYTES", "BOOL"]


def test_events_that_do_not_fit_the_model() -> None:
    outputs = {"y": {"name": "y", "datatype": "INT32", "shape": [1]}}
    for wrong in ([], {"y": "text"}, {"y": [None]}):
        with pytest.raises(Internal, match="cannot be read"):
            decode_event(wrong, outputs, build_inference("m", {}), "id")


def test_inputs_of_a_stream_as_json() -> None:
    inputs = {
        "text": ["one"],
        "row": np.array([[1, 2]], np.int32),
        "rows": np.array([[1.5], [2.5]], np.float32),
        "half": Input(np.array([1.5], np.float32), dtype="BF16"),
        "truth": np.array([[True]]),
    }
    text = encode_generation(build_inference("m", inputs, request_id="7", parameters={"a": 1}))
    assert text == (
        b'{"id":"7","parameters":{"a":1},"text":"one","row":[1,2],"rows":[[1.5],[2.5]],"half":1.5,"truth":true}'
    )
