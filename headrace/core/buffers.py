# SPDX-License-Identifier: Apache-2.0
"""Memory for bytes that are about to arrive.

`bytearray(n)` writes zeros over all of it first; for a body that will be overwritten at once that is a wasted pass.
"""

from __future__ import annotations

import numpy as np


def uninitialised(size: int) -> memoryview:
    """Writable memory of `size` bytes with arbitrary content, freed when the last view of it goes."""
    return np.empty(size, dtype=np.uint8).data
