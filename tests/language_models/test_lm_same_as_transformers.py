# SPDX-License-Identifier: Apache-2.0
"""Greedy answers of 20 prompts, asked for over HTTP, are those of transformers' own `generate`, token for token."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from language_model_server import Server, third_parties
from openai import AsyncOpenAI, OpenAI

pytestmark = pytest.mark.worker("language models")

TOKENS = 20
HITS = "headrace_llm_prefix_cache_hit_tokens_total"
_TEXT = "the quick brown fox jumps over Grüße from 日本語 and a mill grinds corn 0123 while the river runs to the sea "
PROMPTS = [f"{number} {(_TEXT * 3)[3 * number : 10 + 12 * number]}" for number in range(20)]


class Reference(NamedTuple):
    """The same model, computed by transformers alone."""

    model: Any
    tokenizer: Any

    def generated(self, prompt: str, *, special: bool = True) -> list[int]:
        import torch

        request = self.tokenizer(prompt, return_tensors="pt", add_special_tokens=special)
        with third_parties(), torch.inference_mode():
            answer = self.model.generate(
                input_ids=request.input_ids,
                attention_mask=request.attention_mask,
                max_new_tokens=TOKENS,
                do_sample=False,
            )
        return [
            token for token in answer[0, request.input_ids.shape[1] :].tolist() if token != self.tokenizer.eos_token_id
        ]

    def text(self, prompt: str) -> str:
        return str(self.tokenizer.decode(self.generated(prompt), skip_special_tokens=True))

    def spelled(self, tokens: list[int]) -> list[bytes]:
        """The bytes of each token. Byte-level BPE writes every byte as a letter."""
        from transformers.convert_slow_tokenizer import bytes_to_unicode

        byte_of = {letter: byte for byte, letter in bytes_to_unicode().items()}
        return [bytes(byte_of[letter] for letter in self.tokenizer.convert_ids_to_tokens(token)) for token in tokens]


@pytest.fixture(scope="module")
def reference(repository: Path) -> Reference:
    import torch
    import transformers

    folder = repository / "llama" / "1"
    with third_parties():
        model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
        return Reference(model, transformers.AutoTokenizer.from_pretrained(folder))


@pytest.fixture(scope="module")
def texts(reference: Reference) -> list[str]:
    results = [reference.text(prompt) for prompt in PROMPTS]
    assert len(set(results)) > 15  # they do differ
    return results


def alone(client: OpenAI) -> list[str]:
    return [
        client.completions.create(model="llama", prompt=prompt, max_tokens=TOKENS, temperature=0).choices[0].text
        for prompt in PROMPTS
    ]


def test_one_at_a_time_and_again_from_the_prefix_cache(served: Server, client: OpenAI, texts: list[str]) -> None:
    assert alone(client) == texts
    before = served.metrics("llama")[HITS]
    assert alone(client) == texts
    assert served.metrics("llama")[HITS] > before


def test_all_concurrently_streamed_beside_adapters(served: Server, texts: list[str]) -> None:
    async def one(client: AsyncOpenAI, prompt: str, model: str = "llama") -> str:
        stream = await client.completions.create(
            model=model, prompt=prompt, max_tokens=TOKENS, temperature=0, stream=True
        )
        return "".join([chunk.choices[0].text async for chunk in stream])

    async def run_all() -> list[str]:
        async with AsyncOpenAI(base_url=served.base_url, api_key="none", max_retries=0, timeout=60) as client:
            others = [one(client, PROMPTS[number], "pirate") for number in range(4)]
            return await asyncio.gather(*(one(client, prompt) for prompt in PROMPTS), *others)

    answers = asyncio.run(run_all())
    assert answers[:20] == texts
    assert answers[20:] != texts[:4]


def test_many_prompts_of_one_request(client: OpenAI, texts: list[str]) -> None:
    answer = client.completions.create(model="llama", prompt=PROMPTS, max_tokens=TOKENS, temperature=0)
    assert [choice.text for choice in answer.choices] == texts


def test_token_for_token_through_the_chat_template(served: Server, reference: Reference) -> None:
    async def tokens(client: AsyncOpenAI, prompt: str) -> list[bytes]:
        answer = await client.chat.completions.create(
            model="llama",
            messages=[{"role": "user", "content": prompt}],
            max_tokens=TOKENS,
            temperature=0,
            logprobs=True,
        )
        logprobs = answer.choices[0].logprobs
        return [bytes(logprob.bytes or ()) for logprob in logprobs.content or ()] if logprobs is not None else []

    async def run_all() -> list[list[bytes]]:
        async with AsyncOpenAI(base_url=served.base_url, api_key="none", max_retries=0, timeout=60) as client:
            return await asyncio.gather(*(tokens(client, prompt) for prompt in PROMPTS))

    expected = []
    for prompt in PROMPTS:
        messages = [{"role": "user", "content": prompt}]
        text = reference.tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        expected.append(reference.spelled(reference.generated(text, special=False)))
    assert asyncio.run(run_all()) == expected
