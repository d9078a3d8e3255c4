# SPDX-License-Identifier: Apache-2.0
"""The protocol at the level of HTTP: paths, keys, clients that leave or do not read, media, engines, v2."""

from __future__ import annotations

import io
import json
import socket
import time
from base64 import b64encode
from pathlib import Path
from typing import Any

import pytest
from openai import OpenAI
from openai_server import OpenAiServer, openai_server_with_models
from PIL import Image

from headrace.api.access.api_keys import create_key
from headrace.api.access.settings import AccessSettings
from headrace.api.openai.settings import OpenAiSettings
from headrace.core.clock import SystemClock
from headrace.core.generation import OutputFormat, PromptImage
from headrace.core.telemetry.metrics import Registry
from headrace.models.media.reader import MediaReader
from headrace.models.media.settings import MediaSettings
from headrace.net.http.routes import Routes
from headrace.programs.serve.access_guard import Middleware, open_guard
from support.waiting import eventually

CHAT = "/v1/chat/completions"
USER = {"role": "user", "content": "hello"}
IMAGE = {"type": "image_url", "image_url": {"url": "data:8x6", "detail": "low"}}


def test_paths_that_are_not_there(openai_server: OpenAiServer) -> None:
    status, body, _ = openai_server.ask("/v1/images/generations", {})
    assert (status, body["error"]["type"]) == (404, "invalid_request_error")
    status, body, headers = openai_server.ask(CHAT, None, "GET")
    assert (status, headers["allow"]) == (405, "POST")
    assert "use POST" in body["error"]["message"]
    assert openai_server.ask("/v1/models", b"", "DELETE")[0] == 405


def test_a_content_type_does_not_matter(openai_server: OpenAiServer) -> None:
    body = {"model": "repeater", "messages": [USER]}
    assert openai_server.ask(CHAT, body, headers={"content-type": "text/plain"})[0] == 200


def test_members_that_mean_nothing_here_are_ignored(openai_server: OpenAiServer) -> None:
    more = {
        "user": "me",
        "metadata": {"a": "b"},
        "store": True,
        "service_tier": "auto",
        "never_heard_of": [1],
        "best_of": 1,
    }
    assert openai_server.chat("hello", **more, prediction={"type": "content"}, tools=None, temperature=None)[0] == 200


def test_what_a_model_is_told(openai_server: OpenAiServer) -> None:
    more = {
        "temperature": 0,
        "top_p": 0.5,
        "top_k": 7,
        "min_p": 0.1,
        "seed": -5,
        "stop": "end",
        "stop_token_ids": [3],
        "logit_bias": {"12": -100},
        "min_tokens": 2,
        "ignore_eos": True,
        "repetition_penalty": 1.2,
        "presence_penalty": -1,
        "frequency_penalty": 1,
        "chat_template_kwargs": {"enable_thinking": False},
        "reasoning_effort": "low",
        "response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "integer"}}},
    }
    assert openai_server.chat("hello", **more)[0] == 200
    given = openai_server.repeater.received[-1]
    sampling = given.sampling
    assert (sampling.temperature, sampling.top_p, sampling.top_k, sampling.min_p, sampling.seed) == (0, 0.5, 7, 0.1, -5)
    assert (sampling.stop, sampling.stop_token_ids, sampling.logit_bias) == (("end",), (3,), {12: -100.0})
    assert (sampling.min_tokens, sampling.ignore_eos, sampling.repetition_penalty) == (2, True, 1.2)
    assert (sampling.presence_penalty, sampling.frequency_penalty, sampling.max_tokens) == (-1, 1, None)
    assert given.template_arguments == {"enable_thinking": False, "reasoning_effort": "low"}
    assert given.output_format == OutputFormat("json_schema", {"type": "integer"})
    assert not given.body
    for more, wanted in (
        ({"response_format": {"type": "text"}}, None),
        ({"response_format": {"type": "json_object"}}, OutputFormat("json_object")),
        ({"guided_regex": "a+"}, OutputFormat("regex", regex="a+")),
        ({"guided_choice": ["a", "b.c"]}, OutputFormat("regex", regex=r"(a|b\.c)")),
        ({"structured_outputs": {"json": {"type": "null"}}}, OutputFormat("json_schema", {"type": "null"})),
    ):
        assert openai_server.chat("hello", **more)[0] == 200
        assert openai_server.repeater.received[-1].output_format == wanted


def test_the_text_of_a_bug_stays_in_the_log(openai_server: OpenAiServer) -> None:
    status, body, _ = openai_server.chat("CRASH")
    assert (status, body["error"]["type"]) == (500, "server_error")


def test_images_and_videos(client: OpenAI, openai_server: OpenAiServer) -> None:
    content: Any = [
        {"type": "text", "text": "see"},
        IMAGE,
        {"type": "video_url", "video_url": {"url": "https://example.org/x.mp4"}},
        {"type": "image_url", "image_url": {"url": "data:2x1"}},
    ]
    answer = client.chat.completions.create(model="repeater", messages=[{"role": "user", "content": content}])
    assert answer.choices[0].message.content == "see <promptimage 6x8x3> <promptvideo 2x4x4x3> <promptimage 1x2x3>"
    told = openai_server.repeater.received[-1].messages[0]["content"]
    assert told == [{"type": "text", "text": "see"}, {"type": "image"}, {"type": "video"}, {"type": "image"}]


def test_media_that_cannot_be_read(openai_server: OpenAiServer) -> None:
    wrong = {"type": "image_url", "image_url": {"url": "data:nothing"}}
    waiting = {"type": "image_url", "image_url": {"url": "data:wait"}}
    message = {"role": "user", "content": [{"type": "text", "text": "x"}, waiting, wrong]}
    before = openai_server.colours.cancelled
    status, body, _ = openai_server.ask(CHAT, {"model": "repeater", "messages": [message]})
    assert (status, body["error"]["param"]) == (400, "messages[0].content[2].image_url")
    assert "this is not an image" in body["error"]["message"]
    assert openai_server.colours.cancelled == before + 1  # the one that was still being read
    with openai_server_with_models(OpenAiSettings(media_bytes=100)) as small:
        message = {"role": "user", "content": [IMAGE]}
        status, body, _ = small.ask(CHAT, {"model": "repeater", "messages": [message]})
        assert (status, body["error"]["param"]) == (400, "messages[0].content[0].image_url")


def test_real_images_as_data(tmp_path: Path) -> None:
    made = io.BytesIO()
    Image.new("RGB", (8, 6), (255, 0, 0)).save(made, "PNG")
    reader = MediaReader(MediaSettings(temporary_folder=tmp_path))
    try:
        with openai_server_with_models(reader=reader) as server:

            def seen(data: bytes) -> Any:
                url = f"data:image/png;base64,{b64encode(data).decode()}"
                content = [{"type": "text", "text": "see"}, {"type": "image_url", "image_url": {"url": url}}]
                return server.ask(CHAT, {"model": "repeater", "messages": [{"role": "user", "content": content}]})

            status, body, _ = seen(made.getvalue())
            assert (status, body["choices"][0]["message"]["content"]) == (200, "see <promptimage 6x8x3>")
            (picture,) = server.repeater.received[-1].media
            assert isinstance(picture, PromptImage)
            assert (picture.pixels == (255, 0, 0)).all()
            status, body, _ = seen(made.getvalue()[:40])
            assert (status, body["error"]["param"]) == (400, "messages[0].content[1].image_url")
            private = [{"type": "image_url", "image_url": {"url": "http://169.254.169.254/latest"}}]
            body = {"model": "repeater", "messages": [{"role": "user", "content": private}]}
            assert server.ask(CHAT, body)[0] == 400
    finally:
        reader.close()
    assert list(tmp_path.iterdir()) == []


def begun(openai_server: OpenAiServer, path: str, body: Any) -> socket.socket:
    """A request that was sent, on a connection of its own."""
    raw = json.dumps(body).encode()
    sock = socket.create_connection(("127.0.0.1", openai_server.port), timeout=30)
    sock.sendall(b"POST %b HTTP/1.1\r\nhost: x\r\ncontent-length: %d\r\n\r\n%b" % (path.encode(), len(raw), raw))
    return sock


@pytest.mark.parametrize("stream", [False, True])
def test_clients_that_leave_end_their_requests(openai_server: OpenAiServer, stream: bool) -> None:
    before = openai_server.repeater.cancelled
    body = {"model": "repeater", "messages": [{"role": "user", "content": "on FOREVER"}], "stream": stream}
    socks = [begun(openai_server, CHAT, body) for _ in range(20)]
    if stream:
        for sock in socks:
            assert b"200 OK" in sock.recv(4096)
    else:
        eventually(lambda: openai_server.repeater.running >= 20)
    for sock in socks:
        sock.close()
    eventually(lambda: openai_server.repeater.cancelled == before + 20)
    eventually(lambda: openai_server.repeater.running == 0)


def test_a_client_that_leaves_while_its_media_are_read(openai_server: OpenAiServer) -> None:
    before, waiting, given = (
        openai_server.colours.cancelled,
        openai_server.colours.waiting,
        len(openai_server.repeater.received),
    )
    message = {"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:wait"}}]}
    sock = begun(openai_server, CHAT, {"model": "repeater", "messages": [message]})
    eventually(lambda: openai_server.colours.waiting == waiting + 1)
    sock.close()
    eventually(lambda: openai_server.colours.cancelled == before + 1)
    assert len(openai_server.repeater.received) == given


def test_a_client_that_does_not_read_is_cut_off() -> None:
    with openai_server_with_models(OpenAiSettings(stream_unread_bytes=64 * 1024)) as server:
        word = "FOREVER" + "x" * 4096
        body = {"model": "repeater", "messages": [{"role": "user", "content": word}], "stream": True}
        sock = begun(server, CHAT, body)
        try:
            eventually(lambda: server.repeater.cancelled == 1)
        finally:
            sock.close()


def test_another_engine_is_passed_on(client: OpenAI, openai_server: OpenAiServer) -> None:
    messages: Any = [{"role": "user", "content": "hello"}]
    answer = client.chat.completions.create(model="elsewhere", messages=messages, extra_body={"their_own": 1})
    assert (answer.model, answer.id) == ("elsewhere", "theirs")
    assert answer.choices[0].message.content == 'it said "model":"inner/name"'
    assert answer.choices[0].message.extra == [1]  # type: ignore[attr-defined]
    given = openai_server.proxy.received[-1]
    assert (given.path, given.stream, given.body["their_own"]) == (CHAT, False, 1)
    chunks = list(client.chat.completions.create(model="elsewhere", messages=messages, stream=True))
    assert {chunk.model for chunk in chunks} == {"elsewhere"}
    assert [chunk.choices[0].delta.content for chunk in chunks] == [f'{i} "model":"inner/name" ' for i in range(3)]
    client.completions.create(model="elsewhere", prompt="x")
    assert openai_server.proxy.received[-1].path == "/v1/completions"
    vectors = client.embeddings.create(model="elsewhere", input="x", encoding_format="float")
    assert (vectors.model, vectors.data[0].embedding) == ("elsewhere", [0.5, 1.5])


def test_the_same_models_through_v2(openai_server: OpenAiServer) -> None:
    path = "/v2/models/repeater/generate"
    status, body, _ = openai_server.ask(path, {"text_input": "one two", "parameters": {"max_tokens": 1}})
    assert (status, body["text_output"], body["finish_reason"]) == (200, "one", "length")
    status, body, _ = openai_server.ask(path, {"text_input": "one two", "n": 2, "temperature": 0.5})
    assert (status, body["text_output"]) == (200, ["one two", "one two"])
    status, text, _ = openai_server.ask(f"{path}_stream", {"text_input": "one two", "stream": True})
    events = [json.loads(line[6:]) for line in text.decode().splitlines() if line.startswith("data: ")]
    assert [event["text_output"] for event in events] == ["one", " two"]
    assert events[-1]["completion_tokens"] == 2


def test_a_key_of_ours_is_the_clients_key(tmp_path: Path) -> None:
    key = create_key(tmp_path / "keys", "someone", ("admin",), created=time.time())
    guard = open_guard(AccessSettings(keys_file=tmp_path / "keys"), Registry(SystemClock()))
    assert guard is not None
    with openai_server_with_models(make_routes=lambda: Routes(Middleware(guard).http)) as server:
        status, body, headers = server.chat("hello")
        assert (status, headers["www-authenticate"]) == (401, "Bearer")
        assert body["error"]["code"] == "invalid_api_key"
        url = f"http://127.0.0.1:{server.port}/v1"
        with OpenAI(base_url=url, api_key=key, max_retries=0, timeout=60) as client:
            answer = client.completions.create(model="repeater", prompt="hello")
            assert answer.choices[0].text == "hello"
