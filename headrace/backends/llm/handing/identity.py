# SPDX-License-Identifier: Apache-2.0
"""What two servers must have in common for one to use the other's pages. Called once, when a model is opened.

Of the weights a few numbers of each tensor are looked at, not all: two models that differ are different nearly everywhere,
and reading every byte would take as long as loading them.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from headrace.backends.llm.running.kv_cache import KVCache

_LOOKED_AT = 32
_CHUNK = 1 << 20


def weights_identity(model: Any, adapters: Mapping[str, Path]) -> bytes:
    """Of the weights as they are computed with, and of the adapters. Before anything wraps the model's layers."""
    made = hashlib.blake2b(digest_size=16)
    for name, tensor in sorted(model.state_dict().items()):
        made.update(f"{name} {tuple(tensor.shape)} {tensor.dtype}\n".encode())
        flat = tensor.detach().reshape(-1)
        if flat.numel():
            places = torch.linspace(0, flat.numel() - 1, _LOOKED_AT, dtype=torch.float64).long()
            made.update(flat[places.to(flat.device)].cpu().contiguous().view(torch.uint8).numpy().tobytes())
    for name, folder in sorted(adapters.items()):
        made.update(name.encode() + b"\0")
        for path in sorted(folder.glob("adapter_*")):
            with path.open("rb") as stream:
                while chunk := stream.read(_CHUNK):
                    made.update(chunk)
    return made.digest()


def pages_identity(weights: bytes, cache: KVCache) -> str:
    """Of pages: whose they are, and how they are laid out."""
    made = hashlib.blake2b(weights, digest_size=16)
    made.update(f"{cache.page_size} {cache.dtype}\n".encode())
    for layer in cache.layers:
        made.update(f"{tuple(layer.keys.shape[1:])} {tuple(layer.values.shape[1:])} {layer.window}\n".encode())
    return made.hexdigest()
