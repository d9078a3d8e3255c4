# SPDX-License-Identifier: Apache-2.0
"""Where tests run Triton kernels: on a GPU, or, with Triton and TRITON_INTERPRET=1, slowly and fewer of them on a CPU."""

from __future__ import annotations

import importlib.util
import os

import pytest
import torch

INTERPRETED = (
    not torch.cuda.is_available()
    and os.environ.get("TRITON_INTERPRET") == "1"
    and importlib.util.find_spec("triton") is not None
)
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
HALF = torch.float16 if INTERPRETED else torch.bfloat16
"""16 bits: interpreted, products of bfloat16 are wrong."""
needs_kernels = [
    pytest.mark.skipif(DEVICE == "cpu" and not INTERPRETED, reason="needs a GPU, or Triton and TRITON_INTERPRET=1"),
    # Of numpy, with which Triton interprets.
    *([pytest.mark.filterwarnings("ignore::RuntimeWarning", "ignore::DeprecationWarning")] if INTERPRETED else []),
]
