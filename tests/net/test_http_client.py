# SPDX-License-Identifier: Apache-2.0
"""The HTTP client of control traffic: what it sends, what it reads, and what it refuses."""

from __future__ import annotations

import http.server
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from headrace.core.errors import InvalidArgument
from headrace.net.http_client import HttpError, error_text, parse_server_url, request
from support.ports import free_port


class Server(http.server.ThreadingHTTPServer):
    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.seen: list[tuple[str, str, str | None, bytes]] = []
        self.url = f"http://127.0.0.1:{self.server_address[1]}"


class Handler(http.server.BaseHTTPRequestHandler):
    server: Server

    def do_GET(self) -> None:
        body = self.rfile.read(int(self.headers.get("content-length", 0)))
        self.server.seen.append((self.command, self.path, self.headers.get("content-type"), body))
        redirect = self.path == "/moved"
        content = {"/long": b"x" * 1000, "/text": b"no JSON"}.get(self.path, b'["a"]')
        self.send_response(302 if redirect else 200)
        self.send_header("Location", f"{self.server.url}/elsewhere")
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    do_POST = do_DELETE = do_GET  # noqa: N815

    def log_message(self, *arguments: object) -> None:
        pass


@pytest.fixture
def server() -> Iterator[Server]:
    with Server() as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.05,))
        thread.start()
        yield server
        server.shutdown()
        thread.join()


def test_path_query_and_body(server: Server) -> None:
    response = request("POST", f"{server.url}/base/?a=1", "/call", b"{}", {"x": "y"}, seconds=30)
    assert (response.status, response.json()) == (200, ["a"])
    request("GET", server.url, seconds=30)
    request("POST", server.url, "/empty", b"", seconds=30)
    assert server.seen == [
        ("POST", "/base/call?a=1", "application/json", b"{}"),
        ("GET", "/", None, b""),
        ("POST", "/empty", None, b""),
    ]


def test_no_redirect_is_followed(server: Server) -> None:
    response = request("GET", server.url, "/moved", seconds=30)
    assert response.status == 302 and response.headers["location"].endswith("/elsewhere")
    assert [path for _, path, _, _ in server.seen] == ["/moved"]


def test_no_proxy_is_used(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("http_proxy", f"http://127.0.0.1:{free_port()}")
    assert request("GET", server.url, seconds=30).status == 200


def test_a_body_that_is_not_json(server: Server) -> None:
    response = request("GET", server.url, "/text", seconds=30)
    assert response.json() is None and response.content == b"no JSON"


def test_a_response_is_bounded(server: Server) -> None:
    assert len(request("GET", server.url, "/long", seconds=30, max_bytes=1000).content) == 1000
    with pytest.raises(HttpError, match="more than 999 bytes"):
        request("GET", server.url, "/long", seconds=30, max_bytes=999)


@contextmanager
def answering(content: bytes) -> Iterator[str]:
    """A server that sends these bytes to one client, whatever it asks."""
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def serve() -> None:
            connection, _ = listener.accept()
            with connection:
                connection.recv(65_536)
                connection.sendall(content)

        thread = threading.Thread(target=serve)
        thread.start()
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"
        thread.join()


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b"SSH-2.0-OpenSSH\r\n", r"it does not speak HTTP \(BadStatusLine\)"),
        (b"", r"it does not speak HTTP \(RemoteDisconnected\)"),
        (b"HTTP/1.1 200 OK\r\ncontent-length: 9\r\n\r\nab", "before the end"),
        (b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n9\r\nab", "IncompleteRead"),
    ],
)
def test_an_answer_that_is_not_http_or_cut_off(content: bytes, reason: str) -> None:
    with answering(content) as url, pytest.raises(HttpError, match=reason):
        request("GET", url, seconds=30)


def test_headers_that_cannot_be_sent(server: Server) -> None:
    for value in ("a\r\nb", "\u20ac"):
        with pytest.raises((HttpError, ValueError)):
            request("GET", server.url, headers={"x": value}, seconds=30)
    assert not server.seen


def test_no_server() -> None:
    with pytest.raises(OSError) as refused:
        request("GET", f"http://127.0.0.1:{free_port()}", seconds=30)
    assert error_text(refused.value) == "Connection refused"


def test_a_silent_server() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener, pytest.raises(TimeoutError):
        request("GET", f"http://127.0.0.1:{listener.getsockname()[1]}", seconds=0.05)


@pytest.mark.parametrize(
    ("url", "text"),
    [
        ("file:///etc/passwd", "is not a server URL"),
        ("http://", "is not a server URL"),
        ("127.0.0.1:8000", "is not a server URL"),
        ("http://a:port", "the port must be a number"),
        ("http://a:99999", "the port must be a number"),
    ],
)
def test_urls_of_no_server(url: str, text: str) -> None:
    with pytest.raises(InvalidArgument, match=text):
        parse_server_url(url)
    with pytest.raises(InvalidArgument, match=text):
        request("GET", url, seconds=1)
