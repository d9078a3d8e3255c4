# SPDX-License-Identifier: Apache-2.0
"""Whether the indices of a decision tree stay inside it. Called for every tree of a file before a library walks it.

None of the libraries looks: an index past the end reads memory that is not theirs, and a circle never ends.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from headrace.backends.contract import Array


def check_tree(left: Array, right: Array, features: Array, nodes: int, columns: int) -> None:
    """Refuse, with a `ValueError`, what is no tree from node 0 down. The arrays are those of the nodes that split."""
    children = np.concatenate([left, right]).astype(np.int64)
    if children.size and (children.min() < 1 or children.max() >= nodes):
        raise ValueError("a node's child is not in the tree")
    # With one parent each, and none for the root, no way down can come back to where it was.
    if children.size and np.bincount(children).max() > 1:
        raise ValueError("two nodes have the same child")
    if features.size and (features.min() < 0 or features.max() >= columns):
        raise ValueError("a node splits by a column that the model does not have")


def whole_numbers(values: Any, count: int | None, low: int, high: int) -> Array:
    """Whole numbers of a list or array, so many of them and within the range, as 64 bits."""
    array = values if isinstance(values, np.ndarray) else np.array(values, dtype=None if values else np.int64)
    if array.ndim != 1 or array.dtype.kind not in "iu" or (count is not None and array.size != count):
        raise ValueError("a list of whole numbers has another type or length than it must")
    if array.size and (array.min() < low or array.max() > high):
        raise ValueError(f"a number is not between {low} and {high}")
    return array.astype(np.int64)
