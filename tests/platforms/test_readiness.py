# SPDX-License-Identifier: Apache-2.0
"""Waiting for a service: the type of the error decides, and time is moved, not waited for."""

from __future__ import annotations

import asyncio
import http.server
import json
import socket
import threading
from collections.abc import Sequence
from typing import Any

import pytest

from headrace.core.errors import DeadlineExceeded, InvalidArgument
from headrace.core.telemetry.progress import ProgressEvent
from headrace.platforms.contract import PlatformStatus
from headrace.platforms.service_client import (
    READINESS_PATH,
    NeverReady,
    Response,
    WaitPolicy,
    get,
    parse_readiness,
    wait_ready,
)


class Clock:
    """Moved by pauses alone."""

    def __init__(self) -> None:
        self.now = 1000.0

    def monotonic(self) -> float:
        return self.now

    def time(self) -> float:
        return self.now

    def time_ns(self) -> int:
        return int(self.now * 1e9)

    def monotonic_ns(self) -> int:
        return int(self.now * 1e9)


def answer(status: int, kind: str = "", message: str = "") -> Response:
    return Response(status, {"error": {"type": kind, "message": message}} if kind else {})


def waited(
    answers: Sequence[Response | None], look: PlatformStatus | None = None, **bounds: float
) -> tuple[list[float], list[Any]]:
    """The pauses that were made, and what was told."""
    clock, pauses, events, left = Clock(), [], [], list(answers)

    async def ask(url: str, path: str, seconds: float) -> Response | None:
        assert (url, path, seconds) == ("http://x:1", READINESS_PATH, 5.0)
        return left.pop(0) if len(left) > 1 else left[0]

    async def pause(seconds: float) -> None:
        pauses.append(seconds)
        clock.now += seconds

    async def poll() -> PlatformStatus:
        return look or PlatformStatus("running")

    def on_progress(event: ProgressEvent) -> None:
        events.append((event.state, event.message))

    asyncio.run(
        wait_ready(
            "http://x:1",
            "job 1",
            poll,
            wait_policy=WaitPolicy(**bounds),
            progress=on_progress,
            get_response=ask,
            clock=clock,
            pause=pause,
        )
    )
    return pauses, events


@pytest.mark.parametrize("status", [202, 500, 503])
@pytest.mark.parametrize("kind", ["server_initializing", "model_loading", "model_not_ready", "something new", ""])
def test_a_service_that_may_become_ready_is_polled_again_at_any_code(status: int, kind: str) -> None:
    pauses, events = waited([None, answer(status, kind, "42 %"), answer(200)])
    assert len(pauses) == 2
    assert events[-1] == ("finished", "ready")
    assert ("running", "42 %" if kind else "not ready yet") in events


@pytest.mark.parametrize("status", [200 + 2, 503])
@pytest.mark.parametrize("kind", ["initialization_error", "model_load_error"])
def test_a_failed_service_is_not_polled_again_at_any_code(status: int, kind: str) -> None:
    with pytest.raises(NeverReady, match="no such file"):
        waited([answer(status, kind, "no such file")])


def test_pauses_grow_and_the_time_is_bounded() -> None:
    with pytest.raises(DeadlineExceeded, match=r"after 600 s \(loading the model\).*wait longer"):
        waited([answer(503, "model_loading")])
    pauses, _ = waited([None] * 30 + [answer(200)])
    assert pauses[0] == 0.1 and pauses == sorted(pauses) and pauses[-1] == 2.0


@pytest.mark.parametrize(
    ("observed", "words"),
    [
        (PlatformStatus("ended", reason="the process has ended with code 3"), "code 3"),
        (PlatformStatus("gone"), "does not know it"),
    ],
)
def test_one_that_does_not_run_any_more_is_not_waited_for(observed: PlatformStatus, words: str) -> None:
    with pytest.raises(NeverReady, match=words):
        waited([None], observed)


def test_answers_are_read_from_a_real_server_and_silence_is_none() -> None:
    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            body = json.dumps({"error": {"type": "model_loading", "message": self.path}}).encode()
            self.send_response(503)
            self.send_header("content-length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *arguments: object) -> None:
            pass

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, args=(0.01,))
    thread.start()
    try:
        reported = asyncio.run(get(f"http://127.0.0.1:{server.server_port}/base", READINESS_PATH, 60))
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
    assert reported is not None and parse_readiness(reported) == ("waiting", f"/base{READINESS_PATH}")
    with socket.socket() as nobody:  # bound, so that nobody else listens there either
        nobody.bind(("127.0.0.1", 0))
        assert asyncio.run(get(f"http://127.0.0.1:{nobody.getsockname()[1]}", READINESS_PATH, 60)) is None
    with pytest.raises(InvalidArgument):
        asyncio.run(get("file:///etc/passwd", READINESS_PATH, 5))
