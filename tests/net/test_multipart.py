# SPDX-License-Identifier: Apache-2.0
"""multipart/form-data: whole and in pieces of any size, with files of any bytes, and what is refused."""

from __future__ import annotations

import httpx2
import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.core.errors import InvalidArgument, TooLarge
from headrace.net.http.multipart import HEAD_BYTES, PARTS, FormField, MultipartReader, PartHead, read_form

TYPE = b"multipart/form-data; boundary=limit"


def part(content: bytes, disposition: bytes = b'form-data; name="file"', more: bytes = b"") -> bytes:
    return b"--limit\r\nContent-Disposition: %b\r\n%b\r\n%b\r\n" % (disposition, more, content)


def in_pieces(body: bytes, sizes: list[int]) -> list[FormField]:
    contents: list[tuple[PartHead, list[bytes]]] = []

    def open_part(head: PartHead) -> object:
        contents.append((head, []))
        return contents[-1][1].append

    reader = MultipartReader(TYPE, open_part)  # type: ignore[arg-type]
    start = 0
    for size in [*sizes, len(body)]:
        reader.feed(body[start : start + size])
        start += size
    reader.finish()
    return [FormField(head, b"".join(pieces)) for head, pieces in contents]


def test_what_a_client_sends() -> None:
    request = httpx2.Request(
        "POST",
        "http://x/",
        data={"purpose": "batch", "expires_after[seconds]": "3600"},
        files={"file": ('n\u00e4m"e.jsonl', b"\x00\r\n--\xff", "application/jsonl")},
    )
    fields = read_form(request.headers["content-type"].encode(), request.read())
    assert [(field.head.name, field.content) for field in fields[:2]] == [
        ("purpose", b"batch"),
        ("expires_after[seconds]", b"3600"),
    ]
    assert fields[2].content == b"\x00\r\n--\xff"
    assert fields[2].head.content_type == "application/jsonl"
    assert fields[2].head.filename is not None and fields[2].head.filename.startswith("n\u00e4m")
    assert fields[0].head.filename is None


@given(
    contents=st.lists(st.binary(max_size=40).filter(lambda content: b"--limit" not in content), max_size=4),
    sizes=st.lists(st.integers(0, 30), max_size=30),
)
def test_pieces_of_any_size_mean_the_same(contents: list[bytes], sizes: list[int]) -> None:
    body = b"before" * bool(contents) + b"\r\n" + b"".join(map(part, contents)) + b"--limit--\r\nafter"
    assert [piece.content for piece in in_pieces(body, sizes)] == contents
    assert [each.content for each in read_form(TYPE, body)] == contents


def test_contents_that_look_like_a_boundary() -> None:
    tricky = b"\r\n--limi\r\n--\r\n-\r\r\n"
    assert read_form(TYPE, part(tricky) + b"--limit--")[0].content == tricky


def test_names_with_quotes_and_without() -> None:
    quoted = part(b"", b'form-data; name="a\\"b"; filename="c\\\\d;e"')
    plain = part(b"", b"form-data; name=plain; filename=file.txt")
    heads = [each.head for each in read_form(TYPE, quoted + plain + b"--limit--")]
    assert heads == [PartHead('a"b', "c\\d;e", ""), PartHead("plain", "file.txt", "")]


def test_no_parts() -> None:
    assert read_form(TYPE, b"--limit--\r\n") == []


@pytest.mark.parametrize(
    ("content_type", "body", "text"),
    [
        (b"application/json", b"{}", "must be multipart/form-data"),
        (b"multipart/form-data", b"", "needs a boundary"),
        (b"multipart/form-data; boundary=" + b"x" * 71, b"", "needs a boundary"),
        (TYPE, b"", "ends before its last boundary"),
        (TYPE, part(b"cut"), "ends before its last boundary"),
        (TYPE, b"--limited\r\n\r\n", "text behind a boundary"),
        (TYPE, b"--limit" + b" " * HEAD_BYTES + b"\r\n", "text behind a boundary"),
        (TYPE, b"--limit\r\n\r\nno name\r\n--limit--", "Content-Disposition"),
        (TYPE, part(b"", b"attachment; name=a") + b"--limit--", "Content-Disposition"),
        (TYPE, part(b"", b'form-data; name="\xff"') + b"--limit--", "not UTF-8"),
        (TYPE, part(b"aGk=", more=b"Content-Transfer-Encoding: base64\r\n") + b"--limit--", "send it as it is"),
    ],
)
def test_bodies_that_are_refused(content_type: bytes, body: bytes, text: str) -> None:
    with pytest.raises(InvalidArgument, match=text):
        read_form(content_type, body)


def test_bounds() -> None:
    assert len(read_form(TYPE, part(b"x") * PARTS + b"--limit--")) == PARTS
    with pytest.raises(TooLarge, match="parts"):
        read_form(TYPE, part(b"x") * (PARTS + 1) + b"--limit--")
    with pytest.raises(TooLarge, match="fields"):
        read_form(TYPE, part(b"x", more=b"X: %b\r\n" % (b"y" * HEAD_BYTES)) + b"--limit--")


def test_a_large_file_is_passed_on_as_it_arrives() -> None:
    received: list[int] = []
    reader = MultipartReader(TYPE, lambda _: lambda content: received.append(len(content)))
    reader.feed(part(b"")[:-2])
    for _ in range(100):
        reader.feed(bytes(100_000))
    assert sum(received) >= 100 * 100_000 - len(b"\r\n--limit")
    reader.feed(b"\r\n--limit--")
    reader.finish()
    assert sum(received) == 100 * 100_000
