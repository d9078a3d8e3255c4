# SPDX-License-Identifier: Apache-2.0
"""Chat requests to a real server that answers as it is told."""

from __future__ import annotations

import asyncio
import http.server
import json
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from headrace.core.errors import HeadraceError, ResourceExhausted, Unavailable
from headrace.platforms.service_client import (
    CHAT_PATH,
    ChatAnswer,
    NotReadyYet,
    RequestRefused,
    ServiceBroken,
    ServiceFailed,
    message_content,
    send_chat,
)
from support.waiting import eventually_async


@contextmanager
def answering(
    status: int, content: bytes, kind: str = "application/json", hang: bool = False
) -> Iterator[tuple[str, list[Any]]]:
    requests: list[Any] = []
    go_on = threading.Event()

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            requests.append((self.path, json.loads(self.rfile.read(int(self.headers["content-length"])))))
            if hang:
                go_on.wait()
                return
            self.send_response(status)
            self.send_header("content-type", kind)
            self.send_header("retry-after", "7")
            self.end_headers()
            self.wfile.write(content)

        def log_message(self, *arguments: object) -> None:
            pass

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, args=(0.01,))
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}", requests
    finally:
        go_on.set()
        server.shutdown()
        thread.join()
        server.server_close()


def asked_for(status: int, body: Any, *, raw: bytes | None = None) -> ChatAnswer:
    with answering(status, json.dumps(body).encode() if raw is None else raw) as (url, _):
        return asyncio.run(send_chat(url, {"messages": []}, "service 1"))


def test_an_answer_is_its_text_and_its_body() -> None:
    body = {"choices": [{"message": {"role": "assistant", "content": "three mugs"}}], "model": "m"}
    hostile = {"messages": [{"role": "user", "content": "'; $(touch x) \" \n \u00e9"}]}
    with answering(200, json.dumps(body).encode()) as (url, asked):
        result = asyncio.run(send_chat(url, hostile, "service 1"))
    assert (result.text, result.body, result.streamed) == ("three mugs", body, False)
    assert asked == [(CHAT_PATH, hostile)]
    assert message_content({"choices": []}) == "" == message_content({"choices": [{"message": None}]})


def error(kind: str, message: str = "why") -> dict[str, Any]:
    return {"error": {"type": kind, "message": message}}


@pytest.mark.parametrize(
    ("status", "body", "kind", "words"),
    [
        (202, error("server_initializing"), NotReadyYet, "is still initialising: why"),
        (202, error("model_loading"), NotReadyYet, "is still loading its model: why"),
        (503, error("model_not_ready"), NotReadyYet, "is not ready yet: why"),
        (503, error("initialization_error"), ServiceBroken, "initialisation failed: why"),
        (503, error("model_load_error"), ServiceBroken, "could not be loaded: why"),
        (503, {}, NotReadyYet, "cannot answer now"),
        (400, error("invalid_request", "no media"), RequestRefused, "no media"),
        (404, {}, RequestRefused, "status 404"),
        (429, error("too_many_requests"), ResourceExhausted, "overloaded"),
        (500, error("internal_error"), ServiceFailed, "its log says more"),
        (500, {"error": "plain words"}, ServiceFailed, "plain words"),
    ],
)
def test_every_other_answer_is_a_sentence(status: int, body: Any, kind: type[HeadraceError], words: str) -> None:
    with pytest.raises(kind, match=words) as caught:
        asked_for(status, body)
    assert caught.value.status == status
    if status == 202:
        assert caught.value.retry_after_seconds == 7


def test_text_that_is_not_json_is_reported_too() -> None:
    with pytest.raises(ServiceFailed, match="<html>"):
        asked_for(502, None, raw=b"<html>")


def test_a_stream_is_passed_on_piece_by_piece() -> None:
    events = [{"choices": [{"delta": {"content": item}}]} for item in ("three", " mugs")]
    raw = (
        b": hello\n\n"
        + b"".join(b"data: %s\n\n" % json.dumps(event).encode() for event in events)
        + b"data: [DONE]\n\n"
    )
    pieces: list[str] = []
    with answering(200, raw, "text/event-stream; charset=utf-8") as (url, asked):
        result = asyncio.run(send_chat(url, {"stream": True}, "service 1", on_piece=pieces.append))
    assert (result.text, result.streamed, pieces) == ("three mugs", True, ["three", " mugs"])
    assert asked[0][1] == {"stream": True}


def test_a_stream_that_breaks_is_an_error() -> None:
    raw = b"data: %s\n\n" % json.dumps(error("internal_error", "out of memory")).encode()
    with answering(200, raw, "text/event-stream") as (url, _), pytest.raises(ServiceFailed, match="out of memory"):
        asyncio.run(send_chat(url, {"stream": True}, "service 1"))


def test_unreachable_services_and_timeouts() -> None:
    with answering(200, b"{}", hang=True) as (url, _), pytest.raises(Unavailable, match="within 0.2 s"):
        asyncio.run(send_chat(url, {}, "service 1", seconds=0.2))
    with socket.socket() as nobody:  # bound, so that nobody else listens there either
        nobody.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{nobody.getsockname()[1]}"
        with pytest.raises(Unavailable, match="does not answer"):
            asyncio.run(send_chat(url, {}, "service 1"))


def test_a_cancelled_caller_does_not_wait_for_the_answer() -> None:
    async def main(url: str, asked: list[Any]) -> None:
        task = asyncio.create_task(send_chat(url, {}, "service 1"))
        await eventually_async(lambda: asked)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    with answering(200, b"{}", hang=True) as (url, asked):
        asyncio.run(main(url, asked))  # it would wait for the thread, which ends because its connection is cut
