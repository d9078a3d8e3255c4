# SPDX-License-Identifier: Apache-2.0
"""Import PyTorch with a bounded number of threads; its devices, and what keeps its and transformers' global state whole."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from threading import Lock, RLock
from typing import TypeVar

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

__all__ = ["TRANSFORMERS", "device_of", "gpu_count", "run_once", "torch"]

T = TypeVar("T")
_ONCE = RLock()

TRANSFORMERS = Lock()
"""Held while transformers creates a model: its defaults for new tensors apply to all threads."""


def run_once(function: Callable[[], T]) -> Callable[[], T]:
    """Decorate a function that registers something with PyTorch: it runs once, also if several threads load models.

    An operator that is registered twice is not usable. `functools.cache` alone lets threads run the function side by side.
    """
    cached = functools.cache(function)

    @functools.wraps(function)
    def call() -> T:
        with _ONCE:
            return cached()

    return call


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
