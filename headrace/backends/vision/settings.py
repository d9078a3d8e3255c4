# SPDX-License-Identifier: Apache-2.0
"""What a model's configuration says to this backend.

parameters
  model_path              the Hugging Face folder, from the version's folder or absolute; the version's folder itself
                          unless told
  dtype                   float32, bfloat16 or float16: what the model computes with. Inputs and outputs stay FP32
  INTRA_OP_THREAD_COUNT   threads inside an operator; 1 unless told, 0 for all cores

Called by `backend`; knows no model.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from headrace.backends.contract import ModelFiles
from headrace.backends.parameters import number_of
from headrace.core.errors import InvalidArgument
from headrace.models.config.types import ModelConfig

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


@dataclass(frozen=True, slots=True)
class Settings:
    """All of them, read and checked."""

    folder: Path
    dtype: Any = torch.float32
    """A `torch.dtype`."""
    threads: int = 1


def settings_of(config: ModelConfig, files: ModelFiles) -> Settings:
    """Read the parameters."""
    given = config.parameters
    dtype = given.get("dtype", "float32").lower()
    if dtype not in _DTYPES:
        raise InvalidArgument(f"parameter dtype is '{dtype[:32]}': use float32, bfloat16 or float16")
    return Settings(
        # A path that is absolute stays as it is.
        folder=files.version_folder / given.get("model_path", "."),
        dtype=_DTYPES[dtype],
        threads=number_of(given, "INTRA_OP_THREAD_COUNT", 1, 1024) or (os.cpu_count() or 1),
    )
