# SPDX-License-Identifier: Apache-2.0
"""OpenAI's own client, unchanged: chats, completions, streams, embeddings, models and errors."""

from __future__ import annotations

import asyncio
from typing import Any

import openai
import pytest
from openai import AsyncOpenAI, OpenAI
from openai_server import OpenAiServer
from pydantic import BaseModel

SAY = [{"role": "user", "content": "one two three"}]


def test_a_chat(client: OpenAI) -> None:
    answer = client.chat.completions.create(model="repeater", messages=SAY)  # type: ignore[arg-type]
    (choice,) = answer.choices
    assert (choice.message.role, choice.message.content) == ("assistant", "one two three")
    assert (choice.finish_reason, choice.message.tool_calls, choice.logprobs) == ("stop", None, None)
    assert (answer.object, answer.model) == ("chat.completion", "repeater")
    assert answer.id.startswith("chatcmpl-")
    assert answer.usage is not None
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens, answer.usage.total_tokens) == (3, 3, 6)
    assert answer.usage.prompt_tokens_details is not None
    assert answer.usage.prompt_tokens_details.cached_tokens == 1


def test_a_chat_streamed(client: OpenAI) -> None:
    stream = client.chat.completions.create(
        model="repeater",
        messages=[{"role": "user", "content": 'one "two"\n drei\u00df \U0001f600'}],
        stream=True,
        stream_options={"include_usage": True},
    )
    chunks = list(stream)
    deltas = [chunk.choices[0].delta for chunk in chunks if chunk.choices]
    assert (deltas[0].role, deltas[0].content) == ("assistant", "")
    assert [delta.content for delta in deltas[1:]] == ["one", ' "two"', "\n drei\u00df", " \U0001f600"]
    assert [chunk.choices[0].finish_reason for chunk in chunks[:-1]] == [None] * 4 + ["stop"]
    assert len({chunk.id for chunk in chunks}) == 1
    assert {chunk.object for chunk in chunks} == {"chat.completion.chunk"}
    last = chunks[-1]
    assert last.choices == []
    assert last.usage is not None
    assert last.usage.total_tokens == 8
    assert all(chunk.usage is None for chunk in chunks[:-1])


def test_several_choices(client: OpenAI) -> None:
    whole = client.chat.completions.create(model="repeater", messages=SAY, n=3)  # type: ignore[arg-type]
    assert [(choice.index, choice.message.content) for choice in whole.choices] == [
        (i, "one two three") for i in range(3)
    ]
    assert whole.usage is not None
    assert (whole.usage.prompt_tokens, whole.usage.completion_tokens) == (3, 9)
    texts = ["", ""]
    for chunk in client.chat.completions.create(model="repeater", messages=SAY, n=2, stream=True):  # type: ignore[call-overload]
        for choice in chunk.choices:
            texts[choice.index] += choice.delta.content or ""
    assert texts == ["one two three"] * 2


def test_length_and_stop(client: OpenAI) -> None:
    cut = client.chat.completions.create(model="repeater", messages=SAY, max_completion_tokens=2)  # type: ignore[arg-type]
    assert (cut.choices[0].message.content, cut.choices[0].finish_reason) == ("one two", "length")
    older = client.chat.completions.create(model="repeater", messages=SAY, max_tokens=1)  # type: ignore[arg-type]
    assert older.choices[0].message.content == "one"
    stopped = client.chat.completions.create(model="repeater", messages=SAY, stop=["thr"])  # type: ignore[arg-type]
    assert (stopped.choices[0].message.content, stopped.choices[0].finish_reason) == ("one two", "stop")


def test_logprobs_of_a_chat(client: OpenAI) -> None:
    whole = client.chat.completions.create(model="repeater", messages=SAY, logprobs=True, top_logprobs=2)  # type: ignore[arg-type]
    logprobs = whole.choices[0].logprobs
    assert logprobs is not None
    assert logprobs.content is not None
    assert [each.token for each in logprobs.content] == ["one", " two", " three"]
    assert [top.token for top in logprobs.content[0].top_logprobs] == ["t0", "t1"]
    tokens = []
    for chunk in client.chat.completions.create(model="repeater", messages=SAY, logprobs=True, stream=True):  # type: ignore[call-overload]
        if chunk.choices[0].logprobs:
            tokens += [each.token for each in chunk.choices[0].logprobs.content]
    assert tokens == ["one", " two", " three"]


def test_completions(client: OpenAI, openai_server: OpenAiServer) -> None:
    answer = client.completions.create(model="repeater", prompt=["a b", "c d e"], n=2, max_tokens=2, echo=True)
    assert [choice.text for choice in answer.choices] == ["a ba b", "a ba b", "c d ec d", "c d ec d"]
    assert [choice.finish_reason for choice in answer.choices] == ["stop", "stop", "length", "length"]
    assert answer.object == "text_completion"
    assert answer.usage is not None
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (5, 8)
    tokens = client.completions.create(model="repeater", prompt=[[5, 6], [7]])
    assert [choice.text for choice in tokens.choices] == ["5 6", "7"]
    assert [given.prompt for given in openai_server.repeater.received[-2:]] == [(5, 6), (7,)]
    assert openai_server.repeater.received[-1].sampling.max_tokens == 16
    assert client.completions.create(model="repeater", prompt=[5, 6]).choices[0].text == "5 6"


def test_completions_streamed(client: OpenAI) -> None:
    texts = ["", ""]
    reasons = {}
    stream = client.completions.create(model="repeater", prompt=["a b", "c d"], stream=True, echo=True)
    for chunk in stream:
        for choice in chunk.choices:
            texts[choice.index] += choice.text
            if choice.finish_reason:
                reasons[choice.index] = choice.finish_reason
    assert texts == ["a ba b", "c dc d"]
    assert reasons == {0: "stop", 1: "stop"}


def test_logprobs_of_a_completion(client: OpenAI) -> None:
    answer = client.completions.create(model="repeater", prompt="ab cd", logprobs=1)
    logprobs = answer.choices[0].logprobs
    assert logprobs is not None
    assert (logprobs.tokens, logprobs.text_offset, logprobs.token_logprobs) == (["ab", " cd"], [0, 2], [-0.5, -0.5])
    assert logprobs.top_logprobs == [{"t0": -0.5}, {"t0": -0.5}]
    offsets = []
    for chunk in client.completions.create(model="repeater", prompt="ab cd", logprobs=0, stream=True):
        if chunk.choices[0].logprobs:
            offsets += chunk.choices[0].logprobs.text_offset or []
    assert offsets == [0, 2]


def test_embeddings(client: OpenAI, openai_server: OpenAiServer) -> None:
    answer = client.embeddings.create(model="letters", input=["abba", "dad a", "c"])
    assert [each.embedding for each in answer.data] == [
        [2.0, 2.0, 0.0, 0.0],
        [2.0, 0.0, 0.0, 2.0],
        [0.0, 0.0, 1.0, 0.0],
    ]
    assert [each.index for each in answer.data] == [0, 1, 2]
    assert (answer.usage.prompt_tokens, answer.usage.total_tokens) == (4, 4)
    plain = client.embeddings.create(model="letters", input="abc", encoding_format="float", dimensions=4)
    assert plain.data[0].embedding == [1.0, 1.0, 1.0, 0.0]
    openai_server.letters.rows.clear()
    many = client.embeddings.create(model="letters", input=["a" * (1 + i % 7) for i in range(200)])
    assert [each.embedding[0] for each in many.data] == [1.0 + i % 7 for i in range(200)]
    assert max(openai_server.letters.rows) > 1


def test_models(client: OpenAI) -> None:
    listed = {model.id: model for model in client.models.list()}
    assert set(listed) == {"repeater", "pirate", "poet", "llama", "mistral", "thinker", "odd", "elsewhere", "letters"}
    model = client.models.retrieve("repeater")
    assert (model.id, model.object, model.owned_by) == ("repeater", "model", "headrace")
    assert model.created > 1_700_000_000
    assert model.created == listed["repeater"].created
    assert model.max_model_len == 512  # type: ignore[attr-defined]
    assert client.models.retrieve("pirate").parent == "repeater"  # type: ignore[attr-defined]
    with pytest.raises(openai.NotFoundError) as refused:
        client.models.retrieve("nobody")
    assert refused.value.code == "model_not_found"


def test_an_adapter_is_its_model_with_an_adapter(client: OpenAI, openai_server: OpenAiServer) -> None:
    answer = client.chat.completions.create(model="pirate", messages=SAY)  # type: ignore[arg-type]
    assert answer.model == "pirate"
    assert openai_server.repeater.received[-1].adapter == "pirate"
    client.completions.create(model="repeater", prompt="a")
    assert openai_server.repeater.received[-1].adapter == ""


def test_errors_are_the_clients_own(client: OpenAI) -> None:
    with pytest.raises(openai.NotFoundError, match="does not exist") as unknown:
        client.chat.completions.create(model="nobody", messages=SAY)  # type: ignore[arg-type]
    assert (unknown.value.code, unknown.value.param) == ("model_not_found", "model")
    with pytest.raises(openai.BadRequestError) as wrong:
        client.chat.completions.create(model="repeater", messages=SAY, temperature=3)  # type: ignore[arg-type]
    assert (wrong.value.param, wrong.value.type) == ("temperature", "invalid_request_error")
    with pytest.raises(openai.InternalServerError) as busy:
        client.chat.completions.create(model="repeater", messages=[{"role": "user", "content": "BUSY"}])
    assert (busy.value.status_code, busy.value.response.headers["retry-after"]) == (503, "7")
    with pytest.raises(openai.BadRequestError, match="too long"):
        client.embeddings.create(model="letters", input=["fine", "refuse"])


def test_an_error_in_a_stream(client: OpenAI) -> None:
    texts = []
    stream = client.chat.completions.create(
        model="repeater", messages=[{"role": "user", "content": "one two BREAK three"}], stream=True
    )
    with pytest.raises(openai.APIError, match="the model broke"):
        for chunk in stream:
            texts.append(chunk.choices[0].delta.content)  # noqa: PERF401  # those before the error count
    assert texts == ["", "one", " two"]
    with pytest.raises(openai.BadRequestError):  # before the first byte it has a status
        client.chat.completions.create(model="repeater", messages=[{"role": "user", "content": "REFUSE"}], stream=True)


def test_many_streams_of_the_asynchronous_client(openai_server: OpenAiServer) -> None:
    async def one(client: AsyncOpenAI, number: int) -> str:
        stream = await client.chat.completions.create(
            model="repeater",
            messages=[{"role": "user", "content": " ".join(f"{number}.{word}" for word in range(20))}],
            stream=True,
        )
        return "".join([chunk.choices[0].delta.content or "" async for chunk in stream])

    async def all_of_them() -> list[str]:
        url = f"http://127.0.0.1:{openai_server.port}/v1"
        async with AsyncOpenAI(base_url=url, api_key="none", max_retries=0, timeout=60) as client:
            return await asyncio.gather(*(one(client, number) for number in range(16)))

    texts = asyncio.run(all_of_them())
    assert texts == [" ".join(f"{number}.{word}" for word in range(20)) for number in range(16)]


class Answer(BaseModel):
    """What a client wants to read."""

    name: str
    count: int


def test_an_answer_as_an_object_of_the_clients(client: OpenAI, openai_server: OpenAiServer) -> None:
    messages: Any = [{"role": "user", "content": '{"name": "x", "count": 3}'}]
    answer = client.chat.completions.parse(model="repeater", messages=messages, response_format=Answer)
    assert answer.choices[0].message.parsed == Answer(name="x", count=3)
    held_to = openai_server.repeater.received[-1].output_format
    assert held_to is not None
    assert held_to.schema is not None
    assert set(held_to.schema["properties"]) == {"name", "count"}


def test_the_clients_own_way_to_follow_a_stream(client: OpenAI) -> None:
    tool: Any = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
    text = 'See: <tool_call>{"name": "f", "arguments": {"a": 1}}</tool_call>'
    messages: Any = [{"role": "user", "content": text}]
    with client.chat.completions.stream(model="repeater", messages=messages, tools=[tool]) as stream:
        kinds = {event.type for event in stream}
        final = stream.get_final_completion()
    assert {"content.delta", "tool_calls.function.arguments.done"} <= kinds
    assert final.choices[0].message.content == "See:"
    calls = final.choices[0].message.tool_calls
    assert calls is not None
    assert (calls[0].function.name, calls[0].function.arguments) == ("f", '{"a": 1}')  # as the model wrote it
