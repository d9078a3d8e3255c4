# SPDX-License-Identifier: Apache-2.0
"""Tools: what the model is told, what its text is held to, and calls read out of it, whole and streamed."""

from __future__ import annotations

import json
from typing import Any

import openai
import pytest
from hypothesis import given
from hypothesis import strategies as st
from openai import OpenAI
from openai_server import OpenAiServer, openai_server_with_models

from headrace.api.openai.output_formats import formats_of
from headrace.api.openai.output_parser import OutputParser, Reasoning, ToolCall
from headrace.api.openai.tool_calls import NamedCallParser, required_calls_parser
from headrace.core.clock import ManualClock
from headrace.core.telemetry.metrics import Registry

WEATHER = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "of a town",
        "parameters": {"type": "object", "properties": {"town": {"type": "string"}}, "required": ["town"]},
    },
}
TIME = {"type": "function", "function": {"name": "time"}}
ASKED = {"town": "Delft \u20ac {", "n": [1, {"a": "}"}]}
HERMES = f"Let me see.\n<tool_call>\n{json.dumps({'name': 'weather', 'arguments': ASKED})}\n</tool_call>"
TWO = HERMES + '\n<tool_call>{"name": "time", "arguments": {}}</tool_call>\n'
LLAMA = json.dumps({"name": "weather", "parameters": ASKED})
MISTRAL = "[TOOL_CALLS]" + json.dumps([{"name": "weather", "arguments": ASKED}, {"name": "time", "arguments": {}}])


def answered(
    client: OpenAI, text: str, model: str = "repeater", stream: bool = False, **more: Any
) -> tuple[Any, Any, str]:
    """Ask a model to repeat a text; return its text, its calls as (name, arguments), and the finish reason."""
    more = {"tools": [WEATHER, TIME], **more}
    messages: Any = [{"role": "user", "content": text}]
    if not stream:
        choice = client.chat.completions.create(model=model, messages=messages, **more).choices[0]
        calls = [(call.function.name, call.function.arguments) for call in choice.message.tool_calls or []]
        assert all(call.id.startswith("call_") for call in choice.message.tool_calls or [])
        return choice.message.content, calls, choice.finish_reason
    content, found, reason = "", {}, ""
    for chunk in client.chat.completions.create(model=model, messages=messages, stream=True, **more):
        delta = chunk.choices[0].delta
        content += delta.content or ""
        for call in delta.tool_calls or []:
            if call.function.name:
                assert call.index not in found
                assert call.id.startswith("call_")
                found[call.index] = (call.function.name, "")
            name, arguments = found[call.index]
            found[call.index] = (name, arguments + call.function.arguments)
        reason = chunk.choices[0].finish_reason or reason
    return content or None, [found[index] for index in sorted(found)], reason


@pytest.mark.parametrize("stream", [False, True])
def test_calls_of_a_models_own_accord(client: OpenAI, openai_server: OpenAiServer, stream: bool) -> None:
    text, calls, reason = answered(client, HERMES, stream=stream)
    assert (text, reason) == ("Let me see.", "tool_calls")
    assert [(name, json.loads(arguments)) for name, arguments in calls] == [("weather", ASKED)]
    assert [tool["function"]["name"] for tool in openai_server.repeater.received[-1].tools] == ["weather", "time"]
    assert openai_server.repeater.received[-1].output_format is None
    assert [name for name, _ in answered(client, TWO, stream=stream)[1]] == ["weather", "time"]
    assert answered(client, "just text", stream=stream) == ("just text", [], "stop")
    text, calls, reason = answered(client, LLAMA, "llama", stream=stream)
    assert (text, [name for name, _ in calls], reason) == (None, ["weather"], "tool_calls")
    text, calls, reason = answered(client, "Now " + MISTRAL, "mistral", stream=stream)
    assert ([name for name, _ in calls], reason) == (["weather", "time"], "tool_calls")
    assert json.loads(calls[0][1]) == ASKED


@pytest.mark.parametrize("tools", [[], [WEATHER, TIME]])
def test_reasoning_is_apart_from_the_answer(client: OpenAI, tools: list[Any]) -> None:
    messages: Any = [{"role": "user", "content": "<think>\nA plan.\n</think>\n\nThe answer."}]
    message = client.chat.completions.create(model="thinker", messages=messages, tools=tools).choices[0].message
    assert (message.content, message.reasoning_content) == ("The answer.", "A plan.")  # type: ignore[attr-defined]
    deltas = [
        chunk.choices[0].delta
        for chunk in client.chat.completions.create(model="thinker", messages=messages, tools=tools, stream=True)
    ]
    assert "".join(getattr(delta, "reasoning_content", "") for delta in deltas) == "A plan."
    assert "".join(delta.content or "" for delta in deltas) == "The answer."
    plain = client.chat.completions.create(model="repeater", messages=messages, tools=tools).choices[0].message
    assert plain.content == messages[0]["content"] and not hasattr(plain, "reasoning_content")


@pytest.mark.parametrize("stream", [False, True])
def test_a_model_that_must_call(client: OpenAI, openai_server: OpenAiServer, stream: bool) -> None:
    arguments = json.dumps(ASKED)
    choice = {"type": "function", "function": {"name": "weather"}}
    assert answered(client, arguments, stream=stream, tool_choice=choice) == (
        None,
        [("weather", arguments)],
        "tool_calls",
    )
    held_to = openai_server.repeater.received[-1].output_format
    assert held_to is not None
    assert (held_to.kind, held_to.schema) == ("json_schema", WEATHER["function"]["parameters"])  # type: ignore[index]
    said = json.dumps([{"name": "time", "arguments": {}}, {"name": "weather", "arguments": ASKED}])
    text, calls, reason = answered(client, said, stream=stream, tool_choice="required")
    assert (text, [name for name, _ in calls], reason) == (None, ["time", "weather"], "tool_calls")
    held_to = openai_server.repeater.received[-1].output_format
    assert held_to is not None
    assert held_to.schema is not None
    assert held_to.schema["maxItems"] == 16
    assert [each["properties"]["name"]["const"] for each in held_to.schema["items"]["anyOf"]] == ["weather", "time"]
    cut = answered(client, said, stream=stream, tool_choice="required", max_tokens=3)
    assert cut[2] == "length"


def test_tools_that_are_not_to_be_used(client: OpenAI, openai_server: OpenAiServer) -> None:
    assert answered(client, HERMES, tool_choice="none") == (HERMES, [], "stop")
    assert openai_server.repeater.received[-1].tools == ()


def test_references_of_a_schema_follow_it(client: OpenAI, openai_server: OpenAiServer) -> None:
    parameters = {"type": "object", "properties": {"p": {"$ref": "#/$defs/P"}}, "$defs": {"P": {"type": "integer"}}}
    tool = {"type": "function", "function": {"name": "f", "parameters": parameters}}
    answered(client, "[]", tools=[tool], tool_choice="required", parallel_tool_calls=False)
    held_to = openai_server.repeater.received[-1].output_format
    assert held_to is not None
    assert held_to.schema is not None
    (one,) = held_to.schema["items"]["anyOf"]
    assert one["properties"]["arguments"] == {"$ref": "#/$defs/tool0"}
    assert held_to.schema["$defs"]["tool0"]["properties"]["p"] == {"$ref": "#/$defs/tool0/$defs/P"}
    assert held_to.schema["maxItems"] == 1


def test_a_conversation_with_calls(client: OpenAI, openai_server: OpenAiServer) -> None:
    messages: Any = [
        {"role": "developer", "content": "be brief"},
        {"role": "user", "content": "weather?"},
        {
            "role": "assistant",
            "content": None,
            "tool_calls": [
                {"id": "1", "type": "function", "function": {"name": "weather", "arguments": '{"town": "X"}'}}
            ],
        },
        {"role": "tool", "tool_call_id": "1", "content": [{"type": "text", "text": "rain"}]},
    ]
    client.chat.completions.create(model="repeater", messages=messages, tools=[WEATHER])  # type: ignore[list-item]
    system, _, assistant, tool = openai_server.repeater.received[-1].messages
    assert system == {"role": "system", "content": "be brief"}
    assert assistant["tool_calls"][0]["function"] == {"name": "weather", "arguments": {"town": "X"}}
    assert tool == {"role": "tool", "content": "rain", "tool_call_id": "1"}


@pytest.mark.parametrize(
    ("more", "param"),
    [
        ({"tools": [{"type": "web_search"}]}, "tools[0].type"),
        ({"tools": [{"type": "function"}]}, "tools[0].function"),
        ({"tools": [{"type": "function", "function": {"name": "no spaces"}}]}, "tools[0].function.name"),
        (
            {"tools": [{"type": "function", "function": {"name": "f", "parameters": [1]}}]},
            "tools[0].function.parameters",
        ),
        ({"tools": "all"}, "tools"),
        ({"tool_choice": "often"}, "tool_choice"),
        ({"tool_choice": {"type": "function", "function": {"name": "dance"}}}, "tool_choice"),
        ({"tool_choice": "required", "tools": []}, "tool_choice"),
        ({"tool_choice": "required", "response_format": {"type": "json_object"}}, "tool_choice"),
        ({"extra_body": {"functions": [{"name": "f"}]}}, "functions"),
    ],
)
def test_tools_that_are_wrong(client: OpenAI, more: dict[str, Any], param: str) -> None:
    with pytest.raises(openai.BadRequestError) as refused:
        answered(client, "x", **more)
    assert refused.value.param == param


def test_a_format_of_calls_that_is_not_known(client: OpenAI) -> None:
    with pytest.raises(openai.BadRequestError, match="hermes, kimi_k2, llama3, minimax, minimax_m2, mistral"):
        answered(client, "x", "odd")


NAMES: dict[str, Any] = {"weather": WEATHER["function"]["parameters"], "time": {}}  # type: ignore[index]


def parser_of(kind: str) -> OutputParser:
    make = formats_of({"tool_format": kind}).parser_factory(NAMES)
    assert make is not None
    return make()


TEXTS = {
    "hermes": [
        "plain",
        "",
        "a < b <tool_cal",
        "   spaced   ",
        HERMES,
        TWO,
        "<tool_call>no json</tool_call> more",
        '<tool_call>{"name": "dance", "arguments": {}}</tool_call>',
        '<tool_call>{"name": "time", "arguments": {"a": 1}}',
        "<tool_call>cut",
    ],
    "llama3": [
        "plain",
        "",
        "  ",
        '{"other": 1} tail',
        LLAMA,
        "<|python_tag|>" + LLAMA + "; " + LLAMA,
        '{"name": "dance", "parameters": {}} x',
        '{"name": "weather", "par',
        "<|python",
        '{"name',
        "<| no tag",
    ],
    "mistral": [
        "plain",
        "",
        "[not a call]",
        MISTRAL,
        MISTRAL.removeprefix("[TOOL_CALLS]"),
        'so [TOOL_CALLS]weather{"town": "x"}',
        'x[TOOL_CALLS]weather[ARGS]{"town": "x"}[TOOL_CALLS]time{}',
        "[TOOL_CALLS]what?",
        "a [TOOL",
        '[{"name": "dance"}]',
    ],
}
CASES = [(kind, text) for kind, texts in TEXTS.items() for text in texts]


def read(reader: OutputParser, pieces: list[str]) -> tuple[str, list[tuple[int, str, str]]]:
    """Text and calls."""
    texts, calls = "", []
    for piece in [*(each for text in pieces for each in reader.push(text)), *reader.finish()]:
        if isinstance(piece, ToolCall):
            if piece.name:
                calls.append((piece.index, piece.name, piece.arguments))
            else:
                calls[-1] = (*calls[-1][:2], calls[-1][2] + piece.arguments)
        elif not isinstance(piece, Reasoning):
            texts += piece
    return texts, calls


@given(st.sampled_from(CASES), st.lists(st.integers(0, 200), max_size=12))
def test_how_a_text_is_cut_does_not_matter(case: tuple[str, str], cuts: list[int]) -> None:
    kind, text = case
    places = [0, *sorted(min(cut, len(text)) for cut in cuts), len(text)]
    pieces = [text[begin:end] for begin, end in zip(places, places[1:], strict=False)]
    whole = read(parser_of(kind), [text])
    assert read(parser_of(kind), pieces) == whole
    assert read(parser_of(kind), list(text)) == whole


def test_what_the_formats_make_of_texts() -> None:
    def of(kind: str, text: str) -> Any:
        shown, calls = read(parser_of(kind), [text])
        return shown, [name for _, name, _ in calls]

    assert [of("hermes", text) for text in TEXTS["hermes"]] == [
        ("plain", []),
        ("", []),
        ("a < b <tool_cal", []),
        ("   spaced   ", []),
        ("Let me see.", ["weather"]),
        ("Let me see.", ["weather", "time"]),
        ("<tool_call>no json</tool_call> more", []),
        ('<tool_call>{"name": "dance", "arguments": {}}</tool_call>', []),
        ("", ["time"]),
        ("<tool_call>cut", []),
    ]
    assert [of("llama3", text) for text in TEXTS["llama3"]] == [
        ("plain", []),
        ("", []),
        ("  ", []),
        ('{"other": 1} tail', []),
        ("", ["weather"]),
        ("", ["weather", "weather"]),
        ('{"name": "dance", "parameters": {}} x', []),
        ('{"name": "weather", "par', []),
        ("<|python", []),
        ('{"name', []),
        ("<| no tag", []),
    ]
    assert [of("mistral", text) for text in TEXTS["mistral"]] == [
        ("plain", []),
        ("", []),
        ("[not a call]", []),
        ("", ["weather", "time"]),
        ("", ["weather", "time"]),
        ("so ", ["weather"]),
        ("x", ["weather", "time"]),
        ("[TOOL_CALLS]what?", []),
        ("a [TOOL", []),
        ('[{"name": "dance"}]', []),
    ]


@given(
    st.lists(
        st.sampled_from([{"name": "time", "arguments": {"a": 'x"}]{'}}, {"name": "weather"}]), min_size=1, max_size=3
    )
)
def test_a_list_of_calls_in_any_pieces(calls: list[Any]) -> None:
    text = json.dumps(calls)
    assert read(required_calls_parser(NAMES), list(text)) == read(required_calls_parser(NAMES), [text])
    shown, found = read(required_calls_parser(NAMES), [text])
    assert (shown, [name for _, name, _ in found]) == ("", [call["name"] for call in calls])


def test_text_is_not_held_back_for_nothing() -> None:
    hermes = parser_of("hermes")
    assert hermes.push("one") == ["one"]
    assert hermes.push(" two <") == [" two"]
    assert hermes.push("b> three") == [" <b> three"]
    llama = parser_of("llama3")
    assert llama.push('{"name of') == ['{"name of']
    named = NamedCallParser("f")
    first, second = named.push("{"), named.push("}")
    assert [piece.arguments for piece in (*first, *second) if isinstance(piece, ToolCall)] == ["{", "}"]


def test_malformed_calls_are_counted_by_model() -> None:
    registry = Registry(ManualClock())
    with openai_server_with_models(metrics=registry) as server:
        for text in ('<tool_call>{"name": "weather", oops</tool_call>', HERMES):
            for stream in (False, True):
                assert server.chat(text, tools=[WEATHER], stream=stream)[0] == 200
    families: Any = {family.name: family for family in registry.families}
    ((labels, counter),) = families["headrace_openai_malformed_tool_calls_total"].collect()
    assert (labels, counter.value) == (("repeater",), 2)
