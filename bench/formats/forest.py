# SPDX-License-Identifier: Apache-2.0
"""The forests of the tabular formats: training data, size, and the row of a request.

A few trees are trained, and the file has them many times over: as large as a real one, and made in seconds.
"""

import numpy as np

from bench.formats import COLUMNS

LARGE_BYTES = 100_000_000
ROUNDS = 100
ROWS = 20_000
SEED = 1


def training() -> tuple[np.ndarray, np.ndarray]:
    """Rows and what is to be learned of them: enough noise that the trees grow."""
    random = np.random.default_rng(2026)
    rows = random.random((ROWS, COLUMNS), dtype=np.float32)
    return rows, rows[:, 0] * rows[:, 1] + random.standard_normal(ROWS).astype(np.float32)


def asked() -> np.ndarray:
    """The row that the workload sends: see Workload.numbers."""
    return np.random.default_rng(SEED).random((1, COLUMNS), dtype=np.float32)
