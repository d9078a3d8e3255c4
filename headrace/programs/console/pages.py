# SPDX-License-Identifier: Apache-2.0
"""The files of the page, with heads that let a browser run nothing else and ask nobody else.

Called by `http`, by `fleet` and by the gateway, each with a page of its own: `frame.html` around the page's own sections and
buttons. The other files are one set. The page names its style and its scripts under a digest of them all, so those can be
kept for ever: another version of the server has another digest. They are compressed once, when a server is made.
"""

from __future__ import annotations

import gzip
import hashlib
from dataclasses import dataclass
from importlib.resources import files
from string import Template

from headrace.core.errors import NotFound
from headrace.net.http.coding import GZIP, choose_coding
from headrace.net.http.exchange import Exchange
from headrace.net.http.heads import CONTENT_TYPE, Fields, ResponseHead
from headrace.net.http.routes import Routes

PATH = "/console"
ASSETS = "/console/assets"
_FRAME = "frame.html"

_TYPES = {
    "html": b"text/html; charset=utf-8",
    "css": b"text/css; charset=utf-8",
    "js": b"text/javascript; charset=utf-8",
    "svg": b"image/svg+xml",
}
_POLICY = (
    b"default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' blob: data:; connect-src 'self'; "
    b"base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
_GUARDED: Fields = (
    (b"x-content-type-options", b"nosniff"),
    (b"referrer-policy", b"no-referrer"),
    (b"cross-origin-resource-policy", b"same-origin"),
    (b"vary", b"accept-encoding"),
)
_PAGE_FIELDS: Fields = (
    (b"content-security-policy", _POLICY),
    (b"x-frame-options", b"DENY"),
    (b"cross-origin-opener-policy", b"same-origin"),
    (b"cache-control", b"no-cache"),
    *_GUARDED,
)
_ASSET_FIELDS: Fields = ((b"cache-control", b"public, max-age=31536000, immutable"), *_GUARDED)


@dataclass(frozen=True, slots=True)
class Page:
    """What a page has of its own."""

    name: str
    """Of its script, and of the file with its sections and buttons."""
    title: str
    command: str
    """For who has no JavaScript."""


SERVER = Page("server", "Headrace", "headrace models --help")
GATEWAY = Page("gateway", "Headrace gateway", "headrace jobs --help")
FLEET = Page("fleet", "Headrace fleet", "headrace get --help")


@dataclass(frozen=True, slots=True)
class File:
    """A file as it is sent."""

    head: ResponseHead
    same: ResponseHead
    """The answer to who has it already."""
    tag: bytes
    plain: bytes
    packed: bytes

    def answer(self, exchange: Exchange) -> None:
        """Send it, or say that it is still the same."""
        asked = exchange.head.get
        if self.tag in (asked(b"if-none-match") or b""):
            exchange.respond(self.same)
        elif choose_coding(asked(b"accept-encoding") or b"") == GZIP:
            exchange.respond(self.head, self.packed, ((b"content-encoding", GZIP),))
        else:
            exchange.respond(self.head, self.plain)


class Pages:
    """A page and its files."""

    def __init__(self, page: Page) -> None:
        folder = files("headrace.programs.console").joinpath("assets")
        texts = {each.name: each.read_bytes() for each in folder.iterdir() if each.name.rpartition(".")[2] in _TYPES}
        frame, own = Template(texts[_FRAME].decode()), texts[f"{page.name}.html"].decode().rstrip()
        texts = {name: each for name, each in texts.items() if not name.endswith(".html")}
        digest = hashlib.sha256()
        for name, each in sorted(texts.items()):
            digest.update(b"%b %d\n%b" % (name.encode(), len(each), each))
        self.digest = digest.hexdigest()[:16]
        text = frame.substitute(
            title=page.title,
            # Relative: the server may be behind a proxy that gives it a path of its own.
            assets=f"{ASSETS[1:]}/{self.digest}",
            script=f"{page.name}.js",
            own=own,
            command=page.command,
        )
        self.page = _file(_FRAME, text.encode(), _PAGE_FIELDS)
        self.assets = {name: _file(name, each, _ASSET_FIELDS) for name, each in texts.items()}

    def add_to(self, routes: Routes) -> None:
        """Serve the paths."""
        routes.add("GET", PATH, self.page.answer)
        routes.add("GET", f"{PATH}/", _without_slash)
        routes.add("GET", f"{ASSETS}/{{digest}}/{{file}}", self.asset)

    def asset(self, exchange: Exchange) -> None:
        """One of the other files. A page of another version asks for other ones, and is told to begin again."""
        digest, name = exchange.params
        file = self.assets.get(name) if digest == self.digest else None
        if file is None:
            raise NotFound("this file is of another version of the console, or of none: load /console again")
        file.answer(exchange)


_MOVED = ResponseHead(308, [(b"location", b"../console"), *_GUARDED])


def _without_slash(exchange: Exchange) -> None:
    exchange.respond(_MOVED)


def _file(name: str, text: bytes, fields: Fields) -> File:
    tag = b'W/"%b"' % hashlib.sha256(text).hexdigest()[:32].encode()
    shared = (*fields, (b"etag", tag))
    head = ResponseHead(200, [(CONTENT_TYPE, _TYPES[name.rpartition(".")[2]]), *shared])
    return File(head, ResponseHead(304, shared), tag, text, gzip.compress(text, 9, mtime=0))
