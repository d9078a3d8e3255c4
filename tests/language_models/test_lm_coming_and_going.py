# SPDX-License-Identifier: Apache-2.0
"""Models that come while others come, go while they are asked, and a server that ends while it streams."""

from __future__ import annotations

import http.client
import json
import signal
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from support.llm_models import tiny_llama
from lm_served import LOAD, UNLOAD, Server, configure, headrace_serve, third_parties

CACHE = 192 << 20
"""Bytes that are seen to come and to go."""


class Stream:
    """One stream of events, read in a thread of its own."""

    def __init__(self, server: Server, model: str, tokens: int, number: int = 0) -> None:
        self._connection = http.client.HTTPConnection("127.0.0.1", server.ports[0], timeout=240)
        self._body = json.dumps(
            {"model": model, "prompt": f"{number} the river", "max_tokens": tokens, "ignore_eos": True, "stream": True}
            | {"stream_options": {"include_usage": True}}
        )
        self.began = threading.Event()
        self.events: list[Any] = []
        self.done = False
        self._thread = threading.Thread(target=self._read, daemon=True)
        self._thread.start()

    def _read(self) -> None:
        try:
            self._connection.request("POST", "/v1/completions", self._body)
            response, rest = self._connection.getresponse(), b""
            while piece := response.read1(65536):
                *lines, rest = (rest + piece).split(b"\n")
                self.events += [json.loads(line[6:]) for line in lines if line.startswith(b"data: {")]
                self.done = self.done or b"data: [DONE]" in lines
                if self.events:
                    self.began.set()
        finally:
            self.began.set()
            self._connection.close()

    def ended(self) -> Stream:
        self._thread.join(240)
        assert not self._thread.is_alive()
        return self

    @property
    def tokens(self) -> int:
        """Of a stream that came to its end."""
        return int(self.events[-1]["usage"]["completion_tokens"])


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp("coming_and_going")
    with third_parties():
        for name in ("first", "second"):
            tiny_llama(folder / "models" / name / "1", max_position_embeddings=1 << 17)
    configure(folder / "models" / "first", kv_cache_bytes=str(CACHE))
    configure(folder / "models" / "second", kv_cache_bytes=str(64 << 20))
    with headrace_serve(folder / "log", folder / "models", "--model-control-mode", "explicit") as running:
        yield running


def begun(server: Server, model: str, count: int, tokens: int) -> list[Stream]:
    streams = [Stream(server, model, tokens, number) for number in range(count)]
    for stream in streams:
        assert stream.began.wait(240)
        assert stream.events
    return streams


def test_two_models_are_loaded_at_the_same_time(server: Server) -> None:
    with ThreadPoolExecutor(2) as threads:
        loads = [threads.submit(server.post, LOAD.format(name), {}) for name in ("first", "second")]
        assert [load.result()[0] for load in loads] == [200, 200]
    asked = {"prompt": "the river", "max_tokens": 8, "temperature": 0}
    answers = [server.post("/v1/completions", {"model": name, **asked}) for name in ("first", "second")]
    assert [status for status, _ in answers] == [200, 200]
    assert answers[0][1]["choices"][0]["text"] == answers[1][1]["choices"][0]["text"] != ""


def test_a_model_that_is_unloaded_while_it_streams(server: Server) -> None:
    before = server.memory
    streams = begun(server, "first", 4, 200)
    status, _ = server.post(UNLOAD.format("first"), {})
    assert status == 200
    status, told = server.post("/v1/completions", {"model": "first", "prompt": "x"})
    assert (status, told["error"]["param"]) == (404, "model"), told
    for stream in streams:
        assert stream.ended().done
        assert stream.tokens == 200
    server.wait_until(lambda: server.memory < before - CACHE * 0.9)
    server.wait_until(lambda: "headrace_llm_sequences_running" not in server.metrics("first"))
    status, _ = server.post(LOAD.format("first"), {})
    assert status == 200
    assert begun(server, "first", 1, 5)[0].ended().tokens == 5


def test_the_server_ends_when_its_streams_have(server: Server) -> None:
    streams = [*begun(server, "first", 4, 250), *begun(server, "second", 2, 150)]
    server.process.send_signal(signal.SIGTERM)
    for stream, tokens in zip(streams, [250] * 4 + [150] * 2, strict=True):
        assert stream.ended().done
        assert stream.tokens == tokens
    assert server.process.wait(120) == 0, server.log
