# SPDX-License-Identifier: Apache-2.0
"""Copies of pages between the KV cache and the host level.

On a GPU the copies run beside the steps, on a stream of their own: `save` packs pages on the stream of the steps, so that
the next step may overwrite them, and copies the pack to pinned memory beside it; `load` starts when the steps that were
launched before have ended, since they may still use the pages that it fills. On a CPU both are done when they return.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch

from headrace.backends.llm.kv_transfer.page_layout import pack_pages, unpack_pages
from headrace.backends.llm.model_runner.kv_cache import KVCache

_CUDA_BATCH_BYTES, _CPU_BATCH_BYTES = 64 << 20, 8 << 20
"""A step waits for the packing of so much, a few hundred microseconds on a GPU, and for all of the copy on a CPU."""
_LOAD_BATCH_BYTES = 256 << 20
"""Each batch of a load takes two kernels for each layer, and time of the engine's thread to launch them."""
_IN_FLIGHT_SHARE, _LEAST_BATCHES = 0.01, 4
"""Of the GPU's memory, for packs that wait for the copy to the host. A step of 8,192 tokens of an 8B Llama evicts 1 GiB."""


class CopyJob:
    """A copy that was started. It keeps what the copy uses."""

    __slots__ = ("_event", "_kept")

    def __init__(self, event: torch.cuda.Event | None = None, kept: torch.Tensor | None = None) -> None:
        self._event = event
        self._kept = kept

    @property
    def done(self) -> bool:
        """Whether it has ended. Raises RuntimeError if the device failed."""
        return self._event is None or self._event.query()


class PageCopier:
    """Copies between one KV cache and the slots of `HostPages.block`. For the engine's thread."""

    def __init__(self, cache: KVCache, page_bytes: int) -> None:
        self._cache = cache
        self._on_gpu = cache.device.type == "cuda"
        self._saves = torch.cuda.Stream(cache.device) if self._on_gpu else None
        self._loads = torch.cuda.Stream(cache.device) if self._on_gpu else None
        self.batch_pages = max(1, (_CUDA_BATCH_BYTES if self._on_gpu else _CPU_BATCH_BYTES) // page_bytes)
        """Pages that are copied at a time without delaying steps."""
        self.most_pages = max(self.batch_pages * _LEAST_BATCHES, int(_IN_FLIGHT_SHARE * _memory(cache)) // page_bytes)
        """Pages whose copies to the host may be in flight."""
        self._load_pages = max(1, _LOAD_BATCH_BYTES // page_bytes)

    def save(self, pages: Sequence[int], block: torch.Tensor, slots: Sequence[int]) -> CopyJob:
        """Copy pages of the cache to slots of the host's block. The pages may be overwritten by what is launched next."""
        pages, slots = _by_slot(pages, slots)
        with torch.inference_mode():
            packed = pack_pages(self._cache, pages)
            if self._saves is None:
                block.index_copy_(0, torch.tensor(slots), packed)
                return CopyJob()
            self._saves.wait_stream(torch.cuda.current_stream(self._cache.device))
            with torch.cuda.stream(self._saves):
                for at, slot, count in _runs(slots):
                    block[slot : slot + count].copy_(packed[at : at + count], non_blocking=True)
                return CopyJob(_recorded(), packed)

    def load(self, pages: Sequence[int], block: torch.Tensor, slots: Sequence[int]) -> CopyJob:
        """Copy slots of the host's block to pages of the cache, which nothing that is launched later may use yet."""
        pages, slots = _by_slot(pages, slots)
        with torch.inference_mode():
            if self._loads is None:
                unpack_pages(self._cache, pages, block.index_select(0, torch.tensor(slots)))
                return CopyJob()
            self._loads.wait_stream(torch.cuda.current_stream(self._cache.device))
            with torch.cuda.stream(self._loads):
                for begin in range(0, len(pages), self._load_pages):
                    part = slots[begin : begin + self._load_pages]
                    staging = torch.empty(len(part), block.shape[1], dtype=torch.uint8, device=self._cache.device)
                    for at, slot, count in _runs(part):
                        staging[at : at + count].copy_(block[slot : slot + count], non_blocking=True)
                    unpack_pages(self._cache, pages[begin : begin + len(part)], staging)
                return CopyJob(_recorded())


def _memory(cache: KVCache) -> int:
    """Return the bytes of a GPU's memory; 0 on a CPU, where no copy is in flight."""
    if cache.device.type != "cuda":
        return 0
    memory: int = torch.cuda.get_device_properties(cache.device).total_memory
    return memory


def _recorded() -> torch.cuda.Event:
    event = torch.cuda.Event()
    event.record()
    return event


def _by_slot(pages: Sequence[int], slots: Sequence[int]) -> tuple[list[int], list[int]]:
    """Return pages and slots in the order of the slots: runs of them are one copy each."""
    pairs = sorted(zip(slots, pages, strict=True))
    return [page for _, page in pairs], [slot for slot, _ in pairs]


def _runs(slots: Sequence[int]) -> Iterator[tuple[int, int, int]]:
    """Yield runs of consecutive slots: index of the first, the slot there, and how many."""
    begin = 0
    for index in range(1, len(slots) + 1):
        if index == len(slots) or slots[index] != slots[index - 1] + 1:
            yield begin, slots[begin], index - begin
            begin = index
