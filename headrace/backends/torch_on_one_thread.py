# SPDX-License-Identifier: Apache-2.0
"""Imports PyTorch so that it computes with the threads it is told, and no others. Packages that use it import this first.

`torch.set_num_threads(1)` does not reach the matrix library below (OpenBLAS on ARM): a ResNet-50 of two images took 0.47 s
and 0.60 s of CPU by "one" thread. That library asks OMP_NUM_THREADS once, when it is loaded, so the variable is there for
that moment, unless whoever started the server has set it; processes of models must not inherit it.
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
