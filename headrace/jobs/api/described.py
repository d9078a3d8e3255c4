# SPDX-License-Identifier: Apache-2.0
"""`GET /openapi.json` and `GET /docs` of the gateway. Made once: its routes do not change while it runs."""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING

import orjson

from headrace.api.openapi.page import load_page
from headrace.net.http.heads import CONTENT_TYPE, JSON, ResponseHead

if TYPE_CHECKING:
    from headrace.net.http.exchange import Exchange
    from headrace.net.http.routes import Routes

_FIELDS = [(b"cache-control", b"no-cache"), (b"x-content-type-options", b"nosniff")]
_OK = ResponseHead(200, [(CONTENT_TYPE, JSON), *_FIELDS])
_SAME = ResponseHead(304, _FIELDS)


class Described:
    """Handlers. `described` has every route of the gateway, those among them that the wire does not know as such."""

    def __init__(self, described: Routes) -> None:
        self._routes = described
        self._text = b""
        self._tag = b""
        self._page_head, self._page = load_page()

    def add_to(self, routes: Routes) -> None:
        """Serve the paths."""
        for table in (routes, self._routes):
            table.add("GET", "/openapi.json", self.document)
            table.add("GET", "/docs", self.page)

    def page(self, exchange: Exchange) -> None:
        """For people."""
        exchange.respond(self._page_head, self._page)

    def document(self, exchange: Exchange) -> None:
        """For programs."""
        if not self._text:
            self._text = made(self._routes)
            self._tag = f'W/"{hashlib.sha256(self._text).hexdigest()[:32]}"'.encode()
        extra = ((b"etag", self._tag),)
        if self._tag in (exchange.head.get(b"if-none-match") or b""):
            exchange.respond(_SAME, b"", extra)
        else:
            exchange.respond(_OK, self._text, extra)


def made(routes: Routes) -> bytes:
    """The document."""
    # Here, since they bring half of the inference server along, for a document that is seldom asked for.
    from headrace.api.openapi.document import base_document
    from headrace.api.openapi.models import TAG as MODELS
    from headrace.jobs.api.openapi_routes import ABOUT, PATH_SCHEMAS, job_schemas, jobs_table

    base = base_document(routes, [jobs_table()], "Headrace gateway")
    base["info"]["description"] = ABOUT
    base["tags"] = [tag for tag in base["tags"] if tag["name"] != MODELS]
    base["components"] = {
        "schemas": job_schemas(),
        "securitySchemes": {"bearer": {"type": "http", "scheme": "bearer"}},
    }
    for item in base["paths"].values():
        for operation in item.values():
            for parameter in operation.get("parameters", ()):
                parameter["schema"] = PATH_SCHEMAS.get(parameter["name"], parameter["schema"])
    base["x-headrace-models"] = {"shown": 0, "loaded": 0}
    return orjson.dumps(base)
