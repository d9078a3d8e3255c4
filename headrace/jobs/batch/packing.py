# SPDX-License-Identifier: Apache-2.0
"""A block of results in one line, for what becomes a Parquet file: its numbers as they are, not as text.

Called by `ledger` and `parquet_results`.

    {"first": 0, "count": 64, "ids": null, "outputs": {"Y": ["<f4", [8], "<base64>"]}}

`indices` names all items where some are left out between; for each output there are the numpy type, the shape of one item
and the bytes of all. NaN and infinities are kept, which JSON would lose.
"""

from __future__ import annotations

import base64
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import orjson

from headrace.jobs.batch.blocks import BlockResult

_LARGEST_ITEM = 8
"""Bytes of a number. Longer ones are of this machine's own making, and neither JSON nor Parquet has them."""


def can_pack(arrays: Mapping[str, Any]) -> bool:
    """Whether all outputs are numbers with a row for each item."""
    return bool(arrays) and all(
        isinstance(array, np.ndarray)
        and array.ndim > 1
        and array.dtype.kind in "fiu"
        and array.dtype.itemsize <= _LARGEST_ITEM
        for array in arrays.values()
    )


def pack(result: BlockResult) -> bytes:
    """The line."""
    indices = result.indices
    first, count = indices[0], len(indices)
    record = {
        "first": first,
        "count": count,
        **({} if indices[-1] - first + 1 == count else {"indices": list(indices)}),
        "ids": None if result.ids.count(None) == len(result.ids) else result.ids,
        "outputs": {name: _packed(array) for name, array in result.arrays.items()},
    }
    return orjson.dumps(record, option=orjson.OPT_APPEND_NEWLINE)


def unpack(record: Mapping[str, Any]) -> BlockResult:
    """From what a line says. Raises ValueError, TypeError or KeyError if it was not written by `pack`."""
    first, count = record["first"], record["count"]
    indices: Sequence[int] = record.get("indices") or range(first, first + count)
    ids = record["ids"] or [None] * count
    return BlockResult(indices, ids, {name: _array(count, *said) for name, said in record["outputs"].items()})


def is_packed(record: Mapping[str, Any]) -> bool:
    """Whether a record is of many items."""
    return "count" in record


def _packed(array: Any) -> list[Any]:
    little = array.astype(array.dtype.newbyteorder("<"), copy=False)
    return [little.dtype.str, list(array.shape[1:]), base64.b64encode(little.tobytes()).decode()]


def _array(count: int, dtype: str, shape: list[int], content: str) -> Any:
    return np.frombuffer(base64.b64decode(content), dtype).reshape(count, *shape)
