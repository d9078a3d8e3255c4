# SPDX-License-Identifier: Apache-2.0
"""Requests to a service that is scaled to zero: held, released, refused, dropped."""

from __future__ import annotations

import json
import socket
import threading
import time
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import grpc
import h2.config
import h2.connection
import h2.events
import pytest
from activation_router import TARGET, ActivationRouter, ScriptedScaler, activation_router
from routing import Answer, ask
from websockets.sync.client import connect

from headrace.fleet.autoscaling.autoscaler import CONCURRENCY
from headrace.fleet.router.settings import TargetScale
from headrace.net.http.exchange import Exchange
from headrace.net.http.routes import Routes
from headrace.net.site import Site
from headrace.net.websocket.handshake import accept
from support.ports import free_port
from support.serving import EchoCalls, EchoHandlers, echo_site, serving
from support.waiting import eventually

_pool = ThreadPoolExecutor(64)


def later(
    router: ActivationRouter, method: str = "GET", path: str = "/hello", body: bytes | None = None
) -> Future[Answer]:
    return _pool.submit(ask, router.port, method, path, body)


def status(router: ActivationRouter) -> Any:
    return json.loads(ask(router.port, "GET", "/router/status").body)


def test_requests_wait_until_the_target_is_ready_and_a_backend_answers() -> None:
    with serving(echo_site()) as server, activation_router(server.port) as router:
        assert router.state == "asleep"
        reported = status(router)
        assert (reported["active"], reported["live"], reported["backends"][0]["state"]) == (0, 0, "asleep")
        assert ask(router.port, "GET", "/router/healthz").status == 200, "a sleeping service is well"
        waiting = [later(router) for _ in range(20)] + [later(router, "POST", "/echo", b"x" * 1000) for _ in range(5)]
        router.held(25)
        # The backend is there all the time: it is the target that is waited for.
        eventually(lambda: router.scaler.asked)  # it is held first, and then somebody is woken
        assert router.scaler.asked == [(TARGET.name, 1)]
        eventually(lambda: status(router)["waking"]["held_bytes"] == 5000)  # a body may come after its head
        assert status(router)["active"] == 1
        router.scaler.ready = 1
        bodies = {request.result(60).body for request in waiting}
        assert bodies == {b"hello", b"x" * 1000}
        assert router.state == "awake" and router.activator.activations == 1
        text = ask(router.port, "GET", "/router/metrics").body.decode()
        assert "headrace_router_wakes_total 1" in text and "headrace_router_wake_seconds_count 1" in text


def test_after_idle_seconds_it_sleeps_and_is_woken_again() -> None:
    scaler = ScriptedScaler(wanted=1, ready=1)
    with serving(echo_site()) as server, activation_router(server.port, scaler=scaler) as router:
        for _ in range(5):
            assert ask(router.port, "GET", "/hello").body == b"hello"
            router.idle_for(3500)
            router.idle_for(50)
            assert router.state == "awake"
            router.idle_for(100)
            router.becomes("asleep")
            assert scaler.wanted[TARGET.name] == 0
        assert [replicas for _, replicas in scaler.asked] == [0, 1] * 4 + [0]


def test_the_clock_of_the_loop_puts_it_to_sleep() -> None:
    """The same without any help."""
    scaler = ScriptedScaler(wanted=1, ready=1)
    with serving(echo_site()) as server, activation_router(server.port, scaler=scaler, idle_seconds=0.1) as router:
        for _ in range(2):
            assert ask(router.port, "GET", "/hello").body == b"hello"
            router.becomes("asleep")


def test_requests_under_way_and_open_websockets_keep_it_awake() -> None:
    handlers = EchoHandlers()

    def site() -> Site:
        routes = Routes()
        handlers.add_to(routes)
        routes.add("GET", "/socket", _echo_socket)
        return Site(routes)

    scaler = ScriptedScaler(wanted=1, ready=1)
    with serving(site) as server, activation_router(server.port, scaler=scaler) as router:
        waiting = later(router, "POST", "/hold", b"x")
        eventually(lambda: handlers.held)
        for _ in range(3):
            router.idle_for(10_000)
        assert router.state == "awake" and not scaler.asked
        server.call(lambda: handlers.echo(handlers.held[0]))
        assert waiting.result(60).body == b"x"
        with connect(f"ws://127.0.0.1:{router.port}/socket") as client:
            for _ in range(3):
                router.idle_for(10_000)
            assert router.state == "awake" and not scaler.asked
            client.send("hello")
            assert client.recv(60) == "hello"
        eventually(lambda: router.server.call(router.activator._concurrency) == 0)
        router.idle_for()
        router.becomes("asleep")


def _echo_socket(exchange: Exchange) -> None:
    def opened(connection: Any) -> None:
        connection.on_message = connection.send

    accept(exchange, opened)


def test_a_websocket_waits_too() -> None:
    def site() -> Site:
        routes = Routes()
        routes.add("GET", "/socket", _echo_socket)
        return Site(routes)

    with serving(site) as server, activation_router(server.port) as router:

        def talk() -> Any:
            with connect(f"ws://127.0.0.1:{router.port}/socket", open_timeout=60) as client:
                client.send("hello")
                return client.recv(60)

        waiting = _pool.submit(talk)
        router.held(1)
        router.scaler.ready = 1
        assert waiting.result(60) == "hello"


def test_long_bodies_arrive_whole() -> None:
    body = bytes(range(256)) * 20_000
    with serving(echo_site()) as server, activation_router(server.port) as router:
        waiting = [later(router, "POST", "/upload", body) for _ in range(3)]
        router.held(3)
        # What was not read yet is the client's, not ours.
        assert router.server.call(lambda: router.activator.held.bytes) < len(body)
        router.scaler.ready = 1
        assert {request.result(60).body for request in waiting} == {b"%d" % len(body)}


def test_grpc_calls_wait_and_keep_their_deadline() -> None:
    with serving(echo_site(calls=EchoCalls())) as server, activation_router(server.port) as router:
        with grpc.insecure_channel(f"127.0.0.1:{router.port}") as channel:
            unary = channel.unary_unary("/test.Echo/Unary")
            collect = channel.stream_unary("/test.Echo/Collect")
            with pytest.raises(grpc.RpcError) as late:
                unary(b"x", timeout=0.2)
            assert late.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
            router.held(0)
            big = b"y" * 3_000_000
            waiting = [unary.future(item, timeout=60) for item in (b"a", big)]
            gone = unary.future(b"gone", timeout=60)
            pieces = collect.future(iter([b"a", b"b"]), timeout=60)
            router.held(4)
            gone.cancel()
            router.held(3)
            router.scaler.ready = 1
            assert [request.result() for request in waiting] == [b"a", big]
            assert pieces.result() == b"a,b"
            assert router.proxy.backends.all[0].stats.ok == 3


def test_plain_http2_waits_and_may_leave() -> None:
    def opened(sock: socket.socket) -> h2.connection.H2Connection:
        client = h2.connection.H2Connection(h2.config.H2Configuration(header_encoding="utf-8"))
        client.initiate_connection()
        for stream in (1, 3):
            fields = {":method": "GET", ":path": "/hello", ":scheme": "http", ":authority": "router"}
            client.send_headers(stream, list(fields.items()), end_stream=True)
        sock.sendall(client.data_to_send())
        return client

    with serving(echo_site()) as server, activation_router(server.port) as router:
        with socket.create_connection(("127.0.0.1", router.port), timeout=60) as sock:
            client = opened(sock)
            router.held(2)
            client.reset_stream(1)
            sock.sendall(client.data_to_send())
            router.held(1)
            router.scaler.ready = 1
            got: dict[int, bytes] = {}
            while not got:
                for event in client.receive_data(sock.recv(65536)):
                    if isinstance(event, h2.events.DataReceived):
                        got[event.stream_id] = event.data
            assert got == {3: b"hello"}


def test_requests_over_the_bounds_are_refused_with_a_retry_time() -> None:
    with serving(echo_site()) as server, activation_router(server.port, held_requests=2, held_bytes=1000) as router:
        first = later(router, "POST", "/echo", b"x" * 900)
        router.held(1)
        eventually(lambda: router.activator.held.bytes == 900)  # its body, too
        big = ask(router.port, "POST", "/echo", b"x" * 101)
        assert big.status == 503 and b"held_bytes" in big.body and int(big.fields["retry-after"]) >= 1
        second = later(router)
        router.held(2)
        third = ask(router.port, "GET", "/hello")
        assert third.status == 503 and b"held_requests" in third.body and int(third.fields["retry-after"]) >= 1
        with grpc.insecure_channel(f"127.0.0.1:{router.port}") as channel, pytest.raises(grpc.RpcError) as full:
            channel.unary_unary("/test.Echo/Unary")(b"x", timeout=60)
        assert full.value.code() is grpc.StatusCode.UNAVAILABLE
        router.scaler.ready = 1
        assert (first.result(60).status, second.result(60).status) == (200, 200)


def test_bodies_that_grow_while_they_wait_are_bounded_too() -> None:
    with serving(echo_site()) as server, activation_router(server.port, held_bytes=100_000) as router:
        with grpc.insecure_channel(f"127.0.0.1:{router.port}") as channel:
            with pytest.raises(grpc.RpcError) as full:
                channel.unary_unary("/test.Echo/Unary")(b"x" * 3_000_000, timeout=60)
        assert full.value.code() is grpc.StatusCode.UNAVAILABLE and "held_bytes" in full.value.details()


def test_a_timeout_names_the_place_to_check() -> None:
    with serving(echo_site()) as server, activation_router(server.port, wait_seconds=0.3) as router:
        answer = ask(router.port, "GET", "/hello")
        assert answer.status == 503 and int(answer.fields["retry-after"]) >= 1
        assert b"did not start within 0.3 seconds" in answer.body
        assert b"kubectl describe deployment chat-engine -n default" in answer.body
        upload = ask(router.port, "POST", "/upload", b"x" * 200_000)
        assert upload.status == 503
        router.scaler.ready = 1
        router.becomes("awake")
        assert ask(router.port, "GET", "/hello").body == b"hello"


def test_a_backend_that_cannot_be_reached_is_named() -> None:
    port = free_port()
    with activation_router(port, scaler=ScriptedScaler(wanted=1, ready=1), wait_seconds=0.3) as router:
        answer = ask(router.port, "GET", "/hello")
        assert answer.status == 503 and f"http://127.0.0.1:{port} cannot be reached".encode() in answer.body


def test_a_client_that_leaves_is_forgotten() -> None:
    with serving(echo_site()) as server, activation_router(server.port) as router:
        with socket.create_connection(("127.0.0.1", router.port)) as sock:
            sock.sendall(b"GET /hello HTTP/1.1\r\nhost: x\r\n\r\n")
            router.held(1)
        router.held(0)
        router.scaler.ready = 1
        router.becomes("awake")
        assert router.proxy.backends.all[0].stats.requests == 0


def test_a_restarting_backend_loses_no_request() -> None:
    """Nobody scaled it: a request that finds no open port waits for the next process."""
    port = free_port()
    with activation_router(port, scaler=ScriptedScaler(wanted=1, ready=1)) as router:
        waiting = [later(router) for _ in range(3)] + [later(router, "POST", "/upload", b"x" * 200_000)]
        with grpc.insecure_channel(f"127.0.0.1:{router.port}") as channel:
            call = channel.unary_unary("/test.Echo/Unary").future(b"x", timeout=60)
            router.held(5)
            assert not router.scaler.asked, "it is there, as far as the cluster knows"
            with ServingAt(port):
                assert [request.result(60).status for request in waiting] == [200] * 4
                assert call.result() == b"x"


class ServingAt:
    """An echo server on a port of one's choice, through a relay."""

    def __init__(self, port: int) -> None:
        self._port = port

    def __enter__(self) -> None:
        self._serving = serving(echo_site())
        inner = self._serving.__enter__()
        self._listener = socket.create_server(("127.0.0.1", self._port))
        self._thread = threading.Thread(target=self._accept, args=(inner.port,), daemon=True)
        self._thread.start()

    def _accept(self, port: int) -> None:
        while True:
            try:
                below, _ = self._listener.accept()
            except OSError:
                return
            try:
                above = socket.create_connection(("127.0.0.1", port))
            except OSError:  # it has ended
                below.close()
                continue
            for one, other in ((below, above), (above, below)):
                threading.Thread(target=_pump, args=(one, other), daemon=True).start()

    def __exit__(self, *told: object) -> None:
        self._listener.shutdown(socket.SHUT_RDWR)  # else `accept` would go on, and take one more
        self._thread.join(30)
        self._listener.close()
        self._serving.__exit__(*told)  # type: ignore[arg-type]


def _pump(one: socket.socket, other: socket.socket) -> None:
    with one, other:
        try:
            while piece := one.recv(65536):
                other.sendall(piece)
        except OSError:
            pass


def test_a_stopping_backend_is_not_taken_for_a_starting_one() -> None:
    """A request that comes during the fall waits until nothing counts as ready, and then for the next one."""
    scaler = ScriptedScaler(wanted=1, ready=1)
    scaler.follows = False
    with serving(echo_site()) as server, activation_router(server.port, scaler=scaler) as router:
        router.idle_for()
        assert router.state == "falling asleep"
        waiting = later(router)
        router.held(1)
        eventually(lambda: scaler.asked == [(TARGET.name, 0)])
        time.sleep(0.1)
        assert router.state == "falling asleep" and not waiting.done()
        scaler.ready = 0
        eventually(lambda: scaler.asked == [(TARGET.name, 0), (TARGET.name, 1)])
        time.sleep(0.05)
        assert not waiting.done()
        scaler.ready = 1
        assert waiting.result(60).body == b"hello"


def test_an_unreachable_api_server_breaks_nothing_else() -> None:
    scaler = ScriptedScaler(wanted=1, ready=1)
    scaler.down = True
    with serving(echo_site()) as server, activation_router(server.port, scaler=scaler) as router:
        assert router.state == "awake", "nobody knows that it sleeps"
        assert ask(router.port, "GET", "/hello").status == 200
        router.idle_for()
        assert router.state == "falling asleep"
        # It could not be put to sleep: so it answers, and at once.
        assert ask(router.port, "GET", "/hello").status == 200
        scaler.down = False
        router.idle_for()
        router.becomes("asleep")
        assert scaler.wanted[TARGET.name] == 0


def test_a_failed_wake_is_retried_and_finally_reported() -> None:
    with serving(echo_site()) as server, activation_router(server.port, wait_seconds=0.5) as router:
        router.scaler.down = True
        answer = ask(router.port, "GET", "/hello")
        assert answer.status == 503 and b"the test has cut the wire" in answer.body
        waiting = later(router)
        eventually(lambda: len(router.activator.held) == 1 or waiting.done())
        router.scaler.down, router.scaler.ready = False, 1
        router.becomes("awake")
        assert waiting.result(60).status in (200, 503)
        assert ask(router.port, "GET", "/hello").status == 200


def test_all_targets_are_waited_for_and_all_sleep() -> None:
    targets = (TARGET, replace(TARGET, name="chat-decoder"))
    scaler = ScriptedScaler()
    scaler.wanted["chat-decoder"] = 1
    scaler.ready = 1
    with serving(echo_site()) as server, activation_router(server.port, scaler=scaler, targets=targets) as router:
        assert router.state == "asleep"
        assert ask(router.port, "GET", "/hello").status == 200
        assert scaler.asked[:1] == [(TARGET.name, 1)]
        router.idle_for()
        router.becomes("asleep")
        assert scaler.asked[1:] == [(TARGET.name, 0), ("chat-decoder", 0)]


def test_another_client_may_scale_too() -> None:
    scaler = ScriptedScaler(wanted=2, ready=2)
    with serving(echo_site()) as server, activation_router(server.port, scaler=scaler) as router:
        assert router.state == "awake"
        scaler.wanted[TARGET.name] = 0
        router.becomes("asleep")
        assert not scaler.asked
        scaler.wanted[TARGET.name] = 3
        router.becomes("awake")
        scaler.wanted[TARGET.name] = 0
        router.becomes("asleep")
        assert ask(router.port, "GET", "/hello").status == 200
        assert scaler.asked == [(TARGET.name, 1)]


def test_held_requests_are_answered_before_the_router_ends() -> None:
    with serving(echo_site()) as server, activation_router(server.port) as router:
        waiting = [later(router), later(router, "POST", "/upload", b"x" * 200_000)]
        router.held(2)
        router.server.call(router.proxy.drain, 0.4)
        answers = [request.result(30) for request in waiting]
        assert [answer.status for answer in answers] == [503, 503] and b"shutting down" in answers[0].body
    with serving(echo_site()) as server, activation_router(server.port) as router:
        one = later(router)
        router.held(1)
        router.server.call(router.proxy.drain, 30.0)
        router.scaler.ready = 1
        assert one.result(60).status == 200, "there was time to finish"
        router.idle_for()
        assert router.state == "awake" and router.scaler.asked == [(TARGET.name, 1)], (
            "the next router may be busy: it is not put to sleep"
        )


def test_concurrent_requests_get_as_many_replicas_as_they_need(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("headrace.fleet.router.activation.TICK_SECONDS", 0.1)
    monkeypatch.setattr("headrace.fleet.autoscaling.autoscaler._BUCKET_SECONDS", 0.1)
    target = replace(TARGET, scale=TargetScale(CONCURRENCY, 10, 4))
    with serving(echo_site()) as server, activation_router(server.port, targets=(target,), idle_seconds=0.5) as router:
        waiting = [later(router) for _ in range(21)]
        router.held(21)
        # 21 at 7 of 10 each, while nobody is there yet.
        eventually(lambda: router.scaler.wanted[TARGET.name] == 3)
        router.scaler.ready = 4
        assert {request.result(60).status for request in waiting} == {200}
        router.becomes("asleep")
        numbers = [replicas for _, replicas in router.scaler.asked]
        assert (numbers[0], max(numbers), numbers[-1]) == (1, 3, 0)


def test_without_activation_requests_are_not_held(monkeypatch: pytest.MonkeyPatch) -> None:
    from routing import routing

    port = free_port()
    with routing(port) as router:
        assert router.get().status == 502
        assert "active" not in json.loads(ask(router.port, "GET", "/router/status").body)
