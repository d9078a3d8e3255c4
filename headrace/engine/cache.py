# SPDX-License-Identifier: Apache-2.0
"""The response cache, for models whose configuration has `response_cache { enable: true }`.

One LRU cache for all models, limited in bytes. The key is a SHA-256 digest of the version and of everything that the
response depends on: with a weaker hash, a caller could get the response to another input. With a time to live, an expired
entry is removed when it is looked up or evicted.
"""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from collections.abc import Sequence

from headrace.core.clock import Clock, SystemClock
from headrace.core.dtypes import BYTES
from headrace.core.requests import InferRequest
from headrace.core.telemetry.metrics import Registry
from headrace.core.tensors import Tensor

_ENTRY_BYTES = 512
"""Approximate memory of an entry without its tensors."""

_BYTES_ELEMENT_BYTES = 48
"""Approximate memory of one element of a BYTES tensor without its content."""


class ResponseCache:
    """Outputs by key. Runs in the event loop's thread."""

    def __init__(self, capacity_bytes: int, ttl_seconds: float = 0.0, clock: Clock | None = None) -> None:
        """Create an empty cache. `ttl_seconds` is the maximum age of an entry (0: unlimited)."""
        self.capacity_bytes = capacity_bytes
        self.ttl_seconds = ttl_seconds
        self.used_bytes = 0
        self.hits = 0
        self.misses = 0
        """Includes lookups that found an expired entry or bypassed the cache."""
        self.evictions = 0
        """Entries removed to make room."""
        self.expired = 0
        """Entries removed because they were too old."""
        self._clock = clock or SystemClock()
        self._entries: OrderedDict[bytes, tuple[int, tuple[Tensor, ...], float]] = OrderedDict()

    def __len__(self) -> int:
        return len(self._entries)

    def add_to(self, metrics: Registry) -> None:
        """Register the metrics of the cache as a whole; versions report hits and misses."""
        metrics.callback("headrace_response_cache_entries", "Entries in the response cache", lambda: len(self))
        metrics.callback(
            "headrace_response_cache_used_bytes", "Memory used by the response cache", lambda: self.used_bytes
        )
        metrics.callback(
            "headrace_response_cache_evictions_total",
            "Cache entries removed to make room",
            lambda: self.evictions,
            kind="counter",
        )
        metrics.callback(
            "headrace_response_cache_expired_total",
            "Cache entries removed because they were too old",
            lambda: self.expired,
            kind="counter",
        )

    def get(self, key: bytes, *, bypass: bool = False) -> tuple[Tensor, ...] | None:
        """Return the cached outputs and mark them as most recently used. With `bypass`, count a miss."""
        entry = None if bypass else self._entries.get(key)
        if entry is not None and self.ttl_seconds and self._clock.monotonic() >= entry[2]:
            self._remove(key)
            self.expired += 1
            entry = None
        if entry is None:
            self.misses += 1
            return None
        self.hits += 1
        self._entries.move_to_end(key)
        return entry[1]

    def put(self, key: bytes, outputs: Sequence[Tensor]) -> None:
        """Cache outputs, unless they are larger than the cache."""
        # A copy: the array may be a view of a batch, which would stay in memory with it.
        copies = tuple(Tensor(tensor.name, tensor.dtype, tensor.array.copy()) for tensor in outputs)
        for tensor in copies:
            tensor.array.flags.writeable = False
        size = _ENTRY_BYTES + sum(map(_size, copies))
        if size > self.capacity_bytes:
            return
        self._remove(key)
        self._entries[key] = (size, copies, self._clock.monotonic() + self.ttl_seconds if self.ttl_seconds else 0.0)
        self.used_bytes += size
        while self.used_bytes > self.capacity_bytes:
            self._remove(next(iter(self._entries)))
            self.evictions += 1

    def remove_version(self, prefix: bytes) -> None:
        """Remove all entries of a version."""
        for key in [key for key in self._entries if key.startswith(prefix)]:
            self._remove(key)

    def _remove(self, key: bytes) -> None:
        entry = self._entries.pop(key, None)
        if entry is not None:
            self.used_bytes -= entry[0]


def cache_key(prefix: bytes, request: InferRequest) -> bytes:
    """Return the key of a request; `prefix` identifies the version. The order of inputs does not matter."""
    digest = hashlib.sha256()
    for tensor in sorted(request.inputs, key=lambda tensor: tensor.name):
        head = f"{len(tensor.name)}:{tensor.name}{tensor.dtype.name}{tensor.shape}"
        data = tensor.to_buffer()
        digest.update(f"{head}{len(data)}:".encode())
        digest.update(data)
    for output in request.outputs:
        digest.update(f"{len(output.name)}>{output.name}".encode())
    for name, value in sorted(request.parameters.items()):
        digest.update(f"{name!r}={value!r};".encode())
    return prefix + digest.digest()


def _size(tensor: Tensor) -> int:
    if tensor.dtype is BYTES:
        return sum(_BYTES_ELEMENT_BYTES + len(element) for element in tensor.array.ravel())
    return int(tensor.array.nbytes)
