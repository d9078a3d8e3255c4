# SPDX-License-Identifier: Apache-2.0
"""Target `chat`: bodies of OpenAI's and Anthropic's APIs get a response, a stream, or an error."""

from __future__ import annotations

import json

from fuzz.http_request import Answer, post
from fuzz.in_memory_server import Server
from fuzz.target import Check, Target, require


def _open() -> Check:
    server = Server()

    def check(data: bytes) -> None:
        for path in (b"/v1/chat/completions", b"/v1/completions", b"/v1/embeddings", b"/v1/messages"):
            _check(path, post(server, path, data, (b"content-type: application/json",)))

    return check


def _check(path: bytes, answer: Answer) -> None:
    require(answer.status in (200, 400, 404, 413, 422), f"{path!r} answered {answer.status}: {answer.body[:200]!r}")
    if answer.fields[b"content-type"].startswith(b"text/event-stream"):
        events = [part for part in answer.body.split(b"\n\n") if part]
        if path == b"/v1/messages":
            require(events[-1].startswith(b"event: message_stop\n"), f"a stream that does not end: {events[-1:]}")
            for event in events:
                json.loads(event.partition(b"\ndata: ")[2])
            return
        require(events[-1:] == [b"data: [DONE]"], f"a stream that does not end: {events[-1:]}")
        for event in events[:-1]:
            json.loads(event.removeprefix(b"data: "))
        return
    document = json.loads(answer.body)
    if answer.status != 200:
        require(bool(document["error"]["message"]), "an error without a word")


TARGET = Target(
    "bodies of chat, completions, embeddings and messages: an answer, a stream that ends, or a refusal",
    _open,
    (
        b'"model":"words"',
        b'"messages":[{"role":"user","content":"hi"}]',
        b'"prompt":"hi"',
        b'"stream":true',
        b'"stream_options":{"include_usage":true}',
        b'"n":2',
        b'"max_tokens":5',
        b'"temperature":0',
        b'"stop":["a"]',
        b'"logprobs":true,"top_logprobs":2',
        b'"logit_bias":{"1":-100}',
        b'"response_format":{"type":"json_object"}',
        b'"response_format":{"type":"json_schema","json_schema":{"name":"a","schema":{}}}',
        b'"tools":[{"type":"function","function":{"name":"f","parameters":{}}}]',
        b'"tool_choice":"auto"',
        b'"role":"assistant"',
        b'"role":"tool","tool_call_id":"1"',
        b'"tool_calls":[{"id":"1","type":"function","function":{"name":"f","arguments":"{}"}}]',
        b'{"type":"image_url","image_url":{"url":"data:,"}}',
        b'{"type":"text","text":"a"}',
        b'"input":["a"]',
        b'"system":"a"',
        b'"stop_sequences":["a"]',
        b'"tools":[{"name":"f","input_schema":{}}]',
        b'"tool_choice":{"type":"any"}',
        b'{"type":"tool_use","id":"1","name":"f","input":{}}',
        b'{"type":"tool_result","tool_use_id":"1","content":"a"}',
        b'{"type":"image","source":{"type":"url","url":"data:,"}}',
        b'"encoding_format":"base64"',
        b"\\ud800",
        b"1e400",
        b"null",
    ),
)
