# SPDX-License-Identifier: Apache-2.0
"""What an engine answers, in our words: outputs, parameters, errors. Called by `instance`; reads no sockets.

A chunk or an answer becomes `text_output` with the text of each of its choices, and parameters as `core.generation` has
them; who reads OpenAI's JSON finds it, as it came, in the parameter `openai`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import orjson

from headrace.backends.openai_proxy.client import Fields
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
from headrace.core.generation import TEXT_OUTPUT
from headrace.core.messages import ParameterValue
from headrace.core.tensors import Tensor

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
_MOST_CHARACTERS = 2000
_LONGEST_RETRY_SECONDS = 3600


class Answer:
    """One chunk, or a whole answer."""

    __slots__ = ("finished", "outputs", "parameters")

    def __init__(self, data: bytes, *, passed_on: bool) -> None:
        document = _document(data)
        parameters: dict[str, ParameterValue] = {"openai": data.decode()} if passed_on else {}
        texts: list[bytes] = []
        self.finished = False
        """Whether a choice has come to its end."""
        choices = document.get("choices")
        for choice in choices if isinstance(choices, list) else ():
            if not isinstance(choice, dict):
                continue
            texts.append(_text_of(choice).encode(errors="replace"))
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


def error_in(data: bytes) -> HeadraceError | None:
    """The error that an event tells, if it is one: engines send them in the middle of a stream, too."""
    if b'"error"' not in data:
        return None
    document = _document(data)
    # Both forms are in use: {"error": {...}} and {"object": "error", ...}.
    if "choices" in document or not (document.get("error") or document.get("object") == "error"):
        return None
    inner = document.get("error")
    code = (inner if isinstance(inner, dict) else document).get("code")
    return refusal(code if isinstance(code, int) and 400 <= code < 600 else 500, {}, data)


def refusal(status: int, fields: Fields, body: bytes) -> HeadraceError:
    """An answer with a status other than 200, as an error of ours with the engine's own words."""
    if status in (401, 403):
        return Unavailable(
            "the engine does not accept the key that this server sends: its operator should check the parameter api_key_env"
        )
    text = _message(body) or f"the engine answered with status {status}"
    kind = _ERRORS.get(status, InvalidArgument if 400 <= status < 500 else Internal)
    return kind(text, retry_after_seconds=_retry_after(fields))


def _document(data: bytes) -> dict[str, Any]:
    try:
        document = orjson.loads(data)
    except ValueError:
        document = None
    if not isinstance(document, dict):
        raise Unavailable("the engine sent an answer that is not a JSON object")
    return document


def _text_of(choice: Mapping[str, Any]) -> str:
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


def _message(body: bytes) -> str:
    try:
        document = orjson.loads(body)
    except ValueError:
        return ""
    if not isinstance(document, dict):
        return ""
    inner = document.get("error")
    found = (
        inner.get("message") if isinstance(inner, dict) else inner or document.get("message") or document.get("detail")
    )
    if not isinstance(found, str):
        # FastAPI's own: a list of what is wrong.
        found = orjson.dumps(found).decode() if found else ""
    return "".join(letter if letter.isprintable() else " " for letter in found[:_MOST_CHARACTERS]).strip()


def _retry_after(fields: Fields) -> float | None:
    text = fields.get(b"retry-after", b"").strip()
    return float(min(int(text), _LONGEST_RETRY_SECONDS)) if text.isdigit() and len(text) < 10 else None
