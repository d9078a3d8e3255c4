# SPDX-License-Identifier: Apache-2.0
"""Chats that are answered in pieces: OpenAI's chunks, what comes before the first and after a failure, and who hangs up."""

from __future__ import annotations

import asyncio
import http.client
import json
import socket
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from picture_models import data_url, png
from service_process import HttpTarget, LocalService, local_service, settings_for
from vl_model import tiny_qwen_vl

from headrace.core.errors import HeadraceError, Unavailable
from headrace.core.generation import TEXT_OUTPUT
from headrace.core.requests import InferResponse
from headrace.core.tensors import Tensor
from headrace.jobs.microservice.model_kinds.contract import Begin, Chat
from headrace.jobs.microservice.model_kinds.language import LanguageKind
from headrace.platforms.service_client import ServiceFailed, send_chat
from support.llm_models import tiny_llama
from support.waiting import eventually

CHAT = "/v1/chat/completions"


def body_of(content: Any, **more: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": content}], "max_tokens": 8, "temperature": 0, **more}


def events_of(running: HttpTarget, body: dict[str, Any]) -> list[str]:
    """The data of every event of a stream that must begin."""
    connection = http.client.HTTPConnection("127.0.0.1", running.port, timeout=60)
    try:
        connection.request("POST", CHAT, json.dumps(body))
        response = connection.getresponse()
        text = response.read().decode()
        assert response.status == 200, text
        assert response.getheader("content-type") == "text/event-stream; charset=utf-8"
    finally:
        connection.close()
    blocks = text.split("\n\n")
    assert blocks.pop() == "" and all(block.startswith("data: ") for block in blocks)
    return [block.removeprefix("data: ") for block in blocks]


def chunks_of(running: HttpTarget, body: dict[str, Any]) -> list[dict[str, Any]]:
    *chunks, last = events_of(running, {**body, "stream": True})
    assert last == "[DONE]"
    return [json.loads(chunk) for chunk in chunks]


def text_of(chunks: list[dict[str, Any]], index: int = 0) -> str:
    deltas = [choice["delta"] for chunk in chunks for choice in chunk["choices"] if choice["index"] == index]
    return "".join(delta.get("content", "") for delta in deltas)


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalService]:
    folder = tmp_path_factory.mktemp("streaming")
    model = tiny_llama(folder / "llama", eos_token_id=None)
    with local_service(settings_for(model, folder, "tao-dataservices")) as running:
        running.until("model_loaded")
        yield running


def test_the_pieces_are_the_whole(llama: LocalService) -> None:
    body = body_of("the quick brown fox")
    whole = llama.post(CHAT, body).body
    chunks = chunks_of(llama, body)
    assert text_of(chunks) == whole["choices"][0]["message"]["content"]
    assert {chunk["object"] for chunk in chunks} == {"chat.completion.chunk"}
    assert {chunk["model"] for chunk in chunks} == {"llama"}
    (identity,) = {chunk["id"] for chunk in chunks}
    assert identity.startswith("chatcmpl-")
    first, *_, last = (chunk["choices"][0] for chunk in chunks)
    assert first["delta"] == {"role": "assistant", "content": ""}
    assert [chunk["choices"][0]["finish_reason"] for chunk in chunks[:-1]] == [None] * (len(chunks) - 1)
    assert last["finish_reason"] == "length" == whole["choices"][0]["finish_reason"]
    assert len(chunks) > 3 and not any("usage" in chunk for chunk in chunks)


def test_usage_is_last_where_requested(llama: LocalService) -> None:
    body = body_of("the quick brown fox")
    usage = llama.post(CHAT, body).body["usage"]
    *chunks, last = chunks_of(llama, body | {"stream_options": {"include_usage": True}})
    assert last["choices"] == [] and {name: last["usage"][name] for name in usage} == usage
    assert all(chunk["usage"] is None for chunk in chunks)


def test_several_choices_in_one_stream(llama: LocalService) -> None:
    body = body_of("two of them", n=2, temperature=1.0, seed=5)
    whole = [choice["message"]["content"] for choice in llama.post(CHAT, body).body["choices"]]
    chunks = chunks_of(llama, body)
    assert [text_of(chunks, index) for index in (0, 1)] == whole
    ends = [chunk["choices"][0] for chunk in chunks if chunk["choices"][0]["finish_reason"]]
    assert sorted(end["index"] for end in ends) == [0, 1]


def test_the_openai_client_streams(llama: LocalService) -> None:
    import openai

    with openai.OpenAI(base_url=f"http://127.0.0.1:{llama.port}/v1", api_key="none", max_retries=0) as client:
        body: dict[str, Any] = {"model": "m", "messages": [{"role": "user", "content": "hello"}], "max_tokens": 5}
        stream = client.chat.completions.create(**body, stream=True, stream_options={"include_usage": True})
        chunks = list(stream)
        assert chunks[0].choices[0].delta.role == "assistant"
        assert chunks[-2].choices[0].finish_reason == "length"
        assert chunks[-1].usage is not None and chunks[-1].usage.completion_tokens == 5
        with pytest.raises(openai.BadRequestError, match="not a parameter"):
            client.chat.completions.create(**body, stream=True, extra_body={"num_steps": 3})


def test_a_vision_model_streams(tmp_path: Path) -> None:
    model = tiny_qwen_vl(tmp_path / "qwen-vl")
    with local_service(settings_for(model, tmp_path, "cosmos-rl")) as running:
        running.until("model_loaded")
        item = {"type": "image_url", "image_url": {"url": data_url(png(seed=1))}}
        body = body_of([item, {"type": "text", "text": "what is it?"}])
        chunks = chunks_of(running, body)
        assert text_of(chunks) == running.post(CHAT, body).body["choices"][0]["message"]["content"]
        # What is wrong with a picture is known before the first token.
        broken = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}
        answer = running.post(CHAT, body_of([broken], stream=True))
        assert (answer.status, answer.body["error"]["type"]) == (400, "invalid_request"), answer.text
        assert "messages[0].content[0].image_url" in answer.body["error"]["message"]
        answer = running.post(CHAT, body_of("no picture", stream=True))
        assert (answer.status, answer.body["error"]["message"]) == (400, "Cosmos requires 'media' parameter")


@pytest.mark.parametrize(
    ("more", "text"),
    [
        ({"guidance": 7}, "'guidance' is not a parameter"),
        ({"stream": "yes"}, "'stream' is 'yes': use true or false"),
        ({"stream_options": 5}, "'stream_options' must be an object"),
        ({"stream_options": {"include_usage": 1}}, "'stream_options.include_usage' must be true or false"),
        ({"messages": []}, "'messages' is required"),
        ({"messages": [{"role": "user", "content": "a " * 5000}]}, "context"),
    ],
)
def test_errors_are_reported_as_without_a_stream(llama: LocalService, more: dict[str, Any], text: str) -> None:
    answer = llama.post(CHAT, body_of("x", stream=True) | more)
    assert (answer.status, answer.body["error"]["type"]) == (400, "invalid_request"), answer.text
    assert text in answer.body["error"]["message"]


def in_flight(running: LocalService) -> int:
    engine = running.made._startup.engine
    assert engine is not None
    return sum(version.statistics.in_flight for version in engine.plane.statistics())


def test_who_hangs_up_in_the_middle_ends_it(llama: LocalService) -> None:
    body = json.dumps(body_of("on and on", stream=True, max_tokens=1500, ignore_eos=True)).encode()
    with socket.create_connection(("127.0.0.1", llama.port)) as client:
        client.sendall(b"POST %b HTTP/1.1\r\nhost: x\r\ncontent-length: %d\r\n\r\n" % (CHAT.encode(), len(body)) + body)
        received = b""
        while b'"content":' not in received:
            received += client.recv(4096)
        # It is no rest, however long it takes.
        assert llama.server.call(lambda: llama.made.idle._running) == 1
        assert llama.server.call(in_flight, llama) == 1
    eventually(lambda: not llama.server.call(in_flight, llama))
    eventually(lambda: not llama.server.call(lambda: llama.made.idle._running))


class Failing:
    """A kind that says something and then fails."""

    model_type = "llm"
    parameters = ()

    def __init__(self, error: Exception, first: str) -> None:
        self._error, self._first = error, first

    async def stream(self, chat: Chat, begin: Begin) -> None:
        tell = begin(1)
        if self._first:
            text = np.array([self._first.encode()], np.object_)
            tell(InferResponse("m", "1", [Tensor.of(TEXT_OUTPUT, text)], parameters={"index": 0}))
        raise self._error


@pytest.fixture
def failing(llama: LocalService) -> Iterator[Callable[[Exception, str], LocalService]]:
    before = llama.made._kind
    assert isinstance(before, LanguageKind)

    def fail(error: Exception, first: str) -> LocalService:
        llama.made._kind = Failing(error, first)  # type: ignore[assignment]
        return llama

    yield fail
    llama.made._kind = before


Fails = Callable[[Exception, str], LocalService]


@pytest.mark.parametrize(
    ("error", "status", "kind", "text"),
    [
        (Unavailable("the model is being replaced", retry_after_seconds=2), 503, "unavailable", "being replaced"),
        (RuntimeError("a secret"), 500, "internal_error", "log"),
    ],
)
def test_a_failure_before_and_after_the_first_token(
    failing: Fails, error: Exception, status: int, kind: str, text: str
) -> None:
    running = failing(error, "")
    answer = running.post(CHAT, body_of("x", stream=True))
    assert (answer.status, answer.body["error"]["type"]) == (status, kind)
    assert text in answer.body["error"]["message"] and "secret" not in answer.text
    if isinstance(error, HeadraceError):
        assert answer.fields["retry-after"] == "2"
    *chunks, last = events_of(failing(error, "so far"), body_of("x", stream=True))
    assert text_of([json.loads(chunk) for chunk in chunks]) == "so far"
    reported = json.loads(last)["error"]
    assert reported["type"] == kind and text in reported["message"] and "secret" not in last


def test_the_launchers_client_reads_it(llama: LocalService, failing: Fails) -> None:
    url = f"http://127.0.0.1:{llama.port}"
    body = body_of("the quick brown fox", stream=True)
    pieces: list[str] = []
    answer = asyncio.run(send_chat(url, body, "it", on_piece=pieces.append))
    assert answer.streamed and "".join(pieces) == answer.text and len(pieces) > 1
    failing(RuntimeError("a secret"), "so far")
    with pytest.raises(ServiceFailed):
        asyncio.run(send_chat(url, body, "it", on_piece=pieces.append))
    assert pieces[-1] == "so far"


def test_a_loading_service_reports_it(tmp_path: Path) -> None:
    may_load = threading.Event()

    async def before_load() -> None:
        await asyncio.to_thread(may_load.wait, 240)

    model = tiny_llama(tmp_path / "llama")
    with local_service(settings_for(model, tmp_path), before_load=before_load) as running:
        running.until(lambda told: not told["server_initializing"])
        answer = running.post(CHAT, body_of("x", stream=True))
        assert (answer.status, answer.body["error"]["type"]) == (503, "model_not_ready")
        assert answer.fields["content-type"] == "application/json" and int(answer.fields["retry-after"]) > 0
        may_load.set()
        running.until("model_loaded")
        assert chunks_of(running, body_of("x"))
