# SPDX-License-Identifier: Apache-2.0
"""Pages of a cache as one block of bytes, page by page, and back. Called by the engine's thread.

A page's bytes are its keys and values of the first layer, then of the second, and so on: so a run of pages is a run of
bytes, and one who has the first few need not take those.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence

import torch

from headrace.backends.llm.running.kv_cache import KVCache

log = logging.getLogger("headrace.backends.llm")

_PIECE_BYTES = 8 << 20


def bytes_of_page(cache: KVCache) -> int:
    """In all layers."""
    return sum(_row_bytes(each) for each in _paged(cache))


def packed(cache: KVCache, pages: Sequence[int]) -> torch.Tensor:
    """`[pages, bytes of a page]`, on the cache's device."""
    index = torch.tensor(pages, device=cache.device)
    block = torch.empty(len(pages), bytes_of_page(cache), dtype=torch.uint8, device=cache.device)
    begin = 0
    for rows in _paged(cache):
        size = _row_bytes(rows)
        block[:, begin : begin + size] = rows.index_select(0, index).view(torch.uint8)
        begin += size
    return block


def pieces(block: torch.Tensor) -> Iterator[memoryview]:
    """The bytes of a block. What lies on a GPU comes in pieces, each good until the next is asked for."""
    flat = block.view(-1)
    if not block.is_cuda:
        yield memoryview(flat.numpy())
        return
    # Memory that the driver knows is filled many times as fast as fresh memory, whose pages have to be found first.
    staging = torch.empty(min(_PIECE_BYTES, len(flat)), dtype=torch.uint8, pin_memory=True)
    for begin in range(0, len(flat), _PIECE_BYTES):
        part = flat[begin : begin + _PIECE_BYTES]
        staging[: len(part)].copy_(part)
        yield memoryview(staging[: len(part)].numpy())


def unpack(cache: KVCache, pages: Sequence[int], block: torch.Tensor) -> None:
    """Fill pages with what `packed` made of others."""
    index = torch.tensor(pages, device=cache.device)
    block = block.to(cache.device, non_blocking=True)
    begin = 0
    for rows in _paged(cache):
        size = _row_bytes(rows)
        # A copy of its own: bytes that begin anywhere cannot be looked at as numbers.
        part = block[:, begin : begin + size].contiguous().view(cache.dtype)
        rows.index_copy_(0, index, part)
        begin += size


class Brought:
    """Pages of a sequence's prompt that came from elsewhere, until the scheduler has pages for them."""

    def __init__(self, cache: KVCache, first: int, block: torch.Tensor) -> None:
        self._cache = cache
        self._block = block
        self.first = first
        """The first page of the prompt that came, ..."""
        self.end = first + len(block)
        """... and the first one that did not."""

    def put(self, start: int, pages: Sequence[int]) -> bool:
        """Fill these; they are the prompt's from number `start` on. False: they are not to be used."""
        try:
            begin = start - self.first
            with torch.inference_mode():
                unpack(self._cache, pages, self._block[begin : begin + len(pages)])
        except Exception:
            # Whatever it was, the prompt can be computed.
            log.exception("pages that were handed over could not be used")
            return False
        return True


def _paged(cache: KVCache) -> Iterator[torch.Tensor]:
    """Keys and values of each layer, `[pages, numbers of a page]`. Views."""
    for layer in cache.layers:
        for tensor in (layer.keys, layer.values):
            yield tensor.view(cache.pages + 1, -1)


def _row_bytes(rows: torch.Tensor) -> int:
    return int(rows.shape[1] * rows.element_size())
