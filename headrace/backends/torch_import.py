# SPDX-License-Identifier: Apache-2.0
"""Import PyTorch with a bounded number of threads; its devices, and the lock for transformers' global state."""

from __future__ import annotations

import os
from threading import Lock

from headrace.backends.contract import Placement
from headrace.core.errors import FailedPrecondition

_VARIABLE = "OMP_NUM_THREADS"

if _VARIABLE in os.environ:
    import torch
else:
    os.environ[_VARIABLE] = "1"
    try:
        import torch
    finally:
        del os.environ[_VARIABLE]

__all__ = ["TRANSFORMERS", "device_of", "gpu_count", "torch"]


TRANSFORMERS = Lock()
"""Held while transformers creates a model: its defaults for new tensors apply to all threads."""


def gpu_count() -> int:
    """Return the number of GPUs that this build of PyTorch sees."""
    return torch.cuda.device_count() if torch.cuda.is_available() else 0


def device_of(model: str, placement: Placement) -> torch.device:
    """Return the device of an instance; raise if PyTorch does not see it."""
    if placement.kind != "gpu":
        return torch.device("cpu")
    count = gpu_count()
    if placement.device >= count:
        raise FailedPrecondition(
            f"model '{model}' asks for GPU {placement.device}, and PyTorch {torch.__version__} sees {count} here: install a "
            "PyTorch built for CUDA, check the driver, or say KIND_CPU in instance_group"
        )
    return torch.device("cuda", placement.device)
