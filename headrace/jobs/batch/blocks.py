# SPDX-License-Identifier: Apache-2.0
"""Blocks: the fast path for items that are one list of numbers, for a tensor model with one such input.

An item costs a parsed line and packed numbers; everything else is done per block, which becomes one request and one piece of
results. An unusual line, valid or not, takes the slow path, which handles items one by one; both paths write identical
results. Rows of a Parquet file become blocks without a Python object per number; a part of the file with anything unusual
takes the slow path as a whole.

A packed block is one line of a results file that becomes Parquet, with binary numbers:

    {"first": 0, "count": 64, "ids": null, "outputs": {"Y": ["<f4", [8], "<base64>"]}}

`indices` lists all items if there are gaps; each output has the numpy type, the shape of one item and the bytes of all. NaN
and infinities are kept, which JSON would lose.
"""

from __future__ import annotations

import base64
import struct
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

import numpy as np
import numpy.typing as npt
import orjson

from headrace.jobs.batch.sources import LINE_BYTES

T = TypeVar("T")

_BLOCKS_PER_CHUNK = 4
_BYTES_PER_CHUNK = 1024 * 1024
_OPTIONS = orjson.OPT_SERIALIZE_NUMPY
Id = str | int | None
Rows = list[bytes] | npt.NDArray[Any]
"""Packed numbers per item, or an array with a row per item."""

_ID_COLUMN = "id"
_MAX_NUMBER_BYTES = 8
"""Maximum size of a number; neither JSON nor Parquet has longer ones."""


@dataclass(frozen=True, slots=True)
class PlainInput:
    """The only input of a model: a list of `width` numbers."""

    name: str
    width: int
    dtype: np.dtype[Any]
    pack: Callable[..., bytes]


@dataclass(slots=True)
class Block:
    """Items that share a request."""

    indices: Sequence[int]
    ids: list[Id]
    rows: Rows


@dataclass(slots=True)
class Chunk(Generic[T]):
    """Items that were read together."""

    blocks: list[Block] = field(default_factory=list)
    others: list[T] = field(default_factory=list)
    """Items for the slow path."""


@dataclass(frozen=True, slots=True)
class BlockResult:
    """The outputs of a block: arrays with a row per item."""

    indices: Sequence[int]
    ids: list[Id]
    arrays: Mapping[str, Any]


def read_blocks(
    entries: Iterator[tuple[int, tuple[int, bytes]]],
    plain: PlainInput,
    size: int,
    read: Callable[[int, Any], T],
) -> Iterator[Chunk[T]]:
    """Read lines as blocks of `size`; `read` is the slow path."""
    name, width, pack, loads = plain.name, plain.width, plain.pack, orjson.loads
    chunk: Chunk[T] = Chunk()
    indices: list[int] = []
    ids: list[Id] = []
    rows: list[bytes] = []
    max_rows, size_read = size * _BLOCKS_PER_CHUNK, 0
    for index, entry in entries:
        number, line = entry
        size_read += len(line)
        row = item_id = None
        # `pack` would accept true and false as numbers; the first line may start with a byte order mark.
        if number > 1 and b"true" not in line and b"false" not in line and len(line) <= LINE_BYTES:
            try:
                value = loads(line)
                if len(value) == 2:
                    item_id = value.pop("id")
                values = value[name]
                if len(value) == 1 and type(values) is list and len(values) == width:
                    row = pack(*values)
            except (ValueError, KeyError, TypeError, AttributeError, struct.error, OverflowError):
                row = None
        if row is None or not (item_id is None or type(item_id) in (str, int)):
            chunk.others.append(read(index, entry))
        else:
            indices.append(index)
            ids.append(item_id)
            rows.append(row)
            if len(rows) == size:
                chunk.blocks.append(Block(indices, ids, rows))
                indices, ids, rows = [], [], []
        if len(chunk.others) >= size or len(chunk.blocks) * size >= max_rows or size_read >= _BYTES_PER_CHUNK:
            yield chunk
            chunk, size_read = Chunk(), 0
    if rows:
        chunk.blocks.append(Block(indices, ids, rows))
    if chunk.blocks or chunk.others:
        yield chunk


def is_plain(arrays: Mapping[str, Any]) -> bool:
    """Return whether all outputs are rows of numbers, which can be written as a block."""
    return bool(arrays) and all(
        array.ndim == 2 and array.shape[1] and array.dtype.kind in "fiu" and array.flags.c_contiguous
        for array in arrays.values()
    )


def lines_of(result: BlockResult) -> bytes:
    """Return the result lines of a block. Raises TypeError for numbers that JSON does not have."""
    columns = [
        (orjson.dumps(name), orjson.dumps(array, option=_OPTIONS)[2:-2].split(b"],["))
        for name, array in result.arrays.items()
    ]
    ids = [b"null" if item_id is None else orjson.dumps(item_id) for item_id in result.ids]
    if len(columns) == 1:
        template = b'{"index":%%d,"id":%%b,"output":{"outputs":{%b:[%%b]}}}\n' % columns[0][0].replace(b"%", b"%%")
        return b"".join([template % values for values in zip(result.indices, ids, columns[0][1], strict=True)])
    outputs = [b",".join([b"%b:[%b]" % (name, rows[n]) for name, rows in columns]) for n in range(len(ids))]
    template = b'{"index":%d,"id":%b,"output":{"outputs":{%b}}}\n'
    return b"".join([template % values for values in zip(result.indices, ids, outputs, strict=True)])


def read_columns(
    parts: Iterable[tuple[int, Any]],
    plain: PlainInput,
    size: int,
    is_wanted: Callable[[int], bool] | None,
    read: Callable[[int, Any], T],
) -> Iterator[Chunk[T]]:
    """Read record batches of pyarrow, each with the index of its first row, as blocks of `size`.

    `is_wanted`: selects rows, if not all. `read`: the slow path.
    """
    for first, rows in parts:
        indices: Sequence[int] = range(first, first + rows.num_rows)
        part = rows
        if is_wanted is not None:
            indices = [index for index in indices if is_wanted(index)]
            if not indices:
                continue
            part = rows.take([index - first for index in indices])
        matrix, ids = _matrix(part, plain), _column_ids(part)
        if matrix is None or ids is None:
            yield Chunk(others=[read(index, row) for index, row in zip(indices, part.to_pylist(), strict=True)])
            continue
        starts = range(0, len(indices), size)
        yield Chunk(
            [
                Block(indices[offset : offset + size], ids[offset : offset + size], matrix[offset : offset + size])
                for offset in starts
            ]
        )


def _matrix(part: Any, plain: PlainInput) -> npt.NDArray[Any] | None:
    """Return the input as an array with a row per item; None if anything is unusual."""
    if set(part.schema.names) not in ({plain.name}, {plain.name, _ID_COLUMN}) or len(part.schema.names) > 2:
        return None
    column = part.column(plain.name)
    if column.null_count or not (hasattr(column, "flatten") and hasattr(column.type, "value_type")):
        return None  # not a column of lists
    values = column.flatten()
    if values.null_count or len(values) != plain.width * len(column) or not _has_width(column, plain.width):
        return None
    return _converted(values, plain.dtype, (len(column), plain.width))


def _has_width(column: Any, width: int) -> bool:
    """Return whether each list of a column has `width` values."""
    offsets = getattr(column, "offsets", None)  # lists of a fixed size have none
    return offsets is None or bool((np.diff(offsets.to_numpy()) == width).all())


def _converted(values: Any, dtype: np.dtype[Any], shape: tuple[int, int]) -> npt.NDArray[Any] | None:
    """Convert values as packing would; None if packing would fail."""
    try:
        array = values.to_numpy(zero_copy_only=False)
    except (ValueError, NotImplementedError, TypeError):
        return None  # structs, strings
    if array.dtype.kind not in ("iu" if dtype.kind in "iu" else "fiu"):
        return None
    if dtype.kind in "iu" and array.size:
        limits = np.iinfo(dtype)
        if int(array.min()) < limits.min or int(array.max()) > limits.max:
            return None
    with np.errstate(over="ignore", invalid="ignore"):
        converted = np.ascontiguousarray(array, dtype)
    if dtype.kind == "f" and np.isinf(converted).any() and not np.isinf(array[np.isinf(converted)]).all():
        return None
    return converted.reshape(shape)


def _column_ids(part: Any) -> list[Id] | None:
    """Return the ids of items; None if one is neither a string nor an integer."""
    if _ID_COLUMN not in part.schema.names:
        return [None] * int(part.num_rows)
    ids = part.column(_ID_COLUMN).to_pylist()
    return ids if all(item_id is None or type(item_id) in (str, int) for item_id in ids) else None


def can_pack(arrays: Mapping[str, Any]) -> bool:
    """Return whether all outputs are numbers with a row per item."""
    return bool(arrays) and all(
        isinstance(array, np.ndarray)
        and array.ndim > 1
        and array.dtype.kind in "fiu"
        and array.dtype.itemsize <= _MAX_NUMBER_BYTES
        for array in arrays.values()
    )


def pack(result: BlockResult) -> bytes:
    """Return a block as one line."""
    indices = result.indices
    first, count = indices[0], len(indices)
    record = {
        "first": first,
        "count": count,
        **({} if indices[-1] - first + 1 == count else {"indices": list(indices)}),
        "ids": None if result.ids.count(None) == len(result.ids) else result.ids,
        "outputs": {name: _pack_array(array) for name, array in result.arrays.items()},
    }
    return orjson.dumps(record, option=orjson.OPT_APPEND_NEWLINE)


def unpack(record: Mapping[str, Any]) -> BlockResult:
    """Restore a block from a line. Raises ValueError, TypeError or KeyError for invalid content."""
    first, count = record["first"], record["count"]
    indices: Sequence[int] = record.get("indices") or range(first, first + count)
    ids = record["ids"] or [None] * count
    return BlockResult(
        indices, ids, {name: _unpack_array(count, *packed) for name, packed in record["outputs"].items()}
    )


def is_packed(record: Mapping[str, Any]) -> bool:
    """Return whether a record is a packed block."""
    return "count" in record


def _pack_array(array: Any) -> list[Any]:
    little = array.astype(array.dtype.newbyteorder("<"), copy=False)
    return [little.dtype.str, list(array.shape[1:]), base64.b64encode(little.tobytes()).decode()]


def _unpack_array(count: int, dtype: str, shape: list[int], content: str) -> Any:
    return np.frombuffer(base64.b64decode(content), dtype).reshape(count, *shape)
