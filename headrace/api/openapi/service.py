# SPDX-License-Identifier: Apache-2.0
"""`GET /openapi.json` and `GET /docs`, over one data plane and one table of routes.

Made by a composition root, which then adds it to the routes it describes. What is said of a model is kept until its
configuration is another; the whole document until any of them is. So asking again costs a comparison.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import parse_qsl

import orjson

from headrace.api.openapi.describing import Table
from headrace.api.openapi.document import base_document
from headrace.api.openapi.models import describe
from headrace.api.openapi.page import load_page
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


@dataclass(frozen=True, slots=True)
class OpenApiSettings:
    """What the document says of the server, and how large it may become."""

    title: str = "Headrace"

    server_url: str = "http://localhost:8000"
    """Where the lines for curl send their requests."""

    show_models: bool = True
    """Whether to describe the loaded models. Not where clients need a header to see their metadata."""

    models: int = 256
    """How many models are described at most. Any other can be asked for: `/openapi.json?model=NAME`."""

    model_bytes: int = 4 * 1024 * 1024
    """How long their descriptions may be together."""


@dataclass(frozen=True, slots=True)
class _Described:
    """What is said of one configuration."""

    config: ModelConfig
    path: str
    item: bytes


@dataclass(frozen=True, slots=True)
class _Document:
    """A document, and which configurations it was made of."""

    configs: Sequence[ModelConfig]
    text: bytes
    tag: bytes
    packed: dict[bytes, bytes] = field(default_factory=dict)
    """By content coding. Kept, so that a large document is compressed once and not for every browser."""


class OpenApi:
    """Handlers over one data plane."""

    def __init__(
        self,
        plane: DataPlane,
        routes: Routes,
        settings: OpenApiSettings | None = None,
        tables: Sequence[Table] = (),
    ) -> None:
        self._plane = plane
        self._routes = routes
        self._settings = settings or OpenApiSettings()
        self._tables = tables
        self._base: dict[str, Any] | None = None
        self._described: dict[str, _Described] = {}
        self._document: _Document | None = None
        self._page_head, self._page = load_page()

    def add_to(self, routes: Routes) -> None:
        """Serve the paths."""
        routes.add("GET", "/openapi.json", self.document)
        routes.add("GET", "/docs", self.page)

    def page(self, exchange: Exchange) -> None:
        """For people."""
        exchange.respond(self._page_head, self._page)

    def document(self, exchange: Exchange) -> None:
        """For programs."""
        wanted = _model_of(exchange.head.query)
        document = self._current() if wanted is None else self._of_one(wanted)
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
        known = self._document
        if known is None or len(known.configs) != len(configs) or any(map(_other, known.configs, configs)):
            chosen = self._chosen(configs)
            self._described = {each.config.name: each for each in chosen}
            self._document = known = self._made(configs, chosen, len(configs))
        return known

    def _of_one(self, name: str) -> _Document:
        # Without its models, the document tells of none, whoever asks and however.
        configs = [self._plane.config(check_name(name))] if self._settings.show_models else []
        return self._made(configs, self._chosen(configs), len(self._plane.model_names()))

    def _configs(self) -> list[ModelConfig]:
        if not self._settings.show_models:
            return []
        versions = (self._plane.find(name) for name in self._plane.model_names())
        return [version.config for version in versions if version is not None]

    def _made(self, configs: Sequence[ModelConfig], shown: Sequence[_Described], count: int) -> _Document:
        if self._base is None:
            # Not earlier: other rooms may add their routes after this one.
            self._base = base_document(self._routes, self._tables, self._settings.title)
        items = {each.path: orjson.Fragment(each.item) for each in shown}
        models = {"shown": len(shown), "loaded": count if self._settings.show_models else 0}
        document = {**self._base, "x-headrace-models": models, "paths": {**items, **self._base["paths"]}}
        text = orjson.dumps(document)
        digest = hashlib.sha256(text).hexdigest()[:32]
        return _Document(configs, text, f'W/"{digest}"'.encode())

    def _chosen(self, configs: Sequence[ModelConfig]) -> list[_Described]:
        """As many as there is room for."""
        chosen: list[_Described] = []
        room = self._settings.model_bytes
        for config in configs[: self._settings.models]:
            known = self._described.get(config.name)
            if known is None or known.config is not config:
                known = _Described(config, *describe(config, self._settings.server_url))
            room -= len(known.item)
            if room < 0 and chosen:
                break
            chosen.append(known)
        return chosen


def _other(known: ModelConfig, config: ModelConfig) -> bool:
    return known is not config


def _model_of(query: bytes) -> str | None:
    if not query:
        return None
    try:
        pairs = parse_qsl(query.decode(), keep_blank_values=True, errors="strict", max_num_fields=8)
    except ValueError:
        raise InvalidArgument("the query must be ?model=NAME, in UTF-8") from None
    return next((value for key, value in pairs if key == "model"), None)
