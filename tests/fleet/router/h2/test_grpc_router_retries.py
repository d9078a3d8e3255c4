# SPDX-License-Identifier: Apache-2.0
"""What is tried again, and what never is: refused streams, streams above a GOAWAY, backends that cannot be reached."""

from __future__ import annotations

import time
from collections.abc import Iterator

import grpc
import pytest
from grpc_router import SECONDS, channel_to, raised, routing, unary
from scripted_grpc_backend import Peer, ScriptedGrpcBackend, scripted_grpc_backend

from headrace.fleet.router.settings import GrpcProxySettings, RetrySettings, TimeoutSettings
from headrace.net.http2 import frames
from headrace.net.http2.frames import ErrorCode
from support.ports import free_port
from support.serving import Serving, echo_site, serving
from support.waiting import eventually

_UNAVAILABLE = grpc.StatusCode.UNAVAILABLE


@pytest.fixture(scope="module")
def echo() -> Iterator[Serving]:
    with serving(echo_site()) as running:
        yield running


def _refuse(peer: Peer, backend: ScriptedGrpcBackend) -> None:
    peer.greet()
    while True:
        stream = peer.request()
        backend.said.append(peer.bodies[stream])
        peer.send(frames.reset_frame(stream, ErrorCode.REFUSED_STREAM))


def _leave(peer: Peer, backend: ScriptedGrpcBackend) -> None:
    """Answer the first request of a connection, and go away without looking at the next."""
    peer.greet()
    first = peer.request()
    peer.answer(first)
    second = peer.request()
    backend.said.append(peer.bodies[second])
    peer.send(frames.goaway_frame(first, ErrorCode.NO_ERROR))
    peer.rest()


def test_a_refused_stream_is_sent_to_another_backend(echo: Serving) -> None:
    with (
        scripted_grpc_backend(_refuse) as backend,
        routing(backend.port, echo.port) as router,
        channel_to(router) as channel,
    ):
        for number in range(6):
            assert unary(channel)(b"message %d" % number, timeout=SECONDS) == b"message %d" % number
        assert len(backend.said) >= 2
        assert router.backend(1).stats.retries == len(backend.said)
        assert router.backend(0).stats.refused == len(backend.said)
        assert router.backend(0).outstanding == router.backend(1).outstanding == 0


def test_refused_by_all_is_unavailable() -> None:
    with scripted_grpc_backend(_refuse) as backend, routing(backend.port) as router, channel_to(router) as channel:
        error = raised(lambda: unary(channel)(b"x", timeout=SECONDS))
        assert error.code() is _UNAVAILABLE
        assert "takes no more calls" in error.details()
        assert len(backend.said) == 3  # `tries`


def test_retries_stop_when_the_budget_is_spent() -> None:
    retries = RetrySettings(budget=0.0, reserve=1)
    with (
        scripted_grpc_backend(_refuse) as backend,
        routing(backend.port, retries=retries) as router,
        channel_to(router) as channel,
    ):
        for asked in (2, 3, 4):  # the first call twice, and each later one once
            error = raised(lambda: unary(channel)(b"x", timeout=SECONDS))
            assert error.code() is _UNAVAILABLE and "try again later" in error.details()
            assert len(backend.said) == asked
        assert router.proxy.budget.refused == 3


def test_a_stream_above_goaway_is_sent_again_whole() -> None:
    with scripted_grpc_backend(_leave) as backend, routing(backend.port) as router, channel_to(router) as channel:
        assert unary(channel)(b"one", timeout=SECONDS) == b"reply"
        # Refused by the first connection, answered by a second one.
        assert unary(channel)(b"two", timeout=SECONDS) == b"reply"
        assert backend.said == [b"\0\0\0\0\3two"]
        assert backend.connections == 2


def test_a_request_that_was_not_kept_is_not_sent_again() -> None:
    settings = GrpcProxySettings(replay_bytes=1000)
    with scripted_grpc_backend(_refuse) as backend, routing(backend.port, grpc_settings=settings) as router:
        with channel_to(router) as channel:
            assert raised(lambda: unary(channel)(bytes(1001), timeout=SECONDS)).code() is _UNAVAILABLE
            assert len(backend.said) == 1


def test_a_lost_connection_is_not_tried_again(echo: Serving) -> None:
    def hang_up(peer: Peer, backend: ScriptedGrpcBackend) -> None:
        peer.greet()
        backend.said.append(peer.request())

    with scripted_grpc_backend(hang_up) as backend, routing(backend.port, echo.port, policy="weighted") as router:
        with channel_to(router) as channel:
            results = []
            for _ in range(4):
                try:
                    results.append(unary(channel)(b"x", timeout=SECONDS))
                except grpc.RpcError as error:
                    results.append((error.code(), error.details()))
    lost = (_UNAVAILABLE, "the backend closed the connection; the call may or may not have been processed")
    assert sorted(results, key=str) == sorted([lost, lost, b"x", b"x"], key=str)
    assert len(backend.said) == 2


@pytest.mark.parametrize("size", [10, 300_000, 3_000_000])
def test_a_backend_that_is_not_there_costs_nothing(echo: Serving, size: int) -> None:
    with routing(free_port(), echo.port) as router, channel_to(router) as channel:
        for _ in range(4):
            assert unary(channel)(bytes(size), timeout=SECONDS) == bytes(size)
        assert router.backend(0).stats.failed >= 1
        assert router.backend(0).stats.ok == 0


def test_without_a_backend_the_error_names_which_and_why() -> None:
    gone = free_port()
    with routing(gone) as router, channel_to(router) as channel:
        error = raised(lambda: unary(channel)(b"x", timeout=SECONDS))
        assert error.code() is _UNAVAILABLE
        assert error.details() == f"http://127.0.0.1:{gone} could not take the call: connection refused"
        router.call(lambda: router.proxy.backends.checked(router.backend(0), False, 0.0, "it is on fire"))
        error = raised(lambda: unary(channel)(b"x", timeout=SECONDS))
        assert error.code() is _UNAVAILABLE
        assert f"http://127.0.0.1:{gone} is down (it is on fire)" in error.details()


def test_a_backend_that_never_greets_is_given_up(echo: Serving) -> None:
    with scripted_grpc_backend(lambda peer, _: peer.rest() and None) as backend:
        with routing(backend.port, echo.port, timeouts=TimeoutSettings(connect_seconds=0.5)) as router:
            with channel_to(router) as channel:
                assert [unary(channel)(b"x", timeout=SECONDS) for _ in range(4)] == [b"x"] * 4
                assert router.backend(0).stats.failed >= 1


def test_a_backend_that_speaks_http_1_is_recognised(echo: Serving) -> None:
    def http1(peer: Peer, backend: ScriptedGrpcBackend) -> None:
        peer.send(b"HTTP/1.1 400 Bad Request\r\ncontent-length: 0\r\nconnection: close\r\n\r\n")
        peer.rest()

    with scripted_grpc_backend(http1) as backend, routing(backend.port) as router, channel_to(router) as channel:
        error = raised(lambda: unary(channel)(b"x", timeout=SECONDS))
        assert error.code() is _UNAVAILABLE
        assert "violated HTTP/2" in error.details()


def test_the_deadline_is_shorter_after_a_wait() -> None:
    """A backend is told the caller's time as it is, or, when the call had to wait for a connection, what is left."""
    received: list[bytes] = []

    def greet_late(peer: Peer, backend: ScriptedGrpcBackend) -> None:
        time.sleep(0.3)  # the call has come, and waits for the greeting
        peer.greet()
        while True:
            kind, flags, stream, payload = peer.frame()
            if kind == frames.HEADERS:
                start = payload.index(b"grpc-timeout") + len(b"grpc-timeout")
                received.append(payload[start + 1 : start + 1 + payload[start]])
            if kind in (frames.HEADERS, frames.DATA) and flags & frames.END_STREAM:
                peer.answer(stream)

    with scripted_grpc_backend(greet_late) as backend, routing(backend.port) as router, channel_to(router) as channel:
        for _ in range(2):
            unary(channel)(b"x", timeout=1000.0)
    # grpcio says so many seconds in whole ones, rounded up to three digits; what is left of them is in milliseconds.
    first, second = received
    assert first.endswith(b"m") and 0 < int(first[:-1]) <= 1_010_000 - 300
    assert second.endswith(b"S") and int(second[:-1]) <= 1010


def test_calls_wait_for_a_free_stream_and_more_connections_are_opened() -> None:
    def slow(peer: Peer, backend: ScriptedGrpcBackend) -> None:
        """One call at a time for each connection; answers only when all four connections are busy."""
        peer.greet((frames.Setting.MAX_CONCURRENT_STREAMS, 1))
        backend.said.append(peer.request())
        eventually(lambda: len(backend.said) >= 4)
        peer.answer(1)
        while True:
            peer.answer(peer.request())

    with scripted_grpc_backend(slow) as backend, routing(backend.port) as router, channel_to(router) as channel:
        futures = [unary(channel).future(b"x", timeout=SECONDS) for _ in range(20)]
        assert [future.result() for future in futures] == [b"reply"] * 20
        assert backend.connections == 4
        assert router.backend(0).stats.ok == 20


def test_too_many_waiting_calls_are_refused() -> None:
    def never(peer: Peer, backend: ScriptedGrpcBackend) -> None:
        peer.greet((frames.Setting.MAX_CONCURRENT_STREAMS, 0))
        peer.rest()

    settings = GrpcProxySettings(waiting_calls=2)
    with scripted_grpc_backend(never) as backend, routing(backend.port, grpc_settings=settings) as router:
        with channel_to(router) as channel:
            futures = [unary(channel).future(b"x", timeout=3 * SECONDS) for _ in range(4)]
            eventually(lambda: sum(future.done() for future in futures) == 2)
            assert {future.code() for future in futures if future.done()} == {_UNAVAILABLE}
            for future in futures:
                future.cancel()
            eventually(lambda: router.backend(0).outstanding == 0)
            # Those who gave up left room for others, who may give up in their turn.
            for _ in range(2):
                late = [unary(channel).future(b"x", timeout=0.2).code() for _ in range(2)]
                assert late == [grpc.StatusCode.DEADLINE_EXCEEDED] * 2
                eventually(lambda: router.backend(0).outstanding == 0)


def test_no_port_is_left_open() -> None:
    """Closing the router closes its connections."""
    ended: list[bool] = []

    def watch(peer: Peer, backend: ScriptedGrpcBackend) -> None:
        peer.greet()
        peer.answer(peer.request())
        peer.rest()
        ended.append(True)

    with scripted_grpc_backend(watch) as backend:
        with routing(backend.port) as router, channel_to(router) as channel:
            unary(channel)(b"x", timeout=SECONDS)
        eventually(lambda: ended == [True])


def test_a_connection_without_calls_is_closed_after_a_while(echo: Serving) -> None:
    with routing(echo.port) as router, channel_to(router) as channel:
        assert unary(channel)(b"x", timeout=SECONDS) == b"x"
        (connection,) = router.connections()
        # From when it had its last call: the coarse clock may have gone on by a second since.
        router.call(lambda: connection.sweep(connection._idle_since + 59))
        assert router.connections() == [connection]
        router.call(lambda: connection.sweep(connection._idle_since + 62))
        eventually(lambda: router.connections() == [])
        assert unary(channel)(b"x", timeout=SECONDS) == b"x"
        assert router.connections() != [connection]
