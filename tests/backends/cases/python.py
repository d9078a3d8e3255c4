# SPDX-License-Identifier: Apache-2.0
"""Models in Python, each instance in a process of its own."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from case import Arrays, Case

CONFIG = """backend: "python"
max_batch_size: 8
input [ { name: "A" data_type: TYPE_FP32 dims: [ 4 ] }, { name: "B" data_type: TYPE_FP32 dims: [ 4 ] } ]
output [ { name: "SUM" data_type: TYPE_FP32 dims: [ 4 ] }, { name: "TEXT" data_type: TYPE_STRING dims: [ 1 ] } ]
dynamic_batching { }
"""

# Half of it ends inside the docstring, and is no Python.
MODEL = f'''"""Adds two inputs, row by row.
{"It says so at length. " * 50}
"""
import numpy as np
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def execute(self, requests):
        return [self.answer(request) for request in requests]

    def answer(self, request):
        a, b = (pb_utils.get_input_tensor_by_name(request, name).as_numpy() for name in "AB")
        text = np.array([[b"%.3f" % row.sum()] for row in a + b], dtype=object)
        return pb_utils.InferenceResponse([pb_utils.Tensor("SUM", a + b), pb_utils.Tensor("TEXT", text)])
'''


def write(folder: Path) -> None:
    (folder / "1").mkdir()
    (folder / "config.pbtxt").write_text(CONFIG)
    (folder / "1" / "model.py").write_text(MODEL)


def inputs(rows: int, seed: int) -> Arrays:
    random = np.random.default_rng(seed)
    return {name: random.integers(-9, 9, (rows, 4)).astype(np.float32) for name in "AB"}


def expected(given: Arrays) -> Arrays:
    total = given["A"] + given["B"]
    return {"SUM": total, "TEXT": np.array([[b"%.3f" % row.sum()] for row in total], dtype=object)}


CASES = [Case("python_sum", write, inputs, expected, "model.py", tolerance=0, is_code=True)]
