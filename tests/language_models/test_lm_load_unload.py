# SPDX-License-Identifier: Apache-2.0
"""Models that come while others come, go while they are asked, and a server that ends while it streams."""

from __future__ import annotations

import http.client
import json
import signal
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from language_model_server import LOAD, UNLOAD, Server, configure, served_by_process, served_in_thread

from support.llm_models import tiny_llama
from support.programs import Program
from support.waiting import eventually

pytestmark = pytest.mark.worker("language models")

EXPLICIT = ("--model-control-mode", "explicit")
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
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("coming_and_going")
    for name in ("first", "second"):
        tiny_llama(folder / name / "1", max_position_embeddings=1 << 17)
    configure(folder / "first", kv_cache_bytes=str(CACHE))
    configure(folder / "second", kv_cache_bytes=str(64 << 20))
    return folder


@pytest.fixture(scope="module", params=["in this process", pytest.param("a process", marks=pytest.mark.slow)])
def server(request: pytest.FixtureRequest, models: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    if request.param == "in this process":
        with served_in_thread(models, *EXPLICIT) as running:
            yield running
    else:
        with served_by_process(tmp_path_factory.mktemp("coming_and_going") / "log", models, *EXPLICIT) as running:
            yield running


def load(server: Server, *names: str) -> None:
    """Load models, at the same time."""
    with ThreadPoolExecutor(len(names)) as threads:
        loads = [threads.submit(server.post, LOAD.format(name), {}) for name in names]
        assert [load.result()[0] for load in loads] == [200] * len(names)


def begun(server: Server, model: str, count: int, tokens: int) -> list[Stream]:
    streams = [Stream(server, model, tokens, number) for number in range(count)]
    for stream in streams:
        assert stream.began.wait(240)
        assert stream.events
    return streams


def test_two_models_are_loaded_at_the_same_time(server: Server) -> None:
    load(server, "first", "second")
    body = {"prompt": "the river", "max_tokens": 8, "temperature": 0}
    answers = [server.post("/v1/completions", {"model": name, **body}) for name in ("first", "second")]
    assert [status for status, _ in answers] == [200, 200]
    assert answers[0][1]["choices"][0]["text"] == answers[1][1]["choices"][0]["text"] != ""


def test_a_model_that_is_unloaded_while_it_streams(server: Server) -> None:
    load(server, "first")
    before = server.memory
    streams = begun(server, "first", 4, 200)
    status, _ = server.post(UNLOAD.format("first"), {})
    assert status == 200
    status, reply = server.post("/v1/completions", {"model": "first", "prompt": "x"})
    assert (status, reply["error"]["param"]) == (404, "model"), reply
    for stream in streams:
        assert stream.ended().done
        assert stream.tokens == 200
    if isinstance(server.running, Program):  # the tests' own process has other uses for memory
        eventually(lambda: server.memory < before - CACHE * 0.9)
    eventually(lambda: "headrace_llm_sequences_running" not in server.metrics("first"))
    load(server, "first")
    assert begun(server, "first", 1, 5)[0].ended().tokens == 5


@pytest.mark.slow  # quick, with other models: tests/net, tests/cli
def test_the_server_ends_when_its_streams_have(models: Path, tmp_path: Path) -> None:
    with served_by_process(tmp_path / "log", models, *EXPLICIT) as server:
        load(server, "first", "second")
        streams = [*begun(server, "first", 4, 250), *begun(server, "second", 2, 150)]
        assert isinstance(server.running, Program)
        server.running.send(signal.SIGTERM)
        for stream, tokens in zip(streams, [250] * 4 + [150] * 2, strict=True):
            assert stream.ended().done
            assert stream.tokens == tokens
        assert server.running.wait() == 0, server.log
