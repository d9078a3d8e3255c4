# SPDX-License-Identifier: Apache-2.0
"""`POST /v1/chat/completions`: a conversation in, the next message out. Registered by `http`."""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import Any

from headrace.api.openai.errors import Refused, fail
from headrace.api.openai.events import Chunks
from headrace.api.openai.fields import Fields, read_document
from headrace.api.openai.flows import Flow, Writer
from headrace.api.openai.formats import format_field, read_format
from headrace.api.openai.media import Reader, read_media
from headrace.api.openai.messages import Conversation, read_messages
from headrace.api.openai.models import Models, Target
from headrace.api.openai.passing import pass_on
from headrace.api.openai.sampling import read_sampling
from headrace.api.openai.settings import OpenAiSettings
from headrace.api.openai.streams import ChatChunks
from headrace.api.openai.tickets import TicketWriter, prompt_alone, with_ticket
from headrace.api.openai.tools import Tools, read_tools
from headrace.api.openai.wholes import WholeChat
from headrace.core.generation import Generation, GenerationRequest
from headrace.core.ids import REQUEST_ID_FIELD, request_id
from headrace.engine.dataplane import DataPlane
from headrace.net.http.exchange import Exchange

_NOT_DONE = {
    "audio": "this server does not speak",
    "web_search_options": "this server does not search the web",
    "chat_template": "a template is the model's own: use 'chat_template_kwargs' for what it takes",
    "continue_final_message": "an answer is always a new message",
    "echo": "is for /v1/completions",
}
_TEMPLATE_ARGUMENTS = ("add_generation_prompt", "documents", "reasoning_effort")
"""Members of the request that templates know."""
_ARGUMENTS = 64
_TAKEN = frozenset(("messages", "tools", "chat_template", "tokenize"))


class Chat:
    """Over one data plane."""

    def __init__(
        self, plane: DataPlane, settings: OpenAiSettings, models: Models, media_reader: Reader | None = None
    ) -> None:
        self._plane = plane
        self._settings = settings
        self._models = models
        self._media_reader = media_reader
        self._tasks: set[asyncio.Task[None]] = set()

    def handle(self, exchange: Exchange) -> None:
        """One request."""
        document = read_document(exchange.body)
        exchange.body = b""
        self.begin(exchange, Fields(document))

    def begin(self, exchange: Exchange, fields: Fields, wanted: TicketWriter | None = None) -> None:
        """What its body says. `wanted`: only the prompt is, and this is who answers then."""
        target = self._models.that_generates(fields)
        if target.proxied:
            if wanted is not None:
                wanted.end()
            else:
                pass_on(self._plane, exchange, target, fields.members, self._settings)
            return
        conversation, tools, generation = self._read(fields, target)
        writer: Writer
        if wanted is not None:
            writer, generation = wanted, prompt_alone(generation)
        else:
            generation = with_ticket(exchange, generation)
            writer = self._writer(exchange, fields, target, tools, generation)
        names = {**{name: name for name in fields.members}, "response_format": tools.held_by or format_field(fields)}
        if not conversation.media:
            self._begin(exchange, writer, target, generation, names)
            return
        if self._media_reader is None:
            raise Refused(conversation.media[0].param, "this server reads no images and videos")
        reading = self._with_media(self._media_reader, exchange, writer, target, conversation, generation, names)
        task = asyncio.get_running_loop().create_task(reading)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        exchange.on_disconnect = partial(_give_up, task)

    def _read(self, fields: Fields, target: Target) -> tuple[Conversation, Tools, Generation]:
        fields.refuse(_NOT_DONE)
        modalities = fields.get("modalities")
        if modalities is not None and modalities != ["text"]:
            raise fields.refused("modalities", "must be ['text']: this server answers with text")
        conversation = read_messages(fields, self._settings)
        tools = read_tools(fields, self._settings, target.config.parameters)
        output_format = read_format(fields)
        if output_format is not None and tools.output_format is not None:
            raise fields.refused("tool_choice", "asks for a call where 'response_format' asks for something else")
        generation = Generation(
            messages=conversation.messages,
            tools=tools.listed,
            template_arguments=_template_arguments(fields),
            sampling=read_sampling(fields, self._settings, chat=True),
            output_format=output_format or tools.output_format,
            adapter=target.adapter,
            stream=fields.boolean("stream"),
            path="/v1/chat/completions",
        )
        return conversation, tools, generation

    async def _with_media(
        self,
        reader: Reader,
        exchange: Exchange,
        writer: Writer,
        target: Target,
        conversation: Conversation,
        generation: Generation,
        names: Mapping[str, str],
    ) -> None:
        try:
            media = await read_media(reader, conversation.media, self._settings.media_bytes)
            self._begin(exchange, writer, target, replace(generation, media=media), names)
        except Exception as error:
            if not exchange.closed:
                fail(exchange, error)

    def _begin(
        self, exchange: Exchange, writer: Writer, target: Target, generation: Generation, names: Mapping[str, str]
    ) -> None:
        sent = exchange.head.get(REQUEST_ID_FIELD.encode())
        request = GenerationRequest(target.config.name, generation, id=request_id(sent) if sent else "")
        Flow(self._plane, exchange, writer, lambda _: names).begin([request])

    def _writer(
        self, exchange: Exchange, fields: Fields, target: Target, tools: Tools, generation: Generation
    ) -> Writer:
        sampling = generation.sampling
        begin = begin_of("chatcmpl", "chat.completion", target, stream=generation.stream)
        with_usage = wants_usage(fields, stream=generation.stream)
        if not generation.stream:
            return WholeChat(exchange, begin, reader=tools.reader, choices=sampling.n, each=sampling.n)
        return ChatChunks(
            Chunks(exchange, self._settings.stream_unread_bytes),
            begin,
            reader=tools.reader,
            choices=sampling.n,
            each=sampling.n,
            with_usage=with_usage,
            plain=sampling.logprobs is None,
        )


def _give_up(task: asyncio.Task[None]) -> None:
    task.cancel()


def begin_of(prefix: str, kind: str, target: Target, *, stream: bool) -> dict[str, Any]:
    """What every document of an answer begins with."""
    if stream and kind == "chat.completion":
        kind = "chat.completion.chunk"
    identity = f"{prefix}-{secrets.token_hex(16)}"
    return {"id": identity, "object": kind, "created": int(time.time()), "model": target.asked}


def wants_usage(fields: Fields, *, stream: bool) -> bool:
    """Whether a stream ends with the tokens that were used."""
    options = fields.object("stream_options")
    if options is None:
        return False
    if not stream:
        raise fields.refused("stream_options", "is only for requests with 'stream': true")
    return Fields(options, "stream_options").boolean("include_usage")


def _template_arguments(fields: Fields) -> Mapping[str, Any]:
    arguments = {name: fields.get(name) for name in _TEMPLATE_ARGUMENTS if fields.get(name) is not None}
    given = fields.object("chat_template_kwargs") or {}
    if len(given) > _ARGUMENTS:
        raise fields.refused("chat_template_kwargs", f"has more than {_ARGUMENTS} members")
    for name in given:
        if name in _TAKEN or not name.isidentifier():
            raise fields.refused("chat_template_kwargs", f"{name[:64]!a} is not for a client to set")
    return {**arguments, **given}
