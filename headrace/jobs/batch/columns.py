# SPDX-License-Identifier: Apache-2.0
"""The short way (`blocks`) for columns: rows of a Parquet file as blocks, without a Python object for each number.

Called by `running`, with what `parquet` reads. A part of the file with anything unusual in it, right or wrong, is left to
the long way as a whole.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

from headrace.jobs.batch.blocks import Block, Chunk, Id, PlainInput

T = TypeVar("T")
_ID = "id"


def read_columns(
    parts: Iterable[tuple[int, Any]],
    plain: PlainInput,
    size: int,
    wanted: Callable[[int], bool] | None,
    read: Callable[[int, Any], T],
) -> Iterator[Chunk[T]]:
    """Parts of a table (pyarrow's RecordBatch), each with the index of its first row, as blocks of `size`.

    `wanted`: which rows, if not all. `read`: the long way.
    """
    for first, rows in parts:
        indices: Sequence[int] = range(first, first + rows.num_rows)
        part = rows
        if wanted is not None:
            indices = [index for index in indices if wanted(index)]
            if not indices:
                continue
            part = rows.take([index - first for index in indices])
        matrix, ids = _matrix(part, plain), _ids(part)
        if matrix is None or ids is None:
            yield Chunk(others=[read(index, row) for index, row in zip(indices, part.to_pylist(), strict=True)])
            continue
        starts = range(0, len(indices), size)
        yield Chunk([Block(indices[at : at + size], ids[at : at + size], matrix[at : at + size]) for at in starts])


def _matrix(part: Any, plain: PlainInput) -> npt.NDArray[Any] | None:
    """A row of numbers for each item, as the model takes them; None if one of them is anything else."""
    if set(part.schema.names) not in ({plain.name}, {plain.name, _ID}) or len(part.schema.names) > 2:
        return None
    column = part.column(plain.name)
    if column.null_count or not (hasattr(column, "flatten") and hasattr(column.type, "value_type")):
        return None  # no lists
    values = column.flatten()
    if values.null_count or len(values) != plain.width * len(column) or not _all_of(column, plain.width):
        return None
    return _converted(values, plain.dtype, (len(column), plain.width))


def _all_of(column: Any, width: int) -> bool:
    """Whether each list of a column has so many values."""
    offsets = getattr(column, "offsets", None)  # lists of a fixed size have none
    return offsets is None or bool((np.diff(offsets.to_numpy()) == width).all())


def _converted(values: Any, dtype: np.dtype[Any], shape: tuple[int, int]) -> npt.NDArray[Any] | None:
    """As packing each value would have it; None where that would fail."""
    try:
        given = values.to_numpy(zero_copy_only=False)
    except (ValueError, NotImplementedError, TypeError):
        return None  # structures, texts
    if given.dtype.kind not in ("iu" if dtype.kind in "iu" else "fiu"):
        return None
    if dtype.kind in "iu" and given.size:
        limits = np.iinfo(dtype)
        if int(given.min()) < limits.min or int(given.max()) > limits.max:
            return None
    with np.errstate(over="ignore", invalid="ignore"):
        made = np.ascontiguousarray(given, dtype)
    if dtype.kind == "f" and np.isinf(made).any() and not np.isinf(given[np.isinf(made)]).all():
        return None
    return made.reshape(shape)


def _ids(part: Any) -> list[Id] | None:
    """What items are called; None if that is neither a text nor a whole number."""
    if _ID not in part.schema.names:
        return [None] * int(part.num_rows)
    ids = part.column(_ID).to_pylist()
    return ids if all(each is None or type(each) in (str, int) for each in ids) else None
