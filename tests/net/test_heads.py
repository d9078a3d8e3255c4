# SPDX-License-Identifier: Apache-2.0
"""Heads of requests and responses, and the fields that a response may not have."""

from __future__ import annotations

import pytest

from headrace.net.http.heads import OK_EMPTY, OK_JSON, OK_PLAIN, RequestHead, ResponseHead, check_field


class TestRequestHead:
    @pytest.mark.parametrize(
        ("target", "path", "query"),
        [
            (b"/a/b", b"/a/b", b""),
            (b"/a?x=1&y=2", b"/a", b"x=1&y=2"),
            (b"/a?", b"/a", b""),
            (b"/a?b?c", b"/a", b"b?c"),
            (b"?", b"", b""),
            (b"*", b"*", b""),
        ],
    )
    def test_target(self, target: bytes, path: bytes, query: bytes) -> None:
        head = RequestHead(b"GET", target, [], version="1.1")
        assert (head.path, head.query) == (path, query)

    def test_fields(self) -> None:
        head = RequestHead(b"GET", b"/", [(b"a", b"1"), (b"b", b"2"), (b"a", b"3")], version="1.1")
        assert head.get(b"a") == b"3"
        assert head.get(b"b") == b"2"
        assert head.get(b"c") is None
        assert list(head.fields) == [(b"a", b"1"), (b"b", b"2"), (b"a", b"3")]

    def test_defaults(self) -> None:
        head = RequestHead(b"GET", b"/", [], version="1.0")
        assert (head.scheme, head.authority, head.content_length, head.memo) == (b"http", b"", None, None)

    def test_nothing_can_be_hung_on_it_but_the_memo(self) -> None:
        """One head may serve many requests."""
        head = RequestHead(b"GET", b"/", [], version="1.1")
        head.memo = "mine"
        with pytest.raises(AttributeError):
            head.user = "me"  # type: ignore[attr-defined]


class TestResponseHead:
    def test_bytes(self) -> None:
        head = ResponseHead(200, [(b"content-type", b"text/plain"), (b"x-one", b"1")])
        assert head.http1 == b"HTTP/1.1 200 OK\r\ncontent-type: text/plain\r\nx-one: 1\r\n"
        assert head.fields == ((b"content-type", b"text/plain"), (b"x-one", b"1"))

    @pytest.mark.parametrize(
        ("status", "line"),
        [
            (204, b"HTTP/1.1 204 No Content\r\n"),
            (404, b"HTTP/1.1 404 Not Found\r\n"),
            (499, b"HTTP/1.1 499 Client Closed Request\r\n"),
            (505, b"HTTP/1.1 505 HTTP Version Not Supported\r\n"),
            (299, b"HTTP/1.1 299 Unknown\r\n"),
        ],
    )
    def test_status_lines(self, status: int, line: bytes) -> None:
        assert ResponseHead(status).http1 == line

    def test_fields_from_an_iterator(self) -> None:
        head = ResponseHead(200, iter([(b"x-one", b"1")]))
        assert head.fields == ((b"x-one", b"1"),)
        assert b"x-one: 1\r\n" in head.http1

    def test_ready_made(self) -> None:
        assert (OK_EMPTY.status, OK_EMPTY.fields) == (200, ())
        assert OK_JSON.fields == ((b"content-type", b"application/json"),)
        assert OK_PLAIN.fields == ((b"content-type", b"text/plain; charset=utf-8"),)

    def test_a_bad_field_is_refused(self) -> None:
        with pytest.raises(ValueError, match="x-bad"):
            ResponseHead(200, [(b"x-bad", b"a\r\nb")])


class TestCheckField:
    @pytest.mark.parametrize("value", [b"", b"a b", b"a:b", b"a\tb", "é".encode(), b"\xff", b'"quoted, text"; a=b'])
    def test_values(self, value: bytes) -> None:
        check_field(b"x-one", value)

    @pytest.mark.parametrize("value", [b"\r", b"\n", b"\r\n", b"a\rb", b"a\nb", b"a\r\nset-cookie: x", b"\0", b"a\0b"])
    def test_values_that_would_split_a_head(self, value: bytes) -> None:
        with pytest.raises(ValueError, match="line breaks"):
            check_field(b"x-one", value)

    @pytest.mark.parametrize("name", [b"x", b"x-one", b"x_one", b"x1", b"content-type", b"!#$%&'*+-.^_`|~0az"])
    def test_names(self, name: bytes) -> None:
        check_field(name, b"1")

    def test_no_name_has_another_byte(self) -> None:
        for number in set(range(256)) - set(b"abcdefghijklmnopqrstuvwxyz0123456789!#$%&'*+-.^_`|~"):
            byte = bytes([number])
            for name in (byte, b"x" + byte, byte + b"x", b"x" + byte + b"y"):
                with pytest.raises(ValueError, match="not allowed"):
                    check_field(name, b"1")

    def test_a_name_is_not_empty(self) -> None:
        with pytest.raises(ValueError, match="not allowed"):
            check_field(b"", b"1")
