# SPDX-License-Identifier: Apache-2.0
"""Requests for models of another engine, which speaks OpenAI's protocol itself: passed on as they are, both ways.

Called by `chat`, `completions` and `embeddings`. Only the model's name in an answer becomes again what the client asked for.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import orjson

from headrace.api.openai.errors import fail
from headrace.api.openai.events import Chunks
from headrace.api.openai.fields import Fields
from headrace.api.openai.flows import Flow, Writer
from headrace.api.openai.models import Target
from headrace.api.openai.settings import OpenAiSettings
from headrace.core.errors import Unavailable
from headrace.core.generation import Generation, GenerationRequest
from headrace.core.messages import InferResponse
from headrace.engine.dataplane import DataPlane
from headrace.net.http.exchange import Exchange
from headrace.net.http.heads import OK_JSON

_RAW = "openai"


def pass_on(
    plane: DataPlane, exchange: Exchange, target: Target, document: Mapping[str, Any], settings: OpenAiSettings
) -> None:
    """Ask the other engine."""
    stream = Fields(document).boolean("stream")
    generation = Generation(stream=stream, path=exchange.head.path.decode("latin-1"), body=document)
    writer: Writer = _PassedWhole(exchange, target.asked)
    if stream:
        writer = _PassedChunks(Chunks(exchange, settings.stream_unread_bytes), target.asked)
    Flow(plane, exchange, writer).begin([GenerationRequest(target.config.name, generation)])


class _Renamed:
    """Puts the name that was asked for into documents. All chunks of a stream say their own name in the same words."""

    def __init__(self, asked: str) -> None:
        self._asked = asked
        self._theirs = b""
        self._ours = b'"model":%b' % orjson.dumps(asked)

    def of(self, raw: str) -> bytes:
        """The document under our name."""
        text = raw.encode()
        # A quote inside a text is written with a backslash: what is found is a member.
        if self._theirs and self._theirs in text:
            return text.replace(self._theirs, self._ours, 1)
        document = orjson.loads(text)
        if isinstance(document, dict) and isinstance(document.get("model"), str):
            name = orjson.dumps(document["model"])
            self._theirs = next((each for each in (b'"model":' + name, b'"model": ' + name) if each in text), b"")
            document["model"] = self._asked
        return orjson.dumps(document)


class _PassedChunks:
    """See `flows.Writer`."""

    def __init__(self, chunks: Chunks, asked: str) -> None:
        self._chunks = chunks
        self._renamed = _Renamed(asked)

    def add(self, request: int, response: InferResponse) -> None:
        """See `flows.Writer`."""
        raw = response.parameters.get(_RAW)
        if isinstance(raw, str):
            self._chunks.send(self._renamed.of(raw))

    def end(self) -> None:
        """See `flows.Writer`."""
        self._chunks.finish()

    def failed(self, error: BaseException) -> None:
        """See `flows.Writer`."""
        self._chunks.fail(error)


class _PassedWhole:
    """See `flows.Writer`."""

    def __init__(self, exchange: Exchange, asked: str) -> None:
        self._exchange = exchange
        self._renamed = _Renamed(asked)
        self._raw: str | None = None

    def add(self, request: int, response: InferResponse) -> None:
        """See `flows.Writer`."""
        raw = response.parameters.get(_RAW)
        if isinstance(raw, str):
            self._raw = raw

    def end(self) -> None:
        """See `flows.Writer`."""
        if self._raw is None:
            self.failed(Unavailable("the engine behind this model gave no answer: try again"))
        else:
            self._exchange.respond(OK_JSON, self._renamed.of(self._raw))

    def failed(self, error: BaseException) -> None:
        """See `flows.Writer`."""
        if not self._exchange.closed:
            fail(self._exchange, error)
