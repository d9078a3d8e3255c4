# SPDX-License-Identifier: Apache-2.0
"""Loops against real servers: what stalls is seen, and every request that fails is counted under its kind."""

from __future__ import annotations

import asyncio
import socket
import ssl
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import trustme
import uvloop

from headrace.client.sockets import Address
from headrace.net.http.exchange import Exchange
from headrace.net.http.heads import OK_PLAIN, ResponseHead
from headrace.net.tls import TlsFiles
from headrace.programs.loadtest.connections import HttpTarget
from headrace.programs.loadtest.loops import Arrivals, ClosedLoop, OpenLoop, Timer, drive
from headrace.programs.loadtest.results import ClientCpu, Recording, RunResults, run_results
from support.ports import free_port
from support.serving import EchoHandlers, echo_site, serving


def request(path: str) -> bytes:
    return f"GET {path} HTTP/1.1\r\nhost: test\r\n\r\n".encode()


def run(
    port: int,
    path: str,
    *,
    rate: float | None = None,
    workers: int = 2,
    seconds: float = 0.4,
    timeout: float = 30.0,
    tls: ssl.SSLContext | None = None,
) -> RunResults:
    async def main() -> RunResults:
        scheme = "http" if tls is None else "https"
        target = HttpTarget(Address.parse(f"{scheme}://127.0.0.1:{port}"), request(path), tls)
        start_time = time.perf_counter()
        recording = Recording(start_time, start_time + seconds)
        loop: ClosedLoop | OpenLoop
        if rate is None:
            loop = ClosedLoop(target, workers, recording)
        else:
            loop = OpenLoop(target, Arrivals(rate, uniform=True), recording, start_time=start_time)
        await drive(loop, recording, timeout, lambda now: None)
        await target.close()
        mode = "closed" if rate is None else "open"
        return run_results(recording, mode=mode, load=rate or workers, rows=1, cpu=ClientCpu(0, 0), server=None)

    return uvloop.run(main())


class Handlers(EchoHandlers):
    """One stall, errors now and then, and connections that are closed."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def hello(self, exchange: Exchange) -> None:
        self.count += 1
        if self.count == 5:
            time.sleep(0.2)  # the server's only thread: everybody waits
        exchange.respond(OK_PLAIN, b"hello")

    def raises(self, exchange: Exchange) -> None:
        self.count += 1
        if self.count % 3 == 0:
            exchange.respond(ResponseHead(503, [(b"content-type", b"application/json")]), b'{"error":"come later"}')
        else:
            exchange.respond(OK_PLAIN, b"hello")


def test_a_stall_shows_in_an_open_loop_and_hides_in_a_closed_one() -> None:
    with serving(echo_site(handlers=Handlers())) as server:
        opened = run(server.port, "/hello", rate=200.0, seconds=1.0)
    with serving(echo_site(handlers=Handlers())) as server:
        closed = run(server.port, "/hello", workers=1, seconds=1.0)
    # 40 of 200 requests were due while nothing was answered; they waited from 200 ms down to nothing.
    assert opened.at(99) > 150
    assert opened.at(90) > 50
    assert opened.requests == 200
    # One had to wait: nobody else asked meanwhile.
    assert closed.max_ms > 190
    assert sum(latency_ms > 100 for latency_ms in closed.latencies_ms) < sum(
        latency_ms > 100 for latency_ms in opened.latencies_ms
    )


def test_errors_are_counted_by_kind_with_their_text() -> None:
    handlers = Handlers()
    with serving(echo_site(handlers=handlers)) as server:
        result = run(server.port, "/raise")
    assert result.failed == result.errors["HTTP 503"] > 0
    assert result.examples["HTTP 503"] == "come later"
    assert result.failed == pytest.approx(handlers.count / 3, abs=1)
    assert 0 <= handlers.count - result.requests <= 2  # one of each connection may begin just after the window
    assert 0 <= len(result.latencies_ms) - result.finished <= 2  # the last of each connection ended after the window


def test_a_path_that_is_not_there_is_an_error_too() -> None:
    with serving(echo_site()) as server:
        result = run(server.port, "/nowhere")
    assert set(result.errors) == {"HTTP 404"}
    assert not len(result.latencies_ms)


def test_answers_in_chunks_are_answers() -> None:
    with serving(echo_site()) as server:
        result = run(server.port, "/stream/5")
    assert result.finished > 0
    assert not result.errors


def test_requests_without_an_answer_time_out() -> None:
    with serving(echo_site()) as server:
        result = run(server.port, "/hold", workers=3, seconds=0.3, timeout=0.5)
    assert result.errors == {"timeout": 3}


def test_an_unreachable_server_is_reported_and_retried_slowly() -> None:
    result = run(free_port(), "/hello", workers=2, seconds=0.3)
    assert set(result.errors) == {"no connection"}
    assert 2 <= result.failed < 30


@contextmanager
def speaking(answer: Callable[[socket.socket], None]) -> Iterator[int]:
    """A server that does something to each connection, and closes it."""
    listener = socket.create_server(("127.0.0.1", 0))

    def serve() -> None:
        while True:
            try:
                connection, _ = listener.accept()
            except OSError:
                return
            with connection:
                connection.recv(4096)
                answer(connection)

    thread = threading.Thread(target=serve, daemon=True)
    thread.start()
    try:
        yield listener.getsockname()[1]
    finally:
        listener.shutdown(socket.SHUT_RDWR)
        listener.close()
        thread.join(30)


def test_a_connection_that_breaks_is_an_error_and_is_made_again() -> None:
    with speaking(lambda connection: None) as port:
        result = run(port, "/hello", workers=1)
    assert set(result.errors) == {"connection lost"}
    assert result.failed > 1


def test_a_server_that_closes_after_each_answer_is_not_an_error() -> None:
    answer = b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\nconnection: close\r\n\r\nok"
    with speaking(lambda connection: connection.sendall(answer)) as port:
        result = run(port, "/hello", workers=1)
    assert not result.errors
    assert result.finished > 1


def test_bytes_that_are_not_http_are_reported() -> None:
    with speaking(lambda connection: connection.sendall(b"SSH-2.0-OpenSSH\r\n")) as port:
        result = run(port, "/hello", workers=1, seconds=0.2)
    assert set(result.errors) == {"no HTTP"}


def test_the_open_loop_sends_all_that_is_due_and_nothing_before_it_is() -> None:
    with serving(echo_site()) as server:
        result = run(server.port, "/hello", rate=300.0, seconds=0.5)
    assert result.requests == 150
    assert min(result.late_ms) >= 0


def test_a_timer_of_the_kernel_wakes_the_open_loop() -> None:
    """Loops wait in whole milliseconds: with theirs, every request would be half a millisecond late."""

    async def main() -> None:
        rings: asyncio.Queue[None] = asyncio.Queue()
        timer = Timer(lambda: rings.put_nowait(None))
        timer.set(3600.0)
        timer.set(0.0003)
        assert timer._handle is None, "the loop was asked"
        await asyncio.wait_for(rings.get(), 30)
        timer.close()
        assert rings.empty()

    uvloop.run(main())


def test_closing_leaves_no_task_behind() -> None:
    async def main() -> int:
        target = HttpTarget(Address.parse(f"http://127.0.0.1:{port}"), request("/hold"))
        connection = target.new_connection()
        connection.send(lambda kind, text: pytest.fail("nobody should be told"))
        await target.close()
        await asyncio.sleep(0.01)
        return len(asyncio.all_tasks())

    with serving(echo_site()) as server:
        port = server.port
        assert uvloop.run(main()) == 1


def test_tls_with_an_authority_of_ones_own(tmp_path: Path) -> None:
    authority = trustme.CA()
    created = authority.issue_cert("127.0.0.1")
    cert, key = tmp_path / "server.pem", tmp_path / "server.key"
    created.private_key_pem.write_to_path(str(key))
    created.cert_chain_pems[0].write_to_path(str(cert))
    trusting = ssl.create_default_context()
    authority.configure_trust(trusting)
    with serving(echo_site(), tls=TlsFiles(str(cert), str(key))) as server:
        assert run(server.port, "/hello", tls=trusting).finished > 0
        doubtful = run(server.port, "/hello", tls=ssl.create_default_context())
    assert set(doubtful.errors) == {"no connection"}
