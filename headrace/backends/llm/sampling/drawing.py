# SPDX-License-Identifier: Apache-2.0
"""Draws a token for each row from its scores, with a number between 0 and 1 that the row brings. Called by `sampler`.

The token is the one at which the probabilities, added up in the order of ids, pass the number: so it is the same on every
device and in every batch. They are counted in whole units, since sums of those do not depend on how a device adds.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from headrace.backends.llm.sampling.warping import MIN_P, TEMPERATURE, TOP_K, TOP_P, warped

_UNITS = 2.0**40
_CANDIDATES = 256
"""On a CPU so many of the likeliest are looked at first: of rows with `top_k`, `top_p` or `min_p` it is nearly always they
alone that can be drawn, and a whole vocabulary costs milliseconds."""


def drawn(scores: torch.Tensor, numbers: npt.NDArray[Any], moved: torch.Tensor) -> torch.Tensor:
    """The tokens. `numbers` has a line for each row: the number, then those of `warping`; `moved` is it on the device."""
    limited = (numbers[:, TOP_K] > 0) | (numbers[:, TOP_P] < 1.0) | (numbers[:, MIN_P] > 0.0)
    if not scores.is_cpu or scores.shape[1] <= 2 * _CANDIDATES or not limited.any():
        return _picked(warped(scores, numbers, moved), moved[:, :1])
    tokens = torch.empty(len(scores), dtype=torch.int64)
    places = np.flatnonzero(limited)
    candidates, settled = _candidates(scores[places], moved[places])
    tokens[places] = candidates
    rest = np.concatenate([np.flatnonzero(~limited), places[~settled.numpy()]])
    if len(rest):
        tokens[rest] = _picked(warped(scores[rest], numbers[rest], moved[rest]), moved[rest, :1])
    return tokens


def _picked(scores: torch.Tensor, uniform: torch.Tensor) -> torch.Tensor:
    sums = scores.softmax(-1).mul_(_UNITS).long().cumsum(-1)
    threshold = (uniform * sums[:, -1:].double()).long()
    # Clamped for logits that are not numbers: a model that is broken must not break the engine.
    return torch.searchsorted(sums, threshold, right=True).squeeze(-1).clamp_(max=scores.shape[1] - 1)


def _candidates(scores: torch.Tensor, numbers: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The tokens drawn from the likeliest, and of which rows that is right: nothing else could have been drawn."""
    values, ids = scores.topk(_CANDIDATES, -1)
    temperature = numbers[:, TEMPERATURE, None].float()
    values = values / temperature
    last = values[:, -1:]
    settled = last == -torch.inf

    top_k = numbers[:, TOP_K, None].long()
    few = (top_k > 0) & (top_k < _CANDIDATES)
    least = values.gather(1, (top_k - 1).clamp(0, _CANDIDATES - 1)).masked_fill(~few, -torch.inf)
    settled |= last < least
    # With a `top_k` of more than the candidates, what the others have together is not known.
    unknown = (top_k > 0) & ~settled
    values = values.masked_fill(values < least, -torch.inf)

    top_p = numbers[:, TOP_P, None]
    if bool((top_p < 1.0).any()):
        total = torch.where(settled, values.logsumexp(-1, keepdim=True), _total(scores, temperature, settled))
        shares = (values - total).exp()
        out = (shares.cumsum(-1) - shares >= 1.0 - (1.0 - top_p).float()) & (top_p < 1.0)
        out[:, 0] = False
        settled |= out[:, -1:]
        values = values.masked_fill(out, -torch.inf)

    lowest = values[:, :1] + numbers[:, MIN_P, None].log().float()
    settled = (settled | (last < lowest)) & ~unknown
    values = values.masked_fill(values < lowest, -torch.inf)

    ids, order = ids.sort(-1)
    places = _picked(values.gather(1, order), numbers[:, :1])
    return ids.gather(1, places.unsqueeze(-1)).squeeze(-1), settled.squeeze(-1)


def _total(scores: torch.Tensor, temperature: torch.Tensor, known: torch.Tensor) -> torch.Tensor:
    """The logarithm of what all of a row adds up to, for rows where it is not known."""
    if bool(known.all()):
        return torch.zeros_like(temperature)
    return (scores / temperature).logsumexp(-1, keepdim=True)
