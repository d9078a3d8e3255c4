# SPDX-License-Identifier: Apache-2.0
"""Streams that another server can continue (`core.continuation`): records in a stream, and `POST /v1/headrace/continue`.

`TrackedExchange` stands between the writer of a stream and its client. It writes the records of the model's replies before
the events that they become. In a stream that is continued, the model first repeats the replies of the server before it;
their events are left out as far as the client has them. Ids are made from the id of the stream (`ids_of`), so that the
second server makes the same ones.
"""

from __future__ import annotations

import re
import secrets
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import orjson

from headrace.api.openai.errors import BadRequest
from headrace.api.openai.fields import Fields, parse_body
from headrace.api.openai.response_ids import RANDOM_IDS, RepeatableIds, ResponseIds
from headrace.api.openai.responses import ResponseWriter
from headrace.core.continuation import (
    CONTINUATION_HEADER,
    RECORD,
    STREAM_PATHS,
    TRACK,
    is_valid_continuation_proof,
)
from headrace.core.errors import Code, FailedPrecondition, HeadraceError, PermissionDenied
from headrace.core.fleet_key import machine_key, user_folder
from headrace.core.generation import GeneratedTokens, Generation
from headrace.core.requests import InferResponse, Parameters
from headrace.net.http.exchange import Body, Exchange, Handler
from headrace.net.http.heads import Buffer, ResponseHead
from headrace.net.http.heads import Fields as HeaderFields

_ID = re.compile(r"[0-9a-f]{32}")
_TIMES = (0, 1 << 40)
_BYTES = 1 << 40
_TOKEN_IDS = 1 << 31
_REFUSED = "this server does not continue the streams of others for you: give its router and all servers the same key"


def ids_of(exchange: Exchange) -> ResponseIds:
    """Return what makes the ids of a response."""
    return exchange.ids if isinstance(exchange, TrackedExchange) else RANDOM_IDS


class _OfClient:
    """An attribute that a tracked exchange has from the client's own."""

    def __set_name__(self, owner: type, name: str) -> None:
        self._name = name

    def __get__(self, exchange: TrackedExchange, owner: type) -> Any:
        return getattr(exchange.client, self._name)

    def __set__(self, exchange: TrackedExchange, value: Any) -> None:
        setattr(exchange.client, self._name, value)


class TrackedExchange(Exchange):
    """The exchange of a stream with records. Passes everything else on to the client's own exchange."""

    head: Any = _OfClient()
    body: Any = _OfClient()
    params: Any = _OfClient()
    on_disconnect: Any = _OfClient()
    on_body: Any = _OfClient()
    on_body_end: Any = _OfClient()
    on_writable: Any = _OfClient()
    on_over: Any = _OfClient()
    caller: Any = _OfClient()
    more_lines: Any = _OfClient()

    def __init__(self, exchange: Exchange, continued: ContinuedStream | None = None) -> None:
        self.client = exchange
        self.continued = continued
        self._records = b""
        """Records that were not sent yet: they go out together with the next event."""
        self._left_out = 0
        """Bytes of the next events that the client has."""
        if continued is None:
            self.ids = RepeatableIds(secrets.token_hex(16), int(time.time()))
            self._first_record = record_line({"id": self.ids.stream, "created": self.ids.created()})
        else:
            self.ids = RepeatableIds(continued.stream, continued.created)
            self._first_record = b""
            self._left_out = _BYTES
            exchange.body = continued.request

    def record(self, parameters: Parameters) -> None:
        """Write the record of a reply with these parameters before the events that it becomes."""
        continued = self.continued
        if continued is None or "replayed" not in parameters:
            first, self._first_record = self._first_record, b""
            self._records += first + record_line(_reply_record(parameters))
            self._left_out = 0
            return
        continued.repeated += 1
        if continued.repeated == len(continued.replies):
            self._left_out = continued.sent

    def fail_soon(self) -> None:
        """Write the record of a server that cannot go on, before the error."""
        self._records += record_line("failed")
        self._left_out = 0

    def send(self, data: Buffer) -> bool:
        """Send events with the records before them, or what the client does not have of them."""
        if self._left_out:
            left_out = min(self._left_out, len(data))
            self._left_out -= left_out
            data = memoryview(data)[left_out:]
            if not data:
                return True
        records, self._records = self._records, b""
        return self.client.send(b"".join((records, data)) if records else data)

    def finish(self) -> None:
        """End a streamed body. One that did not come to what the client does not have is incomplete."""
        if self._left_out:
            self.client.abort()
        else:
            self.client.finish()

    # As the exchange has them.

    @property
    def peer(self) -> str:
        """The client's address."""
        return self.client.peer

    @property
    def started(self) -> bool:
        """Whether a response head has been sent."""
        return self.client.started

    @property
    def closed(self) -> bool:
        """Whether the response is complete or the client has disconnected."""
        return self.client.closed

    def respond(self, head: ResponseHead, body: Body = b"", extra: HeaderFields = ()) -> None:
        """Send a complete response: there is nothing to continue."""
        self.client.respond(head, body, extra)

    def start(self, head: ResponseHead, extra: HeaderFields = ()) -> None:
        """Send a response head."""
        self.client.start(head, extra)

    def abort(self) -> None:
        """End the exchange so that the client sees an incomplete response."""
        self.client.abort()

    def pause_body(self) -> None:
        """Stop `on_body` calls."""
        self.client.pause_body()

    def resume_body(self) -> None:
        """Undo `pause_body`."""
        self.client.resume_body()


class ContinuedStream:
    """A stream that another server began, as the router tells it."""

    def __init__(self, document: Mapping[str, Any]) -> None:
        """Raise BadRequest for a document that no router sends."""
        fields = Fields(document)
        records = fields.get("records")
        if not isinstance(records, list) or len(records) < 2 or not isinstance(records[0], dict):
            raise fields.error("records", "must be the records of a stream with one reply or more")
        first = Fields(records[0], "records[0]")
        stream = first.get("id")
        if not isinstance(stream, str) or not _ID.fullmatch(stream):
            raise first.error("id", "must be the id of a stream")
        self.stream = stream
        self.created = first.integer("created", *_TIMES) or 0
        self.replies = tuple(_generated(index, record) for index, record in enumerate(records[1:], 1))
        self.tokenizer = next(
            (str(record["tokenizer"]) for record in records[1:] if isinstance(record.get("tokenizer"), str)), ""
        )
        self.sent = fields.integer("sent", 0, _BYTES, 0) or 0
        """Bytes that the client has of the events of the last reply."""
        self.request = orjson.dumps(document.get("request"))
        self.repeated = 0
        """Replies that the model has repeated."""


def _generated(index: int, record: Any) -> GeneratedTokens:
    if not isinstance(record, dict):
        raise BadRequest(f"records[{index}]", "must be the record of a reply")
    fields = Fields(record, f"records[{index}]")
    tokens = fields.get("t")
    if not isinstance(tokens, list) or not all(type(token) is int and 0 <= token < _TOKEN_IDS for token in tokens):
        raise fields.error("t", "must be a list of tokens")
    logprobs = fields.get("logprobs")
    return GeneratedTokens(
        fields.integer("i", 0, _TOKEN_IDS, 0) or 0,
        tuple(tokens),
        fields.integer("cached", 0, _TOKEN_IDS),
        logprobs if isinstance(logprobs, str) else None,
    )


def record_line(record: Any) -> bytes:
    """Return the line of a record."""
    return b"%b%b\n" % (RECORD, orjson.dumps(record))


def _reply_record(parameters: Parameters) -> dict[str, Any]:
    tokens = str(parameters.get("token_ids", ""))
    record: dict[str, Any] = {"i": parameters.get("index", 0), "t": orjson.Fragment(f"[{tokens}]")}
    if "tokenizer" in parameters:
        record |= {"cached": parameters.get("cached_tokens", 0), "tokenizer": parameters["tokenizer"]}
    if "logprobs" in parameters:
        record["logprobs"] = parameters["logprobs"]
    return record


class TrackingWriter:
    """Writes the records of a stream, and has its events written."""

    def __init__(self, writer: ResponseWriter, exchange: TrackedExchange) -> None:
        self._writer = writer
        self._exchange = exchange

    def add(self, request: int, response: InferResponse) -> None:
        """Add an answer to one of the requests."""
        self._exchange.record(response.parameters)
        self._writer.add(request, response)

    def end(self) -> None:
        """Finish the response."""
        self._writer.end()

    def fail(self, error: BaseException) -> None:
        """Finish the response with an error. One of this server alone is not the end: another server may go on."""
        if isinstance(error, HeadraceError) and error.code == Code.UNAVAILABLE:
            self._exchange.fail_soon()
        self._writer.fail(error)


def tracked(exchange: Exchange, generation: Generation, prompts: int = 1) -> Generation:
    """Return the generation with what its stream needs to be continued, or to continue another, if it can be.

    The order of the replies to several prompts is not certain, and the log-probabilities of a prompt are computed once.
    """
    if not isinstance(exchange, TrackedExchange):
        return generation
    continued = exchange.continued
    can_be = generation.stream and prompts == 1 and generation.sampling.prompt_logprobs is None
    if continued is not None:
        if not can_be:
            raise FailedPrecondition("only a stream of one prompt without its log-probabilities can be continued")
        generation = replace(generation, continued=continued.replies, continued_tokenizer=continued.tokenizer)
    return replace(generation, tracks_tokens=can_be)


def tracking(exchange: Exchange, generation: Generation, writer: ResponseWriter) -> ResponseWriter:
    """Return the writer of a response, with records if it is a stream that can be continued."""
    if generation.tracks_tokens and isinstance(exchange, TrackedExchange):
        return TrackingWriter(writer, exchange)
    return writer


def trackable(handler: Handler) -> Handler:
    """Return the handler of requests whose streams get records if a router asks for them."""

    def handle(exchange: Exchange) -> None:
        wanted = exchange.head.get(CONTINUATION_HEADER) == TRACK
        handler(TrackedExchange(exchange) if wanted else exchange)

    return handle


class Continuation:
    """Handles `POST /v1/headrace/continue`."""

    def __init__(self, handlers: Mapping[str, Handler], key: bytes, now: Callable[[], float] = time.time) -> None:
        """`handlers`: by path. `key`: the fleet's; empty: the key of this machine."""
        self._handlers = {path: handlers[path] for path in STREAM_PATHS}
        self._key = key
        self._now = now

    def handle(self, exchange: Exchange) -> None:
        """Continue a stream."""
        body = bytes(exchange.body)
        document = parse_body(exchange).members
        path = document.get("path")
        if not isinstance(path, str) or path not in self._handlers:
            raise BadRequest("path", f"must be one of: {', '.join(self._handlers)}")
        self._check(exchange, body)
        self._handlers[path](TrackedExchange(exchange, ContinuedStream(document)))

    def _check(self, exchange: Exchange, body: bytes) -> None:
        proof = exchange.head.get(CONTINUATION_HEADER) or b""
        if not proof:
            raise PermissionDenied(_REFUSED)
        key = self._key or machine_key(user_folder())
        if not is_valid_continuation_proof(key, proof, body, self._now()):
            raise PermissionDenied(_REFUSED)
