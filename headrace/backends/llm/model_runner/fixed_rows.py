# SPDX-License-Identifier: Apache-2.0
"""Steps in blocks of a fixed number of rows, so that a row's result does not depend on the other rows (`deterministic`).

Matrix products, norms and other reductions add in an order that depends on the shapes of their tensors: with the number of
rows of a step, the last bits of each row's result change, and with them, now and then, a token. Here every operation of the
model sees the same shapes in every step: tokens are computed in blocks of `rows` rows, and a block that is not full is
padded. What is left is the place of a row in its block; `are_alike` checks, when a model is loaded, that equal rows have
equal results at every place. Attention is computed for each token by the tokens before it alone: `PagedAttention` and
`invariant_attention_kernels`.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from headrace.backends.llm.model_runner.fused_experts import expert_modules
from headrace.backends.llm.scheduler import Chunk

_EXPERT_COUNTS = ("num_experts", "num_local_experts", "n_routed_experts")
"""Settings of models with a mixture of experts."""
_TRIALS = 3
"""Tokens that `trial_tokens` returns."""


@dataclass(frozen=True, slots=True)
class Block:
    """Chunks, or parts of chunks, of together at most `rows` tokens."""

    parts: list[Chunk]
    singles: int
    """The first so many parts are chunks of one token."""
    ended: list[int]
    """Indices of the chunks that end in this block: those of the first parts, in their order."""


def blocks_of(
    chunks: Sequence[Chunk], indices: Sequence[int], rows: int, *, most_singles: int, most_others: int
) -> Iterator[Block]:
    """Divide the chunks with these indices into blocks of `rows` rows; chunks of one token come first.

    A block has at most `most_singles` chunks of one token, and `most_others` others.
    """
    singles = deque(index for index in indices if chunks[index].count == 1)
    others = deque((index, chunks[index]) for index in indices if chunks[index].count > 1)
    while singles or others:
        ended = [singles.popleft() for _ in range(min(len(singles), rows, most_singles))]
        parts, count = [chunks[index] for index in ended], len(ended)
        left = rows - count
        while others and left and len(parts) - count < most_others:
            index, chunk = others.popleft()
            if chunk.count > left:
                parts.append(replace(chunk, count=left, samples=False))
                others.appendleft((index, replace(chunk, start=chunk.start + left, count=chunk.count - left)))
                break
            parts.append(chunk)
            ended.append(index)
            left -= chunk.count
        yield Block(parts, count, ended)


def most_rows(model: Any, rows: int, device: torch.device) -> int:
    """Return how many of `rows` rows may be computed together.

    Products with experts have as many rows as chose the expert, unless our kernel computes them, on a GPU.
    """
    config = model.config.get_text_config()
    has_experts = any(getattr(config, name, None) for name in _EXPERT_COUNTS)
    ours = device.type == "cuda" and any(True for _ in expert_modules(model))
    return 1 if has_experts and not ours else rows


def trial_tokens(vocabulary: int) -> list[int]:
    """Return some tokens to compute in trials."""
    return [(2 * number + 1) * vocabulary // (2 * _TRIALS) for number in range(_TRIALS)]


def are_alike(logits: torch.Tensor) -> bool:
    """Return whether all rows have the same bits."""
    return bool((logits == logits[:1]).all())
