# SPDX-License-Identifier: Apache-2.0
"""One model of a backend, for the suite that every backend passes (`test_backend_contract.py`).

Each module of `cases/` has a `CASES: list[Case]`: a model that batches first, then what else the backend has of its own.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy.typing as npt

Arrays = Mapping[str, npt.NDArray[Any]]


@dataclass(frozen=True)
class Case:
    """How to make a model, and what it must answer."""

    name: str
    """Of the case and of the model: `<backend>_<what>`."""
    write: Callable[[Path], None]
    """Writes the model's folder, `config.pbtxt` and `1/`, into the empty folder it is given."""
    inputs: Callable[[int, int], Arrays]
    """The inputs of so many rows, different for each seed: `inputs(rows, seed)`. Without batch, rows is 1 and not seen."""
    expected: Callable[[Arrays], Arrays]
    """The outputs for them, by numpy or by the framework's own call: never by the code under test."""
    model_file: str
    """The file inside the version folder that the suite damages, cuts short and takes away; "" if the model has none."""
    batches: bool = True
    tolerance: float = 1e-5
    needs_config: bool = True
    """False: the backend tells the whole configuration itself, so the suite also serves it without `config.pbtxt`."""
    releases_gil: bool = True
    is_code: bool = False
    """The model's file is a program: what is wrong in it is told by its own error, with the line."""
