# SPDX-License-Identifier: Apache-2.0
"""`POST /v1/chat/completions`: parse the conversation, load its images and videos, and start the generation.

Messages are brought into the form that chat templates expect. A content of several texts becomes one text, since most
templates support no other; with images or videos it stays a list, in which each of them is a placeholder
(`core.generation`). `models.media` loads images and videos, within its limits.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, Literal, NamedTuple, Protocol

import orjson

from headrace.api.openai.continuation import ids_of, tracked, tracking
from headrace.api.openai.errors import BadRequest
from headrace.api.openai.fields import Fields, check_depth, parse_body
from headrace.api.openai.models import Models, Target
from headrace.api.openai.output_formats import formats_of
from headrace.api.openai.output_parser import OutputParser, ignore_malformed_call
from headrace.api.openai.prefill import TransferTokenWriter, prompt_only, with_transfer_token
from headrace.api.openai.proxy import forward
from headrace.api.openai.responses import ChatResponseWriter, GenerationCalls, ResponseWriter
from headrace.api.openai.sampling_params import parse_sampling
from headrace.api.openai.settings import OpenAiSettings
from headrace.api.openai.streams import ChatChunkWriter, ChunkStream
from headrace.api.openai.structured_output import format_field, parse_output_format
from headrace.api.openai.tool_calls import Tools, parse_tools
from headrace.core.errors import Code, HeadraceError
from headrace.core.generation import Generation, GenerationRequest, PromptImage, PromptVideo
from headrace.core.names import REQUEST_ID_FIELD, request_id
from headrace.core.telemetry.metrics import Counter, Family
from headrace.engine.dataplane import DataPlane
from headrace.net.http.exchange import Exchange

_UNSUPPORTED = {
    "audio": "audio output is not supported",
    "web_search_options": "web search is not supported",
    "chat_template": "the model's own template is used: use 'chat_template_kwargs' for its arguments",
    "continue_final_message": "a response is always a new message",
    "echo": "is for /v1/completions",
}
_TEMPLATE_ARGUMENTS = ("add_generation_prompt", "documents", "reasoning_effort")
"""Members of the request that are passed to the template."""
_ARGUMENTS = 64
_RESERVED = frozenset(("messages", "tools", "chat_template", "tokenize"))


_ROLES = {
    "system": "system",
    "developer": "system",
    "user": "user",
    "assistant": "assistant",
    "tool": "tool",
}
"""The template's roles by OpenAI's names. Templates do not know the role developer."""
_NAME_CHARACTERS = 256
_CALLS = 256
_MEDIA = {"image_url": "image", "video_url": "video"}
_CLIENT_ERRORS = (Code.INVALID_ARGUMENT, Code.TOO_LARGE, Code.NOT_FOUND, Code.PERMISSION_DENIED)


WriterFactory = Callable[[Callable[[], OutputParser] | None, Generation], ResponseWriter]
"""Creates the writer of a response, with the parser of the model's output (None: plain text) and the request."""


class Chat:
    """Handlers over one data plane."""

    def __init__(
        self,
        plane: DataPlane,
        settings: OpenAiSettings,
        models: Models,
        media_reader: MediaReader | None = None,
        malformed_calls: Family[Counter] | None = None,
    ) -> None:
        """`malformed_calls`: by model, the tool calls of its output that could not be read."""
        self._plane = plane
        self._settings = settings
        self._models = models
        self._media_reader = media_reader
        self._malformed_calls = malformed_calls
        self._tasks: set[asyncio.Task[None]] = set()

    def handle(self, exchange: Exchange) -> None:
        """Handle one request."""
        self.begin(exchange, parse_body(exchange))

    def begin(self, exchange: Exchange, fields: Fields, prefill: TransferTokenWriter | None = None) -> None:
        """Start a parsed request. With `prefill`, only compute the prompt and answer with its transfer token."""
        target = self._models.generative_model(fields)
        if target.proxied:
            if prefill is not None:
                prefill.end()
            else:
                forward(self._plane, exchange, target, fields.members, self._settings)
        elif prefill is not None:
            self.start(exchange, fields, target, lambda _parser, _generation: prefill, prompt_only)
        else:
            self.start(exchange, fields, target, partial(self._writer, exchange, fields, target))

    def start(
        self,
        exchange: Exchange,
        fields: Fields,
        target: Target,
        make_writer: WriterFactory,
        change: Callable[[Generation], Generation] = lambda generation: generation,
    ) -> None:
        """Start the generation of a chat request for a model of ours; `make_writer` returns what writes its response.

        Other protocols translate their requests to chat requests and give their own writers.
        """
        conversation, tools, generation = self._parse(fields, target)
        generation = tracked(exchange, change(with_transfer_token(exchange, generation)))
        writer = make_writer(self._prepared(tools.parser, target, exchange), generation)
        writer = tracking(exchange, generation, writer)
        names = {
            **{name: name for name in fields.members},
            "response_format": tools.format_source or format_field(fields),
        }
        if not conversation.media:
            self._begin(exchange, writer, target, generation, names)
            return
        if self._media_reader is None:
            raise BadRequest(conversation.media[0].param, "this server does not support images and videos")
        loading = self._with_media(self._media_reader, exchange, writer, target, conversation, generation, names)
        task = asyncio.get_running_loop().create_task(loading)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        exchange.on_disconnect = partial(_cancel, task)

    def _prepared(
        self, make_parser: Callable[[], OutputParser] | None, target: Target, exchange: Exchange
    ) -> Callable[[], OutputParser] | None:
        """Return a factory whose parsers count malformed calls, and give calls the ids of this response."""
        if make_parser is None:
            return None
        malformed, ids = self._malformed_calls, ids_of(exchange)
        count = malformed.labels(model=target.config.name).add if malformed is not None else ignore_malformed_call

        def make() -> OutputParser:
            parser = make_parser()
            parser.ids = ids
            parser.on_malformed_call = count
            return parser

        return make

    def _parse(self, fields: Fields, target: Target) -> tuple[Conversation, Tools, Generation]:
        fields.reject(_UNSUPPORTED)
        modalities = fields.get("modalities")
        if modalities is not None and modalities != ["text"]:
            raise fields.error("modalities", "must be ['text']: this server responds with text")
        conversation = parse_messages(fields, self._settings)
        formats = formats_of(target.config.parameters)
        tools = parse_tools(fields, self._settings, formats)
        output_format = parse_output_format(fields)
        if output_format is not None and tools.output_format is not None:
            raise fields.error("tool_choice", "requires a tool call, which conflicts with 'response_format'")
        generation = Generation(
            messages=conversation.messages,
            tools=tools.definitions,
            template_arguments=template_arguments(fields),
            sampling=parse_sampling(fields, self._settings, chat=True),
            output_format=output_format or tools.output_format,
            adapter=target.adapter,
            stream=fields.boolean("stream"),
            output_markers=formats.markers if tools.parser is not None else (),
            reasoning_end=formats.reasoning_end,
            path="/v1/chat/completions",
        )
        return conversation, tools, generation

    async def _with_media(
        self,
        reader: MediaReader,
        exchange: Exchange,
        writer: ResponseWriter,
        target: Target,
        conversation: Conversation,
        generation: Generation,
        names: Mapping[str, str],
    ) -> None:
        try:
            media = await load_media(reader, conversation.media, self._settings.media_bytes)
            self._begin(exchange, writer, target, replace(generation, media=media), names)
        except Exception as error:
            if not exchange.closed:
                writer.fail(error)

    def _begin(
        self,
        exchange: Exchange,
        writer: ResponseWriter,
        target: Target,
        generation: Generation,
        names: Mapping[str, str],
    ) -> None:
        sent = exchange.head.get(REQUEST_ID_FIELD.encode())
        request = GenerationRequest(target.config.name, generation, id=request_id(sent) if sent else "")
        GenerationCalls(self._plane, exchange, writer, lambda _: names).begin([request])

    def _writer(
        self,
        exchange: Exchange,
        fields: Fields,
        target: Target,
        parser: Callable[[], OutputParser] | None,
        generation: Generation,
    ) -> ResponseWriter:
        sampling = generation.sampling
        base = response_base("chatcmpl", "chat.completion", target, exchange, stream=generation.stream)
        with_usage = wants_usage(fields, stream=generation.stream)
        if not generation.stream:
            return ChatResponseWriter(exchange, base, parser=parser, choices=sampling.n, choices_per_request=sampling.n)
        return ChatChunkWriter(
            ChunkStream(exchange, self._settings.stream_unread_bytes),
            base,
            parser=parser,
            choices=sampling.n,
            choices_per_request=sampling.n,
            with_usage=with_usage,
            plain=sampling.logprobs is None,
        )


def _cancel(task: asyncio.Task[None]) -> None:
    task.cancel()


def response_base(prefix: str, kind: str, target: Target, exchange: Exchange, *, stream: bool) -> dict[str, Any]:
    """Return the first members of every document of a response."""
    if stream and kind == "chat.completion":
        kind = "chat.completion.chunk"
    ids = ids_of(exchange)
    identity = f"{prefix}-{ids.hexadecimal(16)}"
    return {"id": identity, "object": kind, "created": ids.created(), "model": target.requested_name}


def wants_usage(fields: Fields, *, stream: bool) -> bool:
    """Return whether a stream ends with the token usage."""
    options = fields.object("stream_options")
    if options is None:
        return False
    if not stream:
        raise fields.error("stream_options", "is only for requests with 'stream': true")
    return Fields(options, "stream_options").boolean("include_usage")


def template_arguments(fields: Fields) -> Mapping[str, Any]:
    """Return the variables that a request sets for the chat template."""
    arguments = {name: fields.get(name) for name in _TEMPLATE_ARGUMENTS if fields.get(name) is not None}
    kwargs = fields.object("chat_template_kwargs") or {}
    if len(kwargs) > _ARGUMENTS:
        raise fields.error("chat_template_kwargs", f"has more than {_ARGUMENTS} members")
    for name in kwargs:
        if name in _RESERVED or not name.isidentifier():
            raise fields.error("chat_template_kwargs", f"{name[:64]!a} cannot be set by a client")
    return {**arguments, **kwargs}


class MediaUrl(NamedTuple):
    """The URL of an image or video, and its path in the request."""

    param: str
    kind: Literal["image", "video"]
    url: str


class Conversation(NamedTuple):
    """Messages for the template, and the media of their placeholders, in order."""

    messages: tuple[Mapping[str, Any], ...]
    media: tuple[MediaUrl, ...]


def parse_messages(fields: Fields, settings: OpenAiSettings) -> Conversation:
    """Parse the `messages` of a request."""
    values = fields.list("messages", settings.messages)
    if not values:
        raise fields.error("messages", "must be a list of at least one message")
    media: list[MediaUrl] = []
    messages = []
    for index, message in enumerate(values):
        at = f"{fields.param('messages')}[{index}]"
        if not isinstance(message, dict):
            raise BadRequest(at, "must be an object with 'role' and 'content'")
        messages.append(_message(Fields(message, at), settings, media))
    return Conversation(tuple(messages), tuple(media))


def _message(fields: Fields, settings: OpenAiSettings, media: list[MediaUrl]) -> dict[str, Any]:
    role = fields.get("role")
    if not isinstance(role, str) or role not in _ROLES:
        raise fields.error("role", f"must be one of: {', '.join(_ROLES)}")
    message: dict[str, Any] = {"role": _ROLES[role]}
    content = fields.get("content")
    calls = _calls(fields) if role == "assistant" else None
    if content is None and not (role == "assistant" and (calls or "content" in fields.members)):
        raise fields.error("content", "is missing")
    message["content"] = "" if content is None else _content(fields, content, settings, media)
    if calls:
        message["tool_calls"] = calls
    for name in ("name", "tool_call_id"):
        text = fields.text(name, _NAME_CHARACTERS)
        if text is not None:
            message[name] = text
    thoughts = fields.get("reasoning_content")
    if isinstance(thoughts, str):
        message["reasoning_content"] = thoughts
    if role == "tool" and "tool_call_id" not in message:
        raise fields.error("tool_call_id", "is missing: a tool message needs the id of its call")
    return message


def _content(fields: Fields, content: Any, settings: OpenAiSettings, media: list[MediaUrl]) -> str | list[Any]:
    if isinstance(content, str):
        return content
    if not isinstance(content, list) or not 0 < len(content) <= settings.content_items:
        raise fields.error("content", f"must be a string, or a list of 1 to {settings.content_items} items")
    items: list[dict[str, Any]] = []
    media_before = len(media)
    for index, item in enumerate(content):
        at = f"{fields.param('content')}[{index}]"
        if not isinstance(item, dict):
            raise BadRequest(at, "must be an object with a 'type'")
        items.append(_item(Fields(item, at), settings, media))
    if len(media) == media_before:
        return "\n".join(item["text"] for item in items)
    return items


def _item(fields: Fields, settings: OpenAiSettings, media: list[MediaUrl]) -> dict[str, Any]:
    kind = fields.get("type")
    if kind in ("text", "refusal"):
        text = fields.get(kind)
        if not isinstance(text, str):
            raise fields.error(kind, "must be a string")
        return {"type": "text", "text": text}
    if kind == "input_audio":
        raise fields.error("type", "audio input is not supported: use text, images and videos")
    if not isinstance(kind, str) or kind not in _MEDIA:
        raise fields.error("type", "must be 'text', 'image_url' or 'video_url'")
    if len(media) >= settings.media:
        raise fields.error(kind, f"a conversation has at most {settings.media} images and videos")
    value = fields.get(kind)
    url = value.get("url") if isinstance(value, dict) else value
    if not isinstance(url, str) or not url:
        raise fields.error(kind, "must be an object {'url': ...}, with a URL or a data: URL")
    placeholder = _MEDIA[kind]
    media.append(MediaUrl(fields.param(kind), "image" if placeholder == "image" else "video", url))
    return {"type": placeholder}


def _calls(fields: Fields) -> list[dict[str, Any]] | None:
    """Parse the earlier tool calls of the assistant. Templates expect their arguments as objects."""
    calls = []
    for index, call in enumerate(fields.list("tool_calls", _CALLS) or []):
        at = f"{fields.param('tool_calls')}[{index}]"
        function = Fields(call, at).object("function") if isinstance(call, dict) else None
        if function is None or not isinstance(function.get("name"), str):
            raise BadRequest(f"{at}.function", "must be an object with 'name' and 'arguments'")
        arguments = function.get("arguments")
        if isinstance(arguments, str):
            arguments = _arguments(f"{at}.function.arguments", arguments)
        if not isinstance(arguments, dict | None):
            raise BadRequest(f"{at}.function.arguments", "must be a JSON object as a string")
        name = function["name"]
        calls.append(
            {"id": call.get("id"), "type": "function", "function": {"name": name, "arguments": arguments or {}}}
        )
    return calls or None


def _arguments(param: str, text: str) -> Any:
    if not text.strip():
        return {}
    try:
        arguments = orjson.loads(text)
    except orjson.JSONDecodeError:
        raise BadRequest(param, "must be a JSON object as a string") from None
    if isinstance(arguments, dict):
        check_depth(param, arguments)
    return arguments


class MediaReader(Protocol):
    """The part of `models.media`'s reader that is used here."""

    async def picture(self, url: str) -> PromptImage:
        """Load the image at a URL."""

    async def clip(self, url: str) -> PromptVideo:
        """Load the video at a URL."""


async def load_media(
    reader: MediaReader, urls: Sequence[MediaUrl], most_bytes: int
) -> tuple[PromptImage | PromptVideo, ...]:
    """Load all images and videos concurrently, in order. The first failure cancels the others."""
    total = 0

    async def load(item: MediaUrl) -> PromptImage | PromptVideo:
        nonlocal total
        try:
            media = await (reader.picture(item.url) if item.kind == "image" else reader.clip(item.url))
        except HeadraceError as error:
            if error.code in _CLIENT_ERRORS:
                raise BadRequest(item.param, error.message, "invalid_media") from None
            raise
        total += media.pixels.nbytes if isinstance(media, PromptImage) else media.frames.nbytes
        if total > most_bytes:
            raise BadRequest(
                item.param, f"the images and videos of a request may take at most {most_bytes} bytes, decoded"
            )
        return media

    tasks = [asyncio.ensure_future(load(item)) for item in urls]
    try:
        return tuple(await asyncio.gather(*tasks))
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
