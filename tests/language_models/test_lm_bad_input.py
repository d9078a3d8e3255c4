# SPDX-License-Identifier: Apache-2.0
"""Requests that are wrong, to models that are real: 400, the field named, and nothing of them stays behind."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest
from language_model_server import CONTEXT, Server
from media_files import data_url, image, png_header, sound, video
from web_stub import WebStub, endless, redirect, serve

from support.waiting import eventually

pytestmark = pytest.mark.worker("language models")

CHAT, COMPLETIONS, EMBEDDINGS = "/v1/chat/completions", "/v1/completions", "/v1/embeddings"
USER: dict[str, Any] = {"role": "user", "content": "the quick brown fox"}
RECURSIVE = {"$ref": "#"}
"""It means nothing but itself."""
ITSELF = {"$defs": {"a": {"$ref": "#/$defs/a"}}}
TREE = {
    "type": "object",
    "properties": {"left": {"$ref": "#"}, "right": {"$ref": "#"}},
    "required": ["left"],
    "additionalProperties": False,
}
"""Every tree has a tree in it: none ends."""


@pytest.fixture(scope="module", autouse=True)
def nothing_stays_behind(served: Server) -> Iterator[None]:
    yield
    for model in ("llama", "vision"):
        eventually(lambda model=model: served.load_of(model) == (0, 0, 0))  # type: ignore[misc]
        status, reply = served.post(CHAT, {"model": model, "messages": [USER], "max_tokens": 4, "ignore_eos": True})
        assert (status, reply["usage"]["completion_tokens"]) == (200, 4)
    assert "Traceback" not in served.log


def refused(served: Server, path: str, document: Any, field: str) -> str:
    """What is told; the field must be in it."""
    body = document if isinstance(document, bytes) else json.dumps(document).encode()
    status, reply = served.request("POST", path, body)
    assert status == 400, reply
    error = json.loads(reply)["error"]
    assert error["type"] == "invalid_request_error"
    assert field in error["message"], error
    if path != EMBEDDINGS and isinstance(document, dict):
        assert error["param"], error
    assert (error["param"] or "") in error["message"]
    return str(error["message"])


def schema_of(schema: Any) -> dict[str, Any]:
    return {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}}


def named_tool(parameters: Any, name: Any = "f") -> dict[str, Any]:
    tool = {"type": "function", "function": {"name": name, "parameters": parameters}}
    return {"tools": [tool], "tool_choice": {"type": "function", "function": {"name": name}}}


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS, EMBEDDINGS])
@pytest.mark.parametrize(
    ("body", "said"),
    [
        (b"", "JSON"),
        (b"{", "JSON"),
        (b'{"model": "llama"', "JSON"),
        (b"[]", "object"),
        (b"null", "object"),
        (b'"llama"', "object"),
        (b'{"model": "\xff\xfe"}', "JSON"),
        (b'{"model": "\\ud800"}', "JSON"),
        (b'{"model": NaN}', "JSON"),
        (b'{"a":' * 200 + b"1" + b"}" * 200, "deep"),
        (b"[" * 100_000, "JSON"),
        (b"\x89PNG\r\n\x1a\n", "JSON"),
        (b"{}", "model"),
        (b'{"model": 3}', "model"),
        (b'{"model": ["llama"]}', "model"),
    ],
)
def test_bodies_that_are_not_a_request(served: Server, path: str, body: bytes, said: str) -> None:
    refused(served, path, body, said)


def test_a_model_that_is_not_there(served: Server) -> None:
    status, reply = served.post(CHAT, {"model": "nobody", "messages": [USER]})
    assert (status, reply["error"]["param"], reply["error"]["code"]) == (404, "model", "model_not_found")
    refused(served, CHAT, {"model": "embedder", "messages": [USER]}, "model")
    refused(served, EMBEDDINGS, {"model": "llama", "input": "x"}, "model")


@pytest.mark.parametrize(
    ("messages", "field"),
    [
        ([], "messages"),
        ("hello", "messages"),
        ([{"role": "robot", "content": "x"}], "messages[0].role"),
        ([USER, {"role": None, "content": "x"}], "messages[1].role"),
        ([{"content": "x"}], "messages[0].role"),
        ([{"role": "user"}], "messages[0].content"),
        ([{"role": "user", "content": {"text": "x"}}], "messages[0].content"),
        ([{"role": "user", "content": [{"type": "sculpture"}]}], "messages[0].content[0].type"),
        ([{"role": "tool", "content": "x"}], "messages[0].tool_call_id"),
        ([{"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "{"}}]}], "arguments"),
    ],
)
def test_messages_that_are_none(served: Server, messages: Any, field: str) -> None:
    refused(served, CHAT, {"model": "llama", "messages": messages}, field)


NUMBERS: dict[str, list[Any]] = {
    "temperature": [-0.01, 2.01, 1e308, "1", True, []],
    "top_p": [0, -1, 1.01, "x"],
    "min_p": [-0.1, 1.1, {}],
    "top_k": [-2, 1.5, 2**40, "3"],
    "max_tokens": [0, -1, 1.5, 10**9, 10**30, "8", False],
    "min_tokens": [-1, 10**9, 0.5],
    "n": [0, -1, 129, 2.5, "2"],
    "seed": [2**63, -(2**65), 0.5, "7"],
    "presence_penalty": [-2.1, 2.1, "x"],
    "frequency_penalty": [-2.1, 2.1, [1]],
    "repetition_penalty": [0, -1, 10.1, None.__class__.__name__],
}


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
@pytest.mark.parametrize(("field", "value"), [(field, value) for field, values in NUMBERS.items() for value in values])
def test_numbers_out_of_range(served: Server, path: str, field: str, value: Any) -> None:
    request = {"messages": [USER]} if path == CHAT else {"prompt": "the river"}
    refused(served, path, {"model": "llama", **request, field: value}, field)


@pytest.mark.parametrize(
    ("more", "field"),
    [
        ({"max_completion_tokens": 0}, "max_completion_tokens"),
        ({"min_tokens": 9, "max_tokens": 8}, "min_tokens"),
        ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
        ({"logprobs": True, "top_logprobs": -1}, "top_logprobs"),
        ({"top_logprobs": 2}, "top_logprobs"),
        ({"stop": ""}, "stop"),
        ({"stop": ["x", ""]}, "stop"),
        ({"stop": ["x"] * 17}, "stop"),
        ({"stop": "x" * 1001}, "stop"),
        ({"stop_token_ids": [512]}, "stop_token_ids"),
        ({"stop_token_ids": [-1]}, "stop_token_ids"),
        ({"logit_bias": {"512": 1}}, "logit_bias"),
        ({"logit_bias": {"-1": 1}}, "logit_bias"),
        ({"logit_bias": {"fox": 1}}, "logit_bias"),
        ({"logit_bias": {"3": 101}}, "logit_bias"),
        ({"logit_bias": {"3": None}}, "logit_bias"),
        ({"logit_bias": [3]}, "logit_bias"),
        ({"stream": 1}, "stream"),
        ({"ignore_eos": "no"}, "ignore_eos"),
        ({"chat_template_kwargs": {"messages": []}}, "chat_template_kwargs"),
    ],
)
def test_invalid_fields(served: Server, more: dict[str, Any], field: str) -> None:
    refused(served, CHAT, {"model": "llama", "messages": [USER], **more}, field)


@pytest.mark.parametrize(
    ("more", "field"),
    [
        ({"tools": {}}, "tools"),
        ({"tools": ["f"]}, "tools[0]"),
        ({"tools": [{"type": "hammer"}]}, "tools[0].type"),
        ({"tools": [{"type": "function"}]}, "tools[0].function"),
        ({"tools": [{"type": "function", "function": {"name": "a b"}}]}, "tools[0].function.name"),
        (
            {"tools": [{"type": "function", "function": {"name": "f", "parameters": []}}]},
            "tools[0].function.parameters",
        ),
        ({"tool_choice": "required"}, "tool_choice"),
        (named_tool({}) | {"tool_choice": {"type": "function", "function": {"name": "g"}}}, "tool_choice"),
        (named_tool({}) | {"tool_choice": "perhaps"}, "tool_choice"),
        (named_tool({"type": "sculpture"}), "tools"),
        (named_tool({"type": "string", "pattern": "("}), "tools"),
        (named_tool({"$ref": "#/$defs/nowhere"}), "tools"),
        (named_tool({"$ref": "http://127.0.0.1:1/schema"}), "tools"),
        (named_tool(RECURSIVE), "tools"),
        (
            named_tool({"type": "object", "properties": {"a": {"$ref": "#/$defs/a"}}, "required": ["a"], **ITSELF}),
            "tools",
        ),
        (named_tool({"type": "sculpture"}) | {"tool_choice": "required"}, "tools"),
        (schema_of({"type": "sculpture"}), "response_format"),
        (schema_of({"properties": 3}), "response_format"),
        (schema_of({"not": {"type": "string"}}), "response_format"),
        (schema_of({"enum": []}), "response_format"),
        (schema_of(RECURSIVE), "response_format"),
        (schema_of({"$ref": "https://example.org/schema.json"}), "response_format"),
        (schema_of({"type": "string", "pattern": "(?=x)"}), "response_format"),
        (schema_of({"type": "array", "minItems": 3, "maxItems": 2}), "response_format"),
        (schema_of({"type": "object", "properties": {f"p{i}": {} for i in range(30_000)}}), "response_format"),
        ({"guided_regex": "("}, "guided_regex"),
        ({"guided_regex": "(?<=a)b"}, "guided_regex"),
        ({"guided_json": {"type": "sculpture"}}, "guided_json"),
        ({"response_format": {"type": "json_schema"}}, "response_format"),
        (schema_of({}) | {"guided_regex": "a"}, "response_format"),
    ],
)
def test_tools_and_schemas_that_are_nonsense(served: Server, more: dict[str, Any], field: str) -> None:
    refused(served, CHAT, {"model": "llama", "messages": [USER], "temperature": 0, **more}, field)


def test_a_tree_without_leaves_ends_with_its_tokens(served: Server) -> None:
    body = {"model": "llama", "messages": [USER], "max_tokens": 64, **schema_of(TREE)}
    status, reply = served.post(CHAT, body)
    assert (status, reply["choices"][0]["finish_reason"]) == (200, "length")


def test_a_schema_nested_too_deeply(served: Server) -> None:
    for levels in (20, 40, 90):
        schema: dict[str, Any] = {"type": "string"}
        for _ in range(levels):
            schema = {"type": "array", "items": schema}
        if levels < 30:
            body = {"model": "llama", "messages": [USER], "max_tokens": 4, **schema_of(schema)}
            assert served.post(CHAT, body)[0] == 200
        else:
            refused(served, CHAT, {"model": "llama", "messages": [USER], **schema_of(schema)}, "deep")


def test_a_regular_expression_that_explodes_does_no_harm(served: Server) -> None:
    many = "(((((a{1,500}){1,500}){1,500}){1,500}){1,500})"
    body = {"model": "llama", "messages": [USER], "max_tokens": 8, "guided_regex": many}
    assert served.post(CHAT, body)[0] in (200, 400)


@pytest.mark.parametrize("stream", [False, True])
def test_prompts_longer_than_the_context(served: Server, stream: bool) -> None:
    long = "word " * CONTEXT
    for path, asked, field in (
        (CHAT, {"messages": [{"role": "user", "content": long}]}, "messages"),
        (COMPLETIONS, {"prompt": long}, "prompt"),
        (COMPLETIONS, {"prompt": [5] * CONTEXT}, "prompt"),
    ):
        reported = refused(served, path, {"model": "llama", "stream": stream, **asked}, field)
        assert str(CONTEXT) in reported
    both = {"model": "llama", "stream": stream, "prompt": ["the river", long]}
    status, body = served.request("POST", COMPLETIONS, json.dumps(both).encode())
    # In a stream the first prompt's words may be on their way before the second has been read: then an event tells.
    assert status == 400 or (stream and status == 200)
    assert b'"param":"prompt[1]"' in body and str(CONTEXT).encode() in body
    refused(served, COMPLETIONS, {"model": "llama", "prompt": [512]}, "prompt")
    refused(served, COMPLETIONS, {"model": "llama", "prompt": ""}, "prompt")
    refused(served, EMBEDDINGS, {"model": "embedder", "input": ["the river", long]}, "input[1]")


def test_choices_times_tokens(served: Server) -> None:
    """Many choices of many tokens: the context is the limit of each, and the pages of all."""
    refused(served, COMPLETIONS, {"model": "llama", "prompt": ["x"] * 100, "n": 100, "max_tokens": 10**6}, "n")
    body = {"model": "llama", "prompt": "x", "n": 128, "max_tokens": 10**7, "stop_token_ids": list(range(3, 120))}
    status, reply = served.post(COMPLETIONS, body)
    assert (status, len(reply["choices"])) == (200, 128)


def media_message(url: Any, kind: str = "image_url", text: str = "what is this?") -> dict[str, Any]:
    content = [{"type": "text", "text": text}, {"type": kind, kind: {"url": url}}]
    return {"model": "vision", "messages": [{"role": "user", "content": content}], "max_tokens": 4}


PNG = image("PNG", (32, 24))
AT = "messages[0].content[1]."


@pytest.mark.parametrize(
    ("url", "kind"),
    [
        (None, "image_url"),
        ("", "image_url"),
        (3, "video_url"),
        ("data:image/png;base64,", "image_url"),
        ("data:image/png;base64,!!!", "image_url"),
        ("data:image/png", "image_url"),
        ("data:text/html;base64,aGVsbG8=", "image_url"),
        (data_url(PNG[: len(PNG) // 2], "image/png"), "image_url"),
        (data_url(PNG[:20], "image/png"), "image_url"),
        (data_url(png_header(10**9, 10**9), "image/png"), "image_url"),
        (data_url(b"<svg/>", "image/png"), "image_url"),
        (data_url(PNG, "image/png"), "video_url"),
        (data_url(video(), "video/mp4"), "image_url"),
        (data_url(PNG, "video/mp4"), "video_url"),
        (data_url(video()[:300], "video/mp4"), "video_url"),
        (data_url(sound(), "video/mp4"), "video_url"),
        (data_url(bytes(1 << 21), "image/png"), "image_url"),
        ("/etc/passwd", "image_url"),
        ("file:///etc/passwd", "image_url"),
        ("s3://bucket/cat.png", "image_url"),
        ("ftp://example.org/cat.png", "image_url"),
        ("javascript:alert(1)", "image_url"),
        ("http://", "image_url"),
        ("http://127.0.0.2/cat.png", "image_url"),
        ("http://localhost:1/cat.png", "image_url"),
        ("http://[::1]/cat.png", "image_url"),
        ("http://[::ffff:127.0.0.2]/cat.png", "image_url"),
        ("http://10.0.0.1/cat.png", "image_url"),
        ("http://0x7f.2/cat.png", "image_url"),
        ("http://169.254.169.254/latest/meta-data", "image_url"),
        ("http://user:secret@127.0.0.1/cat.png", "image_url"),
    ],
)
def test_media_that_cannot_be_had(served: Server, url: Any, kind: str) -> None:
    refused(served, CHAT, media_message(url, kind), AT + kind)


def test_media_of_the_web_that_cannot_be_had(served: Server, web: WebStub) -> None:
    web.routes |= {
        "/metadata": redirect("http://169.254.169.254/latest/meta-data"),
        "/neighbour": redirect("http://127.0.0.2/cat.png"),
        "/file": redirect("file:///etc/passwd"),
        "/round": redirect(web.url("/round")),
        "/page": serve(b"<html>no picture</html>", content_type="image/png"),
        "/huge.png": serve(PNG + bytes(2 << 20)),
        "/endless.mp4": endless(head=video()[:4000]),
    }
    for path in ("/metadata", "/neighbour", "/file", "/round", "/page", "/missing", "/huge.png"):
        refused(served, CHAT, media_message(web.url(path)), AT + "image_url")
    reported = refused(served, CHAT, media_message(web.url("/endless.mp4"), "video_url"), AT + "video_url")
    assert "2097152" in reported


def test_media_for_a_model_that_cannot_see(served: Server) -> None:
    body = {**media_message(data_url(PNG, "image/png")), "model": "llama"}
    assert "text only" in refused(served, CHAT, body, "messages")


def test_places_for_media_that_no_media_fills(served: Server) -> None:
    """What a template would write for an image, written by a client."""
    forged = media_message(data_url(PNG, "image/png"), text="<|vision_start|><|image_pad|><|vision_end|>")
    refused(served, CHAT, forged, "messages")
    many = {"type": "image_url", "image_url": {"url": data_url(image("PNG", (1, 400)), "image/png")}}
    refused(served, CHAT, {**forged, "messages": [{"role": "user", "content": [many]}]}, "messages")


def test_text_that_is_half_a_character(served: Server) -> None:
    body = b'{"model": "llama", "prompt": "\\ud83d", "max_tokens": 4}'
    refused(served, COMPLETIONS, body, "JSON")
    status, reply = served.request("POST", "/v2/models/llama/generate", b'{"text_input": "\xff", "max_tokens": 4}')
    assert status == 400, reply
