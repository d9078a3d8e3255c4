# SPDX-License-Identifier: Apache-2.0
"""OpenAPI operations of OpenAI's protocol and Anthropic's Messages API.

Fields that the server ignores are not listed and may be sent.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from headrace.api.openapi.operations import (
    BINARY,
    ERRORS,
    EVENTS,
    JSON,
    OF_EVERY_BODY,
    OF_EVERY_ROUTE,
    Operation,
    OperationTable,
    Schema,
    json_content,
    operation,
    query,
    response_object,
)
from headrace.core.continuation import CONTINUE_PATH
from headrace.core.kv_transfer import PREFILL_PATH

OPENAI = "OpenAI"

_TEXT: Schema = {"type": "string"}
_FLAG: Schema = {"type": ["boolean", "null"]}
_OBJECT: Schema = {"type": "object"}
_FAILING = (401, 403, 404, 429, 499, 504)
_ERROR_DETAILS: Schema = {
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
    "properties": {
        "error": {"anyOf": [_ERROR_DETAILS, {**_TEXT, "description": "An error before the request was read."}]}
    },
}
_MORE_ERRORS = {401: "The server needs an API key: `Authorization: Bearer KEY`."}


_MODEL: Schema = {"type": "string", "description": "A model, or a LoRA adapter, as GET /v1/models lists them."}
_TOKENS: Schema = {"type": "array", "items": {"type": "integer", "minimum": 0}, "minItems": 1}
_ONE_MODEL: Schema = {
    "type": "object",
    "required": ["id", "object", "created", "owned_by"],
    "properties": {"id": _TEXT, "object": _TEXT, "created": {"type": "integer"}, "owned_by": _TEXT},
}
_TRANSFER_TOKEN: Schema = {
    "type": "object",
    "required": ["ticket", "prompt_tokens"],
    "properties": {"ticket": _TEXT, "prompt_tokens": {"type": "integer"}},
}


def _number(low: float, high: float, kind: str = "number") -> Schema:
    return {"type": [kind, "null"], "minimum": low, "maximum": high}


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
    "bad_words": {"type": ["array", "null"], "items": _TEXT, "maxItems": 128},
    "allowed_token_ids": {
        "type": ["array", "null"],
        "items": {"type": "integer", "minimum": 0},
        "minItems": 1,
        "maxItems": 65_536,
    },
    "prompt_logprobs": _number(0, 20, "integer"),
    "truncate_prompt_tokens": _number(-1, 10_000_000, "integer"),
    "include_stop_str_in_output": _FLAG,
    "skip_special_tokens": _FLAG,
    "priority": _number(-(1 << 31), (1 << 31) - 1, "integer"),
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
                        "anyOf": [_TEXT, {"type": "array", "items": _OBJECT}, {"type": "null"}],
                    },
                },
            },
        },
        "max_completion_tokens": _number(1, 10_000_000, "integer"),
        "logprobs": _FLAG,
        "top_logprobs": _number(0, 20, "integer"),
        "tools": {"type": ["array", "null"], "maxItems": 256, "items": _OBJECT},
        "tool_choice": {"anyOf": [{"enum": ["none", "auto", "required"]}, _OBJECT, {"type": "null"}]},
    },
    "example": {"model": "llama", "messages": [{"role": "user", "content": "Hello"}], "max_tokens": 64},
}
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
        "best_of": _number(1, 128, "integer"),
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


_TEXT_OR_OBJECT: Schema = {
    "anyOf": [_TEXT, {"type": "object", "required": ["text"], "properties": {"text": _TEXT}}],
}
_TEXTS: Schema = {"type": "array", "items": _TEXT_OR_OBJECT, "minItems": 1, "maxItems": 2048}
_RERANK: Schema = {
    "type": "object",
    "required": ["model", "query", "documents"],
    "properties": {
        "model": _MODEL,
        "query": _TEXT_OR_OBJECT,
        "documents": _TEXTS,
        "top_n": _number(0, 1 << 31, "integer"),
        "return_documents": _FLAG,
    },
    "example": {"model": "reranker", "query": "What turns the mill?", "documents": ["The water.", "The moon."]},
}
_RERANKED: Schema = {
    "type": "object",
    "required": ["id", "model", "results", "usage"],
    "properties": {
        "id": _TEXT,
        "model": _TEXT,
        "results": {
            "type": "array",
            "items": {
                "type": "object",
                "required": ["index", "relevance_score"],
                "properties": {
                    "index": {"type": "integer"},
                    "relevance_score": {"type": "number"},
                    "document": _OBJECT,
                },
            },
        },
        "usage": _OBJECT,
    },
}
_SCORED_TEXTS: Schema = {"anyOf": [_TEXT_OR_OBJECT, _TEXTS]}
_SCORE: Schema = {
    "type": "object",
    "required": ["model"],
    "properties": {
        "model": _MODEL,
        "text_1": _SCORED_TEXTS,
        "text_2": _SCORED_TEXTS,
        "queries": _SCORED_TEXTS,
        "documents": _SCORED_TEXTS,
    },
    "example": {"model": "reranker", "text_1": "What turns the mill?", "text_2": ["The water.", "The moon."]},
}
_SCORED: Schema = {
    "type": "object",
    "required": ["id", "object", "model", "data", "usage"],
    "properties": {
        "id": _TEXT,
        "object": _TEXT,
        "model": _TEXT,
        "data": {
            "type": "array",
            "items": {
                "type": "object",
                "required": ["index", "score"],
                "properties": {"index": {"type": "integer"}, "score": {"type": "number"}},
            },
        },
        "usage": _OBJECT,
    },
}
_AUDIO: Schema = {
    "type": "object",
    "required": ["model", "file"],
    "properties": {
        "model": _MODEL,
        "file": {"type": "string", "format": "binary", "description": "WAV, MP3, FLAC, Ogg, M4A or WebM."},
        "prompt": _TEXT,
        "response_format": {"enum": ["json", "text", "srt", "verbose_json", "vtt"]},
        "temperature": {"type": "number", "minimum": 0, "maximum": 1},
        "language": {"type": "string", "description": "ISO 639-1 code; detected without it."},
        "timestamp_granularities[]": {"type": "array", "items": {"enum": ["segment"]}},
    },
}
_TRANSCRIPT: Schema = {"type": "object", "required": ["text"], "properties": {"text": _TEXT}}
_RESPONSE: Schema = {
    "type": "object",
    "required": ["model", "input"],
    "properties": {
        "model": _MODEL,
        "input": {
            "description": "A text, or a list of items: messages, tool calls, their outputs and reasoning.",
            "anyOf": [_TEXT, {"type": "array", "minItems": 1, "maxItems": 4096, "items": _OBJECT}],
        },
        "instructions": {"type": ["string", "null"]},
        "max_output_tokens": {"type": ["integer", "null"], "minimum": 1, "maximum": 10_000_000},
        "temperature": _number(0, 2),
        "top_p": _number(0, 1),
        "tools": {"type": ["array", "null"], "maxItems": 256, "items": _OBJECT},
        "text": {"type": ["object", "null"]},
        "reasoning": {"type": ["object", "null"]},
        "stream": _FLAG,
        "store": {**_FLAG, "description": "false: the response is not stored."},
        "previous_response_id": {
            "type": ["string", "null"],
            "description": "A stored response, whose conversation comes before the input.",
        },
        "background": {**_FLAG, "description": "true: answer at once, and compute the response later."},
    },
    "example": {"model": "llama", "input": "Hello"},
}
_COUNTED_MESSAGE: Schema = {
    "type": "object",
    "required": ["model", "messages"],
    "properties": {
        "model": _MODEL,
        "system": {"anyOf": [_TEXT, {"type": "array", "items": _OBJECT}, {"type": "null"}]},
        "messages": {
            "type": "array",
            "minItems": 1,
            "maxItems": 2048,
            "items": {
                "type": "object",
                "required": ["role", "content"],
                "properties": {
                    "role": {"enum": ["user", "assistant", "system"]},
                    "content": {
                        "description": "A text, or a list of content blocks.",
                        "anyOf": [_TEXT, {"type": "array", "items": _OBJECT}],
                    },
                },
            },
        },
        "tools": {"type": ["array", "null"], "maxItems": 256, "items": _OBJECT},
        "tool_choice": {
            "type": ["object", "null"],
            "required": ["type"],
            "properties": {"type": {"enum": ["auto", "any", "tool", "none"]}},
        },
        "thinking": {
            "type": ["object", "null"],
            "required": ["type"],
            "properties": {"type": {"enum": ["enabled", "adaptive", "between_tools", "disabled"]}},
        },
    },
    "example": {"model": "llama", "messages": [{"role": "user", "content": "Hello"}]},
}
_MESSAGE: Schema = {
    "type": "object",
    "required": ["model", "max_tokens", "messages"],
    "properties": {
        **_COUNTED_MESSAGE["properties"],
        "max_tokens": {"type": "integer", "minimum": 1, "maximum": 10_000_000},
        "stop_sequences": {"type": ["array", "null"], "items": _TEXT, "maxItems": 16},
        "temperature": _number(0, 2),
        "top_p": _number(0, 1),
        "top_k": _number(-1, 1 << 24, "integer"),
        "output_config": {
            "type": ["object", "null"],
            "properties": {"format": {"type": ["object", "null"], "required": ["type", "schema"]}},
        },
        "stream": _FLAG,
    },
    "example": {**_COUNTED_MESSAGE["example"], "max_tokens": 64},
}
_TOKEN_COUNT: Schema = {
    "type": "object",
    "required": ["input_tokens"],
    "properties": {"input_tokens": {"type": "integer"}},
}
_MESSAGE_ERROR: Schema = {
    "type": "object",
    "required": ["error"],
    "properties": {
        "type": {"enum": ["error"]},
        "error": {
            "anyOf": [
                {"type": "object", "required": ["type", "message"], "properties": {"type": _TEXT, "message": _TEXT}},
                {**_TEXT, "description": "An error before the request was read."},
            ]
        },
        "request_id": _TEXT,
    },
}
_TOKENIZE: Schema = {
    "type": "object",
    "properties": {
        "model": _MODEL,
        "prompt": _TEXT,
        "messages": _CHAT["properties"]["messages"],
        "add_special_tokens": _FLAG,
        "return_token_strs": _FLAG,
    },
    "anyOf": [{"required": ["prompt"]}, {"required": ["messages"]}],
    "example": {"model": "llama", "prompt": "Once upon a time"},
}
_TOKENIZED: Schema = {
    "type": "object",
    "required": ["count", "max_model_len", "tokens"],
    "properties": {
        "count": {"type": "integer"},
        "max_model_len": {"type": "integer"},
        "tokens": {"type": "array", "items": {"type": "integer"}},
        "token_strs": {"type": ["array", "null"], "items": _TEXT},
    },
}
_DETOKENIZE: Schema = {
    "type": "object",
    "required": ["tokens"],
    "properties": {"model": _MODEL, "tokens": {"type": "array", "items": {"type": "integer", "minimum": 0}}},
    "example": {"model": "llama", "tokens": [1, 2, 3]},
}
_DETOKENIZED: Schema = {"type": "object", "required": ["prompt"], "properties": {"prompt": _TEXT}}


_UNLOADED_ADAPTER: Schema = {
    "type": "object",
    "required": ["lora_name"],
    "properties": {
        "lora_name": {"type": "string", "minLength": 1, "maxLength": 255},
        "base_model_name": {"type": ["string", "null"], "description": "Needed if several models load adapters."},
    },
    "example": {"lora_name": "pirate"},
}
_LOADED_ADAPTER: Schema = {
    "type": "object",
    "required": ["lora_name", "lora_path"],
    "properties": {
        **_UNLOADED_ADAPTER["properties"],
        "lora_path": {
            "type": "string",
            "minLength": 1,
            "maxLength": 4096,
            "description": "A folder below the model's `adapters_folder`, or a repository that its `adapters_hub` allows.",
        },
        "load_inplace": {**_FLAG, "description": "Load an adapter again that has this name already."},
    },
    "example": {"lora_name": "pirate", "lora_path": "pirate-v2"},
}


def openai_table() -> OperationTable:
    """Return the operations by (method, path)."""
    listed = {"type": "object", "required": ["data"], "properties": {"data": {"type": "array", "items": _ONE_MODEL}}}
    return {
        ("POST", "/v1/chat/completions"): _generation("Create a chat completion", _CHAT),
        ("POST", "/v1/responses"): _generation("Create a response", _RESPONSE),
        ("POST", "/v1/responses/input_tokens"): _generation(
            "Count the input tokens of a response", _RESPONSE, streams=False
        ),
        ("GET", "/v1/responses/{id}"): _stored("Return a stored response"),
        ("DELETE", "/v1/responses/{id}"): _stored("Delete a stored response"),
        ("POST", "/v1/responses/{id}/cancel"): _stored("Cancel a background response"),
        ("GET", "/v1/responses/{id}/input_items"): _stored("List the input items of a stored response"),
        ("POST", "/v1/messages"): _messages("Create a message, as in Anthropic's API", _MESSAGE),
        ("POST", "/v1/messages/count_tokens"): _messages(
            "Count the input tokens of a message request", _COUNTED_MESSAGE, _TOKEN_COUNT
        ),
        ("POST", "/v1/completions"): _generation("Create a completion", _COMPLETION),
        ("POST", "/v1/embeddings"): _generation("Create embeddings", _EMBEDDING, streams=False),
        **{
            ("POST", path): _operation(
                "Sort documents by their relevance to a query",
                {"200": response_object("The documents, the most relevant first.", json_content(_RERANKED))},
                body={JSON: {"schema": _RERANK}},
            )
            for path in ("/v1/rerank", "/rerank", "/v2/rerank")
        },
        **{
            ("POST", path): _operation(
                "Score pairs of texts",
                {"200": response_object("The scores, in the order of the pairs.", json_content(_SCORED))},
                body={JSON: {"schema": _SCORE}},
            )
            for path in ("/v1/score", "/score")
        },
        ("POST", "/v1/load_lora_adapter"): _adapter("Load a LoRA adapter and give it a name", _LOADED_ADAPTER),
        ("POST", "/v1/unload_lora_adapter"): _adapter("Unload a LoRA adapter", _UNLOADED_ADAPTER),
        ("POST", "/v1/audio/transcriptions"): _audio("Transcribe speech"),
        ("POST", "/v1/audio/translations"): _audio("Translate speech into English"),
        ("POST", PREFILL_PATH): _operation(
            "Prefill the prompt of a chat or completions request for a decode server; for routers",
            {"200": response_object("A KV transfer token, or an empty string.", json_content(_TRANSFER_TOKEN))},
            body={JSON: {"schema": _OBJECT}},
        ),
        ("POST", CONTINUE_PATH): _operation(
            "Continue a stream that another server began; for routers",
            {"200": response_object("The rest of the stream.", {EVENTS: {"schema": {"description": "As the stream."}}})},
            body={JSON: {"schema": _OBJECT}},
        ),
        ("POST", "/tokenize"): _operation(
            "Count and list the tokens of a prompt or of messages",
            {"200": response_object("The tokens.", json_content(_TOKENIZED))},
            body={JSON: {"schema": _TOKENIZE}},
        ),
        ("POST", "/detokenize"): _operation(
            "Return the text of tokens",
            {"200": response_object("The text.", json_content(_DETOKENIZED))},
            body={JSON: {"schema": _DETOKENIZE}},
        ),
        ("GET", "/v1/models"): _operation(
            "List the models", {"200": response_object("Models of text.", json_content(listed))}
        ),
        ("GET", "/v1/models/{model}"): _operation(
            "Show a model", {"200": response_object("The model.", json_content(_ONE_MODEL))}
        ),
    }  # fmt: skip


def _generation(summary: str, schema: Schema, *, streams: bool = True) -> Operation:
    content: dict[str, Any] = json_content(_OBJECT)
    if streams:
        content[EVENTS] = {"schema": {"description": "With `stream`: chunks, then `[DONE]`."}}
    answers = {"200": response_object("OpenAI's response.", content)}
    return _operation(summary, answers, body={JSON: {"schema": schema}})


def _audio(summary: str) -> Operation:
    content = {**json_content(_TRANSCRIPT), "text/plain": {"schema": _TEXT}, "text/vtt": {"schema": _TEXT}}
    answers = {"200": response_object("The transcript, in the format that `response_format` names.", content)}
    return _operation(summary, answers, body={"multipart/form-data": {"schema": _AUDIO}})


def _stored(summary: str) -> Operation:
    return _operation(summary, {"200": response_object("OpenAI's response.", json_content(_OBJECT))})


def _messages(summary: str, schema: Schema, answer: Schema | None = None) -> Operation:
    content: dict[str, Any] = json_content(answer or _OBJECT)
    if answer is None:
        content[EVENTS] = {"schema": {"description": "With `stream`: events from message_start to message_stop."}}
    answers = {"200": response_object("Anthropic's response.", content)}
    return _operation(summary, answers, body={JSON: {"schema": schema}}, error=_MESSAGE_ERROR)


def _operation(
    summary: str,
    answers: dict[str, Schema],
    body: dict[str, Any] | None = None,
    error: Schema = _ERROR,
    parameters: Sequence[Schema] = (),
) -> Operation:
    statuses = {*OF_EVERY_ROUTE, *_FAILING, *(OF_EVERY_BODY if body else ())}
    errors = {
        str(status): response_object({**ERRORS, **_MORE_ERRORS}[status], json_content(error))
        for status in sorted(statuses)
    }
    return operation(OPENAI, summary, answers={**answers, **errors}, body=body, parameters=parameters)


_FILE: Schema = {
    "type": "object",
    "required": ["id", "object", "bytes", "created_at", "filename", "purpose"],
    "properties": {
        "id": _TEXT,
        "object": {"enum": ["file"]},
        "bytes": {"type": "integer"},
        "created_at": {"type": "integer"},
        "expires_at": {"type": ["integer", "null"]},
        "filename": _TEXT,
        "purpose": {"enum": ["batch", "batch_output"]},
        "status": {"enum": ["processed"]},
    },
}
_DELETED: Schema = {
    "type": "object",
    "required": ["id", "object", "deleted"],
    "properties": {"id": _TEXT, "object": {"enum": ["file"]}, "deleted": {"enum": [True]}},
}
_UPLOAD: Schema = {
    "type": "object",
    "required": ["file", "purpose"],
    "properties": {
        "file": {"type": "string", "contentMediaType": BINARY, "description": "The input of a batch."},
        "purpose": {"enum": ["batch"]},
        "expires_after[anchor]": {"enum": ["created_at"]},
        "expires_after[seconds]": {"type": "integer", "minimum": 3600, "maximum": 2_592_000},
    },
}
_NEW_BATCH: Schema = {
    "type": "object",
    "required": ["input_file_id", "endpoint", "completion_window"],
    "properties": {
        "input_file_id": _TEXT,
        "endpoint": {"enum": ["/v1/chat/completions", "/v1/completions", "/v1/embeddings", "/v1/responses"]},
        "completion_window": {"enum": ["24h"]},
        "metadata": {"type": ["object", "null"], "maxProperties": 16, "additionalProperties": _TEXT},
        "output_expires_after": {
            "type": ["object", "null"],
            "required": ["anchor", "seconds"],
            "properties": {
                "anchor": {"enum": ["created_at"]},
                "seconds": {"type": "integer", "minimum": 3600, "maximum": 2_592_000},
            },
        },
    },
    "example": {"input_file_id": "file-123", "endpoint": "/v1/chat/completions", "completion_window": "24h"},
}
_BATCH: Schema = {
    "type": "object",
    "required": ["id", "object", "endpoint", "input_file_id", "status", "created_at", "request_counts"],
    "properties": {
        "id": _TEXT,
        "object": {"enum": ["batch"]},
        "endpoint": _TEXT,
        "input_file_id": _TEXT,
        "output_file_id": {"type": ["string", "null"]},
        "error_file_id": {"type": ["string", "null"]},
        "status": {
            "enum": [
                "validating",
                "failed",
                "in_progress",
                "finalizing",
                "completed",
                "expired",
                "cancelling",
                "cancelled",
            ]
        },
        "created_at": {"type": "integer"},
        "request_counts": {
            "type": "object",
            "properties": {name: {"type": "integer"} for name in ("total", "completed", "failed")},
        },
    },
}


def _adapter(summary: str, schema: Schema) -> Schema:
    content = {"text/plain": {"schema": _TEXT}}
    return _operation(summary, {"200": response_object("What was done.", content)}, body=json_content(schema))


def batch_table() -> OperationTable:
    """Return the operations of files and batches by (method, path)."""
    page = [
        query("after", "The last id of the page before."),
        query("limit", "Length of the page.", {"type": "integer", "minimum": 1}),
        query("order", "By the time of creation.", {"enum": ["asc", "desc"]}),
    ]
    of_purpose = query("purpose", "Only files of this purpose.")
    form = {"multipart/form-data": {"schema": _UPLOAD}}
    content = {BINARY: {"schema": {"type": "string"}}}
    return {
        ("POST", "/v1/files"): _operation("Upload a file", _answer("The file.", _FILE), body=form),
        ("GET", "/v1/files"): _operation(
            "List files", _answer("A page of files.", _list_of(_FILE)), parameters=[*page, of_purpose]
        ),
        ("GET", "/v1/files/{file_id}"): _operation("Show a file", _answer("The file.", _FILE)),
        ("DELETE", "/v1/files/{file_id}"): _operation("Delete a file", _answer("It is deleted.", _DELETED)),
        ("GET", "/v1/files/{file_id}/content"): _operation(
            "Download a file", {"200": response_object("Its content.", content)}
        ),
        ("POST", "/v1/batches"): _operation(
            "Create a batch", _answer("The batch.", _BATCH), body=json_content(_NEW_BATCH)
        ),
        ("GET", "/v1/batches"): _operation(
            "List batches", _answer("A page of batches.", _list_of(_BATCH)), parameters=page
        ),
        ("GET", "/v1/batches/{batch_id}"): _operation("Show a batch", _answer("The batch.", _BATCH)),
        ("POST", "/v1/batches/{batch_id}/cancel"): _operation("Cancel a batch", _answer("The batch.", _BATCH)),
    }


def _answer(text: str, schema: Schema) -> dict[str, Schema]:
    return {"200": response_object(text, json_content(schema))}


def _list_of(schema: Schema) -> Schema:
    members = {
        "object": {"enum": ["list"]},
        "data": {"type": "array", "items": schema},
        "first_id": {"type": ["string", "null"]},
        "last_id": {"type": ["string", "null"]},
        "has_more": {"type": "boolean"},
    }
    return {"type": "object", "required": list(members), "properties": members}
