# SPDX-License-Identifier: Apache-2.0
"""`max_outstanding` requests per backend, and a queue for the others."""

from __future__ import annotations

import json
import socket
import threading

from routing import Answer, Routing, ask, routing

from headrace.fleet.router.backends import LimitedBackends
from headrace.fleet.router.settings import QueueSettings
from support.serving import EchoHandlers, Serving, echo_site, serving
from support.waiting import eventually


def _line(router: Routing) -> int:
    backends = router.proxy.backends
    assert isinstance(backends, LimitedBackends)
    return backends.queue.length


class _Clients:
    """Requests to `/hold`, each in a thread."""

    def __init__(self, router: Routing) -> None:
        self.answers: list[Answer] = []
        self._port = router.port
        self._threads: list[threading.Thread] = []

    def send(self, text: bytes) -> None:
        thread = threading.Thread(target=lambda: self.answers.append(ask(self._port, "POST", "/hold", text)))
        self._threads.append(thread)
        thread.start()

    def join(self) -> None:
        for thread in self._threads:
            thread.join(60)


def _let_go(server: Serving, handlers: EchoHandlers) -> None:
    server.call(lambda: handlers.echo(handlers.held.pop(0)))


def test_more_than_a_backend_may_have_wait_in_order() -> None:
    handlers = EchoHandlers()
    with serving(echo_site(handlers=handlers)) as one:
        with routing(one.port, max_outstanding=2) as router:
            clients = _Clients(router)
            for number in range(5):
                clients.send(b"%d" % number)
                eventually(lambda number=number: len(handlers.held) + _line(router) == number + 1)  # type: ignore[misc]
            assert len(handlers.held) == 2 and _line(router) == 3
            assert b"headrace_router_queued_requests 3" in ask(router.port, "GET", "/router/metrics").body
            document = json.loads(ask(router.port, "POST", "/router/explain", b'{"path": "/hello"}').body)
            assert document["backend"] is None and "the request would be queued" in document["because"]
            order = []
            for left in (2, 1, 0, 0, 0):
                eventually(lambda: handlers.held)  # one that left the line may still be on its way
                order.append(bytes(handlers.held[0].body))
                _let_go(one, handlers)
                eventually(lambda left=left: _line(router) == left)  # type: ignore[misc]
                eventually(lambda: len(handlers.held) == 2 or _line(router) == 0)
            clients.join()
            assert order == [b"0", b"1", b"2", b"3", b"4"]
            assert sorted(answer.body for answer in clients.answers) == order
            assert router.proxy.backends.all[0].outstanding == 0


def test_a_line_has_an_end_and_its_time() -> None:
    handlers = EchoHandlers()
    with serving(echo_site(handlers=handlers)) as one:
        with routing(one.port, max_outstanding=1, queue=QueueSettings(requests=1, wait_seconds=200.0)) as router:
            clients = _Clients(router)
            clients.send(b"first")
            eventually(lambda: handlers.held)
            clients.send(b"second")
            eventually(lambda: _line(router) == 1)
            refused = ask(router.port, "POST", "/hold", b"third")
            assert refused.status == 429 and b"queue.requests" in refused.body and "retry-after" in refused.fields
            router.sweep(seconds_later=199)
            assert _line(router) == 1 and not clients.answers
            router.sweep(seconds_later=201)
            eventually(lambda: clients.answers)
            assert clients.answers[0].status == 503 and b"200 seconds" in clients.answers[0].body
            _let_go(one, handlers)
            clients.join()
            assert clients.answers[1].body == b"first"
            # There is room again.
            assert ask(router.port, "GET", "/hello").body == b"hello"


def test_a_client_that_leaves_the_line_is_forgotten() -> None:
    handlers = EchoHandlers()
    with serving(echo_site(handlers=handlers)) as one:
        with routing(one.port, max_outstanding=1) as router:
            clients = _Clients(router)
            clients.send(b"first")
            eventually(lambda: handlers.held)
            with socket.create_connection(("127.0.0.1", router.port)) as leaving:
                leaving.sendall(b"POST /hold HTTP/1.1\r\nhost: x\r\ncontent-length: 1\r\n\r\nx")
                eventually(lambda: _line(router) == 1)
            eventually(lambda: _line(router) == 0)
            _let_go(one, handlers)
            clients.join()
            assert router.proxy.backends.all[0].stats.requests == 1


def test_a_new_backend_takes_what_waits() -> None:
    handlers = EchoHandlers()
    with serving(echo_site(handlers=handlers)) as one, serving(echo_site()) as two:
        with routing(one.port, max_outstanding=1) as router:
            clients = _Clients(router)
            clients.send(b"first")
            eventually(lambda: handlers.held)
            answers: list[Answer] = []
            waiting = threading.Thread(target=lambda: answers.append(ask(router.port, "GET", "/hello")))
            waiting.start()
            eventually(lambda: _line(router) == 1)
            from headrace.fleet.router.settings import BackendAddress

            urls = [f"http://127.0.0.1:{item.port}" for item in (one, two)]
            router.server.call(router.proxy._set_addresses, [BackendAddress.parse(url) for url in urls])
            waiting.join(60)
            assert answers[0].body == b"hello"
            _let_go(one, handlers)
            clients.join()
