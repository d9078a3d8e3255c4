# SPDX-License-Identifier: Apache-2.0
"""Anthropic's own client against `/v1/messages` and `/v1/messages/count_tokens`."""

from __future__ import annotations

import io
import json
import socket
import time
from base64 import b64encode
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import anthropic
import pydantic
import pytest
from anthropic import Anthropic
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from openai_server import OpenAiServer, openai_server_with_models
from PIL import Image

from headrace.api.access.api_keys import create_key
from headrace.api.access.settings import AccessSettings, RateLimit, RateLimits
from headrace.api.openai.errors import BadRequest
from headrace.api.openai.message_errors import error_json, with_client_path
from headrace.api.openai.settings import OpenAiSettings
from headrace.core import errors
from headrace.core.clock import SystemClock
from headrace.core.generation import OutputFormat
from headrace.core.telemetry.metrics import Registry
from headrace.models.media.reader import MediaReader
from headrace.models.media.settings import MediaSettings
from headrace.net.http.routes import Routes
from headrace.programs.serve.access_guard import Middleware, open_guard
from support.properties import examples
from support.waiting import eventually

PATH = "/v1/messages"
USER: Any = {"role": "user", "content": "one two three"}
WEATHER: Any = {
    "name": "weather",
    "description": "Return the weather of a town.",
    "input_schema": {"type": "object", "properties": {"town": {"type": "string"}}, "required": ["town"]},
}
CALL = '<tool_call>{"name": "weather", "arguments": {"town": "Delft"}}</tool_call>'


def client_of(port: int, key: str = "none") -> Anthropic:
    return Anthropic(base_url=f"http://127.0.0.1:{port}", api_key=key, max_retries=0, timeout=60)


@pytest.fixture
def claude(openai_server: OpenAiServer) -> Iterator[Anthropic]:
    with client_of(openai_server.port) as client:
        yield client


def say(text: Any) -> Any:
    """A conversation of one message, which the model repeats."""
    return [{"role": "user", "content": text}]


def body(**more: Any) -> dict[str, Any]:
    return {"model": "repeater", "max_tokens": 64, "messages": [USER], **more}


# Responses


def test_a_message(claude: Anthropic) -> None:
    message = claude.messages.create(model="repeater", max_tokens=64, messages=[USER])
    assert message.id.startswith("msg_")
    assert (message.type, message.role, message.model) == ("message", "assistant", "repeater")
    assert [(block.type, block.text) for block in message.content if block.type == "text"] == [
        ("text", "one two three")
    ]
    assert len(message.content) == 1
    assert (message.stop_reason, message.stop_sequence) == ("end_turn", None)
    usage = message.usage
    # The prompt has 3 tokens; one of them is from the cache.
    assert (usage.input_tokens, usage.cache_read_input_tokens, usage.cache_creation_input_tokens) == (2, 1, 0)
    assert usage.output_tokens == 3
    assert message._request_id


def test_the_events_of_a_stream(claude: Anthropic) -> None:
    events = list(
        claude.messages.create(model="repeater", max_tokens=64, messages=say('one "two"\n drei\u00df'), stream=True)
    )
    kinds = ["message_start", "content_block_start", *["content_block_delta"] * 3, "content_block_stop"]
    assert [event.type for event in events] == [*kinds, "message_delta", "message_stop"]
    start, opened, *deltas = events[:5]
    assert start.type == "message_start"
    assert (start.message.content, start.message.stop_reason, start.message.usage.input_tokens) == ([], None, 0)
    assert opened.type == "content_block_start"
    assert (opened.index, opened.content_block.type) == (0, "text")
    texts = [
        delta.delta.text for delta in deltas if delta.type == "content_block_delta" and delta.delta.type == "text_delta"
    ]
    assert texts == ["one", ' "two"', "\n drei\u00df"]
    last = events[-2]
    assert last.type == "message_delta"
    assert last.delta.stop_reason == "end_turn"
    assert (last.usage.input_tokens, last.usage.cache_read_input_tokens, last.usage.output_tokens) == (2, 1, 3)


def test_a_stream_collected_by_the_client(claude: Anthropic) -> None:
    with claude.messages.stream(model="repeater", max_tokens=64, messages=[USER]) as stream:
        assert list(stream.text_stream) == ["one", " two", " three"]
        message = stream.get_final_message()
    assert stream.response.headers["request-id"]
    assert (message.stop_reason, message.usage.input_tokens, message.usage.output_tokens) == ("end_turn", 2, 3)


def test_the_lines_of_a_stream(openai_server: OpenAiServer) -> None:
    status, raw, headers = openai_server.ask(PATH, body(stream=True, max_tokens=1), headers={"x-request-id": "mine"})
    assert (status, headers["request-id"]) == (200, "mine")
    events = [event.split(b"\n") for event in raw.strip().split(b"\n\n")]
    assert all(len(lines) == 2 for lines in events)
    for name, data in events:
        assert name == b"event: " + json.loads(data.removeprefix(b"data: "))["type"].encode()
    assert b"[DONE]" not in raw


def test_an_answer_without_text(claude: Anthropic) -> None:
    assert claude.messages.create(model="repeater", max_tokens=64, messages=say("")).content == []
    with claude.messages.stream(model="repeater", max_tokens=64, messages=say("")) as stream:
        message = stream.get_final_message()
    assert (message.content, message.stop_reason) == ([], "end_turn")


@pytest.mark.parametrize("stream", [False, True])
def test_why_an_answer_ends(claude: Anthropic, stream: bool) -> None:
    def answer(**more: Any) -> Any:
        if not stream:
            return claude.messages.create(**body(**more))
        with claude.messages.stream(**body(**more)) as events:
            return events.get_final_message()

    cut = answer(max_tokens=2)
    assert (cut.content[0].text, cut.stop_reason, cut.stop_sequence) == ("one two", "max_tokens", None)
    stopped = answer(stop_sequences=["four", "thr"])
    assert (stopped.content[0].text, stopped.stop_reason, stopped.stop_sequence) == ("one two", "stop_sequence", "thr")
    ended = answer(stop_sequences=["four"])
    assert (ended.stop_reason, ended.stop_sequence) == ("end_turn", None)


# Requests


def test_what_a_model_is_told(claude: Anthropic, openai_server: OpenAiServer) -> None:
    claude.messages.create(
        model="pirate",
        max_tokens=7,
        system=[{"type": "text", "text": "Be brief."}, {"type": "text", "text": "Rhyme."}],
        messages=[USER],
        stop_sequences=["END"],
        thinking={"type": "enabled", "budget_tokens": 1024},
        metadata={"user_id": "me"},
        service_tier="auto",
        extra_body={"temperature": 0.5, "top_p": 0.9, "top_k": 5, "never_heard_of": [1]},
        extra_headers={"anthropic-beta": "something-2030-01-01"},
    )
    given = openai_server.repeater.received[-1]
    sampling = given.sampling
    assert (sampling.max_tokens, sampling.temperature, sampling.top_p, sampling.top_k) == (7, 0.5, 0.9, 5)
    assert (sampling.stop, given.adapter) == (("END",), "pirate")
    assert given.template_arguments == {"enable_thinking": True}
    assert given.messages == ({"role": "system", "content": "Be brief.\nRhyme."}, USER)
    claude.messages.create(
        model="repeater", max_tokens=7, system="Be brief.", messages=[USER], thinking={"type": "disabled"}
    )
    given = openai_server.repeater.received[-1]
    assert given.messages[0] == {"role": "system", "content": "Be brief."}
    assert given.template_arguments == {"enable_thinking": False}
    claude.messages.create(model="repeater", max_tokens=7, messages=[USER], system=[])
    given = openai_server.repeater.received[-1]
    assert (given.messages, given.template_arguments) == ((USER,), {})


def test_consecutive_messages_of_a_role_are_one_turn(claude: Anthropic, openai_server: OpenAiServer) -> None:
    conversation: Any = [
        {"role": "user", "content": "a"},
        {"role": "user", "content": [{"type": "text", "text": "b", "cache_control": {"type": "ephemeral"}}]},
        {
            "role": "assistant",
            "content": [
                {"type": "thinking", "thinking": "hm", "signature": "x"},
                {"type": "redacted_thinking", "data": "secret"},
                {"type": "text", "text": "c"},
            ],
        },
        {"role": "assistant", "content": "d"},
        {"role": "system", "content": "e"},
        {"role": "user", "content": "f"},
    ]
    claude.messages.create(model="repeater", max_tokens=9, messages=conversation)
    assert openai_server.repeater.received[-1].messages == (
        {"role": "user", "content": "a\nb"},
        {"role": "assistant", "content": "c\nd", "reasoning_content": "hm"},
        {"role": "system", "content": "e"},
        {"role": "user", "content": "f"},
    )


def test_a_json_schema_for_the_answer(claude: Anthropic, openai_server: OpenAiServer) -> None:
    schema = {"type": "object", "properties": {"wet": {"type": "boolean"}}}
    message = claude.messages.create(
        model="repeater",
        max_tokens=9,
        messages=say('{"wet":true}'),
        output_config={"format": {"type": "json_schema", "schema": schema}},
    )
    assert message.stop_reason == "end_turn"
    assert openai_server.repeater.received[-1].output_format == OutputFormat("json_schema", schema)


# Tools


@pytest.mark.parametrize("stream", [False, True])
def test_a_loop_with_tools(claude: Anthropic, openai_server: OpenAiServer, stream: bool) -> None:
    """The client runs the tool that the model calls, and sends the result."""

    def answer(messages: Any) -> Any:
        more: Any = {"model": "repeater", "max_tokens": 64, "messages": messages, "tools": [WEATHER]}
        if not stream:
            return claude.messages.create(**more)
        with claude.messages.stream(**more) as events:
            return events.get_final_message()

    conversation = say(f"I look. {CALL}")
    message = answer(conversation)
    text, call = message.content
    assert (message.stop_reason, text.text) == ("tool_use", "I look.")
    assert (call.type, call.name, call.input) == ("tool_use", "weather", {"town": "Delft"})
    assert call.id
    result = {"type": "tool_result", "tool_use_id": call.id, "content": [{"type": "text", "text": "rain"}]}
    conversation += [
        {"role": "assistant", "content": message.content},
        {"role": "user", "content": [{"type": "text", "text": "And now?"}, result]},
    ]
    final = answer(conversation)
    assert (final.stop_reason, final.content[0].text) == ("end_turn", "And now?")
    given = openai_server.repeater.received[-1]
    function = {"name": "weather", "arguments": {"town": "Delft"}}
    assert given.messages[1:] == (
        {
            "role": "assistant",
            "content": "I look.",
            "tool_calls": [{"id": call.id, "type": "function", "function": function}],
        },
        {"role": "tool", "content": "rain", "tool_call_id": call.id},
        {"role": "user", "content": "And now?"},
    )
    (tool,) = given.tools
    assert tool["function"] == {
        "name": "weather",
        "description": "Return the weather of a town.",
        "parameters": WEATHER["input_schema"],
    }


def test_the_tool_runner_of_the_client(claude: Anthropic, openai_server: OpenAiServer) -> None:
    """It asks the server to keep the conversation; when that is refused, it sends the whole conversation each time."""

    @anthropic.beta_tool
    def weather(town: str) -> str:
        """Return the weather of a town."""
        return f"rain in {town}"

    runner = claude.beta.messages.tool_runner(
        model="repeater", max_tokens=64, tools=[weather], max_iterations=2, messages=say(CALL)
    )
    assert [message.stop_reason for message in runner] == ["tool_use", "tool_use"]
    told = openai_server.repeater.received[-1].messages
    assert [message["role"] for message in told] == ["user", "assistant", "tool"]
    assert told[-1]["content"] == "rain in Delft"


def test_the_client_parses_an_answer_into_a_class(claude: Anthropic) -> None:
    class Water(pydantic.BaseModel):
        wet: bool

    answer = claude.messages.parse(model="repeater", max_tokens=9, messages=say('{"wet":true}'), output_format=Water)
    assert answer.parsed_output == Water(wet=True)


def test_two_calls_are_two_blocks_with_their_own_input(claude: Anthropic) -> None:
    second = CALL.replace("Delft", "Rome")
    more: Any = {"model": "repeater", "max_tokens": 64, "messages": say(CALL + second), "tools": [WEATHER]}
    with claude.messages.stream(**more) as events:
        streamed = events.get_final_message()
    for message in (streamed, claude.messages.create(**more)):
        assert [block.input["town"] for block in message.content if block.type == "tool_use"] == ["Delft", "Rome"]
        assert len({block.id for block in message.content if block.type == "tool_use"}) == 2


def test_results_that_are_errors_or_empty(claude: Anthropic, openai_server: OpenAiServer) -> None:
    call = {"type": "tool_use", "id": "toolu_1", "name": "weather", "input": {}}
    failed = {"type": "tool_result", "tool_use_id": "toolu_1", "content": "no such town", "is_error": True}
    empty = {"type": "tool_result", "tool_use_id": "toolu_2"}
    conversation: Any = [
        USER,
        {"role": "assistant", "content": [call, {**call, "id": "toolu_2"}]},
        {"role": "user", "content": [failed, empty]},
    ]
    claude.messages.create(model="repeater", max_tokens=9, messages=conversation, tools=[WEATHER])
    assert openai_server.repeater.received[-1].messages[2:] == (
        {"role": "tool", "content": "Error: no such town", "tool_call_id": "toolu_1"},
        {"role": "tool", "content": "", "tool_call_id": "toolu_2"},
    )


def test_the_choice_of_a_tool(claude: Anthropic, openai_server: OpenAiServer) -> None:
    more: Any = {"model": "repeater", "max_tokens": 64, "tools": [WEATHER]}
    arguments = '{"town":"Rome"}'
    named: Any = {"type": "tool", "name": "weather"}
    message = claude.messages.create(**more, messages=say(arguments), tool_choice=named)
    assert message.stop_reason == "tool_use"
    assert [block.input for block in message.content if block.type == "tool_use"] == [{"town": "Rome"}]
    assert openai_server.repeater.received[-1].output_format == OutputFormat("json_schema", WEATHER["input_schema"])
    with claude.messages.stream(**more, messages=say('{"town": "Rome"}'), tool_choice=named) as stream:
        partial = [event.partial_json for event in stream if event.type == "input_json"]
        assert stream.get_final_message().content[0].input == {"town": "Rome"}  # type: ignore[union-attr]
    assert partial == ['{"town":', ' "Rome"}']
    calls = f'[{{"name":"weather","arguments":{arguments}}}]'
    message = claude.messages.create(
        **more, messages=say(calls), tool_choice={"type": "any", "disable_parallel_tool_use": True}
    )
    assert message.stop_reason == "tool_use"
    required = openai_server.repeater.received[-1].output_format
    assert required is not None and required.schema is not None
    assert (required.schema["type"], required.schema["maxItems"]) == ("array", 1)
    claude.messages.create(**more, messages=say(calls), tool_choice={"type": "any"})
    required = openai_server.repeater.received[-1].output_format
    assert required is not None and required.schema is not None and required.schema["maxItems"] > 1
    message = claude.messages.create(**more, messages=say(CALL), tool_choice={"type": "none"})
    assert (message.stop_reason, openai_server.repeater.received[-1].tools) == ("end_turn", ())
    assert claude.messages.create(**more, messages=say(CALL), tool_choice={"type": "auto"}).stop_reason == "tool_use"


def test_a_call_that_the_token_limit_cuts_off(claude: Anthropic) -> None:
    """What the model wrote is not lost: whole in a stream, and as text beside the call in one document."""
    more: Any = {
        "model": "repeater",
        "max_tokens": 2,
        "messages": say('{"town": "Rome" }'),
        "tools": [WEATHER],
        "tool_choice": {"type": "tool", "name": "weather"},
    }
    message = claude.messages.create(**more)
    assert message.stop_reason == "max_tokens"
    assert [block.type for block in message.content] == ["tool_use", "text"]
    assert message.content[0].input == {}  # type: ignore[union-attr]
    assert message.content[1].text == '{"town": "Rome"'  # type: ignore[union-attr]
    with claude.messages.stream(**more) as stream:
        written = "".join(event.partial_json for event in stream if event.type == "input_json")
        assert stream.get_final_message().stop_reason == "max_tokens"
    assert written == '{"town": "Rome"'


# Thinking


def test_reasoning_is_a_thinking_block(claude: Anthropic) -> None:
    more: Any = {"model": "thinker", "max_tokens": 64, "messages": say("<think> so far </think> good.")}
    events = list(claude.messages.create(**more, stream=True))
    deltas = [event.delta.type for event in events if event.type == "content_block_delta"]
    assert deltas == ["thinking_delta", "thinking_delta", "signature_delta", "text_delta"]
    with claude.messages.stream(**more) as stream:
        streamed = stream.get_final_message()
    whole = claude.messages.create(**more)
    for message in (streamed, whole):
        thought, text = message.content
        assert thought.type == "thinking" and text.type == "text"
        assert (thought.thinking, bool(thought.signature), text.text) == ("so far", True, "good.")


def test_the_arguments_of_a_call_are_streamed_as_they_come(claude: Anthropic) -> None:
    call = '<tool_call>{"name": "weather", "arguments": {"town": "Rome", "days": 2}}</tool_call>'
    more: Any = {
        "model": "thinker",
        "max_tokens": 64,
        "tools": [WEATHER],
        "messages": say(f"<think> so </think> now {call}"),
    }
    with claude.messages.stream(**more) as stream:
        parts = [event.partial_json for event in stream if event.type == "input_json"]
        streamed = stream.get_final_message()
    assert len(parts) > 2 and json.loads("".join(parts)) == {"town": "Rome", "days": 2}
    for message in (streamed, claude.messages.create(**more)):
        assert [block.type for block in message.content] == ["thinking", "text", "tool_use"]
        assert message.content[2].input == {"town": "Rome", "days": 2}  # type: ignore[union-attr]
        assert message.stop_reason == "tool_use"
    nothing = '<tool_call>{"name": "weather"}</tool_call>'
    empty = claude.messages.create(**{**more, "messages": say(nothing)})
    assert [block.input for block in empty.content if block.type == "tool_use"] == [{}]


# Images


def picture() -> bytes:
    made = io.BytesIO()
    Image.new("RGB", (8, 6), (255, 0, 0)).save(made, "PNG")
    return made.getvalue()


def image(data: bytes, media_type: str = "image/png") -> Any:
    source = {"type": "base64", "media_type": media_type, "data": b64encode(data).decode()}
    return {"type": "image", "source": source}


def test_images(claude: Anthropic, openai_server: OpenAiServer, tmp_path: Path) -> None:
    reader = MediaReader(MediaSettings(temporary_folder=tmp_path))
    try:
        with openai_server_with_models(reader=reader) as server, client_of(server.port) as client:
            content: Any = [{"type": "text", "text": "see"}, image(picture())]
            message = client.messages.create(model="repeater", max_tokens=9, messages=say(content))
            assert message.content[0].text == "see <promptimage 6x8x3>"  # type: ignore[union-attr]
            call = {"type": "tool_use", "id": "toolu_1", "name": "look", "input": {}}
            result = {"type": "tool_result", "tool_use_id": "toolu_1", "content": [image(picture())]}
            conversation: Any = [
                USER,
                {"role": "assistant", "content": [call]},
                {"role": "user", "content": [result, {"type": "text", "text": "and?"}]},
            ]
            client.messages.create(model="repeater", max_tokens=9, messages=conversation)
            given = server.repeater.received[-1]
            assert len(given.media) == 1
            assert given.messages[2:] == (
                {"role": "tool", "content": "", "tool_call_id": "toolu_1"},
                {"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "and?"}]},
            )
            with pytest.raises(anthropic.BadRequestError, match=r"messages\[0\]\.content\[1\]\.source: "):
                client.messages.create(
                    model="repeater", max_tokens=9, messages=say([content[0], image(picture()[:40])])
                )
    finally:
        reader.close()
    url: Any = {"type": "image", "source": {"type": "url", "url": "data:3x2"}}
    message = claude.messages.create(model="repeater", max_tokens=9, messages=say([url]))
    assert message.content[0].text == "<promptimage 2x3x3>"  # type: ignore[union-attr]
    bad: Any = {"type": "image", "source": {"type": "url", "url": "data:nothing"}}
    conversation = [{"role": "user", "content": "hello"}, {"role": "user", "content": [bad]}]
    for stream in (False, True):
        with pytest.raises(
            anthropic.BadRequestError, match=r"messages\[1\]\.content\[0\]\.source: this is not an image"
        ):
            claude.messages.create(model="repeater", max_tokens=9, system="x", messages=conversation, stream=stream)


# Counting


def test_counting_tokens(claude: Anthropic, openai_server: OpenAiServer) -> None:
    count = claude.messages.count_tokens(model="repeater", messages=[USER], system="be brief", tools=[WEATHER])
    assert count.input_tokens == 5
    given = openai_server.repeater.received[-1]
    assert (given.task, len(given.tools)) == ("tokenize", 1)
    status, found, headers = openai_server.ask(f"{PATH}/count_tokens", {"model": "repeater", "messages": [USER]})
    assert (status, found) == (200, {"input_tokens": 3})
    assert headers["request-id"]
    url: Any = {"type": "image", "source": {"type": "url", "url": "data:3x2"}}
    with pytest.raises(anthropic.BadRequestError, match=r"messages\[0\]\.content\[0\]\.source: images"):
        claude.messages.count_tokens(model="repeater", messages=say([url]))
    with pytest.raises(anthropic.BadRequestError, match="no"):
        claude.messages.count_tokens(model="repeater", messages=say("REFUSE"))


# Errors


@pytest.mark.parametrize(
    ("more", "path"),
    [
        ({"model": None}, "model"),
        ({"model": "letters"}, "model"),
        ({"max_tokens": None}, "max_tokens"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"messages": None}, "messages"),
        ({"messages": []}, "messages"),
        ({"messages": [USER] * 2049}, "messages"),
        ({"messages": ["hello"]}, "messages[0]"),
        ({"messages": [{"role": "tool", "content": "x"}]}, "messages[0].role"),
        ({"messages": [{"role": ["user"], "content": "x"}]}, "messages[0].role"),
        ({"messages": [USER, {"role": "assistant", "content": "I am"}]}, "messages[1].role"),
        ({"messages": [{"role": "user"}]}, "messages[0].content"),
        ({"messages": say([])}, "messages[0].content"),
        ({"messages": say(3)}, "messages[0].content"),
        ({"messages": say(["x"])}, "messages[0].content[0]"),
        ({"messages": say([{"type": "text"}])}, "messages[0].content[0].text"),
        ({"messages": say([{"type": "document"}])}, "messages[0].content[0].type"),
        ({"messages": say([{"type": "tool_use"}])}, "messages[0].content[0].type"),
        ({"messages": say([{"text": "x"}])}, "messages[0].content[0].type"),
        ({"messages": say([{"type": ["text"]}])}, "messages[0].content[0].type"),
        ({"messages": say([{"type": "text", "text": "x"}] * 513)}, "messages[0].content"),
        ({"messages": say([{"type": "image"}])}, "messages[0].content[0].source"),
        ({"messages": say([{"type": "image", "source": {"type": "file"}}])}, "messages[0].content[0].source.type"),
        ({"messages": say([{"type": "image", "source": {"type": "url"}}])}, "messages[0].content[0].source.url"),
        (
            {"messages": say([{"type": "image", "source": {"type": "base64", "media_type": "a,b"}}])},
            "messages[0].content[0].source.media_type",
        ),
        (
            {"messages": say([{"type": "image", "source": {"type": "base64", "media_type": "image/png"}}])},
            "messages[0].content[0].source.data",
        ),
        (
            {"messages": say([{"type": "image", "source": {"type": "url", "url": "data:1x1"}}] * 33)},
            "messages[0].content[32].source",
        ),
        ({"messages": say([{"type": "tool_result"}])}, "messages[0].content[0].tool_use_id"),
        (
            {"messages": say([{"type": "tool_result", "tool_use_id": "a", "content": [{"type": "document"}]}])},
            "messages[0].content[0].content[0].type",
        ),
        (
            {"messages": [USER, {"role": "assistant", "content": [{"type": "tool_use", "id": "a"}]}, USER]},
            "messages[1].content[0].name",
        ),
        (
            {
                "messages": [
                    USER,
                    {"role": "assistant", "content": [{"type": "tool_use", "id": "a", "name": "b", "input": "c"}]},
                    USER,
                ]
            },
            "messages[1].content[0].input",
        ),
        ({"thread": {"type": "create"}}, "thread"),
        ({"mcp_servers": [{"type": "url"}]}, "mcp_servers"),
        ({"system": 3}, "system"),
        ({"system": [{"type": "image"}]}, "system[0].type"),
        ({"temperature": 3}, "temperature"),
        ({"top_p": 0}, "top_p"),
        ({"top_k": 1.5}, "top_k"),
        ({"stream": "yes"}, "stream"),
        ({"stop_sequences": "END"}, "stop_sequences"),
        ({"stop_sequences": [3]}, "stop_sequences"),
        ({"stop_sequences": ["x"] * 17}, "stop_sequences"),
        ({"thinking": "yes"}, "thinking"),
        ({"thinking": {"type": "sometimes"}}, "thinking.type"),
        ({"tools": {}}, "tools"),
        ({"tools": ["x"]}, "tools[0]"),
        ({"tools": [{"name": "a"}]}, "tools[0].input_schema"),
        ({"tools": [{**WEATHER, "name": "a b"}]}, "tools[0].name"),
        ({"tools": [{**WEATHER, "description": 3}]}, "tools[0].description"),
        ({"tools": [{**WEATHER, "strict": 3}]}, "tools[0].strict"),
        ({"tools": [WEATHER, {"type": "web_search_20250305", "name": "web_search"}]}, "tools[1].type"),
        ({"tool_choice": "any"}, "tool_choice"),
        ({"tool_choice": {"type": "some"}}, "tool_choice.type"),
        ({"tool_choice": {"type": "any"}}, "tool_choice"),
        ({"tools": [WEATHER], "tool_choice": {"type": "tool"}}, "tool_choice.name"),
        ({"tools": [WEATHER], "tool_choice": {"type": "tool", "name": "x"}}, "tool_choice"),
        ({"output_config": {"format": {"type": "xml"}}}, "output_config.format.type"),
        ({"output_config": {"format": {"type": "json_schema"}}}, "output_config.format.schema"),
        (
            {
                "output_config": {"format": {"type": "json_schema", "schema": {}}},
                "tools": [WEATHER],
                "tool_choice": {"type": "any"},
            },
            "output_config.format.type",
        ),
    ],
)
def test_wrong_requests_are_refused_by_the_clients_own_path(
    openai_server: OpenAiServer, more: dict[str, Any], path: str
) -> None:
    status, answer, headers = openai_server.ask(PATH, body(**more))
    assert (status, answer["type"], answer["error"]["type"]) == (400, "error", "invalid_request_error")
    assert answer["error"]["message"].startswith(f"{path}: ")
    assert answer["request_id"] == headers["request-id"]


def test_a_tool_of_anthropic_is_refused_by_its_name(claude: Anthropic) -> None:
    tools: Any = [{"type": "bash_20250124", "name": "bash"}]
    with pytest.raises(anthropic.BadRequestError, match=r"'bash_20250124' .* define a tool of type 'custom'"):
        claude.messages.create(model="repeater", max_tokens=9, messages=[USER], tools=tools)


def test_the_error_classes_of_the_client(claude: Anthropic, openai_server: OpenAiServer) -> None:
    with pytest.raises(anthropic.NotFoundError, match="does not exist") as found:
        claude.messages.create(model="somebody", max_tokens=9, messages=[USER])
    assert found.value.body["error"]["type"] == "not_found_error"  # type: ignore[index]
    assert found.value.request_id
    with pytest.raises(anthropic.BadRequestError, match="no"):
        claude.messages.create(model="repeater", max_tokens=9, messages=say("REFUSE"))
    with pytest.raises(anthropic.APIStatusError, match="too many wait") as busy:
        claude.messages.create(model="repeater", max_tokens=9, messages=say("BUSY"))
    assert (busy.value.status_code, busy.value.response.headers["retry-after"]) == (503, "7")
    assert busy.value.body["error"]["type"] == "overloaded_error"  # type: ignore[index]
    with pytest.raises(anthropic.InternalServerError) as crash:
        claude.messages.create(model="repeater", max_tokens=9, messages=say("CRASH"))
    assert crash.value.body["error"]["type"] == "api_error"  # type: ignore[index]
    for raw in (b"{", b"[]", b""):
        status, answer, _ = openai_server.ask(PATH, raw)
        assert (status, answer["error"]["type"]) == (400, "invalid_request_error")


@pytest.mark.parametrize(
    ("error", "status", "kind"),
    [
        (errors.InvalidArgument("x"), 400, "invalid_request_error"),
        (errors.FailedPrecondition("x"), 400, "invalid_request_error"),
        (errors.Unimplemented("x"), 400, "invalid_request_error"),
        (errors.AlreadyExists("x"), 409, "invalid_request_error"),
        (errors.Unauthenticated("x"), 401, "authentication_error"),
        (errors.PermissionDenied("x"), 403, "permission_error"),
        (errors.NotFound("x"), 404, "not_found_error"),
        (errors.TooLarge("x"), 413, "request_too_large"),
        (errors.ResourceExhausted("x"), 429, "rate_limit_error"),
        (errors.Internal("x"), 500, "api_error"),
        (errors.Unavailable("x"), 503, "overloaded_error"),
        (errors.DeadlineExceeded("x"), 504, "timeout_error"),
    ],
)
def test_every_error_has_anthropics_type(error: errors.HeadraceError, status: int, kind: str) -> None:
    found, raw = error_json(error, "some-id")
    assert (found, json.loads(raw)) == (
        status,
        {"type": "error", "error": {"type": kind, "message": "x"}, "request_id": "some-id"},
    )


def test_the_message_of_an_unexpected_exception_is_not_shown() -> None:
    status, raw = error_json(RuntimeError("secret"), "some-id")
    assert (status, json.loads(raw)["error"]["type"]) == (500, "api_error")
    assert b"secret" not in raw


def test_the_longest_known_path_is_renamed() -> None:
    paths = {"stop": "stop_sequences", "messages[1]": "messages[0]", "messages[1].content[0]": "messages[0].content[4]"}

    def path(param: str) -> str:
        renamed = with_client_path(BadRequest(param, "is wrong"), paths)
        assert isinstance(renamed, BadRequest)
        assert renamed.message == f"{renamed.param}: is wrong"
        return renamed.param

    assert path("stop") == "stop_sequences"
    assert path("messages[1].content[0].text") == "messages[0].content[4].text"
    assert path("messages[1].content[1]") == "messages[0].content[1]"
    assert path("messages[11].role") == "messages[11].role"


def test_an_error_in_a_stream(claude: Anthropic) -> None:
    with (
        claude.messages.stream(model="repeater", max_tokens=9, messages=say("one BREAK")) as stream,
        pytest.raises(anthropic.APIStatusError, match="the model broke") as broken,
    ):
        stream.until_done()
    assert broken.value.body["error"]["type"] == "overloaded_error"  # type: ignore[index]
    with (
        pytest.raises(anthropic.BadRequestError) as early,
        claude.messages.stream(model="repeater", max_tokens=9, messages=say("REFUSE")) as stream,
    ):
        stream.until_done()
    assert early.value.status_code == 400


def test_paths_and_methods_that_are_not_there(claude: Anthropic, openai_server: OpenAiServer) -> None:
    status, answer, headers = openai_server.ask(PATH, None, "GET")
    assert (status, headers["allow"], answer["type"]) == (405, "POST", "error")
    with pytest.raises(anthropic.NotFoundError, match="is not a path of this server"):
        claude.messages.batches.list()


def test_a_key_in_the_header_of_anthropics_client(tmp_path: Path) -> None:
    key = create_key(tmp_path / "keys", "someone", ("infer",), created=time.time())
    reader = create_key(tmp_path / "keys", "reader", ("read",), created=time.time())
    guard = open_guard(AccessSettings(keys_file=tmp_path / "keys"), Registry(SystemClock()))
    assert guard is not None
    more: Any = {"model": "repeater", "max_tokens": 9, "messages": [USER]}
    with openai_server_with_models(make_routes=lambda: Routes(Middleware(guard).http)) as server:
        with client_of(server.port, key) as client:
            assert client.messages.create(**more).stop_reason == "end_turn"
        with client_of(server.port, "hr_wrong") as client, pytest.raises(anthropic.AuthenticationError) as refused:
            client.messages.create(**more)
        assert refused.value.body["error"]["type"] == "authentication_error"  # type: ignore[index]
        assert refused.value.request_id
        with client_of(server.port, reader) as client, pytest.raises(anthropic.PermissionDeniedError) as denied:
            client.messages.create(**more)
        assert denied.value.body["error"]["type"] == "permission_error"  # type: ignore[index]


def test_a_rate_limit_has_anthropics_error() -> None:
    guard = open_guard(AccessSettings(rates=RateLimits((RateLimit(1, 3600.0),))), Registry(SystemClock()))
    assert guard is not None
    more: Any = {"model": "repeater", "max_tokens": 9, "messages": [USER]}
    with (
        openai_server_with_models(make_routes=lambda: Routes(Middleware(guard).http)) as server,
        client_of(server.port) as client,
    ):
        client.messages.create(**more)
        with pytest.raises(anthropic.RateLimitError) as limited:
            client.messages.create(**more)
    assert limited.value.body["error"]["type"] == "rate_limit_error"  # type: ignore[index]
    assert int(limited.value.response.headers["retry-after"]) > 0


# Clients that leave


@pytest.mark.parametrize("stream", [False, True])
def test_clients_that_leave_end_their_requests(openai_server: OpenAiServer, stream: bool) -> None:
    before = openai_server.repeater.cancelled
    raw = json.dumps(body(messages=say("on FOREVER"), stream=stream)).encode()
    sock = socket.create_connection(("127.0.0.1", openai_server.port), timeout=30)
    sock.sendall(b"POST %b HTTP/1.1\r\nhost: x\r\ncontent-length: %d\r\n\r\n%b" % (PATH.encode(), len(raw), raw))
    if stream:
        assert b"200 OK" in sock.recv(4096)
    else:
        eventually(lambda: openai_server.repeater.running >= 1)
    sock.close()
    eventually(lambda: openai_server.repeater.cancelled == before + 1)
    eventually(lambda: openai_server.repeater.running == 0)


def test_the_client_closes_a_stream_early(claude: Anthropic, openai_server: OpenAiServer) -> None:
    before = openai_server.repeater.cancelled
    with claude.messages.stream(model="repeater", max_tokens=9, messages=say("on FOREVER")) as stream:
        assert next(iter(stream.text_stream)) == "on"
    eventually(lambda: openai_server.repeater.cancelled == before + 1)


def test_a_client_that_does_not_read_is_cut_off() -> None:
    with openai_server_with_models(OpenAiSettings(stream_unread_bytes=64 * 1024)) as server:
        raw = json.dumps(body(messages=say("FOREVER" + "x" * 4096), stream=True)).encode()
        sock = socket.create_connection(("127.0.0.1", server.port), timeout=30)
        sock.sendall(b"POST %b HTTP/1.1\r\nhost: x\r\ncontent-length: %d\r\n\r\n%b" % (PATH.encode(), len(raw), raw))
        try:
            eventually(lambda: server.repeater.cancelled == 1)
        finally:
            sock.close()


# Anything at all

MEMBERS = ["model", "max_tokens", "messages", "system", "tools", "tool_choice", "thinking", "stop_sequences", "stream"]
BLOCKS = st.fixed_dictionaries(
    {"type": st.sampled_from(["text", "image", "tool_use", "tool_result", "thinking", "other"])},
    optional={
        name: st.none() | st.text(max_size=4) | st.lists(st.text(max_size=2), max_size=2)
        for name in ("text", "source", "id", "name", "input", "tool_use_id", "content", "thinking")
    },
)
MESSAGE = st.fixed_dictionaries(
    {
        "role": st.sampled_from(["user", "assistant", "system"]),
        "content": st.text(max_size=5) | st.lists(BLOCKS, max_size=3),
    }
)
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=6) | BLOCKS | st.lists(MESSAGE, max_size=4),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(["type", "name", "text"]), inner, max_size=3)
    ),
    max_leaves=6,
)


@settings(max_examples=examples(200), deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.dictionaries(st.sampled_from(MEMBERS), VALUES, min_size=1, max_size=3))
def test_no_body_is_the_servers_fault(openai_server: OpenAiServer, more: dict[str, Any]) -> None:
    if isinstance(more.get("messages"), list):
        more["messages"] = [*more["messages"], USER]  # what the repeater repeats
    status, answer, _ = openai_server.ask(PATH, body(**more))
    assert status in (200, 400, 404), answer
    if status != 200:
        assert set(answer["error"]) == {"type", "message"}
