# SPDX-License-Identifier: Apache-2.0
"""Temperature, `top_k`, `top_p` and `min_p` over many rows at once, each as transformers defines it. Called by `drawing`."""

from __future__ import annotations

from typing import Any

import numpy.typing as npt
import torch

_LIKELIEST = (8192,)
"""On a CPU so many are sorted first, where they may have `top_p` of the probability: sorting all is slow there."""

TEMPERATURE, TOP_K, TOP_P, MIN_P = 1, 2, 3, 4
"""Columns of the numbers of each row; column 0 is not ours."""


def warped(scores: torch.Tensor, numbers: npt.NDArray[Any], moved: torch.Tensor) -> torch.Tensor:
    """Scores with -inf for what may not be drawn. `numbers` holds a line for each row, `moved` the same on the device."""
    if (numbers[:, TEMPERATURE] != 1.0).any():
        scores = scores / moved[:, TEMPERATURE : TEMPERATURE + 1].float()
    top_k = numbers[:, TOP_K]
    if (top_k > 0).any():
        scores = _top_k(scores, moved[:, TOP_K], min(int(top_k.max()), scores.shape[1]))
    if (numbers[:, TOP_P] < 1.0).any():
        removed = (1.0 - moved[:, TOP_P : TOP_P + 1]).float()
        scores = _top_p_sparing(scores, removed, _LIKELIEST) if scores.is_cpu else _top_p(scores, removed)
    if (numbers[:, MIN_P] > 0.0).any():
        scores = _min_p(scores, moved[:, MIN_P : MIN_P + 1].float())
    return scores


def likeliest(scores: torch.Tensor) -> torch.Tensor:
    """The place of the highest in each row."""
    # Ten times as quick as PyTorch's own on a CPU.
    if scores.is_cpu and scores.dtype is torch.float32:
        return torch.from_numpy(scores.detach().numpy().argmax(-1))
    return scores.argmax(-1)


def _top_k(scores: torch.Tensor, top_k: torch.Tensor, most: int) -> torch.Tensor:
    values = scores.topk(most, -1).values
    last = values.gather(1, (top_k.long() - 1).clamp(0, most - 1).unsqueeze(-1))
    # 0 stands for all of them.
    last = last.masked_fill((top_k < 1).unsqueeze(-1), -torch.inf)
    return scores.masked_fill(scores < last, -torch.inf)


def _top_p(scores: torch.Tensor, removed: torch.Tensor) -> torch.Tensor:
    """Leave out the least likely, as long as they have not more than `removed` together."""
    values, ids = scores.sort(-1, descending=False)
    out = values.softmax(-1).cumsum(-1) <= removed
    # A row with top_p 1 loses nothing, not even what has no probability left in single precision.
    out &= removed > 0
    out[:, -1] = False
    return scores.masked_fill(out.scatter(1, ids, out), -torch.inf)


def _top_p_sparing(scores: torch.Tensor, removed: torch.Tensor, sizes: tuple[int, ...]) -> torch.Tensor:
    """The same by the likeliest alone, where they are enough."""
    if not sizes or scores.shape[1] <= sizes[0]:
        return _top_p(scores, removed)
    values, ids = scores.topk(sizes[0], -1)
    shares = (values - scores.logsumexp(-1, keepdim=True)).exp()
    before = shares.cumsum(-1) - shares
    out = before >= 1.0 - removed
    out[:, 0] = False
    enough = out[:, -1] | (removed[:, 0] <= 0)
    kept = torch.full_like(scores, -torch.inf).scatter_(1, ids, values.masked_fill(out, -torch.inf))
    kept = torch.where(removed > 0, kept, scores)
    rest = (~enough).nonzero().squeeze(-1)
    if not len(rest):
        return kept
    others = _top_p_sparing(scores.index_select(0, rest), removed.index_select(0, rest), sizes[1:])
    return kept.index_copy_(0, rest, others)


def _min_p(scores: torch.Tensor, min_p: torch.Tensor) -> torch.Tensor:
    probabilities = scores.softmax(-1)
    least = min_p * probabilities.amax(-1, keepdim=True)
    return scores.masked_fill(probabilities < least, -torch.inf)
