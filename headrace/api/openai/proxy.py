# SPDX-License-Identifier: Apache-2.0
"""Forward requests to another engine that speaks OpenAI's protocol itself, unchanged in both directions.

Only the model name in a response is replaced by the name in the request.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import orjson

from headrace.api.openai.errors import fail
from headrace.api.openai.fields import Fields, parse_body
from headrace.api.openai.models import Target
from headrace.api.openai.responses import GenerationCalls, ResponseWriter
from headrace.api.openai.settings import OpenAiSettings
from headrace.api.openai.streams import ChunkStream
from headrace.core.errors import Unavailable
from headrace.core.generation import Generation, GenerationRequest
from headrace.core.requests import InferResponse
from headrace.engine.dataplane import DataPlane
from headrace.net.http.exchange import Exchange
from headrace.net.http.heads import OK_JSON
from headrace.net.http.heads import Fields as HeaderFields

RAW = "openai"
"""Parameter of a response: the engine's JSON (`core.generation`)."""


def forward(
    plane: DataPlane,
    exchange: Exchange,
    target: Target,
    document: Mapping[str, Any],
    settings: OpenAiSettings,
    writer: ResponseWriter | None = None,
) -> None:
    """Forward a request. `writer` is for protocols other than OpenAI's."""
    stream = Fields(document).boolean("stream")
    generation = Generation(stream=stream, path=exchange.head.path.decode("latin-1"), body=document)
    if writer is None and stream:
        writer = _ForwardedChunks(ChunkStream(exchange, settings.stream_unread_bytes), target.requested_name)
    elif writer is None:
        writer = ForwardedResponse(exchange, target.requested_name)
    GenerationCalls(plane, exchange, writer).begin([GenerationRequest(target.config.name, generation)])


def parse_or_forward(
    plane: DataPlane, exchange: Exchange, choose: Callable[[Fields], Target], settings: OpenAiSettings
) -> tuple[Fields, Target] | None:
    """Parse a request and choose its model; None: another engine serves the model, and the request is forwarded to it."""
    fields = parse_body(exchange)
    target = choose(fields)
    if target.proxied:
        forward(plane, exchange, target, fields.members, settings)
        return None
    return fields, target


class _ModelRenamer:
    """Replaces the model name in responses. All chunks of a stream contain the same bytes for it."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._upstream = b""
        self._requested = b'"model":%b' % orjson.dumps(name)

    def rename(self, raw: str) -> bytes:
        """Return a document with the requested name."""
        text = raw.encode()
        # A quote inside a string has a backslash, so a match is a member.
        if self._upstream and self._upstream in text:
            return text.replace(self._upstream, self._requested, 1)
        document = orjson.loads(text)
        if isinstance(document, dict) and isinstance(document.get("model"), str):
            name = orjson.dumps(document["model"])
            forms = (b'"model":' + name, b'"model": ' + name)
            self._upstream = next((member for member in forms if member in text), b"")
            document["model"] = self._name
        return orjson.dumps(document)


class _ForwardedChunks:
    """Writes a streamed response."""

    def __init__(self, chunks: ChunkStream, name: str) -> None:
        self._chunks = chunks
        self._renamer = _ModelRenamer(name)

    def add(self, request: int, response: InferResponse) -> None:
        """Send a chunk."""
        raw = response.parameters.get(RAW)
        if isinstance(raw, str):
            self._chunks.send(self._renamer.rename(raw))

    def end(self) -> None:
        """Finish the stream."""
        self._chunks.finish()

    def fail(self, error: BaseException) -> None:
        """Finish the stream with an error."""
        self._chunks.fail(error)


class ForwardedResponse:
    """Writes a full response."""

    def __init__(self, exchange: Exchange, name: str, extra: HeaderFields = ()) -> None:
        self._exchange = exchange
        self._extra = extra
        self._renamer = _ModelRenamer(name)
        self._raw: str | None = None

    def add(self, request: int, response: InferResponse) -> None:
        """Keep the response."""
        raw = response.parameters.get(RAW)
        if isinstance(raw, str):
            self._raw = raw

    def end(self) -> None:
        """Respond."""
        if self._raw is None:
            self.fail(Unavailable("the engine behind this model sent no response: try again"))
        else:
            self._exchange.respond(OK_JSON, self._renamer.rename(self._raw), self._extra)

    def fail(self, error: BaseException) -> None:
        """Respond with an error."""
        if not self._exchange.closed:
            fail(self._exchange, error)
