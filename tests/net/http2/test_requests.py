# SPDX-License-Identifier: Apache-2.0
"""RFC 9113 sections 8.1 to 8.3: malformed requests, and what the fields of a good one become."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
from adversary import Client
from http2_echo_server import Http2EchoServer, http2_echo_server, no_failures
from raw_frames import (
    DATA,
    END_HEADERS,
    END_STREAM,
    HEADERS,
    Fields,
    literal,
    raw,
    request_fields,
)

from headrace.net.http.exchange import Exchange
from headrace.net.http.heads import OK_PLAIN
from headrace.net.http2.frames import ErrorCode
from headrace.net.site import Site

METHOD, SCHEME, PATH, AUTHORITY = request_fields()


class RecordingRoutes:
    """Routes that keep what they were asked: whole at `/asked`, streamed at `/asked/stream`."""

    def __init__(self) -> None:
        self.exchanges: list[Exchange] = []

    def add_to(self, site: Site) -> None:
        for method in ("GET", "POST"):
            site.routes.add(method, "/asked", self.take)
        site.routes.add("POST", "/asked/stream", self.stream, streams_body=True)

    def take(self, exchange: Exchange) -> None:
        self.exchanges.append(exchange)
        exchange.respond(OK_PLAIN, b"taken")

    def stream(self, exchange: Exchange) -> None:
        self.exchanges.append(exchange)
        pieces: list[bytes] = []
        exchange.on_body = pieces.append  # type: ignore[misc]
        exchange.on_body_end = lambda: exchange.respond(OK_PLAIN, b"".join(pieces))  # type: ignore[misc]
        exchange.on_disconnect = lambda: pieces.clear()  # type: ignore[misc]


@pytest.fixture(scope="module")
def recorded() -> RecordingRoutes:
    return RecordingRoutes()


@pytest.fixture(scope="module")
def shared_echo_server(recorded: RecordingRoutes) -> Iterator[Http2EchoServer]:
    with http2_echo_server(add_to=recorded.add_to) as echo_server:
        yield echo_server


def assert_refused(client: Client, fields: Fields, *, stream_id: int = 1, end: bool = True) -> None:
    """8.1.1: a malformed request is a stream error of type PROTOCOL_ERROR, and the connection goes on."""
    client.send(raw(HEADERS, END_HEADERS | (END_STREAM if end else 0), stream_id, literal(fields)))
    client.expect_reset(stream_id, ErrorCode.PROTOCOL_ERROR)
    client.request(stream_id + 2)
    client.expect_ok(stream_id + 2, b"hello")


# 8.1: the message.


def test_trailers_end_the_request(client: Client, recorded: RecordingRoutes) -> None:
    """8.1: a request is HEADERS, DATA, and one more HEADERS with END_STREAM."""
    client.request(1, "POST", "/echo", end=False)
    client.data(1, b"body")
    client.headers(1, [("x-checksum", "12")])
    client.expect_ok(1, b"body")


def test_trailers_need_no_body(client: Client) -> None:
    """8.1: zero DATA frames are allowed."""
    client.request(1, "POST", "/echo", end=False)
    client.headers(1, [("x-checksum", "12")])
    client.expect_ok(1, b"")


def test_empty_trailers_end_the_request(client: Client) -> None:
    """8.1: a trailer section may be empty."""
    client.request(1, "POST", "/echo", end=False)
    client.send(raw(HEADERS, END_HEADERS | END_STREAM, 1, b""))
    client.expect_ok(1, b"")


def test_trailers_without_end_stream_are_malformed(client: Client) -> None:
    """8.1: HEADERS after the first without END_STREAM make the request malformed."""
    client.request(1, "POST", "/echo", end=False)
    client.headers(1, [("x-checksum", "12")], end=False)
    client.expect_error(1, ErrorCode.PROTOCOL_ERROR)


BAD_TRAILERS = {
    "pseudo-header": [(":path", "/")],
    "unknown pseudo-header": [(":nothing", "x")],
    "capital": [("X-Sum", "1")],
    "connection-specific": [("connection", "close")],
    "bad value": [("x", "a\nb")],
    "pseudo-header of a response": [(":status", "200")],
}


@pytest.mark.parametrize("fields", BAD_TRAILERS.values(), ids=BAD_TRAILERS.keys())
def test_trailers_obey_the_rules_of_fields(echo_server: Http2EchoServer, fields: Fields) -> None:
    """8.1, 8.2, 8.3: pseudo-headers and forbidden fields in trailers make the request malformed; it is not served."""
    client = echo_server.connect()
    client.request(1, "POST", "/hold", end=False)
    client.send(raw(HEADERS, END_HEADERS | END_STREAM, 1, literal(fields)))
    client.expect_error(1, ErrorCode.PROTOCOL_ERROR)
    assert echo_server.handlers.held == []


# 8.1.1: content-length.


@pytest.mark.parametrize("path", ["/echo", "/asked/stream"])
@pytest.mark.parametrize("said", [0, 1, 9, 11, 1000])
@pytest.mark.parametrize("frames", [[b"0123456789"], [b"01234", b"56789"], [b"0123456789", b""], [b"", b"0123456789"]])
def test_a_content_length_other_than_the_bodys_is_malformed(
    client: Client, recorded: RecordingRoutes, path: str, said: int, frames: list[bytes]
) -> None:
    """8.1.1: a request whose content-length is not the sum of its DATA payloads is malformed."""
    client.request(1, "POST", path, end=False, more=[("content-length", str(said))])
    for number, data in enumerate(frames, 1):
        client.data(1, data, end=number == len(frames))
    client.expect_error(1, ErrorCode.PROTOCOL_ERROR)


@pytest.mark.parametrize("path", ["/echo", "/hold", "/asked/stream"])
def test_a_content_length_without_a_body_is_malformed(
    echo_server: Http2EchoServer, recorded: RecordingRoutes, path: str
) -> None:
    """8.1.1: END_STREAM on HEADERS and a content-length other than 0. No handler sees it."""
    recorded.exchanges.clear()
    client = echo_server.connect()
    client.request(1, "POST", path, more=[("content-length", "5")])
    client.expect_error(1, ErrorCode.PROTOCOL_ERROR)
    assert echo_server.handlers.held == []
    assert recorded.exchanges == []


def test_a_content_length_with_trailers_is_checked(client: Client) -> None:
    """8.1.1: trailers end the body as END_STREAM on DATA does."""
    client.request(1, "POST", "/echo", end=False, more=[("content-length", "5")])
    client.data(1, b"four")
    client.headers(1, [("a", "b")])
    client.expect_error(1, ErrorCode.PROTOCOL_ERROR)


def test_padding_is_not_counted_as_content(client: Client) -> None:
    """8.1.1: the sum is that of DATA without padding."""
    client.request(1, "POST", "/echo", end=False, more=[("content-length", "3")])
    client.send(raw(DATA, END_STREAM | 0x8, 1, b"\x05abc" + bytes(5)))
    client.expect_ok(1, b"abc")


@pytest.mark.parametrize("end", [True, False])
def test_a_content_length_of_0(client: Client, end: bool) -> None:
    """8.1.1: no body is a body of 0 bytes."""
    client.request(1, "POST", "/echo", end=end, more=[("content-length", "0")])
    if not end:
        client.data(1, b"", end=True)
    client.expect_ok(1, b"")


@pytest.mark.parametrize("value", ["-1", "+5", "5 ", "0x5", "5,5", "", "٥", "1e3", "9" * 5_000, "5\t"])
def test_a_content_length_that_is_not_a_number_is_malformed(client: Client, value: str) -> None:
    """8.1.1, RFC 9110 section 8.6: digits, and a value there can be. (5000 digits are more than `int` reads.)"""
    assert_refused(client, request_fields("POST", "/echo", [("content-length", value.encode())]), end=False)


def test_content_lengths_that_contradict_each_other_are_malformed(client: Client) -> None:
    """8.1.1, RFC 9110 section 8.6."""
    assert_refused(
        client, request_fields("POST", "/echo", [("content-length", "5"), ("content-length", "6")]), end=False
    )


def test_a_huge_content_length_is_only_too_large(client: Client) -> None:
    """RFC 9110 section 8.6: a recipient must anticipate large numbers. 413, and no memory is taken for it."""
    client.request(1, "POST", "/echo", end=False, more=[("content-length", "9" * 18)])
    assert client.answer(1).status == 413


def test_no_more_than_the_content_length_reaches_a_handler(
    echo_server: Http2EchoServer, recorded: RecordingRoutes
) -> None:
    """8.1.1: bytes beyond the content-length end the request when they come, not when the client feels like ending."""
    client = echo_server.connect()
    client.request(1, "POST", "/asked/stream", end=False, more=[("content-length", "4")])
    client.data(1, b"1234")
    client.ping()
    client.data(1, b"5")
    client.expect_error(1, ErrorCode.PROTOCOL_ERROR)


# 8.2.1: field validity.


BAD_FIELDS: dict[str, tuple[bytes, bytes]] = {
    "capital": (b"X-Test", b"1"),
    "last letter capital": (b"x-tesT", b"1"),
    "space in the name": (b"x test", b"1"),
    "NUL in the name": (b"x\0test", b"1"),
    "line feed in the name": (b"x\ntest", b"1"),
    "DEL in the name": (b"x\x7f", b"1"),
    "not ASCII in the name": ("ü".encode(), b"1"),
    "colon in the name": (b"x:y", b"1"),
    "empty name": (b"", b"1"),
    "NUL in the value": (b"x", b"a\0b"),
    "line feed in the value": (b"x", b"a\nb"),
    "carriage return in the value": (b"x", b"a\rb"),
    "line feed at the end": (b"x", b"a\n"),
    "space first": (b"x", b" a"),
    "space last": (b"x", b"a "),
    "tab first": (b"x", b"\ta"),
    "tab last": (b"x", b"a\t"),
    "only a space": (b"x", b" "),
}


@pytest.mark.parametrize("bad", BAD_FIELDS.values(), ids=BAD_FIELDS.keys())
def test_a_field_with_forbidden_characters_is_malformed(client: Client, bad: tuple[bytes, bytes]) -> None:
    """8.2.1: the characters a name or value MUST NOT contain."""
    assert_refused(client, request_fields(more=[bad]))


@pytest.mark.parametrize("value", [b"", b"a b", b"a\tb", b"\x01", b"\x7f", b"\xff\xfe", b'"quoted"', b"a" * 10_000])
def test_other_values_are_accepted_unchanged(client: Client, recorded: RecordingRoutes, value: bytes) -> None:
    """8.2.1 and RFC 9110 section 5.5: anything else is the application's business."""
    client.send(
        raw(HEADERS, END_HEADERS | END_STREAM, 1, literal(request_fields(path="/asked", more=[("x-v", value)])))
    )
    client.expect_ok(1)
    assert recorded.exchanges[-1].head.get(b"x-v") == value


# 8.2.2: connection-specific fields.


@pytest.mark.parametrize(
    "bad",
    [
        ("connection", "close"),
        ("connection", "keep-alive"),
        ("proxy-connection", "keep-alive"),
        ("keep-alive", "timeout=5"),
        ("transfer-encoding", "chunked"),
        ("transfer-encoding", "identity"),
        ("upgrade", "websocket"),
        ("te", "gzip"),
        ("te", "trailers, gzip"),
        ("te", ""),
    ],
)
def test_a_connection_specific_field_is_malformed(client: Client, bad: tuple[str, str]) -> None:
    """8.2.2: an endpoint MUST treat a message with them as malformed; TE may say `trailers` and nothing else."""
    assert_refused(client, request_fields(more=[bad]))


def test_te_may_be_trailers(client: Client) -> None:
    """8.2.2."""
    client.request(1, more=[("te", "trailers")])
    client.expect_ok(1)


# 8.2.3: cookies.


def test_cookie_crumbs_are_joined(client: Client, recorded: RecordingRoutes) -> None:
    """8.2.3: several cookie fields MUST be joined by `; ` before an application sees them."""
    client.request(1, path="/asked", more=[("cookie", "a=1"), ("x", "y"), ("cookie", "b=2"), ("cookie", "c=3")])
    client.expect_ok(1)
    fields = recorded.exchanges[-1].head.fields
    assert [value for name, value in fields if name == b"cookie"] == [b"a=1; b=2; c=3"]
    assert recorded.exchanges[-1].head.get(b"cookie") == b"a=1; b=2; c=3"


# 8.3: pseudo-headers.


@pytest.mark.parametrize("missing", [METHOD, SCHEME, PATH], ids=lambda field: field[0])
def test_a_request_without_a_mandatory_pseudo_header_is_malformed(client: Client, missing: tuple[str, str]) -> None:
    """8.3.1: all requests MUST include exactly one value for :method, :scheme and :path."""
    assert_refused(client, [field for field in request_fields() if field != missing])


@pytest.mark.parametrize("name", [":method", ":scheme", ":path", ":authority"])
@pytest.mark.parametrize("same", [True, False])
def test_a_repeated_pseudo_header_is_malformed(client: Client, name: str, same: bool) -> None:
    """8.3: the same pseudo-header MUST NOT appear more than once, not even with the same value."""
    value = dict(request_fields())[name] if same else "other"
    assert_refused(client, [*request_fields(), (name, value)])


@pytest.mark.parametrize("name", [":method", ":path", ":authority", ":unknown"])
def test_a_pseudo_header_after_a_regular_field_is_malformed(client: Client, name: str) -> None:
    """8.3: pseudo-headers MUST come before all regular fields."""
    fields = [field for field in request_fields() if field[0] != name]
    assert_refused(client, [*fields, ("accept", "*/*"), (name, "GET" if name == ":method" else "/hello")])


@pytest.mark.parametrize("name", [":status", ":protocol", ":", ":Path", ":version"])
def test_an_unknown_pseudo_header_is_malformed(client: Client, name: str) -> None:
    """8.3: undefined pseudo-headers, and those of responses, make a request malformed."""
    assert_refused(client, [*request_fields(), (name, "200")])


@pytest.mark.parametrize("path", ["", "hello", "*", "http://test/hello", "?q"])
def test_an_invalid_path_is_malformed(client: Client, path: str) -> None:
    """8.3.1: :path MUST NOT be empty, and is in origin-form or, for OPTIONS, `*`."""
    assert_refused(client, request_fields(path=path))


@pytest.mark.parametrize("name", [":method", ":scheme", ":path", ":authority"])
@pytest.mark.parametrize(
    "bad", [b"%b\n", b"%b\r\nx: y", b"%b\0", b" %b", b"%b ", b"%b x", b"\t%b", b"%b\x7f", b"%b\x01"]
)
def test_a_pseudo_header_with_forbidden_characters_is_malformed(client: Client, name: str, bad: bytes) -> None:
    """8.2.1, 8.3.1: no control character or space in a method, scheme, path or authority: they would split HTTP/1.1."""
    value = dict(request_fields())[name]
    fields = [(n, bad % str(value).encode() if n == name else v) for n, v in request_fields()]
    assert_refused(client, fields)


def test_options_may_target_the_whole_server(client: Client) -> None:
    """8.3.1: OPTIONS without a path is `*`. What it is answered is the routes' business; it is no error of HTTP/2."""
    client.request(1, "OPTIONS", "*")
    answer = client.answer(1)
    assert answer.reset is None
    assert answer.status < 500


@pytest.mark.parametrize("fields", [[METHOD[:1] + ("CONNECT",), AUTHORITY], request_fields("CONNECT")])
def test_connect_is_not_served(client: Client, fields: Fields) -> None:
    """8.5: this is no proxy. A stream error or any refusing status would do."""
    client.send(raw(HEADERS, END_HEADERS | END_STREAM, 1, literal(fields)))
    answer = client.answer(1)
    assert answer.reset is not None or answer.status >= 400


def test_the_order_of_pseudo_headers_is_free(client: Client) -> None:
    """8.3."""
    client.headers(1, [AUTHORITY, PATH, METHOD, SCHEME])
    client.expect_ok(1, b"hello")


def test_the_authority_is_the_host(client: Client, recorded: RecordingRoutes) -> None:
    """8.3.1: :authority takes the place of Host, for an application that knows only that."""
    client.request(1, path="/asked")
    client.expect_ok(1)
    head = recorded.exchanges[-1].head
    assert head.authority == b"test"
    assert [value for name, value in head.fields if name == b"host"] == [b"test"]


def test_host_replaces_a_missing_authority(client: Client, recorded: RecordingRoutes) -> None:
    """8.3.1: a request translated from HTTP/1.1 may have Host alone."""
    client.headers(1, [METHOD, SCHEME, (":path", "/asked"), ("host", "old.test")])
    client.expect_ok(1)
    assert recorded.exchanges[-1].head.get(b"host") == b"old.test"


def test_a_host_equal_to_the_authority_is_one_host(client: Client, recorded: RecordingRoutes) -> None:
    """8.3.1: the same thing said twice is seen once."""
    client.request(1, path="/asked", more=[("host", "test")])
    client.expect_ok(1)
    assert [value for name, value in recorded.exchanges[-1].head.fields if name == b"host"] == [b"test"]


@pytest.mark.parametrize("hosts", [["other"], ["test", "other"], ["other", "test"]])
def test_a_host_other_than_the_authority_is_malformed(client: Client, hosts: list[str]) -> None:
    """8.3.1: a server SHOULD treat a Host that differs from :authority as malformed: two readers, two hosts."""
    assert_refused(client, request_fields(more=[("host", host) for host in hosts]))


def test_two_hosts_without_an_authority_are_malformed(client: Client) -> None:
    """RFC 9110 section 7.2, RFC 9112 section 3.2: more than one Host is refused in HTTP/1.1; here, too."""
    assert_refused(client, [METHOD, SCHEME, PATH, ("host", "one"), ("host", "two")])


# 8.1.1: a malformed request does no harm.


@pytest.mark.parametrize("what", ["capital", "no path", "content-length"])
def test_a_malformed_request_never_reaches_a_handler(echo_server: Http2EchoServer, what: str) -> None:
    """8.1.1: malformed requests are not processed, with or without a body behind them."""
    client = echo_server.connect()
    fields = {
        "capital": request_fields("POST", "/hold", [("X", "1")]),
        "no path": [METHOD, SCHEME, AUTHORITY],
        "content-length": request_fields("POST", "/hold", [("content-length", "x")]),
    }[what]
    client.send(raw(HEADERS, END_HEADERS, 1, literal(fields)), raw(DATA, 0, 1, b"abc"), raw(DATA, END_STREAM, 1, b"d"))
    client.expect_reset(1, ErrorCode.PROTOCOL_ERROR)
    assert echo_server.handlers.held == []


def test_more_fields_than_the_limit_are_refused(limited: Callable[..., Http2EchoServer]) -> None:
    """10.5.1: a server may limit a field section; ours ends the connection."""
    client = limited(header_count=20).connect()
    client.request(1, more=[(f"x-{number}", "1") for number in range(15)])
    client.expect_ok(1)
    client.request(3, more=[(f"x-{number}", "1") for number in range(25)])
    client.expect_goaway(ErrorCode.ENHANCE_YOUR_CALM)


def test_failures_are_noticed() -> None:
    """The watch over the log that every test here relies on can fail."""
    import logging

    with pytest.raises(AssertionError, match="boom"), no_failures():
        logging.getLogger("asyncio").error("boom")
