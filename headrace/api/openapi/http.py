# SPDX-License-Identifier: Apache-2.0
"""`GET /openapi.json` and `GET /docs`, over one data plane and one table of routes.

The description of a model is cached until its configuration changes. The page at `/docs` is one response with its style and
script inside (the files in `assets`), which reads `/openapi.json`; its content security policy allows only these, by hash,
and only connections to the same server.
"""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from importlib.resources import files
from typing import Any
from urllib.parse import parse_qsl

import orjson

from headrace.api.openapi.document import base_document
from headrace.api.openapi.models import describe_model
from headrace.api.openapi.operations import OperationTable
from headrace.core.errors import InvalidArgument
from headrace.core.names import check_name
from headrace.engine.dataplane import DataPlane
from headrace.models.config.types import ModelConfig
from headrace.net.http.coding import choose_coding, deflate
from headrace.net.http.exchange import Exchange
from headrace.net.http.heads import CONTENT_TYPE, JSON, ResponseHead
from headrace.net.http.routes import Routes

_FIELDS = [(b"cache-control", b"no-cache"), (b"vary", b"accept-encoding"), (b"x-content-type-options", b"nosniff")]
_OK = ResponseHead(200, [(CONTENT_TYPE, JSON), *_FIELDS])
_SAME = ResponseHead(304, _FIELDS)


_STYLE = "/*STYLE*/"
_SCRIPT = "/*SCRIPT*/"


@dataclass(frozen=True, slots=True)
class OpenApiSettings:
    """Title, server address and limits of the document."""

    title: str = "Headrace"

    server_url: str = "http://localhost:8000"
    """Server address in the curl examples."""

    show_models: bool = True
    """Whether to describe the loaded models; off where the metadata API is restricted."""

    models: int = 256
    """Maximum number of described models. `/openapi.json?model=NAME` describes any other."""

    model_bytes: int = 4 * 1024 * 1024
    """Maximum size of all model descriptions together."""


@dataclass(frozen=True, slots=True)
class _ModelEntry:
    """The description of one model configuration."""

    config: ModelConfig
    path: str
    item: bytes


@dataclass(frozen=True, slots=True)
class _Document:
    """A document, and the configurations that it describes."""

    configs: Sequence[ModelConfig]
    text: bytes
    tag: bytes
    packed: dict[bytes, bytes] = field(default_factory=dict)
    """Compressed copies by content coding, so that a large document is compressed once."""


class OpenApi:
    """Handlers over one data plane."""

    def __init__(
        self,
        plane: DataPlane,
        routes: Routes,
        settings: OpenApiSettings | None = None,
        tables: Sequence[OperationTable] = (),
    ) -> None:
        self._plane = plane
        self._routes = routes
        self._settings = settings or OpenApiSettings()
        self._tables = tables
        self._base: dict[str, Any] | None = None
        self._cached_entries: dict[str, _ModelEntry] = {}
        self._document: _Document | None = None
        self._page_head, self._page = load_page()

    def add_to(self, routes: Routes) -> None:
        """Serve the paths."""
        routes.add("GET", "/openapi.json", self.document, scope="read")
        routes.add("GET", "/docs", self.page, scope="read")

    def page(self, exchange: Exchange) -> None:
        """Answer `GET /docs`."""
        exchange.respond(self._page_head, self._page)

    def document(self, exchange: Exchange) -> None:
        """Answer `GET /openapi.json`."""
        model = _query_model(exchange.head.query)
        document = self._current() if model is None else self._of_model(model)
        extra = ((b"etag", document.tag),)
        if document.tag in (exchange.head.get(b"if-none-match") or b""):
            exchange.respond(_SAME, b"", extra)
            return
        coding = choose_coding(exchange.head.get(b"accept-encoding") or b"")
        if coding is None:
            exchange.respond(_OK, document.text, extra)
            return
        if coding not in document.packed:
            document.packed[coding] = deflate(coding, [document.text])
        exchange.respond(_OK, document.packed[coding], (*extra, (b"content-encoding", coding)))

    def _current(self) -> _Document:
        configs = self._configs()
        document = self._document
        if document is None or len(document.configs) != len(configs) or any(map(_differs, document.configs, configs)):
            entries = self._entries(configs)
            self._cached_entries = {entry.config.name: entry for entry in entries}
            self._document = document = self._build(configs, entries, len(configs))
        return document

    def _of_model(self, name: str) -> _Document:
        # A document without models has none for a query, either.
        configs = [self._plane.config(check_name(name))] if self._settings.show_models else []
        return self._build(configs, self._entries(configs), len(self._plane.model_names()))

    def _configs(self) -> list[ModelConfig]:
        if not self._settings.show_models:
            return []
        versions = (self._plane.find(name) for name in self._plane.model_names())
        return [version.config for version in versions if version is not None]

    def _build(self, configs: Sequence[ModelConfig], entries: Sequence[_ModelEntry], count: int) -> _Document:
        if self._base is None:
            # Not earlier: other packages may add their routes after this one.
            self._base = base_document(self._routes, self._tables, self._settings.title)
        items = {entry.path: orjson.Fragment(entry.item) for entry in entries}
        models = {"shown": len(entries), "loaded": count if self._settings.show_models else 0}
        document = {**self._base, "x-headrace-models": models, "paths": {**items, **self._base["paths"]}}
        text = orjson.dumps(document)
        digest = hashlib.sha256(text).hexdigest()[:32]
        return _Document(configs, text, f'W/"{digest}"'.encode())

    def _entries(self, configs: Sequence[ModelConfig]) -> list[_ModelEntry]:
        """Return as many entries as the limits allow."""
        entries: list[_ModelEntry] = []
        free_bytes = self._settings.model_bytes
        for config in configs[: self._settings.models]:
            entry = self._cached_entries.get(config.name)
            if entry is None or entry.config is not config:
                entry = _ModelEntry(config, *describe_model(config, self._settings.server_url))
            free_bytes -= len(entry.item)
            if free_bytes < 0 and entries:
                break
            entries.append(entry)
        return entries


def _differs(before: ModelConfig, config: ModelConfig) -> bool:
    return before is not config


def _query_model(query: bytes) -> str | None:
    if not query:
        return None
    try:
        pairs = parse_qsl(query.decode(), keep_blank_values=True, errors="strict", max_num_fields=8)
    except ValueError:
        raise InvalidArgument("the query must be ?model=NAME, in UTF-8") from None
    return next((value for key, value in pairs if key == "model"), None)


def load_page() -> tuple[ResponseHead, bytes]:
    """Return the head and the body of `GET /docs`."""
    assets = files("headrace.api.openapi").joinpath("assets")
    style, script, frame = (
        assets.joinpath(name).read_text(encoding="utf-8") for name in ("docs.css", "docs.js", "docs.html")
    )
    page = frame.replace(_STYLE, style).replace(_SCRIPT, script)
    return ResponseHead(200, _fields(style, script)), page.encode()


def _fields(style: str, script: str) -> list[tuple[bytes, bytes]]:
    policy = (
        f"default-src 'none'; script-src {_hash(script)}; style-src {_hash(style)}; connect-src 'self'; "
        "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    )
    return [
        (CONTENT_TYPE, b"text/html; charset=utf-8"),
        (b"content-security-policy", policy.encode()),
        (b"x-content-type-options", b"nosniff"),
        (b"x-frame-options", b"DENY"),
        (b"referrer-policy", b"no-referrer"),
        (b"cross-origin-opener-policy", b"same-origin"),
        (b"cache-control", b"no-cache"),
    ]


def _hash(text: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"
