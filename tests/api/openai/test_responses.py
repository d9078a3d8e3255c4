# SPDX-License-Identifier: Apache-2.0
"""OpenAI's Responses API, with OpenAI's own client, against models that say what they are told."""

from __future__ import annotations

import json
import time
from typing import Any

import openai
import pytest
from openai import OpenAI
from openai_server import OpenAiServer

WEATHER: Any = {
    "type": "function",
    "name": "weather",
    "description": "of a town",
    "parameters": {"type": "object", "properties": {"town": {"type": "string"}}, "required": ["town"]},
    "strict": True,
}
CALL = '<tool_call>{"name": "weather", "arguments": {"town": "Delft €"}}</tool_call>'


def test_an_answer(client: OpenAI, openai_server: OpenAiServer) -> None:
    answer = client.responses.create(
        model="repeater", input="Hello there", instructions="Be brief.", max_output_tokens=9
    )
    assert answer.output_text == "Hello there"
    assert (answer.object, answer.status, answer.model) == ("response", "completed", "repeater")
    assert answer.id.startswith("resp_") and answer.created_at > 1_700_000_000
    (item,) = answer.output
    assert (item.type, item.status, item.role) == ("message", "completed", "assistant")  # type: ignore[union-attr]
    assert answer.usage is not None
    assert (answer.usage.input_tokens, answer.usage.output_tokens, answer.usage.total_tokens) == (2, 2, 4)
    assert answer.usage.input_tokens_details.cached_tokens == 1
    assert answer.instructions == "Be brief." and answer.max_output_tokens == 9 and answer.store is False
    given = openai_server.repeater.received[-1]
    assert given.messages == ({"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hello there"})
    assert given.sampling.max_tokens == 9


def test_a_stream_has_every_event_in_order(client: OpenAI) -> None:
    said = f"<think> A plan. </think> Let me see. {CALL}"
    events = list(client.responses.create(model="thinker", input=said, tools=[WEATHER], stream=True))
    assert [event.sequence_number for event in events] == list(range(len(events)))
    kinds = [event.type for event in events]
    assert kinds[:2] == ["response.created", "response.in_progress"] and kinds[-1] == "response.completed"
    once = [kind for index, kind in enumerate(kinds) if kind != kinds[index - 1]]
    assert once[2:-1] == [
        "response.output_item.added",
        "response.content_part.added",
        "response.reasoning_text.delta",
        "response.reasoning_text.done",
        "response.content_part.done",
        "response.output_item.done",
        "response.output_item.added",
        "response.content_part.added",
        "response.output_text.delta",
        "response.output_text.done",
        "response.content_part.done",
        "response.output_item.done",
        "response.output_item.added",
        "response.function_call_arguments.delta",
        "response.function_call_arguments.done",
        "response.output_item.done",
    ]
    final: Any = events[-1]
    reasoning, message, call = final.response.output
    assert reasoning.content[0].text == "A plan."
    assert message.content[0].text == "Let me see." == final.response.output_text
    assert (call.name, json.loads(call.arguments), call.status) == ("weather", {"town": "Delft €"}, "completed")
    deltas = "".join(event.delta for event in events if event.type == "response.function_call_arguments.delta")
    assert deltas == call.arguments
    whole: Any = client.responses.create(model="thinker", input=said, tools=[WEATHER])
    assert [item.type for item in whole.output] == ["reasoning", "message", "function_call"]
    assert whole.output[0].content[0].text == "A plan." and whole.output_text == "Let me see."
    assert json.loads(whole.output[2].arguments) == {"town": "Delft €"}


def test_the_clients_own_way_to_follow_a_stream(client: OpenAI) -> None:
    with client.responses.stream(model="repeater", input="one two three") as stream:
        texts = [event.delta for event in stream if event.type == "response.output_text.delta"]
        final = stream.get_final_response()
    assert "".join(texts) == final.output_text == "one two three" and len(texts) > 1


def test_tools_async_test(client: OpenAI, openai_server: OpenAiServer) -> None:
    conversation: list[Any] = [{"role": "user", "content": CALL}]
    first = client.responses.create(model="repeater", input=conversation, tools=[WEATHER], store=False)
    (call,) = [item for item in first.output if item.type == "function_call"]
    conversation += [item.model_dump(exclude_none=True) for item in first.output]
    conversation.append({"type": "function_call_output", "call_id": call.call_id, "output": "rain"})
    conversation.append({"role": "user", "content": [{"type": "input_text", "text": "Thank you."}]})
    second = client.responses.create(model="repeater", input=conversation, tools=[WEATHER], store=False)
    assert second.output_text == "Thank you."
    given = openai_server.repeater.received[-1]
    assert [message["role"] for message in given.messages] == ["user", "assistant", "tool", "user"]
    assert given.messages[1]["tool_calls"][0]["function"] == {"name": "weather", "arguments": {"town": "Delft €"}}
    assert given.messages[2] == {"role": "tool", "content": "rain", "tool_call_id": call.call_id}
    assert given.tools[0]["function"]["name"] == "weather"


def test_what_a_coding_agent_offers(client: OpenAI, openai_server: OpenAiServer) -> None:
    """Codex 0.169 sends a namespace of functions, a tool of OpenAI's service, and two developer messages."""
    group = {"type": "namespace", "name": "agents", "description": "others", "tools": [{**WEATHER, "name": "ask"}]}
    tools: Any = [WEATHER, group, {"type": "web_search"}]
    said = '<tool_call>{"name": "agents.ask", "arguments": {"town": "Rome"}}</tool_call>'
    conversation: list[Any] = [
        {"role": "developer", "content": [{"type": "input_text", "text": "Be brief."}]},
        {"role": "developer", "content": "Be kind."},
        {"role": "user", "content": said},
    ]
    answer: Any = client.responses.create(model="repeater", input=conversation, tools=tools)
    (call,) = answer.output
    assert (call.namespace, call.name, json.loads(call.arguments)) == ("agents", "ask", {"town": "Rome"})
    given = openai_server.repeater.received[-1]
    assert [tool["function"]["name"] for tool in given.tools] == ["weather", "agents.ask"]
    assert given.messages[0] == {"role": "system", "content": "Be brief.\nBe kind."}
    conversation += [call.model_dump(exclude_none=True)]
    conversation += [{"type": "function_call_output", "call_id": call.call_id, "output": "yes"}]
    conversation += [{"role": "user", "content": "Good."}]
    assert client.responses.create(model="repeater", input=conversation, tools=tools).output_text == "Good."
    assert openai_server.repeater.received[-1].messages[2]["tool_calls"][0]["function"]["name"] == "agents.ask"


def test_reasoning_of_earlier_answers_goes_to_the_template(client: OpenAI, openai_server: OpenAiServer) -> None:
    conversation: list[Any] = [
        {"role": "user", "content": "first"},
        {"type": "reasoning", "id": "rs_1", "summary": [], "content": [{"type": "reasoning_text", "text": "Hm."}]},
        {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "Yes."}]},
        {"role": "user", "content": "second"},
    ]
    client.responses.create(model="repeater", input=conversation, reasoning={"effort": "low"})
    given = openai_server.repeater.received[-1]
    assert given.messages[1] == {"role": "assistant", "content": "Yes.", "reasoning_content": "Hm."}
    assert given.template_arguments["reasoning_effort"] == "low"


def test_structured_output_and_tool_choice(client: OpenAI, openai_server: OpenAiServer) -> None:
    schema = {"type": "object", "properties": {"wet": {"type": "boolean"}}}
    text: Any = {"format": {"type": "json_schema", "name": "answer", "schema": schema, "strict": True}}
    answer = client.responses.create(model="repeater", input="{}", text=text)
    held_to = openai_server.repeater.received[-1].output_format
    assert held_to is not None and held_to.schema == schema
    assert answer.text is not None and answer.text.format is not None and answer.text.format.type == "json_schema"
    choice: Any = {"type": "function", "name": "weather"}
    called: Any = client.responses.create(model="repeater", input='{"town": "x"}', tools=[WEATHER], tool_choice=choice)
    assert (called.output[0].name, called.output[0].arguments) == ("weather", '{"town": "x"}')


def test_images(client: OpenAI, openai_server: OpenAiServer) -> None:
    content = [{"type": "input_text", "text": "what?"}, {"type": "input_image", "image_url": "data:4x2"}]
    messages: Any = [{"role": "user", "content": content}]
    assert client.responses.create(model="repeater", input=messages).output_text == "what? <promptimage 2x4x3>"


def test_an_answer_that_is_cut_off_says_so(client: OpenAI) -> None:
    answer: Any = client.responses.create(model="repeater", input="one two three four", max_output_tokens=2)
    assert (answer.status, answer.incomplete_details.reason) == ("incomplete", "max_output_tokens")
    assert (answer.output_text, answer.output[0].status) == ("one two", "incomplete")
    events = list(client.responses.create(model="repeater", input="a b c", max_output_tokens=2, stream=True))
    assert events[-1].type == "response.incomplete"


def test_an_error_in_the_middle_is_the_last_event(client: OpenAI) -> None:
    events: list[Any] = list(client.responses.create(model="repeater", input="one BREAK", stream=True))
    assert events[-1].type == "response.failed"
    assert events[-1].response.status == "failed" and events[-1].response.error.message == "the model broke"


def test_a_client_that_goes_frees_its_sequence(client: OpenAI, openai_server: OpenAiServer) -> None:
    before = openai_server.repeater.cancelled
    stream = client.responses.create(model="repeater", input="FOREVER", stream=True)
    next(iter(stream))
    stream.close()
    for _ in range(200):
        if openai_server.repeater.cancelled > before:
            break
        time.sleep(0.02)
    assert openai_server.repeater.cancelled == before + 1


@pytest.mark.parametrize(
    ("more", "param"),
    [
        ({"input": []}, "input"),
        ({"input": 5}, "input"),
        ({"input": [{"type": "message", "role": "robot", "content": "x"}]}, "input[0].role"),
        ({"input": [{"type": "item_reference", "id": "x"}]}, "input[0].type"),
        ({"input": [{"role": "user", "content": [{"type": "input_file"}]}]}, "input[0].content[0].type"),
        (
            {"input": [{"role": "user", "content": [{"type": "input_image", "file_id": "f"}]}]},
            "input[0].content[0].image_url",
        ),
        ({"input": [{"type": "function_call_output", "output": "x"}]}, "input[0].call_id"),
        ({"tools": [{"type": "web_search"}]}, "tools[0].type"),
        ({"tools": [WEATHER, {"type": "custom", "name": "patch"}]}, "tools[1].type"),
        ({"tools": [{"type": "namespace", "name": "n", "tools": [{"type": "custom"}]}]}, "tools[0].tools[0].type"),
        ({"tools": [WEATHER], "tool_choice": {"type": "function", "name": "dance"}}, "tool_choice"),
        ({"previous_response_id": "resp_1"}, "previous_response_id"),
        ({"background": True}, "background"),
        ({"conversation": "conv_1"}, "conversation"),
        ({"max_output_tokens": -1}, "max_output_tokens"),
        ({"text": {"format": {"type": "yaml"}}}, "text.format"),
        ({"model": "letters"}, "model"),
    ],
)
def test_what_is_wrong_is_named(client: OpenAI, more: dict[str, Any], param: str) -> None:
    with pytest.raises(openai.BadRequestError) as refused:
        client.responses.create(**{"model": "repeater", "input": "x", **more})
    assert refused.value.param == param


def test_an_unknown_model_and_an_earlier_response_are_not_found(client: OpenAI) -> None:
    with pytest.raises(openai.NotFoundError) as refused:
        client.responses.create(model="nobody", input="x")
    assert refused.value.code == "model_not_found"
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve("resp_1")
    with pytest.raises(openai.BadRequestError, match="another engine"):
        client.responses.create(model="elsewhere", input="x")
