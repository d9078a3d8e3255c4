# SPDX-License-Identifier: Apache-2.0
"""A `model.py` that is one function or one class, with type hints in place of a configuration."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
from case import Arrays, Case

# Half of each ends inside the docstring, and is no Python.
HEAD = f'''"""A model.
{"It says so at length. " * 60}
"""
from typing import Annotated, TypedDict
import numpy as np
import numpy.typing as npt
Row = Annotated[npt.NDArray[np.float32], (4,)]
'''
FUNCTION = """
BATCH = 8
def predict(a: Row, b: Row) -> Row:
    return a - b
"""
CLASS = """
class Out(TypedDict):
    total: float
    text: str
class Model:
    def __init__(self):
        self.factor = 2.0
    def predict(self, values: list[float], name: str) -> Out:
        return {"total": sum(values) * self.factor, "text": f"{name}!"}
"""


def writer(source: str) -> Callable[[Path], None]:
    def write(folder: Path) -> None:
        (folder / "1").mkdir()
        (folder / "config.pbtxt").write_text('backend: "python"\n')
        (folder / "1" / "model.py").write_text(HEAD + source)

    return write


def rows(count: int, seed: int) -> Arrays:
    random = np.random.default_rng(seed)
    return {name: random.integers(-9, 9, (count, 4)).astype(np.float32) for name in "ab"}


def values(_: int, seed: int) -> Arrays:
    random = np.random.default_rng(seed)
    return {
        "values": random.integers(-9, 9, 3).astype(np.float64),
        "name": np.array([b"model %d" % seed], dtype=object),
    }


def difference(given: Arrays) -> Arrays:
    return {"output": given["a"] - given["b"]}


def total(given: Arrays) -> Arrays:
    return {"total": given["values"].sum(keepdims=True) * 2, "text": np.array([given["name"][0] + b"!"], dtype=object)}


CASES = [
    Case(
        "quick_function", writer(FUNCTION), rows, difference, "model.py", tolerance=0, needs_config=False, is_code=True
    ),
    Case("quick_class", writer(CLASS), values, total, "model.py", batches=False, needs_config=False, is_code=True),
]
