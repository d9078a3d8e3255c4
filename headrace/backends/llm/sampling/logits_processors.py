# SPDX-License-Identifier: Apache-2.0
"""Logits processors: change the logits of all rows of a step before tokens are chosen.

`LogitsProcessors` applies penalties, `logit_bias`, `min_tokens`, `bad_words` and the token masks of structured output and
`allowed_token_ids`. `warp` applies
temperature, `top_k`, `top_p` and `min_p`, each as transformers defines it. What no row asks for is not computed.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from headrace.backends.llm.sampling.state import SamplingState, TokenCounts

TEMPERATURE, TOP_K, TOP_P, MIN_P = 1, 2, 3, 4
"""Columns of the params array that `warp` reads; column 0 is the sampler's random number."""
_TOP_P_CANDIDATES = (8192,)
"""On a CPU, `top_p` sorts this many of the likeliest tokens first, where they may suffice: sorting all is slow there."""


class LogitsProcessors:
    """Processors that depend on the state of each row, on one device."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._bit_shifts = torch.arange(32, dtype=torch.int32, device=device)

    def apply(self, logits: torch.Tensor, rows: Sequence[SamplingState]) -> torch.Tensor:
        """Return the processed logits; the input is left unchanged."""
        return self._mask_constrained(self.bias(logits, rows), rows)

    def to_device(self, array: npt.NDArray[Any]) -> torch.Tensor:
        """Copy an array to the device without waiting."""
        return torch.from_numpy(array).to(self._device, non_blocking=True)

    def bias(self, logits: torch.Tensor, rows: Sequence[SamplingState]) -> torch.Tensor:
        """Apply penalties, `logit_bias`, `min_tokens` and `bad_words`. The first change copies the logits."""
        scores = logits
        penalised = [
            (index, row.token_counts)
            for index, row in enumerate(rows)
            if row.token_counts is not None and len(row.token_counts.ids)
        ]
        if penalised:
            scores = self._penalise(scores.clone(), rows, penalised)
        biases = [(index, row.bias) for index, row in enumerate(rows) if row.bias is not None]
        if biases:
            scores = scores.clone() if scores is logits else scores
            indices = np.concatenate([np.full(len(ids), index) for index, (ids, _) in biases])
            packed = np.stack([indices, *(np.concatenate([bias[part] for _, bias in biases]) for part in (0, 1))])
            where, ids, values = self.to_device(packed.astype(np.float64))
            scores.index_put_((where.long(), ids.long()), values.float(), accumulate=True)
        forbidden = [
            (index, token)
            for index, row in enumerate(rows)
            if row.sampling.min_tokens or row.bad_words is not None
            for token in row.forbidden_tokens()
            if token < scores.shape[1] and not row.finished
        ]
        if forbidden:
            scores = scores.clone() if scores is logits else scores
            where, ids = self.to_device(np.asarray(forbidden, np.int64).T.copy())
            # Created on the device: a scalar from the host would make the device wait.
            scores.index_put_((where, ids), scores.new_full((1,), -torch.inf))
        return scores

    def _penalise(
        self, scores: torch.Tensor, rows: Sequence[SamplingState], penalised: Sequence[tuple[int, TokenCounts]]
    ) -> torch.Tensor:
        strengths = np.asarray(
            [
                (sampling.repetition_penalty, sampling.presence_penalty, sampling.frequency_penalty)
                for sampling in (rows[index].sampling for index, _ in penalised)
            ],
            np.float64,
        )
        sizes = [len(counts.ids) for _, counts in penalised]
        packed = np.empty((6, sum(sizes)), np.float64)
        packed[0] = np.repeat([index for index, _ in penalised], sizes)
        packed[1] = np.concatenate([counts.ids for _, counts in penalised])
        packed[2] = np.concatenate([counts.counts for _, counts in penalised])
        packed[3:] = np.repeat(strengths.T, sizes, axis=1)
        on_device = self.to_device(packed)
        where, ids = on_device[0].long(), on_device[1].long()
        counts, repetition, presence, frequency = on_device[2:].float()
        old = scores[where, ids]
        new = torch.where(old < 0, old * repetition, old / repetition)
        scores[where, ids] = new - frequency * counts - presence * (counts > 0)
        return scores

    def _mask_constrained(self, scores: torch.Tensor, rows: Sequence[SamplingState]) -> torch.Tensor:
        """Mask the tokens that a row's constraint or `allowed_token_ids` does not allow."""
        masks = [(index, mask) for index, row in enumerate(rows) if (mask := row.token_bitmask()) is not None]
        if not masks:
            return scores
        width = scores.shape[1]
        words = np.zeros((len(masks), (width + 31) // 32), np.int32)
        for line, (_, mask) in zip(words, masks, strict=True):
            line[: len(mask)] = mask.view(np.int32)[: len(line)]
        bits = (self.to_device(words).unsqueeze(-1) >> self._bit_shifts) & 1
        forbidden = bits.view(len(masks), -1)[:, :width] == 0
        if len(masks) == len(rows):
            return scores.masked_fill(forbidden, -torch.inf)
        where = self.to_device(np.asarray([index for index, _ in masks], np.int64))
        return scores.index_copy(0, where, scores.index_select(0, where).masked_fill(forbidden, -torch.inf))


def warp(scores: torch.Tensor, params: npt.NDArray[Any], device_params: torch.Tensor) -> torch.Tensor:
    """Apply temperature, `top_k`, `top_p` and `min_p`; excluded tokens become -inf.

    `params` has a line per row (columns above); `device_params` is the same on the device.
    """
    if (params[:, TEMPERATURE] != 1.0).any():
        scores = scores / device_params[:, TEMPERATURE : TEMPERATURE + 1].float()
    top_k = params[:, TOP_K]
    if (top_k > 0).any():
        scores = _top_k(scores, device_params[:, TOP_K], min(int(top_k.max()), scores.shape[1]))
    if (params[:, TOP_P] < 1.0).any():
        removed = (1.0 - device_params[:, TOP_P : TOP_P + 1]).float()
        scores = (
            _top_p_from_candidates(scores, removed, _TOP_P_CANDIDATES) if scores.is_cpu else _top_p(scores, removed)
        )
    if (params[:, MIN_P] > 0.0).any():
        scores = _min_p(scores, device_params[:, MIN_P : MIN_P + 1].float())
    return scores


def argmax_tokens(scores: torch.Tensor) -> torch.Tensor:
    """Return the likeliest token of each row."""
    # Ten times as fast as PyTorch's argmax on a CPU.
    if scores.is_cpu and scores.dtype is torch.float32:
        return torch.from_numpy(scores.detach().numpy().argmax(-1))
    return scores.argmax(-1)


def _top_k(scores: torch.Tensor, top_k: torch.Tensor, most: int) -> torch.Tensor:
    values = scores.topk(most, -1).values
    lowest = values.gather(1, (top_k.long() - 1).clamp(0, most - 1).unsqueeze(-1))
    # A top_k of 0 keeps all tokens.
    lowest = lowest.masked_fill((top_k < 1).unsqueeze(-1), -torch.inf)
    return scores.masked_fill(scores < lowest, -torch.inf)


def _top_p(scores: torch.Tensor, removed: torch.Tensor) -> torch.Tensor:
    """Exclude the least likely tokens whose probabilities add up to at most `removed`."""
    values, ids = scores.sort(-1, descending=False)
    excluded = values.softmax(-1).cumsum(-1) <= removed
    # A row with top_p 1 loses nothing, not even tokens whose probability is 0 in single precision.
    excluded &= removed > 0
    excluded[:, -1] = False
    return scores.masked_fill(excluded.scatter(1, ids, excluded), -torch.inf)


def _top_p_from_candidates(scores: torch.Tensor, removed: torch.Tensor, sizes: tuple[int, ...]) -> torch.Tensor:
    """Apply `top_p` by the likeliest tokens alone, where they suffice."""
    if not sizes or scores.shape[1] <= sizes[0]:
        return _top_p(scores, removed)
    values, ids = scores.topk(sizes[0], -1)
    probabilities = (values - scores.logsumexp(-1, keepdim=True)).exp()
    before = probabilities.cumsum(-1) - probabilities
    excluded = before >= 1.0 - removed
    excluded[:, 0] = False
    sufficient = excluded[:, -1] | (removed[:, 0] <= 0)
    kept = torch.full_like(scores, -torch.inf).scatter_(1, ids, values.masked_fill(excluded, -torch.inf))
    kept = torch.where(removed > 0, kept, scores)
    rest = (~sufficient).nonzero().squeeze(-1)
    if not len(rest):
        return kept
    others = _top_p_from_candidates(scores.index_select(0, rest), removed.index_select(0, rest), sizes[1:])
    return kept.index_copy_(0, rest, others)


def _min_p(scores: torch.Tensor, min_p: torch.Tensor) -> torch.Tensor:
    probabilities = scores.softmax(-1)
    lowest = min_p * probabilities.amax(-1, keepdim=True)
    return scores.masked_fill(probabilities < lowest, -torch.inf)
