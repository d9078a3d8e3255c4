# SPDX-License-Identifier: Apache-2.0
"""OpenAI's own client and a real, if tiny, model of the backend `llm`: random weights, so what it says is only compared."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from contextlib import closing
from http.client import HTTPConnection
from typing import Any

import anthropic
import openai
import pytest
from anthropic import Anthropic
from openai import AsyncOpenAI, OpenAI
from tiny_model_server import served

from support.llm_models import tiny_llama
from support.serving import Serving

CONFIG = """
backend: "llm"
parameters { key: "max_model_len" value { string_value: "1024" } }
parameters { key: "kv_cache_bytes" value { string_value: "8388608" } }
instance_group [ { kind: KIND_CPU } ]
"""
HELLO: Any = [{"role": "system", "content": "be brief"}, {"role": "user", "content": "the quick brown fox"}]
TOOL: Any = {
    "type": "function",
    "function": {
        "name": "weather",
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


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Serving]:
    folder = tmp_path_factory.mktemp("models")
    tiny_llama(folder / "tiny" / "1")
    (folder / "tiny" / "config.pbtxt").write_text(CONFIG)
    with served(folder) as running:
        yield running


@pytest.fixture(scope="module")
def thinking(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Serving]:
    folder = tmp_path_factory.mktemp("models")
    tiny_llama(folder / "thinker" / "1")
    template = folder / "thinker" / "1" / "chat_template.jinja"
    template.write_text(template.read_text() + "{{ '<think>\\n' }}")
    (folder / "thinker" / "config.pbtxt").write_text(CONFIG)
    with served(folder) as running:
        yield running


@pytest.fixture(scope="module")
def thinker(thinking: Serving) -> Iterator[OpenAI]:
    with OpenAI(base_url=f"http://127.0.0.1:{thinking.port}/v1", api_key="none", max_retries=0, timeout=60) as made:
        yield made


@pytest.fixture(scope="module")
def openai_client(tiny: Serving) -> Iterator[OpenAI]:
    with OpenAI(base_url=f"http://127.0.0.1:{tiny.port}/v1", api_key="none", max_retries=0, timeout=60) as made:
        yield made


def test_a_stream_says_what_a_whole_answer_says(openai_client: OpenAI) -> None:
    whole = openai_client.chat.completions.create(model="tiny", messages=HELLO, max_tokens=24, temperature=0)
    chunks = list(
        openai_client.chat.completions.create(
            model="tiny",
            messages=HELLO,
            max_tokens=24,
            temperature=0,
            stream=True,
            stream_options={"include_usage": True},
        )
    )
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert text == whole.choices[0].message.content
    assert text
    assert whole.usage is not None
    used = chunks[-1].usage
    assert used is not None
    assert used.completion_tokens == whole.usage.completion_tokens
    assert used.prompt_tokens == whole.usage.prompt_tokens > 4
    assert [chunk.choices[0].finish_reason for chunk in chunks[:-1]][-1] == whole.choices[0].finish_reason


def test_choices_seeds_and_logprobs(openai_client: OpenAI) -> None:
    def texts(**more: Any) -> list[str]:
        answer = openai_client.completions.create(model="tiny", prompt=["the river", "a mill"], max_tokens=8, **more)
        return [choice.text for choice in answer.choices]

    first = texts(n=2, seed=5)
    assert len(first) == 4
    assert texts(n=2, seed=5) == first
    answer = openai_client.chat.completions.create(
        model="tiny", messages=HELLO, max_tokens=4, temperature=0, logprobs=True, top_logprobs=3
    )
    logprobs = answer.choices[0].logprobs
    assert logprobs is not None
    assert logprobs.content is not None
    assert len(logprobs.content) == 4
    assert all(each.top_logprobs[0].logprob == each.logprob for each in logprobs.content)  # greedy: the likeliest


@pytest.mark.parametrize("stream", [False, True])
def test_calls_that_must_be_made_are_right(openai_client: OpenAI, stream: bool) -> None:
    choice: Any = {"type": "function", "function": {"name": "weather"}}
    more: Any = {"model": "tiny", "messages": HELLO, "tools": [TOOL], "max_tokens": 700, "seed": 3}
    for tool_choice in (choice, "required"):
        asking: Any = {**more, "tool_choice": tool_choice, "parallel_tool_calls": False}
        name, arguments, reason = "", "", ""
        if stream:
            for chunk in openai_client.chat.completions.create(**asking, stream=True):
                for call in chunk.choices[0].delta.tool_calls or []:
                    name += call.function.name or ""
                    arguments += call.function.arguments
                reason = chunk.choices[0].finish_reason or reason
        else:
            answer = openai_client.chat.completions.create(**asking).choices[0]
            assert answer.message.tool_calls
            name = answer.message.tool_calls[0].function.name
            arguments = answer.message.tool_calls[0].function.arguments
            reason = answer.finish_reason
        assert (name, reason) == ("weather", "tool_calls")
        assert set(json.loads(arguments)) == {"town", "days"}


def test_a_schema_is_followed(openai_client: OpenAI) -> None:
    schema = {
        "type": "object",
        "properties": {"ok": {"type": "boolean"}},
        "required": ["ok"],
        "additionalProperties": False,
    }
    wanted: Any = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
    answer = openai_client.chat.completions.create(model="tiny", messages=HELLO, max_tokens=60, response_format=wanted)
    assert set(json.loads(answer.choices[0].message.content or "")) == {"ok"}


def test_what_the_model_refuses(openai_client: OpenAI) -> None:
    with pytest.raises(openai.BadRequestError, match="1024"):
        openai_client.completions.create(model="tiny", prompt="word " * 3000)
    with pytest.raises(openai.BadRequestError, match="logit_bias"):
        openai_client.chat.completions.create(model="tiny", messages=HELLO, logit_bias={"100000": 1})
    with pytest.raises(openai.BadRequestError):
        openai_client.completions.create(model="tiny", prompt=[99999])
    assert {model.id for model in openai_client.models.list()} == {"tiny"}


def test_sixteen_streams_at_once(tiny: Serving, openai_client: OpenAI) -> None:
    prompts = [f"requests join and leave {number}" for number in range(16)]
    alone = [
        openai_client.completions.create(model="tiny", prompt=prompt, max_tokens=12, temperature=0).choices[0].text
        for prompt in prompts
    ]

    async def one(client: AsyncOpenAI, prompt: str) -> str:
        stream = await client.completions.create(model="tiny", prompt=prompt, max_tokens=12, temperature=0, stream=True)
        return "".join([chunk.choices[0].text async for chunk in stream])

    async def all_of_them() -> list[str]:
        url = f"http://127.0.0.1:{tiny.port}/v1"
        async with AsyncOpenAI(base_url=url, api_key="none", max_retries=0, timeout=60) as client:
            return await asyncio.gather(*(one(client, prompt) for prompt in prompts))

    assert asyncio.run(all_of_them()) == alone


def post(tiny: Serving, path: str, body: Any) -> tuple[int, Any]:
    with closing(HTTPConnection("127.0.0.1", tiny.port, timeout=60)) as connection:
        connection.request("POST", path, json.dumps(body))
        response = connection.getresponse()
        return response.status, json.loads(response.read())


def test_a_text_is_tokenized_and_its_tokens_are_that_text(tiny: Serving, openai_client: OpenAI) -> None:
    status, found = post(tiny, "/tokenize", {"model": "tiny", "prompt": "the river", "return_token_strs": True})
    assert status == 200
    assert found["count"] == len(found["tokens"]) == len(found["token_strs"]) > 1
    assert found["max_model_len"] == 1024
    plain = post(tiny, "/tokenize", {"prompt": "the river", "add_special_tokens": False})[1]
    assert plain["token_strs"] is None
    assert "".join(found["token_strs"]).endswith("the river")
    assert post(tiny, "/detokenize", {"model": "tiny", "tokens": plain["tokens"]}) == (200, {"prompt": "the river"})
    assert post(tiny, "/detokenize", {"tokens": []}) == (200, {"prompt": ""})
    usage = openai_client.completions.create(model="tiny", prompt="the river", max_tokens=1).usage
    assert usage is not None and usage.prompt_tokens == found["count"]


def test_messages_are_tokenized_as_a_chat_counts_them(tiny: Serving, openai_client: OpenAI) -> None:
    status, found = post(tiny, "/tokenize", {"model": "tiny", "messages": HELLO})
    usage = openai_client.chat.completions.create(model="tiny", messages=HELLO, max_tokens=1).usage
    assert status == 200 and usage is not None
    assert found["count"] == usage.prompt_tokens
    more = post(tiny, "/tokenize", {"messages": HELLO, "tools": [TOOL], "add_generation_prompt": False})
    assert more[0] == 200


def test_the_messages_api_with_a_real_model(tiny: Serving, openai_client: OpenAI) -> None:
    """The same text as a chat; a stop sequence is named; tokens are counted as they are used."""
    chat = openai_client.chat.completions.create(model="tiny", messages=HELLO, max_tokens=24, temperature=0, seed=1)
    text = chat.choices[0].message.content or ""
    with Anthropic(base_url=f"http://127.0.0.1:{tiny.port}", api_key="none", max_retries=0) as client:
        said: Any = {"model": "tiny", "system": HELLO[0]["content"], "messages": HELLO[1:]}
        more: Any = {**said, "max_tokens": 24, "extra_body": {"temperature": 0}}
        message = client.messages.create(**more)
        assert message.content[0].text == text  # type: ignore[union-attr]
        cut = text[4:7]
        with client.messages.stream(**more, stop_sequences=[cut]) as stream:
            stopped = stream.get_final_message()
        assert (stopped.stop_reason, stopped.stop_sequence) == ("stop_sequence", cut)
        assert stopped.content[0].text == text[: text.index(cut)]  # type: ignore[union-attr]
        usage = message.usage
        used = usage.input_tokens + (usage.cache_read_input_tokens or 0)
        assert client.messages.count_tokens(**said).input_tokens == used
        tool: Any = {"name": "weather", "input_schema": TOOL["function"]["parameters"]}
        choice: Any = {"type": "tool", "name": "weather"}
        call = client.messages.create(**{**more, "max_tokens": 200}, tools=[tool], tool_choice=choice)
        assert call.stop_reason == "tool_use"
        assert call.content[0].input["town"] in ("Delft", "Rome")  # type: ignore[union-attr,operator,index]
        tool["input_schema"] = {"type": "nonsense"}
        with pytest.raises(anthropic.BadRequestError, match=r"tools\[0\]\.input_schema"):
            client.messages.create(**more, tools=[tool], tool_choice=choice)
        output: Any = {"format": {"type": "json_schema", "schema": {"type": "nonsense"}}}
        with pytest.raises(anthropic.BadRequestError, match=r"output_config\.format"):
            client.messages.create(**more, output_config=output)
        with pytest.raises(anthropic.BadRequestError, match="max_tokens|messages"):
            client.messages.create(**{**more, "messages": [{"role": "user", "content": "river " * 3000}]})


Turn = tuple[str, int, int]
"""The answer's text, prompt tokens, and how many of them came from the prefix cache."""


def chat_turn(port: int, said: list[Any]) -> Turn:
    with OpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key="none", max_retries=0) as client:
        answer: Any = client.chat.completions.create(model="tiny", messages=said, max_tokens=8, temperature=0)
    usage = answer.usage
    return answer.choices[0].message.content, usage.prompt_tokens, usage.prompt_tokens_details.cached_tokens


def responses_turn(port: int, said: list[Any]) -> Turn:
    with OpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key="none", max_retries=0) as client:
        given: Any = {"model": "tiny", "input": said, "max_output_tokens": 8, "temperature": 0}
        events: Any = list(client.responses.create(**given, stream=True))
    answer = events[-1].response
    return answer.output_text, answer.usage.input_tokens, answer.usage.input_tokens_details.cached_tokens


def messages_turn(port: int, said: list[Any]) -> Turn:
    with Anthropic(base_url=f"http://127.0.0.1:{port}", api_key="none", max_retries=0) as client:
        given: Any = {"model": "tiny", "messages": said, "max_tokens": 8}
        answer: Any = client.messages.create(**given, extra_body={"temperature": 0})
    usage = answer.usage
    cached = usage.cache_read_input_tokens
    return answer.content[0].text, usage.input_tokens + cached, cached


@pytest.mark.parametrize("first", [chat_turn, responses_turn, messages_turn])
@pytest.mark.parametrize("second", [chat_turn, responses_turn, messages_turn])
def test_the_next_turn_reuses_its_prefix_whatever_api_it_comes_by(tiny: Serving, first: Any, second: Any) -> None:
    messages: list[Any] = [
        {"role": "user", "content": f"{first.__name__} then {second.__name__}: the river " + "runs " * 60}
    ]
    text, prompt, cached = first(tiny.port, messages)
    assert cached < 32 < prompt
    messages += [{"role": "assistant", "content": text}, {"role": "user", "content": "and then?"}]
    _, longer, reused = second(tiny.port, messages)
    assert longer > prompt
    assert prompt - 32 <= reused < longer, "all full pages of the first prompt"


IMAGE: Any = {"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:,"}}]}


@pytest.mark.parametrize(
    ("path", "body", "status", "message"),
    [
        ("/tokenize", {}, 400, "prompt: must be a string; or send 'messages'"),
        ("/tokenize", {"prompt": ["a"]}, 400, "prompt: must be a string"),
        ("/tokenize", {"prompt": "a", "messages": HELLO}, 400, "prompt: cannot be combined with 'messages'"),
        ("/tokenize", {"messages": [IMAGE]}, 400, "cannot be tokenized"),
        ("/tokenize", {"model": "nobody", "prompt": "a"}, 404, "does not exist"),
        ("/tokenize", {"prompt": "a", "add_special_tokens": 3}, 400, "add_special_tokens: must be true or false"),
        ("/tokenize", {"prompt": "\ud800"}, 400, "the body is not JSON"),
        ("/detokenize", {}, 400, "tokens: is missing"),
        ("/detokenize", {"tokens": [-1]}, 400, "tokens"),
        ("/detokenize", {"tokens": [10**9]}, 400, "tokens"),
        ("/detokenize", {"tokens": [10**9] * 2000}, 400, "tokens"),
        ("/detokenize", {"tokens": ["a"]}, 400, "tokens"),
    ],
)
def test_what_cannot_be_tokenized(tiny: Serving, path: str, body: Any, status: int, message: str) -> None:
    found, answer = post(tiny, path, body)
    assert found == status
    assert message in answer["error"]["message"]


def test_a_model_is_its_own_root(openai_client: OpenAI) -> None:
    assert openai_client.models.retrieve("tiny").model_dump()["root"] == "tiny"


@pytest.mark.parametrize("stream", [False, True])
def test_a_model_that_thinks_first(thinker: OpenAI, thinking: Serving, stream: bool) -> None:
    """Its template says in which format, and opens the reasoning. A pattern holds it to what it says."""
    with closing(HTTPConnection("127.0.0.1", thinking.port, timeout=60)) as connection:
        connection.request("GET", "/v2/models/thinker/config")
        parameters = json.loads(connection.getresponse().read())["parameters"]
    assert parameters["reasoning_format"] == {"string_value": "think"}
    assert parameters["tool_format"] == {"string_value": "hermes"}
    call = '<tool_call>\\{"name": "weather", "arguments": \\{"town": "Rome", "days": 1\\}\\}</tool_call>'
    words: dict[str, Any] = {"guided_regex": f"Let me see\\.\\n</think>\\n\\nI look it up\\. {call}"}
    given: dict[str, Any] = {"model": "thinker", "messages": HELLO, "tools": [TOOL], "extra_body": words}
    if stream:
        reasoning, content, arguments, usage = "", "", "", None
        for chunk in thinker.chat.completions.create(**given, stream=True, stream_options={"include_usage": True}):
            usage = chunk.usage or usage
            for choice in chunk.choices:
                reasoning += getattr(choice.delta, "reasoning_content", None) or ""
                content += choice.delta.content or ""
                arguments += "".join(call.function.arguments for call in choice.delta.tool_calls or [])
    else:
        whole = thinker.chat.completions.create(**given)
        message, usage = whole.choices[0].message, whole.usage
        reasoning, content = message.reasoning_content, message.content
        arguments = message.tool_calls[0].function.arguments
    assert (reasoning, content) == ("Let me see.", "I look it up.")
    assert json.loads(arguments) == {"town": "Rome", "days": 1}
    assert 0 < usage.completion_tokens_details.reasoning_tokens < usage.completion_tokens


def test_reasoning_that_is_cut_off_is_reasoning(thinker: OpenAI) -> None:
    words = {"guided_regex": "Let me see\\. </think>"}
    whole = thinker.chat.completions.create(model="thinker", messages=HELLO, max_tokens=3, extra_body=words)
    message, usage = whole.choices[0].message, whole.usage
    assert usage is not None and usage.completion_tokens_details is not None
    assert message.content == "" and "Let me see.".startswith(message.reasoning_content)  # type: ignore[attr-defined]
    assert whole.choices[0].finish_reason == "length"
    assert usage.completion_tokens_details.reasoning_tokens == usage.completion_tokens == 3
