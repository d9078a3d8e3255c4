# SPDX-License-Identifier: Apache-2.0
"""Finished results as a Parquet file, by pyarrow. Called by `delivering`.

`index`, `id`, what the model gave, `error_code`, `error_message`. A model of tensors has a column for each output, of its
own type; whatever else models answer is one column `output`, of JSON, and so are outputs whose types nobody declares.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import orjson

from headrace.core.dtypes import BF16, BOOL, BYTES, DType
from headrace.core.limits import MIB
from headrace.jobs.batch.blocks import BlockResult
from headrace.jobs.batch.packing import is_packed, unpack
from headrace.jobs.batch.parquet import pyarrow_for

log = logging.getLogger("headrace.batch")

_ROWS = 65_536
_BYTES = 64 * MIB
"""Of lines, that become one group of rows."""
_OUTPUT = "output"
_OURS = ("index", "id", _OUTPUT, "error_code", "error_message")
Record = Mapping[str, Any]


def write_parquet(records: Path, target: Path, outputs: Mapping[str, DType | None] | None = None) -> None:
    """Write the file from lines of the ledger. All of it or none."""
    arrow = pyarrow_for(f"the output {target.name}")
    fresh = target.with_name(f".{target.name}.new")
    try:
        try:
            _write(arrow, records, fresh, _form(arrow, records, outputs))
        except (arrow.ArrowInvalid, arrow.ArrowTypeError, TypeError, ValueError, OverflowError) as error:
            log.warning("%s: the outputs do not keep to their types, and are written as JSON: %s", target, error)
            _write(arrow, records, fresh, _form(arrow, records, None))
        with fresh.open("rb") as written:
            os.fsync(written.fileno())
        fresh.replace(target)
    finally:
        fresh.unlink(missing_ok=True)


@dataclass(frozen=True, slots=True)
class _Form:
    """The columns of a file."""

    schema: Any
    outputs: Mapping[str, str]
    """By their columns; none where there is one column for all."""


def _form(arrow: Any, records: Path, outputs: Mapping[str, DType | None] | None) -> _Form:
    """How deep an output's lists are, the first result tells."""
    text = arrow.string()
    typed = {}
    if outputs and None not in outputs.values():
        first = next(_results(records), {})
        for name, dtype in outputs.items():
            typed[name] = _value_type(arrow, dtype)
            for _ in range(_depth(first.get(name, [0]))):
                typed[name] = arrow.list_(typed[name])
    columns = {f"{_OUTPUT}_{name}" if name in _OURS else name: name for name in typed}
    given = [(column, typed[name]) for column, name in columns.items()] or [(_OUTPUT, text)]
    fields = [("index", arrow.int64()), ("id", text), *given, ("error_code", text), ("error_message", text)]
    return _Form(arrow.schema(fields), columns)


def _value_type(arrow: Any, dtype: DType | None) -> Any:
    if dtype is BYTES:
        return arrow.string()
    if dtype is BF16:
        return arrow.float32()  # as `computing` gives it
    return arrow.bool_() if dtype is BOOL else arrow.from_numpy_dtype(dtype.numpy if dtype else np.dtype("f4"))


def _results(records: Path) -> Iterator[Mapping[str, Any]]:
    """What the model gave for an item, one after the other."""
    for _, record in _read(records):
        if is_packed(record):
            yield {name: array[0] for name, array in unpack(record).arrays.items()}
        elif "outputs" in record.get(_OUTPUT, ()):
            yield record[_OUTPUT]["outputs"]


def _depth(values: Any) -> int:
    if isinstance(values, np.ndarray):
        return values.ndim
    return 1 + _depth(values[0] if values else 0) if isinstance(values, list) else 0


def _write(arrow: Any, records: Path, path: Path, form: _Form) -> None:
    # Looking for numbers that come again takes longer than writing them.
    texts = [name for name in form.schema.names if name not in form.outputs]
    with arrow.parquet.ParquetWriter(str(path), form.schema, use_dictionary=texts) as writer:
        for group in _groups(_read(records)):
            parts = [
                _of_blocks(arrow, form, [unpack(each) for each in alike])
                if packed
                else arrow.RecordBatch.from_pylist([_row(each, form) for each in alike], schema=form.schema)
                for packed, alike in _alike(group)
            ]
            writer.write_table(arrow.Table.from_batches(parts, schema=form.schema).combine_chunks())


def _read(records: Path) -> Iterator[tuple[int, Record]]:
    """The size of each line, and what it says."""
    with records.open("rb") as file:
        for line in file:
            yield len(line), orjson.loads(line)


def _groups(lines: Iterable[tuple[int, Record]]) -> Iterator[list[Record]]:
    """Lines that become a group of rows."""
    group: list[Record] = []
    rows = size = 0
    for length, record in lines:
        group.append(record)
        rows += record.get("count", 1)
        size += length
        if rows >= _ROWS or size >= _BYTES:
            yield group
            group, rows, size = [], 0, 0
    if group:
        yield group


def _alike(records: Sequence[Record]) -> Iterator[tuple[bool, list[Record]]]:
    """Runs of blocks whose arrays are alike, and of single items."""
    run: list[Record] = []
    before: Any = None
    for record in records:
        kind = [(name, said[0], said[1]) for name, said in record["outputs"].items()] if is_packed(record) else None
        if run and kind != before:
            yield before is not None, run
            run = []
        run.append(record)
        before = kind
    if run:
        yield before is not None, run


def _of_blocks(arrow: Any, form: _Form, blocks: Sequence[BlockResult]) -> Any:
    """Blocks as columns, without a look at a single number."""
    indices = np.concatenate([_numbers(block.indices) for block in blocks])
    ids = [None if given is None else str(given) for block in blocks for given in block.ids]
    arrays = {name: np.concatenate([block.arrays[name] for block in blocks]) for name in blocks[0].arrays}
    nothing = arrow.nulls(len(indices), arrow.string())
    made = {"index": indices, "id": ids, "error_code": nothing, "error_message": nothing}
    if form.outputs:
        made |= {column: _lists(arrow, arrays[name]) for column, name in form.outputs.items()}
    else:
        made[_OUTPUT] = _texts(arrays)
    return arrow.RecordBatch.from_pydict(made, schema=form.schema)


def _numbers(indices: Sequence[int]) -> Any:
    if isinstance(indices, range):
        return np.arange(indices.start, indices.stop, dtype=np.int64)
    return np.asarray(indices, np.int64)


def _lists(arrow: Any, array: Any) -> Any:
    """An array with a row for each item as lists of lists."""
    made = arrow.array(array.reshape(-1))
    for axis in range(array.ndim - 1, 0, -1):
        count = int(np.prod(array.shape[:axis]))
        offsets = np.arange(count + 1, dtype=np.int64) * array.shape[axis]
        made = arrow.ListArray.from_arrays(arrow.array(offsets.astype(np.int32)), made)
    return made


def _texts(arrays: Mapping[str, Any]) -> list[str]:
    count = len(next(iter(arrays.values())))
    rows = ({"outputs": {name: array[n] for name, array in arrays.items()}} for n in range(count))
    return [orjson.dumps(row, option=orjson.OPT_SERIALIZE_NUMPY).decode() for row in rows]


def _row(record: Record, form: _Form) -> dict[str, Any]:
    """An item that has a line for itself."""
    error = record.get("error") or {}
    given = record.get("id")
    row = {
        "index": record["index"],
        "id": None if given is None else str(given),
        "error_code": error.get("code"),
        "error_message": error.get("message"),
    }
    if _OUTPUT in record and form.outputs:
        row |= {column: record[_OUTPUT]["outputs"].get(name) for column, name in form.outputs.items()}
    elif _OUTPUT in record:
        row[_OUTPUT] = orjson.dumps(record[_OUTPUT]).decode()
    return row
