# SPDX-License-Identifier: Apache-2.0
"""The routes of the console: `GET /console`, its files, live data, metrics history, and requests."""

from __future__ import annotations

import asyncio
import gzip
import hashlib
import logging
import math
import time
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass
from importlib.resources import files
from string import Template
from typing import Any

import orjson

from headrace.core.errors import InvalidArgument, NotFound
from headrace.core.telemetry.metrics import Registry
from headrace.engine.dataplane import DataPlane
from headrace.engine.scheduling.request_timeline import MAX_TIMELINES
from headrace.net.http.coding import GZIP, choose_coding
from headrace.net.http.exchange import Exchange
from headrace.net.http.heads import CONTENT_TYPE, JSON, Fields, ResponseHead, parse_query
from headrace.net.http.routes import Routes
from headrace.programs.console.history import DEFAULT_SECONDS, INTERVAL_SECONDS, History, Numbers
from headrace.programs.console.live_data import BOUNDS_MS, Addresses, Live, Machine, Others, Tasks
from headrace.programs.console.request_timelines import RequestWatcher, parse_watch_request

log = logging.getLogger("headrace.console")
Gather = Callable[[], Awaitable[None]]
"""Gathers the numbers of the other workers."""

_TAG = "Console"
_PAGE = {"text/html": {"schema": {"type": "string"}}}
_ANY = {"*/*": {"schema": {"type": "string"}}}
_NUMBERS = {"application/json": {"schema": {"type": "object"}}}
_HISTORY_PARAMETERS = [
    {"name": "model", "in": "query", "schema": {"type": "string"}, "description": "Default: the whole server."},
    {"name": "seconds", "in": "query", "schema": {"type": "number"}, "description": "Only the last seconds."},
    {"name": "since", "in": "query", "schema": {"type": "number"}, "description": "Only points after this Unix time."},
]
_WATCH_SCHEMA = {
    "type": "object",
    "required": ["model"],
    "properties": {
        "model": {"type": "string"},
        "requests": {"type": "integer", "minimum": 0, "maximum": MAX_TIMELINES, "default": 20},
        "id": {"type": "string"},
    },
}


def console_table() -> dict[tuple[str, str], dict[str, Any]]:
    """Descriptions by (method, path)."""
    return {
        ("GET", "/"): _operation("To the console, for a browser", {"302": ("It is at /console.", None)}, 404),
        ("GET", "/console"): _operation("The console page", {"200": ("The page.", _PAGE)}),
        ("GET", "/console/"): _operation(
            "The console page, with a trailing slash",
            {"200": ("The page.", _PAGE), "308": ("It is at /console.", None)},
        ),
        ("GET", "/console/assets/{digest}/{file}"): _operation(
            "A file of the page", {"200": ("The file; it never changes under this name.", _ANY)}, 404
        ),
        ("GET", "/console/api/live"): _operation(
            "Live data of the server", {"200": ("Counts since the start of the server.", _NUMBERS)}
        ),
        ("GET", "/console/api/history"): {
            **_operation("Metrics history of the server or of a model", {"200": ("Points by series.", _NUMBERS)}),
            "parameters": _HISTORY_PARAMETERS,
        },
        ("GET", "/console/api/requests"): _operation(
            "Recent, failed and watched requests", {"200": ("The requests, without their content.", _NUMBERS)}
        ),
        ("POST", "/console/api/requests"): {
            **_operation("Watch the next requests of a model", {"200": ("The same.", _NUMBERS)}, 404, 429),
            "requestBody": {"required": True, "content": {"application/json": {"schema": _WATCH_SCHEMA}}},
        },
    }


def _operation(summary: str, answers: dict[str, tuple[str, Any]], *failing: int) -> dict[str, Any]:
    responses = {
        status: {"description": text, **({"content": content} if content else {})}
        for status, (text, content) in answers.items()
    }
    errors = {
        str(status): {"$ref": f"#/components/responses/Error{status}"} for status in (400, 431, 500, 503, *failing)
    }
    return {"tags": [_TAG], "summary": summary, "responses": {**responses, **errors}}


PATH = "/console"
ASSETS = "/console/assets"
_FRAME = "frame.html"

_TYPES = {
    "html": b"text/html; charset=utf-8",
    "css": b"text/css; charset=utf-8",
    "js": b"text/javascript; charset=utf-8",
    "svg": b"image/svg+xml",
    "txt": b"text/plain; charset=utf-8",
}
_POLICY = (
    b"default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' blob: data:; connect-src 'self'; "
    b"base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
_SECURITY_FIELDS: Fields = (
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
    *_SECURITY_FIELDS,
)
_ASSET_FIELDS: Fields = ((b"cache-control", b"public, max-age=31536000, immutable"), *_SECURITY_FIELDS)


@dataclass(frozen=True, slots=True)
class Page:
    """The files of one page."""

    name: str
    """Its script, and the file with its sections and buttons."""
    title: str
    command: str
    """Text for browsers without JavaScript."""


SERVER = Page("server", "Headrace", "headrace models --help")
GATEWAY = Page("gateway", "Headrace gateway", "headrace jobs --help")
FLEET = Page("fleet", "Headrace fleet", "headrace get --help")


@dataclass(frozen=True, slots=True)
class File:
    """A file of the console, with its response heads."""

    head: ResponseHead
    not_modified: ResponseHead
    """The 304 response."""
    tag: bytes
    plain: bytes
    gzipped: bytes

    def answer(self, exchange: Exchange) -> None:
        """Send the file, or 304."""
        header = exchange.head.get
        if self.tag in (header(b"if-none-match") or b""):
            exchange.respond(self.not_modified)
        elif choose_coding(header(b"accept-encoding") or b"") == GZIP:
            exchange.respond(self.head, self.gzipped, ((b"content-encoding", GZIP),))
        else:
            exchange.respond(self.head, self.plain)


class Pages:
    """A page and its files."""

    def __init__(self, page: Page) -> None:
        folder = files("headrace.programs.console").joinpath("assets")
        contents = {file.name: file.read_bytes() for file in folder.iterdir() if file.name.rpartition(".")[2] in _TYPES}
        frame, own = Template(contents[_FRAME].decode()), contents[f"{page.name}.html"].decode().rstrip()
        contents = {name: content for name, content in contents.items() if not name.endswith(".html")}
        digest = hashlib.sha256()
        for name, content in sorted(contents.items()):
            digest.update(b"%b %d\n%b" % (name.encode(), len(content), content))
        self.digest = digest.hexdigest()[:16]
        text = frame.substitute(
            title=page.title,
            # Relative: the server may be behind a proxy that adds a path.
            assets=f"{ASSETS[1:]}/{self.digest}",
            script=f"{page.name}.js",
            own=own,
            command=page.command,
        )
        self.page = _file(_FRAME, text.encode(), _PAGE_FIELDS)
        self.assets = {name: _file(name, content, _ASSET_FIELDS) for name, content in contents.items()}

    def add_to(self, routes: Routes) -> None:
        """Add the routes."""
        # Public: the page itself asks for the key, and only its data need one.
        routes.add("GET", "/", _to_console, scope=None)
        routes.add("GET", PATH, self.page.answer, scope=None)
        routes.add("GET", f"{PATH}/", _redirect, scope=None)
        routes.add("GET", f"{ASSETS}/{{digest}}/{{file}}", self.asset, scope=None)

    def asset(self, exchange: Exchange) -> None:
        """Send one of the files. A page of another version requests other names, and gets 404."""
        digest, name = exchange.params
        file = self.assets.get(name) if digest == self.digest else None
        if file is None:
            raise NotFound("this version of the console does not have this file: load /console again")
        file.answer(exchange)


_MOVED = ResponseHead(308, [(b"location", b"../console"), *_SECURITY_FIELDS])
_FOUND = ResponseHead(302, [(b"location", b"console"), (b"vary", b"accept"), *_SECURITY_FIELDS[:-1]])


def _to_console(exchange: Exchange) -> None:
    """Redirect browsers from `/` to the console; return 404 to programs, which have the wrong address."""
    if b"text/html" not in (exchange.head.get(b"accept") or b""):
        raise NotFound("Not Found: the console is at /console, and GET /openapi.json lists the paths of this server")
    exchange.respond(_FOUND)


def _redirect(exchange: Exchange) -> None:
    exchange.respond(_MOVED)


def _file(name: str, text: bytes, fields: Fields) -> File:
    tag = b'W/"%b"' % hashlib.sha256(text).hexdigest()[:32].encode()
    shared = (*fields, (b"etag", tag))
    head = ResponseHead(200, [(CONTENT_TYPE, _TYPES[name.rpartition(".")[2]]), *shared])
    return File(head, ResponseHead(304, shared), tag, text, gzip.compress(text, 9, mtime=0))


LIVE = "/console/api/live"
HISTORY = "/console/api/history"
REQUESTS = "/console/api/requests"
_LIVE_HEAD = ResponseHead(
    200, [(CONTENT_TYPE, JSON), (b"cache-control", b"no-store"), (b"x-content-type-options", b"nosniff")]
)


_SHOWN = 200


def _newest_first(documents: Iterable[Numbers]) -> list[Numbers]:
    """Return requests of several workers as one list."""
    requests = {key: request for document in documents for key, request in document.items()}
    return sorted(({"key": key, **request} for key, request in requests.items()), key=lambda each: -each["began"])


def _number(query: dict[str, str], name: str, default: float) -> float:
    try:
        value = float(query.get(name, default))
    except ValueError:
        value = math.nan
    if math.isnan(value) or value < 0:
        raise InvalidArgument(f"'{name}' must be a number, 0 or more")
    return value


def _no_others() -> Iterable[Numbers]:
    return ()


class Console:
    """Handlers over one data plane.

    `others`: the numbers of other workers, if there are any, and `others_requests` their requests; `gather` asks them.
    `control`: whether models are loaded on demand. `tasks`: running downloads. `started`: when the server started.
    """

    def __init__(
        self,
        plane: DataPlane,
        registry: Registry,
        machine: Machine = tuple,
        others: Others = _no_others,
        *,
        control: bool = False,
        tasks: Tasks = tuple,
        watcher: RequestWatcher | None = None,
        others_requests: Others = _no_others,
        gather: Gather | None = None,
        history_seconds: float = DEFAULT_SECONDS,
        started: float | None = None,
    ) -> None:
        self._history = History(BOUNDS_MS, history_seconds)
        started = time.time() if started is None else started
        self._live = Live(plane, registry, machine, others, tasks, control, self._history, started)
        self._gather = gather
        self._sampling: asyncio.Task[None] | None = None
        self._pages = Pages(SERVER)
        self._watcher = watcher or RequestWatcher(plane)
        self._others_requests = others_requests

    def add_to(self, routes: Routes) -> None:
        """Add the routes."""
        self._pages.add_to(routes)
        routes.add("GET", LIVE, self.live, scope="read", workers="gather")
        routes.add("GET", HISTORY, self.history, scope="read")
        routes.add("GET", REQUESTS, self.requests, scope="read", workers="gather")
        routes.add("POST", REQUESTS, self.watch, scope="admin", workers="all-running")

    def start(self, addresses: Addresses) -> None:
        """Start the metrics history. `addresses`: returns the URLs of the server's ports."""
        self._live.addresses = addresses
        self._sampling = asyncio.get_running_loop().create_task(self._sample())

    def close(self) -> None:
        """Stop the metrics history."""
        if self._sampling is not None:
            self._sampling.cancel()

    async def _sample(self) -> None:
        while True:
            try:
                if self._gather is not None:
                    await self._gather()
                self._live.sample()
            except Exception:
                log.exception("The console could not add a point to its metrics history.")
            await asyncio.sleep(INTERVAL_SECONDS)

    def numbers(self) -> Numbers:
        """Return this process's numbers, for other workers."""
        return self._live.numbers()

    def timelines(self) -> Numbers:
        """Return this process's requests and timelines, for other workers."""
        return {**self._watcher.document(), "recent": self._watcher.recent()}

    def requests(self, exchange: Exchange) -> None:
        """Return recent and failed requests, the watches and their timelines, newest first."""
        exchange.respond(_LIVE_HEAD, orjson.dumps(self._requests()))

    def watch(self, exchange: Exchange) -> None:
        """Start or stop watching a model."""
        self._watcher.start(parse_watch_request(bytes(exchange.body)))
        exchange.respond(_LIVE_HEAD, orjson.dumps(self._requests()))

    def _requests(self) -> Numbers:
        own_requests = self.timelines()
        documents = [own_requests, *self._others_requests()]
        recent = [document["recent"] for document in documents if "recent" in document]
        return {
            "watching": own_requests["watching"],
            "requests": _newest_first([document["requests"] for document in documents]),
            "recent": _newest_first([requests["answered"] for requests in recent])[:_SHOWN],
            "failed": _newest_first([requests["failed"] for requests in recent])[:_SHOWN],
        }

    def history(self, exchange: Exchange) -> None:
        """Return the metrics history of the server, or of one model."""
        query = parse_query(exchange.head.query)
        seconds, since = _number(query, "seconds", math.inf), _number(query, "since", 0.0)
        document = self._history.document(query.get("model", ""), seconds, since)
        exchange.respond(_LIVE_HEAD, orjson.dumps(document))

    def live(self, exchange: Exchange) -> None:
        """Return the live data."""
        exchange.respond(_LIVE_HEAD, orjson.dumps(self._live.document()))
