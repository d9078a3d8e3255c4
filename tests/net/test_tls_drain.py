# SPDX-License-Identifier: Apache-2.0
"""HTTP/1.1 under TLS: the end of a connection, where the client has to answer our goodbye and may not."""

from __future__ import annotations

import socket
import ssl
from collections.abc import Iterator
from pathlib import Path

import pytest
import trustme

from headrace.core.limits import Limits
from headrace.net.tls import TlsFiles
from support.serving import Serving, echo_site, serving
from support.waiting import eventually


@pytest.fixture
def authority() -> trustme.CA:
    return trustme.CA()


@pytest.fixture
def server(authority: trustme.CA, tmp_path: Path) -> Iterator[Serving]:
    certificate = authority.issue_cert("localhost")
    certificate.private_key_and_cert_chain_pem.write_to_path(tmp_path / "server.pem")
    files = TlsFiles(str(tmp_path / "server.pem"), str(tmp_path / "server.pem"))
    with serving(echo_site(Limits(write_idle_seconds=30.0)), tls=files) as running:
        yield running


def connected(server: Serving, authority: trustme.CA) -> ssl.SSLSocket:
    context = ssl.create_default_context()
    authority.configure_trust(context)
    context.set_alpn_protocols(["http/1.1"])
    sock = socket.create_connection(("127.0.0.1", server.port), timeout=60)
    return context.wrap_socket(sock, server_hostname="localhost")


def test_an_idle_client_that_ignores_the_close_is_cut_after_the_linger(server: Serving, authority: trustme.CA) -> None:
    with connected(server, authority) as client:
        client.sendall(b"GET /hello HTTP/1.1\r\nhost: x\r\n\r\n")
        assert client.recv(1000).endswith(b"hello")
        server.sweep(1.0)
        server.call(lambda: [connection.drain() for connection in server.site.connections])
        server.sweep(1.0)
        server.sweep(5.0)
        eventually(lambda: server.connections() == 0, message="the linger is over, and the client was idle: its end")


def test_a_slow_reader_gets_all_of_a_last_response(server: Serving, authority: trustme.CA) -> None:
    size = 8_000_000
    with connected(server, authority) as client:
        client.sendall(b"GET /big/%d HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n" % size)
        head = client.recv(100)
        server.sweep(1.0)
        server.sweep(5.0)
        received = len(head)
        while piece := client.recv(65536):
            received += len(piece)
    assert received > size
