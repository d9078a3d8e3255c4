# SPDX-License-Identifier: Apache-2.0
"""`python -m bench.llm`: the requests it makes, its figures and its table, without a language model."""

from __future__ import annotations

import asyncio
import json
import queue
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from bench.llm import __main__ as command
from bench.llm import load
from bench.llm.workloads import WORKLOADS, Workload

USAGE = {"prompt_tokens": 3, "completion_tokens": 4, "prompt_tokens_details": {"cached_tokens": 2}}


async def _serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Answer completions: four tokens, or an error for a model that is not there."""
    while True:
        try:
            head = await reader.readuntil(b"\r\n\r\n")
        except asyncio.IncompleteReadError:  # the client has left
            writer.close()
            return
        length = int(head.lower().split(b"content-length: ")[1].split(b"\r\n")[0])
        body: dict[str, Any] = json.loads(await reader.readexactly(length))
        if body["model"] != "tiny":
            writer.write(b"HTTP/1.1 404 Not Found\r\ncontent-length: 6\r\n\r\nabsent")
        elif body.get("stream"):
            assert body["stream_options"] == {"include_usage": True}
            writer.write(b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n")
            events = [b'data: {"a": 1}\n\n'] * 4 + [
                b"data: %b\n\n" % json.dumps({"usage": USAGE}).encode(),
                b"data: [DONE]\n\n",
            ]
            for event in events:
                writer.write(b"%x\r\n%b\r\n" % (len(event), event))
                await writer.drain()
            writer.write(b"0\r\n\r\n")
        else:
            content = json.dumps({"usage": USAGE}).encode()
            writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n%b" % (len(content), content))


@contextmanager
def completions() -> Iterator[int]:
    ports: queue.Queue[int] = queue.Queue()
    loop, stop = asyncio.new_event_loop(), asyncio.Event()

    async def run() -> None:
        async with await asyncio.start_server(_serve, "127.0.0.1", 0) as server:
            ports.put(server.sockets[0].getsockname()[1])
            await stop.wait()

    def work() -> None:
        with asyncio.Runner(loop_factory=lambda: loop) as runner:
            runner.run(run())

    thread = threading.Thread(target=work)
    thread.start()
    try:
        yield ports.get(timeout=60)
    finally:
        loop.call_soon_threadsafe(stop.set)
        thread.join()


@pytest.mark.parametrize("streamed", [True, False])
def test_every_request_is_sent_and_its_usage_counted(streamed: bool) -> None:
    workload = Workload("w", "", 3, 10, (2, 5), (4, 4), streamed=streamed)
    with completions() as port:
        figures = load.run(port, "tiny", workload, 1000)
    assert (figures["requests"], figures["errors"]) == (10, 0)
    assert (figures["tokens"], figures["prompt_tokens"], figures["cached_tokens"]) == (40, 30, 20)
    assert figures["tokens_per_second"] > 0


def test_a_refused_request_is_an_error_with_its_reason() -> None:
    with completions() as port:
        figures = load.run(port, "other", Workload("w", "", 2, 4, (2, 2), (4, 4)), 1000)
    assert figures["errors"] == 4
    assert "404" in figures["error"][0] and "absent" in figures["error"][0]


def test_servers_get_the_same_prompts_and_those_of_a_prefix_begin_alike() -> None:
    workload = WORKLOADS["prefix"].smaller()
    prompts = workload.prompts(1000)
    assert prompts == workload.prompts(1000)
    assert len({tuple(prompt[: workload.shared]) for prompt, _ in prompts}) == 1
    assert len({tuple(prompt) for prompt, _ in prompts}) == len(prompts)
    assert all(0 < token < 1000 for prompt, _ in prompts for token in prompt)


def test_tokens_that_came_together_have_no_time_between_them() -> None:
    answer = load.Answer(0.0, 3.0, [(1.0, 1), (2.0, 2), (3.0, 5)], tokens=4)
    assert list(load._gaps(answer)) == [1.0, 0.0, 1.0], "the last events are the usage and the end"


def test_the_table_compares_with_the_best_of_the_others() -> None:
    def of(rate: float) -> dict[str, Any]:
        return {"one": {"tokens_per_second": rate, "first_token_ms": [2.0, 3.0], "errors": 0, "cpu_us_per_token": 7.0}}

    table = command._table("1b", {"headrace": of(900), "vllm": of(450), "sglang": of(600)})
    columns = {str(column.header): list(column.cells) for column in table.columns}
    assert columns["headrace"] == ["900 (2.0; 7)"]
    assert columns["headrace / best other"] == ["1.50"]
    failed = command._table("1b", {"headrace": {"one": {"errors": 6, "error": ["500 broken"]}}, "vllm": of(450)})
    assert "failed: " in str(list(failed.columns[1].cells)) and list(failed.columns[3].cells) == ["-"]
