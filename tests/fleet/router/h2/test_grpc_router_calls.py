# SPDX-License-Identifier: Apache-2.0
"""gRPC calls through the router as grpcio sees them: each kind of call, metadata, errors, deadlines, cancellation."""

from __future__ import annotations

import socket
from typing import Any

import grpc
import h2.config
import h2.connection
import h2.events
import pytest
from grpc_router import SECONDS, Routing, channel_to, raised, routing, unary

from support.serving import EchoCalls
from support.waiting import eventually

_FORGED = (("x-forwarded-for", "10.0.0.1"), ("x-forwarded-proto", "https"), ("x-real-ip", "10.0.0.9"))
_BIG = bytes(range(256)) * (8 * 1024 * 4)  # 8 MiB


def test_unary_calls_take_turns(router: Routing, channel: grpc.Channel) -> None:
    before = [router.backend(number).stats.ok for number in (0, 1)]
    for number in range(20):
        assert unary(channel)(b"%d" % number, timeout=SECONDS) == b"%d" % number
    # One client connection, and yet each backend had half.
    assert [router.backend(number).stats.ok - before[number] for number in (0, 1)] == [10, 10]
    assert [router.backend(number).outstanding for number in (0, 1)] == [0, 0]


def test_an_empty_message(channel: grpc.Channel) -> None:
    assert unary(channel)(b"", timeout=SECONDS) == b""


def test_large_messages_both_ways(channel: grpc.Channel) -> None:
    for _ in range(2):
        assert unary(channel)(_BIG, timeout=SECONDS) == _BIG


def test_client_stream(channel: grpc.Channel) -> None:
    collect = channel.stream_unary("/test.Echo/Collect")
    assert collect(iter([b"a", b"b", b"c"]), timeout=SECONDS) == b"a,b,c"


def test_server_stream(channel: grpc.Channel) -> None:
    expand = channel.unary_stream("/test.Echo/Expand")
    answers = list(expand(b"300 5000", timeout=SECONDS))
    assert [int.from_bytes(answer[:4], "big") for answer in answers] == list(range(300))
    assert {len(answer) for answer in answers} == {5004}


def test_a_conversation_turn_by_turn(channel: grpc.Channel) -> None:
    outputs: list[bytes] = [b"first"]

    def questions() -> Any:
        for number in range(10):
            eventually(lambda number=number: len(outputs) > number)
            yield b"q%d" % number

    for answer in channel.stream_stream("/test.Echo/Chat")(questions(), timeout=SECONDS):
        outputs.append(answer)
    assert outputs[1:] == [b"q%d" % number for number in range(10)]


def test_metadata_in_both_directions(router: Routing, channel: grpc.Channel) -> None:
    given = (("x-own", "value"), ("x-own", "again"), ("x-raw-bin", b"\x00\x01\xff"))
    answer, call = unary(channel, "Metadata").with_call(b"m", metadata=given, timeout=SECONDS)
    assert answer == b"m"
    initial = [(key, value) for key, value in call.initial_metadata() if key.startswith("x-")]
    assert [pair for pair in initial if not pair[0].startswith("x-forwarded")] == [*given, ("x-first", "initial")]
    assert {key: value for key, value in initial if key.startswith("x-forwarded")} == {
        "x-forwarded-for": "127.0.0.1",
        "x-forwarded-proto": "http",
        "x-forwarded-host": f"127.0.0.1:{router.port}",
    }
    assert dict(call.trailing_metadata()) == {"x-last": "trailing", "x-last-bin": b"\x00\xff"}


def test_forwarding_of_clients_is_dropped_unless_they_are_trusted(router: Routing, channel: grpc.Channel) -> None:
    _, call = unary(channel, "Metadata").with_call(b"m", metadata=_FORGED, timeout=SECONDS)
    results = dict(call.initial_metadata())
    assert results["x-forwarded-for"] == "127.0.0.1"
    # A client is not believed unless the router is told to.
    assert results["x-forwarded-proto"] == "http"
    assert not {"x-real-ip", "x_real_ip"} & set(results)
    with routing(*(backend.address.port for backend in router.proxy.backends.all), trust_forwarded=True) as trusting:
        with channel_to(trusting) as inner:
            _, call = unary(inner, "Metadata").with_call(b"m", metadata=_FORGED, timeout=SECONDS)
    results = dict(call.initial_metadata())
    assert (results["x-forwarded-proto"], results["x-real-ip"]) == ("https", "10.0.0.9")


def test_a_circle_of_routers_is_broken(channel: grpc.Channel) -> None:
    passed = ("via", ", ".join(["2 headrace-router"] * 7))
    assert unary(channel)(b"x", metadata=(passed,), timeout=SECONDS) == b"x"
    error = raised(lambda: unary(channel)(b"x", metadata=(passed, passed), timeout=SECONDS))
    assert error.code() is grpc.StatusCode.FAILED_PRECONDITION
    assert "loop" in error.details()


def test_requests_that_are_not_grpc_reach_the_routes(router: Routing) -> None:
    statuses: list[str] = []
    with socket.create_connection(("127.0.0.1", router.port), timeout=SECONDS) as sock:
        client = h2.connection.H2Connection(h2.config.H2Configuration(header_encoding="utf-8"))
        client.initiate_connection()
        for stream in (1, 3, 5):
            fields = {":method": "GET", ":path": "/test.Echo/Unary", ":scheme": "http", ":authority": "router"}
            client.send_headers(stream, list(fields.items()), end_stream=True)
            sock.sendall(client.data_to_send())
            while len(statuses) <= stream // 2:
                for event in client.receive_data(sock.recv(65536)):
                    if isinstance(event, h2.events.ResponseReceived):
                        statuses.append(dict(event.headers)[":status"])
    assert statuses == ["404"] * 3


def test_errors_keep_their_status_text_and_details(channel: grpc.Channel) -> None:
    error = raised(lambda: unary(channel, "Refuse")(b"", timeout=SECONDS))
    assert error.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert error.details() == "not like that: 100% wrong, naïve"
    error = raised(lambda: unary(channel, "Details")(b"\x01\x02packed", timeout=SECONDS))
    assert error.code() is grpc.StatusCode.FAILED_PRECONDITION
    assert dict(error.trailing_metadata())["grpc-status-details-bin"] == b"\x01\x02packed"
    error = raised(lambda: unary(channel, "Nothing")(b"", timeout=SECONDS))
    assert error.code() is grpc.StatusCode.UNIMPLEMENTED


def test_compressed_messages_pass_unopened(channel: grpc.Channel) -> None:
    text = b"again and again " * 1000
    assert unary(channel)(text, compression=grpc.Compression.Gzip, timeout=SECONDS) == text


@pytest.mark.parametrize("stream", [False, True])
def test_a_cancel_reaches_the_backend(
    router: Routing, channel: grpc.Channel, echoes: list[EchoCalls], stream: bool
) -> None:
    future = unary(channel, "Hold").future(b"", timeout=SECONDS)
    eventually(lambda: any(calls.held for calls in echoes))
    if stream:
        channel.close()
    else:
        future.cancel()
    eventually(lambda: [calls.events for calls in echoes if calls.events] == [["cancel"]])
    assert future.cancelled() or future.code() is grpc.StatusCode.CANCELLED
    eventually(lambda: sum(router.backend(number).outstanding for number in (0, 1)) == 0)


def test_a_deadline_ends_the_call_on_both_sides(channel: grpc.Channel, echoes: list[EchoCalls]) -> None:
    for seconds in (0.3, 3.0, 15.0):  # on a busy machine it may not even get there in the first
        error = raised(lambda seconds=seconds: unary(channel, "Hold")(b"", timeout=seconds))
        assert error.code() is grpc.StatusCode.DEADLINE_EXCEEDED
        if any(calls.held for calls in echoes):
            break
    eventually(lambda: any(calls.events == ["cancel"] for calls in echoes))


def test_many_concurrent_calls_over_one_connection(router: Routing) -> None:
    with channel_to(router) as channel:
        futures = [unary(channel).future(b"%d" % number * 50, timeout=30) for number in range(2000)]
        assert [future.result() for future in futures] == [b"%d" % number * 50 for number in range(2000)]


def test_calls_that_are_reset_immediately_never_reach_a_backend(
    router: Routing, channel: grpc.Channel, echoes: list[EchoCalls]
) -> None:
    """A client that opens and resets as fast as it can (CVE-2023-44487) must not make the router do it to others."""
    client = h2.connection.H2Connection(h2.config.H2Configuration(header_encoding="utf-8"))
    client.initiate_connection()
    fields = [(":method", "POST"), (":path", "/test.Echo/Hold"), (":scheme", "http"), (":authority", "router")]
    fields += [("content-type", "application/grpc"), ("te", "trailers")]
    for stream in range(1, 101, 2):
        client.send_headers(stream, fields)
        client.send_data(stream, b"\0\0\0\0\0")
        client.reset_stream(stream, 8)
    before = [calls.held[:] for calls in echoes]
    requests = sum(router.backend(number).stats.cancelled for number in (0, 1))
    with socket.create_connection(("127.0.0.1", router.port), timeout=SECONDS) as sock:
        sock.sendall(client.data_to_send())
        eventually(lambda: sum(router.backend(number).stats.cancelled for number in (0, 1)) == requests + 50)
    assert [unary(channel)(b"x", timeout=SECONDS) for _ in range(4)] == [b"x"] * 4
    assert [calls.held for calls in echoes] == before
    assert [calls.events for calls in echoes] == [[], []]
    assert [router.backend(number).outstanding for number in (0, 1)] == [0, 0]
