# SPDX-License-Identifier: Apache-2.0
"""`POST /v1/responses`: OpenAI's Responses API, which agents use, and `POST /v1/responses/input_tokens`.

Requests are translated to chat requests.

A response is stored unless its client sends `store: false`, or the server has no store. `previous_response_id` puts the
items of a stored response, and of those before it, before the new input.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine, Sequence
from functools import partial
from typing import Any

import orjson

from headrace.api.openai.chat import Chat
from headrace.api.openai.errors import BadRequest, fail, log_unexpected
from headrace.api.openai.fields import Fields, parse_body
from headrace.api.openai.models import Models, Target
from headrace.api.openai.output_parser import OutputParser
from headrace.api.openai.response_events import Deliver, ResponseDocument, ResponseEvents
from headrace.api.openai.response_requests import chat_members, input_items, item_to_store
from headrace.api.openai.response_store import Document, ResponseStore, StoredResponse
from headrace.api.openai.responses import ResponseWriter
from headrace.api.openai.settings import OpenAiSettings
from headrace.api.openai.tokenize import DocumentWriter, count_tokens
from headrace.core.errors import HeadraceError, ResourceExhausted
from headrace.core.generation import Generation
from headrace.core.requests import InferResponse
from headrace.engine.dataplane import DataPlane
from headrace.net.http.exchange import Exchange
from headrace.net.http.heads import OK_JSON, RequestHead

log = logging.getLogger("headrace.api")

_NAMES = {"messages": "input", "max_tokens": "max_output_tokens", "response_format": "text.format"}
"""Members of a Responses request by the names that a chat request has for them."""
_ID_CHARACTERS = 256
_NO_STORE = "this server keeps no responses"

Begin = Callable[[Exchange, Fields, Target, Sequence[Document]], None]
"""Begins a request, with the items before its input."""


class Responses:
    """Handles requests with the handler of chat requests."""

    def __init__(
        self, plane: DataPlane, settings: OpenAiSettings, models: Models, chat: Chat, store: ResponseStore | None
    ) -> None:
        self._plane = plane
        self._settings = settings
        self._models = models
        self._chat = chat
        self._store = store
        self._running: dict[str, BackgroundExchange] = {}
        """The background responses of this process, by id."""
        self._tasks: set[asyncio.Task[None]] = set()

    def create(self, exchange: Exchange) -> None:
        """Handle one `POST /v1/responses`."""
        self._read(exchange, self._begin)

    def count_tokens(self, exchange: Exchange) -> None:
        """Handle one `POST /v1/responses/input_tokens`."""
        self._read(exchange, self._count)

    def cancel_running(self, id: str) -> None:
        """Stop a background response, if this process computes it."""
        exchange = self._running.pop(id, None)
        if exchange is not None:
            exchange.cancel()

    def _read(self, exchange: Exchange, begin: Begin) -> None:
        """Begin a request with the items of the conversation that it continues."""
        fields = parse_body(exchange)
        target = self._models.generative_model(fields)
        if target.proxied:
            raise fields.error("model", "is served by another engine: ask it by /v1/chat/completions")
        previous = fields.text("previous_response_id", _ID_CHARACTERS)
        if previous:
            task = self._spawn(self._continue(exchange, fields, target, previous, begin), partial(fail, exchange))
            exchange.on_disconnect = partial(_cancel, task)
        else:
            begin(exchange, fields, target, ())

    async def _continue(self, exchange: Exchange, fields: Fields, target: Target, previous: str, begin: Begin) -> None:
        if self._store is None:
            raise fields.error("previous_response_id", f"{_NO_STORE}: send the whole conversation in 'input'")
        turns = await self._store.conversation(exchange.caller, previous)
        if not turns:
            raise BadRequest(
                "previous_response_id",
                f"Previous response with id {previous!a} not found: it, or one before it, was deleted, was not stored, or "
                "is too old. Send the whole conversation in 'input'",
                "previous_response_not_found",
            )
        if turns[-1].is_unfinished:
            raise fields.error("previous_response_id", "is not complete yet: wait until its status is 'completed'")
        earlier = [item for turn in turns for item in (*turn.input, *turn.document["output"])]
        begin(exchange, fields, target, earlier)

    def _count(self, exchange: Exchange, fields: Fields, target: Target, earlier: Sequence[Document]) -> None:
        def respond_error(exchange: Exchange, error: BaseException) -> None:
            fail(exchange, _renamed(error) if isinstance(error, BadRequest) else error)

        writer = DocumentWriter(exchange, _token_count, respond_error=respond_error)
        members = chat_members(fields, earlier)
        try:
            count_tokens(self._plane, exchange, members, target, self._settings, writer)
        except BadRequest as error:
            raise _renamed(error) from None

    def _begin(self, exchange: Exchange, fields: Fields, target: Target, earlier: Sequence[Document]) -> None:
        translated = Fields(chat_members(fields, earlier))
        keeps = fields.boolean("store", True) and self._store is not None
        try:
            if fields.boolean("background"):
                self._begin_in_background(exchange, fields, target, translated)
            else:
                self._chat.start(exchange, translated, target, partial(self._writer, exchange, fields, target, keeps))
        except BadRequest as error:
            raise _renamed(error) from None

    def _writer(
        self,
        exchange: Exchange,
        fields: Fields,
        target: Target,
        keeps: bool,
        parser: Callable[[], OutputParser] | None,
        generation: Generation,
    ) -> ResponseWriter:
        model = target.requested_name
        store = partial(self._keep, exchange, fields) if keeps else None
        if generation.stream:
            return ResponseEvents(exchange, fields, model, parser, self._settings.stream_unread_bytes, store)
        return ResponseDocument(exchange, fields, model, parser, store)

    def _keep(self, exchange: Exchange, fields: Fields, document: Document, deliver: Deliver) -> None:
        """Store a response, then deliver it. One that cannot be stored is delivered as one that is not."""

        async def keep() -> None:
            try:
                if self._store is not None:
                    await self._store.add(exchange.caller, _stored(fields, document))
            except HeadraceError:
                document["store"] = False
            deliver(document)

        self._spawn(keep(), partial(fail, exchange))

    # In the background.

    def _begin_in_background(self, exchange: Exchange, fields: Fields, target: Target, translated: Fields) -> None:
        if self._store is None or not fields.boolean("store", True):
            reason = _NO_STORE if self._store is None else "needs 'store': true"
            raise fields.error("background", f"{reason}: leave it out, or use 'stream'")
        if fields.boolean("stream"):
            raise fields.error(
                "background", "cannot be streamed: leave out 'stream', and GET the response until it is complete"
            )
        if len(self._running) >= self._settings.background_responses:
            raise ResourceExhausted(
                f"{len(self._running)} background responses are computed already: wait until one is complete",
                retry_after_seconds=1.0,
            )
        background = BackgroundExchange(exchange.head)
        writers: list[BackgroundDocument] = []

        def make_writer(parser: Callable[[], OutputParser] | None, _: Generation) -> ResponseWriter:
            writers.append(BackgroundDocument(background, fields, target.requested_name, parser, self._update))
            return writers[0]

        # Streamed by the model, so that the first token makes it a response in progress.
        members = {**translated.members, "stream": True}
        self._chat.start(background, Fields(members), target, make_writer)
        document = writers[0].first_document
        self._running[document["id"]] = background
        self._spawn(self._respond_queued(exchange, fields, document), partial(fail, exchange))

    async def _respond_queued(self, exchange: Exchange, fields: Fields, document: Document) -> None:
        if self._store is None:
            return
        try:
            await self._store.add(exchange.caller, _stored(fields, document), runs_here=True)
        except HeadraceError:
            self.cancel_running(document["id"])
            raise
        exchange.respond(OK_JSON, orjson.dumps(document))

    def _update(self, document: Document) -> None:
        if document["status"] != "in_progress":
            self._running.pop(document["id"], None)
        self._spawn(self._store_update(document), partial(_log_lost, document["id"]))

    async def _store_update(self, document: Document) -> None:
        if self._store is not None and not await self._store.update(document):
            self.cancel_running(document["id"])  # another worker has deleted it

    def _spawn(self, work: Coroutine[Any, Any, None], failed: Callable[[BaseException], None]) -> asyncio.Task[None]:
        async def run() -> None:
            try:
                await work
            except Exception as error:
                failed(error)

        task = asyncio.get_running_loop().create_task(run())
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task


def _token_count(response: InferResponse) -> dict[str, Any]:
    tokens = orjson.loads(str(response.parameters["tokens"]))
    return {"object": "response.input_tokens", "input_tokens": len(tokens)}


def _stored(fields: Fields, document: Document) -> StoredResponse:
    return StoredResponse(document, [item_to_store(item) for item in input_items(fields)])


def _cancel(task: asyncio.Task[None]) -> None:
    task.cancel()


def _log_lost(id: str, error: BaseException) -> None:
    log.error("background response %s could not be stored", id, exc_info=error)


def _renamed(error: BadRequest) -> BadRequest:
    """Return an error about the chat request as one about the Responses request."""
    first = error.param.partition("[")[0].partition(".")[0]
    if first not in _NAMES:
        return error
    message = error.message.removeprefix(f"{error.param}: ")
    return BadRequest(_NAMES[first], message, error.reason)


class BackgroundExchange(Exchange):
    """The exchange of a response with `background: true`: its client has its answer already, and never disconnects."""

    on_body = on_body_end = on_writable = None
    peer = "a background response"
    started = False
    closed = False

    def __init__(self, head: RequestHead) -> None:
        self.head, self.body, self.params = head, b"", ()
        self.on_disconnect: Callable[[], None] | None = None

    def cancel(self) -> None:
        """Cancel the computation, as the disconnect of a client does."""
        if self.on_disconnect is not None:
            self.on_disconnect()


class BackgroundDocument(ResponseDocument):
    """A background response: stored at once, and passed to `update` whenever it changes, until it is complete."""

    def __init__(
        self,
        exchange: BackgroundExchange,
        request: Fields,
        model: str,
        parser: Callable[[], OutputParser] | None,
        update: Callable[[dict[str, Any]], None],
    ) -> None:
        super().__init__(exchange, request, model, parser, lambda document, _deliver: update(document))
        self._update = update
        self.first_document = self._unfinished("queued")
        """What the client gets at once."""

    def fail(self, error: BaseException) -> None:
        """Store the failure."""
        if not isinstance(error, HeadraceError):
            log_unexpected(self._exchange, error, self.first_document["id"])
        self._update(self._failed(error))

    def _start(self) -> None:
        self._update(self._unfinished())
