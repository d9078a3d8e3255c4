# SPDX-License-Identifier: Apache-2.0
"""What is said of the routes of OpenAI's protocol. What is ignored is not listed: it may be sent all the same."""

from __future__ import annotations

from typing import Any

from headrace.api.openapi.describing import (
    ERRORS,
    EVENTS,
    JSON,
    OF_EVERY_BODY,
    OF_EVERY_ROUTE,
    Operation,
    Schema,
    Table,
    answer,
    json_of,
    operation,
)
from headrace.core.handing import PREFILL_PATH

OPENAI = "OpenAI"

_TEXT: Schema = {"type": "string"}
_FLAG: Schema = {"type": ["boolean", "null"]}
_THING: Schema = {"type": "object"}
_FAILING = (401, 403, 404, 429, 499, 504)
_TOLD: Schema = {
    "type": "object",
    "required": ["message", "type", "param", "code"],
    "properties": {
        "message": _TEXT,
        "type": _TEXT,
        "param": {"type": ["string", "null"], "description": "The field that is wrong."},
        "code": {"type": ["string", "null"]},
    },
}
_ERROR: Schema = {
    "type": "object",
    "required": ["error"],
    "properties": {"error": {"anyOf": [_TOLD, {**_TEXT, "description": "What failed before the request was read."}]}},
}
_MORE_ERRORS = {401: "The server needs an API key: `Authorization: Bearer KEY`."}


def _number(low: float, high: float, kind: str = "number") -> Schema:
    return {"type": [kind, "null"], "minimum": low, "maximum": high}


_MODEL: Schema = {"type": "string", "description": "A model, or a LoRA adapter, as GET /v1/models lists them."}
_SAMPLING: dict[str, Schema] = {
    "model": _MODEL,
    "max_tokens": _number(1, 10_000_000, "integer"),
    "temperature": _number(0, 2),
    "top_p": _number(0, 1),
    "top_k": _number(-1, 1 << 24, "integer"),
    "min_p": _number(0, 1),
    "n": _number(1, 128, "integer"),
    "seed": {"type": ["integer", "null"]},
    "stop": {"anyOf": [_TEXT, {"type": "array", "items": _TEXT, "maxItems": 16}, {"type": "null"}]},
    "presence_penalty": _number(-2, 2),
    "frequency_penalty": _number(-2, 2),
    "repetition_penalty": _number(0, 10),
    "logit_bias": {"type": ["object", "null"], "additionalProperties": {"type": "number"}},
    "response_format": {
        "type": ["object", "null"],
        "required": ["type"],
        "properties": {"type": {"enum": ["text", "json_object", "json_schema"]}},
    },
    "stream": _FLAG,
    "stream_options": {"type": ["object", "null"], "properties": {"include_usage": _FLAG}},
}
_CHAT: Schema = {
    "type": "object",
    "required": ["model", "messages"],
    "properties": {
        **_SAMPLING,
        "messages": {
            "type": "array",
            "minItems": 1,
            "maxItems": 2048,
            "items": {
                "type": "object",
                "required": ["role"],
                "properties": {
                    "role": {"enum": ["system", "developer", "user", "assistant", "tool"]},
                    "content": {
                        "description": "A text, or a list of items of type text, image_url or video_url.",
                        "anyOf": [_TEXT, {"type": "array", "items": _THING}, {"type": "null"}],
                    },
                },
            },
        },
        "max_completion_tokens": _number(1, 10_000_000, "integer"),
        "logprobs": _FLAG,
        "top_logprobs": _number(0, 20, "integer"),
        "tools": {"type": ["array", "null"], "maxItems": 256, "items": _THING},
        "tool_choice": {"anyOf": [{"enum": ["none", "auto", "required"]}, _THING, {"type": "null"}]},
    },
    "example": {"model": "llama", "messages": [{"role": "user", "content": "Hello"}], "max_tokens": 64},
}
_TOKENS: Schema = {"type": "array", "items": {"type": "integer", "minimum": 0}, "minItems": 1}
_COMPLETION: Schema = {
    "type": "object",
    "required": ["model", "prompt"],
    "properties": {
        **_SAMPLING,
        "prompt": {
            "description": "A text, texts, tokens, or lists of tokens.",
            "anyOf": [_TEXT, {"type": "array", "items": {"anyOf": [_TEXT, _TOKENS]}, "maxItems": 256}, _TOKENS],
        },
        "echo": _FLAG,
        "logprobs": _number(0, 20, "integer"),
    },
    "example": {"model": "llama", "prompt": "Once upon a time", "max_tokens": 64},
}
_EMBEDDING: Schema = {
    "type": "object",
    "required": ["model", "input"],
    "properties": {
        "model": _MODEL,
        "input": {"anyOf": [_TEXT, {"type": "array", "items": _TEXT, "minItems": 1, "maxItems": 2048}]},
        "encoding_format": {"enum": ["float", "base64", None]},
        "dimensions": _number(1, 1 << 20, "integer"),
    },
    "example": {"model": "minilm", "input": ["one text", "another"]},
}
_ONE_MODEL: Schema = {
    "type": "object",
    "required": ["id", "object", "created", "owned_by"],
    "properties": {"id": _TEXT, "object": _TEXT, "created": {"type": "integer"}, "owned_by": _TEXT},
}


_TICKET: Schema = {
    "type": "object",
    "required": ["ticket", "prompt_tokens"],
    "properties": {"ticket": _TEXT, "prompt_tokens": {"type": "integer"}},
}


def openai_table() -> Table:
    """By (method, path)."""
    listed = {"type": "object", "required": ["data"], "properties": {"data": {"type": "array", "items": _ONE_MODEL}}}
    return {
        ("POST", "/v1/chat/completions"): _asked("The next message of a conversation", _CHAT),
        ("POST", "/v1/completions"): _asked("What comes after a text", _COMPLETION),
        ("POST", "/v1/embeddings"): _asked("Vectors for texts", _EMBEDDING, streams=False),
        ("POST", PREFILL_PATH): _operation(
            "Compute a prompt for a decoder: the body of a chat or a completions request. For routers.",
            {"200": answer("A ticket for the decoder; empty if there is nothing to take.", json_of(_TICKET))},
            body={JSON: {"schema": _THING}},
        ),
        ("GET", "/v1/models"): _operation(
            "Models that generate or embed", {"200": answer("All of them.", json_of(listed))}
        ),
        ("GET", "/v1/models/{model}"): _operation(
            "One of them", {"200": answer("What is known of it.", json_of(_ONE_MODEL))}
        ),
    }  # fmt: skip


def _asked(summary: str, schema: Schema, *, streams: bool = True) -> Operation:
    content: dict[str, Any] = json_of(_THING)
    if streams:
        content[EVENTS] = {"schema": {"description": "With `stream`: chunks, and `[DONE]` at the end."}}
    answers = {"200": answer("As OpenAI answers.", content)}
    return _operation(summary, answers, body={JSON: {"schema": schema}})


def _operation(summary: str, answers: dict[str, Schema], body: dict[str, Any] | None = None) -> Operation:
    statuses = {*OF_EVERY_ROUTE, *_FAILING, *(OF_EVERY_BODY if body else ())}
    errors = {str(status): answer({**ERRORS, **_MORE_ERRORS}[status], json_of(_ERROR)) for status in sorted(statuses)}
    return operation(OPENAI, summary, answers={**answers, **errors}, body=body)
