# SPDX-License-Identifier: Apache-2.0
"""Hedging: a slow request goes to a second backend; the first response is used, the other attempt is cancelled."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable

import pytest
from routing import Routing, ScriptedBackend, ask, routing, scripted_backend

from headrace.fleet.router.hedging import Hedger
from headrace.fleet.router.settings import HedgingSettings, RetrySettings
from headrace.net.http.heads import RequestHead
from support.serving import echo_site, serving
from support.waiting import eventually

_SOON = HedgingSettings(after_seconds=0.05, budget=1.0)


def _silent(sock: socket.socket, backend: ScriptedBackend) -> None:
    """Reads a request and says nothing until it is dropped."""
    backend.read_request(sock)
    sock.recv(1)
    backend.seen.append(b"dropped")


def _slow_first(router: Routing, slow_port: int) -> None:
    """Have the slow one chosen first, by keeping the other busy."""
    for backend in router.proxy.backends.all:
        if backend.address.port != slow_port:
            router.server.call(router.proxy.backends.begin, backend)


def test_the_quicker_one_answers_and_the_slow_one_is_dropped() -> None:
    with scripted_backend(_silent) as slow, serving(echo_site()) as quick:
        with routing(slow.port, quick.port, policy="least", hedging=_SOON) as router:
            _slow_first(router, slow.port)
            answer = router.get("/hello")
            assert (answer.status, answer.body) == (200, b"hello")
            eventually(lambda: b"dropped" in slow.seen)
            first, second = router.proxy.backends.all
            assert (first.stats.cancelled, first.outstanding) == (1, 0)
            assert (second.stats.ok, second.outstanding) == (1, 1)
            text = ask(router.port, "GET", "/router/metrics").body
            assert b'headrace_router_hedges_total{outcome="won"} 1' in text
            assert b'why="hedge"} 1' in text


def test_a_quick_backend_is_not_hedged() -> None:
    with serving(echo_site()) as one, serving(echo_site()) as two:
        with routing(one.port, two.port, hedging=HedgingSettings(after_seconds=60.0)) as router:
            for _ in range(20):
                assert router.get("/hello").body == b"hello"
            assert sum(backend.stats.requests for backend in router.proxy.backends.all) == 20


def test_what_may_change_something_is_never_sent_twice() -> None:
    with scripted_backend(_answers_late) as slow, serving(echo_site()) as quick:
        with routing(slow.port, quick.port, policy="least", hedging=_SOON) as router:
            _slow_first(router, slow.port)
            assert router.get("/v1/chat/completions", "POST", b"{}").body == b"late"
            assert router.proxy.backends.all[1].stats.requests == 1  # the one of `_slow_first`


def test_inference_is_hedged_where_configured() -> None:
    with scripted_backend(_silent) as slow, scripted_backend(_answers_at_once) as quick:
        hedging = HedgingSettings(after_seconds=0.05, budget=1.0, inference=True)
        with routing(slow.port, quick.port, policy="least", hedging=hedging) as router:
            _slow_first(router, slow.port)
            assert router.get("/v1/chat/completions", "POST", b"{}").body == b"soon"


def test_the_first_may_still_win() -> None:
    second = threading.Event()

    def late(sock: socket.socket, backend: ScriptedBackend) -> None:
        while backend.read_request(sock) and second.wait(30):
            sock.sendall(b"HTTP/1.1 200 OK\r\ncontent-length: 4\r\n\r\nlate")

    def asked(sock: socket.socket, backend: ScriptedBackend) -> None:
        backend.read_request(sock)
        second.set()
        sock.recv(1)
        backend.seen.append(b"dropped")

    with scripted_backend(late) as slow, scripted_backend(asked) as silent:
        with routing(slow.port, silent.port, policy="least", hedging=_SOON) as router:
            _slow_first(router, slow.port)
            assert router.get("/hello").body == b"late"
            eventually(lambda: b"dropped" in silent.seen)
            assert router.proxy.backends.all[1].stats.cancelled == 1


def test_when_the_first_breaks_the_second_answers_and_the_other_way_round() -> None:
    asked, broke = threading.Event(), threading.Event()

    def breaks(sock: socket.socket, backend: ScriptedBackend) -> None:
        """As soon as the other one was asked, too."""
        if backend.read_request(sock) and asked.wait(30):
            sock.sendall(b"nonsense\r\n\r\n")
        broke.set()

    def answers(sock: socket.socket, backend: ScriptedBackend) -> None:
        """Once that has happened, and a while later."""
        while backend.read_request(sock):
            asked.set()
            broke.wait(30)
            backend.stopping.wait(0.1)
            sock.sendall(b"HTTP/1.1 200 OK\r\ncontent-length: 5\r\n\r\nlater")

    with scripted_backend(breaks) as broken, scripted_backend(answers) as good:
        for ports in ((broken.port, good.port), (good.port, broken.port)):
            asked.clear()
            broke.clear()
            with routing(*ports, policy="least", hedging=_SOON) as router:
                _slow_first(router, ports[0])
                answer = router.get("/hello")
                assert (answer.status, answer.body) == (200, b"later")
                eventually(lambda router=router: sum(b.outstanding for b in router.proxy.backends.all) == 1)  # type: ignore[misc]
                eventually(lambda router=router: sum(b.stats.failed for b in router.proxy.backends.all) == 1)  # type: ignore[misc]


def test_an_error_answer_does_not_win() -> None:
    event = threading.Event()
    """Whether the one that answers was asked, too."""

    def refuses(sock: socket.socket, backend: ScriptedBackend) -> None:
        while backend.read_request(sock):
            event.wait(60)
            sock.sendall(b"HTTP/1.1 503 No\r\ncontent-length: 0\r\n\r\n")

    def answers(sock: socket.socket, backend: ScriptedBackend) -> None:
        """Once the router knows that the other one has refused."""
        while backend.read_request(sock):
            event.set()
            eventually(lambda: sum(backend.stats.refused for backend in router.proxy.backends.all) == 1)
            sock.sendall(b"HTTP/1.1 200 OK\r\ncontent-length: 5\r\n\r\nlater")

    with scripted_backend(refuses) as first, scripted_backend(answers) as second:
        for ports in ((first.port, second.port), (second.port, first.port)):
            event.clear()
            with routing(*ports, policy="least", hedging=_SOON) as router:
                _slow_first(router, ports[0])
                assert router.get("/hello").body == b"later"
                eventually(lambda router=router: sum(b.stats.refused for b in router.proxy.backends.all) == 1)  # type: ignore[misc]
        with routing(first.port, hedging=_SOON) as router:
            assert router.get("/hello").status == 503
    with scripted_backend(_refuses_late) as first, scripted_backend(_refuses_late) as second:
        with routing(first.port, second.port, hedging=_SOON) as router:
            assert router.get("/hello").status == 503
            assert all(backend.outstanding == 0 for backend in router.proxy.backends.all)


def test_when_both_break_the_client_gets_an_error() -> None:
    with scripted_backend(_breaks_late) as one, scripted_backend(_breaks_late) as two:
        with routing(one.port, two.port, policy="least", hedging=_SOON) as router:
            assert router.get("/hello").status == 502
            assert all(backend.outstanding == 0 for backend in router.proxy.backends.all)


def test_a_client_that_leaves_frees_both() -> None:
    with scripted_backend(_silent) as one, scripted_backend(_silent) as two:
        with routing(one.port, two.port, policy="least", hedging=_SOON) as router:
            with socket.create_connection(("127.0.0.1", router.port)) as leaving:
                leaving.sendall(b"GET /hello HTTP/1.1\r\nhost: x\r\n\r\n")
                eventually(lambda: all(backend.outstanding == 1 for backend in router.proxy.backends.all))
            eventually(lambda: all(backend.stats.cancelled == 1 for backend in router.proxy.backends.all))


def test_there_is_a_budget() -> None:
    hedger = Hedger(HedgingSettings(after_seconds=0.1, budget=0.1))
    spent = 0
    for _ in range(1000):
        hedger.budget.earn()
        spent += hedger.budget.spend()
    assert 100 <= spent <= 111


def test_without_budget_the_slow_one_is_waited_for() -> None:
    with scripted_backend(_answers_late) as slow, serving(echo_site()) as quick:
        with routing(slow.port, quick.port, policy="least", hedging=_SOON) as router:
            hedger = router.proxy.hedger
            assert hedger is not None
            hedger.budget.update(RetrySettings(budget=0.0, reserve=0))
            _slow_first(router, slow.port)
            assert router.get("/hello").body == b"late"
            assert (hedger.hedged, hedger.budget.refused) == (0, 1)


def test_the_delay_follows_a_percentile() -> None:
    hedger = Hedger(HedgingSettings(percentile=0.95))
    assert hedger.delay() is None
    for number in range(320):
        hedger.observe(number % 100 / 1000)
    assert hedger.delay() == pytest.approx(0.095, abs=0.003)
    assert Hedger(HedgingSettings(percentile=0.95, after_seconds=0.2)).delay() == 0.2


@pytest.mark.parametrize(
    ("method", "path", "plain", "inference"),
    [
        (b"GET", b"/v2/models", True, True),
        (b"POST", b"/v2/models/a/infer", False, True),
        (b"POST", b"/generate", False, True),
        (b"POST", b"/v2/repository/models/a/load", False, False),
        (b"DELETE", b"/x", False, False),
    ],
)
def test_what_is_safe(method: bytes, path: bytes, plain: bool, inference: bool) -> None:
    head = RequestHead(method, path, (), version="1.1")
    assert Hedger(HedgingSettings(after_seconds=1)).may_hedge(head) is plain
    assert Hedger(HedgingSettings(after_seconds=1, inference=True)).may_hedge(head) is inference


def _answer_after(seconds: float, text: bytes) -> Callable[[socket.socket, ScriptedBackend], None]:
    def script(sock: socket.socket, backend: ScriptedBackend) -> None:
        while backend.read_request(sock):
            backend.stopping.wait(seconds)
            sock.sendall(b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n%b" % (len(text), text))

    return script


def _refuses_late(sock: socket.socket, backend: ScriptedBackend) -> None:
    while backend.read_request(sock):
        backend.stopping.wait(0.2)
        sock.sendall(b"HTTP/1.1 503 No\r\ncontent-length: 0\r\n\r\n")


def _break_after(seconds: float) -> Callable[[socket.socket, ScriptedBackend], None]:
    def script(sock: socket.socket, backend: ScriptedBackend) -> None:
        backend.read_request(sock)
        backend.stopping.wait(seconds)
        sock.sendall(b"nonsense\r\n\r\n")

    return script


_answers_at_once = _answer_after(0, b"soon")
_answers_late = _answer_after(0.3, b"late")
_breaks_late = _break_after(0.2)
