# SPDX-License-Identifier: Apache-2.0
"""Target `urls`: URLs from clients are refused, or parsed in one way, so that the checked host is the one fetched."""

from __future__ import annotations

from urllib.parse import urlsplit

from fuzz.target import Check, Target, require
from headrace.core.errors import HeadraceError
from headrace.models.storage.locations import parse_location, parse_web_url


def _open() -> Check:
    def check(data: bytes) -> None:
        text = data.decode(errors="replace")
        try:
            parse_location(text)
        except HeadraceError as error:
            require(bool(str(error)), "a refusal without a word")
        try:
            url = parse_web_url(text)
        except HeadraceError:
            return
        require(parse_web_url(url.text) == url, f"written, {url.text!r} reads otherwise")
        other = urlsplit(url.text)
        require((other.hostname, other.scheme) == (url.host, url.scheme), "Python reads another host")
        require(
            url.target.isascii() and not set(url.target) & set(" \r\n\t\\"), f"{url.target!r} would split a request"
        )

    return check


TARGET = Target(
    "URLs that clients name: refused, or read in one way only",
    _open,
    (
        b"http://",
        b"https://",
        b"s3://",
        b"hf://",
        b"file:///",
        b"@",
        b"\\",
        b"[::1]",
        b"127.1",
        b"0x7f000001",
        b"%2f",
        b"#",
        b"?",
        b"..",
        b":80",
        b"xn--",
        b"\xef\xbc\x8f",
        b"\xc2\xad",
    ),
    512,
)
