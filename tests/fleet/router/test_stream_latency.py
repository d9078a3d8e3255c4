# SPDX-License-Identifier: Apache-2.0
"""The latency of streams as a router counts it, for autoscalers with latency targets."""

from __future__ import annotations

import asyncio
import json
import socket
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from routing import Answer, Routing, ScriptedBackend, ask, routing, scripted_backend

from headrace.cli.router_settings import router_settings
from headrace.fleet.autoscaling.latency_counts import parse_counts
from headrace.fleet.router.stream_latency import StreamLatency, StreamTimer
from support.virtual_time import run_virtual
from support.waiting import eventually

EVENT = b'data: {"text":"a"}\n\n'
HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
STREAM = b'{"stream":true,"prompt":"x"}'


def chunk(data: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(data), data)


def streaming(*pieces: bytes, end: bool = True) -> Callable[[socket.socket, ScriptedBackend], None]:
    def script(sock: socket.socket, backend: ScriptedBackend) -> None:
        while backend.read_request(sock):
            sock.sendall(HEAD)
            for piece in pieces:
                time.sleep(0.01)  # tokens that come at once have no time between them
                sock.sendall(chunk(piece))
            if end:
                sock.sendall(b"0\r\n\r\n")

    return script


def completed(router: Routing, body: bytes = STREAM) -> Answer:
    return ask(router.port, "POST", "/v1/completions", body, {"content-type": "application/json"})


def streams(router: Routing) -> dict[str, Any]:
    status = json.loads(ask(router.port, "GET", "/router/status").body)
    reported: dict[str, Any] = status.get("streams", {})
    return reported


def total(reported: dict[str, Any], name: str) -> int:
    return parse_counts(reported[name]["counts"], reported[name]["seconds"]).total


def test_tokens_are_timed_from_the_request_on_and_every_second() -> None:
    async def scenario() -> None:
        latency = StreamLatency()
        timer = StreamTimer(latency)
        await asyncio.sleep(0.5)
        timer.piece(EVENT)
        assert (latency.first.sum, latency.generating) == (pytest.approx(0.5), 1)
        for _ in range(25):
            await asyncio.sleep(0.1)
            timer.piece(EVENT)
        assert sum(latency.next.counts) == 2, "a long stream is counted before it ends"
        timer.ended()
        timer.ended()
        assert (sum(latency.next.counts), latency.generating) == (3, 0)
        assert latency.next.sum == pytest.approx(0.3)
        # Another backend continues the stream.
        timer.piece(EVENT)
        assert (sum(latency.first.counts), latency.generating) == (1, 1)

    run_virtual(scenario())


def test_a_start_from_zero_replicas_is_not_counted() -> None:
    async def scenario() -> None:
        latency = StreamLatency()
        timer = StreamTimer(latency)
        timer.held = True
        await asyncio.sleep(60)
        timer.restart()
        await asyncio.sleep(0.25)
        timer.piece(EVENT)
        assert latency.first.sum == pytest.approx(0.25)

    run_virtual(scenario())


@pytest.mark.parametrize("policy", ["p2c", "predicted_latency"])
def test_streams_through_a_router(policy: str) -> None:
    with scripted_backend(streaming(EVENT, EVENT * 3)) as backend:
        with routing(backend.port, policy=policy, measure_streams=True) as router:
            assert completed(router).body == EVENT * 4
            assert completed(router, b'{"stream":true,"prompt":"%b"}' % (b"x" * 100_000)).body == EVENT * 4
            reported = streams(router)
            assert (reported["requests"], reported["generating"]) == (2, 0)
            assert total(reported, "first_token") == 2
            # A response that comes in one piece has no time between its tokens.
            assert 1 <= total(reported, "token") <= 2
            page = ask(router.port, "GET", "/router/metrics").body
            assert b"headrace_router_first_token_seconds_count 2" in page
            assert b"headrace_router_token_seconds_count" in page


def test_a_client_that_leaves_ends_its_stream() -> None:
    with scripted_backend(streaming(EVENT, end=False)) as backend:
        with routing(backend.port, measure_streams=True) as router:
            with socket.create_connection(("127.0.0.1", router.port)) as leaving:
                head = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: %d\r\n\r\n" % len(STREAM)
                leaving.sendall(head + STREAM)
                eventually(lambda: streams(router)["generating"] == 1)
            eventually(lambda: streams(router)["generating"] == 0)


def test_other_responses_are_not_timed() -> None:
    def script(sock: socket.socket, backend: ScriptedBackend) -> None:
        while backend.read_request(sock):
            sock.sendall(b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: 6\r\n\r\n{}\n\n{}")

    with scripted_backend(script) as backend, routing(backend.port, measure_streams=True) as router:
        assert completed(router, b'{"prompt":"x"}').body == b"{}\n\n{}"
        assert ask(router.port, "GET", "/v1/models").status == 200
        reported = streams(router)
        assert (reported["requests"], total(reported, "first_token")) == (1, 0)


def test_it_is_off_until_the_settings_say_so(tmp_path: Path) -> None:
    with scripted_backend(streaming(EVENT)) as backend, routing(backend.port) as router:
        assert completed(router).status == 200
        assert streams(router) == {}
        assert b"first_token" not in ask(router.port, "GET", "/router/metrics").body
        settings = router.proxy.settings
        router.server.call(router.proxy.update_settings, replace(settings, measure_streams=True))
        assert completed(router).status == 200
        assert streams(router)["requests"] == 1
        router.server.call(router.proxy.update_settings, settings)
        assert completed(router).status == 200
        assert streams(router)["requests"] == 1, "what was counted stays"
    config = tmp_path / "router.yaml"
    config.write_text("backends: [http://a:1]\nmeasure_streams: true\n")
    assert router_settings({}, str(config)).router.measure_streams
