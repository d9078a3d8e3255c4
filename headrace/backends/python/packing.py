# SPDX-License-Identifier: Apache-2.0
"""Tensors to and from messages: small ones inside the frame, large ones in shared memory.

Called by both sides. A packed tensor is `[name, data type, shape, bytes, offset]`; the offset is -1 for tensors whose
bytes follow in the frame, in order.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from headrace.backends.python.arena import Arena, ArenaView
from headrace.backends.python.frames import Buffer
from headrace.core.dtypes import BYTES, DTYPES, decode_bytes_elements
from headrace.core.tensors import Tensor

INLINE_BYTES = 8192
"""Below this a copy through the socket costs less than the bookkeeping of a block."""

Packed = list[Any]


def pack(tensors: Iterable[Tensor], arena: Arena | None, pieces: list[Buffer]) -> list[Packed]:
    """Place tensors; what goes inside the frame is added to `pieces`."""
    packed: list[Packed] = []
    for tensor in tensors:
        buffer = tensor.to_buffer()
        size = len(buffer)
        offset = -1
        if size >= INLINE_BYTES and arena is not None:
            try:
                offset = arena.put(buffer)
            except OSError:
                pass  # no more shared memory to be had: the socket takes it, more slowly
        if offset < 0:
            pieces.append(buffer)
        packed.append([tensor.name, tensor.dtype.name, tensor.shape, size, offset])
    return packed


class Unpacker:
    """Reads the tensors of one frame, in order."""

    def __init__(self, payload: Buffer, view: ArenaView | None) -> None:
        self._payload = memoryview(payload)
        self._position = 0
        self._view = view

    def take(self, size: int) -> memoryview:
        """The next bytes of the frame."""
        start = self._position
        self._position = start + size
        return self._payload[start : self._position]

    def tensors(self, packed: Sequence[Packed]) -> list[Tensor]:
        """The next tensors; as writable as the payload is, or views of shared memory."""
        tensors: list[Tensor] = []
        for name, dtype_name, shape, size, offset in packed:
            dtype = DTYPES[dtype_name]
            if offset < 0 or self._view is None:
                source: Any = self.take(size)
            else:
                source = self._view.block(offset, size)
            if dtype is BYTES:
                count = 1
                for length in shape:
                    count *= length
                array = decode_bytes_elements(source if offset < 0 else memoryview(bytes(source)), count)
            elif size:
                array = np.frombuffer(source, dtype.numpy)
            else:
                array = np.empty(0, dtype.numpy)
            tensors.append(Tensor(name, dtype, array.reshape(shape)))
        return tensors
