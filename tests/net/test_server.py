# SPDX-License-Identifier: Apache-2.0
"""Serving, sweeping and draining with stand-in connections that answer `ok LINE` to every line."""

from __future__ import annotations

import asyncio
import itertools
import os
import re
import select
import signal
import socket
import sys
import textwrap
import threading
import time
from collections.abc import Coroutine, Iterator
from pathlib import Path
from typing import Any, cast

import pytest
import uvloop

from headrace.core.errors import FailedPrecondition
from headrace.net.http.heads import OK_PLAIN
from headrace.net.http.routes import Routes
from headrace.net.negotiation import NegotiatingProtocol
from headrace.net.server import IDLE_SWEEP_SECONDS, SWEEP_SECONDS, HttpServer, drain_servers, run_until_signal
from headrace.net.site import Site
from headrace.net.sockets import Address, Listener, reserve_port
from support.programs import Program
from support.virtual_time import run_virtual
from support.waiting import eventually_async

LOOPBACK = Address("127.0.0.1", 0)
ROOT = Path(__file__).parents[2]


def has_ipv6() -> bool:
    try:
        with socket.socket(socket.AF_INET6) as sock:
            sock.bind(("::1", 0))
    except OSError:
        return False
    return True


IPV6 = pytest.param("::1", marks=pytest.mark.skipif(not has_ipv6(), reason="this machine has no IPv6"))


class Line(asyncio.Protocol):
    """Answers each line; one that says `hold` is answered when `release` is called. Draining closes an idle one."""

    def __init__(self, site: Site) -> None:
        self.site = site
        self.buffer = b""
        self.held = 0
        self.drains = 0
        self.swept: list[float] = []

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast("asyncio.Transport", transport)  # uvloop's are no subclasses
        self.site.connections.add(self)

    def data_received(self, data: bytes) -> None:
        self.buffer += data
        while b"\n" in self.buffer:
            line, _, self.buffer = self.buffer.partition(b"\n")
            if line == b"hold":
                self.held += 1
            else:
                self.answer(line)

    def answer(self, line: bytes) -> None:
        self.transport.write(b"ok " + line + b"\n")
        if self.site.draining:
            self.transport.close()

    def release(self) -> None:
        self.held -= 1
        self.answer(b"hold")

    def connection_lost(self, exc: Exception | None) -> None:
        self.site.connections.discard(self)

    def drain(self) -> None:
        self.drains += 1
        if not self.held:
            self.transport.close()

    def sweep(self, now: float) -> None:
        self.swept.append(now)

    def expire(self) -> None:
        self.transport.close()

    def abort(self) -> None:
        self.transport.abort()


OPEN: list[HttpServer | socket.socket] = []
"""Closed after each test, whatever became of it: with warnings as errors, uvloop hangs on handles left open."""


@pytest.fixture(autouse=True)
def _close_clients() -> Iterator[None]:
    yield
    while OPEN:
        left = OPEN.pop()
        if isinstance(left, socket.socket):
            left.close()


def run(main: Coroutine[Any, Any, None], *, virtual: bool = False) -> None:
    """Run a test in uvloop, or in virtual time."""

    async def bounded() -> None:
        try:
            await asyncio.wait_for(main, 200)
        finally:
            for left in OPEN:
                if isinstance(left, HttpServer):
                    left.abort()
            await asyncio.sleep(0.01)

    if virtual:
        run_virtual(bounded())
    else:
        uvloop.run(bounded())


async def started(site: Site, address: Address = LOOPBACK, **options: Any) -> HttpServer:
    server = HttpServer(site, address, lambda: Line(site), **options)
    OPEN.append(server)
    await server.start()
    return server


def lines_of(site: Site) -> list[Line]:
    return [connection for connection in site.connections if isinstance(connection, Line)]


def connected(address: Address) -> socket.socket:
    """A blocking client. `connect` returns when the kernel has completed the connection, accepted or not."""
    if address.path:
        client = socket.socket(socket.AF_UNIX)
        client.settimeout(30)
        client.connect(address.path)
    else:
        client = socket.create_connection((address.host, address.port), timeout=30)
    OPEN.append(client)
    return client


def send_line(client: socket.socket, text: bytes) -> None:
    client.sendall(text + b"\n")


def read_all(client: socket.socket) -> bytes:
    """Everything up to a clean end; a reset raises."""
    with client:
        parts = []
        while part := client.recv(4096):
            parts.append(part)
        return b"".join(parts)


async def answers(*clients: socket.socket) -> list[bytes]:
    return list(await asyncio.gather(*(asyncio.to_thread(read_all, client) for client in clients)))


@pytest.mark.parametrize("host", ["127.0.0.1", IPV6])
def test_tcp_serves_with_nodelay(host: str) -> None:
    async def main() -> None:
        site = Site()
        server = await started(site, Address(host, 0))
        assert server.port == server.address.port > 0
        client = connected(server.address)
        send_line(client, b"a")
        await eventually_async(lambda: site.connections)
        (line,) = lines_of(site)
        sock = line.transport.get_extra_info("socket")
        assert sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY) == 1
        assert await server.drain(30) == 0
        assert await answers(client) == [b"ok a\n"]
        with pytest.raises(ConnectionRefusedError):
            connected(server.address)

    run(main())


def test_a_unix_socket_serves_and_is_deleted_after_the_drain(tmp_path: Path) -> None:
    async def main() -> None:
        address = Address(path=str(tmp_path / "s"))
        site = Site()
        server = await started(site, address)
        assert server.port == 0
        client = connected(address)
        send_line(client, b"a")
        await eventually_async(lambda: site.connections)
        assert await server.drain(30) == 0
        assert await answers(client) == [b"ok a\n"]
        assert not (tmp_path / "s").exists()

    run(main())


def test_a_port_in_use_fails_at_the_start() -> None:
    async def main() -> None:
        server = await started(Site())
        with pytest.raises(FailedPrecondition, match=f"127.0.0.1:{server.port}"):
            await started(Site(), server.address)

    run(main())


def test_the_clock_is_set_before_the_first_connection_and_keeps_running() -> None:
    async def main() -> None:
        site = Site()
        before = asyncio.get_running_loop().time()
        server = await started(site)
        assert site.now == before > 0
        connected(server.address)
        await eventually_async(lambda: lines_of(site) and lines_of(site)[0].swept)
        (line,) = lines_of(site)
        assert line.swept == [site.now] and site.now == pytest.approx(before + SWEEP_SECONDS, abs=0.1)

    run(main(), virtual=True)


def test_a_stall_of_the_event_loop_does_not_time_clients_out() -> None:
    async def main() -> None:
        site = Site()
        server = await started(site)
        connected(server.address)
        await eventually_async(lambda: site.connections)
        (line,) = lines_of(site)
        await eventually_async(lambda: line.swept)
        timer = server._timer
        assert timer is not None
        timer.cancel()
        await asyncio.sleep(3 * SWEEP_SECONDS)  # as if the loop had stalled: the timer is late
        count = len(line.swept)
        server._tick()
        assert len(line.swept) == count and site.now == pytest.approx(asyncio.get_running_loop().time(), abs=0.1)
        # One that is late each time sweeps every other time: a busy server still closes dead connections.
        assert server._timer is not None
        server._timer.cancel()
        await asyncio.sleep(3 * SWEEP_SECONDS)
        server._tick()
        assert len(line.swept) == count + 1

    run(main(), virtual=True)


def test_a_failing_sweep_is_logged_and_the_others_continue(caplog: pytest.LogCaptureFixture) -> None:
    async def main() -> None:
        site = Site()
        server = await started(site)
        for _ in range(5):
            connected(server.address)
        await eventually_async(lambda: len(site.connections) == 5)
        broken, *sound = lines_of(site)

        def fail(now: float) -> None:
            raise RuntimeError("broken sweep")

        broken.sweep = fail  # type: ignore[method-assign]
        await eventually_async(lambda: all(len(line.swept) >= 2 for line in sound))  # the sweep after the failure, too
        assert "broken sweep" in caplog.text

    run(main(), virtual=True)


def test_a_server_without_connections_sleeps_and_has_the_right_time_for_the_next_one() -> None:
    async def main() -> None:
        site = Site()
        server = await started(site)
        server._tick()
        assert server._timer is not None
        assert server._timer.when() > asyncio.get_running_loop().time() + IDLE_SWEEP_SECONDS / 2
        site.tick(0.0)  # as if it had rested for long
        before = asyncio.get_running_loop().time()
        connected(server.address)
        await eventually_async(lambda: site.connections)
        assert site.now >= before
        await eventually_async(lambda: lines_of(site)[0].swept)

    run(main(), virtual=True)


def test_servers_of_one_site_sweep_it_once_a_second_together() -> None:
    async def main() -> None:
        site = Site()
        servers = [await started(site) for _ in range(3)]
        connected(servers[0].address)
        await eventually_async(lambda: site.connections)
        (line,) = lines_of(site)
        await eventually_async(lambda: len(line.swept) >= 5)
        # If each of the three swept, there would be three at nearly the same time.
        assert min(late - early for early, late in itertools.pairwise(line.swept)) >= SWEEP_SECONDS / 2

    run(main(), virtual=True)


@pytest.mark.parametrize("kind", ["unix", "tcp"])
def test_connections_in_the_backlog_are_answered(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    # As where the kernel takes no filter: the drain does not wait, so the loop cannot accept them in the ordinary way.
    if kind == "tcp":
        monkeypatch.setattr(Listener, "refuse_new", lambda self: False)

    async def main() -> None:
        site = Site()
        server = await started(site, Address(path=str(tmp_path / "s")) if kind == "unix" else LOOPBACK)
        # The loop does not turn between here and the drain, so nothing accepts these.
        early = [connected(server.address) for _ in range(20)]
        for number, client in enumerate(early):
            send_line(client, b"%d" % number)
        late = connected(server.address)
        assert not site.connections
        caplog.set_level("INFO")
        draining = asyncio.ensure_future(server.drain(30))
        await eventually_async(lambda: "waiting connections" in caplog.text)
        # Not quite all: the loop takes one at each turn, and it turns once or twice on the way.
        adopted = re.search(r"adopted (\d+) waiting", caplog.text)
        assert adopted is not None
        assert int(adopted[1]) >= 10
        if kind == "tcp":
            await eventually_async(lambda: site.connections)
            sock = lines_of(site)[0].transport.get_extra_info("socket")
            assert sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY) == 1
        send_line(late, b"late")
        assert await draining == 0
        assert await answers(*early, late) == [b"ok %d\n" % number for number in range(20)] + [b"ok late\n"]

    run(main())


def test_http_requests_in_the_backlog_are_answered(tmp_path: Path) -> None:
    """The same with the connections of the product."""

    async def main() -> None:
        routes = Routes()
        routes.add("GET", "/hello", lambda exchange: exchange.respond(OK_PLAIN, b"hello"))
        site = Site(routes)
        server = HttpServer(site, Address(path=str(tmp_path / "s")), lambda: NegotiatingProtocol(site))
        OPEN.append(server)
        await server.start()
        clients = [connected(server.address) for _ in range(20)]
        for client in clients:
            client.sendall(b"GET /hello HTTP/1.1\r\nhost: x\r\n\r\n")
        draining = asyncio.ensure_future(server.drain(20))
        for answer in await answers(*clients):
            head, _, body = answer.partition(b"\r\n\r\n")
            assert head.startswith(b"HTTP/1.1 200 ")
            assert b"connection: close" in head.lower()
            assert body == b"hello"
        assert await draining == 0

    run(main())


def test_a_draining_port_lets_no_connection_begin() -> None:
    async def main() -> None:
        probe = Listener(LOOPBACK)
        filters = probe.refuse_new()
        probe.close()
        if not filters:
            pytest.skip("this kernel takes no socket filters")
        server = await started(Site())
        draining = asyncio.ensure_future(server.drain(30))
        for _ in range(3):
            await asyncio.sleep(0)
        with socket.socket() as client:
            client.setblocking(False)
            client.connect_ex(("127.0.0.1", server.port))
            # Over loopback a handshake is done when connect_ex returns, and a refusal too; this one waits.
            assert select.select([], [client], [], 0) == ([], [], [])
        assert await draining == 0

    run(main())


@pytest.mark.parametrize("rounds", [1, pytest.param(6, marks=pytest.mark.slow)])
@pytest.mark.parametrize("shared_port", [False, True])
def test_no_client_is_reset_when_a_busy_server_drains(shared_port: bool, rounds: int) -> None:
    """Clients connect as fast as they can. Every connection that `connect` promised must be answered."""
    stop = threading.Event()
    answered, refused, lost = [0], [0], []

    def hammer(address: Address) -> None:
        while not stop.is_set():
            try:
                client = connected(address)
            except ConnectionRefusedError:
                refused[0] += 1
                time.sleep(0.01)
                continue
            try:
                send_line(client, b"x")
                if client.recv(100) != b"ok x\n":
                    lost.append("closed without an answer")
                answered[0] += 1
            except OSError as error:
                lost.append(repr(error))
            finally:
                client.close()

    async def main() -> None:
        address, held = reserve_port(LOOPBACK)
        with held:
            sibling = await started(Site(), address, reuse_port=True) if shared_port else None
            threads = [threading.Thread(target=hammer, args=(address,)) for _ in range(4)]
            for round_number in range(rounds):
                server = await started(Site(), address, reuse_port=True)
                if not round_number:
                    for thread in threads:
                        thread.start()
                goal = answered[0] + 15
                await eventually_async(lambda goal=goal: answered[0] >= goal)  # type: ignore[misc]
                assert await server.drain(30) == 0
            stop.set()
            await asyncio.gather(*(asyncio.to_thread(thread.join) for thread in threads))
            if sibling is not None:
                await sibling.drain(30)

    run(main())
    assert lost == []
    assert answered[0] >= 15 * rounds
    if shared_port:
        assert refused == [0]


def test_work_in_flight_is_finished_and_each_connection_is_notified_once() -> None:
    async def main() -> None:
        site = Site()
        first, second = await started(site), await started(site)  # two addresses, one site
        busy, idle, other = connected(first.address), connected(first.address), connected(second.address)
        send_line(busy, b"hold")
        send_line(other, b"hold")
        await eventually_async(lambda: len(site.connections) == 3 and sum(line.held for line in lines_of(site)) == 2)
        everyone = lines_of(site)
        draining = asyncio.ensure_future(drain_servers([first, second], 20))
        await eventually_async(lambda: len(site.connections) == 2)
        assert site.draining
        await asyncio.sleep(0.1)  # some looks later
        assert not draining.done()
        for line in lines_of(site):
            line.release()
        assert await draining == 0
        assert await answers(busy, idle, other) == [b"ok hold\n", b"", b"ok hold\n"]
        assert [line.drains for line in everyone] == [1, 1, 1]

    run(main())


def test_a_request_unread_at_the_start_of_the_drain_is_answered() -> None:
    async def main() -> None:
        site = Site()
        server = await started(site)
        client = connected(server.address)
        await eventually_async(lambda: site.connections)
        send_line(client, b"unread")  # in the socket, not yet in the loop; closing now would reset it
        assert await server.drain(30) == 0
        assert await answers(client) == [b"ok unread\n"]

    run(main())


def test_when_the_grace_is_over_the_rest_is_cut_and_counted(caplog: pytest.LogCaptureFixture) -> None:
    async def main() -> None:
        site = Site()
        server = await started(site)
        clients = [connected(server.address) for _ in range(3)]
        for client in clients:
            send_line(client, b"hold")
        await eventually_async(lambda: sum(line.held for line in lines_of(site)) == 3)
        clock = asyncio.get_running_loop().time  # that by which the grace is counted
        begun = clock()
        assert await server.drain(1.5) == 3
        assert clock() - begun >= 1.5
        assert "3 connections were cut" in caplog.text
        assert not site.connections

    run(main(), virtual=True)


def test_a_drain_that_fails_is_logged_and_the_others_drain(caplog: pytest.LogCaptureFixture) -> None:
    async def main() -> None:
        site = Site()
        server = await started(site)
        for _ in range(3):
            connected(server.address)
        await eventually_async(lambda: len(site.connections) == 3)
        broken = lines_of(site)[0]

        def fail() -> None:
            raise RuntimeError("broken drain")

        broken.drain = fail  # type: ignore[method-assign]
        assert await server.drain(2) == 1
        assert caplog.text.count("broken drain") >= 1

    run(main(), virtual=True)


@pytest.fixture
def _same_signal(monkeypatch: pytest.MonkeyPatch) -> None:
    """Signals count as one within a tenth of a second, not within one second."""
    monkeypatch.setattr("headrace.net.server.SAME_SIGNAL_SECONDS", 0.1)


async def signalled(number: signal.Signals) -> None:
    """Send this process a signal, when `run_until_signal` takes it."""
    await eventually_async(lambda: signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL)
    os.kill(os.getpid(), number)


async def signals_given_back() -> None:
    """Later signals end the process again, as before."""
    await eventually_async(lambda: signal.getsignal(signal.SIGTERM) is signal.SIG_DFL)


@pytest.mark.usefixtures("_same_signal")
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_drains_every_server_and_returns_zero(
    number: signal.Signals, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")

    async def main() -> None:
        sites = [Site(), Site()]
        addresses = [LOOPBACK, Address(path=str(tmp_path / "s"))]
        servers = [await started(site, address) for site, address in zip(sites, addresses, strict=True)]
        clients = [connected(server.address) for server in servers]
        for client in clients:
            send_line(client, b"hold")
        await eventually_async(lambda: all(line.held for site in sites for line in lines_of(site) or [Line(site)]))
        ending = asyncio.ensure_future(run_until_signal(servers, 100))
        await signalled(number)
        os.kill(os.getpid(), number)  # as from a terminal and a supervisor: one and the same
        await eventually_async(lambda: all(line.drains for site in sites for line in lines_of(site)))
        for site in sites:
            lines_of(site)[0].release()
        assert await answers(*clients) == [b"ok hold\n"] * 2
        assert await ending == 0
        await signals_given_back()
        assert f"{number.name}: draining" in caplog.text
        assert not (tmp_path / "s").exists()

    run(main())


@pytest.mark.usefixtures("_same_signal")
def test_a_second_signal_aborts_every_connection() -> None:
    async def main() -> None:
        site = Site()
        server = await started(site)
        send_line(connected(server.address), b"hold")
        await eventually_async(lambda: any(line.held for line in lines_of(site)))
        ending = asyncio.ensure_future(run_until_signal([server], 1000))
        await signalled(signal.SIGTERM)
        await eventually_async(lambda: site.draining)
        await asyncio.sleep(0.15)  # longer than what counts as one signal
        assert not ending.done()
        os.kill(os.getpid(), signal.SIGTERM)
        assert await ending == 128 + signal.SIGTERM
        await eventually_async(lambda: not site.connections)
        if signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL:  # else we stood still for long, and it would end us
            os.kill(os.getpid(), signal.SIGTERM)  # a copy that comes late must not kill the program while it tidies up
        await asyncio.sleep(0.05)
        await signals_given_back()

    run(main())


@pytest.mark.usefixtures("_same_signal")
def test_a_grace_that_is_too_short_returns_one(caplog: pytest.LogCaptureFixture) -> None:
    async def main() -> None:
        site = Site()
        server = await started(site)
        for _ in range(2):
            send_line(connected(server.address), b"hold")
        await eventually_async(lambda: sum(line.held for line in lines_of(site)) == 2)
        ending = asyncio.ensure_future(run_until_signal([server], 0.3))
        await signalled(signal.SIGTERM)
        assert await ending == 1
        await signals_given_back()
        assert "2 connections were cut" in caplog.text

    run(main())


SERVER_SCRIPT = """
    import asyncio, logging, sys
    sys.path[:0] = [{root!r}, {tests!r}, {here!r}]
    import uvloop
    from test_server import Line
    from headrace.net.server import HttpServer, run_until_signal
    from headrace.net.site import Site
    from headrace.net.sockets import Address

    class Held(Line):
        def drain(self):
            super().drain()
            if self.held:
                asyncio.get_running_loop().call_later({hold}, self.release)

    async def main():
        logging.basicConfig(level="INFO")
        servers = []
        for text in ("127.0.0.1:0", "unix:{path}"):
            site = Site()
            servers.append(HttpServer(site, Address.parse(text), lambda site=site: Held(site)))
            await servers[-1].start()
        return await run_until_signal(servers, {grace})

    sys.exit(uvloop.run(main()))
"""


class Process(Program):
    """A server as a process of its own, on a TCP port and a UNIX path."""

    def __init__(self, path: Path, *, hold: float, grace: float) -> None:
        here = Path(__file__).parent
        script = textwrap.dedent(SERVER_SCRIPT).format(
            root=str(ROOT), tests=str(here.parent), here=str(here), path=path, hold=hold, grace=grace
        )
        command = (sys.executable, "-c", script)
        super().__init__(command=command, log=path.with_name("log"), ready=f"listening on unix:{path}")
        self._path = path

    def busy_clients(self) -> list[socket.socket]:
        """Clients whose request is surely in the server's hands."""
        clients = [connected(address) for address in (Address("127.0.0.1", self.port), Address(path=str(self._path)))]
        for client in clients:
            client.sendall(b"first\nhold\n")
            assert client.recv(100) == b"ok first\n"
        return clients


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_drains_every_server_and_exits_zero(number: signal.Signals, tmp_path: Path) -> None:
    with Process(tmp_path / "s", hold=0.5, grace=20) as process:
        clients = process.busy_clients()
        process.send(number)
        process.send(number)  # as from a terminal and a supervisor: one and the same
        assert [read_all(client) for client in clients] == [b"ok hold\n"] * 2
        assert process.wait() == 0, process.log
        assert f"{number.name}: draining" in process.log
    assert not (tmp_path / "s").exists()


@pytest.mark.slow
def test_a_second_signal_cuts_immediately(tmp_path: Path) -> None:
    with Process(tmp_path / "s", hold=1000, grace=1000) as process:
        process.busy_clients()
        process.send(signal.SIGTERM)
        process.wait_for("draining")
        time.sleep(1.5)  # longer than what counts as one signal
        assert process.process.poll() is None
        process.send(signal.SIGINT)
        assert process.wait() == 128 + signal.SIGINT, process.log
        assert "stopped without waiting" in process.log
        assert "Traceback" not in process.log
    assert not (tmp_path / "s").exists()


@pytest.mark.slow
def test_a_grace_that_is_too_short_exits_one(tmp_path: Path) -> None:
    with Process(tmp_path / "s", hold=1000, grace=1) as process:
        process.busy_clients()
        process.send(signal.SIGTERM)
        assert process.wait() == 1, process.log
        assert "2 connections were cut" in process.log
