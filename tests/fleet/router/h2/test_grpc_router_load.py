# SPDX-License-Identifier: Apache-2.0
"""Backends that leave while calls come without a pause: one that drains costs nobody anything, one that is killed only
what it had begun."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager

import grpc
from grpc_router import SECONDS, Routing, channel_to, routing, unary

from headrace.fleet.router.settings import OutlierSettings
from support.serving import EchoCalls, Serving, echo_site, serving
from support.waiting import eventually


class _Load:
    """What eight callers were told, over two connections."""

    def __init__(self) -> None:
        self.received: Counter[str] = Counter()
        self.stop = threading.Event()

    def call(self, channel: grpc.Channel) -> None:
        number = 0
        while not self.stop.is_set():
            number += 1
            message = b"%d" % number * (number % 50 + 1)
            try:
                answer = unary(channel)(message, timeout=SECONDS)
                self.received["right" if answer == message else "wrong"] += 1
            except grpc.RpcError as error:
                self.received[error.code().name] += 1  # type: ignore[attr-defined]

    def more(self, count: int = 200) -> None:
        """Wait until so many more calls have been answered."""
        goal = self.received["right"] + count
        eventually(lambda: self.received["right"] >= goal, within=3 * SECONDS)


@contextmanager
def _load(router: Routing) -> Iterator[_Load]:
    load = _Load()
    with channel_to(router) as one, channel_to(router) as two:
        threads = [threading.Thread(target=load.call, args=(channel,)) for channel in (one, two) for _ in range(4)]
        for thread in threads:
            thread.start()
        try:
            load.more()
            yield load
        finally:
            load.stop.set()
            for thread in threads:
                thread.join(2 * SECONDS)


def test_a_backend_that_drains_loses_nothing() -> None:
    with serving(echo_site()) as first, serving(echo_site()) as second, routing(first.port, second.port) as router:
        with _load(router) as load:
            assert first.call(first.server.drain, 10.0) == 0
            load.more()
        assert set(load.received) == {"right"}
        assert router.backend(0).stats.ok > 50
        assert router.backend(0).outstanding == router.backend(1).outstanding == 0


def test_a_backend_that_is_killed_loses_what_it_had_begun() -> None:
    with serving(echo_site()) as first, serving(echo_site()) as second:
        outliers = OutlierSettings(consecutive_failures=3)
        with routing(first.port, second.port, outliers=outliers) as router, _load(router) as load:
            first.call(first.server.abort)
            load.more()
            lost = load.received["UNAVAILABLE"]
            assert lost <= 8  # the callers: none of them lost more than the call it was in
            load.more()
        assert load.received["UNAVAILABLE"] == lost
        assert set(load.received) <= {"right", "UNAVAILABLE"}
        assert router.backend(0).outstanding == router.backend(1).outstanding == 0


def test_open_calls_outlive_a_drain() -> None:
    """GOAWAY while a call is open on the connection: it is answered, and nothing new goes there."""
    calls = EchoCalls()
    with serving(echo_site(calls=calls)) as first, serving(echo_site()) as second:
        with routing(first.port, second.port) as router, channel_to(router) as channel:
            # Calls take turns: one of two is the first backend's.
            futures = [unary(channel, "Hold").future(b"", timeout=3 * SECONDS) for _ in range(2)]
            eventually(lambda: calls.held)
            draining = threading.Thread(target=first.call, args=(first.server.drain, 20.0))
            draining.start()
            eventually(lambda: not router.call(lambda: router.proxy.pools[router.backend(0)].connections))
            ok = router.backend(0).stats.ok
            assert [unary(channel)(b"x", timeout=SECONDS) for _ in range(6)] == [b"x"] * 6
            assert router.backend(0).stats.ok == ok
            first.call(calls.held[0].reply, b"at last")
            eventually(lambda: any(future.done() for future in futures))
            assert next(future for future in futures if future.done()).result() == b"at last"
            draining.join(SECONDS)
            assert not draining.is_alive()


def test_the_router_drains_too() -> None:
    """Calls that are open when the router stops are answered within its grace, and new ones are not lost."""
    calls = EchoCalls()
    with serving(echo_site(calls=calls)) as backend, routing(backend.port) as router, channel_to(router) as channel:
        held = unary(channel, "Hold").future(b"", timeout=2 * SECONDS)
        eventually(lambda: calls.held)
        draining: list[int] = []
        server: Serving = router.server
        thread = threading.Thread(target=lambda: draining.append(server.call(server.server.drain, 20.0)))
        thread.start()
        eventually(lambda: server.site.draining)
        backend.call(calls.held[0].reply, b"still here")
        assert held.result() == b"still here"
        thread.join(SECONDS)
        assert draining == [0]


def test_calls_cut_after_the_grace_get_a_status() -> None:
    calls = EchoCalls()
    with serving(echo_site(calls=calls)) as backend, routing(backend.port) as router, channel_to(router) as channel:
        held = unary(channel, "Hold").future(b"", timeout=2 * SECONDS)
        eventually(lambda: calls.held)
        router.call(router.server.server.drain, 0.0)
        assert held.code() is grpc.StatusCode.UNAVAILABLE
        assert "shutting down" in held.details()
        eventually(lambda: calls.events == ["cancel"])
