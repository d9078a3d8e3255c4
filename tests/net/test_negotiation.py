# SPDX-License-Identifier: Apache-2.0
"""HTTP/1.1 or HTTP/2: told by the first bytes, or by ALPN. And clients that do not say."""

from __future__ import annotations

import asyncio
import socket
import ssl
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import trustme

from headrace.core.limits import Limits
from headrace.net.http1.connection import Http1Connection
from headrace.net.http2.connection import Http2Connection
from headrace.net.negotiation import NegotiatingProtocol, feed
from headrace.net.site import Site
from headrace.net.tls import TlsFiles
from support.serving import EchoHandlers, Serving, echo_site, serving
from support.waiting import eventually

PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
SETTINGS = b"\x00\x00\x00\x04\x00\x00\x00\x00\x00"
HANDLERS = EchoHandlers()
"""Of the server with TLS."""
GET = b"GET /hello HTTP/1.1\r\nHost: test\r\n\r\n"


class Transport(asyncio.Transport):
    """Remembers what a protocol did with it."""

    def __init__(self, alpn: str | None = None, *, tls: bool = False) -> None:
        super().__init__()
        self.written = bytearray()
        self.protocol: asyncio.BaseProtocol | None = None
        self.closed = False
        self._alpn = alpn
        self._tls = tls

    def get_extra_info(self, name: str, default: Any = None) -> Any:
        if name == "ssl_object" and self._tls:
            return self
        return ("192.0.2.1", 4242) if name == "peername" else default

    def selected_alpn_protocol(self) -> str | None:
        return self._alpn

    def set_protocol(self, protocol: asyncio.BaseProtocol) -> None:
        self.protocol = protocol

    def write(self, data: bytes | bytearray | memoryview) -> None:
        self.written += data

    def writelines(self, list_of_data: Any) -> None:
        for data in list_of_data:
            self.written += data

    def can_write_eof(self) -> bool:
        return True

    def write_eof(self) -> None:
        pass

    def is_closing(self) -> bool:
        return self.closed

    def close(self) -> None:
        self.closed = True

    def abort(self) -> None:
        self.closed = True

    def pause_reading(self) -> None:
        pass

    def resume_reading(self) -> None:
        pass

    def get_write_buffer_size(self) -> int:
        return 0


def negotiate(site: Site, *pieces: bytes, transport: Transport | None = None) -> Transport:
    """Feed pieces to a new connection: first to the negotiation, and after it to whatever took over."""
    transport = transport or Transport()
    first = NegotiatingProtocol(site)
    transport.protocol = first
    first.connection_made(transport)
    for piece in pieces:
        feed(transport.protocol, piece)
    return transport


@pytest.fixture
def site() -> Site:
    return echo_site()()


class TestFirstBytes:
    def test_a_preface_cut_anywhere(self, site: Site) -> None:
        whole = negotiate(site, PREFACE + SETTINGS)
        assert isinstance(whole.protocol, Http2Connection)
        for cut in range(1, len(PREFACE)):
            pieces = negotiate(site, PREFACE[:cut], PREFACE[cut:] + SETTINGS)
            assert isinstance(pieces.protocol, Http2Connection), cut
            assert pieces.written == whole.written, cut

    def test_a_preface_byte_by_byte(self, site: Site) -> None:
        whole = negotiate(site, PREFACE + SETTINGS)
        pieces = negotiate(site, *(bytes([byte]) for byte in PREFACE + SETTINGS))
        assert pieces.written == whole.written

    @pytest.mark.parametrize("size", range(1, 10))
    def test_a_request_cut_anywhere(self, site: Site, size: int) -> None:
        negotiated = negotiate(site, *(GET[start : start + size] for start in range(0, len(GET), size)))
        assert isinstance(negotiated.protocol, Http1Connection)
        assert negotiated.written.endswith(b"hello")

    @pytest.mark.parametrize("method", ["POST", "PUT", "PATCH", "PROPFIND"])
    def test_a_method_that_starts_like_the_preface(self, site: Site, method: str) -> None:
        request = f"{method} /echo HTTP/1.1\r\nHost: test\r\nContent-Length: 3\r\n\r\nabc".encode()
        negotiated = negotiate(site, *(bytes([byte]) for byte in request))
        assert isinstance(negotiated.protocol, Http1Connection)
        assert negotiated.written.startswith(b"HTTP/1.1 200" if method in ("POST", "PUT") else b"HTTP/1.1 405")

    def test_what_is_nearly_a_preface_is_a_bad_request(self, site: Site) -> None:
        for cut in range(1, 16):
            negotiated = negotiate(site, PREFACE[:cut], b"\x00\x01\x02")
            assert isinstance(negotiated.protocol, Http1Connection), cut
            assert negotiated.written.startswith(b"HTTP/1.1 400"), cut

    def test_a_large_first_packet_is_passed_on_whole(self, site: Site) -> None:
        body = bytes(range(256)) * 4000
        request = b"POST /echo HTTP/1.1\r\nHost: test\r\nContent-Length: %d\r\n\r\n" % len(body)
        negotiated = negotiate(site, b"PO", request[2:] + body)
        assert negotiated.written.endswith(b"\r\n\r\n" + body)

    def test_each_connection_is_counted_once(self, site: Site) -> None:
        negotiated = negotiate(site)
        assert [id(connection) for connection in site.connections] == [id(negotiated.protocol)]
        assert isinstance(negotiated.protocol, NegotiatingProtocol)
        negotiated.protocol.data_received(GET)
        assert [id(connection) for connection in site.connections] == [id(negotiated.protocol)]
        assert isinstance(negotiated.protocol, Http1Connection)
        negotiated.protocol.connection_lost(None)
        assert site.connections == set()

    def test_disconnecting_before_the_first_byte(self, site: Site) -> None:
        negotiated = negotiate(site, b"PRI * ")
        assert isinstance(negotiated.protocol, NegotiatingProtocol)
        negotiated.protocol.connection_lost(None)
        assert site.connections == set()
        negotiated.protocol.sweep(1000.0)
        negotiated.protocol.abort()
        negotiated.protocol.data_received(b"HTTP/2.0\r\n")
        assert negotiated.written == b""


class TestAlpn:
    @pytest.mark.parametrize(
        ("alpn", "kind"), [("h2", Http2Connection), ("http/1.1", Http1Connection), (None, Http1Connection)]
    )
    def test_decides_before_the_first_byte(self, site: Site, alpn: str | None, kind: type) -> None:
        negotiated = negotiate(site, transport=Transport(alpn, tls=True))
        assert isinstance(negotiated.protocol, kind)
        assert [id(connection) for connection in site.connections] == [id(negotiated.protocol)]

    def test_is_believed(self, site: Site) -> None:
        """RFC 9113, 3.2: over TLS it is ALPN or nothing, so a preface without it is no HTTP/1.1."""
        negotiated = negotiate(site, PREFACE + SETTINGS, transport=Transport(None, tls=True))
        assert negotiated.written.startswith(b"HTTP/1.1 400")


class TestTime:
    def test_a_silent_connection_is_closed(self, site: Site) -> None:
        negotiated = negotiate(site)
        assert isinstance(negotiated.protocol, NegotiatingProtocol)
        negotiated.protocol.sweep(site.now + Limits().header_seconds - 1)
        assert not negotiated.closed
        negotiated.protocol.sweep(site.now + Limits().header_seconds + 1)
        assert negotiated.closed

    def test_a_preface_in_drops_has_no_more_time(self, site: Site) -> None:
        negotiated = negotiate(site, b"P")
        first = negotiated.protocol
        assert isinstance(first, NegotiatingProtocol)
        for second, byte in enumerate(b"RI * HTTP", start=1):
            site.tick(float(second))
            first.data_received(bytes([byte]))
            first.sweep(site.now)
            assert not negotiated.closed
        first.sweep(10.5)
        assert negotiated.closed

    def test_draining_closes_the_silent_and_serves_the_others(self, site: Site) -> None:
        silent, speaking = negotiate(site), negotiate(site)
        site.draining = True
        assert isinstance(silent.protocol, NegotiatingProtocol)
        assert isinstance(speaking.protocol, NegotiatingProtocol)
        silent.protocol.drain()
        speaking.protocol.drain()
        speaking.protocol.data_received(GET)
        assert b"\r\nconnection: close\r\n" in speaking.written
        silent.protocol.sweep(site.now)
        assert silent.closed

    def test_expired(self, site: Site) -> None:
        negotiated = negotiate(site)
        assert isinstance(negotiated.protocol, NegotiatingProtocol)
        negotiated.protocol.expire()
        assert negotiated.closed


def receive_until(client: socket.socket, end: bytes) -> bytes:
    received = b""
    while not received.endswith(end):
        data = client.recv(1 << 20)
        assert data, f"the connection ended without {end!r}"
        received += data
    return received


@pytest.fixture(scope="module")
def server() -> Iterator[Serving]:
    with serving(echo_site()) as running:
        yield running


class TestSockets:
    def connect(self, server: Serving) -> socket.socket:
        return socket.create_connection(("127.0.0.1", server.port), timeout=60)

    def test_both_on_one_port(self, server: Serving) -> None:
        with self.connect(server) as one, self.connect(server) as two:
            one.sendall(GET)
            two.sendall(PREFACE[:5])
            assert one.recv(12) == b"HTTP/1.1 200"
            two.sendall(PREFACE[5:] + SETTINGS)
            assert two.recv(9)[3] == 4, "a SETTINGS frame"

    def test_a_silent_connection_is_closed_by_the_sweep(self) -> None:
        with serving(echo_site()) as server, self.connect(server) as silent:
            eventually(lambda: server.connections() == 1)
            server.sweep(11.0)
            assert silent.recv(100) == b""
            eventually(lambda: server.connections() == 0)

    def test_the_receive_buffer_is_shared_and_not_mixed(self) -> None:
        """One connection's half-read request survives another connection's traffic."""
        handlers = EchoHandlers()
        with serving(echo_site(handlers=handlers)) as server:
            with self.connect(server) as one, self.connect(server) as two:
                one.sendall(b"POST /echo HTTP/1.1\r\nHost: one\r\nContent-Length: 10\r\n\r\n01234")
                for _ in range(10):
                    two.sendall(b"POST /echo HTTP/1.1\r\nHost: two\r\nContent-Length: 10\r\n\r\nabcdefghij")
                    receive_until(two, b"\r\n\r\nabcdefghij")
                one.sendall(b"56789")
                receive_until(one, b"\r\n\r\n0123456789")


@pytest.fixture(scope="module")
def tls(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Serving, trustme.CA]]:
    folder: Path = tmp_path_factory.mktemp("tls")
    authority = trustme.CA()
    certificate = authority.issue_cert("127.0.0.1")
    certificate.private_key_pem.write_to_path(str(folder / "key.pem"))
    certificate.cert_chain_pems[0].write_to_path(str(folder / "cert.pem"))
    with serving(
        echo_site(handlers=HANDLERS), tls=TlsFiles(str(folder / "cert.pem"), str(folder / "key.pem"))
    ) as running:
        yield running, authority


class TestTls:
    def connect(self, tls: tuple[Serving, trustme.CA], protocols: list[str]) -> ssl.SSLSocket:
        context = ssl.create_default_context()
        tls[1].configure_trust(context)
        if protocols:
            context.set_alpn_protocols(protocols)
        plain = socket.create_connection(("127.0.0.1", tls[0].port), timeout=60)
        return context.wrap_socket(plain, server_hostname="127.0.0.1")

    @pytest.mark.parametrize("protocols", [[], ["http/1.1"], ["something-else", "http/1.1"]])
    def test_http_1_without_and_with_alpn(self, tls: tuple[Serving, trustme.CA], protocols: list[str]) -> None:
        with self.connect(tls, protocols) as client:
            for _ in range(2):
                client.sendall(GET)
                receive_until(client, b"\r\n\r\nhello")

    def test_http_2_by_alpn(self, tls: tuple[Serving, trustme.CA]) -> None:
        with self.connect(tls, ["h2", "http/1.1"]) as client:
            assert client.selected_alpn_protocol() == "h2"
            client.sendall(PREFACE + SETTINGS)
            assert client.recv(9)[3] == 4

    def test_a_large_body_both_ways(self, tls: tuple[Serving, trustme.CA]) -> None:
        body = bytes(range(256)) * 8000
        with self.connect(tls, []) as client:
            client.sendall(b"POST /echo HTTP/1.1\r\nHost: test\r\nContent-Length: %d\r\n\r\n" % len(body) + body + GET)
            assert body in receive_until(client, b"\r\n\r\nhello")

    def test_connection_close_over_tls(self, tls: tuple[Serving, trustme.CA]) -> None:
        with self.connect(tls, []) as client:
            client.sendall(b"GET /big/3000000 HTTP/1.1\r\nHost: test\r\nConnection: close\r\n\r\n")
            received = b""
            while data := client.recv(1 << 20):
                received += data
            assert received.endswith(bytes(3_000_000))
            assert b"\r\nconnection: close\r\n" in received

    def test_a_client_that_closes_while_it_waits(
        self, tls: tuple[Serving, trustme.CA], caplog: pytest.LogCaptureFixture
    ) -> None:
        """TLS has no half-close in uvloop: the request is dropped, and nobody warns about it."""
        with self.connect(tls, []) as client:
            client.sendall(b"GET /hold HTTP/1.1\r\nHost: test\r\n\r\n")
            eventually(lambda: tls[0].connections() == 1)
            eventually(lambda: HANDLERS.held)
            tls[0].call(setattr, HANDLERS.held[0], "on_disconnect", None)
            client.unwrap()
        eventually(lambda: tls[0].connections() == 0)
        assert [record for record in caplog.records if record.levelname in ("WARNING", "ERROR")] == []

    def test_plain_http_on_a_tls_port_and_the_reverse(self, tls: tuple[Serving, trustme.CA], server: Serving) -> None:
        with socket.create_connection(("127.0.0.1", tls[0].port), timeout=60) as plain:
            plain.sendall(GET)
            assert not plain.recv(1000).startswith(b"HTTP/1.1 200")
        with pytest.raises(ssl.SSLError):
            self.connect((server, tls[1]), [])
        with socket.create_connection(("127.0.0.1", server.port), timeout=60) as alive:
            alive.sendall(GET)
            receive_until(alive, b"\r\n\r\nhello")
