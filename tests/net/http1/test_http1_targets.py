# SPDX-License-Identifier: Apache-2.0
"""What a request asks for: targets in all their forms, methods, and upgrades that this server does not do."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from http1_fake import FakeWire
from http1_site import Handlers, answer_plain
from http1_wire import Client, curl, get, post, post_chunked

from headrace.core.limits import Limits
from headrace.net.http.exchange import Exchange
from headrace.net.http1.exchange import Http1Exchange
from support.serving import Serving

H2C = ("Connection: Upgrade, HTTP2-Settings", "Upgrade: h2c", "HTTP2-Settings: AAMAAABkAAQAAP__")
WEBSOCKET = ("Connection: Upgrade", "Upgrade: websocket", "Sec-WebSocket-Version: 13", "Sec-WebSocket-Key: AAAA")


class TestTargets:
    @pytest.mark.parametrize(
        ("target", "path", "query"),
        [
            ("/hook", "/hook", ""),
            ("/hook?a=1&b=%20", "/hook", "a=1&b=%20"),
            ("/hook?", "/hook", ""),
            ("/hook?a?b", "/hook", "a?b"),
            ("http://elsewhere/hook", "/hook", ""),
            ("HTTP://elsewhere:80/hook?x=/y", "/hook", "x=/y"),
            ("https://user@elsewhere/hook", "/hook", ""),
        ],
    )
    def test_path_and_query(self, client: Client, handlers: Handlers, target: str, path: str, query: str) -> None:
        seen: list[tuple[bytes, bytes]] = []

        def record_head(exchange: Exchange) -> None:
            seen.append((exchange.head.path, exchange.head.query))
            answer_plain(exchange)

        handlers.on_hook = record_head
        assert client.ask(get(target)).status == 200
        assert seen == [(path.encode(), query.encode())]

    def test_a_slash_in_the_query_of_a_bare_authority_is_not_a_path(self, client: Client, handlers: Handlers) -> None:
        assert client.ask(get("http://elsewhere?next=/hello")).status == 404
        assert client.ask(get("http://elsewhere")).status == 404
        assert handlers.seen == []

    def test_curl_through_a_proxy_sends_the_absolute_form(self, server: Serving, handlers: Handlers) -> None:
        proxy = f"http://127.0.0.1:{server.port}"
        assert curl("--noproxy", "", "--proxy", proxy, "http://elsewhere.invalid/hello") == "hello"

    def test_options_of_the_whole_server(self, client: Client) -> None:
        answer = client.ask(get("*", method="OPTIONS"))
        assert answer.status == 204
        assert client.ask(get("*")).status == 405
        assert client.ask(get()).status == 200

    def test_unknown_path(self, client: Client, handlers: Handlers) -> None:
        answer = client.ask(get("/nowhere"))
        assert (answer.status, json.loads(answer.body)) == (
            404,
            {"error": "Not Found: this server does not have this path"},
        )
        assert client.ask(post("/nowhere", b"x" * 100_000)).status == 404
        assert client.ask(get()).status == 200

    @pytest.mark.parametrize("path", ["/hello/", "//hello", "/Hello", "/./hello", "/hello%2f", "/%68ello", "/hello;x"])
    def test_a_path_is_decoded(self, client: Client, handlers: Handlers, path: str) -> None:
        """No folding of any kind: a proxy that decides by the path sees the same path as we do."""
        assert client.ask(get(path)).status == 404
        assert handlers.seen == []

    def test_wrong_method(self, client: Client) -> None:
        answer = client.ask(post("/hello", b"x"))
        assert (answer.status, answer.get("allow")) == (405, "GET, HEAD")
        assert client.ask(get("/hold", method="DELETE")).get("allow") == "GET, HEAD, POST"

    @pytest.mark.parametrize(
        ("path", "params"),
        [
            ("/name/a/of/b", "a|b"),
            ("/name/a%20b/of/c%2Fd", "a b|c/d"),
            ("/name/%C3%A9/of/%e2%82%ac", "é|€"),
            ("/name/%2e%2e/of/%00", "..|\0"),
            ("/name/%zz/of/%", "%zz|%"),
            ("/name/%2525/of/+", "%25|+"),
        ],
    )
    def test_parameters_are_decoded_once(self, client: Client, path: str, params: str) -> None:
        assert client.ask(get(path)).body.decode() == params

    @pytest.mark.parametrize("path", ["/name/%ff/of/b", "/name/a/of/%C3", "/name/%ED%A0%80/of/b"])
    def test_parameters_that_are_not_utf_8(self, client: Client, handlers: Handlers, path: str) -> None:
        assert client.ask(get(path)).status == 400
        assert handlers.seen == []
        assert client.ask(get()).status == 200

    @pytest.mark.parametrize("path", ["/name//of/b", "/name/a/b/of/c", "/name/a/of/b/", "/name/a/of/"])
    def test_a_parameter_is_one_segment(self, client: Client, path: str) -> None:
        assert client.ask(get(path)).status == 404

    def test_fields_are_trimmed(self, client: Client, handlers: Handlers) -> None:
        seen: list[bytes | None] = []

        def record_head(exchange: Exchange) -> None:
            seen.append(exchange.head.get(b"x-one"))
            seen.append(exchange.head.get(b"x-empty"))
            answer_plain(exchange)

        handlers.on_hook = record_head
        assert client.ask(get("/hook", "X-One: \t a b \t ", "X-Empty:  ")).status == 200
        assert seen == [b"a b", b""]

    def test_field_names_are_lower_case_and_the_last_one_counts(self, client: Client, handlers: Handlers) -> None:
        seen: list[object] = []

        def record_head(exchange: Exchange) -> None:
            seen.append(exchange.head.get(b"x-one"))
            seen.append([field for field in exchange.head.fields if field[0] == b"x-one"])
            answer_plain(exchange)

        handlers.on_hook = record_head
        client.ask(get("/hook", "X-ONE: 1", "x-one: 2"))
        assert seen == [b"2", [(b"x-one", b"1"), (b"x-one", b"2")]]


class TestUpgrades:
    def test_curl_offers_http_2_and_gets_http_1(self, server: Serving, handlers: Handlers) -> None:
        url = f"http://127.0.0.1:{server.port}/hello"
        out = curl("-v", "--http2", url, url)
        assert out.count("< HTTP/1.1 200 OK") == 2
        assert "> Upgrade: h2c" in out

    def test_curl_offers_http_2_with_a_body(self, server: Serving, handlers: Handlers, tmp_path: Path) -> None:
        file = tmp_path / "body"
        file.write_bytes(bytes(range(256)) * 1000)
        out = tmp_path / "out"
        url = f"http://127.0.0.1:{server.port}/echo"
        curl("--http2", "--data-binary", f"@{file}", "-o", str(out), url)
        assert out.read_bytes() == file.read_bytes()
        assert curl("--http2", "-d", "small", url) == "small"

    def test_without_a_body(self, client: Client) -> None:
        client.send(get("/hello", *H2C) + get("/stream/1", *H2C) + get())
        assert [client.answer().body for _ in range(3)] == [b"hello", b"piece 0\n", b"hello"]

    @pytest.mark.parametrize("size", [0, 1, 5, 1000, 64 * 1024, 70_000, 600_000])
    def test_with_a_body(self, client: Client, handlers: Handlers, size: int) -> None:
        body = get("/nowhere")[:size].ljust(size, b"x")
        client.send(post("/echo", body, *H2C) + get())
        assert [client.answer().body, client.answer().body] == [body, b"hello"]
        assert handlers.paths() == ["/echo", "/hello"]

    def test_with_a_body_in_pieces(self) -> None:
        request = post("/echo", b"0123456789", *H2C) + get()
        for cut in range(1, len(request)):
            wire = FakeWire()
            wire.feed(request[:cut], request[cut:])
            assert [answer.body for answer in wire.answers()] == [b"0123456789", b"hello"], cut

    def test_with_a_streamed_body(self, client: Client, handlers: Handlers) -> None:
        hidden = get("/hello")
        answer = client.ask(post("/upload", hidden, *H2C))
        assert (answer.status, answer.body) == (200, b"%d" % len(hidden))
        assert b"".join(handlers.pieces) == hidden
        assert handlers.paths() == ["/upload"]
        assert client.ask(get()).body == b"hello"

    def test_with_a_streamed_body_in_pieces(self) -> None:
        hidden = get("/hello")
        request = post("/upload", hidden, *H2C) + get()
        for cut in range(1, len(request)):
            wire = FakeWire()
            wire.feed(request[:cut], request[cut:])
            assert [answer.body for answer in wire.answers()] == [b"%d" % len(hidden), b"hello"], cut
            assert wire.handlers.paths() == ["/upload", "/hello"]

    @pytest.mark.parametrize("path", ["/echo", "/upload"])
    def test_with_leave_to_send_the_body(self, client: Client, path: str) -> None:
        client.send(get(path, *H2C, "Content-Length: 5", "Expect: 100-continue", method="POST"))
        assert client.answer().status == 100
        assert client.ask(b"hello").body in (b"hello", b"5")
        assert client.ask(get()).body == b"hello"

    @pytest.mark.parametrize("path", ["/echo", "/upload"])
    def test_with_a_chunked_body_nothing_is_executed(self, client: Client, handlers: Handlers, path: str) -> None:
        answer = client.ask(post_chunked(path, get("/hello"), fields=H2C))
        assert (answer.status, answer.get("connection")) == (400, "close")
        assert client.rest() == b""
        assert handlers.seen == []

    @pytest.mark.parametrize("path", ["/echo", "/upload"])
    def test_a_body_over_the_limit(self, path: str) -> None:
        wire = FakeWire(Limits(body_bytes=1000))
        wire.feed(post(path, bytes(2000), *H2C))
        assert wire.statuses() == ([413] if path == "/echo" else [200])

    def test_an_unsupported_upgrade_is_ignored(self, client: Client) -> None:
        fields = ("Connection: Upgrade", "Upgrade: TLS/1.0, IRC/6.9")
        client.send(get("/hello", *fields) + get())
        assert [client.answer().body, client.answer().body] == [b"hello", b"hello"]

    def test_an_upgrade_behind_a_held_request(self) -> None:
        wire = FakeWire()
        wire.feed(get("/hold") + post("/echo", b"x", *H2C) + get())
        answer_plain(wire.handlers.held[0])
        assert [answer.body for answer in wire.answers()] == [b"done", b"x", b"hello"]

    def test_a_websocket_where_there_is_none_is_answered_and_closed(self, client: Client, handlers: Handlers) -> None:
        client.send(get("/hello", *WEBSOCKET) + get("/hello"))
        answer = client.answer()
        assert (answer.body, answer.get("connection")) == (b"hello", "close")
        assert client.rest() == b""
        assert handlers.paths() == ["/hello"]

    @pytest.mark.parametrize("path", ["/echo", "/upload"])
    def test_a_websocket_request_with_a_body_is_an_ordinary_one(self, path: str) -> None:
        """A handshake has no body (RFC 6455); frames and the body could not be told apart."""
        wire = FakeWire()
        hidden = get("/nowhere")
        wire.feed(post(path, hidden, *WEBSOCKET) + get("/hello"))
        assert [answer.body for answer in wire.answers()] == [
            hidden if path == "/echo" else b"%d" % len(hidden),
            b"hello",
        ]
        assert wire.handlers.paths() == [path, "/hello"]

    def test_after_a_websocket_request_nothing_is_read_as_http(self) -> None:
        wire = FakeWire()
        wire.feed(get("/hold", *WEBSOCKET) + get("/hello"))
        assert not wire.reading(), "these may be frames: whoever takes over gets them"
        answer_plain(wire.handlers.held[0])
        assert [answer.get("connection") for answer in wire.answers()] == ["close"]
        assert wire.handlers.paths() == ["/hold"]
        assert wire.ended()

    @pytest.mark.parametrize("later", [False, True])
    def test_taking_over_a_connection(self, later: bool) -> None:
        wire = FakeWire()
        taken: list[tuple[object, bytes]] = []

        def take_over(exchange: Exchange) -> None:
            assert isinstance(exchange, Http1Exchange)
            taken.append(exchange.take_over())

        wire.handlers.on_hook = wire.handlers.held.append if later else take_over
        wire.feed(get("/hook", *WEBSOCKET) + b"\x81\x05frame")
        if later:
            take_over(wire.handlers.held[0])
        assert taken == [(wire.transport, b"\x81\x05frame")]
        assert wire.reading()
        assert wire.site.connections == set(), "the connection is the new owner's to count"
        assert wire.transport.written == b""
        wire.sweep(1000.0)
        assert not wire.aborted()

    def test_a_websocket_behind_a_held_request(self) -> None:
        wire = FakeWire()
        wire.feed(get("/hold") + get("/hook", *WEBSOCKET) + b"\x81\x05frame")
        taken: list[bytes] = []

        def take_over(exchange: Exchange) -> None:
            assert isinstance(exchange, Http1Exchange)
            taken.append(exchange.take_over()[1])

        wire.handlers.on_hook = take_over
        answer_plain(wire.handlers.held[0])
        assert taken == [b"\x81\x05frame"]
        assert wire.statuses() == [200]

    def test_connect_is_not_served(self, client: Client, handlers: Handlers) -> None:
        client.send(b"CONNECT example.com:443 HTTP/1.1\r\nHost: example.com:443\r\n\r\n" + get())
        answer = client.answer()
        assert (answer.status, answer.get("connection")) == (501, "close")
        assert client.rest() == b""
        assert handlers.seen == []


BAD_HOSTS = [b"a b", b"a/b", b"a@b", b"a:b:c", b"[::1", b"http://a", b"a, b", b"a:99999999", b"[::1]x", b"a\\b", b"<a>"]
GOOD_HOSTS = [
    b"",
    b"a",
    b"A.example",
    b"10.0.0.1:8000",
    b"[::1]",
    b"[::1]:8000",
    b"a:",
    b"a_b",
    b"xn--bcher-kva.example",
]


@pytest.mark.parametrize("host", BAD_HOSTS)
def test_a_host_that_is_none_is_refused(host: bytes) -> None:
    wire = FakeWire()
    wire.feed(b"GET /hello HTTP/1.1\r\nHost: " + host + b"\r\n\r\n")
    assert wire.statuses() == [400]
    assert b"Host" in wire.answers()[0].body and wire.ended()


@pytest.mark.parametrize("host", GOOD_HOSTS)
def test_a_host_is_accepted(host: bytes) -> None:
    wire = FakeWire()
    wire.feed(b"GET /hello HTTP/1.1\r\nHost: " + host + b"\r\n\r\n")
    assert wire.statuses() == [200]


def test_the_host_of_an_absolute_target_replaces_the_field() -> None:
    wire = FakeWire()
    wire.feed(b"GET http://target.example:81/hold?x=1 HTTP/1.1\r\nHost: field.example\r\nX-A: b\r\n\r\n")
    (exchange,) = wire.handlers.held
    assert exchange.head.get(b"host") == b"target.example:81" and exchange.head.path == b"/hold"


@pytest.mark.parametrize("target", [b"http:///hello", b"http://a b/hello", b"https://[::1/hello"])
def test_an_absolute_target_without_a_valid_host_is_refused(target: bytes) -> None:
    wire = FakeWire()
    wire.feed(b"GET " + target + b" HTTP/1.1\r\nHost: x\r\n\r\n")
    assert wire.statuses() == [400]
