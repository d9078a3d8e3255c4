# SPDX-License-Identifier: Apache-2.0
"""A Triton kernel that samples a token for each row of a step. Imported only with a GPU: Triton comes with PyTorch for CUDA.

Sorting 128,000 logits to apply `top_k` and `top_p` costs more than the rest of sampling together. This kernel searches for
the smallest logit that is kept instead: each round reads the row once, compares the sums above three pivots with the wanted
one, and keeps a quarter of the interval. It ends when one value is left in the interval, so the result is exact; tokens with
equal logits are kept or excluded together. One program samples one row, always in the same order: the result does not
depend on the other rows.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators
# ruff: noqa: N803, PLR0915 - compile-time constants are in capitals, as is usual in Triton; a kernel is one function.

from __future__ import annotations

import torch
import triton
import triton.language as tl

PARAMETERS = 5
"""Columns of the parameters: random number from 0 to 1, temperature (0: greedy), top_k, top_p, min_p."""
_BLOCK, _WARPS = 8192, 16
"""Measured on an H200."""
_ROUNDS = tl.constexpr(40)
_UNITS = tl.constexpr(2.0**30)
"""Weights are counted in integers, so that their sum does not depend on the order."""


@triton.jit
def _load(row, at, vocabulary):
    return tl.load(row + at, mask=at < vocabulary, other=float("-inf")).to(tl.float32)


@triton.jit
def _lowest_kept(
    row, vocabulary, top, scale, floor, low, high, wanted, COUNT: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    """Return the largest logit at or above which the logits add up to `wanted`: in number (COUNT) or in weight.

    Logits below `floor` do not count. The result is from `low` to below `high`.
    """
    lanes = tl.arange(0, BLOCK)
    searching = True
    kept = low
    rounds = 0
    while searching:
        step = (high - low) * 0.25
        first, second, third = low + step, low + 2 * step, low + 3 * step
        above_first = tl.zeros((BLOCK,), tl.float32)
        above_second = tl.zeros((BLOCK,), tl.float32)
        above_third = tl.zeros((BLOCK,), tl.float32)
        least = tl.full((BLOCK,), float("inf"), tl.float32)
        most = tl.full((BLOCK,), float("-inf"), tl.float32)
        for start in range(0, vocabulary, BLOCK):
            logits = _load(row, start + lanes, vocabulary)
            if COUNT:
                weights = tl.where(logits >= floor, 1.0, 0.0)
            else:
                weights = tl.where(logits >= floor, tl.exp((logits - top) * scale), 0.0)
            above_first += tl.where(logits >= first, weights, 0.0)
            above_second += tl.where(logits >= second, weights, 0.0)
            above_third += tl.where(logits >= third, weights, 0.0)
            inside = (logits >= low) & (logits < high)
            least = tl.minimum(least, tl.where(inside, logits, float("inf")))
            most = tl.maximum(most, tl.where(inside, logits, float("-inf")))
        smallest = tl.min(least, 0)
        rounds += 1
        if (smallest >= tl.max(most, 0)) | (rounds >= _ROUNDS):
            kept = smallest
            searching = False
        else:
            enough_first = tl.sum(above_first, 0) >= wanted
            enough_second = tl.sum(above_second, 0) >= wanted
            enough_third = tl.sum(above_third, 0) >= wanted
            upper = tl.where(enough_third, high, tl.where(enough_second, third, tl.where(enough_first, second, first)))
            lower = tl.where(enough_third, third, tl.where(enough_second, second, tl.where(enough_first, first, low)))
            low, high = tl.maximum(lower, smallest), upper
    return kept


@triton.jit
def _sample(logits, stride, parameters, tokens, vocabulary, BLOCK: tl.constexpr, COLUMNS: tl.constexpr):
    """Sample one row."""
    number = tl.program_id(0)
    row = logits + number.to(tl.int64) * stride
    parameters += number * COLUMNS
    uniform = tl.load(parameters)
    temperature = tl.load(parameters + 1).to(tl.float32)
    top_k = tl.load(parameters + 2).to(tl.float32)
    top_p = tl.load(parameters + 3).to(tl.float32)
    min_p = tl.load(parameters + 4).to(tl.float32)
    lanes = tl.arange(0, BLOCK)

    most = tl.full((BLOCK,), float("-inf"), tl.float32)
    least = tl.full((BLOCK,), float("inf"), tl.float32)
    places = tl.zeros((BLOCK,), tl.int32)
    for start in range(0, vocabulary, BLOCK):
        values = _load(row, start + lanes, vocabulary)
        places = tl.where(values > most, start + lanes, places)
        most = tl.maximum(most, values)
        least = tl.minimum(least, tl.where(values > float("-inf"), values, float("inf")))
    top, bottom = tl.max(most, 0), tl.min(least, 0)
    likeliest = tl.min(tl.where(most == top, places, 2147483647), 0)
    # A row of NaN has none: any token will do, the model is broken.
    likeliest = tl.minimum(likeliest, vocabulary - 1)
    if (temperature <= 0.0) | (bottom == float("inf")):  # greedy, or no finite logit
        tl.store(tokens + number, likeliest.to(tl.int64))
    else:
        scale = 1.0 / temperature
        above_top = top + tl.maximum(tl.abs(top) * 1e-6, 1e-6)
        kept = bottom
        if (top_k > 0) & (top_k < vocabulary):
            infinite = float("-inf")
            kept = _lowest_kept(row, vocabulary, top, scale, infinite, bottom, above_top, top_k, True, BLOCK)
        if top_p < 1.0:
            weight = tl.zeros((BLOCK,), tl.float32)
            for start in range(0, vocabulary, BLOCK):
                values = _load(row, start + lanes, vocabulary)
                weight += tl.where(values >= kept, tl.exp((values - top) * scale), 0.0)
            wanted = tl.sum(weight, 0) * top_p
            # All logits below this together have less than 1 - top_p of the weight.
            reach = tl.log(vocabulary / tl.maximum(1.0 - top_p, 1e-7)) * temperature
            low = tl.maximum(kept, top - reach)
            kept = _lowest_kept(row, vocabulary, top, scale, kept, low, above_top, wanted, False, BLOCK)
        if min_p > 0:
            kept = tl.maximum(kept, top + tl.log(min_p) * temperature)

        units = tl.zeros((BLOCK,), tl.int64)
        for start in range(0, vocabulary, BLOCK):
            values = _load(row, start + lanes, vocabulary)
            units += (tl.where(values >= kept, tl.exp((values - top) * scale), 0.0) * _UNITS).to(tl.int64)
        threshold = (uniform * tl.sum(units, 0).to(tl.float64)).to(tl.int64)
        passed = tl.zeros((), tl.int64)
        token = tl.full((), -1, tl.int32)
        start = 0
        while (start < vocabulary) & (token < 0):
            values = _load(row, start + lanes, vocabulary)
            units = (tl.where(values >= kept, tl.exp((values - top) * scale), 0.0) * _UNITS).to(tl.int64)
            here = tl.sum(units, 0)
            if passed + here > threshold:
                beyond = (passed + tl.cumsum(units, 0)) > threshold
                token = tl.min(tl.where(beyond, start + lanes, 2147483647), 0)
            passed += here
            start += BLOCK
        tl.store(tokens + number, tl.where(token < 0, likeliest, token).to(tl.int64))


def sample_tokens(logits: torch.Tensor, parameters: torch.Tensor) -> torch.Tensor:
    """Sample a token for each row of `logits`, `[rows, vocabulary]`. `parameters`: float64, `[rows, PARAMETERS]`."""
    tokens = torch.empty(len(logits), dtype=torch.int64, device=logits.device)
    if logits.stride(1) != 1:
        logits = logits.contiguous()
    _sample[(len(logits),)](
        logits, logits.stride(0), parameters, tokens, logits.shape[1],
        BLOCK=_BLOCK, COLUMNS=PARAMETERS, num_warps=_WARPS,
    )  # fmt: skip
    return tokens
