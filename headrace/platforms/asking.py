# SPDX-License-Identifier: Apache-2.0
"""Sends a chat request to a service: POST {url}/v1/chat/completions. Called by `launcher`; `chat_bodies` makes the body.

What a service answers instead of a completion becomes one of four errors, by its status and the type of its error, so that
a caller knows whether to wait, to correct the request, or to look at the log.
"""

from __future__ import annotations

import asyncio
import http.client
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from headrace.core.errors import (
    FailedPrecondition,
    HeadraceError,
    Internal,
    InvalidArgument,
    ResourceExhausted,
    Unavailable,
)
from headrace.platforms.http_asking import Call, Told, in_thread, told_of
from headrace.platforms.readiness import HOPELESS

PATH = "/v1/chat/completions"
SECONDS = 3600.0
"""Videos take their time; the least that TAO's clients are told to wait is 300 s."""
_MOST_LINE = 1 << 30

OnPiece = Callable[[str], None]


class NotReadyYet(Unavailable):
    """Raise when a service initialises or loads: the same request may succeed later."""


class ServiceBroken(FailedPrecondition):
    """Raise when a service has failed to initialise or to load, and will never answer."""


class RequestRefused(InvalidArgument):
    """Raise when a service finds the request wrong."""


class ServiceFailed(Internal):
    """Raise when something went wrong inside a service."""


@dataclass(frozen=True, slots=True)
class Answer:
    """A completion."""

    text: str
    """What the assistant says: words, or a video as a data: URL."""
    body: Mapping[str, Any]
    """All of it; of a streamed one the last event that says something of the whole."""
    streamed: bool = False


async def ask(
    url: str,
    body: Mapping[str, Any],
    name: str,
    *,
    seconds: float = SECONDS,
    on_piece: OnPiece | None = None,
    headers: Mapping[str, str] | None = None,
) -> Answer:
    """The answer. With `"stream": true` in the body its pieces go to `on_piece` as they come, on the event loop.

    `name` is the service for people. Raises NotReadyYet, ServiceBroken, RequestRefused, ServiceFailed, or Unavailable
    where nobody answers.
    """
    raw = json.dumps(body, ensure_ascii=False).encode("utf-8", "surrogatepass")
    loop = asyncio.get_running_loop()
    call = Call(url, seconds, headers)

    def tell(text: str) -> None:
        if on_piece is not None:
            loop.call_soon_threadsafe(on_piece, text)

    def work() -> Answer:
        response = call.send("POST", PATH, raw)
        if response.status == 200 and response.headers.get_content_type() == "text/event-stream":
            return _streamed(response, tell)
        told = told_of(response)
        if told.status != 200:
            raise error_of(told, name)
        return Answer(content_of(told.body), told.body)

    try:
        return await in_thread(call, work)
    except TimeoutError:
        raise Unavailable(
            f"{name} did not answer within {seconds:g} s; it may still be computing: look at its log"
        ) from None
    except (OSError, http.client.HTTPException) as error:
        reason = getattr(error, "strerror", None) or type(error).__name__
        raise Unavailable(f"{name} does not answer at {url} ({reason}): see whether it runs") from None


def error_of(told: Told, name: str) -> HeadraceError:
    """An answer that is no completion, as an error with a sentence."""
    kind, words = told.error_type, told.message
    why = f": {words}" if words else ""
    made: HeadraceError
    if kind in HOPELESS:
        made = ServiceBroken(
            f"{name} cannot answer, {HOPELESS[kind]}{why}; its log says more, and it must be started again"
        )
    elif told.status == 202 or kind in ("server_initializing", "model_loading", "model_not_ready"):
        state = {"server_initializing": "is still initialising", "model_loading": "is still loading its model"}
        seconds = _seconds(told.headers.get("retry-after", ""))
        made = NotReadyYet(
            f"{name} {state.get(kind, 'is not ready yet')}{why}; ask again later", retry_after_seconds=seconds
        )
    elif told.status == 429:
        seconds = _seconds(told.headers.get("retry-after", ""))
        made = ResourceExhausted(f"{name} has too much to do{why}; ask again later", retry_after_seconds=seconds)
    elif told.status == 503:
        made = NotReadyYet(f"{name} cannot answer now{why}; ask again later")
    elif 400 <= told.status < 500:
        made = RequestRefused(f"{name} refuses the request (status {told.status}){why}")
    else:
        made = ServiceFailed(f"{name} failed while it answered (status {told.status}){why}; its log says more")
    made.status = told.status
    return made


def content_of(body: Mapping[str, Any], key: str = "message") -> str:
    """`choices[0].message.content`; "" where it is not there."""
    choices = body.get("choices")
    first = choices[0] if isinstance(choices, list) and choices else None
    message = first.get(key) if isinstance(first, Mapping) else None
    content = message.get("content") if isinstance(message, Mapping) else None
    return content if isinstance(content, str) else ""


def _streamed(response: http.client.HTTPResponse, tell: OnPiece) -> Answer:
    pieces: list[str] = []
    last: Mapping[str, Any] = {}
    while line := response.readline(_MOST_LINE):
        if not line.startswith(b"data:"):
            continue
        data = line[5:].strip()
        if data == b"[DONE]":
            break
        try:
            event = json.loads(data)
        except ValueError:
            continue
        if not isinstance(event, dict):
            continue
        if "error" in event:
            raise error_of(Told(500, event), "the service")
        last = event
        piece = content_of(event, "delta")
        if piece:
            pieces.append(piece)
            tell(piece)
    return Answer("".join(pieces), last, True)


def _seconds(text: str) -> float | None:
    return float(text) if text.isascii() and text.isdigit() else None
