# SPDX-License-Identifier: Apache-2.0
"""The short way for the usual item: a line with one list of numbers, for a model of tensors with one such input.

Called by `running`, `asking` and `ledger`. Here, what an item costs is a parsed line and packed numbers; everything else is
done for a block of them, which becomes one request and one text of results. Whatever is unusual about a line, right or
wrong, is left to the long way, which tells items apart; so both ways write the same results, letter for letter.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

import numpy as np
import numpy.typing as npt
import orjson

from headrace.jobs.batch.sources import LINE_BYTES

T = TypeVar("T")

_BLOCKS_AT_ONCE = 4
_BYTES_AT_ONCE = 1024 * 1024
_OPTIONS = orjson.OPT_SERIALIZE_NUMPY
Id = str | int | None
Rows = list[bytes] | npt.NDArray[Any]
"""The numbers of each item, packed, or a row of an array."""


@dataclass(frozen=True, slots=True)
class PlainInput:
    """The one input of a model: a list of so many numbers."""

    name: str
    width: int
    dtype: np.dtype[Any]
    pack: Callable[..., bytes]


@dataclass(slots=True)
class Block:
    """Items that go together."""

    indices: Sequence[int]
    ids: list[Id]
    rows: Rows


@dataclass(slots=True)
class Chunk(Generic[T]):
    """Items that were read at one go."""

    blocks: list[Block] = field(default_factory=list)
    others: list[T] = field(default_factory=list)
    """Those for the long way."""


@dataclass(frozen=True, slots=True)
class BlockResult:
    """What came of a block: a row of each array for each item."""

    indices: Sequence[int]
    ids: list[Id]
    arrays: Mapping[str, Any]


def read_blocks(
    entries: Iterator[tuple[int, tuple[int, bytes]]],
    plain: PlainInput,
    size: int,
    read: Callable[[int, Any], T],
) -> Iterator[Chunk[T]]:
    """Lines with their indices as blocks of `size`; `read` is the long way."""
    name, width, pack, loads = plain.name, plain.width, plain.pack, orjson.loads
    chunk: Chunk[T] = Chunk()
    indices: list[int] = []
    ids: list[Id] = []
    rows: list[bytes] = []
    most, come = size * _BLOCKS_AT_ONCE, 0
    for index, entry in entries:
        number, line = entry
        come += len(line)
        row = given = None
        # True and false are packed as numbers, which they are not; the first line may begin with a byte order mark.
        if number > 1 and b"true" not in line and b"false" not in line and len(line) <= LINE_BYTES:
            try:
                value = loads(line)
                if len(value) == 2:
                    given = value.pop("id")
                values = value[name]
                if len(value) == 1 and type(values) is list and len(values) == width:
                    row = pack(*values)
            except (ValueError, KeyError, TypeError, AttributeError, struct.error, OverflowError):
                row = None
        if row is None or not (given is None or type(given) in (str, int)):
            chunk.others.append(read(index, entry))
        else:
            indices.append(index)
            ids.append(given)
            rows.append(row)
            if len(rows) == size:
                chunk.blocks.append(Block(indices, ids, rows))
                indices, ids, rows = [], [], []
        if len(chunk.others) >= size or len(chunk.blocks) * size >= most or come >= _BYTES_AT_ONCE:
            yield chunk
            chunk, come = Chunk(), 0
    if rows:
        chunk.blocks.append(Block(indices, ids, rows))
    if chunk.blocks or chunk.others:
        yield chunk


def is_plain(arrays: Mapping[str, Any]) -> bool:
    """Whether outputs can be written as a block: rows of numbers, each."""
    return bool(arrays) and all(
        array.ndim == 2 and array.shape[1] and array.dtype.kind in "fiu" and array.flags.c_contiguous
        for array in arrays.values()
    )


def lines_of(result: BlockResult) -> bytes:
    """The lines of a block, as `ledger` writes each. Raises TypeError for numbers that JSON cannot carry."""
    columns = [
        (orjson.dumps(name), orjson.dumps(array, option=_OPTIONS)[2:-2].split(b"],["))
        for name, array in result.arrays.items()
    ]
    ids = [b"null" if given is None else orjson.dumps(given) for given in result.ids]
    if len(columns) == 1:
        form = b'{"index":%%d,"id":%%b,"output":{"outputs":{%b:[%%b]}}}\n' % columns[0][0].replace(b"%", b"%%")
        return b"".join([form % each for each in zip(result.indices, ids, columns[0][1], strict=True)])
    outputs = [b",".join([b"%b:[%b]" % (name, rows[n]) for name, rows in columns]) for n in range(len(ids))]
    form = b'{"index":%d,"id":%b,"output":{"outputs":{%b}}}\n'
    return b"".join([form % each for each in zip(result.indices, ids, outputs, strict=True)])
