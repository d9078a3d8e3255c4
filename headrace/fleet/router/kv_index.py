# SPDX-License-Identifier: Apache-2.0
"""An index of prefix caches: which worker has which blocks of tokens, by its KV events. Pure.

A block has a key of ours: a hash of its tokens and of the key of the block before it, so that blocks of all engines can be
compared, whatever hashes they use. The hash is Python's own, with a secret of this process, and never leaves it.
"""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Iterable
from typing import Any, Generic, TypeVar

from headrace.core.kv_events import AllBlocksCleared, BlockHash, BlockRemoved, BlockStored, KVEvent

Worker = TypeVar("Worker")
TOKEN_BYTES = array("I").itemsize
_STEP = 32
"""Number of keys that are computed in one step."""


class KVIndex(Generic[Worker]):
    """The blocks of all workers, at most `max_blocks`."""

    def __init__(self, max_blocks: int) -> None:
        self._max_blocks = max_blocks
        self._holders: dict[int, Worker | set[Worker]] = {}
        """The workers that have a block, by its key. Most blocks have one."""
        self._blocks: dict[Worker, dict[BlockHash, int]] = {}
        """The keys of a worker's blocks, by its own hash, oldest first."""
        self._worker_sizes: dict[Worker, int] = {}
        self.sizes: Counter[int] = Counter()
        """Number of workers by the block size of their caches."""
        self.adapters: set[str] = set()
        """Names of adapters that blocks were stored for."""
        self.blocks = 0
        """Blocks of all workers together."""
        self.evicted = 0
        """Blocks that were dropped because there are too many."""
        self.orphans = 0
        """Blocks that were ignored because their parent block is unknown."""

    def apply(self, worker: Worker, events: Iterable[KVEvent]) -> None:
        """Apply the events of a worker."""
        for event in events:
            if isinstance(event, BlockStored):
                self._store(worker, event)
            elif isinstance(event, BlockRemoved):
                for block_hash in event.hashes:
                    self._remove(worker, block_hash)
            elif isinstance(event, AllBlocksCleared):
                self.clear(worker)

    def clear(self, worker: Worker) -> None:
        """Drop the blocks of a worker."""
        for key in self._blocks.pop(worker, {}).values():
            self._drop(worker, key)
        size = self._worker_sizes.pop(worker, 0)
        if size:
            self.sizes[size] -= 1
            if not self.sizes[size]:
                del self.sizes[size]

    def size(self, worker: Worker) -> int:
        """Return how many blocks a worker has."""
        return len(self._blocks.get(worker, ()))

    def longest(self, tokens: bytes, adapter: str = "") -> tuple[int, set[Worker]]:
        """Return the length of the longest cached prefix of a prompt in tokens, and the workers that have it.

        `tokens`: of `pack_tokens`. Engines evict the end of a prefix first, so a worker with a block has those before it.
        """
        best: tuple[int, set[Worker]] = (0, set())
        for size in self.sizes:
            count, workers = self._longest(tokens, size, adapter)
            if count * size > best[0]:
                best = count * size, workers
        return best

    def _longest(self, tokens: bytes, size: int, adapter: str) -> tuple[int, set[Worker]]:
        holders = self._holders
        key, matched, last = _root(size, adapter), 0, 0
        blocks = len(tokens) // (size * TOKEN_BYTES)
        keys: list[int] = []
        while matched < blocks and len(keys) == matched:
            keys = extend_keys(keys, key, tokens, size, min(blocks, matched + _STEP))
            # The last known block among the new ones.
            first, end = matched, len(keys)
            while first < end:
                middle = end - 1 if end == len(keys) else (first + end) // 2
                if keys[middle] in holders:
                    first = middle + 1
                else:
                    end = middle
            matched = first
            last = keys[matched - 1] if matched else 0
        return matched, self._workers(last) if matched else set()

    def _workers(self, key: int) -> set[Worker]:
        holders = self._holders.get(key)
        if holders is None:
            return set()
        return holders if isinstance(holders, set) else {holders}

    def _store(self, worker: Worker, event: BlockStored) -> None:
        blocks = self._blocks.setdefault(worker, {})
        if event.parent is None:
            parent = _root(event.block_size, event.adapter)
        else:
            parent_key = blocks.get(event.parent)
            if parent_key is None:
                self.orphans += len(event.hashes)
                return
            parent = parent_key
        self._set_size(worker, event.block_size)
        if event.adapter:
            self.adapters.add(event.adapter)
        width = event.block_size * TOKEN_BYTES
        data = event.tokens.tobytes() if isinstance(event.tokens, array) else array("I", event.tokens).tobytes()
        for index, block_hash in enumerate(event.hashes):
            key = hash((parent, data[index * width : (index + 1) * width]))
            if block_hash not in blocks:
                blocks[block_hash] = key
                self._add(worker, key)
            parent = key
        while self.blocks > self._max_blocks:
            self._evict(worker)

    def _set_size(self, worker: Worker, size: int) -> None:
        before = self._worker_sizes.get(worker, 0)
        if before != size:
            self._worker_sizes[worker] = size
            self.sizes[size] += 1
            if before:
                self.sizes[before] -= 1
                if not self.sizes[before]:
                    del self.sizes[before]

    def _add(self, worker: Worker, key: int) -> None:
        holders = self._holders.get(key)
        if holders is None:
            self._holders[key] = worker
        elif isinstance(holders, set):
            holders.add(worker)
        else:
            self._holders[key] = {holders, worker}
        self.blocks += 1

    def _remove(self, worker: Worker, block_hash: BlockHash) -> None:
        key = self._blocks.get(worker, {}).pop(block_hash, None)
        if key is not None:
            self._drop(worker, key)

    def _drop(self, worker: Worker, key: int) -> None:
        self.blocks -= 1
        holders = self._holders.get(key)
        if isinstance(holders, set):
            holders.discard(worker)
            if not holders:
                del self._holders[key]
        elif holders is not None and holders == worker:
            del self._holders[key]

    def _evict(self, worker: Worker) -> None:
        """Drop the oldest block of the worker that stores more."""
        blocks = self._blocks[worker]
        self._remove(worker, next(iter(blocks)))
        self.evicted += 1


def pack_tokens(tokens: Any) -> bytes | None:
    """Pack a list of token ids for the index; None if it is not such a list."""
    try:
        return array("I", tokens).tobytes() if isinstance(tokens, list) else None
    except (TypeError, OverflowError):
        return None


def extend_keys(keys: list[int], root: int, tokens: bytes, size: int, blocks: int) -> list[int]:
    """Extend the keys of the first blocks of a prompt to so many blocks; `root`: the key before the first one."""
    width = size * TOKEN_BYTES
    key = keys[-1] if keys else root
    for start in range(len(keys) * width, blocks * width, width):
        key = hash((key, tokens[start : start + width]))
        keys.append(key)
    return keys


def _root(size: int, adapter: str) -> int:
    return hash((size, adapter))
