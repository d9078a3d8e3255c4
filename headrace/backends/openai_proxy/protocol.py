# SPDX-License-Identifier: Apache-2.0
"""Converts requests to OpenAI's protocol, and its responses to ours. Sends and receives nothing.

A request that arrived by that protocol is forwarded unchanged but for the model's name, and its client gets the engine's
JSON unchanged in the parameter `openai`. A v2 request has its text in the input `text_input`, and everything else in
its parameters and in `sampling_parameters`, a JSON object.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import orjson

from headrace.backends.openai_proxy.client import Headers
from headrace.core.dtypes import BYTES
from headrace.core.errors import (
    DeadlineExceeded,
    FailedPrecondition,
    HeadraceError,
    Internal,
    InvalidArgument,
    NotFound,
    ResourceExhausted,
    TooLarge,
    Unavailable,
    Unimplemented,
)
from headrace.core.generation import TEXT_INPUT, TEXT_OUTPUT, Generation, GenerationRequest
from headrace.core.requests import InferRequest, ParameterValue
from headrace.core.tensors import Tensor

CHAT, COMPLETIONS, EMBEDDINGS = "/v1/chat/completions", "/v1/completions", "/v1/embeddings"
MESSAGES = "/v1/messages"
"""Anthropic's Messages API, which vLLM and other engines have, too."""
STREAM, SAMPLING = "stream", "sampling_parameters"

_RANKING = ("/v1/rerank", "/rerank", "/v2/rerank", "/v1/score", "/score")
_PATHS = (CHAT, COMPLETIONS, EMBEDDINGS, MESSAGES, f"{MESSAGES}/count_tokens", "/tokenize", "/detokenize", *_RANKING)
_SERVER_PARAMETERS = frozenset(
    (
        *("sequence_id", "sequence_start", "sequence_end", "priority", "timeout", "binary_data_output"),
        *("exclude_input_in_output", "return_finish_reason"),
    )
)
"""Parameters that the server uses and the engine does not get."""
_RESERVED_PARAMETERS = frozenset(("model", "prompt", "messages", "stream_options"))
_MAX_SAMPLING_CHARACTERS = 1 << 20
_ERRORS: Mapping[int, type[HeadraceError]] = {
    400: InvalidArgument,
    404: NotFound,
    405: Unimplemented,
    408: DeadlineExceeded,
    409: FailedPrecondition,
    413: TooLarge,
    422: InvalidArgument,
    429: ResourceExhausted,
    501: Unimplemented,
    502: Unavailable,
    503: Unavailable,
    504: DeadlineExceeded,
}
_MAX_MESSAGE_CHARACTERS = 2000
_MAX_RETRY_SECONDS = 3600


@dataclass(frozen=True, slots=True)
class UpstreamRequest:
    """A request to the engine."""

    path: str
    body: bytes
    streams: bool
    verbatim: bool
    """Whether the client speaks OpenAI's protocol, and gets the engine's JSON unchanged."""


def build_request(request: InferRequest, served_model: str) -> UpstreamRequest:
    """Return the request to send; raises `InvalidArgument` if it cannot be expressed."""
    if isinstance(request, GenerationRequest):
        return _from_generation(request.generation, served_model)
    return _from_tensors(request, served_model)


def _from_generation(generation: Generation, served_model: str) -> UpstreamRequest:
    # Engines serve LoRA adapters as models.
    model = generation.adapter or served_model
    if not generation.body:
        return _from_fields(generation, model)
    if generation.path not in _PATHS:
        raise Unimplemented(f"the path '{generation.path[:64]}' is not passed on: use {', '.join(_PATHS)}")
    body = {**generation.body, "model": model}
    streams = generation.path in (CHAT, COMPLETIONS, MESSAGES) and bool(body.get(STREAM))
    return UpstreamRequest(generation.path, _encode_json(body), streams, True)


def _from_fields(generation: Generation, model: str) -> UpstreamRequest:
    """Build the body of a request that this server created, which has none."""
    if generation.media:
        raise Unimplemented("images and videos can be forwarded only in requests of OpenAI's protocol: use that")
    body: dict[str, Any] = {"model": model, STREAM: generation.stream}
    if generation.messages:
        path = CHAT
        body["messages"] = [dict(message) for message in generation.messages]
        if generation.tools:
            body["tools"] = [dict(tool) for tool in generation.tools]
        if generation.template_arguments:
            body["chat_template_kwargs"] = dict(generation.template_arguments)
    else:
        path = COMPLETIONS
        prompt = generation.prompt
        body["prompt"] = prompt if isinstance(prompt, str) else list(prompt or ())
    body |= _sampling_fields(generation)
    return UpstreamRequest(path, _encode_json(body), generation.stream, False)


def _sampling_fields(generation: Generation) -> dict[str, Any]:
    """Return the sampling params that differ from the defaults: engines refuse fields that they do not know."""
    sampling = generation.sampling
    defaults = type(sampling)()
    names = (
        *("max_tokens", "min_tokens", "temperature", "top_p", "top_k", "min_p", "repetition_penalty"),
        *("presence_penalty", "frequency_penalty", "seed", "ignore_eos", "n"),
    )
    body = {name: getattr(sampling, name) for name in names if getattr(sampling, name) != getattr(defaults, name)}
    if sampling.stop:
        body["stop"] = list(sampling.stop)
    if sampling.stop_token_ids:
        body["stop_token_ids"] = list(sampling.stop_token_ids)
    if sampling.logit_bias:
        body["logit_bias"] = {str(token): bias for token, bias in sampling.logit_bias.items()}
    output_format = generation.output_format
    if output_format is not None:
        if output_format.kind == "regex":
            raise Unimplemented("OpenAI's protocol has no field for output that follows a regular expression")
        schema = {"name": "answer", "schema": dict(output_format.schema or {})}
        body["response_format"] = {"type": output_format.kind} | (
            {"json_schema": schema} if output_format.kind == "json_schema" else {}
        )
    return body


def _from_tensors(request: InferRequest, served_model: str) -> UpstreamRequest:
    arrays = {tensor.name: tensor.array for tensor in request.inputs}
    if TEXT_INPUT not in arrays:
        raise InvalidArgument(f"input '{TEXT_INPUT}' is missing: it has the text to be continued")
    text = _read_text(TEXT_INPUT, arrays[TEXT_INPUT])
    given: dict[str, Any] = dict(request.parameters)
    if SAMPLING in arrays:
        given = _parse_sampling(_read_text(SAMPLING, arrays[SAMPLING])) | given
    streams = bool(arrays[STREAM].ravel()[0]) if STREAM in arrays else given.pop(STREAM, False)
    given.pop(STREAM, None)
    if not isinstance(streams, bool):
        raise InvalidArgument(f"parameter {STREAM} must be true or false")
    for name in given:
        if name in _RESERVED_PARAMETERS:
            raise InvalidArgument(f"parameter {name} cannot be given: the server sets it")
    options = {
        name: value
        for name, value in given.items()
        if name not in _SERVER_PARAMETERS and not name.startswith("triton_")
    }
    return UpstreamRequest(
        COMPLETIONS, _encode_json({"model": served_model, "prompt": text, **options, STREAM: streams}), streams, False
    )


def _parse_sampling(text: str) -> dict[str, Any]:
    if len(text) > _MAX_SAMPLING_CHARACTERS:
        raise InvalidArgument(f"input '{SAMPLING}' has over {_MAX_SAMPLING_CHARACTERS} characters")
    try:
        given = orjson.loads(text) if text.strip() else {}
    except ValueError:
        raise InvalidArgument(
            f"input '{SAMPLING}' is not JSON: send an object such as {{\"temperature\": 0}}"
        ) from None
    if not isinstance(given, dict):
        raise InvalidArgument(f"input '{SAMPLING}' is not a JSON object")
    return given


def _read_text(name: str, array: Any) -> str:
    (value,) = array.ravel()
    try:
        return value.decode() if isinstance(value, bytes) else str(value)
    except UnicodeDecodeError:
        raise InvalidArgument(f"input '{name}' is not UTF-8 text") from None


def _encode_json(body: Mapping[str, Any]) -> bytes:
    try:
        return orjson.dumps(body)
    except TypeError:
        raise InvalidArgument("the request has text that is not Unicode, or a number too large for JSON") from None


class UpstreamResponse:
    """One chunk of a stream, or a complete response, as outputs and parameters.

    `text_output` has the text of each choice; the parameters are those of `core.generation`.
    """

    __slots__ = ("finished", "outputs", "parameters")

    def __init__(self, data: bytes, *, verbatim: bool) -> None:
        document = _parse_object(data)
        parameters: dict[str, ParameterValue] = {"openai": data.decode()} if verbatim else {}
        texts: list[bytes] = []
        self.finished = document.get("type") == "message_stop"
        """Whether a choice, or a message of the Messages API, has ended."""
        choices = document.get("choices")
        for choice in choices if isinstance(choices, list) else ():
            if not isinstance(choice, dict):
                continue
            texts.append(_choice_text(choice).encode(errors="replace"))
            index, reason = choice.get("index"), choice.get("finish_reason")
            if isinstance(index, int):
                parameters.setdefault("index", index)
            if isinstance(reason, str):
                self.finished = True
                parameters.setdefault("finish_reason", reason)
        usage = document.get("usage")
        if isinstance(usage, dict):
            _add_usage(parameters, usage)
        array = np.empty(len(texts) or 1, object)
        array[:] = texts or [b""]
        self.outputs = [Tensor(TEXT_OUTPUT, BYTES, array)]
        self.parameters = parameters


def parse_error(data: bytes) -> HeadraceError | None:
    """Return the error in an event or a document, if it is one: engines send errors in streams, too."""
    if b'"error"' not in data:
        return None
    document = _parse_object(data)
    # Engines use both {"error": {...}} and {"object": "error", ...}.
    if "choices" in document or not (document.get("error") or document.get("object") == "error"):
        return None
    inner = document.get("error")
    code = (inner if isinstance(inner, dict) else document).get("code")
    return response_error(code if isinstance(code, int) and 400 <= code < 600 else 500, {}, data)


def response_error(status: int, headers: Headers, body: bytes) -> HeadraceError:
    """Return our error for a status other than 200, with the engine's message."""
    if status in (401, 403):
        return Unavailable(
            "the engine does not accept the key that this server sends: its operator should check the parameter api_key_env"
        )
    text = _error_message(body) or f"the engine answered with status {status}"
    kind = _ERRORS.get(status, InvalidArgument if 400 <= status < 500 else Internal)
    return kind(text, retry_after_seconds=_retry_after(headers))


def _parse_object(data: bytes) -> dict[str, Any]:
    try:
        document = orjson.loads(data)
    except ValueError:
        document = None
    if not isinstance(document, dict):
        raise Unavailable("the engine sent a response that is not a JSON object")
    return document


def _choice_text(choice: Mapping[str, Any]) -> str:
    for member in ("delta", "message"):
        inner = choice.get(member)
        if isinstance(inner, dict):
            content = inner.get("content")
            return content if isinstance(content, str) else ""
    text = choice.get("text")
    return text if isinstance(text, str) else ""


def _add_usage(parameters: dict[str, ParameterValue], usage: Mapping[str, Any]) -> None:
    for name in ("prompt_tokens", "completion_tokens"):
        if isinstance(usage.get(name), int):
            parameters[name] = usage[name]
    details = usage.get("prompt_tokens_details")
    if isinstance(details, dict) and isinstance(details.get("cached_tokens"), int):
        parameters["cached_tokens"] = details["cached_tokens"]


def _error_message(body: bytes) -> str:
    try:
        document = orjson.loads(body)
    except ValueError:
        return ""
    if not isinstance(document, dict):
        return ""
    inner = document.get("error")
    message = (
        inner.get("message") if isinstance(inner, dict) else inner or document.get("message") or document.get("detail")
    )
    if not isinstance(message, str):
        # FastAPI sends a list of problems.
        message = orjson.dumps(message).decode() if message else ""
    return "".join(letter if letter.isprintable() else " " for letter in message[:_MAX_MESSAGE_CHARACTERS]).strip()


def _retry_after(headers: Headers) -> float | None:
    text = headers.get(b"retry-after", b"").strip()
    return float(min(int(text), _MAX_RETRY_SECONDS)) if text.isdigit() and len(text) < 10 else None
