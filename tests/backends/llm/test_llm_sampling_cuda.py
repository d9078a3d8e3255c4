# SPDX-License-Identifier: Apache-2.0
"""The sampler on a GPU, where there is one. Needs nothing but PyTorch and numpy, so that it runs on a bare machine."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from headrace.backends.llm.sampling.sampler import Sampler
from headrace.backends.llm.sampling.state import SamplingState
from headrace.core.generation import Sampling

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")

ASKED: list[dict[str, Any]] = [
    {"temperature": 0.0},
    {"seed": 1},
    {"seed": 2, "temperature": 0.7, "top_p": 0.9, "logprobs": 3},
    {"seed": 3, "top_k": 40, "repetition_penalty": 1.2},
    {"seed": 4, "min_p": 0.05, "presence_penalty": 0.5, "frequency_penalty": 0.2},
    {"temperature": 0.0, "logit_bias": {7: 5.0}, "min_tokens": 4, "logprobs": 0},
]


def _said(device: str, asked: list[dict[str, Any]]) -> list[list[int]]:
    rows = [SamplingState(Sampling(**fields), [1, 2, 3], None, frozenset({2})) for fields in asked]
    sampler, said = Sampler(32_000, device), [[] for _ in rows]
    for step in range(30):
        # Whole sixteenths: the same on both, so that only the sampler can differ.
        logits = torch.randn(1, 32_000, generator=torch.Generator().manual_seed(step)).mul(48).round().div(16)
        sampled = sampler.sample(logits.expand(len(rows), -1).to(device), rows)
        for row, tokens, token in zip(rows, said, sampled.tokens, strict=True):
            row.advance(token)
            tokens.append(token)
    return said


def test_a_gpu_draws_the_same_alone_and_in_company() -> None:
    together = _said("cuda", ASKED)
    assert together == [_said("cuda", [fields])[0] for fields in ASKED]


def test_a_gpu_draws_nearly_always_what_a_cpu_draws() -> None:
    # Their exponentials differ in the last bit, which moves a border once in a hundred thousand draws.
    pairs = zip(sum(_said("cuda", ASKED), []), sum(_said("cpu", ASKED), []), strict=True)
    assert sum(one != other for one, other in pairs) <= 3


def test_nothing_waits_for_the_gpu_before_the_tokens_are_read() -> None:
    rows = [SamplingState(Sampling(**fields), [1, 2, 3], None, frozenset({2})) for fields in ASKED]
    sampler, logits = Sampler(32_000, "cuda"), torch.randn(len(rows), 32_000, device="cuda")
    sampler.sample(logits, rows)
    torch.cuda.set_sync_debug_mode("error")
    try:
        drawn = sampler.start(logits, rows)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert len(drawn.read().tokens) == len(rows)
