# SPDX-License-Identifier: Apache-2.0
"""KV-cache pages as bytes: pack them, unpack them, and fingerprint the model and layout they depend on.

The bytes of a page are the keys and values of the first layer, then of the second, and so on. A run of pages is therefore a
run of bytes, and a server that has the first pages need not fetch them. Packing runs in the engine's thread.
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from headrace.backends.llm.model_runner.kv_cache import KVCache

log = logging.getLogger("headrace.backends.llm")

_CHUNK_BYTES = 8 << 20
_SAMPLED_VALUES = 32
_READ_BYTES = 1 << 20


def bytes_per_page(cache: KVCache) -> int:
    """Return the size of a page over all layers."""
    return sum(rows.shape[1] for rows in _layer_pages(cache))


def pack_pages(cache: KVCache, pages: Sequence[int]) -> torch.Tensor:
    """Return `[pages, bytes of a page]` on the cache's device."""
    index = _page_index(cache, pages)
    block = torch.empty(len(pages), bytes_per_page(cache), dtype=torch.uint8, device=cache.device)
    begin = 0
    for rows in _layer_pages(cache):
        size = rows.shape[1]
        block[:, begin : begin + size] = rows.index_select(0, index)
        begin += size
    return block


def iter_chunks(block: torch.Tensor) -> Iterator[memoryview]:
    """Yield the bytes of a block. A block on a GPU comes in chunks, each valid until the next is requested."""
    flat = block.view(-1)
    if not block.is_cuda:
        yield memoryview(flat.numpy())
        return
    # Copying to pinned memory is many times as fast as to fresh memory, whose pages the kernel has to allocate first.
    staging = torch.empty(min(_CHUNK_BYTES, len(flat)), dtype=torch.uint8, pin_memory=True)
    for begin in range(0, len(flat), _CHUNK_BYTES):
        part = flat[begin : begin + _CHUNK_BYTES]
        staging[: len(part)].copy_(part)
        yield memoryview(staging[: len(part)].numpy())


def unpack_pages(cache: KVCache, pages: Sequence[int], block: torch.Tensor) -> None:
    """Fill pages with the output of `pack_pages`."""
    index = _page_index(cache, pages)
    block = block.to(cache.device, non_blocking=True)
    begin = 0
    for rows in _layer_pages(cache):
        size = rows.shape[1]
        rows.index_copy_(0, index, block[:, begin : begin + size])
        begin += size


class ReceivedPages:
    """Pages of a prompt that another server computed, until the scheduler has allocated pages for them."""

    def __init__(self, cache: KVCache, first: int, block: torch.Tensor) -> None:
        self._cache = cache
        self._block = block
        self.first = first
        """Index of the first received page in the prompt, ..."""
        self.end = first + len(block)
        """... and of the first page that was not received."""

    def copy_to(self, start: int, pages: Sequence[int]) -> bool:
        """Fill these pages, the prompt's from index `start` on; False if that failed."""
        try:
            begin = start - self.first
            with torch.inference_mode():
                unpack_pages(self._cache, pages, self._block[begin : begin + len(pages)])
        except Exception:
            # Whatever the error, the prompt can be computed.
            log.exception("Received KV pages could not be used.")
            return False
        return True


def weights_fingerprint(model: Any, adapters: Mapping[str, Path]) -> bytes:
    """Return a fingerprint of the weights and adapters. Call before any layer of the model is wrapped.

    It samples a few values of each tensor: different models differ nearly everywhere, and reading every byte would take as
    long as loading them.
    """
    fingerprint = hashlib.blake2b(digest_size=16)
    for name, tensor in sorted(model.state_dict().items()):
        fingerprint.update(f"{name} {tuple(tensor.shape)} {tensor.dtype}\n".encode())
        flat = tensor.detach().reshape(-1)
        if flat.numel():
            indices = torch.linspace(0, flat.numel() - 1, _SAMPLED_VALUES, dtype=torch.float64).long()
            fingerprint.update(flat[indices.to(flat.device)].cpu().contiguous().view(torch.uint8).numpy().tobytes())
    for name, folder in sorted(adapters.items()):
        fingerprint.update(name.encode() + b"\0")
        for path in sorted(folder.glob("adapter_*")):
            with path.open("rb") as stream:
                while data := stream.read(_READ_BYTES):
                    fingerprint.update(data)
    return fingerprint.digest()


def pages_fingerprint(weights: bytes, cache: KVCache) -> str:
    """Return the fingerprint that two servers must share to exchange pages: weights and page layout."""
    fingerprint = hashlib.blake2b(weights, digest_size=16)
    fingerprint.update(f"{cache.page_size} {cache.dtype}\n".encode())
    for layer in cache.layers:
        fingerprint.update(f"{tuple(layer.keys.shape[1:])} {tuple(layer.values.shape[1:])} {layer.window}\n".encode())
    return fingerprint.hexdigest()


def _page_index(cache: KVCache, pages: Sequence[int]) -> torch.Tensor:
    """Return page numbers on the cache's device, without waiting for what it computes."""
    index = torch.tensor(pages)
    return index.pin_memory().to(cache.device, non_blocking=True) if cache.device.type == "cuda" else index


def _layer_pages(cache: KVCache) -> Iterator[torch.Tensor]:
    """Yield the keys and values of each layer as bytes, `[pages, bytes of a page]`."""
    for layer in cache.layers:
        for tensor in (layer.keys, layer.values):
            yield tensor.view(torch.uint8).view(cache.pages + 1, -1)
