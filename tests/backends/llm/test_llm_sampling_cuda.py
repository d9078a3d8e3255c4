# SPDX-License-Identifier: Apache-2.0
"""The sampler on a GPU, where there is one. Needs nothing but PyTorch and numpy, so that it runs on a bare machine."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from headrace.backends.llm.sampling.bad_words import BadWords
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
    {"seed": 5, "allowed_token_ids": tuple(range(0, 32_000, 5))},
    {"temperature": 0.0, "bad_words": ("in", "two")},
]
BAD_WORDS = ((40,), (41, 42))


def _rows(asked: list[dict[str, Any]]) -> list[SamplingState]:
    return [
        SamplingState(
            Sampling(**fields), [1, 2, 3], None, frozenset({2}),
            bad_words=BadWords(BAD_WORDS) if "bad_words" in fields else None,
        )
        for fields in asked
    ]  # fmt: skip


def _said(device: str, asked: list[dict[str, Any]]) -> list[list[int]]:
    rows = _rows(asked)
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


@pytest.mark.filterwarnings("ignore:Synchronization debug mode")
def test_nothing_waits_for_the_gpu_before_the_tokens_are_read() -> None:
    rows = _rows(ASKED)
    sampler, logits = Sampler(32_000, "cuda"), torch.randn(len(rows), 32_000, device="cuda")
    sampler.sample(logits, rows)
    torch.cuda.set_sync_debug_mode("error")
    try:
        drawn = sampler.start(logits, rows)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert len(drawn.read().tokens) == len(rows)


KINDS = [(1.0, 0, 1.0, 0.0), (0.8, 0, 0.95, 0.0), (0.7, 50, 1.0, 0.0), (1.0, 40, 0.9, 0.0), (0.0, 0, 1.0, 0.0)]
KINDS += [(1.2, 0, 1.0, 0.05), (0.9, 100, 0.5, 0.1), (0.3, 1, 1.0, 0.0), (1.0, 10**6, 0.999999, 0.0)]


def _expected(logits: torch.Tensor, uniform: float, temperature: float, top_k: int, top_p: float, min_p: float) -> int:
    """The token that sorting gives."""
    if not temperature:
        return int(logits.argmax())
    width, kept = len(logits), torch.ones_like(logits, dtype=torch.bool)
    if 0 < top_k < width:
        kept &= logits >= logits.topk(top_k).values[-1]
    if top_p < 1:
        values, ids = (logits.masked_fill(~kept, -torch.inf) / temperature).softmax(-1).sort(descending=True)
        count = int((values.cumsum(-1) - values < top_p).sum())
        kept &= logits >= logits[ids[count - 1]]
    if min_p:
        kept &= logits >= logits.max() + float(torch.tensor(min_p).log()) * temperature
    weights = torch.where(kept, ((logits - logits.max()) / temperature).exp(), 0.0)
    sums = (weights * 2**30).long().cumsum(-1)
    return int((sums > int(uniform * float(sums[-1]))).int().argmax())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("spread", [0.5, 2.0, 5.0])
@pytest.mark.parametrize("width", [1000, 8192, 128_256])
def test_the_kernel_samples_what_sorting_gives(dtype: torch.dtype, spread: float, width: int) -> None:
    from headrace.backends.llm.sampling.triton_sampler import sample_tokens

    generator = torch.Generator("cuda").manual_seed(width)
    logits = (torch.randn(72, width, device="cuda", generator=generator) * spread).to(dtype)
    logits[3, : width // 2] = -torch.inf
    uniform = torch.rand(72, generator=torch.Generator().manual_seed(1), dtype=torch.float64).tolist()
    lines = [(uniform[row], *KINDS[row % len(KINDS)]) for row in range(72)]
    tokens = sample_tokens(logits, torch.tensor(lines, dtype=torch.float64, device="cuda")).tolist()
    expected = [_expected(row, *line) for row, line in zip(logits.float(), lines, strict=True)]
    # Sums of floats in another order move a border once in thousands of draws.
    assert sum(one != other for one, other in zip(tokens, expected, strict=True)) <= 1


def test_the_kernel_survives_logits_that_are_not_numbers() -> None:
    from headrace.backends.llm.sampling.triton_sampler import sample_tokens

    logits = torch.full((len(KINDS), 1000), torch.nan, device="cuda")
    lines = torch.tensor([(0.5, *kind) for kind in KINDS], dtype=torch.float64, device="cuda")
    assert all(0 <= token < 1000 for token in sample_tokens(logits, lines).tolist())
    assert all(0 <= token < 1000 for token in sample_tokens(logits.fill_(-torch.inf), lines).tolist())
    assert sample_tokens(logits.fill_(1.0), lines).max() < 1000
