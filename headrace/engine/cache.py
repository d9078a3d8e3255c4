# SPDX-License-Identifier: Apache-2.0
"""Answers that need not be computed twice: of models whose configuration says `response_cache { enable: true }`.

One cache for all models, bounded in bytes, the least recently used go first. Keyed by the version and by everything the
answer depends on, through SHA-256: two different inputs with one key would give a caller someone else's answer. With a time
to live, what is older is computed again; it leaves the memory when it is asked for, or when its place is needed.
"""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from collections.abc import Sequence

from headrace.core.clock import Clock, SystemClock
from headrace.core.dtypes import BYTES
from headrace.core.messages import InferRequest
from headrace.core.telemetry.registry import Registry
from headrace.core.tensors import Tensor

_ENTRY_BYTES = 512
"""What an entry takes beside its tensors, roughly."""

_BYTES_ELEMENT_BYTES = 48
"""What one element of a BYTES tensor takes beside its content."""


class ResponseCache:
    """Outputs by key. In the loop's thread."""

    def __init__(self, capacity_bytes: int, ttl_seconds: float = 0.0, clock: Clock | None = None) -> None:
        """`ttl_seconds`: how old an answer may be; 0 for any age."""
        self.capacity_bytes = capacity_bytes
        self.ttl_seconds = ttl_seconds
        self.used_bytes = 0
        self.hits = 0
        self.misses = 0
        """Among them, those for which what was kept was too old, or would not do."""
        self.evictions = 0
        """Answers that had to go for others."""
        self.expired = 0
        """Answers that were found too old."""
        self._clock = clock or SystemClock()
        self._entries: OrderedDict[bytes, tuple[int, tuple[Tensor, ...], float]] = OrderedDict()

    def __len__(self) -> int:
        return len(self._entries)

    def add_to(self, metrics: Registry) -> None:
        """Tell of the cache as a whole; hits and misses are told by the versions."""
        name = "headrace_response_cache"
        metrics.callback(f"{name}_entries", "Answers in the response cache", lambda: len(self))
        metrics.callback(f"{name}_used_bytes", "Memory that the response cache takes", lambda: self.used_bytes)
        evicted, expired = f"{name}_evictions_total", f"{name}_expired_total"
        metrics.callback(evicted, "Answers that had to go for others", lambda: self.evictions, kind="counter")
        metrics.callback(expired, "Answers that were found too old", lambda: self.expired, kind="counter")

    def get(self, key: bytes, *, fresh: bool = False) -> tuple[Tensor, ...] | None:
        """The outputs kept under a key, which then are the last to go. `fresh`: who asks wants none that were kept."""
        entry = None if fresh else self._entries.get(key)
        if entry is not None and self.ttl_seconds and self._clock.monotonic() >= entry[2]:
            self._drop(key)
            self.expired += 1
            entry = None
        if entry is None:
            self.misses += 1
            return None
        self.hits += 1
        self._entries.move_to_end(key)
        return entry[1]

    def put(self, key: bytes, outputs: Sequence[Tensor]) -> None:
        """Keep outputs; what is larger than the whole cache is not kept."""
        # A copy: the array may be a view of a whole batch, which would stay in memory with it.
        kept = tuple(Tensor(tensor.name, tensor.dtype, tensor.array.copy()) for tensor in outputs)
        for tensor in kept:
            tensor.array.flags.writeable = False
        size = _ENTRY_BYTES + sum(map(_size, kept))
        if size > self.capacity_bytes:
            return
        self._drop(key)
        self._entries[key] = (size, kept, self._clock.monotonic() + self.ttl_seconds if self.ttl_seconds else 0.0)
        self.used_bytes += size
        while self.used_bytes > self.capacity_bytes:
            self._drop(next(iter(self._entries)))
            self.evictions += 1

    def forget(self, prefix: bytes) -> None:
        """Drop all that a version has put in, when it goes."""
        for key in [key for key in self._entries if key.startswith(prefix)]:
            self._drop(key)

    def _drop(self, key: bytes) -> None:
        entry = self._entries.pop(key, None)
        if entry is not None:
            self.used_bytes -= entry[0]


def key_of(prefix: bytes, request: InferRequest) -> bytes:
    """A key for what is asked of a version; `prefix` stands for the version. The order of inputs does not matter."""
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
