# SPDX-License-Identifier: Apache-2.0
"""A request of ours in the words of OpenAI's protocol. Called by `instance`; sends nothing.

One that came by that protocol is passed on as it was said, under the engine's name for the model. One that came by v2 has
its text in the input `text_input`, and everything else in its parameters and in `sampling_parameters`, a JSON object.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import orjson

from headrace.core.errors import InvalidArgument, Unimplemented
from headrace.core.generation import TEXT_INPUT, Generation, GenerationRequest
from headrace.core.messages import InferRequest

CHAT, COMPLETIONS, EMBEDDINGS = "/v1/chat/completions", "/v1/completions", "/v1/embeddings"
STREAM, SAMPLING = "stream", "sampling_parameters"

_PATHS = (CHAT, COMPLETIONS, EMBEDDINGS)
_OF_THE_SERVER = frozenset(
    (
        *("sequence_id", "sequence_start", "sequence_end", "priority", "timeout", "binary_data_output"),
        *("exclude_input_in_output", "return_finish_reason"),
    )
)
"""Parameters that are not for the engine."""
_NOT_GIVEN = frozenset(("model", "prompt", "messages", "stream_options"))
_MOST_SAMPLING_BYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class Question:
    """What is sent."""

    path: str
    body: bytes
    streams: bool
    passed_on: bool
    """Whether whoever asked reads OpenAI's JSON, and is to get it as it comes."""


def question_of(request: InferRequest, served_model: str) -> Question:
    """What to send for a request; raises `InvalidArgument` for what cannot be said."""
    if isinstance(request, GenerationRequest):
        return _of_generation(request.generation, served_model)
    return _of_tensors(request, served_model)


def _of_generation(generation: Generation, served_model: str) -> Question:
    # LoRA adapters are models of their own there.
    model = generation.adapter or served_model
    if not generation.body:
        return _spelled_out(generation, model)
    if generation.path not in _PATHS:
        raise Unimplemented(f"the path '{generation.path[:64]}' is not passed on: use {', '.join(_PATHS)}")
    body = {**generation.body, "model": model}
    streams = generation.path != EMBEDDINGS and bool(body.get(STREAM))
    return Question(generation.path, _json(body), streams, True)


def _spelled_out(generation: Generation, model: str) -> Question:
    """A request that was made by a part of this server, and has no body."""
    if generation.media:
        raise Unimplemented(
            "images and videos reach another engine only in requests of OpenAI's protocol: send them there"
        )
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
    body |= _sampling(generation)
    return Question(path, _json(body), generation.stream, False)


def _sampling(generation: Generation) -> dict[str, Any]:
    """What differs from the defaults: engines refuse what they do not know, and not all know all of it."""
    given = generation.sampling
    plain = type(given)()
    names = (
        *("max_tokens", "min_tokens", "temperature", "top_p", "top_k", "min_p", "repetition_penalty"),
        *("presence_penalty", "frequency_penalty", "seed", "ignore_eos", "n"),
    )
    body = {name: getattr(given, name) for name in names if getattr(given, name) != getattr(plain, name)}
    if given.stop:
        body["stop"] = list(given.stop)
    if given.stop_token_ids:
        body["stop_token_ids"] = list(given.stop_token_ids)
    if given.logit_bias:
        body["logit_bias"] = {str(token): bias for token, bias in given.logit_bias.items()}
    wanted = generation.output_format
    if wanted is not None:
        if wanted.kind == "regex":
            raise Unimplemented("output that follows a regular expression has no words in OpenAI's protocol")
        schema = {"name": "answer", "schema": dict(wanted.schema or {})}
        body["response_format"] = {"type": wanted.kind} | (
            {"json_schema": schema} if wanted.kind == "json_schema" else {}
        )
    return body


def _of_tensors(request: InferRequest, served_model: str) -> Question:
    arrays = {tensor.name: tensor.array for tensor in request.inputs}
    if TEXT_INPUT not in arrays:
        raise InvalidArgument(f"input '{TEXT_INPUT}' is missing: it has the text to be continued")
    text = _text(TEXT_INPUT, arrays[TEXT_INPUT])
    given: dict[str, Any] = dict(request.parameters)
    if SAMPLING in arrays:
        given = _sampling_parameters(_text(SAMPLING, arrays[SAMPLING])) | given
    streams = bool(arrays[STREAM].ravel()[0]) if STREAM in arrays else given.pop(STREAM, False)
    given.pop(STREAM, None)
    if not isinstance(streams, bool):
        raise InvalidArgument(f"parameter {STREAM} must be true or false")
    for name in given:
        if name in _NOT_GIVEN:
            raise InvalidArgument(f"parameter {name} cannot be given: the server sets it")
    options = {
        name: value for name, value in given.items() if name not in _OF_THE_SERVER and not name.startswith("triton_")
    }
    return Question(
        COMPLETIONS, _json({"model": served_model, "prompt": text, **options, STREAM: streams}), streams, False
    )


def _sampling_parameters(text: str) -> dict[str, Any]:
    if len(text) > _MOST_SAMPLING_BYTES:
        raise InvalidArgument(f"input '{SAMPLING}' has over {_MOST_SAMPLING_BYTES} characters")
    try:
        given = orjson.loads(text) if text.strip() else {}
    except ValueError:
        raise InvalidArgument(
            f"input '{SAMPLING}' is not JSON: send an object such as {{\"temperature\": 0}}"
        ) from None
    if not isinstance(given, dict):
        raise InvalidArgument(f"input '{SAMPLING}' is not a JSON object")
    return given


def _text(name: str, array: Any) -> str:
    (value,) = array.ravel()
    try:
        return value.decode() if isinstance(value, bytes) else str(value)
    except UnicodeDecodeError:
        raise InvalidArgument(f"input '{name}' is not UTF-8 text") from None


def _json(body: Mapping[str, Any]) -> bytes:
    try:
        return orjson.dumps(body)
    except TypeError:
        raise InvalidArgument("the request has text that is not Unicode, or a number too large for JSON") from None
