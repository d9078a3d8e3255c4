# SPDX-License-Identifier: Apache-2.0
"""A chat's answer as Server-Sent Events, in the chunks that OpenAI's clients read. Made by `routes` for one exchange.

The head goes out with the first token, so that whatever fails before it is answered with a status of its own; what fails
after it is the stream's last event.
"""

from __future__ import annotations

import uuid
from collections.abc import Mapping
from functools import partial
from typing import Any

from headrace.api.openai.events import Chunks
from headrace.api.openai.streams import ChatChunks
from headrace.core.errors import InvalidArgument
from headrace.jobs.microservice.kinds.contract import OnAnswer
from headrace.net.http.exchange import Exchange

MOST_UNREAD_BYTES = 16 * 1024 * 1024
"""What may wait for a client that does not read; over it, the stream is broken off."""


def wants_stream(body: Mapping[str, Any]) -> bool:
    """Whether a chat is to be answered in pieces; what is no truth is refused with the other parameters."""
    return body.get("stream") is True


def wants_usage(body: Mapping[str, Any]) -> bool:
    """Whether a stream ends with the tokens that were used. Raises `InvalidArgument` that names what is wrong."""
    options = body.get("stream_options")
    if options is None:
        return False
    if not isinstance(options, Mapping):
        raise InvalidArgument("'stream_options' must be an object, like {\"include_usage\": true}")
    wanted = options.get("include_usage")
    if wanted is not None and not isinstance(wanted, bool):
        raise InvalidArgument("'stream_options.include_usage' must be true or false")
    return bool(wanted)


class ChatStream:
    """One answer."""

    def __init__(self, exchange: Exchange, model: str, created: float) -> None:
        self._exchange = exchange
        self._chunks = Chunks(exchange, MOST_UNREAD_BYTES)
        self.with_usage = False
        """Whether the last chunk tells the tokens that were used. To be set before `begin`."""
        self._begin: dict[str, Any] = {
            "id": f"chatcmpl-{uuid.uuid4().hex}",
            "object": "chat.completion.chunk",
            "created": int(created),
            "model": model,
        }
        self._writer: ChatChunks | None = None

    def begin(self, choices: int) -> OnAnswer:
        """The request is a right one; nothing is sent yet."""
        writer = self._writer = ChatChunks(
            self._chunks, self._begin, reader=None, choices=choices, each=choices, with_usage=self.with_usage
        )
        return partial(writer.add, 0)

    def end(self) -> None:
        """The model has said everything."""
        if self._writer is not None and not self._exchange.closed:
            self._writer.end()

    def fail(self, error: bytes) -> None:
        """Tell an error as the last event, where something was sent before it."""
        if not self._exchange.closed:
            self._chunks.send(error)
            self._exchange.finish()
