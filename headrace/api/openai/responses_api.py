# SPDX-License-Identifier: Apache-2.0
"""`POST /v1/responses`: OpenAI's Responses API, which agents use. Requests are translated to chat requests.

Responses are not kept: a client sends the whole conversation each time, as with `store: false`.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from headrace.api.openai.chat import Chat
from headrace.api.openai.errors import BadRequest
from headrace.api.openai.fields import Fields, parse_body
from headrace.api.openai.models import Models
from headrace.api.openai.output_parser import OutputParser
from headrace.api.openai.response_events import ResponseDocument, ResponseEvents
from headrace.api.openai.response_requests import chat_members
from headrace.api.openai.responses import ResponseWriter
from headrace.api.openai.settings import OpenAiSettings
from headrace.core.generation import Generation
from headrace.net.http.exchange import Exchange

_NAMES = {"messages": "input", "max_tokens": "max_output_tokens", "response_format": "text.format"}
"""Members of a Responses request by the names that a chat request has for them."""


class Responses:
    """Handles requests with the handler of chat requests."""

    def __init__(self, settings: OpenAiSettings, models: Models, chat: Chat) -> None:
        self._settings = settings
        self._models = models
        self._chat = chat

    def create(self, exchange: Exchange) -> None:
        """Handle one `POST /v1/responses`."""
        fields = parse_body(exchange)
        target = self._models.generative_model(fields)
        if target.proxied:
            raise fields.error("model", "is served by another engine: ask it by /v1/chat/completions")
        translated = Fields(chat_members(fields))
        make_writer = partial(self._writer, exchange, fields, target.requested_name)
        try:
            self._chat.start(exchange, translated, target, make_writer)
        except BadRequest as error:
            raise _renamed(error) from None

    def _writer(
        self,
        exchange: Exchange,
        fields: Fields,
        model: str,
        parser: Callable[[], OutputParser] | None,
        generation: Generation,
    ) -> ResponseWriter:
        if generation.stream:
            return ResponseEvents(exchange, fields, model, parser, self._settings.stream_unread_bytes)
        return ResponseDocument(exchange, fields, model, parser)


def _renamed(error: BadRequest) -> BadRequest:
    """Return an error about the chat request as one about the Responses request."""
    first = error.param.partition("[")[0].partition(".")[0]
    if first not in _NAMES:
        return error
    message = error.message.removeprefix(f"{error.param}: ")
    return BadRequest(_NAMES[first], message, error.reason)
