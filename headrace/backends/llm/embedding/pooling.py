# SPDX-License-Identifier: Apache-2.0
"""One vector of the vectors of a text's tokens, as sentence-transformers computes it. Called by `embedding.instance`."""

from __future__ import annotations

from typing import Any

import torch


def pool(hidden: Any, mask: Any, mode: str) -> Any:
    """Of `hidden` [rows, tokens, size] and `mask` [rows, tokens] (0 where a short row is filled up): [rows, size]."""
    if mode == "cls":
        return hidden[:, 0]
    if mode == "lasttoken":
        # Rows are filled up on the right.
        last = mask.sum(1) - 1
        return hidden[torch.arange(hidden.shape[0], device=hidden.device), last]
    present = mask.unsqueeze(-1).to(hidden.dtype)
    if mode == "max":
        return hidden.masked_fill(present == 0, torch.finfo(hidden.dtype).min).amax(1)
    return (hidden * present).sum(1) / present.sum(1)
