# SPDX-License-Identifier: Apache-2.0
"""OpenAI's own client, unchanged, against `headrace serve`: everything it can ask of models that write, see and embed."""

from __future__ import annotations

import asyncio
import base64
import json
from typing import Any

import numpy as np
import openai
import pytest
from language_model_server import ADAPTERS, Server
from media_files import data_url, image, video
from openai import AsyncOpenAI, OpenAI
from web_stub import WebStub, serve

pytestmark = pytest.mark.worker("language models")

USER: Any = [{"role": "user", "content": "the quick brown fox"}]
GREEDY: Any = {"temperature": 0, "max_tokens": 16}
TOOL: Any = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "Tells the weather.",
        "parameters": {
            "type": "object",
            "properties": {
                "town": {"enum": ["Delft", "Rome"]},
                "days": {"type": "integer", "minimum": 1, "maximum": 9},
            },
            "required": ["town", "days"],
            "additionalProperties": False,
        },
    },
}


def greedy_answer(client: OpenAI, model: str = "llama", messages: Any = USER, **more: Any) -> str:
    """What a greedy model answers."""
    answer = client.chat.completions.create(model=model, messages=messages, **{**GREEDY, **more})
    return answer.choices[0].message.content or ""


def test_all_models_and_adapters_are_listed(client: OpenAI) -> None:
    assert {model.id for model in client.models.list()} == {"llama", "vision", "embedder", *ADAPTERS}
    assert client.models.retrieve("pirate").id == "pirate"
    with pytest.raises(openai.NotFoundError, match="nobody"):
        client.models.retrieve("nobody")


def test_a_stream_and_a_whole_answer_are_equal(client: OpenAI) -> None:
    whole = client.chat.completions.create(model="llama", messages=USER, **GREEDY)
    stream = client.chat.completions.create(
        model="llama", messages=USER, stream=True, stream_options={"include_usage": True}, **GREEDY
    )
    chunks = list(stream)
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert text == whole.choices[0].message.content != ""
    assert whole.usage is not None
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.completion_tokens == whole.usage.completion_tokens <= 16
    assert {chunk.id for chunk in chunks} == {chunks[0].id}


def test_the_asynchronous_client(served: Server, client: OpenAI) -> None:
    async def ask() -> tuple[str, str]:
        async with AsyncOpenAI(base_url=served.base_url, api_key="none", max_retries=0, timeout=60) as asking:
            whole = await asking.chat.completions.create(model="llama", messages=USER, **GREEDY)
            stream = await asking.chat.completions.create(model="llama", messages=USER, stream=True, **GREEDY)
            pieces = [chunk.choices[0].delta.content or "" async for chunk in stream]
            return whole.choices[0].message.content or "", "".join(pieces)

    assert asyncio.run(ask()) == (greedy_answer(client),) * 2


def test_completions_of_texts_and_of_tokens(client: OpenAI) -> None:
    answer = client.completions.create(model="llama", prompt=["the river", "a mill"], n=2, **GREEDY)
    assert [choice.index for choice in answer.choices] == [0, 1, 2, 3]
    texts = [choice.text for choice in answer.choices]
    assert texts[0] == texts[1] != texts[2] == texts[3]
    one: Any = [12, 13, 14]
    assert client.completions.create(model="llama", prompt=one, **GREEDY).choices[0].text
    echoed = client.completions.create(model="llama", prompt="the river", echo=True, **GREEDY)
    assert echoed.choices[0].text == "the river" + texts[0]


@pytest.mark.parametrize("stream", [False, True])
def test_a_named_tool_is_called_according_to_its_schema(client: OpenAI, stream: bool) -> None:
    choice: Any = {"type": "function", "function": {"name": "weather"}}
    asking: Any = {"model": "llama", "messages": USER, "tools": [TOOL], "tool_choice": choice, "seed": 3}
    name, arguments, reason = "", "", ""
    if stream:
        for chunk in client.chat.completions.create(**asking, stream=True):
            for call in chunk.choices[0].delta.tool_calls or []:
                name += call.function.name or ""
                arguments += call.function.arguments
            reason = chunk.choices[0].finish_reason or reason
    else:
        answer = client.chat.completions.create(**asking).choices[0]
        (call,) = answer.message.tool_calls or []
        name, arguments, reason = call.function.name, call.function.arguments, answer.finish_reason
    assert (name, reason) == ("weather", "tool_calls")
    assert set(json.loads(arguments)) == {"town", "days"}


def test_a_conversation_with_calls_and_their_answers_is_accepted(client: OpenAI) -> None:
    call = {"id": "call_1", "type": "function", "function": {"name": "weather", "arguments": '{"town": "Rome"}'}}
    messages: Any = [
        {"role": "developer", "content": "be brief"},
        *USER,
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "call_1", "content": "it rains"},
    ]
    assert greedy_answer(client, messages=messages, tools=[TOOL]) != greedy_answer(client, messages=messages[1:2])


@pytest.mark.parametrize("stream", [False, True])
def test_a_json_schema_is_followed(client: OpenAI, stream: bool) -> None:
    schema = TOOL["function"]["parameters"]
    wanted: Any = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema, "strict": True}}
    asking: Any = {"model": "llama", "messages": USER, "response_format": wanted, "seed": 1}
    if stream:
        chunks = client.chat.completions.create(stream=True, **asking)
        text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks)
    else:
        text = client.chat.completions.create(**asking).choices[0].message.content or ""
    document = json.loads(text)
    assert document["town"] in ("Delft", "Rome")
    assert 1 <= document["days"] <= 9


def test_choices_and_seeds(client: OpenAI) -> None:
    def texts(seed: int) -> list[str | None]:
        answer = client.chat.completions.create(model="llama", messages=USER, n=3, seed=seed, max_tokens=12)
        return [choice.message.content for choice in answer.choices]

    first = texts(5)
    assert len(set(first)) == 3
    assert texts(5) == first != texts(6)


def test_a_stop_text_ends_the_answer_and_is_not_part_of_it(client: OpenAI) -> None:
    whole = greedy_answer(client)
    stop = whole[len(whole) // 2 :][:3]
    answer = client.chat.completions.create(model="llama", messages=USER, stop=[stop, "never said"], **GREEDY)
    assert answer.choices[0].message.content == whole[: whole.index(stop)]
    assert answer.choices[0].finish_reason == "stop"


def test_logprobs(client: OpenAI) -> None:
    answer = client.chat.completions.create(model="llama", messages=USER, logprobs=True, top_logprobs=3, **GREEDY)
    logprobs = answer.choices[0].logprobs
    assert logprobs is not None
    assert logprobs.content
    assert answer.usage is not None
    assert len(logprobs.content) == answer.usage.completion_tokens
    for logprob in logprobs.content:
        assert len(logprob.top_logprobs) == 3
        assert logprob.logprob == max(other.logprob for other in logprob.top_logprobs) <= 0
    told_bytes = b"".join(bytes(item.bytes or ()) for item in logprobs.content)
    assert told_bytes.decode(errors="replace") == answer.choices[0].message.content
    plain = client.completions.create(model="llama", prompt="the river", logprobs=2, **GREEDY).choices[0]
    assert plain.logprobs is not None
    assert plain.logprobs.tokens is not None
    assert len(plain.logprobs.tokens) == len(plain.logprobs.token_logprobs or ()) > 0


def test_an_adapter_is_a_model(client: OpenAI) -> None:
    texts = {name: greedy_answer(client, name) for name in ("llama", *ADAPTERS)}
    assert len(set(texts.values())) == 3
    answer = client.chat.completions.create(model="poet", messages=USER, **GREEDY)
    assert answer.model == "poet"


def test_embeddings_as_numbers_and_as_base64(client: OpenAI) -> None:
    texts = ["a mill grinds corn", "to the sea", "a mill grinds corn"]
    reported = client.embeddings.create(model="embedder", input=texts, encoding_format="float")
    vectors = [np.array(item.embedding, np.float32) for item in reported.data]
    assert [item.index for item in reported.data] == [0, 1, 2]
    assert [len(vector) for vector in vectors] == [32] * 3
    np.testing.assert_allclose(np.linalg.norm(vectors, axis=1), 1, atol=1e-5)
    np.testing.assert_allclose(vectors[0], vectors[2], atol=1e-5)
    assert np.abs(vectors[0] - vectors[1]).max() > 0.01
    coded: Any = client.embeddings.create(model="embedder", input=texts[0], encoding_format="base64").data[0].embedding
    second = np.frombuffer(base64.b64decode(coded), "<f4") if isinstance(coded, str) else np.array(coded, np.float32)
    np.testing.assert_allclose(second, vectors[0], atol=1e-5)
    assert reported.usage.prompt_tokens > 0


def image_message(*items: dict[str, Any]) -> Any:
    return [{"role": "user", "content": [{"type": "text", "text": "what is this?"}, *items]}]


def picture_at(url: str) -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": url}}


def test_an_image_is_the_same_by_data_url_and_by_http(client: OpenAI, web: WebStub) -> None:
    content, other = image("PNG", (32, 24)), image("PNG", (24, 32))
    web.routes["/cat.png"] = serve(content)
    by_data = greedy_answer(client, "vision", image_message(picture_at(data_url(content, "image/png"))))
    assert by_data == greedy_answer(client, "vision", image_message(picture_at(web.url("/cat.png"))))
    assert by_data != greedy_answer(client, "vision", image_message(picture_at(data_url(other, "image/png"))))
    assert by_data != greedy_answer(client, "vision", image_message())


def test_a_video_and_several_pictures(client: OpenAI) -> None:
    clip = {"type": "video_url", "video_url": {"url": data_url(video(), "video/mp4")}}
    shown = picture_at(data_url(image("JPEG", (16, 16)), "image/jpeg"))
    texts = [
        greedy_answer(client, "vision", image_message(*items))
        for items in ([clip], [shown], [shown, clip], [clip, shown])
    ]
    assert len(set(texts)) == 4


def test_a_vision_model_streams_too_and_can_be_constrained_by_a_schema(client: OpenAI) -> None:
    messages = image_message(picture_at(data_url(image("PNG", (32, 24)), "image/png")))
    stream = client.chat.completions.create(model="vision", messages=messages, stream=True, **GREEDY)
    assert "".join(chunk.choices[0].delta.content or "" for chunk in stream) == greedy_answer(
        client, "vision", messages
    )
    answer = client.chat.completions.create(
        model="vision",
        messages=messages,
        response_format={"type": "json_schema", "json_schema": {"name": "x", "schema": {"enum": ["cat", "dog"]}}},
    )
    assert json.loads(answer.choices[0].message.content or "") in ("cat", "dog")
