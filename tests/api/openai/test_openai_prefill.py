# SPDX-License-Identifier: Apache-2.0
"""`POST /v1/headrace/prefill` and tickets in requests: what the model is told, and who may ask. Pages are the backend's."""

from __future__ import annotations

import time
from collections.abc import Iterator

import pytest
from openai_server import OpenAiServer, openai_server_with_models

from headrace.api.openai import prefill
from headrace.core.kv_transfer import (
    MAX_TOKEN_CHARACTERS,
    PREFILL_PATH,
    TRANSFER_HEADER,
    KvTransferSettings,
    prefill_proof,
)

KEY = b"a key that has more than 16 bytes"
USER = {"role": "user", "content": "one two three four"}
CHAT = {"model": "repeater", "messages": [USER], "max_tokens": 9, "stream": True, "n": 2, "seed": 3}


@pytest.fixture(scope="module")
def computing() -> Iterator[OpenAiServer]:
    with openai_server_with_models(kv_transfer=KvTransferSettings("prefill", KEY)) as server:
        yield server


def test_the_prompt_of_a_chat_and_of_a_completion(computing: OpenAiServer) -> None:
    for body in (CHAT, {"model": "repeater", "prompt": "one two three four", "best_of": 1, "echo": True}):
        status, reply, _ = computing.ask(PREFILL_PATH, body)
        assert (status, reply) == (200, {"ticket": "made.up", "prompt_tokens": 4})
        generation = computing.repeater.received[-1]
        assert generation.prefill_only and not generation.stream
        assert (generation.sampling.n, generation.sampling.max_tokens) == (1, 1)


def test_the_same_tools_template_and_pictures_as_the_whole_request(computing: OpenAiServer) -> None:
    image = {"type": "image_url", "image_url": {"url": "data:8x6"}}
    tool = {"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}
    body = {
        "model": "poet",
        "messages": [{"role": "user", "content": [{"type": "text", "text": "see"}, image]}],
        "tools": [tool],
        "chat_template_kwargs": {"enable_thinking": False},
    }
    assert computing.ask("/v1/chat/completions", body)[0] == computing.ask(PREFILL_PATH, body)[0] == 200
    whole, prompt = computing.repeater.received[-2:]
    for name in ("messages", "tools", "template_arguments", "adapter"):
        assert getattr(whole, name) == getattr(prompt, name)
    assert [each.pixels.shape for each in whole.media] == [each.pixels.shape for each in prompt.media]  # type: ignore[union-attr]


def test_nothing_is_handed_over_of_several_prompts_and_of_other_engines(computing: OpenAiServer) -> None:
    nothing = {"ticket": "", "prompt_tokens": 0}
    assert computing.ask(PREFILL_PATH, {"model": "repeater", "prompt": ["a", "b"]})[:2] == (200, nothing)
    assert computing.ask(PREFILL_PATH, {"model": "elsewhere", "prompt": "a"})[:2] == (200, nothing)
    assert computing.ask(PREFILL_PATH, {"model": "elsewhere", "messages": [USER]})[:2] == (200, nothing)


def test_errors_are_those_of_the_whole_request(computing: OpenAiServer) -> None:
    for body in ({}, {"model": "repeater"}, {"model": "nobody", "prompt": "a"}, {**CHAT, "temperature": 9}, b"{"):
        assert computing.ask(PREFILL_PATH, body)[0] in (400, 404)
    status, reply, _ = computing.ask(PREFILL_PATH, {**CHAT, "messages": [{"role": "user", "content": "BUSY"}]})
    assert (status, reply["error"]["code"]) == (503, "unavailable")
    assert computing.ask(PREFILL_PATH, None, "GET")[0] == 405


def test_strangers_have_to_know_the_key(computing: OpenAiServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prefill, "_is_this_machine", lambda _: False)
    body = b'{"model": "repeater", "prompt": "one two"}'
    field, now = TRANSFER_HEADER.decode(), time.time()
    assert computing.ask(PREFILL_PATH, body)[0] == 403
    for key, when, signed in ((b"another key of 16 and more", now, body), (KEY, now - 999, body), (KEY, now, b"{}")):
        proof = prefill_proof(key, signed, when).decode()
        assert computing.ask(PREFILL_PATH, body, headers={field: proof})[0] == 403
    assert computing.ask(PREFILL_PATH, body, headers={field: prefill_proof(KEY, body, now).decode()})[0] == 200


@pytest.mark.parametrize(
    ("address", "here"), [(b"127.0.0.1", True), (b"[::1]", True), (b"::1", True), (b"10.0.0.1", False), (b"", True)]
)
def test_which_addresses_are_this_machine(address: bytes, here: bool) -> None:
    assert prefill._is_this_machine(address) is here


def test_a_server_without_the_role_has_no_such_path(openai_server: OpenAiServer) -> None:
    assert openai_server.ask(PREFILL_PATH, CHAT)[0] == 404


def test_a_ticket_goes_to_the_model_if_it_can_be_one(openai_server: OpenAiServer) -> None:
    for path, body in (
        ("/v1/chat/completions", {**CHAT, "stream": False}),
        ("/v1/completions", {"model": "repeater", "prompt": "a"}),
    ):
        for ticket, told in (("some.ticket", "some.ticket"), ("x" * (MAX_TOKEN_CHARACTERS + 1), "")):
            assert openai_server.ask(path, body, headers={TRANSFER_HEADER.decode(): ticket})[0] == 200
            assert openai_server.repeater.received[-1].transfer_token == told
            assert not openai_server.repeater.received[-1].prefill_only
