# SPDX-License-Identifier: Apache-2.0
"""Import PyTorch with a bounded number of threads, and the lock for transformers' global state."""

from __future__ import annotations

import os
from threading import Lock

_VARIABLE = "OMP_NUM_THREADS"

if _VARIABLE in os.environ:
    import torch
else:
    os.environ[_VARIABLE] = "1"
    try:
        import torch
    finally:
        del os.environ[_VARIABLE]

__all__ = ["torch"]


TRANSFORMERS = Lock()
"""Held while transformers creates a model: its defaults for new tensors apply to all threads."""
