# SPDX-License-Identifier: Apache-2.0
"""`POST /tokenize` and `POST /detokenize`, as in vLLM: the tokens of a prompt or of messages, and the text of tokens."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import orjson

from headrace.api.openai.chat import parse_messages, template_arguments
from headrace.api.openai.errors import BadRequest, fail
from headrace.api.openai.fields import Fields
from headrace.api.openai.models import Models, Target
from headrace.api.openai.output_formats import formats_of
from headrace.api.openai.proxy import parse_or_forward
from headrace.api.openai.responses import GenerationCalls
from headrace.api.openai.sampling_params import token_ids
from headrace.api.openai.settings import OpenAiSettings
from headrace.api.openai.tool_calls import parse_tools
from headrace.core.generation import Generation, GenerationRequest
from headrace.core.requests import InferResponse
from headrace.engine.dataplane import DataPlane
from headrace.models.config.types import ModelConfig
from headrace.net.http.exchange import Exchange
from headrace.net.http.heads import OK_JSON
from headrace.net.http.heads import Fields as HeaderFields


class Tokenize:
    """Handlers over one data plane."""

    def __init__(self, plane: DataPlane, settings: OpenAiSettings, models: Models) -> None:
        self._plane = plane
        self._settings = settings
        self._models = models

    def tokenize(self, exchange: Exchange) -> None:
        """Handle one `POST /tokenize`."""
        parsed = parse_or_forward(self._plane, exchange, self._models.tokenizing_model, self._settings)
        if parsed is None:
            return
        fields, target = parsed
        if "messages" in fields.members:
            generation = tokenize_messages(fields, self._settings, target.config)
        else:
            generation = self._prompt(fields)
        writer = DocumentWriter(exchange, partial(_tokens, with_texts=fields.boolean("return_token_strs")))
        names = {name: name for name in fields.members}
        GenerationCalls(self._plane, exchange, writer, lambda _: names).begin(
            [GenerationRequest(target.config.name, generation)]
        )

    def detokenize(self, exchange: Exchange) -> None:
        """Handle one `POST /detokenize`."""
        parsed = parse_or_forward(self._plane, exchange, self._models.tokenizing_model, self._settings)
        if parsed is None:
            return
        fields, target = parsed
        tokens = fields.list("tokens", self._settings.prompt_tokens)
        if tokens is None:
            raise fields.error("tokens", "is missing: send a list of token ids")
        generation = Generation(prompt=token_ids("tokens", tokens), task="detokenize", path="/detokenize")
        GenerationCalls(self._plane, exchange, DocumentWriter(exchange, _text), lambda _: {"prompt": "tokens"}).begin(
            [GenerationRequest(target.config.name, generation)]
        )

    def _prompt(self, fields: Fields) -> Generation:
        prompt = fields.get("prompt")
        if not isinstance(prompt, str):
            raise fields.error("prompt", "must be a string; or send 'messages'")
        return Generation(
            prompt=prompt,
            task="tokenize",
            add_special_tokens=fields.boolean("add_special_tokens", default=True),
            path="/tokenize",
        )


def tokenize_messages(fields: Fields, settings: OpenAiSettings, config: ModelConfig) -> Generation:
    """Return the request that tokenizes the messages of a chat request."""
    if fields.get("prompt") is not None:
        raise fields.error("prompt", "cannot be combined with 'messages'")
    conversation = parse_messages(fields, settings)
    if conversation.media:
        raise BadRequest(conversation.media[0].param, "images and videos cannot be tokenized: leave them out")
    return Generation(
        messages=conversation.messages,
        tools=parse_tools(fields, settings, formats_of(config.parameters)).definitions,
        template_arguments=template_arguments(fields),
        task="tokenize",
        add_special_tokens=fields.boolean("add_special_tokens"),
        path="/tokenize",
    )


def count_tokens(
    plane: DataPlane,
    exchange: Exchange,
    members: Mapping[str, Any],
    target: Target,
    settings: OpenAiSettings,
    writer: DocumentWriter,
) -> None:
    """Tokenize the messages of a chat request; `writer` responds with their number."""
    generation = tokenize_messages(Fields(members), settings, target.config)
    names = {name: name for name in members}
    GenerationCalls(plane, exchange, writer, lambda _: names).begin([GenerationRequest(target.config.name, generation)])


class DocumentWriter:
    """Writes the one response of the model as a JSON document."""

    def __init__(
        self,
        exchange: Exchange,
        document: Callable[[InferResponse], dict[str, Any]],
        extra: HeaderFields = (),
        respond_error: Callable[[Exchange, BaseException], None] = fail,
    ) -> None:
        self._exchange = exchange
        self._document = document
        self._extra = extra
        self._respond_error = respond_error
        self._body = b"{}"

    def add(self, request: int, response: InferResponse) -> None:
        """Keep the response."""
        self._body = orjson.dumps(self._document(response))

    def end(self) -> None:
        """Respond."""
        self._exchange.respond(OK_JSON, self._body, self._extra)

    def fail(self, error: BaseException) -> None:
        """Respond with an error."""
        self._respond_error(self._exchange, error)


def _tokens(response: InferResponse, *, with_texts: bool) -> dict[str, Any]:
    parameters = response.parameters
    tokens = orjson.loads(str(parameters["tokens"]))
    return {
        "count": len(tokens),
        "max_model_len": parameters["max_model_len"],
        "tokens": tokens,
        "token_strs": orjson.loads(str(parameters["token_texts"])) if with_texts else None,
    }


def _text(response: InferResponse) -> dict[str, Any]:
    return {"prompt": response.outputs[0].array.reshape(-1)[0].decode()}
