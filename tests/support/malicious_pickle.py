# SPDX-License-Identifier: Apache-2.0
"""Pickles that do harm when they are read, to be hidden in model files: whoever unpickles one makes the canary's folder.

Written by hand, so that no test needs `pickle`, which nobody here may import.
"""

from __future__ import annotations

from pathlib import Path


def poisoned_pickle(canary: Path, *, protocol: int = 2) -> bytes:
    """Reading this calls `os.mkdir(canary)`. Protocol 0 has no first byte to know a pickle by."""
    head = b"" if protocol == 0 else b"\x80" + bytes([protocol])
    return head + b"cos\nmkdir\n(V" + str(canary).encode("raw-unicode-escape") + b"\ntR."
