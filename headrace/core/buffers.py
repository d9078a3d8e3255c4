# SPDX-License-Identifier: Apache-2.0
"""Uninitialised memory for data that is about to be received.

`bytearray(n)` fills the memory with zeros first, which is a wasted pass over a body that is overwritten at once. A module of
its own, because `net` uses it and must not import tensors.
"""

from __future__ import annotations

import numpy as np


def uninitialised(size: int) -> memoryview:
    """Return writable memory of `size` bytes with arbitrary content; it is freed with its last view."""
    return np.empty(size, dtype=np.uint8).data
