# SPDX-License-Identifier: Apache-2.0
"""Backends that break the rules: what the client gets, what is tried again, and what never is."""

from __future__ import annotations

import http.client
import json
import socket
import threading
from collections.abc import Iterator

import pytest
from routing import Answer, Routing, ScriptedBackend, answering, raw, routing, scripted_backend

from headrace.fleet.router.settings import OutlierSettings, RetrySettings, TimeoutSettings
from support.ports import free_port
from support.serving import EchoHandlers, echo_site, serving
from support.waiting import eventually

OK = b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nok"
NO_EJECTION = OutlierSettings(consecutive_failures=0, error_rate=0)

BAD_ANSWERS = {
    "garbage": b"\x00\x01\x02 no HTTP at all\r\n\r\n",
    "another protocol": b"SSH-2.0-OpenSSH_9.2\r\n\r\n",
    "version 2": b"HTTP/2.0 200 OK\r\ncontent-length: 0\r\n\r\n",
    "bad status": b"HTTP/1.1 abc OK\r\ncontent-length: 0\r\n\r\n",
    "status 999": b"HTTP/1.1 999 X\r\ncontent-length: 0\r\n\r\n",
    "two lengths": b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\ncontent-length: 3\r\n\r\nabc",
    "negative length": b"HTTP/1.1 200 OK\r\ncontent-length: -2\r\n\r\nab",
    "length with a plus": b"HTTP/1.1 200 OK\r\ncontent-length: +2\r\n\r\nab",
    "length list": b"HTTP/1.1 200 OK\r\ncontent-length: 2, 2\r\n\r\nab",
    "length and chunks": b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\ntransfer-encoding: chunked\r\n\r\n2\r\nab\r\n0\r\n\r\n",
    "unknown coding": b"HTTP/1.1 200 OK\r\ntransfer-encoding: gzip, chunked\r\n\r\n0\r\n\r\n",
    "coding twice": b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\ntransfer-encoding: chunked\r\n\r\n0\r\n\r\n",
    "chunks in 1.0": b"HTTP/1.0 200 OK\r\ntransfer-encoding: chunked\r\n\r\n0\r\n\r\n",
    "folded field": b"HTTP/1.1 200 OK\r\nx: a\r\n b\r\ncontent-length: 0\r\n\r\n",
    "space before the colon": b"HTTP/1.1 200 OK\r\ncontent-length : 0\r\n\r\n",
    "bare line feed": b"HTTP/1.1 200 OK\r\nx: a\ny: b\r\ncontent-length: 0\r\n\r\n",
    "nul": b"HTTP/1.1 200 OK\r\nx: a\x00b\r\ncontent-length: 0\r\n\r\n",
    "switches unasked": b"HTTP/1.1 101 Switching Protocols\r\nupgrade: websocket\r\n\r\n",
    "endless head": b"HTTP/1.1 200 OK\r\n" + b"x: " + b"y" * 100_000,
    "too many fields": b"HTTP/1.1 200 OK\r\n" + b"x: y\r\n" * 300 + b"content-length: 0\r\n\r\n",
    "half a head": b"HTTP/1.1 200 OK\r\ncontent-le",
    "half a body": b"HTTP/1.1 200 OK\r\ncontent-length: 10\r\n\r\nabc",
    "bad chunk at once": b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\nZZ\r\nab\r\n",
}


@pytest.fixture(scope="module")
def bad_and_good() -> Iterator[tuple[Routing, ScriptedBackend]]:
    """A router with two backends: one that answers what the path names, badly, and one that is well."""

    def script(sock: socket.socket, backend: ScriptedBackend) -> None:
        name = backend.read_request(sock).split(b" ")[1].decode().removeprefix("/")
        sock.sendall(list(BAD_ANSWERS.values())[int(name)])

    with scripted_backend(script) as bad, scripted_backend(answering(OK)) as good:
        with routing(bad.port, good.port, policy="round-robin", outliers=NO_EJECTION) as router:
            yield router, bad


@pytest.mark.parametrize("name", BAD_ANSWERS)
def test_a_bad_answer_is_502_and_is_not_tried_again(name: str, bad_and_good: tuple[Routing, ScriptedBackend]) -> None:
    router, bad = bad_and_good
    path = f"/{list(BAD_ANSWERS).index(name)}"
    asked, failed = len(bad.seen), router.stats(0).failed
    assert sorted(router.get(path).status for _ in range(2)) == [200, 502]
    assert len(bad.seen) == asked + 1
    assert router.stats(0).failed == failed + 1 and router.proxy.backends.all[0].outstanding == 0


def test_the_502_names_the_backend_and_leaks_nothing_else() -> None:
    with scripted_backend(answering(BAD_ANSWERS["garbage"])) as backend, routing(backend.port) as router:
        answer = router.get("/hello")
        text = json.loads(answer.body)["error"]
        assert text.startswith(f"the backend http://127.0.0.1:{backend.port} sent a response")
        assert "Traceback" not in text


@pytest.mark.parametrize(
    "head",
    [
        b"HTTP/1.1 200 OK\r\ncontent-length: 100000\r\n\r\n",
        b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n186a0\r\n",
    ],
)
def test_a_started_answer_is_cut_so_that_the_client_notices(head: bytes) -> None:
    with scripted_backend(answering(head + bytes(50_000))) as backend, routing(backend.port) as router:
        connection = http.client.HTTPConnection("127.0.0.1", router.port, timeout=30)
        connection.request("GET", "/hello")
        response = connection.getresponse()
        assert response.status == 200
        with pytest.raises((http.client.IncompleteRead, ConnectionError)):
            response.read()
        connection.close()
        assert len(backend.seen) == 1 and router.stats().failed == 1


def test_a_bad_chunk_in_the_middle_cuts_the_answer() -> None:
    passed_on = threading.Event()

    def script(sock: socket.socket, backend: ScriptedBackend) -> None:
        backend.read_request(sock)
        sock.sendall(b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n3\r\nabc\r\n")
        passed_on.wait(60)
        sock.sendall(b"no chunk\r\n")
        backend.stopping.wait(60)

    with scripted_backend(script) as backend, routing(backend.port) as router:
        with socket.create_connection(("127.0.0.1", router.port), timeout=60) as client:
            client.sendall(b"GET / HTTP/1.1\r\nHost: h\r\n\r\n")
            text = b""
            while piece := client.recv(65536):
                text += piece
                if b"abc" in text:
                    passed_on.set()
        assert text.startswith(b"HTTP/1.1 200") and not text.endswith(b"0\r\n\r\n")


def test_an_answer_until_the_close() -> None:
    for head in (
        b"HTTP/1.1 200 OK\r\n\r\n",
        b"HTTP/1.0 200 OK\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nconnection: close\r\n\r\n",
    ):
        with scripted_backend(answering(head + b"abc", b"def")) as backend, routing(backend.port) as router:
            assert router.get("/").body == b"abcdef"
            assert router.get("/").body == b"abcdef"
            assert backend.connections == 2


def test_an_http_1_0_backend_that_keeps_connections() -> None:
    head = b"HTTP/1.0 200 OK\r\nconnection: keep-alive\r\ncontent-length: 2\r\n\r\nok"
    with scripted_backend(answering(head, close=False)) as backend, routing(backend.port) as router:
        assert [router.get("/").body for _ in range(3)] == [b"ok"] * 3
        assert backend.connections == 1


def test_interim_answers_are_skipped() -> None:
    early = b"HTTP/1.1 103 Early Hints\r\nlink: </a>\r\n\r\n"
    with (
        scripted_backend(answering(b"HTTP/1.1 100 Continue\r\n\r\n" + early, early + OK)) as backend,
        routing(backend.port) as router,
    ):
        answer = router.get("/", "POST", b"x")
        assert (answer.status, answer.body) == (200, b"ok")


def test_an_answer_byte_by_byte() -> None:
    text = b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n2;ext=1\r\nok\r\n0\r\nTrailer: x\r\n\r\n"
    pieces = [text[at : at + 1] for at in range(len(text))]
    with scripted_backend(answering(*pieces, close=False)) as backend, routing(backend.port) as router:
        assert [router.get("/").body for _ in range(2)] == [b"ok", b"ok"]
        assert backend.connections == 1


@pytest.mark.parametrize(
    "excess",
    [
        OK + b"HTTP/1.1 200 OK\r\ncontent-length: 6\r\n\r\npoison",
        b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n2\r\nok\r\n0\r\n\r\n" + OK,
        b"HTTP/1.1 204 No Content\r\ncontent-length: 6\r\n\r\npoison",
    ],
)
def test_more_than_the_answer_never_reaches_the_next_client(excess: bytes) -> None:
    with scripted_backend(answering(excess, close=False)) as backend, routing(backend.port) as router:
        for _ in range(3):
            assert router.get("/").body in (b"ok", b"")
        assert backend.connections == 3


def test_unrequested_bytes_close_the_connection() -> None:
    def script(sock: socket.socket, backend: ScriptedBackend) -> None:
        while backend.read_request(sock):
            sock.sendall(OK)
            backend.stopping.wait(0.1)
            sock.sendall(b"HTTP/1.1 200 OK\r\ncontent-length: 6\r\n\r\npoison")

    with scripted_backend(script) as backend, routing(backend.port) as router:
        assert router.get("/").body == b"ok"
        pool = router.proxy.pools[router.proxy.backends.all[0]]
        eventually(lambda: not pool.all)
        assert router.get("/").body == b"ok"


def _closing_after(first: int) -> object:
    """Answers so many requests on a connection, and closes it at the next one."""

    def script(sock: socket.socket, backend: ScriptedBackend) -> None:
        for _ in range(first):
            if not backend.read_request(sock):
                return
            sock.sendall(OK)
        backend.read_request(sock)

    return script


@pytest.mark.parametrize(
    ("method", "status"), [("GET", 200), ("PUT", 200), ("DELETE", 200), ("POST", 502), ("PATCH", 502)]
)
def test_a_stale_connection_is_tried_again_only_for_what_may_be_repeated(method: str, status: int) -> None:
    with scripted_backend(_closing_after(1)) as backend, routing(backend.port, outliers=NO_EJECTION) as router:  # type: ignore[arg-type]
        assert router.get("/warm").status == 200
        assert router.get("/x", method, b"body" if method != "GET" else None).status == status
        assert router.stats().failed == (1 if status == 502 else 0)


@pytest.mark.parametrize("path", ["/v2/models/m/infer", "/v2/models/m/versions/2/infer", "/predict", "/predict/m"])
def test_inference_is_retried_if_configured(path: str) -> None:
    with scripted_backend(_closing_after(0)) as bad, scripted_backend(answering(OK)) as good:  # type: ignore[arg-type]
        for inference, statuses in ((False, [200, 502]), (True, [200, 200])):
            retries = RetrySettings(inference=inference)
            with routing(bad.port, good.port, policy="round-robin", retries=retries, outliers=NO_EJECTION) as router:
                assert sorted(router.get(path, "POST", b"{}").status for _ in range(2)) == statuses


@pytest.mark.parametrize("path", ["/v2/repository/models/m/load", "/v2/models/m/generate", "/predict/stream/x/y"])
def test_other_posts_are_never_tried_again_once_sent(path: str) -> None:
    with scripted_backend(_closing_after(0)) as bad, scripted_backend(answering(OK)) as good:  # type: ignore[arg-type]
        retries = RetrySettings(inference=True)
        with routing(bad.port, good.port, policy="round-robin", retries=retries, outliers=NO_EJECTION) as router:
            assert sorted(router.get(path, "POST", b"{}").status for _ in range(2)) == [200, 502]
            assert len(bad.seen) == 1


def test_a_request_that_never_reached_a_backend_is_always_sent_to_another() -> None:
    with serving(echo_site()) as good, routing(free_port(), good.port, outliers=NO_EJECTION) as router:
        for _ in range(10):
            assert router.get("/echo", "POST", b"x").body == b"x"
            assert router.get("/upload", "POST", bytes(300_000)).body == b"300000"
        assert router.stats(1).ok == 20 and router.stats(0).failed > 0


def test_tries_are_bounded() -> None:
    ports = [free_port() for _ in range(5)]
    retries = RetrySettings(tries=3)
    with routing(*ports, retries=retries, outliers=NO_EJECTION) as router:
        answer = router.get("/hello")
        assert answer.status == 502 and b"could not be reached" in answer.body
        assert sum(router.stats(place).requests for place in range(5)) == 3


def test_retries_stop_when_the_budget_is_spent() -> None:
    with serving(echo_site()) as good:
        retries = RetrySettings(budget=0.0, reserve=2)
        with routing(free_port(), good.port, policy="round-robin", retries=retries, outliers=NO_EJECTION) as router:
            statuses = [router.get("/hello").status for _ in range(10)]
            assert statuses.count(502) == 3 and router.proxy.budget.refused == 3


def test_a_backend_that_does_not_answer_is_504_and_is_not_retried() -> None:
    handlers = EchoHandlers()
    timeouts = TimeoutSettings(response_seconds=300)
    with serving(echo_site(handlers=handlers)) as server, routing(server.port, timeouts=timeouts) as router:
        answers: list[Answer] = []
        waiting = threading.Thread(target=lambda: answers.append(router.get("/hold")))
        waiting.start()
        eventually(lambda: handlers.held)
        router.sweep(seconds_later=299)
        assert router.proxy.backends.all[0].outstanding == 1
        router.sweep(seconds_later=301)
        waiting.join(60)
        answer = answers[0]
        assert answer.status == 504 and b"did not answer within 300 seconds" in answer.body
        assert len(handlers.held) == 1 and router.stats().failed == 1
        assert router.get("/hello").status == 200


def test_a_head_sent_byte_by_byte_has_no_more_time_than_any_other() -> None:
    def script(sock: socket.socket, backend: ScriptedBackend) -> None:
        backend.read_request(sock)
        sock.sendall(b"HTTP/1.1 200 OK\r\nx: ")
        while not backend.stopping.wait(0.02):
            sock.sendall(b"y")

    timeouts = TimeoutSettings(response_seconds=0.3)
    with scripted_backend(script) as backend, routing(backend.port, timeouts=timeouts) as router:
        assert router.get("/").status == 504


def test_a_backend_that_falls_silent_in_its_answer_is_cut() -> None:
    def script(sock: socket.socket, backend: ScriptedBackend) -> None:
        backend.read_request(sock)
        sock.sendall(b"HTTP/1.1 200 OK\r\ncontent-length: 500000\r\n\r\nabc")
        backend.stopping.wait(60)

    timeouts = TimeoutSettings(idle_seconds=0.3)
    with scripted_backend(script) as backend, routing(backend.port, timeouts=timeouts) as router:
        text = raw(router.port, b"GET / HTTP/1.1\r\nHost: h\r\n\r\n")
        assert text.endswith(b"\r\n\r\nabc")


def test_idle_connections_are_closed_in_time() -> None:
    timeouts = TimeoutSettings(keep_alive_seconds=0.1)
    with serving(echo_site()) as server, routing(server.port, timeouts=timeouts) as router:
        assert router.get("/hello").status == 200
        pool = router.proxy.pools[router.proxy.backends.all[0]]
        eventually(lambda: not pool.all)


def test_failing_backends_are_ejected_and_others_take_over() -> None:
    with scripted_backend(answering(BAD_ANSWERS["garbage"])) as bad, serving(echo_site()) as good:
        outliers = OutlierSettings(consecutive_failures=3, ejection_seconds=300)
        with routing(bad.port, good.port, policy="round-robin", outliers=outliers) as router:
            statuses = [router.get("/hello").status for _ in range(30)]
            assert statuses.count(502) == 3
            state = json.loads(router.get("/router/status").body)["backends"][0]
            assert state["state"] == "ejected" and "requests to it failed" in state["reason"]
