# SPDX-License-Identifier: Apache-2.0
"""The fake of `cuda.bindings.utils`."""

from __future__ import annotations

from typing import Any


def get_cuda_native_handle(made: Any) -> int:
    """The address of a CUDA object."""
    return int(made.handle)
