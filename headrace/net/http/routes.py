# SPDX-License-Identifier: Apache-2.0
"""The routing table: finds a request's handler by exact path, path with `{placeholders}`, or mounted prefix.

Programs fill it before the first request; `http1` and `http2` search it for every request. A matched path is cached, so
that a hot route costs one dictionary look-up however it was written.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Literal, NamedTuple
from urllib.parse import unquote_to_bytes

import orjson

from headrace.core.errors import HeadraceError, InvalidArgument
from headrace.net.http.exchange import Handler
from headrace.net.http.heads import CONTENT_TYPE, JSON, RequestHead, ResponseHead

_REMEMBERED_PATHS = 4096
_REMEMBERED_PATH_BYTES = 512
"""Longer paths are not cached: 4096 paths of 64 KiB would take a quarter of a gigabyte."""
_REMEMBERED_HEADS = 1024
_PLACEHOLDER = re.compile(r"\\\{[a-z0-9_]+\\\}")
_SEGMENT = "([^/]+)"
_ESCAPED = re.compile(r"\\(.)")
_API_DESCRIPTION = b"/openapi.json"
_LISTED_PATHS = 8
"""A 404 lists the paths of a server that has at most this many and no API description."""


Scope = Literal["infer", "read", "admin"]
"""infer: compute requests. read: metadata, statistics, metrics. admin: load, unload, change settings, and the others."""

Workers = Literal["one", "gather", "all", "all-running", "all-ordered"]
"""Which worker processes handle a request, where there are several.

one: the one that received it. gather: the same, after it has gathered the statistics of all workers. all: every worker,
also those that start later. all-running: every worker that runs now. all-ordered: every worker, in the same order as
other such requests.
"""


class Policy(NamedTuple):
    """Who may call a route or gRPC method, and which workers handle it."""

    scope: Scope | None = "admin"
    """The scope that an API key needs, where keys are required; None: open to all. The default is the strictest."""
    workers: Workers = "one"
    keeps_data: bool = False
    """Whether it changes what the server keeps: as for the scope `admin`, pages of other sites may not call it."""


_STRICTEST = Policy()


@dataclass(frozen=True, slots=True)
class Route:
    """A handler and how it receives request bodies."""

    handler: Handler
    streams_body: bool = False
    """Call the handler as soon as the head is complete; the body arrives through `on_body`."""
    raw: bool = False
    """Pass the body as received, not inflated."""
    whole_bytes: int = 0
    longer: Route | None = None
    """The route for requests whose body is longer than `whole_bytes`, or of unknown length."""
    policy: Policy = _STRICTEST


Match = tuple[Route, tuple[str, ...]]

Middleware = Callable[[str, str, Route], Handler]
"""Returns the handler of a route with the checks of its policy, by method (`*` for a mounted prefix), path and route."""


@dataclass(frozen=True, slots=True)
class KnownHead:
    """The bytes of an HTTP/1.1 head and their parsed form."""

    text: bytes
    """The head's bytes."""
    size: int
    """Size of head and body."""
    head: RequestHead
    route: Route
    params: tuple[str, ...]
    plain: bool
    """Whether the handler gets the body as received."""


class Routes:
    """Maps method and path to a route. `middleware` wraps each handler once, when it is registered."""

    def __init__(self, middleware: Middleware | None = None) -> None:
        self._middleware = middleware
        self._exact: dict[bytes, dict[bytes, Route]] = {b"*": {b"OPTIONS": _SERVER_OPTIONS}}
        self._patterns: list[tuple[re.Pattern[bytes], dict[bytes, Route]]] = []
        self._mounts: list[tuple[bytes, Route]] = []
        self._not_found: Match | None = None
        self._remembered: dict[tuple[bytes, bytes], Match] = {}
        self._known_heads: dict[bytes, dict[bytes, KnownHead]] = {b"http": {}, b"https": {}}

    def add(
        self,
        method: str,
        path: str,
        handler: Handler,
        *,
        scope: Scope | None = "admin",
        workers: Workers = "one",
        keeps_data: bool = False,
        streams_body: bool = False,
    ) -> None:
        """Add a route; `{name}` in the path matches one segment. GET also answers HEAD."""
        route = self._wrapped(method, path, Route(handler, streams_body, policy=Policy(scope, workers, keeps_data)))
        methods = self._methods_of(path)
        if method == "GET" and methods.get(b"HEAD") in (None, methods.get(b"GET")):
            methods[b"HEAD"] = route
        methods[method.encode()] = route
        self._clear_caches()

    def mount(self, prefix: str, handler: Handler, *, scope: Scope | None = "admin") -> None:
        """Send every request under `prefix` that no other route matches to `handler`, with a streamed body."""
        route = self._wrapped("*", prefix, Route(handler, streams_body=True, policy=Policy(scope)))
        self._mounts.append((prefix.rstrip("/").encode(), route))
        self._mounts.sort(key=lambda mount: -len(mount[0]))
        self._clear_caches()

    def fallback(self, handler: Handler, streaming: Handler, *, whole_bytes: int, prefix: str = "") -> None:
        """Send every request under `prefix` that no other route matches to `handler`, or to `streaming` if its body is long.

        For proxies: a body up to `whole_bytes` is buffered and any other streamed; neither is inflated.
        """
        longer = self._wrapped("*", prefix, Route(streaming, streams_body=True))
        route = self._wrapped("*", prefix, Route(handler, raw=True, whole_bytes=whole_bytes, longer=longer))
        self._mounts.append((prefix.encode(), route))
        self._mounts.sort(key=lambda mount: -len(mount[0]))
        self._clear_caches()

    def find(self, method: bytes, path: bytes) -> Match:
        """Return the route of a request; for an unknown path or method, one that answers 404 or 405."""
        match = self._remembered.get((method, path))
        if match is None:
            match = self._search(method, path)
        return match

    def listed(self) -> list[tuple[str, str]]:
        """Return every method and path, sorted by path; placeholders are `{}`, since their names are not kept.

        Without HEAD where GET answers it, mounted prefixes, the fallback and `OPTIONS *`.
        """
        paths = [(path.decode(), methods) for path, methods in self._exact.items() if path.startswith(b"/")]
        for pattern, methods in self._patterns:
            text = pattern.pattern.decode().replace(_SEGMENT, "{}")
            paths.append((_ESCAPED.sub(r"\1", text), methods))
        routes = [
            (path, method.decode())
            for path, methods in paths
            for method, route in methods.items()
            if method != b"HEAD" or methods.get(b"GET") is not route
        ]
        return [(method, path) for path, method in sorted(routes)]

    def known_heads(self, scheme: bytes) -> dict[bytes, KnownHead]:
        """Return the HTTP/1.1 heads seen before, by their bytes. For `http1.reader`."""
        return self._known_heads[scheme]

    def remember_head(self, scheme: bytes, known: KnownHead) -> None:
        """Cache a parsed head."""
        heads = self._known_heads[scheme]
        if len(heads) >= _REMEMBERED_HEADS:
            heads.clear()
        heads[known.text] = known

    def _wrapped(self, method: str, path: str, route: Route) -> Route:
        return route if self._middleware is None else replace(route, handler=self._middleware(method, path, route))

    def _clear_caches(self) -> None:
        self._not_found = None
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
        if self._not_found is None:
            self._not_found = Route(_not_found(self._next_step())), ()
        return self._not_found

    def _next_step(self) -> str:
        """Return the text of a 404. It is the same for every path: clients choose paths, and may try many."""
        if b"GET" in self._exact.get(_API_DESCRIPTION, {}):
            return f"this server does not have this path; GET {_API_DESCRIPTION.decode()} lists those it has"
        routes = self.listed()
        if not routes or self._mounts or len({path for _, path in routes}) > _LISTED_PATHS:
            return "this server does not have this path"
        return f"this server has only {', '.join(f'{method} {path}' for method, path in routes)}"

    def _candidates(self, path: bytes) -> list[tuple[dict[bytes, Route], tuple[str, ...]]]:
        candidates: list[tuple[dict[bytes, Route], tuple[str, ...]]] = []
        exact = self._exact.get(path)
        if exact is not None:
            candidates.append((exact, ()))
        for pattern, methods in self._patterns:
            match = pattern.fullmatch(path)
            if match is not None:
                try:
                    candidates.append((methods, tuple(_decode(group) for group in match.groups())))
                except HeadraceError as error:
                    return [({method: Route(_failing(error)) for method in methods}, ())]
        return candidates

    def _remember(self, method: bytes, path: bytes, match: Match) -> Match:
        # Clients choose paths, so the cache is bounded; a full one is cleared.
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


def _not_found(next_step: str) -> Handler:
    body = orjson.dumps({"error": f"Not Found: {next_step}"})
    return lambda exchange: exchange.respond(_NOT_FOUND_HEAD, body)


_NO_CONTENT_HEAD = ResponseHead(204)
_SERVER_OPTIONS = Route(lambda exchange: exchange.respond(_NO_CONTENT_HEAD))
"""`OPTIONS *` asks for no resource: it works as a ping (RFC 9110, 9.3.7)."""
