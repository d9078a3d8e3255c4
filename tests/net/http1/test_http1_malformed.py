# SPDX-License-Identifier: Apache-2.0
"""What is no HTTP/1.1 request, or would be another request to somebody else: refused, closed, logged once, nothing executed.

Each case is sent with a request hidden where a careless reader would find one; no handler may ever see it.
"""

from __future__ import annotations

import pytest
from http1_fake import FakeWire
from http1_site import Handlers, answer_plain
from http1_wire import Client, get, post

from support.serving import Serving

HIDDEN = get("/hello")

HEAD = "POST {path} HTTP/1.1\r\nHost: test\r\n"
CHUNKED = HEAD + "Transfer-Encoding: chunked\r\n\r\n"

FRAMING = {
    "length and chunked": HEAD + "Content-Length: 4\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
    "chunked and length": HEAD + "Transfer-Encoding: chunked\r\nContent-Length: 4\r\n\r\n0\r\n\r\n",
    "length 0 and chunked": HEAD + "Content-Length: 0\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
    "length and identity": HEAD + "Content-Length: 0\r\nTransfer-Encoding: identity\r\n\r\n",
    "two different lengths": HEAD + "Content-Length: 5\r\nContent-Length: 0\r\n\r\nhello",
    "two equal lengths": HEAD + "Content-Length: 5\r\nContent-Length: 5\r\n\r\nhello",
    "length list": HEAD + "Content-Length: 5, 5\r\n\r\nhello",
    "length with plus": HEAD + "Content-Length: +5\r\n\r\nhello",
    "length in hex": HEAD + "Content-Length: 0x5\r\n\r\nhello",
    "length negative": HEAD + "Content-Length: -5\r\n\r\nhello",
    "length with underscore": HEAD + "Content-Length: 1_0\r\n\r\nhellohello",
    "length with a point": HEAD + "Content-Length: 5.0\r\n\r\nhello",
    "length of two numbers": HEAD + "Content-Length: 5 5\r\n\r\nhello",
    "length empty": HEAD + "Content-Length: \r\n\r\nhello",
    "length overflows 64 bits": HEAD + "Content-Length: 18446744073709551621\r\n\r\nhello",
    "length of many digits": HEAD + "Content-Length: " + "9" * 5000 + "\r\n\r\nhello",
    "length with space before colon": HEAD + "Content-Length : 5\r\n\r\nhello",
    "length folded": HEAD + "Content-Length:\r\n 5\r\n\r\nhello",
    "coding unknown": HEAD + "Transfer-Encoding: xchunked\r\n\r\n0\r\n\r\n",
    "coding chunked, identity": HEAD + "Transfer-Encoding: chunked, identity\r\n\r\n0\r\n\r\n",
    "coding identity": HEAD + "Transfer-Encoding: identity\r\n\r\n0\r\n\r\n",
    "coding identity, chunked": HEAD + "Transfer-Encoding: identity, chunked\r\n\r\n0\r\n\r\n",
    "coding gzip, chunked": HEAD + "Transfer-Encoding: gzip, chunked\r\n\r\n0\r\n\r\n",
    "coding twice in a line": HEAD + "Transfer-Encoding: chunked, chunked\r\n\r\n0\r\n\r\n",
    "coding in two lines": HEAD + "Transfer-Encoding: chunked\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
    "coding in two lines, first unknown": HEAD + "Transfer-Encoding: x\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
    "coding in two lines, last unknown": HEAD + "Transfer-Encoding: chunked\r\nTransfer-Encoding: x\r\n\r\n0\r\n\r\n",
    "coding with a comma before": HEAD + "Transfer-Encoding: ,chunked\r\n\r\n0\r\n\r\n",
    "coding quoted": HEAD + 'Transfer-Encoding: "chunked"\r\n\r\n0\r\n\r\n',
    "coding with a parameter": HEAD + "Transfer-Encoding: chunked;a=b\r\n\r\n0\r\n\r\n",
    "coding empty": HEAD + "Transfer-Encoding:\r\n\r\n0\r\n\r\n",
    "coding with a vertical tab": HEAD + "Transfer-Encoding: \x0bchunked\r\n\r\n0\r\n\r\n",
    "coding with space before colon": HEAD + "Transfer-Encoding : chunked\r\n\r\n0\r\n\r\n",
    "coding with tab before colon": HEAD + "Transfer-Encoding\t: chunked\r\n\r\n0\r\n\r\n",
    "coding folded": HEAD + "Transfer-Encoding:\r\n chunked\r\n\r\n0\r\n\r\n",
    "coding in HTTP/1.0": "POST {path} HTTP/1.0\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
    "coding in HTTP/1.0 kept": "POST {path} HTTP/1.0\r\nConnection: keep-alive\r\n"
    "Transfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
}

CHUNKS = {
    "size no number": CHUNKED + "g\r\n\r\n",
    "size negative": CHUNKED + "-1\r\n\r\n",
    "size with plus": CHUNKED + "+5\r\nhello\r\n",
    "size with 0x": CHUNKED + "0x5\r\nhello\r\n",
    "size of 17 digits": CHUNKED + "10000000000000005\r\nhello\r\n",
    "size empty": CHUNKED + "\r\nhello\r\n",
    "size with space": CHUNKED + "5 \r\nhello\r\n",
    "size with tab before": CHUNKED + "\t5\r\nhello\r\n",
    "size with underscore": CHUNKED + "1_0\r\nhello\r\n",
    "size ends in LF": CHUNKED + "5\nhello\r\n0\r\n\r\n",
    "size ends in CR": CHUNKED + "5\rhello\r\n0\r\n\r\n",
    "data without end": CHUNKED + "5\r\nhello0\r\n\r\n",
    "data longer than it says": CHUNKED + "5\r\nhello world\r\n0\r\n\r\n",
    "data ends in LF": CHUNKED + "5\r\nhello\n0\r\n\r\n",
    "extension with LF": CHUNKED + "5;a\n\r\nhello\r\n0\r\n\r\n",
    "extension with NUL": CHUNKED + "5;a=\0\r\nhello\r\n0\r\n\r\n",
    "last chunk without end": CHUNKED + "0\r\n",
    "trailer length": CHUNKED + "0\r\nContent-Length: 30\r\n\r\n",
    "trailer coding": CHUNKED + "0\r\nTransfer-Encoding: chunked\r\n\r\n",
    "trailer no field": CHUNKED + "0\r\nno field\r\n\r\n",
}

LINES = {
    "folded field": "GET {path} HTTP/1.1\r\nHost: test\r\nX: a\r\n b\r\n\r\n",
    "folded with tab": "GET {path} HTTP/1.1\r\nHost: test\r\nX: a\r\n\tb\r\n\r\n",
    "space before the first field": "GET {path} HTTP/1.1\r\n Host: test\r\n\r\n",
    "LF ends lines": "GET {path} HTTP/1.1\nHost: test\n\n",
    "LF ends a field": "GET {path} HTTP/1.1\r\nHost: test\nX: y\r\n\r\n",
    "LF ends the head": "GET {path} HTTP/1.1\r\nHost: test\r\n\n",
    "CR in a value": "GET {path} HTTP/1.1\r\nHost: test\r\nX: a\rY: b\r\n\r\n",
    "CR CR LF": "GET {path} HTTP/1.1\r\nHost: test\r\r\n\r\n",
    "NUL in a value": "GET {path} HTTP/1.1\r\nHost: test\r\nX: a\0b\r\n\r\n",
    "NUL in a name": "GET {path} HTTP/1.1\r\nHost: test\r\nX\0: a\r\n\r\n",
    "space in a name": "GET {path} HTTP/1.1\r\nHost: test\r\nX Y: a\r\n\r\n",
    "no colon": "GET {path} HTTP/1.1\r\nHost: test\r\nX\r\n\r\n",
    "no name": "GET {path} HTTP/1.1\r\nHost: test\r\n: a\r\n\r\n",
    "name not ASCII": "GET {path} HTTP/1.1\r\nHost: test\r\nX\xff: a\r\n\r\n",
    "no host": "GET {path} HTTP/1.1\r\nX: a\r\n\r\n",
    "two hosts": "GET {path} HTTP/1.1\r\nHost: test\r\nHost: test\r\n\r\n",
    "HTTP/1.2": "GET {path} HTTP/1.2\r\nHost: test\r\n\r\n",
    "HTTP/2.0": "GET {path} HTTP/2.0\r\nHost: test\r\n\r\n",
    "HTTP/3.0": "GET {path} HTTP/3.0\r\nHost: test\r\n\r\n",
    "HTTP/0.9": "GET {path} HTTP/0.9\r\nHost: test\r\n\r\n",
    "HTTP/1.10": "GET {path} HTTP/1.10\r\nHost: test\r\n\r\n",
    "HTTP/1": "GET {path} HTTP/1\r\nHost: test\r\n\r\n",
    "http/1.1": "GET {path} http/1.1\r\nHost: test\r\n\r\n",
    "no version": "GET {path}\r\nHost: test\r\n\r\n",
    "space after the version": "GET {path} HTTP/1.1 \r\nHost: test\r\n\r\n",
    "tabs in the request line": "GET\t{path}\tHTTP/1.1\r\nHost: test\r\n\r\n",
    "space before the method": " GET {path} HTTP/1.1\r\nHost: test\r\n\r\n",
    "method unknown": "FROB {path} HTTP/1.1\r\nHost: test\r\n\r\n",
    "method in lower case": "get {path} HTTP/1.1\r\nHost: test\r\n\r\n",
    "target with a control character": "GET {path}\x01 HTTP/1.1\r\nHost: test\r\n\r\n",
    "target not ASCII": "GET {path}\xe9 HTTP/1.1\r\nHost: test\r\n\r\n",
    "target relative": "GET hello HTTP/1.1\r\nHost: test\r\n\r\n",
    "HTTP/2 preface, later": "PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
    "CONNECT": "CONNECT example.com:443 HTTP/1.1\r\nHost: example.com:443\r\n\r\n",
    "CONNECT with a length": "CONNECT example.com:443 HTTP/1.1\r\nHost: example.com:443\r\nContent-Length: 5\r\n\r\n",
    "CONNECT of a path": "CONNECT {path} HTTP/1.1\r\nHost: test\r\n\r\n",
    "garbage": "\x80\x81\x82 what is this\r\n\r\n",
    "an answer": "HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n",
    "TLS": "\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + "\x55" * 100,
    "SSH": "SSH-2.0-OpenSSH_9.2\r\n",
    "SMTP": "EHLO example.com\r\n",
    "Redis": "*1\r\n$4\r\nPING\r\n",
}

CASES = {**FRAMING, **CHUNKS, **LINES}


def refusals(log: pytest.LogCaptureFixture) -> int:
    return len([record for record in log.records if record.getMessage().startswith("request rejected")])


@pytest.mark.parametrize("path", ["/echo", "/upload"])
@pytest.mark.parametrize("name", CASES)
def test_refused(
    client: Client, server: Serving, handlers: Handlers, wire_log: pytest.LogCaptureFixture, name: str, path: str
) -> None:
    if "later" in name:
        client.ask(get("/nowhere"))
    client.send(CASES[name].format(path=path).encode("latin-1") + HIDDEN)
    answer = client.answer()
    assert answer.status in (400, 501, 505), answer
    assert answer.get("connection") == "close"
    assert b"hello" not in answer.body
    assert client.rest() == b""
    server.call(lambda: None)
    assert ("GET", "/hello", b"") not in handlers.seen
    assert handlers.seen in ([], [("POST", "/upload", b"")]), "only a streamed request may be known before its end"
    assert refusals(wire_log) == 1
    assert not [record for record in wire_log.records if record.exc_info]
    with Client(server.port) as another:
        assert another.ask(get()).body == b"hello"


@pytest.mark.parametrize("name", CASES)
def test_refused_behind_a_held_request(name: str, wire_log: pytest.LogCaptureFixture) -> None:
    wire = FakeWire()
    wire.feed(get("/hold"))
    wire.feed(CASES[name].format(path="/upload").encode("latin-1") + HIDDEN)
    assert not wire.reading()
    answer_plain(wire.handlers.held[0])
    assert [(answer.body, answer.get("connection")) for answer in wire.answers()] == [(b"done", "close")]
    assert wire.ended()
    assert wire.reading(), "what still comes is read and dropped, or a reset would overtake the answer"
    assert wire.handlers.paths() == ["/hold"]
    assert refusals(wire_log) == 1


@pytest.mark.parametrize("name", CASES)
def test_refused_one_byte_at_a_time(name: str, wire_log: pytest.LogCaptureFixture) -> None:
    wire = FakeWire()
    wire.feed(*(bytes([byte]) for byte in CASES[name].format(path="/echo").encode("latin-1") + HIDDEN))
    assert wire.statuses()[0] in (400, 501, 505)
    assert len(wire.statuses()) == 1
    assert wire.ended()
    assert wire.handlers.seen == []
    assert refusals(wire_log) == 1


@pytest.mark.parametrize("name", CASES)
def test_refused_however_often_it_is_sent(name: str) -> None:
    """Heads are remembered by their bytes: a refused one must not be among them."""
    wire = FakeWire()
    data = CASES[name].format(path="/echo").encode("latin-1")
    for _ in range(3):
        second = FakeWire(site=wire.site, handlers=wire.handlers)
        second.feed(data + HIDDEN)
        assert second.statuses()[0] in (400, 501, 505)
        assert second.ended()
    assert wire.handlers.seen == []


def test_a_head_that_ends_differently_is_not_the_known_one() -> None:
    """`LF LF` before the end that is looked for: were it taken for a head, the body would be read as the next request."""
    wire = FakeWire()
    for _ in range(3):
        second = FakeWire(site=wire.site, handlers=wire.handlers)
        second.feed(b"GET /hello HTTP/1.1\r\nHost: test\r\nX: y\n\nGET /hold HTTP/1.1\r\nHost: test\r\n\r\n")
        assert second.statuses() == [400]
    assert wire.handlers.seen == []


def test_the_answer_to_an_unreadable_request_exposes_nothing(client: Client) -> None:
    body = client.ask(b"GARBAGE\r\n\r\n").body
    for secret in (b"httptools", b"llhttp", b"Traceback", b".py", b"0x"):
        assert secret not in body


def test_the_body_of_a_known_head_is_not_read_as_a_request(client: Client, handlers: Handlers) -> None:
    for _ in range(3):
        assert client.ask(post("/echo", HIDDEN)).body == HIDDEN
    assert handlers.paths() == ["/echo"] * 3


@pytest.mark.parametrize(
    "request_", [b"GET  /hello  HTTP/1.1\r\nHost: test\r\n\r\n", b"GET /hello HTTP/1.1\r\nHost:\r\n\r\n"]
)
def test_odd_but_harmless(client: Client, request_: bytes) -> None:
    """RFC 9112 lets a server be lenient with spaces in the request line; and a Host may be empty."""
    assert client.ask(request_).body == b"hello"


@pytest.mark.parametrize("length", ["5", "05", "00000000000000000005", "5 ", "\t5\t"])
def test_lengths_that_are_numbers(client: Client, length: str) -> None:
    assert client.ask(get("/echo", f"Content-Length: {length}", method="POST") + b"hello").body == b"hello"
    assert client.ask(get()).body == b"hello"


@pytest.mark.parametrize("coding", ["chunked", "CHUNKED", " chunked "])
def test_codings_that_are_chunked(client: Client, coding: str) -> None:
    request = get("/echo", f"Transfer-Encoding:{coding}", method="POST")
    assert client.ask(request + b"5\r\nhello\r\n0\r\n\r\n").body == b"hello"
    assert client.ask(get()).body == b"hello"
