# SPDX-License-Identifier: Apache-2.0
"""Requests that are wrong: each is refused by the name of its field, and none of them is the server's fault."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from openai_server import OpenAiServer

from headrace.api.openai.errors import rename_field
from headrace.core.errors import InvalidArgument, Unavailable
from support.properties import examples

CHAT = "/v1/chat/completions"
USER = {"role": "user", "content": "hello"}
IMAGE = {"type": "image_url", "image_url": {"url": "data:8x6", "detail": "low"}}


@pytest.mark.parametrize(
    ("more", "param"),
    [
        ({"model": None}, "model"),
        ({"model": 3}, "model"),
        ({"model": "numbers"}, "model"),
        ({"model": "letters"}, "model"),
        ({"messages": None}, "messages"),
        ({"messages": []}, "messages"),
        ({"messages": ["hello"]}, "messages[0]"),
        ({"messages": [USER] * 2049}, "messages"),
        ({"messages": [{"role": "robot", "content": "x"}]}, "messages[0].role"),
        ({"messages": [{"role": ["user"], "content": "x"}]}, "messages[0].role"),
        ({"messages": [{"role": "user"}]}, "messages[0].content"),
        ({"messages": [{"role": "user", "content": 3}]}, "messages[0].content"),
        ({"messages": [{"role": "user", "content": []}]}, "messages[0].content"),
        ({"messages": [{"role": "user", "content": ["x"]}]}, "messages[0].content[0]"),
        ({"messages": [USER, {"role": "user", "content": [{"type": "text"}]}]}, "messages[1].content[0].text"),
        ({"messages": [{"role": "user", "content": [{"type": "input_audio"}]}]}, "messages[0].content[0].type"),
        ({"messages": [{"role": "user", "content": [{"type": {"a": 1}}]}]}, "messages[0].content[0].type"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "messages[0].content[0].image_url"),
        ({"messages": [{"role": "user", "content": [IMAGE] * 33}]}, "messages[0].content[32].image_url"),
        ({"messages": [{"role": "tool", "content": "x"}]}, "messages[0].tool_call_id"),
        ({"messages": [{"role": "assistant", "tool_calls": [{}]}]}, "messages[0].tool_calls[0].function"),
        (
            {
                "messages": [
                    {"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "not json"}}]},
                ]
            },
            "messages[0].tool_calls[0].function.arguments",
        ),
        ({"temperature": -0.1}, "temperature"),
        ({"temperature": "hot"}, "temperature"),
        ({"temperature": True}, "temperature"),
        ({"top_p": 0}, "top_p"),
        ({"top_p": 1.5}, "top_p"),
        ({"top_k": -2}, "top_k"),
        ({"top_k": 1.5}, "top_k"),
        ({"min_p": 2}, "min_p"),
        ({"n": 0}, "n"),
        ({"n": 129}, "n"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": 10**12}, "max_tokens"),
        ({"max_completion_tokens": -1}, "max_completion_tokens"),
        ({"seed": 2**63}, "seed"),
        ({"stop": ["x"] * 17}, "stop"),
        ({"stop": [""]}, "stop"),
        ({"stop": 3}, "stop"),
        ({"stop": ["x" * 1001]}, "stop"),
        ({"stop_token_ids": ["x"]}, "stop_token_ids"),
        ({"logit_bias": {"x": 1}}, "logit_bias"),
        ({"logit_bias": {"1": 101}}, "logit_bias"),
        ({"logit_bias": {str(i): 1 for i in range(1025)}}, "logit_bias"),
        ({"logprobs": 3}, "logprobs"),
        ({"top_logprobs": 3}, "top_logprobs"),
        ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
        ({"presence_penalty": 3}, "presence_penalty"),
        ({"frequency_penalty": -3}, "frequency_penalty"),
        ({"repetition_penalty": 0}, "repetition_penalty"),
        ({"stream": "yes"}, "stream"),
        ({"stream_options": {"include_usage": True}}, "stream_options"),
        ({"stream": True, "stream_options": {"include_usage": 1}}, "stream_options.include_usage"),
        ({"response_format": "json"}, "response_format"),
        ({"response_format": {"type": "xml"}}, "response_format.type"),
        ({"response_format": {"type": "json_schema"}}, "response_format.json_schema.schema"),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"schema": 1}}},
            "response_format.json_schema.schema",
        ),
        ({"guided_choice": []}, "guided_choice"),
        ({"guided_json": "[1"}, "guided_json"),
        ({"guided_grammar": "x"}, "guided_grammar"),
        ({"modalities": ["text", "audio"]}, "modalities"),
        ({"chat_template": "{{ 1 }}"}, "chat_template"),
        ({"chat_template_kwargs": {"messages": []}}, "chat_template_kwargs"),
        ({"chat_template_kwargs": 3}, "chat_template_kwargs"),
        ({"prompt_logprobs": 21}, "prompt_logprobs"),
        ({"prompt_logprobs": 1, "stream": True}, "prompt_logprobs"),
        ({"best_of": 2}, "best_of"),
        ({"skip_special_tokens": "no"}, "skip_special_tokens"),
        ({"include_stop_str_in_output": 1}, "include_stop_str_in_output"),
        ({"bad_words": "word"}, "bad_words"),
        ({"bad_words": [" "]}, "bad_words"),
        ({"bad_words": ["x"] * 129}, "bad_words"),
        ({"allowed_token_ids": []}, "allowed_token_ids"),
        ({"allowed_token_ids": ["a"]}, "allowed_token_ids"),
        ({"truncate_prompt_tokens": 0}, "truncate_prompt_tokens"),
        ({"truncate_prompt_tokens": -2}, "truncate_prompt_tokens"),
        ({"priority": 1.5}, "priority"),
    ],
)
def test_a_wrong_chat_names_the_field(openai_server: OpenAiServer, more: dict[str, Any], param: str) -> None:
    status, body, _ = openai_server.chat("hello", **more)
    assert status == 400
    assert set(body["error"]) == {"message", "type", "param", "code"}
    assert (body["error"]["param"], body["error"]["type"]) == (param, "invalid_request_error")
    assert param in body["error"]["message"]


@pytest.mark.parametrize(
    ("more", "param"),
    [
        ({"prompt": None}, "prompt"),
        ({"prompt": ""}, "prompt"),
        ({"prompt": []}, "prompt"),
        ({"prompt": 3}, "prompt"),
        ({"prompt": ["a", ""]}, "prompt[1]"),
        ({"prompt": ["a", 3]}, "prompt[1]"),
        ({"prompt": [3, "a"]}, "prompt"),
        ({"prompt": [-1]}, "prompt"),
        ({"prompt": [1.5]}, "prompt"),
        ({"prompt": [[1], []]}, "prompt[1]"),
        ({"prompt": ["a"] * 257}, "prompt"),
        ({"prompt": ["a"] * 65, "n": 2}, "n"),
        ({"suffix": "end"}, "suffix"),
        ({"echo": "yes"}, "echo"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"echo": True, "max_tokens": 0, "stream": True}, "max_tokens"),
        ({"n": 3, "best_of": 2}, "best_of"),
        ({"best_of": 129}, "best_of"),
        ({"prompt": ["a"] * 65, "best_of": 2}, "best_of"),
        ({"best_of": 2, "stream": True}, "best_of"),
        ({"logprobs": True}, "logprobs"),
        ({"logprobs": 21}, "logprobs"),
    ],
)
def test_a_wrong_completion_names_the_field(openai_server: OpenAiServer, more: dict[str, Any], param: str) -> None:
    status, body, _ = openai_server.ask("/v1/completions", {"model": "repeater", "prompt": "hello", **more})
    assert (status, body["error"]["param"]) == (400, param)


@pytest.mark.parametrize(
    ("more", "param"),
    [
        ({"input": None}, "input"),
        ({"input": []}, "input"),
        ({"input": ""}, "input[0]"),
        ({"input": [1, 2]}, "input[0]"),
        ({"input": ["a", [1]]}, "input[1]"),
        ({"input": ["a"] * 2049}, "input"),
        ({"encoding_format": "hex"}, "encoding_format"),
        ({"dimensions": 2}, "dimensions"),
        ({"dimensions": "4"}, "dimensions"),
        ({"model": "repeater"}, "model"),
    ],
)
def test_wrong_embeddings_name_the_field(openai_server: OpenAiServer, more: dict[str, Any], param: str) -> None:
    status, body, _ = openai_server.ask("/v1/embeddings", {"model": "letters", "input": "hello", **more})
    assert (status, body["error"]["param"]) == (400, param)


def test_bodies_that_are_no_requests(openai_server: OpenAiServer) -> None:
    for body in (
        b"",
        b"{",
        b"[]",
        b"3",
        b'"x"',
        b"\xff",
        b"[" * 5000,
        b'{"a":' * 200 + b"1" + b"}" * 200,
        b'{"a":NaN}',
    ):
        for path in (CHAT, "/v1/completions", "/v1/embeddings"):
            status, answer, _ = openai_server.ask(path, body)
            assert (status, answer["error"]["type"]) == (400, "invalid_request_error"), body[:20]


MEMBERS = [
    *(
        "model",
        "messages",
        "prompt",
        "input",
        "n",
        "stop",
        "seed",
        "stream",
        "stream_options",
        "logprobs",
        "top_logprobs",
    ),
    *(
        "temperature",
        "top_p",
        "top_k",
        "min_p",
        "max_tokens",
        "max_completion_tokens",
        "logit_bias",
        "tools",
        "tool_choice",
    ),
    *("response_format", "structured_outputs", "guided_json", "guided_regex", "guided_choice", "chat_template_kwargs"),
    *(
        "encoding_format",
        "dimensions",
        "echo",
        "suffix",
        "modalities",
        "stop_token_ids",
        "role",
        "content",
        "type",
        "text",
    ),
    *(
        "function",
        "name",
        "parameters",
        "arguments",
        "tool_calls",
        "tool_call_id",
        "image_url",
        "url",
        "json_schema",
        "schema",
    ),
]
WORDS = [
    "repeater",
    "letters",
    "user",
    "assistant",
    "tool",
    "text",
    "image_url",
    "function",
    "json_schema",
    "auto",
    "required",
]
LEAVES = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-3, 3),
    st.integers(-(2**65), 2**65),
    st.floats(),
    st.text(max_size=8),
    st.sampled_from(WORDS),
)
VALUES = st.recursive(
    LEAVES,
    lambda inner: st.one_of(
        st.lists(inner, max_size=3),
        st.dictionaries(st.one_of(st.sampled_from(MEMBERS), st.text(max_size=4)), inner, max_size=4),
    ),
    max_leaves=12,
)
GOOD: dict[str, Any] = {
    CHAT: {"model": "repeater", "messages": [USER]},
    "/v1/completions": {"model": "repeater", "prompt": "hello"},
    "/v1/embeddings": {"model": "letters", "input": "hello"},
}


@settings(
    max_examples=examples(300),
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
@given(st.sampled_from(sorted(GOOD)), st.dictionaries(st.sampled_from(MEMBERS), VALUES, min_size=1, max_size=3))
def test_no_body_is_our_fault(openai_server: OpenAiServer, path: str, more: dict[str, Any]) -> None:
    status, body, _ = openai_server.ask(path, {**GOOD[path], **more})
    assert status in (200, 400, 404), body
    if status != 200:
        assert set(body["error"]) == {"message", "type", "param", "code"}


@pytest.mark.parametrize(
    ("said", "names", "told"),
    [
        ("messages has 9 tokens", {"messages": "messages"}, ("messages", "messages has 9 tokens")),
        ("'messages' has a video", {"messages": "messages"}, ("messages", "messages has a video")),
        ("response_format: no", {"response_format": "guided_json"}, ("guided_json", "guided_json: no")),
        ("prompt is empty", {"prompt": "prompt[3]"}, ("prompt[3]", "prompt[3] is empty")),
        ("prompt is empty", {"messages": "messages"}, (None, "prompt is empty")),
        ("no", {}, (None, "no")),
    ],
)
def test_what_a_backend_says_of_a_field_names_the_requests_own(
    said: str, names: dict[str, str], told: tuple[str | None, str]
) -> None:
    error = rename_field(InvalidArgument(said), names)
    assert (getattr(error, "param", None), str(error)) == told
    other = Unavailable("messages wait")
    assert rename_field(other, {"messages": "messages"}) is other
