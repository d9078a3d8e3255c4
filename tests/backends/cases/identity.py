# SPDX-License-Identifier: Apache-2.0
"""The model without a model."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from case import Arrays, Case

CONFIG = """backend: "identity"
max_batch_size: 8
input [ { name: "NUMBERS" data_type: TYPE_FP32 dims: [ 4 ] }, { name: "WORDS" data_type: TYPE_STRING dims: [ -1 ] } ]
output [ { name: "N" data_type: TYPE_FP32 dims: [ 4 ] }, { name: "W" data_type: TYPE_STRING dims: [ -1 ] } ]
dynamic_batching { }
"""


def write(folder: Path) -> None:
    (folder / "1").mkdir()
    (folder / "config.pbtxt").write_text(CONFIG)


def inputs(rows: int, seed: int) -> Arrays:
    words = np.array([[f"{seed}.{row}".encode(), b""] for row in range(rows)], dtype=object)
    return {"NUMBERS": np.random.default_rng(seed).random((rows, 4), np.float32), "WORDS": words}


def expected(given: Arrays) -> Arrays:
    return {"N": given["NUMBERS"], "W": given["WORDS"]}


CASES = [Case("identity_two", write, inputs, expected, "", tolerance=0)]
