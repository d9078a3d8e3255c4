# SPDX-License-Identifier: Apache-2.0
"""Which handler answers a request: exact paths, paths with `{placeholders}`, and mounted prefixes.

Filled by composition roots before the first request; asked by `http1` and `http2` for every one. A path that matched
once is remembered, so a hot route costs one dictionary look-up however it was written.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from urllib.parse import unquote_to_bytes

from headrace.core.errors import HeadraceError, InvalidArgument
from headrace.net.http.exchange import Exchange, Handler
from headrace.net.http.heads import CONTENT_TYPE, JSON, RequestHead, ResponseHead

_REMEMBERED_PATHS = 4096
_REMEMBERED_PATH_BYTES = 512
"""Longer ones are looked up each time: 4096 paths of 64 KiB would be a quarter of a gigabyte."""
_REMEMBERED_HEADS = 1024
_PLACEHOLDER = re.compile(r"\\\{[a-z0-9_]+\\\}")
_SEGMENT = "([^/]+)"
_ESCAPED = re.compile(r"\\(.)")


@dataclass(frozen=True, slots=True)
class Route:
    """A handler and how it wants its requests."""

    handler: Handler
    streams_body: bool = False
    """Call the handler as soon as the head is there; the body comes through `on_body`."""
    raw: bool = False
    """Give the body as it came, not inflated."""
    whole_bytes: int = 0
    longer: Route | None = None
    """Takes requests whose body is longer than `whole_bytes`, or whose length is not told before."""


Match = tuple[Route, tuple[str, ...]]


@dataclass(frozen=True, slots=True)
class KnownHead:
    """What the bytes of an HTTP/1.1 head turned out to mean."""

    text: bytes
    """Those bytes."""
    size: int
    """How many there are with the body."""
    head: RequestHead
    route: Route
    params: tuple[str, ...]
    plain: bool
    """Whether its body goes to the handler as it came."""


class Routes:
    """A table from method and path to a route."""

    def __init__(self) -> None:
        self._exact: dict[bytes, dict[bytes, Route]] = {b"*": {b"OPTIONS": _SERVER_OPTIONS}}
        self._patterns: list[tuple[re.Pattern[bytes], dict[bytes, Route]]] = []
        self._mounts: list[tuple[bytes, Route]] = []
        self._remembered: dict[tuple[bytes, bytes], Match] = {}
        self._known_heads: dict[bytes, dict[bytes, KnownHead]] = {b"http": {}, b"https": {}}

    def add(self, method: str, path: str, handler: Handler, *, streams_body: bool = False) -> None:
        """Answer `method` on `path`; `{name}` in the path matches one segment. GET also answers HEAD."""
        route = Route(handler, streams_body)
        methods = self._methods_of(path)
        if method == "GET" and methods.get(b"HEAD") in (None, methods.get(b"GET")):
            methods[b"HEAD"] = route
        methods[method.encode()] = route
        self._forget()

    def mount(self, prefix: str, handler: Handler) -> None:
        """Give every request under `prefix` that no other route answers to `handler`, with a streamed body."""
        self._mounts.append((prefix.rstrip("/").encode(), Route(handler, streams_body=True)))
        self._mounts.sort(key=lambda mount: -len(mount[0]))
        self._forget()

    def fallback(self, handler: Handler, streaming: Handler, *, whole_bytes: int) -> None:
        """Give every request that no other route answers to `handler`, or to `streaming` if its body is long.

        For proxies: a body up to `whole_bytes` comes whole and any other streamed, and neither is inflated.
        """
        longer = Route(streaming, streams_body=True)
        self._mounts.append((b"", Route(handler, raw=True, whole_bytes=whole_bytes, longer=longer)))
        self._mounts.sort(key=lambda mount: -len(mount[0]))
        self._forget()

    def find(self, method: bytes, path: bytes) -> Match:
        """The route for a request; for an unknown path or method, one that answers 404 or 405."""
        match = self._remembered.get((method, path))
        if match is None:
            match = self._search(method, path)
        return match

    def listed(self) -> list[tuple[str, str]]:
        """Every method and path, in the order of paths; placeholders are `{}`, since their names are not kept.

        HEAD is left out where GET answers it; mounted prefixes, the fallback and `OPTIONS *` are no routes of their own.
        """
        paths = [(path.decode(), methods) for path, methods in self._exact.items() if path.startswith(b"/")]
        for pattern, methods in self._patterns:
            text = pattern.pattern.decode().replace(_SEGMENT, "{}")
            paths.append((_ESCAPED.sub(r"\1", text), methods))
        found = [
            (path, method.decode())
            for path, methods in paths
            for method, route in methods.items()
            if method != b"HEAD" or methods.get(b"GET") is not route
        ]
        return [(method, path) for path, method in sorted(found)]

    def known_heads(self, scheme: bytes) -> dict[bytes, KnownHead]:
        """HTTP/1.1 heads seen before, by their bytes. For `http1.reader`."""
        return self._known_heads[scheme]

    def remember_head(self, scheme: bytes, known: KnownHead) -> None:
        """Keep the meaning of a head."""
        heads = self._known_heads[scheme]
        if len(heads) >= _REMEMBERED_HEADS:
            heads.clear()
        heads[known.text] = known

    def _forget(self) -> None:
        self._remembered.clear()
        for heads in self._known_heads.values():
            heads.clear()

    def _methods_of(self, path: str) -> dict[bytes, Route]:
        if "{" not in path:
            return self._exact.setdefault(path.encode(), {})
        text = _PLACEHOLDER.sub(_SEGMENT, re.escape(path))
        if r"\{" in text or r"\}" in text:
            raise ValueError(f"{path!r}: a placeholder is {{name}}, in lower-case letters, digits and underscores")
        pattern = re.compile(text.encode())
        for known, methods in self._patterns:
            if known.pattern == pattern.pattern:
                return methods
        methods = {}
        self._patterns.append((pattern, methods))
        return methods

    def _search(self, method: bytes, path: bytes) -> Match:
        allowed: set[bytes] = set()
        for methods, params in self._candidates(path):
            route = methods.get(method)
            if route is not None:
                return self._remember(method, path, (route, params))
            allowed.update(methods)
        for prefix, route in self._mounts:
            if path == prefix or path.startswith(prefix + b"/"):
                return self._remember(method, path, (route, ()))
        if allowed:
            return Route(_method_not_allowed(allowed)), ()
        return _NOT_FOUND, ()

    def _candidates(self, path: bytes) -> list[tuple[dict[bytes, Route], tuple[str, ...]]]:
        found: list[tuple[dict[bytes, Route], tuple[str, ...]]] = []
        exact = self._exact.get(path)
        if exact is not None:
            found.append((exact, ()))
        for pattern, methods in self._patterns:
            match = pattern.fullmatch(path)
            if match is not None:
                try:
                    found.append((methods, tuple(_decode(group) for group in match.groups())))
                except HeadraceError as error:
                    return [({method: Route(_failing(error)) for method in methods}, ())]
        return found

    def _remember(self, method: bytes, path: bytes, match: Match) -> Match:
        # Clients choose paths, so the memory of them is bounded; a full table is simply begun again.
        if len(path) <= _REMEMBERED_PATH_BYTES:
            if len(self._remembered) >= _REMEMBERED_PATHS:
                self._remembered.clear()
            self._remembered[method, path] = match
        return match


def _decode(segment: bytes) -> str:
    try:
        return unquote_to_bytes(segment).decode()
    except UnicodeDecodeError:
        raise InvalidArgument("the path is not UTF-8 after percent-decoding") from None


def _failing(error: HeadraceError) -> Handler:
    return lambda exchange: exchange.fail(error)


def _method_not_allowed(allowed: set[bytes]) -> Handler:
    head = ResponseHead(405, [(CONTENT_TYPE, JSON), (b"allow", b", ".join(sorted(allowed)))])
    return lambda exchange: exchange.respond(head, b'{"error":"Method Not Allowed"}')


_NOT_FOUND_HEAD = ResponseHead(404, [(CONTENT_TYPE, JSON)])


def _not_found(exchange: Exchange) -> None:
    exchange.respond(_NOT_FOUND_HEAD, b'{"error":"Not Found"}')


_NOT_FOUND = Route(_not_found)

_NO_CONTENT_HEAD = ResponseHead(204)
_SERVER_OPTIONS = Route(lambda exchange: exchange.respond(_NO_CONTENT_HEAD))
"""`OPTIONS *` asks nothing of any resource: a ping (RFC 9110, 9.3.7)."""
