# SPDX-License-Identifier: Apache-2.0
"""Imports PyTorch so that it computes with the threads it is told, and no others. Imported by the package, before all else.

The matrix library below PyTorch asks OMP_NUM_THREADS once, when it is loaded, and does not hear `torch.set_num_threads`;
`backends.pytorch.one_thread` has the figures. Whichever backend comes first decides for the process, so both do the same.
"""

from __future__ import annotations

import os

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
