# SPDX-License-Identifier: Apache-2.0
"""`/v1/batches`: OpenAI's batch API. `jobs.openai_batches` computes what is created here."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial

from headrace.api.openai.batch_store import ENDPOINTS, BatchStore, batch_json
from headrace.api.openai.errors import OpenAiHandler
from headrace.api.openai.fields import Fields, parse_body
from headrace.api.openai.file_store import check_keep_seconds
from headrace.api.openai.files import CONTENT, FILE, FILES
from headrace.api.openai.records import Answers, Record, page_of, parse_page
from headrace.net.http.exchange import Exchange
from headrace.net.http.heads import parse_query
from headrace.net.http.routes import Routes

BATCHES, BATCH, CANCEL = "/v1/batches", "/v1/batches/{batch_id}", "/v1/batches/{batch_id}/cancel"

_PAGE, _MOST = 20, 100
_ID_CHARACTERS = 64
_PAIRS, _KEY_CHARACTERS, _VALUE_CHARACTERS = 16, 64, 512
_WINDOW = "24h"
_METHODS = {
    FILES: b"GET, POST",
    FILE: b"DELETE, GET",
    CONTENT: b"GET",
    BATCHES: b"GET, POST",
    BATCH: b"GET",
    CANCEL: b"POST",
}


class Batches:
    """Handlers over one store. `wake` is called when the worker of this process has something to do."""

    def __init__(self, store: BatchStore, wake: Callable[[], None]) -> None:
        self._store = store
        self._wake = wake
        self._answers = Answers()

    def add_to(self, routes: Routes) -> None:
        """Register the routes."""
        routes.add("POST", BATCHES, OpenAiHandler(self.create), scope="infer", keeps_data=True)
        routes.add("GET", BATCHES, OpenAiHandler(self.list), scope="infer")
        routes.add("GET", BATCH, OpenAiHandler(self.show), scope="infer")
        routes.add("POST", CANCEL, OpenAiHandler(self.cancel), scope="infer", keeps_data=True)

    def create(self, exchange: Exchange) -> None:
        """Handle `POST /v1/batches`."""
        fields = parse_body(exchange)
        file_id = fields.text("input_file_id", _ID_CHARACTERS)
        if not file_id:
            raise fields.error("input_file_id", "is missing: upload the input by POST /v1/files first")
        endpoint = fields.text("endpoint", _ID_CHARACTERS)
        if endpoint is None or endpoint not in ENDPOINTS:
            raise fields.error("endpoint", f"must be one of {', '.join(ENDPOINTS)}")
        if fields.get("completion_window") != _WINDOW:
            raise fields.error("completion_window", f"must be '{_WINDOW}'")
        create = partial(
            self._store.create, exchange.caller, file_id, endpoint, _metadata(fields), _output_seconds(fields)
        )
        self._then_wake(exchange, create)

    def list(self, exchange: Exchange) -> None:
        """Handle `GET /v1/batches`."""
        page = parse_page(parse_query(exchange.head.query), limit=_PAGE, most=_MOST)
        caller = exchange.caller
        self._answers.in_thread(exchange, lambda: page_of(self._store.batches_of(caller), page, batch_json))

    def show(self, exchange: Exchange) -> None:
        """Handle `GET /v1/batches/{id}`."""
        find = partial(self._store.find, exchange.params[0], exchange.caller)
        self._answers.in_thread(exchange, lambda: batch_json(find()))

    def cancel(self, exchange: Exchange) -> None:
        """Handle `POST /v1/batches/{id}/cancel`."""
        self._then_wake(exchange, partial(self._store.cancel, exchange.params[0], exchange.caller))

    def _then_wake(self, exchange: Exchange, work: Callable[[], Record]) -> None:
        self._answers.in_thread(exchange, lambda: batch_json(work()), self._wake)


def allowed_methods(path: str) -> bytes:
    """Return the methods of a path of `/v1/files` or `/v1/batches`; b"" for any other path."""
    parts = path.split("/")
    for pattern, methods in _METHODS.items():
        pattern_parts = pattern.split("/")
        if len(parts) == len(pattern_parts) and all(
            part and (part == own or own.startswith("{"))
            for part, own in zip(parts[1:], pattern_parts[1:], strict=True)
        ):
            return methods
    return b""


def _metadata(fields: Fields) -> Mapping[str, str] | None:
    pairs = fields.object("metadata")
    if pairs is None:
        return None
    if len(pairs) > _PAIRS:
        raise fields.error("metadata", f"has {len(pairs)} members; at most {_PAIRS} are allowed")
    for key, value in pairs.items():
        if len(key) > _KEY_CHARACTERS or not isinstance(value, str) or len(value) > _VALUE_CHARACTERS:
            raise fields.error(
                "metadata",
                f"must have keys of at most {_KEY_CHARACTERS} characters, and strings of at most {_VALUE_CHARACTERS}",
            )
    return pairs


def _output_seconds(fields: Fields) -> float | None:
    value = fields.object("output_expires_after")
    if value is None:
        return None
    return check_keep_seconds("output_expires_after", value.get("anchor"), value.get("seconds"))
