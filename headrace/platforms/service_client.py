# SPDX-License-Identifier: Apache-2.0
"""The client of a service: polls its readiness and sends chat requests. The launcher uses it.

Readiness is decided by the type of the error, not by the status code: services differ in the codes that they return while
they load. An answer that is not a completion becomes one of four errors, so that a caller knows whether to wait, to correct
the request, or to read the log.
"""

from __future__ import annotations

import asyncio
import http.client
import json
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from headrace.core.clock import Clock, SystemClock
from headrace.core.errors import (
    DeadlineExceeded,
    FailedPrecondition,
    HeadraceError,
    Internal,
    InvalidArgument,
    ResourceExhausted,
    Unavailable,
)
from headrace.core.limits import MIB
from headrace.core.telemetry.progress import Progress, Reporter, silent
from headrace.net.http_client import HttpCall, HttpResponse, error_text, read, run_in_thread
from headrace.platforms.contract import PlatformStatus

READINESS_PATH = "/api/v1/health/readiness"
FATAL_ERRORS = {
    "initialization_error": "its initialisation failed",
    "model_load_error": "its model could not be loaded",
}
"""Error types after which a service will never be ready."""
_MESSAGES = {
    "server_initializing": "initialising",
    "model_loading": "loading the model",
    "model_not_ready": "not ready yet",
}
_STATUS_SECONDS = 2.0
"""Between two queries of the platform, which may be a program over ssh."""


@dataclass(frozen=True, slots=True)
class Response:
    """The response of a service."""

    status: int
    body: Mapping[str, Any]
    """The JSON object; {} if it is none."""
    text: str = ""
    """The body, if it is no JSON object."""
    headers: Mapping[str, str] = field(default_factory=dict)
    """By name in lower case."""

    @property
    def error_type(self) -> str:
        """`error.type`; "" if there is none."""
        error = self.body.get("error")
        return str(error.get("type") or "") if isinstance(error, Mapping) else ""

    @property
    def message(self) -> str:
        """The error message, wherever it is; "" if there is none."""
        error = self.body.get("error")
        detail = error.get("message") if isinstance(error, Mapping) else error
        return str(detail or self.body.get("message") or self.text[:500])[:2000]


Readiness = Literal["ready", "waiting", "failed"]
Get = Callable[[str, str, float], Awaitable[Response | None]]
Poll = Callable[[], Awaitable[PlatformStatus]]


@dataclass(frozen=True, slots=True)
class WaitPolicy:
    """How often and how long to poll."""

    total_seconds: float = 600.0
    try_seconds: float = 5.0
    first_seconds: float = 0.1
    """The first pause; each further one is half as long again, ..."""
    longest_seconds: float = 2.0
    """... up to this. TAO's own scripts wait for 10 s each time; a poll costs next to nothing."""


class NeverReady(FailedPrecondition):
    """A service has failed for good; its log has more."""


async def get(url: str, path: str, seconds: float, headers: Mapping[str, str] | None = None) -> Response | None:
    """Send a GET; return None if there is no answer."""
    call = HttpCall(url, seconds, headers)
    try:
        return await run_in_thread(call, lambda: _parse(read(call.send("GET", path), MIB)))
    except OSError:
        return None


def _parse(response: HttpResponse) -> Response:
    document = response.json()
    if isinstance(document, dict):
        return Response(response.status, document, "", response.headers)
    return Response(response.status, {}, response.content.decode(errors="replace"), response.headers)


def parse_readiness(response: Response | None) -> tuple[Readiness, str]:
    """Return the state that an answer indicates, and a message. None: the service does not answer yet."""
    if response is None:
        return "waiting", "waiting for the service to answer"
    if response.status == 200:
        return "ready", ""
    kind = response.error_type
    if kind in FATAL_ERRORS:
        return "failed", f"{FATAL_ERRORS[kind]}: {response.message}" if response.message else FATAL_ERRORS[kind]
    return "waiting", response.message or _MESSAGES.get(kind, "not ready yet")


async def wait_ready(
    url: str,
    name: str,
    poll: Poll | None = None,
    *,
    wait_policy: WaitPolicy | None = None,
    progress: Progress = silent,
    get_response: Get = get,
    clock: Clock | None = None,
    pause: Callable[[float], Awaitable[None]] = asyncio.sleep,
) -> None:
    """Wait until it is ready. `name` is for messages; `poll` returns the status of the platform.

    Raises NeverReady when it has failed or does not run any more, DeadlineExceeded when the time is over.
    """
    policy = wait_policy or WaitPolicy()
    clock = clock or SystemClock()
    began = clock.monotonic()
    polled = began
    wait = policy.first_seconds
    with Reporter(progress, clock, name, unit="seconds") as reporter:
        while True:
            step, message = parse_readiness(await get_response(url, READINESS_PATH, policy.try_seconds))
            now = clock.monotonic()
            if step == "ready":
                reporter.finish("ready")
                return
            if step == "failed":
                raise NeverReady(f"{name} will not be ready: {message}")
            if poll is not None and (now - polled >= _STATUS_SECONDS or wait == policy.first_seconds):
                polled = now
                _check_running(await poll(), name)
            seconds_left = began + policy.total_seconds - now
            if seconds_left <= 0:
                raise DeadlineExceeded(
                    f"{name} is not ready after {policy.total_seconds:g} s ({message}); it keeps running: "
                    "check its log, or wait longer"
                )
            reporter.update(done=now - began, message=message)
            await pause(min(wait, seconds_left))
            wait = min(wait * 1.5, policy.longest_seconds)


def _check_running(status: PlatformStatus, name: str) -> None:
    if status.phase in ("ended", "gone"):
        reason = status.reason or ("the platform does not know it any more" if status.phase == "gone" else "it ended")
        raise NeverReady(f"{name} does not run any more: {reason}")


CHAT_PATH = "/v1/chat/completions"
CHAT_SECONDS = 3600.0
"""Videos take their time; TAO's clients wait at least 300 s."""
_MAX_BYTES = 1 << 30
"""A video is base64 in one JSON response, or in one event."""

OnPiece = Callable[[str], None]


class NotReadyYet(Unavailable):
    """A service initialises or loads: the same request may succeed later."""


class ServiceBroken(FailedPrecondition):
    """A service has failed to initialise or to load, and will never answer."""


class RequestRefused(InvalidArgument):
    """A service rejects the request."""


class ServiceFailed(Internal):
    """A service failed while it answered."""


@dataclass(frozen=True, slots=True)
class ChatAnswer:
    """A completion."""

    text: str
    """The content of the assistant's message: text, or a video as a data: URL."""
    body: Mapping[str, Any]
    """The whole response; of a stream the last event."""
    streamed: bool = False


async def send_chat(
    url: str,
    body: Mapping[str, Any],
    name: str,
    *,
    seconds: float = CHAT_SECONDS,
    on_piece: OnPiece | None = None,
    headers: Mapping[str, str] | None = None,
) -> ChatAnswer:
    """Send a chat request. With `"stream": true` in the body `on_piece` gets the pieces as they come, on the event loop.

    `name`: the service, for messages. Raises NotReadyYet, ServiceBroken, RequestRefused, ServiceFailed, or Unavailable if it
    does not answer.
    """
    raw = json.dumps(body, ensure_ascii=False).encode("utf-8", "surrogatepass")
    loop = asyncio.get_running_loop()
    call = HttpCall(url, seconds, headers)

    def report(text: str) -> None:
        if on_piece is not None:
            loop.call_soon_threadsafe(on_piece, text)

    def work() -> ChatAnswer:
        incoming = call.send("POST", CHAT_PATH, raw)
        if incoming.status == 200 and incoming.headers.get_content_type() == "text/event-stream":
            return _streamed(incoming, report)
        response = _parse(read(incoming, _MAX_BYTES))
        if response.status != 200:
            raise response_error(response, name)
        return ChatAnswer(message_content(response.body), response.body)

    try:
        return await run_in_thread(call, work)
    except TimeoutError:
        raise Unavailable(
            f"{name} did not answer within {seconds:g} s; it may still be computing: check its log"
        ) from None
    except OSError as error:
        raise Unavailable(f"{name} does not answer at {url} ({error_text(error)}): check whether it runs") from None


def response_error(response: Response, name: str) -> HeadraceError:
    """Return the error for a response that is not a completion."""
    kind, message = response.error_type, response.message
    detail = f": {message}" if message else ""
    error: HeadraceError
    if kind in FATAL_ERRORS:
        error = ServiceBroken(
            f"{name} cannot answer, {FATAL_ERRORS[kind]}{detail}; its log says more, and it must be started again"
        )
    elif response.status == 202 or kind in ("server_initializing", "model_loading", "model_not_ready"):
        state = {"server_initializing": "is still initialising", "model_loading": "is still loading its model"}
        seconds = _seconds(response.headers.get("retry-after", ""))
        error = NotReadyYet(
            f"{name} {state.get(kind, 'is not ready yet')}{detail}; try again later", retry_after_seconds=seconds
        )
    elif response.status == 429:
        seconds = _seconds(response.headers.get("retry-after", ""))
        error = ResourceExhausted(f"{name} is overloaded{detail}; try again later", retry_after_seconds=seconds)
    elif response.status == 503:
        error = NotReadyYet(f"{name} cannot answer now{detail}; try again later")
    elif 400 <= response.status < 500:
        error = RequestRefused(f"{name} refuses the request (status {response.status}){detail}")
    else:
        error = ServiceFailed(f"{name} failed while it answered (status {response.status}){detail}; its log says more")
    error.status = response.status
    return error


def message_content(body: Mapping[str, Any], key: str = "message") -> str:
    """Return `choices[0].message.content`; "" if there is none."""
    choices = body.get("choices")
    first = choices[0] if isinstance(choices, list) and choices else None
    message = first.get(key) if isinstance(first, Mapping) else None
    content = message.get("content") if isinstance(message, Mapping) else None
    return content if isinstance(content, str) else ""


def _streamed(response: http.client.HTTPResponse, report: OnPiece) -> ChatAnswer:
    pieces: list[str] = []
    last: Mapping[str, Any] = {}
    while line := response.readline(_MAX_BYTES):
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
            raise response_error(Response(500, event), "the service")
        last = event
        piece = message_content(event, "delta")
        if piece:
            pieces.append(piece)
            report(piece)
    return ChatAnswer("".join(pieces), last, True)


def _seconds(text: str) -> float | None:
    return float(text) if text.isascii() and text.isdigit() else None
