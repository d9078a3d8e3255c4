# SPDX-License-Identifier: Apache-2.0
"""Sampling fields that vLLM's users send, with a real, if tiny, model; compared with transformers where that is possible."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import closing
from http.client import HTTPConnection
from pathlib import Path
from typing import Any

import openai
import pytest
from openai import OpenAI
from tiny_model_server import served

from headrace.api.openai.settings import OpenAiSettings
from support.llm_models import tiny_llama
from support.serving import Serving

CONFIG = """
backend: "llm"
parameters { key: "max_model_len" value { string_value: "768" } }
parameters { key: "kv_cache_bytes" value { string_value: "8388608" } }
parameters { key: "scheduling_policy" value { string_value: "POLICY" } }
instance_group [ { kind: KIND_CPU } ]
"""
PROMPT = "the quick brown fox"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("models")
    for name, policy in (("tiny", "fcfs"), ("ranked", "priority")):
        tiny_llama(made / name / "1")
        (made / name / "config.pbtxt").write_text(CONFIG.replace("POLICY", policy))
    return made


@pytest.fixture(scope="module")
def server(folder: Path) -> Iterator[Serving]:
    with served(folder) as running:
        yield running


@pytest.fixture(scope="module")
def client(server: Serving) -> Iterator[OpenAI]:
    with OpenAI(base_url=f"http://127.0.0.1:{server.port}/v1", api_key="none", max_retries=0, timeout=60) as made:
        yield made


@pytest.fixture(scope="module")
def tokenizer(folder: Path) -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(folder / "tiny" / "1")


def complete(client: OpenAI, prompt: Any = PROMPT, *, model: str = "tiny", **more: Any) -> Any:
    own = {name: more.pop(name) for name in ("max_tokens", "n", "best_of", "echo", "logprobs", "stop") if name in more}
    settings = {"max_tokens": 8, "temperature": 0, **own}
    return client.completions.create(model=model, prompt=prompt, extra_body=more, **settings)


def generate(server: Serving, body: dict[str, Any]) -> tuple[int, dict[str, Any]]:
    """Through v2."""
    with closing(HTTPConnection("127.0.0.1", server.port, timeout=60)) as connection:
        connection.request("POST", "/v2/models/tiny/generate", json.dumps(body))
        response = connection.getresponse()
        return response.status, json.loads(response.read())


def expected_logprobs(folder: Path, tokens: list[int]) -> Any:
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder / "tiny" / "1").eval()
    with torch.inference_mode():
        return model(torch.tensor([tokens])).logits[0].log_softmax(-1)


def test_bad_words_are_not_generated(client: OpenAI, tokenizer: Any) -> None:
    first = complete(client, max_tokens=1).choices[0].text
    assert first.strip()
    assert not complete(client, bad_words=[first]).choices[0].text.startswith(first)
    # Of a word of several tokens only the last is excluded, and only behind the others.
    x, y = (tokenizer.encode(letter, add_special_tokens=False)[0] for letter in "xy")
    mostly_x: dict[str, Any] = {"allowed_token_ids": [x, y], "logit_bias": {str(x): 50}}
    assert complete(client, **mostly_x).choices[0].text == "xxxxxxxx"
    assert complete(client, **mostly_x, bad_words=["xx"]).choices[0].text == "xyxyxyxy"
    assert complete(client, **mostly_x, bad_words=["xxx", "yxx"]).choices[0].text == "xxyxyxyx"
    assert complete(client, **mostly_x, bad_words=["x", "xy"]).choices[0].text == "yyyyyyyy"


def test_only_allowed_tokens_are_generated(client: OpenAI, tokenizer: Any) -> None:
    allowed = [tokenizer.encode(letter, add_special_tokens=False)[0] for letter in "xyz"]
    text = complete(client, max_tokens=20, allowed_token_ids=allowed).choices[0].text
    assert len(text) == 20
    assert set(text) <= set("xyz")
    sampled = client.completions.create(
        model="tiny", prompt=PROMPT, max_tokens=20, seed=3, extra_body={"allowed_token_ids": allowed, "top_k": 40}
    )
    assert set(sampled.choices[0].text) <= set("xyz")
    with pytest.raises(openai.BadRequestError, match="allowed_token_ids"):
        complete(client, allowed_token_ids=[10**6])


@pytest.mark.parametrize("prompt", [PROMPT, "the river runs to the sea and " * 40])
def test_prompt_logprobs_are_the_models_own(client: OpenAI, folder: Path, tokenizer: Any, prompt: str) -> None:
    tokens = tokenizer.encode(prompt)
    expected = expected_logprobs(folder, tokens)
    for _ in range(2):  # the second request would find the prompt in the prefix cache
        answer = complete(client, prompt, prompt_logprobs=2)
        lines = answer.choices[0].prompt_logprobs
        assert len(lines) == len(tokens)
        assert lines[0] is None
        for index, line in enumerate(lines[1:]):
            row, token = expected[index], tokens[index + 1]
            entry = line[str(token)]
            assert entry["logprob"] == pytest.approx(float(row[token]), abs=1e-3)
            assert entry["rank"] == int((row > row[token]).sum()) + 1
            assert entry["decoded_token"] == tokenizer.decode([token])
            assert set(map(int, line)) == {token, *row.topk(2).indices.tolist()}
    assert complete(client, prompt).choices[0].text == answer.choices[0].text
    plain = complete(client, prompt).model_dump()["choices"][0]
    assert "prompt_logprobs" not in plain


def test_prompt_logprobs_of_a_chat(client: OpenAI) -> None:
    messages: Any = [{"role": "user", "content": "hello"}]
    answer: Any = client.chat.completions.create(
        model="tiny", messages=messages, max_tokens=2, n=2, extra_body={"prompt_logprobs": 0}
    )
    assert len(answer.prompt_logprobs) == answer.usage.prompt_tokens
    assert [len(line) for line in answer.prompt_logprobs[1:]] == [1] * (answer.usage.prompt_tokens - 1)


@pytest.mark.parametrize("as_tokens", [False, True])
@pytest.mark.parametrize("stream", [False, True])
def test_echo_with_logprobs(client: OpenAI, folder: Path, tokenizer: Any, stream: bool, as_tokens: bool) -> None:
    tokens = tokenizer.encode(PROMPT)
    sent: Any = {"model": "tiny", "prompt": tokens if as_tokens else PROMPT, "max_tokens": 4, "temperature": 0}
    plain = client.completions.create(**sent).choices[0].text
    if stream:
        chunks = list(client.completions.create(**sent, echo=True, logprobs=1, stream=True))
        choices = [chunk.choices[0] for chunk in chunks]
        text = "".join(choice.text for choice in choices)
        parts: list[Any] = [choice.logprobs for choice in choices if choice.logprobs]
    else:
        choice = client.completions.create(**sent, echo=True, logprobs=1).choices[0]
        text, parts = choice.text, [choice.logprobs]
    values = [value for part in parts for value in part.token_logprobs]
    offsets = [offset for part in parts for offset in part.text_offset]
    tops = [top for part in parts for top in part.top_logprobs]
    assert text == PROMPT + plain
    assert "".join(token for part in parts for token in part.tokens) == text
    assert len(values) == len(tokens) + 4
    assert offsets[: len(tokens)] == [len(tokenizer.decode(tokens[:count])) for count in range(len(tokens))]
    assert offsets == sorted(offsets)
    assert values[0] is None
    assert tops[0] is None
    expected = expected_logprobs(folder, tokens)
    wanted = [float(expected[index, token]) for index, token in enumerate(tokens[1:])]
    assert values[1 : len(tokens)] == pytest.approx(wanted, abs=1e-3)
    assert {len(top) for top in tops[1:]} == {1}


def test_echo_alone_scores_a_prompt(client: OpenAI, tokenizer: Any) -> None:
    tokens = tokenizer.encode(PROMPT)
    answer = complete(client, [tokens, tokens[:3]], max_tokens=0, echo=True, logprobs=0)
    first, second = answer.choices
    assert (first.text, second.text) == (PROMPT, tokenizer.decode(tokens[:3]))
    assert [len(first.logprobs.token_logprobs), len(second.logprobs.token_logprobs)] == [len(tokens), 3]
    assert (answer.usage.completion_tokens, first.finish_reason) == (0, "length")


def test_best_of_returns_the_likeliest_choices(client: OpenAI) -> None:
    sent: Any = {"model": "tiny", "prompt": [PROMPT, "a mill"], "max_tokens": 5, "seed": 11}
    every = client.completions.create(**sent, n=6, logprobs=0).choices

    def mean(choice: Any) -> float:
        return sum(choice.logprobs.token_logprobs) / len(choice.logprobs.token_logprobs)

    best = client.completions.create(**sent, n=2, best_of=6)
    expected = [choice.text for group in (every[:6], every[6:]) for choice in sorted(group, key=mean, reverse=True)[:2]]
    assert [choice.text for choice in best.choices] == expected
    assert [choice.index for choice in best.choices] == [0, 1, 2, 3]
    assert best.choices[0].logprobs is None
    assert best.usage is not None
    assert best.usage.completion_tokens > 5 * 4


@pytest.mark.parametrize("stream", [False, True])
def test_a_stop_string_can_stay(client: OpenAI, stream: bool) -> None:
    text = complete(client, max_tokens=12).choices[0].text
    stop = text[4:6]
    end = text.index(stop) + len(stop)

    def ask(**more: Any) -> str:
        if stream:
            chunks = client.completions.create(
                model="tiny", prompt=PROMPT, max_tokens=12, temperature=0, stop=[stop], stream=True, extra_body=more
            )
            return "".join(chunk.choices[0].text for chunk in chunks)
        answer: str = complete(client, max_tokens=12, stop=[stop], **more).choices[0].text
        return answer

    assert ask() == text[: end - len(stop)]
    assert ask(include_stop_str_in_output=True) == text[:end]


def test_stop_tokens_and_special_tokens_can_stay(client: OpenAI, tokenizer: Any) -> None:
    x, end = tokenizer.encode("x", add_special_tokens=False)[0], tokenizer.convert_tokens_to_ids("<|end|>")
    only_x: dict[str, Any] = {"allowed_token_ids": [x], "stop_token_ids": [x]}
    assert complete(client, **only_x).choices[0].text == ""
    kept = complete(client, **only_x, include_stop_str_in_output=True).choices[0]
    assert (kept.text, kept.finish_reason) == ("x", "stop")
    assert complete(client, allowed_token_ids=[end], max_tokens=2).choices[0].text == ""
    special = complete(client, allowed_token_ids=[end], max_tokens=2, skip_special_tokens=False)
    assert special.choices[0].text == "<|end|><|end|>"


def test_a_prompt_is_truncated_from_its_beginning(client: OpenAI, tokenizer: Any) -> None:
    tokens = tokenizer.encode(PROMPT)
    expected = complete(client, tokens[-3:]).choices[0].text
    for prompt in (PROMPT, tokens):
        answer = complete(client, prompt, truncate_prompt_tokens=3)
        assert (answer.choices[0].text, answer.usage.prompt_tokens) == (expected, 3)
    echoed = complete(client, PROMPT, truncate_prompt_tokens=3, echo=True).choices[0].text
    assert echoed == tokenizer.decode(tokens[-3:]) + expected
    long = "the river " * 2000
    with pytest.raises(openai.BadRequestError, match="context"):
        complete(client, long)
    assert complete(client, long, truncate_prompt_tokens=-1).usage.prompt_tokens == 768 - 8
    with pytest.raises(openai.BadRequestError, match="context"):
        complete(client, long, truncate_prompt_tokens=5000)


def test_a_priority_needs_a_model_that_uses_it(client: OpenAI, server: Serving) -> None:
    text = complete(client).choices[0].text
    assert complete(client, priority=0).choices[0].text == text
    with pytest.raises(openai.BadRequestError, match="scheduling_policy") as raised:
        complete(client, priority=5)
    assert raised.value.param == "priority"
    assert complete(client, model="ranked", priority=-5).choices[0].text == text
    # In v2 it is Triton's, which a model without priorities ignores.
    status, body = generate(server, {"text_input": PROMPT, "priority": 1})
    assert (status, "text_output" in body) == (200, True)


def test_the_same_fields_through_v2(server: Serving, tokenizer: Any) -> None:
    x = tokenizer.encode("x", add_special_tokens=False)[0]
    body = {
        "text_input": PROMPT,
        "max_tokens": 3,
        "allowed_token_ids": f"[{x}]",
        "prompt_logprobs": 1,
        "bad_words": "fox",
        "truncate_prompt_tokens": 4,
        "include_stop_str_in_output": True,
        "skip_special_tokens": False,
    }
    status, answer = generate(server, body)
    assert status == 200, answer
    assert answer["text_output"] == "xxx"
    assert len(json.loads(answer["prompt_logprobs"])) == 4
    status, answer = generate(server, {"text_input": PROMPT, "bad_words": "[1]"})
    assert status == 400
    assert "bad_words" in answer["error"]


def test_too_many_prompt_logprobs_are_refused(client: OpenAI, folder: Path) -> None:
    with (
        pytest.raises(openai.BadRequestError, match="too large"),
        served(folder, OpenAiSettings(prompt_logprobs_bytes=20_000)) as small,
        OpenAI(base_url=f"http://127.0.0.1:{small.port}/v1", api_key="none", max_retries=0) as asking,
    ):
        assert len(complete(asking, PROMPT, prompt_logprobs=1).choices) == 1
        complete(asking, [PROMPT] * 60, prompt_logprobs=1)
